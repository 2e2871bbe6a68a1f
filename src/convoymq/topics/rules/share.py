"""A lease of a member and the messages of its partition, with the keys that are slow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from convoymq.topics.rules.answers import ParkedEntry
from convoymq.topics.rules.batches import Batch, Hand, KeyOrder
from convoymq.topics.rules.commands import AckRanges, DoneParked, Park
from convoymq.topics.rules.cursor import Cursor
from convoymq.topics.rules.leaseholder import HeldLease
from convoymq.topics.rules.park_versions import ParkVersions

HELD_BACK_MAX = 10_000
"""Messages that wait here for others of their keys; beyond it the whole partition waits."""
HELD_BACK_BYTES_MAX = 32 << 20
"""Bytes of the batches that they lie in, likewise."""
SlowName = bytes | int
"""A key, or the offset of one message."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the leader for messages. It may wait until there are some. `offset` -1: with a view."""

    pid: int
    group_epoch: int
    epoch: int
    offset: int
    count: int
    park_version: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to the leader of a partition; the answer comes to `on_answer`."""

    pid: int
    epoch: int
    number: int
    command: AckRanges | Park | DoneParked


@dataclass(slots=True, order=True)
class Single:
    """One message of a slow key."""

    offset: int
    batch: Batch = field(compare=False)
    failures: int = field(default=0, compare=False)


@dataclass(slots=True)
class SlowKey:
    """A key of which one message at a time is handed out; or one message, where keys are not
    held."""

    key: bytes
    name: SlowName
    parked: bool = False
    head: ParkedEntry | None = None
    """Of a parked key that resumes: what comes next."""
    head_failures: int = 0
    head_out: bool = False
    fresh_offset: int | None = None
    """From here on this member has handed out nothing of what it has parked behind the head."""
    waiting: list[Single] = field(default_factory=list)
    out: dict[int, Single] = field(default_factory=dict)
    """In the client's hands."""
    acking: set[int] = field(default_factory=set)
    """Acknowledged, and not in force yet."""
    request: Send | None = None
    due_ms: int = 0

    @property
    def is_over(self) -> bool:
        """True when the key may be handed out as any other."""
        busy = self.waiting or self.out or self.acking or self.request is not None
        return not (busy or self.parked or self.head_out)

    @property
    def lowest_out(self) -> int | None:
        """Returns the lowest offset that is not settled for good and is not waiting."""
        return min((*self.out, *self.acking), default=None)


@dataclass(slots=True)
class Share(HeldLease):
    """A lease, and the messages of its partition."""

    acked: Cursor = field(default_factory=Cursor)
    """As it was when the latest view was made."""
    park_versions: ParkVersions = field(default_factory=ParkVersions)
    next_offset: int = -1
    fetch_due_ms: int = 0
    asked: Fetch | None = None
    buffer: deque[tuple[Batch, int, int]] = field(default_factory=deque)
    hand: Hand = field(default_factory=Hand)
    keys: dict[SlowName, SlowKey] = field(default_factory=dict)
    out: dict[int, SlowKey] = field(default_factory=dict)
    """Messages of slow keys in the client's hands."""
    acks: list[tuple[int, int]] = field(default_factory=list)
    """Acknowledged, and not sent yet: (first, last)."""
    ack_request: Send | None = None
    ack_due_ms: int = 0
    unconfirmed: int = 0
    """Acknowledged, and not in force yet."""
    revoked_ms: int = -1
    abandoned: bool = False
    """Given up with messages in the client's hands."""
    order: KeyOrder | None = None
    """None: the client may have several messages of a key."""

    @property
    def in_window(self) -> int:
        """Returns the messages that take room in the window."""
        heads = sum(key.head_out for key in self.keys.values())
        return self.hand.count + len(self.out) + heads + self.unconfirmed

    @property
    def in_hand(self) -> int:
        """Returns the messages that the client has."""
        return self.in_window - self.unconfirmed

    @property
    def buffered(self) -> int:
        """Returns the messages that were fetched and wait for room."""
        return sum(end - first for _, first, end in self.buffer)

    @property
    def held_back(self) -> int:
        """Returns the messages that wait for others of their keys."""
        waiting = sum(len(key.waiting) for key in self.keys.values())
        return waiting + (self.order.table.waiting if self.order is not None else 0)

    @property
    def bytes_ahead(self) -> int:
        """Returns the bytes of the batches with messages that wait."""
        batches = [batch for batch, _, _ in self.buffer]
        batches += [single.batch for slow in self.keys.values() for single in slow.waiting]
        if self.order is not None:
            batches += [waiting.batch for waiting in self.order.batches.values()]
        return sum({batch.offset: batch.size for batch in batches}.values())

    @property
    def is_full(self) -> bool:
        """True when nothing more may wait for others of its key."""
        size = self.order.batches_bytes if self.order is not None else 0
        return self.held_back >= HELD_BACK_MAX or size >= HELD_BACK_BYTES_MAX

    def admit(self, order: KeyOrder, room: int) -> tuple[int, list[int]]:
        """Takes the next messages of the buffer; see `KeyOrder.admit`."""
        batch, first, end = self.buffer[0]
        return order.admit(batch, first, end, room, HELD_BACK_MAX)

    def settled(self, first: int, last: int) -> None:
        """Messages are acknowledged or parked for good: those behind them may come."""
        if self.order is not None:
            self.order.table.release(first, last)

    @property
    def requesting(self) -> bool:
        """True while something that was sent, or is to be, has no answer."""
        asking = any(key.request is not None for key in self.keys.values())
        return bool(self.acks) or self.ack_request is not None or asking
