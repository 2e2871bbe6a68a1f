"""A virtual host's tables behind the checks of who proposes: what a client sees of both."""

from __future__ import annotations

from typing import Any

from convoymq.model.tables import EMPTY, Table
from convoymq.routing.declarations import check_binding, check_exchange, check_queue
from convoymq.routing.topology import Topology
from convoymq.routing.types import Destination


class CheckedTopology(Topology):
    """Checks, then records."""

    __slots__ = ()

    def declare_exchange(self, name: str, exchange_type: Any, **properties: Any) -> bool:
        known = check_exchange(self, name, exchange_type, **properties)
        if self.find_exchange(name) is not None:
            return False
        return super().declare_exchange(name, known, **properties)

    def declare_queue(
        self, name: str, queue_type: Any = None, *, server_named: bool = False, **properties: Any
    ) -> bool:
        found = check_queue(self, name, server_named=server_named, **properties)
        if self.find_queue(name) is not None:
            return False
        return super().declare_queue(name, found, **properties)

    def bind(
        self,
        source: str,
        destination: Destination,
        routing_key: str = "",
        arguments: Table = EMPTY,
        *,
        owner: str | None = None,
    ) -> bool:
        check_binding(self, source, destination, routing_key, arguments, owner=owner)
        return super().bind(source, destination, routing_key, arguments, owner=owner)
