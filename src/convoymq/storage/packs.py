"""Packs: what little a WAL file has of each of many groups, together in one file.

A segment file for each of them would cost a directory, a file and three syncs a group (ADR 0100).

A *pack* is written whole under a temporary name and never changed. Its *sections* are segments of
their groups like any other. One that its group has no use for any more is dead, in memory only:
recovery finds it again, which is harmless, because it is of a lower era, or replaced by a section
that says so, or all of it is committed and below the group's snapshot. What is not harmless, a
section with truncated entries, is *purged*: its pack goes before the WAL file with the successors
does. A pack that is half dead, or one of several small ones, is replaced: what is alive in it is
copied to a new pack as it is, then the file is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from convoymq.logformat.identity import ClusterIds
from convoymq.logformat.pack import (
    PACK_DIRECTORY,
    PACK_GAP_BYTES,
    PACK_HEADER,
    SECTION_ROW,
    Pack,
    Section,
    SectionRow,
    pack_header,
    read_pack,
)
from convoymq.logformat.segment import (
    Segment,
    SegmentTable,
    read_table,
    segment_footer,
    segment_header,
)
from convoymq.storage.segments import PACED_BYTES, Piece, piece_of, read_piece
from convoymq.storage.types import (
    Directory,
    Done,
    File,
    GroupPlan,
    Pace,
    RecoveryReport,
    StorageFault,
)

if TYPE_CHECKING:
    from convoymq.storage.log import GroupLog
    from convoymq.storage.store import Storage

PACK_SECTIONS = 128
"""Groups of a pack: they are planned for in one turn of the event loop."""
SMALL_SECTIONS = PACK_SECTIONS // 4
SMALL_PACKS = 4
"""So many packs with fewer than SMALL_SECTIONS live sections become one."""
JOIN_SECTIONS = 3
JOIN_FACTOR = 4
"""So many last sections of a group, or more, that are together below so many times the size up to
which a group goes to packs, are joined with what comes."""


class Part(NamedTuple):
    """Source of a section: entries that lie in some files, or a section as it is."""

    group: int
    order: int
    since: int
    pieces: list[Piece]
    whole: tuple[File, int, int] | None = None
    """File, offset and length of the section that is copied where there are no pieces, or where
    their entries are damaged."""


class Made(NamedTuple):
    """A pack that was written, None = there was nothing to write."""

    pack: Pack | None
    sections: list[Section | None]
    """Of each part. Where it was copied as it is, it has no entries: its owner knows them."""
    faults: list[StorageFault | None]


class _Image(NamedTuple):
    """Bytes of a section, and where its entries lie in them."""

    buffers: list[bytes | memoryview]
    length: int
    table: SegmentTable | None


def _image(part: Part, cluster: bytes) -> _Image:
    """Returns what a segment file with the entries would hold. Raises StorageFault."""
    head = segment_header(part.group, cluster)
    buffers: list[bytes | memoryview] = [head]
    table = SegmentTable()
    at = len(head)
    for piece in part.pieces:
        try:
            for index, term, view in read_piece(piece, part.group):
                table.add(index, term, at, len(view))
                buffers.append(view)
                at += len(view)
        except OSError as error:
            # Of the disk's refusals only those to write are everybody's.
            raise StorageFault(f"cannot be read: {error}", path=piece.file.name) from error
    foot = segment_footer(bytes(table.rows), at)
    buffers += [bytes(table.rows), foot]
    return _Image(buffers, at + len(table.rows) + len(foot), table)


def _copy(place: tuple[File, int, int]) -> _Image:
    """Returns a section as it is. Raises StorageFault."""
    file, offset, length = place
    try:
        data = file.pread(length, offset)
    except OSError as error:
        raise StorageFault(f"cannot be read: {error}", path=file.name, offset=offset) from error
    if len(data) != length:
        raise StorageFault("the file ends early", path=file.name, offset=offset)
    return _Image([data], length, None)


def _image_of(part: Part, cluster: bytes) -> tuple[_Image | None, StorageFault | None]:
    fault: StorageFault | None = None
    if part.pieces:
        try:
            return _image(part, cluster), None
        except StorageFault as error:
            fault = error
    if part.whole is None:
        return None, fault
    try:
        return _copy(part.whole), fault
    except StorageFault as error:
        # What cannot be read stays damaged, rather than missing.
        return _Image([bytes(part.whole[2])], part.whole[2], None), error


def write_pack(
    directory: Directory, number: int, parts: Iterable[Part], cluster: bytes, pace: Pace
) -> Made:
    """Writes a pack; durable and visible on return. Runs on the worker.

    Parts with damaged entries are left out, or copied as they are. Raises OSError.
    """
    images: list[tuple[Part, _Image]] = []
    faults: list[StorageFault | None] = []
    for part in parts:
        image, fault = _image_of(part, cluster)
        faults.append(fault)
        images.append((part, image if image is not None else _Image([], 0, None)))
    kept = [(part, image) for part, image in images if image.length]
    if not kept:
        return Made(None, [None] * len(images), faults)
    at = PACK_HEADER.size + SECTION_ROW.size * len(kept)
    rows: list[SectionRow] = []
    for part, image in kept:
        rows.append(SectionRow(part.order, part.since, part.group, at >> 3, image.length >> 3, 0))
        at += image.length
    packed = b"".join([SECTION_ROW.pack(*row) for row in rows])
    head = pack_header(packed, cluster)
    pack = Pack(number, rows)
    gap = bytes(max(PACK_GAP_BYTES - pack.held_bytes, 0))
    directory.make(PACK_DIRECTORY)
    part_name = pack.name + ".part"
    file = directory.open(part_name, create=True)
    file.truncate(0)
    buffers = [head, packed, *[b for _, image in kept for b in image.buffers], gap, packed, head]
    _write(file, buffers, pace)
    file.sync()
    file.close()
    directory.rename(part_name, pack.name)
    directory.sync(PACK_DIRECTORY)
    sections: list[Section | None] = []
    following = iter(rows)
    for _, image in images:
        row = next(following) if image.length else None
        sections.append(None if row is None else _section(pack, row, image.table))
    return Made(pack, sections, faults)


def _section(pack: Pack, row: SectionRow, table: SegmentTable | None) -> Section:
    if table is None:
        table = SegmentTable()
        table.add(0, 0, 0, 0)
    section = Section(pack, row, table.indexes, table.offsets, table.sizes)
    section.start = 0
    section.moved(pack, row.offset << 3)
    return section


def _write(file: File, buffers: list[bytes | memoryview], pace: Pace) -> None:
    """Writes all, little at a time while there is no hurry."""
    at = begin = size = 0
    for upto, buffer in enumerate(buffers, 1):
        size += len(buffer)
        if size < PACED_BYTES and upto < len(buffers):
            continue
        file.pwrite(buffers[begin:upto], at)
        if not pace.is_urgent():
            file.sync()
            pace.rest(size)
        at += size
        begin, size = upto, 0


class Found(NamedTuple):
    """A section that recovery found: of it, or what is wrong with it."""

    row: SectionRow
    section: Section | None
    runs: list[tuple[int, int]]
    fault: StorageFault | None

    def get(self) -> tuple[Segment, list[tuple[int, int]]]:
        """Returns the section and its runs of terms. Raises StorageFault."""
        if self.section is None:
            assert self.fault is not None
            raise self.fault
        return self.section, self.runs


class Packs:
    """The packs of a node: writes them, and replaces those of which little is alive."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.files: dict[int, Pack] = {}
        """Number -> pack."""
        self._next = 1
        self._busy = False
        """Some are being replaced."""
        self.written = 0
        """Packs that were written."""

    # Recovery.

    def load(
        self, directory: Directory, clusters: ClusterIds, report: RecoveryReport
    ) -> tuple[dict[int, list[Found]], list[str]]:
        """Reads all packs.

        Returns:
            Sections of each group in ascending order; paths of packs that cannot be read.

        Raises:
            StorageFault: one is of another cluster, or of another version. OSError.
        """
        found: dict[int, dict[int, Found]] = {}
        unread = []
        for name in directory.list(PACK_DIRECTORY):
            path = f"{PACK_DIRECTORY}/{name}"
            if not name.endswith(".pack"):
                directory.remove(path)
                report.stale.append(path)
                continue
            number = int(name[:-5], 16)
            self._next = max(self._next, number + 1)
            file = directory.open(path)
            rows = read_pack(file, clusters)
            if rows is None:
                unread.append(path)
            pack = self.files[number] = Pack(number, rows or [])
            for row in rows or []:
                # A later copy of a section counts.
                found.setdefault(row.group, {})[row.order] = _load(file, pack, row, clusters)
            file.close()
        return {
            group: [sections[order] for order in sorted(sections)]
            for group, sections in found.items()
        }, unread

    def adopt(self) -> None:
        """Recovery has given the logs their sections."""
        for log in self._store.logs.values():
            for segment in (*log.segments, *log.stale_segments):
                if isinstance(segment, Section):
                    segment.pack.add(segment)

    # Writing.

    def submit(
        self, parts: list[Part], done: Callable[[Made | None, BaseException | None], None]
    ) -> None:
        """Has the worker write a pack; what is in it is alive when `done` hears of it."""
        store = self._store
        number = self._next
        self._next += 1
        directory, cluster, pace = store.directory, store.clusters.current, store.pace

        def written(made: Made | None, error: BaseException | None) -> None:
            if made is not None and made.pack is not None:
                self.written += 1
                self.files[number] = made.pack
            done(made, error)

        store.worker.submit(lambda: write_pack(directory, number, parts, cluster, pace), written)

    # Replacing.

    def groups(self) -> set[int]:
        """Returns the groups that packs have something of, dead or alive."""
        return set().union(*[pack.groups for pack in self.files.values()])

    def purging(self) -> list[Pack]:
        """Returns the packs that have to go before the WAL file that is being emptied."""
        return [pack for pack in self.files.values() if pack.purge]

    def tidy(self) -> None:
        """Replaces packs of which half or more is dead, and small ones."""
        if self._busy or not self._may_drop():
            return
        live = [pack for pack in self.files.values() if pack.sections and not pack.purge]
        due = [pack for pack in self.files.values() if not pack.sections]
        if not due:
            due = [pack for pack in live if pack.live_bytes * 2 <= pack.held_bytes]
            small = [pack for pack in live if len(pack.sections) < SMALL_SECTIONS]
            if len(small) >= SMALL_PACKS:
                due = list({pack.number: pack for pack in (*due, *small)}.values())
        if due:
            self._replace(_first(due), lambda error: None)

    def purge(self, packs: list[Pack], done: Done) -> bool:
        """Replaces packs that must go; False when that is not possible now."""
        if self._busy or not self._may_drop():
            return False
        chosen = _first(packs)
        for section in [s for pack in chosen for s in pack.sections.values() if s.purge]:
            log = self._store.logs.get(section.group)
            if log is not None and log.stale_index > log.written_index:
                return False  # truncated once more: a crash would want the entries back
        self._replace(chosen, done)
        return True

    def _may_drop(self) -> bool:
        """Returns whether all is durable that made sections dead: a truncation or removal, or that
        recovery found a log damaged."""
        wal = self._store.wal
        return wal.flush_count > 0 and wal.written_sequence >= wal.barrier

    def _replace(self, old: list[Pack], done: Done) -> None:
        """Copies what is alive to a new pack, then removes the old ones."""
        self._busy = True
        sections = [section for pack in old for section in pack.sections.values()]
        if not sections:
            self._remove(old, done)
            return
        try:
            parts = [self._part_of(section) for section in sections]
        except OSError as error:
            self._busy = False
            done(error)
            return

        def written(made: Made | None, error: BaseException | None) -> None:
            if made is None:
                self._busy = False
                done(error)
                return
            for section, copy, fault in zip(sections, made.sections, made.faults, strict=True):
                self._settle(section, copy, fault)
            self._remove(old, done)

        self.submit(parts, written)

    def _part_of(self, section: Section) -> Part:
        file = self._store.segment_file(section)
        pieces = []
        if section.purge:
            pieces = [piece_of(file, section, [(section.first, section.last)])]
        whole = (file, section.start, section.length)
        return Part(section.group, section.order, section.since, pieces, whole)

    def _settle(self, section: Section, copy: Section | None, fault: StorageFault | None) -> None:
        """The section lies elsewhere now."""
        assert copy is not None, "a section that cannot be read is copied as zeros"
        if not section.pack.holds(section):
            return  # of no use any more
        section.pack.drop(section)
        if section.purge and fault is None:
            section.rewritten(copy)
        else:
            section.moved(copy.pack, copy.start)
            section.purge = False
        section.pack.add(section)
        log = self._store.logs.get(section.group)
        if fault is not None and log is not None:
            log.mark_damaged(fault)

    def _remove(self, old: list[Pack], done: Done) -> None:
        directory = self._store.directory
        doomed = [pack for pack in old if not pack.sections]

        def work() -> None:
            for pack in doomed:
                directory.remove(pack.name)
            directory.sync(PACK_DIRECTORY)

        def removed(_: object, error: BaseException | None) -> None:
            self._busy = False
            if error is None:
                for pack in doomed:
                    del self.files[pack.number]
            done(error)

        for pack in doomed:
            self._store.forget_file(pack)
        self._store.worker.submit(work, removed)


