"""Exchanges that choose one of their destinations: by a hash, by chance, or on the own node.

    x-consistent-hash   hash of the routing key, a header or a property; the binding key is a weight
    x-modulus-hash      hash of all routing keys, modulo the number of destinations
    x-random            any destination
    x-local-random      any queue that is kept on the node where the message is published

A message with further routing keys (CC and BCC) still gets one choice. A destination counts once,
however many bindings lead to it; to `x-consistent-hash` the weights of its bindings add up.

The hashes are part of no format and of no log: a choice is made by the node that a message is
published on. But all nodes of a release choose alike, and a release that changes a hash moves keys.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import NamedTuple, Protocol

from convoymq.messages.amqp091 import Properties
from convoymq.model.errors import Subject
from convoymq.model.refusals import (
    binding_key_not_empty,
    binding_weight_not_integer,
    binding_weight_not_positive,
    binding_weight_too_large,
    destination_not_found,
    exclusive_hash_arguments,
    invalid_argument_type,
    unserved_destination_type,
    unsupported_hash_property,
)
from convoymq.model.tables import Table
from convoymq.routing.queue_types import PlacementKind
from convoymq.routing.types import Destination, Queue

HASH_HEADER = "hash-header"
HASH_PROPERTY = "hash-property"
HASH_PROPERTIES = ("correlation_id", "message_id", "timestamp")

POINTS_PER_WEIGHT = 64
"""Points on the ring for each unit of weight."""
WEIGHT_MAX = 1_000
"""Bounds the points of one binding, and with them memory and the time that a change takes."""

_POINTS_PER_DIGEST = 8
_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


class PublisherNode(Protocol):
    """The node that a message is published on, as far as routes depend on it."""

    def random_below(self, count: int) -> int:
        """Returns a random number from 0, less than `count`."""

    def keeps_queue(self, vhost: str, name: str) -> bool:
        """Returns whether the messages of a queue that is kept on one node are kept on this one."""


class NoNode:
    """Stands for a node that keeps no queue and always draws the first: for asking what a route
    depends on, and for routes that depend on no node."""

    def random_below(self, count: int) -> int:
        """See `PublisherNode`."""
        return 0

    def keeps_queue(self, vhost: str, name: str) -> bool:
        """See `PublisherNode`."""
        return False


NO_NODE = NoNode()


class Message(NamedTuple):
    """All that the route of a message depends on."""

    keys: tuple[str, ...]
    """The routing key, then further ones."""
    headers: Table
    properties: Properties
    node: PublisherNode


# --- what may be declared and bound ----------------------------------------------------------


def check_hash_arguments(arguments: Table, subject: Subject) -> None:
    """Refuses arguments of an `x-consistent-hash` exchange that do not say what to hash.

    Raises:
        PreconditionFailed: of another type, both of them, or an unknown property.
    """
    header, property_ = arguments.get(HASH_HEADER), arguments.get(HASH_PROPERTY)
    for key, field in ((HASH_HEADER, header), (HASH_PROPERTY, property_)):
        if field is not None and field.code != "S":
            raise invalid_argument_type(key, subject, field.type_name)
    if header is not None and property_ is not None:
        raise exclusive_hash_arguments()
    if property_ is not None and property_.term() not in HASH_PROPERTIES:
        raise unsupported_hash_property(property_.term())


def check_weight(routing_key: str) -> None:
    """Refuses a binding key that is no weight. Raises PreconditionFailed."""
    weight = _integer(routing_key)
    if weight is None:
        raise binding_weight_not_integer(routing_key)
    if weight < 1:
        raise binding_weight_not_positive()
    if weight > WEIGHT_MAX:
        raise binding_weight_too_large(routing_key, WEIGHT_MAX)


def check_local_binding(routing_key: str, queue: Queue | None) -> None:
    """Refuses a binding from an `x-local-random` exchange; `queue` is None when it leads elsewhere.

    Raises:
        PreconditionFailed: it has a key, or leads to what is not kept on one node.
    """
    if routing_key:
        raise binding_key_not_empty(routing_key)
    if queue is None:
        raise destination_not_found()
    if queue.type.placement is not PlacementKind.HOME:
        raise unserved_destination_type(queue.type.value)


def _integer(text: str) -> int | None:
    digits = text[1:] if text[:1] in ("+", "-") else text
    # A key has at most 255 bytes, so this is cheap.
    return int(text) if digits.isascii() and digits.isdigit() else None


def weight_of(routing_key: str) -> int:
    """Returns the weight of a recorded binding. What `check_weight` refuses has none, or the
    largest."""
    return min(max(_integer(routing_key) or 0, 0), WEIGHT_MAX)


# --- choices ---------------------------------------------------------------------------------


class HashSource:
    """Source of a message's hash: header or property of an exchange, or else the routing key."""

    __slots__ = ("header", "property")

    def __init__(self, arguments: Table) -> None:
        """Reads the arguments of an exchange."""
        header, property_ = arguments.get(HASH_HEADER), arguments.get(HASH_PROPERTY)
        self.header = header.term() if header is not None else None
        self.property = property_.term() if property_ is not None else None

    @property
    def is_routing_key(self) -> bool:
        """Returns whether nothing but the routing key counts."""
        return self.header is None and self.property is None

    def of(self, message: Message) -> str | None:
        """Returns what of a message is hashed; None when it lacks that."""
        if self.header is not None:
            field = message.headers.get(self.header)
            return field.term() if field is not None else None
        match self.property:
            case None:
                return message.keys[0]
            case "correlation_id":
                return message.properties.correlation_id
            case "message_id":
                return message.properties.message_id
            case "timestamp" if message.properties.timestamp is not None:
                return str(message.properties.timestamp)
            case _:
                return None


