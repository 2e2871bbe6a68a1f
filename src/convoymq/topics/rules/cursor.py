"""Acknowledgements of a group in one physical partition: a watermark and the runs above it.

All offsets below the watermark are acknowledged. Runs are half open, disjoint, sorted, and begin
above the watermark: an acknowledgement that closes a gap joins its neighbours.

Source: docs/adr/0061-a-simulated-topic.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Cursor:
    """A set of offsets with a contiguous beginning."""

    __slots__ = ("ends", "starts", "watermark")

    def __init__(self, watermark: int = 0) -> None:
        self.watermark = watermark
        self.starts: list[int] = []
        self.ends: list[int] = []

    def __contains__(self, offset: int) -> bool:
        if offset < self.watermark:
            return True
        at = bisect_right(self.starts, offset) - 1
        return at >= 0 and offset < self.ends[at]

    def ack(self, offset: int) -> bool:
        """Adds an offset; False when it was in already. Cost: O(runs) at worst."""
        if offset in self:
            return False
        if offset == self.watermark:
            self.advance(offset + 1)
            return True
        at = bisect_right(self.starts, offset)
        joins_left = at > 0 and self.ends[at - 1] == offset
        joins_right = at < len(self.starts) and self.starts[at] == offset + 1
        if joins_left and joins_right:
            self.ends[at - 1] = self.ends[at]
            del self.starts[at], self.ends[at]
        elif joins_left:
            self.ends[at - 1] = offset + 1
        elif joins_right:
            self.starts[at] = offset
        else:
            self.starts.insert(at, offset)
            self.ends.insert(at, offset + 1)
        return True

    def ack_range(self, first: int, end: int) -> None:
        """Adds the offsets `first` to `end` (exclusive). Cost: O(runs) at worst."""
        if first <= self.watermark:
            self.advance(end)
            return
        if first >= end:
            return
        low = bisect_left(self.ends, first)
        high = bisect_right(self.starts, end)
        if low < high:
            first = min(first, self.starts[low])
            end = max(end, self.ends[high - 1])
        self.starts[low:high] = [first]
        self.ends[low:high] = [end]

    def missing(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the runs of offsets from `first` to `end` (exclusive) that are not in it."""
        at = max(first, self.watermark)
        run = bisect_right(self.ends, at)
        while at < end:
            start = self.starts[run] if run < len(self.starts) else end
            if at < start:
                yield at, min(start, end)
            at = self.ends[run] if run < len(self.ends) else end
            run += 1

    def advance(self, watermark: int) -> None:
        """Everything below `watermark` counts as acknowledged; it never falls."""
        self.watermark = max(self.watermark, watermark)
        while self.starts and self.starts[0] <= self.watermark:
            self.watermark = max(self.watermark, self.ends[0])
            del self.starts[0], self.ends[0]

    def pack(self) -> list[int]:
        """Watermark, then begin and end of each run."""
        packed = [self.watermark]
        for start, end in zip(self.starts, self.ends, strict=True):
            packed += (start, end)
        return packed

    @classmethod
    def load(cls, packed: Iterable[int]) -> Cursor:
        """The cursor that was packed."""
        watermark, *bounds = packed
        cursor = cls(watermark)
        cursor.starts, cursor.ends = bounds[::2], bounds[1::2]
        cursor.check_invariants()
        return cursor

    def check_invariants(self) -> None:
        """Raises AssertionError when runs touch, overlap or are out of order."""
        last = self.watermark
        for start, end in zip(self.starts, self.ends, strict=True):
            assert last < start < end, (self.watermark, self.starts, self.ends)
            last = end
