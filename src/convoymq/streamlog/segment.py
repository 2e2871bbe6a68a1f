"""Where the entries of a segment file lie, and reading them (docs/formats/storage.md)."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple, Protocol

from convoymq.model.errors import StorageFault

WHOLE_BYTES = 128 << 10
"""A larger entry is read alone: cutting it out of a longer read would copy it."""


class FilePlace(NamedTuple):
    """Which file it is, for other processes of this machine."""

    path: str
    device: int
    inode: int


class Readable(Protocol):
    """A file as far as reading goes."""

    name: str

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file. Raises OSError."""


class Segment:
    """Where the entries of one segment file lie."""

    __slots__ = (
        "file", "first", "indexes", "last", "name", "offsets", "order", "size", "sizes", "stale",
    )  # fmt: skip

    def __init__(
        self, name: str, order: int, indexes: array[int], offsets: array[int], sizes: array[int]
    ) -> None:
        assert len(indexes) == len(offsets) == len(sizes) > 0
        self.name = name
        self.order = order
        self.file: Any = None
        """The node's open file; the log's business."""
        self.first = indexes[0]
        self.last = indexes[-1]
        self.indexes: array[int] | None = indexes
        if self.last - self.first + 1 == len(indexes):
            self.indexes = None  # consecutive: the position says it
        self.offsets = offsets
        self.sizes = sizes
        self.size = 8 * sum(sizes)
        self.stale = False
        """The file holds entries that were truncated: it must be rewritten."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def end(self) -> int:
        """Where the last entry ends in the file."""
        return (self.offsets[-1] + self.sizes[-1]) << 3

    def position(self, index: int) -> int:
        """Position of the entry, -1 when it is not here."""
        if not self.first <= index <= self.last:
            return -1
        if self.indexes is None:
            return index - self.first
        at = bisect_left(self.indexes, index)
        return at if self.indexes[at] == index else -1

    def lower(self, index: int) -> int:
        """Number of entries below `index`."""
        if self.indexes is None:
            return min(max(index - self.first, 0), len(self.offsets))
        return bisect_left(self.indexes, index)

    def index_at(self, position: int) -> int:
        """Index of the entry at a position."""
        return self.first + position if self.indexes is None else self.indexes[position]

    def cut(self, index: int) -> None:
        """Forgets the entries >= index; at least one must be left."""
        keep = self.lower(index)
        assert keep > 0
        self.last = self.index_at(keep - 1)
        if self.indexes is not None:
            del self.indexes[keep:]
        del self.offsets[keep:]
        del self.sizes[keep:]
        self.size = 8 * sum(self.sizes)
        self.stale = True


def read_entries(file: Readable, segment: Segment, position: int, limit: int) -> list[bytes]:
    """The bytes of an entry and of those behind it that one read of at most `limit` bytes brings
    along, unchecked. Raises StorageFault: the file is too short. OSError."""
    offsets, sizes = segment.offsets, segment.sizes
    start = offsets[position]
    if sizes[position] << 3 > WHOLE_BYTES:
        limit = 0
    upto = min(bisect_right(offsets, start + (limit >> 3), position), len(offsets))
    while upto > position + 1 and offsets[upto - 1] + sizes[upto - 1] - start > limit >> 3:
        upto -= 1
    span = (offsets[upto - 1] + sizes[upto - 1] - start) << 3
    data = file.pread(span, start << 3)
    if len(data) != span:
        raise StorageFault("the file ends early", path=segment.name, offset=start << 3)
    if upto == position + 1:
        return [data]
    found = []
    for at in range(position, upto):
        begin = (offsets[at] - start) << 3
        found.append(data[begin : begin + (sizes[at] << 3)])
    return found
