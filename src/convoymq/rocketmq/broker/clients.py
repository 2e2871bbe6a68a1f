"""Clients of a broker: producers and consumers by group, as their heartbeats say. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq import filters
from convoymq.rocketmq.broker.values import (
    BROADCASTING,
    CLUSTERING,
    CONSUME_PASSIVELY,
    ConsumerData,
    SubscriptionData,
)
from convoymq.rocketmq.store.types import Matches

Channel: TypeAlias = Hashable
"""A connection."""


@dataclass(slots=True)
class Client:
    """One client of a group, on one connection."""

    channel: Channel
    id: str
    language: int
    version: int
    heard_ms: int = 0


class Subscription:
    """Subscription of a group to a topic, with its filter.

    `fault` says why there is no filter: the expression cannot be read.
    """

    __slots__ = ("data", "fault", "is_tags", "matches")

    def __init__(self, data: SubscriptionData) -> None:
        self.data = data
        self.matches: Matches | None = None
        self.fault = ""
        self.is_tags = filters.is_tags(data.expression_type)
        if self.is_tags:
            self.matches = filters.by_tags(filters.codes_of(data.sub_string))
            return
        try:
            if data.expression_type != filters.SQL92:
                raise SyntaxFault(f"expressions of type {data.expression_type} are not known")
            self.matches = filters.by_expression(data.sub_string)
        except SyntaxFault as error:
            self.fault = error.text


@dataclass(slots=True)
class Consumers:
    """A group of consumers."""

    name: str
    consume_type: str = CONSUME_PASSIVELY
    model: str = CLUSTERING
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    members: dict[Channel, Client] = field(default_factory=dict)
    fingerprint: int = 0

    def ids(self) -> list[str]:
        """Returns the ids of its clients."""
        return [client.id for client in self.members.values()]

    def member(self, client_id: str) -> Client | None:
        """Returns a client by its id."""
        return next((c for c in self.members.values() if c.id == client_id), None)


class Clients:
    """See the module text.

    Args:
        changed: called with a group whose members or topics have changed: all of them are told.
    """

    def __init__(self, changed: Callable[[Consumers], None]) -> None:
        self.consumers: dict[str, Consumers] = {}
        self.producers: dict[str, dict[Channel, Client]] = {}
        self._changed = changed
        self._of_channel: dict[Channel, set[tuple[bool, str]]] = {}
        """The groups of a connection; True: of consumers."""

    # --- heartbeats ----------------------------------------------------------------------

    def register_producer(self, group: str, client: Client, now_ms: int) -> None:
        """Enters a producer, or hears of it again."""
        members = self.producers.setdefault(group, {})
        members.setdefault(client.channel, client).heard_ms = now_ms
        self._of_channel.setdefault(client.channel, set()).add((False, group))

    def register_consumer(
        self, data: ConsumerData, client: Client, now_ms: int, *, with_topics: bool, notify: bool
    ) -> None:
        """Enters a consumer, or hears of it again.

        Args:
            with_topics: the heartbeat says what it subscribes to.
            notify: the group's members are told of changes.
        """
        group = self.consumers.setdefault(data.group_name, Consumers(data.group_name))
        group.consume_type = data.consume_type
        group.model = data.message_model
        group.consume_from = data.consume_from_where
        known = group.members.get(client.channel)
        if known is None or known.id != client.id:
            group.members[client.channel] = client
        group.members[client.channel].heard_ms = now_ms
        self._of_channel.setdefault(client.channel, set()).add((True, data.group_name))
        is_changed = known is None
        if with_topics and self._subscribe(group, data.subscription_data_set):
            is_changed = True
        if is_changed and notify and group.model != BROADCASTING:
            self._changed(group)

    @staticmethod
    def _subscribe(group: Consumers, wanted: Iterable[SubscriptionData]) -> bool:
        """Enters what a group subscribes to; returns whether it has other topics now."""
        before = group.subscriptions.keys()
        after: dict[str, Subscription] = {}
        for data in wanted:
            known = group.subscriptions.get(data.topic)
            if known is None or data.sub_version > known.data.sub_version:
                known = Subscription(data)
            after[data.topic] = known
        is_changed = before != after.keys()
        group.subscriptions = after
        return is_changed

    # --- ends ----------------------------------------------------------------------------

    def unregister(self, channel: Channel, group: str, *, consumer: bool) -> None:
        """Forgets a client of a group."""
        groups = self._of_channel.get(channel)
        if groups is None or (consumer, group) not in groups:
            return
        groups.discard((consumer, group))
        if not groups:
            del self._of_channel[channel]
        self._remove(channel, group, consumer=consumer)

    def closed(self, channel: Channel) -> None:
        """A connection ended: its clients are gone."""
        for consumer, group in self._of_channel.pop(channel, ()):
            self._remove(channel, group, consumer=consumer)

    def _remove(self, channel: Channel, group: str, *, consumer: bool) -> None:
        if not consumer:
            members = self.producers[group]
            del members[channel]
            if not members:
                del self.producers[group]
            return
        found = self.consumers[group]
        del found.members[channel]
        if not found.members:
            del self.consumers[group]
        elif found.model != BROADCASTING:
            self._changed(found)

    def silent(self, before_ms: int) -> list[Channel]:
        """Returns connections with a client that was not heard of since then."""
        members = [group.members for group in self.consumers.values()]
        members += self.producers.values()
        return list({
            client.channel
            for clients in members for client in clients.values() if client.heard_ms < before_ms
        })  # fmt: skip

    # --- questions -----------------------------------------------------------------------

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Returns what a group wants of a topic."""
        found = self.consumers.get(group)
        return None if found is None else found.subscriptions.get(topic)

    def groups_of(self, topic: str) -> list[str]:
        """Returns groups of consumers that subscribe to a topic."""
        return [n for n, group in self.consumers.items() if topic in group.subscriptions]

    def producer(self, client_id: str) -> Client | None:
        """Returns a producer by its id."""
        return next((c for c in self._producers() if c.id == client_id), None)

    def any_producer(self, group: str) -> Client | None:
        """Returns a producer of a group, another one each time."""
        members = self.producers.get(group)
        if not members:
            return None
        channel, client = next(iter(members.items()))
        members[channel] = members.pop(channel)
        return client

    def _producers(self) -> Iterator[Client]:
        for members in self.producers.values():
            yield from members.values()