class HashRing:
    """A ring of points: the next point after a hash says which destination is meant.

    A destination has `POINTS_PER_WEIGHT` points per unit of weight. They depend on its name alone,
    so a change of one destination moves only keys that come from it or go to it.
    """

    __slots__ = ("_changed", "_names", "_next", "_numbers", "_placed", "_points", "_weights")

    def __init__(self) -> None:
        """Starts without destinations."""
        self._weights: dict[Destination, int] = {}
        # The ring is brought up to date when it is asked: a hundred bindings are placed together.
        self._changed: dict[Destination, None] = {}
        self._placed: dict[Destination, int] = {}
        self._numbers: dict[Destination, int] = {}
        self._names: dict[int, Destination] = {}
        self._next = 0
        self._points: list[int] = []
        """Sorted: a 64-bit position, then the number of the destination."""

    def add(self, destination: Destination, weight: int) -> None:
        """Adds weight to a destination."""
        self._weights[destination] = self._weights.get(destination, 0) + weight
        self._changed[destination] = None

    def remove(self, destination: Destination, weight: int) -> None:
        """Takes weight from a destination."""
        left = self._weights[destination] - weight
        assert left >= 0
        self._weights[destination] = left
        if not left:
            del self._weights[destination]
        self._changed[destination] = None

    def choose(self, hashed: str | None) -> Destination | None:
        """Returns the destination of a value; None when there is none.

        Cost: one hash and a binary search; after changes, once, O(points).
        """
        if self._changed:
            self._place()
        points = self._points
        if not points:
            return None
        at = bisect_left(points, _hash(hashed) << _NUMBER_BITS)
        return self._names[points[at if at < len(points) else 0] & _NUMBER_MASK]

    def _place(self) -> None:
        gone: set[int] = set()
        grown: list[Destination] = []
        for destination in self._changed:
            weight, placed = self._weights.get(destination, 0), self._placed.get(destination, 0)
            if weight < placed:
                number = self._numbers.pop(destination)
                gone.add(number)
                del self._names[number], self._placed[destination]
            if weight and weight != placed:
                grown.append(destination)
        self._changed.clear()
        if gone:
            self._points = [point for point in self._points if point & _NUMBER_MASK not in gone]
        for destination in grown:
            if destination not in self._numbers:
                self._numbers[destination] = self._next
                self._names[self._next] = destination
                self._next += 1
            number, weight = self._numbers[destination], self._weights[destination]
            self._points += _points(destination, number, self._placed.get(destination, 0), weight)
            self._placed[destination] = weight
        self._points.sort()


def _points(destination: Destination, number: int, before: int, weight: int) -> list[int]:
    """Returns the points of a destination for the units of weight from `before` up to `weight`."""
    assert POINTS_PER_WEIGHT % _POINTS_PER_DIGEST == 0
    start = f"{destination.kind.value}\0{destination.name}\0".encode(errors="surrogateescape")
    found = []
    for block in range(
        before * POINTS_PER_WEIGHT // _POINTS_PER_DIGEST,
        weight * POINTS_PER_WEIGHT // _POINTS_PER_DIGEST,
    ):
        digest = hashlib.blake2b(start + b"%d" % block).digest()
        found += [
            int.from_bytes(digest[at : at + 8], "big") << _NUMBER_BITS | number
            for at in range(0, 8 * _POINTS_PER_DIGEST, 8)
        ]
    return found


def _hash(value: str | None) -> int:
    # Messages that lack what is hashed go to one place, as in RabbitMQ.
    data = b"\0" if value is None else b"\1" + value.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def modulus_choice(keys: tuple[str, ...], count: int) -> int:
    """Returns which of `count` destinations, in a fixed order, these routing keys lead to."""
    return _hash("\0".join(keys)) % count
