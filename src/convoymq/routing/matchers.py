"""One table per exchange that answers: where does this message go?

All types share one shape: `add` and `remove` a binding, `match` yields destinations (one may come
more than once). Bindings that differ in arguments only are counted.

A message has one or more routing keys. `varies` says that messages with equal keys may go different
ways, so that no answer of `match` holds for the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from convoymq.model.refusals import unserved_exchange_type
from convoymq.model.tables import Table
from convoymq.routing.choosing import (
    HashRing,
    HashSource,
    Message,
    modulus_choice,
    weight_of,
)
from convoymq.routing.headers import HeadersPattern
from convoymq.routing.topics import TopicTrie
from convoymq.routing.types import Binding, Destination, DestinationKind, Exchange, ExchangeType


class Matcher(Protocol):
    """The bindings of one exchange, arranged for its type."""

    @property
    def varies(self) -> bool:
        """Returns whether equal routing keys may lead different ways."""

    def add(self, binding: Binding) -> None:
        """Adds a binding that is not there yet."""

    def remove(self, binding: Binding) -> None:
        """Removes a binding that is there."""

    def match(self, message: Message) -> Iterable[Destination]:
        """Yields where a message goes."""


class _Counted:
    """Destinations with the number of bindings that lead to each."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[Destination, int] = {}

    def add(self, destination: Destination) -> None:
        self.counts[destination] = self.counts.get(destination, 0) + 1

    def remove(self, destination: Destination) -> None:
        left = self.counts[destination] - 1
        if left:
            self.counts[destination] = left
        else:
            del self.counts[destination]


class _Fanout:
    __slots__ = ("_destinations",)
    varies = False

    def __init__(self) -> None:
        self._destinations = _Counted()

    def add(self, binding: Binding) -> None:
        self._destinations.add(binding.destination)

    def remove(self, binding: Binding) -> None:
        self._destinations.remove(binding.destination)

    def match(self, message: Message) -> Iterable[Destination]:
        return self._destinations.counts


class _Direct:
    __slots__ = ("_by_key",)
    varies = False

    def __init__(self) -> None:
        self._by_key: dict[str, _Counted] = {}

    def add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, _Counted()).add(binding.destination)

    def remove(self, binding: Binding) -> None:
        destinations = self._by_key[binding.routing_key]
        destinations.remove(binding.destination)
        if not destinations.counts:
            del self._by_key[binding.routing_key]

    def match(self, message: Message) -> Iterable[Destination]:
        for key in message.keys:
            destinations = self._by_key.get(key)
            if destinations is not None:
                yield from destinations.counts


class _Topic:
    __slots__ = ("_trie",)
    varies = False

    def __init__(self) -> None:
        self._trie = TopicTrie()

    def add(self, binding: Binding) -> None:
        self._trie.add(binding.routing_key, binding.destination)

    def remove(self, binding: Binding) -> None:
        self._trie.remove(binding.routing_key, binding.destination)

    def match(self, message: Message) -> Iterable[Destination]:
        for key in message.keys:
            yield from self._trie.match(key)


class _Headers:
    __slots__ = ("_by_arguments",)
    varies = True

    def __init__(self) -> None:
        self._by_arguments: dict[Table, tuple[HeadersPattern, _Counted]] = {}

    def add(self, binding: Binding) -> None:
        kept = self._by_arguments.get(binding.arguments)
        if kept is None:
            kept = (HeadersPattern.of(binding.arguments), _Counted())
            self._by_arguments[binding.arguments] = kept
        kept[1].add(binding.destination)

    def remove(self, binding: Binding) -> None:
        destinations = self._by_arguments[binding.arguments][1]
        destinations.remove(binding.destination)
        if not destinations.counts:
            del self._by_arguments[binding.arguments]

    def match(self, message: Message) -> Iterable[Destination]:
        for pattern, destinations in self._by_arguments.values():
            if pattern.matches(message.headers):
                yield from destinations.counts


class _ConsistentHash:
    __slots__ = ("_ring", "_source", "varies")

    def __init__(self, arguments: Table) -> None:
        self._ring = HashRing()
        self._source = HashSource(arguments)
        self.varies = not self._source.is_routing_key

    def add(self, binding: Binding) -> None:
        weight = weight_of(binding.routing_key)
        if weight:
            self._ring.add(binding.destination, weight)

    def remove(self, binding: Binding) -> None:
        weight = weight_of(binding.routing_key)
        if weight:
            self._ring.remove(binding.destination, weight)

    def match(self, message: Message) -> Iterable[Destination]:
        chosen = self._ring.choose(self._source.of(message))
        return () if chosen is None else (chosen,)


class _OneOf:
    """One of all destinations, in an order that is the same on all nodes."""

    __slots__ = ("_destinations", "_sorted")

    def __init__(self) -> None:
        self._destinations = _Counted()
        self._sorted: list[Destination] | None = []

    def add(self, binding: Binding) -> None:
        self._destinations.add(binding.destination)
        self._sorted = None

    def remove(self, binding: Binding) -> None:
        self._destinations.remove(binding.destination)
        self._sorted = None

    def in_order(self) -> list[Destination]:
        if self._sorted is None:
            self._sorted = sorted(
                self._destinations.counts, key=lambda each: (each.kind.value, each.name)
            )
        return self._sorted


class _ModulusHash(_OneOf):
    __slots__ = ()
    varies = False

    def match(self, message: Message) -> Iterable[Destination]:
        found = self.in_order()
        return (found[modulus_choice(message.keys, len(found))],) if found else ()


class _Random(_OneOf):
    __slots__ = ()
    varies = True

    def match(self, message: Message) -> Iterable[Destination]:
        found = self.in_order()
        return (found[message.node.random_below(len(found))],) if found else ()


class _LocalRandom(_OneOf):
    __slots__ = ("_vhost",)
    varies = True

    def __init__(self, vhost: str) -> None:
        super().__init__()
        self._vhost = vhost

    def match(self, message: Message) -> Iterable[Destination]:
        found = [
            each
            for each in self.in_order()
            if each.kind is DestinationKind.QUEUE
            and message.node.keeps_queue(self._vhost, each.name)
        ]
        return (found[message.node.random_below(len(found))],) if found else ()


class _Unserved:
    """The bindings of an exchange whose type only other releases know."""

    __slots__ = ("_type",)
    varies = False

    def __init__(self, exchange_type: ExchangeType) -> None:
        self._type = exchange_type

    def add(self, binding: Binding) -> None:
        pass

    def remove(self, binding: Binding) -> None:
        pass

    def match(self, message: Message) -> Iterable[Destination]:
        raise unserved_exchange_type(self._type.value)


_MATCHERS: dict[ExchangeType, Callable[[], Matcher]] = {
    ExchangeType.DIRECT: _Direct,
    ExchangeType.FANOUT: _Fanout,
    ExchangeType.TOPIC: _Topic,
    ExchangeType.HEADERS: _Headers,
    ExchangeType.MODULUS_HASH: _ModulusHash,
    ExchangeType.RANDOM: _Random,
}


def matcher_for(exchange: Exchange, vhost: str) -> Matcher:
    """Returns an empty table for that exchange. One whose type is not served refuses to match."""
    match exchange.rule:
        case ExchangeType.CONSISTENT_HASH:
            return _ConsistentHash(exchange.arguments)
        case ExchangeType.LOCAL_RANDOM:
            return _LocalRandom(vhost)
        case other:
            made = _MATCHERS.get(other)
            return made() if made is not None else _Unserved(other)
