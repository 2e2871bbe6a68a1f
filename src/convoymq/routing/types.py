"""Types of the routing tables: exchanges, queues, bindings, and results of operations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from convoymq.model.tables import EMPTY, Table
from convoymq.routing.queue_types import PlacementKind, rules_of

DEFAULT_EXCHANGE = ""
RESERVED_PREFIX = "amq."
ALTERNATE_EXCHANGE = "alternate-exchange"
DELAYED_TYPE = "x-delayed-type"
"""Argument of an `x-delayed-message` exchange: the type by whose rule it chooses."""


class _StoredType(Enum):
    """A type that the replicated tree keeps as text. One that only other releases know has no
    member here; it is kept as it is, and what has it is not served."""

    @classmethod
    def _missing_(cls, value: object) -> _StoredType | None:
        if not isinstance(value, str):
            return None
        kept = object.__new__(cls)
        kept._name_ = f"({value})"
        kept._value_ = value
        cls._value2member_map_[value] = kept
        return kept

    @property
    def is_served(self) -> bool:
        """Returns whether this release knows the type."""
        return self.name in type(self).__members__


class ExchangeType(_StoredType):
    """Rule by which an exchange chooses among its bindings."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"
    CONSISTENT_HASH = "x-consistent-hash"
    MODULUS_HASH = "x-modulus-hash"
    RANDOM = "x-random"
    LOCAL_RANDOM = "x-local-random"
    DELAYED = "x-delayed-message"
    ORDERED = "x-ordered"
    """Of an ordered topic; declared with it."""

    @property
    def description(self) -> str:
        """Returns the description that management shows beside the name."""
        return _DESCRIPTIONS.get(self, f"{self.value} exchange")


_DESCRIPTIONS = {
    ExchangeType.CONSISTENT_HASH: "Consistent Hashing Exchange",
    ExchangeType.MODULUS_HASH: "Modulus Hashing Exchange",
    ExchangeType.RANDOM: "Randomly picks a binding (queue) to route via (to).",
    ExchangeType.LOCAL_RANDOM: "Picks one random local binding (queue) to route via (to).",
    ExchangeType.DELAYED: "Delayed Message Exchange.",
    ExchangeType.ORDERED: "Ordered topic: order per key, over partitions that split and merge.",
}


class QueueType(_StoredType):
    """Type of a queue: where its messages are kept. `queue_types` has those that are served; those
    of RabbitMQ, and the partitions of topics, have a name here."""

    CLASSIC = "classic"
    QUORUM = "quorum"
    STREAM = "stream"
    PARTITION = "partition"

    @property
    def is_served(self) -> bool:
        """Returns whether this release knows the type."""
        return rules_of(self.value) is not None

    @property
    def is_managed(self) -> bool:
        """Returns whether such a queue is part of something else (`TypeRules.is_managed`)."""
        rules = rules_of(self.value)
        return rules is not None and rules.is_managed

    @property
    def placement(self) -> PlacementKind:
        """Returns where such queues are; those of a type that is not served are on one node."""
        rules = rules_of(self.value)
        return rules.placement if rules is not None else PlacementKind.HOME


class DestinationKind(Enum):
    """Kind of a binding's destination."""

    # `Enum` hashes a member's name, in Python; a binding's end is looked up all the time.
    __hash__ = object.__hash__

    QUEUE = "queue"
    EXCHANGE = "exchange"


class Destination(NamedTuple):
    """One end of a binding."""

    kind: DestinationKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A declared exchange; those whose names start with `amq.` can't be deleted."""

    name: str
    type: ExchangeType
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: Table = EMPTY
    user: str = ""
    """User that declared it; "" = not recorded."""

    @property
    def rule(self) -> ExchangeType:
        """Returns the type by whose rule it chooses among its bindings."""
        if self.type is not ExchangeType.DELAYED:
            return self.type
        field = self.arguments.get(DELAYED_TYPE)
        return ExchangeType(field.term()) if field is not None else self.type

    @property
    def alternate(self) -> str | None:
        """Returns the name of the exchange that gets what this one can't route; None when there is
        none."""
        field = self.arguments.get(ALTERNATE_EXCHANGE)
        return field.term() if field is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A declared queue: its properties, not its messages.

    `exclusive_owner` names the connection that alone may use it. `declared_version` is the
    topology's version at its creation: a queue that is deleted and declared again has another one.
    """

    name: str
    type: QueueType
    durable: bool = False
    exclusive_owner: str | None = None
    auto_delete: bool = False
    arguments: Table = EMPTY
    declared_version: int = 0
    user: str = ""
    """User that declared it; "" = not recorded."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A way from an exchange to a queue or exchange; all four parts are its identity.

    `arguments` are in canonical order.
    """

    source: str
    destination: Destination
    routing_key: str
    arguments: Table


@dataclass(frozen=True, slots=True)
class Removed:
    """All that an operation took away, auto-delete exchanges included, in order of removal."""

    queues: tuple[Queue, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.queues or self.exchanges or self.bindings)
