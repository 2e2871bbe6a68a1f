"""Parts of the model of deliveries: messages, consumers, sessions."""

from __future__ import annotations

from enum import Enum

from convoymq.sim.ready_lines import LEVEL_DEFAULT

Key = tuple[int, int, int]
"""Place of a message in the log: entry index, command offset, record."""


class Place(Enum):
    """Place of a message."""

    READY = "ready"
    WAITING = "waiting"
    HELD = "held"
    RESERVED = "reserved"
    SETTLED = "settled"
    REJECTED = "rejected"
    LIMIT = "delivery limit"
    EXPIRED = "expired"
    OVER_LENGTH = "over length"
    PURGED = "purged"


STILL_THERE = (Place.READY, Place.WAITING, Place.HELD, Place.RESERVED)


class Message:
    """One message."""

    __slots__ = (
        "acquired", "at_place", "at_tail", "avoids", "due_ms", "failed", "group", "holder",
        "identity", "key", "level", "outs", "place", "said", "size", "waited",
    )  # fmt: skip

    def __init__(self, key: Key, identity: bytes) -> None:
        self.key = key
        self.level = LEVEL_DEFAULT
        self.due_ms: int | None = None
        self.identity = identity
        self.size = 0
        """Bytes of its body."""
        self.group: bytes | None = None
        self.place = Place.READY
        self.holder: tuple[int, int, int] | None = None
        """(session, consumer, message id)"""
        self.acquired = 0
        self.failed = 0
        self.at_tail = False
        """True if it came back to the tail: its place in the log says nothing any more."""
        self.at_place = False
        """True if it came back to its place in the log, or made its way there."""
        self.waited = False
        """True if it was not ready at some time."""
        self.said = b""
        """Annotations of its consumers."""
        self.avoids: list[tuple[int, int]] = []
        """(session, number) of the consumers that do not get it again."""
        self.outs = 0
        """Number of times that it was given to somebody."""


class Consumer:
    """One consumer; number 0 holds what basic.get took."""

    __slots__ = (
        "arrived", "cancelled", "goes_on", "held", "limit", "lost", "next_id", "node", "number",
        "passed", "priority", "quick_turn", "session", "settled_at_once", "turn_ms",
        "waits_since", "window",
    )  # fmt: skip

    def __init__(self, session: int, number: int, window: int, priority: int) -> None:
        self.session = session
        self.number = number
        self.node = session >> 56
        self.window = window
        self.priority = priority
        self.cancelled = False
        self.next_id = 0
        self.limit = -1
        """Messages that it may get in all; -1: as many as its window allows."""
        self.held: dict[int, Message] = {}
        self.settled_at_once = 0
        """Messages of the last command by which it settled some; since version 2."""
        self.quick_turn = 1
        """Messages that it may have at once as it settles quickly; since version 3."""
        self.turn_ms = 0
        """Time of its last turn."""
        self.goes_on = False
        """True if its turn was not over when no message was left."""
        self.waits_since = 0
        """Since when it could be served and was not; 0 = it cannot be served."""
        self.arrived = 0
        """Single active consumer: since when it waits to be activated."""
        self.lost = False
        """Single active consumer: it lost its activity because its node was suspected."""
        self.passed: dict[tuple[int, int], int] = {}
        """Turns that others of its priority had while it could have been served."""

    def room(self) -> int:
        """Returns how many messages it may be given."""
        room = self.window - len(self.held)
        return room if self.limit < 0 else min(room, self.limit - self.next_id)


class Session:
    """One ordered command stream."""

    __slots__ = ("consumers", "id", "incarnation", "node", "seq")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.node = session_id >> 56
        self.incarnation = incarnation_of(session_id)
        self.seq = 0
        self.consumers: dict[int, Consumer] = {}


def incarnation_of(session_id: int) -> int:
    """Of the node that began the session."""
    return session_id >> 24 & 0xFFFFFFFF


def name_of(identity: bytes) -> str:
    """Publisher and number, readable."""
    publisher = int.from_bytes(identity[:4], "big")
    return f"message {publisher}:{int.from_bytes(identity[4:], 'big')}"


def name_of_consumer(consumer: Consumer) -> str:
    """Session and number, readable."""
    return f"consumer {consumer.session:x}/{consumer.number}"
