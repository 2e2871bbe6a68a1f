"""Pack files: the segments of many groups in one file (docs/formats/storage.md)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from crc32c import crc32c

from convoymq.logformat.identity import ClusterIds, check_version
from convoymq.logformat.segment import Segment, SizedReadable

PACK_DIRECTORY = "packs"
PACK_MAGIC = b"CVYPACK\x01"
PACK_HEADER = struct.Struct("<8sII16sII")
"""magic+version, sections, crc32c of the rows, cluster id, crc32c of the bytes before it, spare."""
PACK_HEADER_CHECKED = 32
"""Bytes of the header that its checksum covers."""
SECTION_ROW = struct.Struct("<QQIIII")
"""order, lowest order that it replaces, group, offset / 8, size / 8, spare."""
PACK_GAP_BYTES = 8 << 10
"""Lies between the two copies of the directory: what destroys one spares the other."""


class SectionRow(NamedTuple):
    """A row of a pack's directory."""

    order: int
    since: int
    group: int
    offset: int
    size: int
    spare: int


class Section(Segment):
    """Places of the entries of one group's segment in a pack."""

    __slots__ = ("group", "length", "pack", "purge", "since", "start")

    def __init__(
        self, pack: Pack, row: SectionRow, indexes: array[int], offsets: array[int],
        sizes: array[int],
    ) -> None:  # fmt: skip
        super().__init__(pack.name, row.order, indexes, offsets, sizes)
        self.pack = pack
        self.group = row.group
        self.since = row.since
        """Segments of the group with orders from here on to its own are in it."""
        self.start = row.offset << 3
        self.length = row.size << 3
        self.purge = False
        """Truncated entries in it must leave the disk before the WAL file does that has their
        successors."""

    @property
    def row(self) -> SectionRow:
        """Returns its row in the directory."""
        return SectionRow(self.order, self.since, self.group, self.start >> 3, self.length >> 3, 0)

    def moved(self, pack: Pack, start: int) -> None:
        """Lies, as it is, in another pack."""
        delta = (start - self.start) >> 3
        self.offsets = array("I", [offset + delta for offset in self.offsets])
        self.pack, self.name, self.start = pack, pack.name, start

    def rewritten(self, other: Section) -> None:
        """Is what `other` has of it, a copy without what was truncated."""
        if other.last > self.last:
            # Truncated once more while it was copied.
            other.cut(self.last + 1)
        for name in (*Segment.__slots__, *Section.__slots__):
            setattr(self, name, getattr(other, name))


class Pack:
    """A pack file, and the sections of it that are somebody's."""

    __slots__ = (
        "file", "groups", "held_bytes", "live_bytes", "name", "number", "purge", "sections",
    )  # fmt: skip

    def __init__(self, number: int, rows: list[SectionRow]) -> None:
        self.number = number
        self.name = pack_name(number)
        self.file: Any = None
        """The node's open file; the log's business."""
        self.groups = array("I", sorted({row.group for row in rows}))
        self.held_bytes = 8 * sum(row.size for row in rows)
        self.live_bytes = 0
        self.sections: dict[tuple[int, int], Section] = {}
        """(group, order) -> section."""
        self.purge = False
        """Has truncated entries: see `Section.purge`."""

    def add(self, section: Section) -> None:
        """The section is its group's."""
        self.sections[section.group, section.order] = section
        self.live_bytes += section.length

    def drop(self, section: Section) -> None:
        """The section is nobody's any more; twice is once."""
        if self.holds(section):
            del self.sections[section.group, section.order]
            self.live_bytes -= section.length

    def holds(self, section: Section) -> bool:
        """Returns whether the section is still its group's, and here."""
        return self.sections.get((section.group, section.order)) is section


def drop_sections(segments: Iterable[Segment]) -> None:
    """Takes sections from their packs, which nobody needs any more; passes over other segments."""
    for segment in segments:
        if isinstance(segment, Section):
            segment.pack.drop(segment)


def pack_name(number: int) -> str:
    """Path of a pack file."""
    return f"{PACK_DIRECTORY}/{number:016x}.pack"


def pack_header(rows: bytes, cluster: bytes) -> bytes:
    """Returns the first bytes of a pack, and the last ones, for the rows of its directory."""
    count = len(rows) // SECTION_ROW.size
    head = PACK_HEADER.pack(PACK_MAGIC, count, crc32c(rows), cluster, 0, 0)[:PACK_HEADER_CHECKED]
    return head + struct.pack("<II", crc32c(head), 0)


def read_pack(file: SizedReadable, clusters: ClusterIds) -> list[SectionRow] | None:
    """Returns a pack's directory; None when neither copy can be read.

    Raises:
        StorageFault: the file is of another cluster, or of another version of its format.
    """
    end = file.size() - PACK_HEADER.size
    for at in (0, end):
        try:
            head = file.pread(PACK_HEADER.size, at) if end >= 0 else b""
        except OSError:
            continue
        if len(head) < PACK_HEADER.size:
            continue
        magic, count, rows_checksum, cluster, checksum, _ = PACK_HEADER.unpack(head)
        if crc32c(head[:PACK_HEADER_CHECKED]) != checksum:
            continue
        check_version(head, PACK_MAGIC, file.name)
        size = count * SECTION_ROW.size
        start = at - size if at else PACK_HEADER.size
        if magic != PACK_MAGIC or start < PACK_HEADER.size:
            continue
        clusters.check(cluster, file.name)
        try:
            rows = file.pread(size, start)
        except OSError:
            continue
        if len(rows) == size and crc32c(rows) == rows_checksum:
            return [SectionRow(*row) for row in SECTION_ROW.iter_unpack(rows)]
    return None
