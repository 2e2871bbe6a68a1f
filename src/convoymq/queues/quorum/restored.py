# cython: annotation_typing=False
"""Ready messages that stand at the place at which they were published, by priority level.

They came back to a queue that puts what comes back there, or waited for another one of their group.
The runs of a level are a heap (`PlaceHeap`). Cost: O(log runs) for a run that comes or goes. What
is taken is one run with those that continue it.
"""

from __future__ import annotations

from convoymq.kernels.place_heap import PlaceHeap
from convoymq.model.words import words_from_bytes, words_to_bytes
from convoymq.queues.quorum.runs import LOW, Run

Place = tuple[int, int]
"""(entry index, offset above record), which ascends in the order of the log."""


def place_of(run: Run) -> Place:
    """Returns where a run begins."""
    return run[0], run[1] << 32 | run[2]


class Restored:
    """See the module text."""

    __slots__ = ("_heaps", "again", "messages", "size")

    def __init__(self) -> None:
        self._heaps: dict[int, PlaceHeap] = {}
        self.messages = 0
        self.size = 0
        #: Of the messages, those that were handed out before.
        self.again = 0

    def add(self, level: int, run: Run) -> None:
        """Puts a run where it was published."""
        heap = self._heaps.get(level)
        if heap is None:
            heap = self._heaps[level] = PlaceHeap()
        heap.add(run)
        self.messages += run[3]
        self.size += run[4]
        if run[5]:
            self.again += run[3]

    def levels(self) -> list[int]:
        """Returns the levels that have messages."""
        return [level for level, heap in self._heaps.items() if heap.messages]

    def count(self, level: int) -> int:
        """Returns the number of messages of a level."""
        heap = self._heaps.get(level)
        return heap.messages if heap is not None else 0

    def head(self, level: int) -> Run | None:
        """Returns the oldest run of a level; None = it has none."""
        heap = self._heaps.get(level)
        return heap.head() if heap is not None else None

    def head_place(self, level: int) -> Place | None:
        """Returns where the oldest run of a level begins; None = it has none."""
        heap = self._heaps.get(level)
        return heap.head_place() if heap is not None else None

    def take(self, level: int, limit: int) -> Run:
        """Removes at most `limit` of the oldest messages of a level that has some, as far as they
        follow each other in the log with the same counts and mark."""
        run = self._heaps[level].take(limit)
        count = run[3]
        self.messages -= count
        self.size -= run[4]
        if run[5]:
            self.again -= count
        assert self.messages >= 0, "more was taken than is there"
        return run

    def runs(self, level: int) -> list[Run]:
        """Returns the runs of a level, oldest first. Cost: O(runs log runs)."""
        heap = self._heaps.get(level)
        return heap.runs() if heap is not None else []

    def all_runs(self) -> list[Run]:
        """Returns the runs of all levels, in the order of the log."""
        return sorted(run for heap in self._heaps.values() for run in heap.runs())

    def indexes(self) -> list[int]:
        """Returns the entry index of every run."""
        return [index for heap in self._heaps.values() for index in heap.indexes()]

    def run_count(self) -> int:
        """Returns the number of runs."""
        return sum(map(len, self._heaps.values()))

    def memory_bytes(self) -> int:
        """Returns the bytes of the packed runs."""
        return sum(heap.memory_bytes() for heap in self._heaps.values())

    def clear(self) -> None:
        """Drops everything."""
        self._heaps.clear()
        self.messages = self.size = self.again = 0

    def pack(self) -> list[tuple[int, bytes]]:
        """Returns plain values, equal for equal content: level and packed runs, the highest
        first."""
        return [
            (level, words_to_bytes(self._heaps[level].words()))
            for level in sorted(self.levels(), reverse=True)
        ]

    def unpack(self, packed: list[tuple[int, bytes]]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self.clear()
        for level, data in packed:
            words = words_from_bytes(data, 5)
            columns = [words[column::5] for column in range(5)]
            for index, place, amount, counts, mark in zip(*columns, strict=True):
                if not amount >> 32:
                    raise ValueError("packed runs: an empty run")
                where = (index, place >> 32, place & LOW)
                sums = (amount >> 32, amount & LOW, counts >> 32, counts & LOW)
                self.add(level, (*where, *sums, mark))
