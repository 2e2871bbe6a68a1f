# cython: annotation_typing=False
"""Ready messages of priority levels beside the default one, each a FIFO that begins with its first
message; and what came back to its place (`restored`), at any level.

A run's mark says when it expires and at which level it is: `due ms << 5 | (level ^ 4)`, so that a
message without a time limit at the default level has none (0).
"""

from __future__ import annotations

from collections.abc import Callable

from convoymq.kernels import message_attributes
from convoymq.queues.quorum.restored import Restored
from convoymq.queues.quorum.runs import Fifo, Run

LEVEL_DEFAULT: int = message_attributes.LEVEL_DEFAULT
LEVEL_MAX: int = message_attributes.LEVEL_MAX
LEVEL_BITS = 5


def mark_of(level: int, due_ms: int) -> int:
    """Returns the mark of a message; `due_ms` 0 = it does not expire."""
    return due_ms << LEVEL_BITS | (level ^ LEVEL_DEFAULT)


def due_of(mark: int) -> int:
    """Returns when a message with that mark expires; 0 = never."""
    return mark >> LEVEL_BITS


def level_of(mark: int) -> int:
    """Returns the priority level of a message with that mark."""
    return (mark & LEVEL_MAX) ^ LEVEL_DEFAULT


def fresh_fifo() -> Fifo:
    """Makes an empty FIFO for messages that were never handed out."""
    return Fifo(False)


class Levels:
    """The FIFOs of the levels beside the default one, and what stands at its place."""

    __slots__ = ("_by_level", "_descending", "_make", "messages", "restored", "size")

    def __init__(self) -> None:
        self._by_level: dict[int, Fifo] = {}
        self._descending: list[int] = []
        self._make: Callable[[], Fifo] = fresh_fifo
        self.restored = Restored()
        self.messages = 0
        self.size = 0

    def push(self, index: int, offset: int, first: int, count: int, size: int, mark: int) -> None:
        """Appends a run that was never handed out to its level."""
        level = level_of(mark)
        fifo = self._by_level.get(level)
        if fifo is None:
            fifo = self._by_level[level] = self._make()
            self._know(level)
        fifo.push(index, offset, first, count, size, 0, 0, mark)
        self.messages += count
        self.size += size

    def restore(self, run: Run) -> None:
        """Puts a run where it was published."""
        level = level_of(run[7])
        self._know(level)
        self.restored.add(level, run)
        self.messages += run[3]
        self.size += run[4]

    def _know(self, level: int) -> None:
        if level not in self._descending:
            self._descending = sorted((*self._descending, level), reverse=True)

    def highest(self) -> int:
        """Returns the highest level with messages; -1 = there is none."""
        if self.messages:
            for level in self._descending:
                if self.count(level):
                    return level
        return -1

    def with_messages(self) -> list[int]:
        """Levels with messages, the highest first."""
        return [level for level in self._descending if self.count(level)]

    def count(self, level: int) -> int:
        """Returns the number of messages of a level."""
        fifo = self._by_level.get(level)
        return (fifo.messages if fifo is not None else 0) + self.restored.count(level)

    def fifo(self, level: int) -> Fifo | None:
        """Returns what was never handed out of a level beside the default one; None = nothing."""
        fifo = self._by_level.get(level)
        return fifo if fifo is not None and fifo.messages else None

    def take(self, level: int, limit: int, restored: bool) -> Run:
        """Removes at most `limit` messages from the oldest run of a level: of those at their
        places, or of those that were never handed out."""
        if restored:
            run = self.restored.take(level, limit)
        else:
            run = self._by_level[level].take(limit)
        self.messages -= run[3]
        self.size -= run[4]
        return run

    def use(self, make: Callable[[], Fifo], convert: Callable[[Fifo], Fifo]) -> None:
        """Makes FIFOs by `make` from now on, and converts those that exist."""
        self._make = make
        self._by_level = {level: convert(fifo) for level, fifo in self._by_level.items()}

    def take_restored(self, now_ms: int, runs_max: int) -> list[Run]:
        """Takes at most `runs_max` runs out that stand at their places and have expired."""
        taken: list[Run] = []
        kept: list[tuple[int, Run]] = []
        for level in sorted(self.restored.levels(), reverse=True):
            for run in self.restored.runs(level):
                if 0 < due_of(run[7]) <= now_ms and len(taken) < runs_max:
                    taken.append(run)
                else:
                    kept.append((level, run))
        if taken:
            self.restored.clear()
            for level, run in kept:
                self.restored.add(level, run)
            self.count_out(taken)
        return taken

    def count_out(self, taken: list[Run]) -> None:
        """Counts runs that were taken out of a level."""
        self.messages -= sum([run[3] for run in taken])
        self.size -= sum([run[4] for run in taken])

    def fifos(self) -> list[Fifo]:
        """FIFOs that have messages, the highest level first."""
        return list(self.by_level().values())

    def by_level(self) -> dict[int, Fifo]:
        """FIFOs that have messages, by level, the highest first."""
        known = self._by_level
        return {n: known[n] for n in self._descending if n in known and known[n].messages}

    def clear(self) -> None:
        """Drops everything."""
        self._by_level.clear()
        self._descending = []
        self.restored.clear()
        self.messages = 0
        self.size = 0

    def pack(self) -> list[tuple[int, bytes]]:
        """Plain values: level and packed runs, the highest first."""
        return [(level, fifo.pack()) for level, fifo in self.by_level().items()]

    def unpack(self, packed: list[tuple[int, bytes]], restored: list[tuple[int, bytes]]) -> None:
        """Replaces the content by that of `pack`, and of `Restored.pack`. Raises ValueError."""
        self.clear()
        for level, runs in packed:
            fifo = self._by_level[level] = self._make()
            fifo.unpack(runs)
            self.messages += fifo.messages
            self.size += fifo.size
        self.restored.unpack(restored)
        self.messages += self.restored.messages
        self.size += self.restored.size
        self._descending = sorted({*self._by_level, *self.restored.levels()}, reverse=True)