def joinable(log: GroupLog, plan: GroupPlan | None, unit: int) -> list[Section]:
    """Returns the last sections of a log when they are to be joined with what comes.

    Only what is committed: they come back if the new section is dropped and its pack removed before
    theirs.
    """
    found: list[Section] = []
    if plan is None or log.stale_index:
        return found
    size = 0
    for segment in reversed(log.segments):
        if not isinstance(segment, Section) or segment.last > plan.applied:
            break
        size += segment.length
        if size > JOIN_FACTOR * unit:
            break
        found.append(segment)
    return found[::-1] if len(found) >= JOIN_SECTIONS else []


def _first(packs: list[Pack]) -> list[Pack]:
    """Returns the first packs that are not too much for one; at least one."""
    count = 0
    for at, pack in enumerate(packs):
        count += len(pack.sections)
        if count > PACK_SECTIONS and at:
            return packs[:at]
    return packs


def _load(file: File, pack: Pack, row: SectionRow, clusters: ClusterIds) -> Found:
    try:
        table = read_table(file, row.group, clusters, row.offset << 3, row.size << 3)
    except (OSError, StorageFault) as error:
        fault = (
            error
            if isinstance(error, StorageFault)
            else StorageFault(f"cannot be read: {error}", path=pack.name, offset=row.offset << 3)
        )
        return Found(row, None, [], fault)
    section = Section(pack, row, table.indexes, table.offsets, table.sizes)
    return Found(row, section, table.runs, None)
