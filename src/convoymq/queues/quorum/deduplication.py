"""Duplicate window: the message-ids that a quorum queue has had before (ADR 0052).

The queue remembers the ids of its latest messages. A message whose id is among them is a repeat: it
is confirmed, counted, and does not enter the queue. What is remembered depends on what was
published only. Nothing that becomes of a message, and no purge, changes it.

Bounds, each absent or -1 when it is not given:

| setting                 | remembered are                                                  |
|-------------------------|-----------------------------------------------------------------|
| `deduplication_count`   | the latest distinct ids, as many as it says                     |
| `deduplication_time_ms` | ids that came less than that long ago, by the time of the log   |

With both, an id is forgotten by whichever comes first. 0 remembers nothing. There are never more
than `COUNT_MAX` ids, nor more than `BYTES_MAX` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from convoymq.kernels.message_ids import ID_HEAD_BYTES, MessageIdWindow
from convoymq.queues.quorum import tracing
from convoymq.replication.machine import EFFECT_DEDUPLICATED
from convoymq.settings.table import DEDUPLICATION_COUNT_MAX

if TYPE_CHECKING:
    from convoymq.queues.quorum.consumers import QueueSession
    from convoymq.queues.quorum.machine import QuorumMachine

COUNT = "deduplication_count"
TIME_MS = "deduplication_time_ms"
COUNT_MAX = DEDUPLICATION_COUNT_MAX
BYTES_MAX = 64 << 20

Enqueue: TypeAlias = Callable[[int, int, int, int, int, bytes, int], None]
"""Takes records of an ENQUEUE: entry index, flags, first, count, size, data, offset."""


class Deduplication:
    """The message-ids that a machine's queue remembers."""

    __slots__ = ("_count_max", "_machine", "_time_ms", "ids", "repeats")

    def __init__(self, machine: QuorumMachine) -> None:
        self._machine = machine
        self._count_max = COUNT_MAX
        self._time_ms = -1
        #: None = nothing is remembered.
        self.ids: MessageIdWindow | None = None
        #: Messages that were dropped.
        self.repeats = 0

    def follow(self, settings: Mapping[str, int]) -> None:
        """Applies these settings from now on; what they do not remember is forgotten."""
        count, time_ms = settings.get(COUNT, -1), settings.get(TIME_MS, -1)
        if 0 in (count, time_ms) or max(count, time_ms) < 0:
            self.ids = None
            return
        count_max = min(count, COUNT_MAX) if count > 0 else COUNT_MAX
        self._time_ms = time_ms
        known = self.ids
        if known is None or count_max != self._count_max:
            self.ids = MessageIdWindow(count_max, BYTES_MAX)
            if known is not None:
                # Takes what fits: of more ids the latest are left.
                self.ids.unpack(known.pack())
        self._count_max = count_max
        self.forget_old()

    def forget_old(self) -> None:
        """Forgets the ids whose time is over."""
        if self.ids is not None and self._time_ms > 0:
            until = self._machine.time_ms - self._time_ms
            if until >= 0:
                self.ids.forget_until(until)

    def enqueue(
        self,
        session: QueueSession | None,
        flags: int,
        first: int,
        count: int,
        data: bytes,
        offset: int,
        index: int,
        take: Enqueue,
    ) -> bool:
        """Takes `count` records from `first` on of an ENQUEUE of entry `index` into the queue by
        `take`, without repeats; False = none is one, and the caller takes them."""
        machine = self._machine
        assert self.ids is not None, "a queue that remembers no ids looks for repeats"
        kept = self.ids.new_runs(data, offset, first, count, machine.time_ms)
        if kept is None:
            return False
        rows = machine.trace
        repeats = count - sum(kept[1::3])
        self.repeats += repeats
        machine.effects.append((EFFECT_DEDUPLICATED, repeats))
        if rows is not None:
            number = machine.backlog.published
            tracing.deduplicated(rows, session, kept, first + count, number, index, offset)
        for at in range(0, len(kept), 3):
            low, new, size = kept[at : at + 3]
            take(index, flags, low, new, size, data, offset)
        return True

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> tuple[int, bytes] | None:
        """Plain values; None for a queue that never had a window."""
        if self.ids is None and not self.repeats:
            return None
        return self.repeats, b"" if self.ids is None else self.ids.pack()

    def unpack(self, packed: tuple[int, bytes]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self.repeats, ids = packed
        if self.ids is not None:
            self.ids.unpack(ids)

    # ---------------------------------------------------------------- looking at it

    def count(self) -> int:
        """Ids that are remembered."""
        return 0 if self.ids is None else len(self.ids)

    def memory_bytes(self) -> int:
        """Returns the number of bytes of memory that they take."""
        return 0 if self.ids is None else self.ids.memory_bytes()

    def check(self) -> None:
        """Asserts that the ids keep their bounds."""
        ids = self.ids
        assert self.repeats >= 0
        if ids is None:
            return
        assert len(ids) <= self._count_max
        assert len(ids) * ID_HEAD_BYTES < max(ids.size_bytes(), 1) <= BYTES_MAX
        oldest = ids.oldest_ms()
        assert (oldest is None) == (len(ids) == 0)
        if oldest is not None and self._time_ms > 0:
            assert oldest > self._machine.time_ms - self._time_ms, "an id outlives its time"
