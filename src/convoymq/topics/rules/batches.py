"""Batches of a partition's messages that a member has: in its client's hands, or held back.

Neighbouring messages stay runs of the batches that they were fetched in, without an object for each
of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from convoymq.kernels.keys_in_flight import KeysInFlight


class Batch(Protocol):
    """Neighbouring messages of a partition, in whatever form the shell has them."""

    @property
    def offset(self) -> int:
        """Returns the offset of the first."""

    @property
    def messages(self) -> int:
        """Returns how many there are."""

    @property
    def size(self) -> int:
        """Returns the bytes of memory that it keeps."""

    def key(self, offset: int) -> bytes:
        """Returns the order key of a message."""

    def hashes(self) -> bytes:
        """Returns 8 bytes for each message: a hash of its key, 0 without one."""

    def copy(self, offset: int) -> bytes:
        """Returns a message as it is parked."""


class Hand:
    """Messages that a client has, as runs of their batches."""

    __slots__ = ("batches", "count", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.batches: list[Batch] = []
        self.count = 0

    def add(self, first: int, end: int, batch: Batch) -> None:
        """Messages that were not in it."""
        at = bisect_right(self.starts, first)
        self.starts.insert(at, first)
        self.ends.insert(at, end)
        self.batches.insert(at, batch)
        self.count += end - first

    def take(self, first: int, end: int) -> list[tuple[int, int, Batch]]:
        """Removes what is in it from `first` to `end` (exclusive); returns it as runs."""
        starts, ends, batches = self.starts, self.ends, self.batches
        taken: list[tuple[int, int, Batch]] = []
        at = bisect_right(ends, first)
        while at < len(starts) and starts[at] < end:
            low, high = max(first, starts[at]), min(end, ends[at])
            taken.append((low, high, batches[at]))
            self.count -= high - low
            before, behind = starts[at] < low, high < ends[at]
            if before and behind:
                starts.insert(at + 1, high)
                ends.insert(at + 1, ends[at])
                batches.insert(at + 1, batches[at])
                ends[at] = low
            elif before:
                ends[at] = low
            elif behind:
                starts[at] = high
            else:
                del starts[at], ends[at], batches[at]
                continue
            at += 1
        return taken

    def of_key(self, key: bytes) -> list[int]:
        """Returns the offsets of its messages with a key."""
        return [
            offset
            for first, end, batch in zip(self.starts, self.ends, self.batches, strict=True)
            for offset in range(first, end)
            if batch.key(offset) == key
        ]


@dataclass(slots=True)
class WaitingBatch:
    """A batch with messages that wait for others of their keys, and how many these are."""

    batch: Batch
    messages: int = 0


class KeyOrder:
    """The messages of a partition by key, of which one at a time is in flight."""

    __slots__ = ("batches", "batches_bytes", "table")

    def __init__(self) -> None:
        self.table = KeysInFlight()
        self.batches: dict[int, WaitingBatch] = {}
        """By their first offset."""
        self.batches_bytes = 0

    def admit(
        self, batch: Batch, first: int, end: int, room: int, waiting_max: int
    ) -> tuple[int, list[int]]:
        """Takes messages that come next; returns the offset behind the last one that was taken, and
        the runs (first, end, …) that the client may have now."""
        stop, *runs = self.table.admit(
            batch.offset, batch.hashes(), first - batch.offset, first, end, room, waiting_max
        )
        waiting = stop - first - sum(runs[1::2]) + sum(runs[::2])
        if waiting:
            kept = self.batches.get(batch.offset)
            if kept is None:
                kept = self.batches[batch.offset] = WaitingBatch(batch)
                self.batches_bytes += batch.size
            elif kept.batch.messages < batch.messages:
                self.batches_bytes += batch.size - kept.batch.size
                kept.batch = batch
            kept.messages += waiting
        return stop, runs

    def take(self, room: int) -> list[tuple[Batch, int, int]]:
        """Returns runs of messages that wait no more, the lowest first: the client gets them."""
        flat = self.table.take(room)
        runs = []
        for at, first, end in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            kept = self.batches[at]
            kept.messages -= end - first
            if not kept.messages:
                del self.batches[at]
                self.batches_bytes -= kept.batch.size
            runs.append((kept.batch, first, end))
        return runs
