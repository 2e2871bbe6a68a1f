"""Segment files: the entries of one group that outlived their WAL file (docs/formats/storage.md).

A segment is written once, whole, under a temporary name; compaction replaces it by a smaller one
of the same name. Everything here runs on the worker, but for `Segment`, which belongs to the log.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from crc32c import crc32c

from convoymq.storage.identity import NO_CLUSTER, ClusterIds, check_version
from convoymq.storage.types import Directory, File, NoPace, Pace, StorageFault
from convoymq.streamlog.segment import Segment

SEGMENT_MAGIC = b"CVYSEGM\x02"
SEGMENT_HEADER = struct.Struct("<8sII16sI4x")
"""magic+version, group, spare, cluster id, crc32c of the bytes before it, spare."""
INDEX_ROW = struct.Struct("<QQII")
"""index, term, offset / 8, size / 8."""
FOOTER_MAGIC = b"CVYSEGI\x01"
FOOTER = struct.Struct("<8sIIQII")
"""magic+version, rows, crc32c of the rows, their offset, crc32c of the bytes before, spare."""

_ENTRY_HEAD = struct.Struct("<IIQQQIBB")
ERA_SHIFT = 40
ORDER_MASK = (1 << ERA_SHIFT) - 1
COPY_SPAN_BYTES = 1 << 20
PACED_BYTES = 256 << 10
"""What is written between two rests: less than what the disk takes in the time of a flush."""
COPY_GAP_BYTES = 64 << 10


def group_path(group: int) -> str:
    """Directory of a group's segments and snapshot."""
    return f"groups/{group:08x}"


def segment_name(group: int, order: int) -> str:
    """Path of a segment file."""
    return f"{group_path(group)}/{order:016x}.seg"


class Piece:
    """Entries to copy: indexes, and where they lie in one file."""

    __slots__ = ("file", "indexes", "offsets", "sizes")

    def __init__(
        self, file: File, indexes: array[int], offsets: array[int], sizes: array[int]
    ) -> None:
        self.file = file
        self.indexes = indexes
        self.offsets = offsets
        self.sizes = sizes


def verify_entry(view: memoryview, group: int, index: int, name: str, offset: int) -> int:
    """Checks an entry read from disk and returns its term. Raises StorageFault."""
    length, checksum, found, term, _, owner, _, _ = _ENTRY_HEAD.unpack_from(view)
    if length != len(view) or crc32c(view[8:]) != checksum:
        raise StorageFault(f"entry {index} of group {group} is damaged", path=name, offset=offset)
    if found != index or owner != group:
        raise StorageFault(
            f"entry {found} of group {owner} lies where {index} of {group} should",
            path=name,
            offset=offset,
        )
    return int(term)


def read_piece(piece: Piece, group: int) -> Iterator[tuple[int, int, memoryview]]:
    """(index, term, bytes) of each entry, verified, read in big spans."""
    count = len(piece.indexes)
    at = 0
    while at < count:
        start = piece.offsets[at]
        end = start + piece.sizes[at]
        upto = at + 1
        while (
            upto < count
            and end <= piece.offsets[upto] <= end + (COPY_GAP_BYTES >> 3)
            and piece.offsets[upto] + piece.sizes[upto] - start <= COPY_SPAN_BYTES >> 3
        ):
            end = piece.offsets[upto] + piece.sizes[upto]
            upto += 1
        data = memoryview(piece.file.pread((end - start) << 3, start << 3))
        if len(data) != (end - start) << 3:
            raise StorageFault("the file ends early", path=piece.file.name, offset=start << 3)
        for i in range(at, upto):
            begin = (piece.offsets[i] - start) << 3
            view = data[begin : begin + (piece.sizes[i] << 3)]
            index = piece.indexes[i]
            term = verify_entry(view, group, index, piece.file.name, piece.offsets[i] << 3)
            yield index, term, view
        at = upto


