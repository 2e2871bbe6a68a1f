# cython: annotation_typing=False
"""Ready messages of priority levels beside the default one, each a FIFO that begins with its first
message.

A run's mark says when it expires and at which level it is: `due ms << 5 | (level ^ 4)`, so that a
message without a time limit at the default level has none (0).
"""

from __future__ import annotations

from convoymq.kernels import message_attributes
from convoymq.queues.quorum.runs import Fifo, Run

LEVEL_DEFAULT: int = message_attributes.LEVEL_DEFAULT
LEVEL_MAX: int = message_attributes.LEVEL_MAX
LEVEL_BITS = 5


def mark_of(level: int, due_ms: int) -> int:
    """The mark of a message; `due_ms` 0 = it does not expire."""
    return due_ms << LEVEL_BITS | (level ^ LEVEL_DEFAULT)


def due_of(mark: int) -> int:
    """When a message with that mark expires; 0 = never."""
    return mark >> LEVEL_BITS


def level_of(mark: int) -> int:
    """The priority level of a message with that mark."""
    return (mark & LEVEL_MAX) ^ LEVEL_DEFAULT


class Levels:
    """The FIFOs of the levels beside the default one."""

    __slots__ = ("_by_level", "_descending", "messages", "size")

    def __init__(self) -> None:
        self._by_level: dict[int, Fifo] = {}
        self._descending: list[int] = []
        self.messages = 0
        self.size = 0

    def push(self, index: int, offset: int, first: int, count: int, size: int, mark: int) -> None:
        """Appends a run that was never handed out to its level."""
        level = level_of(mark)
        fifo = self._by_level.get(level)
        if fifo is None:
            fifo = self._by_level[level] = Fifo(False)
            self._descending = sorted(self._by_level, reverse=True)
        fifo.push(index, offset, first, count, size, 0, 0, mark)
        self.messages += count
        self.size += size

    def highest(self) -> int:
        """The highest level with messages; -1 = there is none."""
        if self.messages:
            for level in self._descending:
                if self._by_level[level].messages:
                    return level
        return -1

    def with_messages(self) -> list[int]:
        """Levels with messages, the highest first."""
        return [level for level in self._descending if self._by_level[level].messages]

    def count(self, level: int) -> int:
        """Messages of a level."""
        return self._by_level[level].messages if level in self._by_level else 0

    def take(self, level: int, limit: int) -> Run:
        """Removes at most `limit` messages from the head run of a level that has some."""
        run = self._by_level[level].take(limit)
        self.messages -= run[3]
        self.size -= run[4]
        return run

    def head_mark(self, level: int) -> int:
        """The mark of the oldest run of a level."""
        return self._by_level[level].head_mark()

    def head_amount(self, level: int) -> tuple[int, int]:
        """(messages, body bytes) of the oldest run of a level that has some."""
        return self._by_level[level].head_amount()

    def fifos(self) -> list[Fifo]:
        """All that have messages, the highest level first."""
        return [self._by_level[level] for level in self.with_messages()]

    def clear(self) -> None:
        """Drops everything."""
        self._by_level.clear()
        self._descending = []
        self.messages = 0
        self.size = 0

    def pack(self) -> list[tuple[int, bytes]]:
        """Plain values: level and packed runs, the highest first."""
        return [(level, self._by_level[level].pack()) for level in self.with_messages()]

    def unpack(self, packed: list[tuple[int, bytes]]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self.clear()
        for level, runs in packed:
            fifo = self._by_level[level] = Fifo(False)
            fifo.unpack(runs)
            self.messages += fifo.messages
            self.size += fifo.size
        self._descending = sorted(self._by_level, reverse=True)
