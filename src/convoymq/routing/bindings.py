"""The bindings of a virtual host, indexed by both ends and arranged for matching.

Invariant: the indexes hold exactly the same bindings, and no end without bindings has an entry.
"""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.routing.choosing import Message
from convoymq.routing.matchers import Matcher, matcher_for
from convoymq.routing.types import Binding, Destination, DestinationKind, Exchange

# Dicts instead of sets throughout: their order doesn't depend on the hash seed of the process.
_Ordered = dict[Binding, None]


class BindingTable:
    """All explicit bindings. Ends are opened before they are used and closed when bare."""

    __slots__ = ("_all", "_by_destination", "_by_source", "_matchers", "_onward", "_vhost")

    def __init__(self, vhost: str) -> None:
        """Starts without bindings."""
        self._vhost = vhost
        self._all: _Ordered = {}
        self._by_source: dict[str, _Ordered] = {}
        self._by_destination: dict[Destination, _Ordered] = {}
        self._matchers: dict[str, Matcher] = {}
        #: Exchange -> its bindings to exchanges. They are few where those to queues are many.
        self._onward: dict[str, _Ordered] = {}

    def open_source(self, exchange: Exchange) -> None:
        """Prepare for bindings from that exchange."""
        assert exchange.name not in self._matchers
        self._matchers[exchange.name] = matcher_for(exchange, self._vhost)

    def close_source(self, name: str) -> None:
        """Forgets an exchange from which no bindings are left."""
        assert name not in self._by_source
        del self._matchers[name]

    def add(self, binding: Binding) -> None:
        """Adds a binding that is not there."""
        assert binding not in self._all
        self._all[binding] = None
        self._by_source.setdefault(binding.source, {})[binding] = None
        self._by_destination.setdefault(binding.destination, {})[binding] = None
        self._matchers[binding.source].add(binding)
        if binding.destination[0] is DestinationKind.EXCHANGE:
            self._onward.setdefault(binding.source, {})[binding] = None

    def remove(self, binding: Binding) -> None:
        """Removes a binding that is there."""
        del self._all[binding]
        self._matchers[binding.source].remove(binding)
        if binding.destination[0] is DestinationKind.EXCHANGE:
            onward = self._onward[binding.source]
            del onward[binding]
            if not onward:
                del self._onward[binding.source]
        siblings = self._by_source[binding.source]
        del siblings[binding]
        if not siblings:
            del self._by_source[binding.source]
        siblings = self._by_destination[binding.destination]
        del siblings[binding]
        if not siblings:
            del self._by_destination[binding.destination]

    def match(self, source: str, message: Message) -> Iterable[Destination]:
        """Yields where a message at that exchange goes; a destination may come more than once."""
        return self._matchers[source].match(message)

    def varies(self, source: str) -> bool:
        """Returns whether messages with equal routing keys may go different ways from that
        exchange."""
        return self._matchers[source].varies

    def leads_anywhere(self, source: str) -> bool:
        """Returns whether the exchange is the source of any binding."""
        return source in self._by_source

    def onward(self, source: str) -> list[Destination]:
        """Returns the exchanges that bindings from that exchange lead to, whatever their keys."""
        return [binding.destination for binding in self._onward.get(source, ())]

    def select(
        self, *, source: str | None = None, destination: Destination | None = None
    ) -> list[Binding]:
        """Returns all bindings, or those of one end or between two, in a fixed order."""
        found: Iterable[Binding]
        if source is not None:
            found = self._by_source.get(source, ())
        elif destination is not None:
            found = self._by_destination.get(destination, ())
        else:
            found = self._all
        kept = (b for b in found if destination is None or b.destination == destination)
        return sorted(kept, key=_order)

    def __contains__(self, binding: Binding) -> bool:
        return binding in self._all

    def __len__(self) -> int:
        return len(self._all)

    def check_invariants(self) -> None:
        """Assert what the module text promises."""
        assert {b for found in self._by_source.values() for b in found} == set(self._all)
        assert {b for found in self._by_destination.values() for b in found} == set(self._all)
        assert all(self._by_source.values())
        onward = {b for b in self._all if b.destination[0] is DestinationKind.EXCHANGE}
        assert {b for found in self._onward.values() for b in found} == onward
        assert all(self._by_destination.values())
        assert all(self._onward.values())
        assert set(self._by_source) <= set(self._matchers)


def _order(binding: Binding) -> tuple[str, str, str, str, bytes]:
    kind, name = binding.destination
    return binding.source, kind.value, name, binding.routing_key, binding.arguments.encoded