class SegmentWriter:
    """Writes entries to as many segment files as the limits ask for.

    Nothing is visible before `finish`, which gives the files their orders. `tag`: unique among the
    group's writers. While `pace` is not urgent, little is written at a time and made durable at
    once: a long queue at the disk is one that the log's flushes stand in.
    """

    def __init__(
        self,
        directory: Directory,
        group: int,
        tag: int,
        entries_max: int,
        size_max: int,
        pace: Pace | None = None,
        cluster: bytes = NO_CLUSTER,
    ) -> None:
        self._cluster = cluster
        self._directory = directory
        self._group = group
        self._tag = tag
        self._entries_max = entries_max
        self._size_max = size_max
        self._pace = pace or NoPace()
        self._file: File | None = None
        self._buffers: list[bytes | memoryview] = []
        self._buffered = 0
        self._at = 0
        self._rows = bytearray()
        self._indexes: array[int] = array("Q")
        self._offsets: array[int] = array("I")
        self._sizes: array[int] = array("I")
        self._finished: list[tuple[str, array[int], array[int], array[int]]] = []

    def add(self, index: int, term: int, data: bytes | memoryview) -> None:
        """Appends an entry; indexes ascend."""
        size = len(data)
        if self._file is not None and (
            len(self._indexes) >= self._entries_max or self._at + size > self._size_max
        ):
            self._close()
        if self._file is None:
            self._open()
        self._rows += INDEX_ROW.pack(index, term, self._at >> 3, size >> 3)
        self._indexes.append(index)
        self._offsets.append(self._at >> 3)
        self._sizes.append(size >> 3)
        self._buffers.append(data)
        self._buffered += size
        self._at += size
        if self._buffered >= COPY_SPAN_BYTES:
            self._write()

    def _open(self) -> None:
        self._directory.make(group_path(self._group))
        name = f"{group_path(self._group)}/{self._tag:x}-{len(self._finished)}.part"
        file = self._directory.open(name, create=True)
        file.truncate(0)
        head = SEGMENT_HEADER.pack(SEGMENT_MAGIC, self._group, 0, self._cluster, 0)
        head = head[:32] + struct.pack("<II", crc32c(head[:32]), 0)
        self._file = file
        self._buffers = [head]
        self._buffered = self._at = len(head)
        self._rows = bytearray()
        self._indexes, self._offsets, self._sizes = array("Q"), array("I"), array("I")

    def _write(self) -> None:
        assert self._file is not None
        at = self._at - self._buffered
        waiting = deque(self._buffers)
        while waiting:
            paced = not self._pace.is_urgent()
            size_max = PACED_BYTES if paced else COPY_SPAN_BYTES
            part: list[bytes | memoryview] = []
            size = 0
            while waiting and size < size_max:
                size += len(waiting[0])
                part.append(waiting.popleft())
            self._file.pwrite(part, at)  # type: ignore[arg-type]
            at += size
            if paced:
                self._file.sync()
                self._pace.rest(size)
        self._buffers = []
        self._buffered = 0

    def _close(self) -> None:
        assert self._file is not None
        rows = bytes(self._rows)
        foot = FOOTER.pack(FOOTER_MAGIC, len(self._indexes), crc32c(rows), self._at, 0, 0)
        foot = foot[:24] + struct.pack("<II", crc32c(foot[:24]), 0)
        self._buffers += [rows, foot]
        self._buffered += len(rows) + len(foot)
        self._at += len(rows) + len(foot)
        self._write()
        self._file.sync()
        self._finished.append((self._file.name, self._indexes, self._offsets, self._sizes))
        self._file.close()
        self._file = None

    def finish(self, order: int) -> list[Segment]:
        """Makes the segments visible and durable, with orders from `order` on."""
        if self._file is not None:
            self._close()
        segments = []
        for temporary, indexes, offsets, sizes in self._finished:
            name = segment_name(self._group, order)
            self._directory.rename(temporary, name)
            segments.append(Segment(name, order, indexes, offsets, sizes))
            order += 1
        if segments:
            self._directory.sync(group_path(self._group))
        return segments


def copy_to_segments(
    directory: Directory,
    group: int,
    order: int,
    pieces: Iterable[Piece],
    entries_max: int,
    size_max: int,
    pace: Pace | None = None,
    cluster: bytes = NO_CLUSTER,
) -> list[Segment]:
    """Copies entries to new segments. Raises StorageFault for a damaged one, OSError."""
    writer = SegmentWriter(directory, group, order, entries_max, size_max, pace, cluster)
    for piece in pieces:
        for index, term, view in read_piece(piece, group):
            writer.add(index, term, view)
    return writer.finish(order)


def load_segment(
    directory: Directory, group: int, name: str, clusters: ClusterIds
) -> tuple[Segment, Sequence[tuple[int, int]]]:
    """The segment's table and its runs of terms [(first index, term)]. Raises StorageFault."""
    file = directory.open(name)
    size = file.size()
    head = file.pread(SEGMENT_HEADER.size, 0)
    check_version(head, SEGMENT_MAGIC, name)
    if size < SEGMENT_HEADER.size + FOOTER.size or head[:8] != SEGMENT_MAGIC:
        raise StorageFault("not a segment file", path=name, offset=0)
    _, owner, _, cluster, checksum = SEGMENT_HEADER.unpack(head)
    if crc32c(head[:32]) != checksum or owner != group:
        raise StorageFault("the segment's header is damaged", path=name, offset=0)
    clusters.check(cluster, name)
    foot = file.pread(FOOTER.size, size - FOOTER.size)
    magic, count, rows_checksum, at, checksum, _ = FOOTER.unpack(foot)
    if magic != FOOTER_MAGIC or crc32c(foot[:24]) != checksum:
        raise StorageFault("the segment's end is damaged", path=name, offset=size - FOOTER.size)
    rows = file.pread(count * INDEX_ROW.size, at)
    if crc32c(rows) != rows_checksum or len(rows) != count * INDEX_ROW.size or not count:
        raise StorageFault("the segment's index is damaged", path=name, offset=at)
    indexes: array[int] = array("Q")
    offsets: array[int] = array("I")
    sizes: array[int] = array("I")
    terms: list[tuple[int, int]] = []
    last_term = -1
    for index, term, offset, length in INDEX_ROW.iter_unpack(rows):
        indexes.append(index)
        offsets.append(offset)
        sizes.append(length)
        if term != last_term:
            terms.append((index, term))
            last_term = term
    order = int(name.rpartition("/")[2][:-4], 16)
    segment = Segment(name, order, indexes, offsets, sizes)
    file.close()
    return segment, terms
