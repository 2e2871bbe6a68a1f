"""Segment files: layout, where the entries lie, reading them (docs/formats/storage.md)."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple, Protocol

from crc32c import crc32c

from convoymq.kernels.entries import Entry
from convoymq.logformat.entry import check_entry
from convoymq.logformat.identity import ClusterIds, check_version
from convoymq.model.errors import StorageFault

SEGMENT_MAGIC = b"CVYSEGM\x02"
SEGMENT_HEADER = struct.Struct("<8sII16sI4x")
"""magic+version, group, spare, cluster id, crc32c of the bytes before it, spare."""
SEGMENT_HEADER_CHECKED = 32
"""Bytes of the header that its checksum covers."""
INDEX_ROW = struct.Struct("<QQII")
"""index, term, offset / 8, size / 8."""
FOOTER_MAGIC = b"CVYSEGI\x01"
FOOTER = struct.Struct("<8sIIQII")
"""magic+version, rows, crc32c of the rows, their offset, crc32c of the bytes before, spare."""
FOOTER_CHECKED = 24
"""Bytes of the footer that its checksum covers."""
ERA_SHIFT = 40
"""The bits of a segment's order from here on are its group's era."""
ORDER_MASK = (1 << ERA_SHIFT) - 1

WHOLE_BYTES = 128 << 10
"""A larger entry is read alone: cutting it out of a longer read would copy it."""


class FilePlace(NamedTuple):
    """Identity of a file, for other processes of this machine."""

    path: str
    device: int
    inode: int


class Readable(Protocol):
    """A file as far as reading goes."""

    name: str

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file. Raises OSError."""


class SizedReadable(Readable, Protocol):
    """A file whose length is known."""

    def size(self) -> int:
        """Returns the length in bytes. Raises OSError."""


def group_path(group: int) -> str:
    """Directory of a group's segments and snapshot."""
    return f"groups/{group:08x}"


def segment_name(group: int, order: int) -> str:
    """Path of a segment file."""
    return f"{group_path(group)}/{order:016x}.seg"


def segment_header(group: int, cluster: bytes) -> bytes:
    """Returns the first bytes of a segment file."""
    head = SEGMENT_HEADER.pack(SEGMENT_MAGIC, group, 0, cluster, 0)[:SEGMENT_HEADER_CHECKED]
    return head + struct.pack("<II", crc32c(head), 0)


def segment_footer(rows: bytes, offset: int) -> bytes:
    """Returns the last bytes of a segment file, whose index rows begin at `offset`."""
    count = len(rows) // INDEX_ROW.size
    foot = FOOTER.pack(FOOTER_MAGIC, count, crc32c(rows), offset, 0, 0)[:FOOTER_CHECKED]
    return foot + struct.pack("<II", crc32c(foot), 0)


class Segment:
    """Places of the entries in one segment file."""

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
        """Returns where the last entry ends in the file."""
        return (self.offsets[-1] + self.sizes[-1]) << 3

    def position(self, index: int) -> int:
        """Returns the position of the entry, -1 when it is not here."""
        if not self.first <= index <= self.last:
            return -1
        if self.indexes is None:
            return index - self.first
        at = bisect_left(self.indexes, index)
        return at if self.indexes[at] == index else -1

    def lower(self, index: int) -> int:
        """Returns the number of entries below `index`."""
        if self.indexes is None:
            return min(max(index - self.first, 0), len(self.offsets))
        return bisect_left(self.indexes, index)

    def index_at(self, position: int) -> int:
        """Returns the index of the entry at a position."""
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


def read_entries(
    file: Readable, segment: Segment, group: int, position: int, limit: int
) -> list[Entry]:
    """Returns an entry and those behind it that one read of at most `limit` bytes brings along.

    Raises:
        StorageFault: the file is too short, or other entries lie there. OSError.
    """
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
    found = []
    for at in range(position, upto):
        begin = (offsets[at] - start) << 3
        # A slice of all of it is no copy.
        part = data[begin : begin + (sizes[at] << 3)]
        found.append(check_entry(part, group, segment.index_at(at), segment.name, offsets[at] << 3))
    return found


class SegmentTable:
    """Places of the entries of a segment that is being written, and the rows that say so in it."""

    __slots__ = ("indexes", "offsets", "rows", "sizes")

    def __init__(self) -> None:
        self.rows = bytearray()
        self.indexes: array[int] = array("Q")
        self.offsets: array[int] = array("I")
        self.sizes: array[int] = array("I")

    def add(self, index: int, term: int, at: int, size: int) -> None:
        """An entry lies `at` so many bytes behind the segment's beginning."""
        self.rows += INDEX_ROW.pack(index, term, at >> 3, size >> 3)
        self.indexes.append(index)
        self.offsets.append(at >> 3)
        self.sizes.append(size >> 3)


class FoundTable(NamedTuple):
    """Table of a segment that was read."""

    indexes: array[int]
    offsets: array[int]
    sizes: array[int]
    runs: list[tuple[int, int]]
    """Runs of terms: (first index, term)."""


def read_table(
    file: Readable, group: int, clusters: ClusterIds, start: int, size: int
) -> FoundTable:
    """Returns the table of the segment that lies in a file at `start`, `size` bytes long. Raises
    StorageFault."""
    name = file.name
    head = file.pread(SEGMENT_HEADER.size, start)
    check_version(head, SEGMENT_MAGIC, name)
    short = len(head) != SEGMENT_HEADER.size or size < SEGMENT_HEADER.size + FOOTER.size
    if short or head[:8] != SEGMENT_MAGIC:
        raise StorageFault("not a segment file", path=name, offset=start)
    _, owner, _, cluster, checksum = SEGMENT_HEADER.unpack(head)
    if crc32c(head[:SEGMENT_HEADER_CHECKED]) != checksum or owner != group:
        raise StorageFault("the segment's header is damaged", path=name, offset=start)
    clusters.check(cluster, name)
    end = start + size - FOOTER.size
    foot = file.pread(FOOTER.size, end)
    if len(foot) != FOOTER.size:
        raise StorageFault("the file ends early", path=name, offset=end)
    magic, count, rows_checksum, at, checksum, _ = FOOTER.unpack(foot)
    if magic != FOOTER_MAGIC or crc32c(foot[:FOOTER_CHECKED]) != checksum:
        raise StorageFault("the segment's end is damaged", path=name, offset=end)
    rows = file.pread(count * INDEX_ROW.size, start + at)
    if crc32c(rows) != rows_checksum or len(rows) != count * INDEX_ROW.size or not count:
        raise StorageFault("the segment's index is damaged", path=name, offset=start + at)
    found = FoundTable(array("Q"), array("I"), array("I"), [])
    last_term = -1
    for index, term, offset, length in INDEX_ROW.iter_unpack(rows):
        found.indexes.append(index)
        found.offsets.append(offset + (start >> 3))
        found.sizes.append(length)
        if term != last_term:
            found.runs.append((index, term))
            last_term = term
    return found
