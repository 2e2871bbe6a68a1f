"""One table per exchange that answers: where does this message go?

All types share one shape: `add` and `remove` a binding, `match` yields destinations (one may come
more than once). Bindings that differ in arguments only are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from convoymq.model.refusals import unserved_exchange_type
from convoymq.model.tables import Table
from convoymq.routing.headers import HeadersPattern
from convoymq.routing.topics import TopicTrie
from convoymq.routing.types import Binding, Destination, ExchangeType


class Matcher(Protocol):
    """The bindings of one exchange, arranged for its type."""

    def add(self, binding: Binding) -> None:
        """Add a binding that is not there yet."""

    def remove(self, binding: Binding) -> None:
        """Remove a binding that is there."""

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        """Yield where a message goes."""


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

    def __init__(self) -> None:
        self._destinations = _Counted()

    def add(self, binding: Binding) -> None:
        self._destinations.add(binding.destination)

    def remove(self, binding: Binding) -> None:
        self._destinations.remove(binding.destination)

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        return self._destinations.counts


class _Direct:
    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: dict[str, _Counted] = {}

    def add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, _Counted()).add(binding.destination)

    def remove(self, binding: Binding) -> None:
        destinations = self._by_key[binding.routing_key]
        destinations.remove(binding.destination)
        if not destinations.counts:
            del self._by_key[binding.routing_key]

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        destinations = self._by_key.get(routing_key)
        return destinations.counts if destinations is not None else ()


class _Topic:
    __slots__ = ("_trie",)

    def __init__(self) -> None:
        self._trie = TopicTrie()

    def add(self, binding: Binding) -> None:
        self._trie.add(binding.routing_key, binding.destination)

    def remove(self, binding: Binding) -> None:
        self._trie.remove(binding.routing_key, binding.destination)

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        return self._trie.match(routing_key)


class _Headers:
    __slots__ = ("_by_arguments",)

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

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        for pattern, destinations in self._by_arguments.values():
            if pattern.matches(headers):
                yield from destinations.counts


class _Unserved:
    """The bindings of an exchange whose type only other releases know."""

    __slots__ = ("_type",)

    def __init__(self, exchange_type: ExchangeType) -> None:
        self._type = exchange_type

    def add(self, binding: Binding) -> None:
        pass

    def remove(self, binding: Binding) -> None:
        pass

    def match(self, routing_key: str, headers: Table) -> Iterable[Destination]:
        raise unserved_exchange_type(self._type.value)


_MATCHERS: dict[ExchangeType, type[Matcher]] = {
    ExchangeType.DIRECT: _Direct,
    ExchangeType.FANOUT: _Fanout,
    ExchangeType.TOPIC: _Topic,
    ExchangeType.HEADERS: _Headers,
}


def matcher_for(exchange_type: ExchangeType) -> Matcher:
    """Return an empty table for that type. One for a type that is not served refuses to match."""
    made = _MATCHERS.get(exchange_type)
    return made() if made is not None else _Unserved(exchange_type)
