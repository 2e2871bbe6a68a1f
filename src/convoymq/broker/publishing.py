"""Publishing, whatever the protocol: who may, and where messages go.

    exchange, keys, headers ─▶ Publishing ─▶ queues ─▶ client of each ─▶ its `target`: append
                                                              └─▶ `PublisherEvents`: confirms, flow

Nothing is called here for a message whose route the edge remembers: what was answered holds until
the route cache version moves. A message without queues is returned or dropped by its edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from convoymq.broker.access import Access
from convoymq.broker.alarms import Alarms
from convoymq.broker.local_queues import LocalQueues
from convoymq.messages.amqp091 import NO_PROPERTIES, Properties
from convoymq.metadata.machine import READS_AMQP_10_SINCE, MetadataMachine, QueueRecord, User
from convoymq.model.clock import Clock
from convoymq.model.errors import PreconditionFailed, Unavailable
from convoymq.model.refusals import (
    exchange_subject,
    partition_publish,
    queue_subject,
    vhost_missing,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.interface import Queue
from convoymq.queues.message_properties import check_order_key, check_served
from convoymq.routing.types import QueueType
from convoymq.topics.shell.refusals import OrderKeyMissing

if TYPE_CHECKING:
    from convoymq.broker.local_topics import LocalTopics
    from convoymq.broker.registry import MessageCounters
    from convoymq.broker.route_counts import RouteCounts
    from convoymq.broker.route_versions import RouteVersions
    from convoymq.topics.shell.handle import TopicHandle

REMEMBERED_MAX = 4096
"""Answers of `varies_by_message` that are remembered."""


class Route(NamedTuple):
    """Queues that a message goes to."""

    queues: tuple[Queue, ...]
    cacheable: bool
    """The same exchange and key lead there until the route cache version moves."""
    every_key: bool = False
    """So does every message of the exchange that has an order key; see `ordered_runs`."""


class Publishing:
    """Interface by which edges publish: routes by the node's copy of the tree. Is its
    `PublisherNode`, too."""

    def __init__(
        self,
        tree: MetadataMachine,
        local: LocalQueues,
        access: Access,
        clock: Clock,
        route_versions: RouteVersions,
        alarms: Alarms,
        counts: RouteCounts,
        topics: LocalTopics | None = None,
    ) -> None:
        self._tree = tree
        self._local = local
        self._access = access
        self._clock = clock
        self._route_versions = route_versions
        self._alarms = alarms
        self._counts = counts
        self._topics = topics
        self._varies: dict[tuple[str, str], tuple[int, bool]] = {}
        """(version of the virtual host, answer) of `varies_by_message`."""

    def check_write(
        self, user: User, vhost: str, exchange: str, routing_keys: Sequence[str]
    ) -> None:
        """Raises AccessRefused unless the user may publish to the exchange with these keys."""
        self._access.check_permission(user, vhost, "write", "exchange", exchange)
        if exchange and self._access.has_topic_permissions(user, vhost):
            for key in routing_keys:
                self._access.check_topic_permission(user, vhost, "write", exchange, key)

    @property
    def serves_encodings(self) -> bool:
        """Returns whether all nodes read messages of AMQP 1.0, and none of an older release is
        left, which would take them for damaged."""
        return self._tree.version >= READS_AMQP_10_SINCE

    def check_exchange(self, vhost: str, exchange: str) -> None:
        """Raises NotFound unless there is such an exchange, AccessRefused: it is internal."""
        place = self._tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        place.topology.exchange_for_publish(exchange)

    def route(
        self,
        vhost: str,
        exchange: str,
        routing_keys: Sequence[str],
        headers: Table | None,
        asked: str | None = None,
        properties: Properties = NO_PROPERTIES,
        *,
        keyed: bool = False,
    ) -> Route:
        """Returns where a message goes.

        Args:
            keyed: its headers, which are not given, have an order key.
            asked: the property by which the message asks for what only some queues do.
            properties: of the message, for exchanges that hash one.
        Raises:
            NotFound: there is no such exchange.
            AccessRefused: it is internal.
            PreconditionFailed: a queue does not do what the message asks for; none gets it then.
            OrderKeyMissing: a topic takes no message without an order key.
        """
        place = self._tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        topology = place.topology
        topology.exchange_for_publish(exchange)
        names, topics = topology.targets(
            exchange, routing_keys[0], headers or EMPTY, routing_keys[1:], properties, self
        )
        records = [place.queues[name] for name in names]
        for record in records:
            if record.type is QueueType.PARTITION:
                raise partition_publish(queue_subject(vhost, record.name))
        found = [self._queue(record) for record in records]
        queues = tuple(queue for queue in found if queue is not None)
        cacheable = not topology.varies_by_message(exchange)
        if not topics:
            check_served(asked, queues)
            return Route(queues, cacheable)
        handles = self._handles(vhost, topics, routing_keys, headers, keyed=keyed)
        queues += handles
        check_served(asked, queues)
        # Other messages without a routing key may have no order key at all.
        cacheable &= bool(routing_keys[0]) or not any(each.needs_key for each in handles)
        return Route(queues, cacheable, every_key=len(queues) == 1 and topics == [exchange])

    def _handles(
        self,
        vhost: str,
        topics: Sequence[str],
        routing_keys: Sequence[str],
        headers: Table | None,
        *,
        keyed: bool,
    ) -> tuple[TopicHandle, ...]:
        """Returns the topics that a message goes to, which has an order key for them. Raises
        PreconditionFailed, OrderKeyMissing."""
        assert self._topics is not None
        found = [self._topics.find(vhost, name) for name in topics]
        handles = tuple(handle for handle in found if handle is not None)
        for handle in handles:
            has_key = keyed or check_order_key(handle, routing_keys, headers)
            if not has_key and handle.needs_key:
                raise OrderKeyMissing(exchange_subject(vhost, handle.name))
        return handles

    def route_dead_letter(
        self,
        vhost: str,
        exchange: str,
        routing_keys: Sequence[str],
        headers: Table,
        properties: Properties,
    ) -> tuple[Queue, ...]:
        """See `DeadLetterRoutes`. An internal exchange may be one for dead letters."""
        place = self._tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        names, topics = place.topology.targets(
            exchange, routing_keys[0], headers, routing_keys[1:], properties, self
        )
        records = [place.queues[name] for name in names]
        found = [self._queue(each) for each in records if each.type is not QueueType.PARTITION]
        queues = tuple(queue for queue in found if queue is not None)
        for topic in topics:
            # What has no order key for a topic has no route to it.
            with suppress(PreconditionFailed, OrderKeyMissing):
                queues += self._handles(vhost, (topic,), routing_keys[:1], headers, keyed=False)
        return queues

    def count(self, vhost: str, exchange: str, queues: Sequence[Queue], messages: int) -> None:
        """See `DeadLetterRoutes`."""
        self._counts.add(vhost, exchange, [queue.name for queue in queues], messages)

    def count_published(
        self,
        counters: MessageCounters,
        vhost: str,
        exchange: str,
        queues: Sequence[Queue],
        messages: int = 1,
    ) -> None:
        """Counts messages of a protocol that went from an exchange to queues; no queues: they had
        no route. Channels of AMQP 0-9-1 count by themselves (`route_counts.ChannelRoutes`)."""
        counters.published += messages
        counters.routed += messages * len(queues)
        self.count(vhost, exchange, queues, messages)

    def varies_by_message(self, vhost: str, exchange: str) -> bool:
        """See `DeadLetterRoutes`."""
        version = self._route_versions.of(vhost).value
        known = self._varies.get((vhost, exchange))
        if known is not None and known[0] == version:
            return known[1]
        place = self._tree.vhosts.get(vhost)
        if place is None or place.topology.find_exchange(exchange) is None:
            return False
        varies = place.topology.varies_by_message(exchange)
        if len(self._varies) >= REMEMBERED_MAX:
            self._varies.clear()
        self._varies[vhost, exchange] = (version, varies)
        return varies

    def queue_of_group(self, vhost: str, name: str, group: int) -> Queue | None:
        """See `DeadLetterRoutes`. Numbers of groups only rise, so a tree that lags is told from one
        in which the queue is deleted. What is moved waits for alarms, as publishers do."""
        self._alarms.check()
        if group >= self._tree.next_group:
            raise Unavailable(f"{queue_subject(vhost, name)} is not known here yet")
        place = self._tree.vhosts.get(vhost)
        record = place.queues.get(name) if place is not None else None
        if record is None or record.group != group:
            return None
        queue = self._queue(record)
        if queue is None:
            raise Unavailable(f"{queue_subject(vhost, name)} cannot be used")
        return queue

    def random_below(self, count: int) -> int:
        """See `PublisherNode`."""
        return int(self._clock.random() * count)

    def keeps_queue(self, vhost: str, name: str) -> bool:
        """See `PublisherNode`."""
        return self._tree.vhosts[vhost].queues[name].home == self._local.node

    def _queue(self, record: QueueRecord) -> Queue | None:
        """Returns the queue; None when nobody can serve it, or it is lost with its node. Raises
        Unavailable while that may change by itself: a message must not go past it."""
        queue = self._local.find(record)
        if queue is None and self._local.may_open(record):
            raise Unavailable(f"{queue_subject(record.vhost, record.name)} is not open here yet")
        return None if queue is not None and queue.is_lost else queue
