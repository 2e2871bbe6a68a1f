"""Counts of messages by where they were published to: exchanges, and the queues that they lead to.

A channel counts by route (`RouteCount`), which costs an addition per message. Sums by exchange and
queue are made when somebody asks, or a channel ends. Other protocols, dead letters and moves count
by batch (`RouteCounts.add`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.records import Change, ChangeKind
from convoymq.queues.interface import Queue, Row

if TYPE_CHECKING:
    from convoymq.kernels.route_cache import RouteCount

CHANNEL_ROUTES_MAX = 1024
"""Routes, and exchanges, that a channel counts apart."""
ROUTES_MAX = 100_000
"""Pairs of an exchange and a queue that a node counts; what comes after them is counted for its
exchange alone."""


class RouteCounts:
    """Messages that were published on this node since its start, by exchange and queue."""

    def __init__(self, tree: MetadataMachine) -> None:
        self._tree = tree
        self._into: Counter[tuple[str, str]] = Counter()
        """(virtual host, exchange) -> messages."""
        self._out: dict[tuple[str, str], Counter[str]] = {}
        """(virtual host, queue) -> exchange -> messages."""
        self._routed: Counter[tuple[str, str]] = Counter()
        """(virtual host, exchange) -> messages that went to queues, of deleted ones too."""
        self._pairs = 0
        self._channels: set[ChannelRoutes] = set()

    def follow(self, channel: ChannelRoutes) -> None:
        """A channel has published."""
        self._channels.add(channel)

    def leave(self, channel: ChannelRoutes) -> None:
        """A channel is gone; its counts stay."""
        self._channels.discard(channel)

    def add(self, vhost: str, exchange: str, queues: Sequence[str], messages: int) -> None:
        """Counts messages that went from an exchange to queues."""
        if len(self._into) >= ROUTES_MAX and (vhost, exchange) not in self._into:
            return
        self._into[vhost, exchange] += messages
        place = self._tree.vhosts.get(vhost)
        for queue in queues:
            if place is None or queue not in place.queues:
                # A topic, or it was deleted meanwhile.
                continue
            self._routed[vhost, exchange] += messages
            counts = self._out.get((vhost, queue))
            if counts is None or exchange not in counts:
                if self._pairs >= ROUTES_MAX:
                    continue
                self._pairs += 1
                counts = self._out.setdefault((vhost, queue), Counter())
            counts[exchange] += messages

    def on_change(self, change: Change) -> None:
        """The tree has changed: a deleted queue has no counts."""
        if change.kind is ChangeKind.QUEUE_DELETED:
            assert change.record is not None
            gone = self._out.pop((change.record.vhost, change.record.name), None)
            self._pairs -= len(gone or ())

    def totals(self) -> Iterator[Row]:
        """Yields a row for each exchange that something was published to: messages into it, and out
        of it to queues."""
        for channel in list(self._channels):
            channel.fold()
        for vhost, exchange in [at for at in self._into if not self._exists(*at)]:
            del self._into[vhost, exchange]
            self._routed.pop((vhost, exchange), None)
        for (vhost, exchange), messages in self._into.items():
            out = self._routed[vhost, exchange]
            yield {"vhost": vhost, "exchange": exchange, "in": messages, "out": out}

    def rows(self) -> Iterator[Row]:
        """Yields a row for each exchange that something was published to: messages into it, and out
        of it by queue."""
        for channel in list(self._channels):
            channel.fold()
        self._forget_deleted()
        made: dict[tuple[str, str], Row] = {
            (vhost, exchange): {"vhost": vhost, "exchange": exchange, "in": messages, "out": {}}
            for (vhost, exchange), messages in self._into.items()
        }
        for (vhost, queue), counts in self._out.items():
            for exchange, messages in counts.items():
                if (vhost, exchange) in made:
                    made[vhost, exchange]["out"][queue] = messages
        yield from made.values()

    def _forget_deleted(self) -> None:
        for at in [at for at in self._into if not self._exists(*at)]:
            del self._into[at]
            self._routed.pop(at, None)
        for (vhost, queue), counts in list(self._out.items()):
            place = self._tree.vhosts.get(vhost)
            known = place is not None and queue in place.queues
            for exchange in [x for x in counts if not known or (vhost, x) not in self._into]:
                del counts[exchange]
                self._pairs -= 1
            if not counts:
                del self._out[vhost, queue]

    def _exists(self, vhost: str, exchange: str) -> bool:
        place = self._tree.vhosts.get(vhost)
        return place is not None and (
            not exchange or place.topology.find_exchange(exchange) is not None
        )


class ChannelRoutes:
    """Messages that one channel has published, by route. `make`: makes the count of a route."""

    def __init__(self, node: RouteCounts, vhost: str, make: Callable[[], RouteCount]) -> None:
        self._node = node
        self._vhost = vhost
        self._make = make
        self._counts: dict[tuple[str, tuple[str, ...]], RouteCount] = {}
        self._folded: list[int] = []
        """Of the messages of each route, in the same order, those that are in the sums."""
        self._published: Counter[str] = Counter()
        self.routed = 0
        """Messages in the sums, each once for each queue that it went to."""

    @property
    def is_full(self) -> bool:
        """Returns whether `clear` must be called before another route is counted."""
        return len(self._counts) >= CHANNEL_ROUTES_MAX

    def count_of(self, exchange: str, queues: Sequence[Queue]) -> RouteCount:
        """Returns what counts the messages from an exchange to these queues."""
        route = (exchange, tuple(queue.name for queue in queues))
        found = self._counts.get(route)
        if found is None:
            if not self._counts:
                self._node.follow(self)
            found = self._counts[route] = self._make()
            self._folded.append(0)
        return found

    def published(self) -> dict[str, int]:
        """Returns the messages that it has published, by exchange."""
        self.fold()
        return dict(self._published)

    def fold(self) -> None:
        """Adds what was counted since the last time to the sums."""
        for at, (route, count) in enumerate(self._counts.items()):
            messages = count.messages
            new = messages - self._folded[at]
            if not new:
                continue
            self._folded[at] = messages
            exchange, queues = route
            self.routed += new * len(queues)
            self._node.add(self._vhost, exchange, queues, new)
            if exchange in self._published or len(self._published) < CHANNEL_ROUTES_MAX:
                self._published[exchange] += new

    def clear(self) -> None:
        """Counts anew: remembered routes must be forgotten, as they lead to the old counts."""
        self.fold()
        self._counts.clear()
        self._folded.clear()
        self._node.leave(self)
