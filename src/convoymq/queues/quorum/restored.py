# cython: annotation_typing=False
"""Ready messages that stand at the place at which they were published, by priority level.

They came back to a queue that puts what comes back there. An item is a run in five numbers, and the
items of a level are a heap: index · offset, first · count, size · acquired_count,
failed_delivery_count · mark. Cost: O(log runs) for a run that comes or goes; some 200 B for each.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush, heapreplace

from convoymq.model.words import words_from_bytes, words_to_bytes
from convoymq.queues.quorum.runs import LOW, Run

Item = tuple[int, int, int, int, int]
Place = tuple[int, int]
"""(entry index, offset above record), which ascends in the order of the log."""


def place_of(run: Run) -> Place:
    """Returns where a run begins."""
    return run[0], run[1] << 32 | run[2]


def run_of(item: Item) -> Run:
    """Returns the run that an item packs."""
    index, place, amount, counts, mark = item
    place_and_amount = (place >> 32, place & LOW, amount >> 32, amount & LOW)
    return (index, *place_and_amount, counts >> 32, counts & LOW, mark)


ITEM_BYTES = 200
"""Of a tuple of five numbers, about."""


class Restored:
    """See the module text."""

    __slots__ = ("_heaps", "_messages", "again", "messages", "size")

    def __init__(self) -> None:
        self._heaps: dict[int, list[Item]] = {}
        self._messages: dict[int, int] = {}
        self.messages = 0
        self.size = 0
        #: Of the messages, those that were handed out before.
        self.again = 0

    def add(self, level: int, run: Run) -> None:
        """Puts a run where it was published."""
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        counts = acquired_count << 32 | failed_delivery_count
        heap = self._heaps.setdefault(level, [])
        heappush(heap, (index, offset << 32 | first, count << 32 | size, counts, mark))
        self._messages[level] = self._messages.get(level, 0) + count
        self.messages += count
        self.size += size
        if acquired_count:
            self.again += count

    def levels(self) -> list[int]:
        """Levels that have messages."""
        return [level for level, heap in self._heaps.items() if heap]

    def count(self, level: int) -> int:
        """Returns the number of messages of a level."""
        return self._messages.get(level, 0)

    def head(self, level: int) -> Run | None:
        """Returns the oldest run of a level; None = it has none."""
        heap = self._heaps.get(level)
        return run_of(heap[0]) if heap else None

    def head_place(self, level: int) -> Place | None:
        """Returns where the oldest run of a level begins; None = it has none."""
        heap = self._heaps.get(level)
        return heap[0][:2] if heap else None

    def take(self, level: int, limit: int) -> Run:
        """Removes at most `limit` messages from the oldest run of a level that has some."""
        heap = self._heaps[level]
        run = run_of(heap[0])
        count = run[3]
        if count <= limit:
            heappop(heap)
        else:
            part = run[4] * limit // count
            place = (run[1] << 32 | run[2]) + limit
            rest = (count - limit) << 32 | (run[4] - part)
            heapreplace(heap, (run[0], place, rest, *heap[0][3:]))
            run = (*run[:3], limit, part, *run[5:])
            count = limit
        self._messages[level] -= count
        self.messages -= count
        self.size -= run[4]
        if run[5]:
            self.again -= count
        assert self.messages >= 0, "more was taken than is there"
        return run

    def runs(self, level: int) -> list[Run]:
        """Returns the runs of a level, oldest first. Cost: O(runs log runs)."""
        return [run_of(item) for item in sorted(self._heaps.get(level, ()))]

    def all_runs(self) -> list[Run]:
        """Returns the runs of all levels, in the order of the log."""
        return sorted(run_of(item) for heap in self._heaps.values() for item in heap)

    def indexes(self) -> list[int]:
        """Returns the entry index of every run."""
        return [item[0] for heap in self._heaps.values() for item in heap]

    def run_count(self) -> int:
        """Returns the number of runs."""
        return sum(len(heap) for heap in self._heaps.values())

    def memory_bytes(self) -> int:
        """About as many bytes as the items take."""
        return self.run_count() * ITEM_BYTES

    def clear(self) -> None:
        """Drops everything."""
        self._heaps.clear()
        self._messages.clear()
        self.messages = self.size = self.again = 0

    def pack(self) -> list[tuple[int, bytes]]:
        """Plain values, equal for equal content: level and packed items, the highest first."""
        made: list[tuple[int, bytes]] = []
        for level in sorted(self.levels(), reverse=True):
            words = array("Q")
            for item in sorted(self._heaps[level]):
                words.extend(item)
            made.append((level, words_to_bytes(words)))
        return made

    def unpack(self, packed: list[tuple[int, bytes]]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self.clear()
        for level, data in packed:
            words = words_from_bytes(data, 5)
            for at in range(0, len(words), 5):
                item = (words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4])
                if not item[2] >> 32:
                    raise ValueError("packed runs: an empty run")
                self.add(level, run_of(item))
