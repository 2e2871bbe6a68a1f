"""Writing segments: the entries of one group that outlived their WAL file.

A segment is written once, whole, under a temporary name; compaction replaces it by a smaller one
of the same name. Everything here runs on the worker.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator

from convoymq.logformat.entry import check_term
from convoymq.logformat.identity import NO_CLUSTER, ClusterIds
from convoymq.logformat.segment import (
    Segment,
    SegmentTable,
    group_path,
    read_table,
    segment_footer,
    segment_header,
    segment_name,
)
from convoymq.storage.types import Directory, File, NoPace, Pace, StorageFault

COPY_SPAN_BYTES = 1 << 20
PACED_BYTES = 256 << 10
"""Bytes written between two pauses: less than what the disk takes in the time of a flush."""
COPY_GAP_BYTES = 64 << 10


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


def piece_of(file: File, segment: Segment, ranges: Iterable[tuple[int, int]]) -> Piece:
    """Returns the entries of a segment in the index ranges; `file`: where the segment lies."""
    piece = Piece(file, array("Q"), array("I"), array("I"))
    for a, b in ranges:
        low, high = segment.lower(a), segment.lower(b + 1)
        piece.indexes.extend([segment.index_at(i) for i in range(low, high)])
        piece.offsets.extend(segment.offsets[low:high])
        piece.sizes.extend(segment.sizes[low:high])
    return piece


def read_piece(piece: Piece, group: int) -> Iterator[tuple[int, int, memoryview]]:
    """Yields (index, term, bytes) of each entry, verified, read in big spans."""
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
            term = check_term(view, group, index, piece.file.name, piece.offsets[i] << 3)
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
        self._table = SegmentTable()
        self._finished: list[tuple[str, SegmentTable]] = []

    def add(self, index: int, term: int, data: bytes | memoryview) -> None:
        """Appends an entry; indexes ascend."""
        size = len(data)
        if self._file is not None and (
            len(self._table.indexes) >= self._entries_max or self._at + size > self._size_max
        ):
            self._close()
        if self._file is None:
            self._open()
        self._table.add(index, term, self._at, size)
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
        head = segment_header(self._group, self._cluster)
        self._file = file
        self._buffers = [head]
        self._buffered = self._at = len(head)
        self._table = SegmentTable()

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
            self._file.pwrite(part, at)
            at += size
            if paced:
                self._file.sync()
                self._pace.rest(size)
        self._buffers = []
        self._buffered = 0

    def _close(self) -> None:
        assert self._file is not None
        rows = bytes(self._table.rows)
        foot = segment_footer(rows, self._at)
        self._buffers += [rows, foot]
        self._buffered += len(rows) + len(foot)
        self._at += len(rows) + len(foot)
        self._write()
        self._file.sync()
        self._finished.append((self._file.name, self._table))
        self._file.close()
        self._file = None

    def finish(self, order: int) -> list[Segment]:
        """Makes the segments visible and durable, with orders from `order` on."""
        if self._file is not None:
            self._close()
        segments = []
        for temporary, table in self._finished:
            name = segment_name(self._group, order)
            self._directory.rename(temporary, name)
            segments.append(Segment(name, order, table.indexes, table.offsets, table.sizes))
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
    directory: Directory, group: int, name: str, order: int, clusters: ClusterIds
) -> tuple[Segment, list[tuple[int, int]]]:
    """Returns the segment's table and its runs of terms [(first index, term)]. Raises
    StorageFault."""
    file = directory.open(name)
    table = read_table(file, group, clusters, 0, file.size())
    file.close()
    return Segment(name, order, table.indexes, table.offsets, table.sizes), table.runs
