"""Virtual hosts, exchanges, bindings: pure tables and matching."""

from convoymq.routing.default_type import with_default_type
from convoymq.routing.topology import PREDECLARED, Topology
from convoymq.routing.types import (
    DEFAULT_EXCHANGE,
    Binding,
    Destination,
    DestinationKind,
    Exchange,
    ExchangeType,
    Queue,
    QueueType,
    Removed,
)

__all__ = [
    "DEFAULT_EXCHANGE",
    "PREDECLARED",
    "Binding",
    "Destination",
    "DestinationKind",
    "Exchange",
    "ExchangeType",
    "Queue",
    "QueueType",
    "Removed",
    "Topology",
    "with_default_type",
]
