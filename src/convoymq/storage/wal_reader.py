"""Reading the WAL at start: what it says about each group, and what damage may have hit.

The rules (docs/formats/storage.md gives the formats):

- files are read in the order of their generations, batches in the order of their sequences;
- the end of the last file is *torn* when nothing valid of that file lies behind it: it is cut
  there, nothing in it had been confirmed;
- anything else that cannot be read is a *hole*. Who may have records in it is in *doubt*: the
  groups of the damaged records where a directory names them, those in the map of the next batch
  where it covers the hole, all groups otherwise;
- the table at the head of the next file ends doubts: a log that has the last index and term that
  the table names is whole, by log matching; another one is damaged. Votes are in the table. Where
  no table follows, a group in doubt is damaged, and its vote is lost unless a later record has it;
- a log in doubt must not be completed by what follows the hole: an entry in the hole may have
  replaced one before it. What follows in the same term proves that none did.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from crc32c import crc32c

from convoymq.logformat.entry import (
    ENTRY_HEADER,
    ENTRY_HEADER_SIZE,
    KIND_CONTROL,
    KIND_REMOVED,
    KIND_TABLE,
    KIND_TAIL_MARKER,
    KIND_VOID,
    KIND_VOTE,
    NO_GROUP,
)
from convoymq.logformat.identity import ClusterIds, check_version
from convoymq.logformat.pack import PACK_DIRECTORY
from convoymq.logformat.wal_file import (
    BATCH_HEADER_BYTES,
    FILE_HEADER,
    FILE_HEADER_CHECKED,
    FILE_MAGIC,
    MAP_BITS,
    MAP_BYTES,
    PLACE_FILE_SHIFT,
    ROW_DAMAGED,
    ROW_IN_FILES,
    ROW_VOTE_LOST,
    TABLE_ROW,
    BatchHeader,
    batch_prefix,
    directory_before,
    directory_bytes,
    directory_rows,
    read_batch_header,
    split_records,
    wal_name,
    walk_records,
)
from convoymq.storage.manifest import MANIFEST_NAME, Manifest
from convoymq.storage.types import Damage, Directory, RecoveryReport, StorageFault
from convoymq.storage.wal import WalFile

WINDOW_BYTES = 8 << 20
EVERY_GROUP = (1 << MAP_BITS) - 1
NAMED_MAX = 16
"""A report names so many groups."""


class Hole:
    """Something that cannot be read, or is missing."""

    __slots__ = ("fallback", "file", "groups", "offset", "reason")

    def __init__(self, file: str, offset: int, reason: str) -> None:
        self.file = file
        self.offset = offset
        self.reason = reason
        self.fallback = False
        """The groups with records in it cannot be told."""
        self.groups: list[int] = []
        """Groups that it damaged, and that were not rebuilt since."""

    def report(self) -> Damage:
        """For the operator."""
        named = ", ".join(map(str, self.groups[:NAMED_MAX]))
        if len(self.groups) > NAMED_MAX:
            named += f" and {len(self.groups) - NAMED_MAX} more"
        scope = "; it cannot be told whose data it was" if self.fallback else ""
        hit = f"; damaged groups: {named}" if named else ""
        return Damage(
            file=self.file,
            offset=self.offset,
            group=self.groups[0] if len(self.groups) == 1 else None,
            reason=self.reason + scope + hit,
        )

    def of_group(self, group: int, vote_lost: bool) -> Damage:
        """For one group that it damaged."""
        return Damage(
            file=self.file, offset=self.offset, group=group, reason=self.reason, vote_lost=vote_lost
        )


class Found:
    """Findings of the WAL about one group."""

    __slots__ = (
        "base", "based", "broken", "damage", "doubt", "era", "holed", "last", "last_term", "lost",
        "places", "removed_in", "runs", "sizes", "term", "voted_for",
    )  # fmt: skip

    def __init__(self) -> None:
        self.term = 0
        self.voted_for = 0
        self.lost: Hole | None = None
        """The vote may be lost in there."""
        self.damage: Hole | None = None
        self.doubt: Hole | None = None
        """Records of the group may be in there."""
        self.broken = False
        """In doubt, and entries followed that do not prove that the log is whole."""
        self.holed = False
        self.era = 0
        """Segments and snapshots of earlier eras are void."""
        self.removed_in = 0
        """Generation of the WAL file with the removal, when nothing of the group follows it."""
        self.last = 0
        """Index of the last entry, -1 = not known."""
        self.based = True
        """The end of the log before the first file that could be read is known."""
        self.last_term = 0
        self.clear()

    def clear(self) -> None:
        """Forgets the entries."""
        self.base = 1
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.runs: list[tuple[int, int]] = []

    def restart(self, index: int, term: int) -> None:
        """The log goes on behind `index`; what was before is void."""
        self.clear()
        self.base = index + 1
        self.based = True
        self.last, self.last_term = index, term
        self.damage = self.doubt = None
        self.holed = self.broken = False

    def add(self, index: int, term: int, place: int, size: int) -> None:
        """Takes an entry; it replaces what the group has from its index on."""
        if self.doubt is not None and (index != self.last + 1 or term != self.last_term):
            self.broken = True
        if index > self.last + 1 and self.last >= 0:
            self.holed = True
            self.clear()
        if not self.places:
            self.base = index
        elif index <= self.last:
            keep = max(index - self.base, 0)
            del self.places[keep:]
            del self.sizes[keep:]
            if not keep:
                self.base = index
            while self.runs and self.runs[-1][0] >= index:
                self.runs.pop()
        if not self.runs or self.runs[-1][1] != term:
            self.runs.append((index, term))
        self.places.append(place)
        self.sizes.append(size >> 3)
        self.last, self.last_term = index, term


class Header(NamedTuple):
    """A WAL file's header; zeros where it cannot be read."""

    first: int
    """Sequence of the first batch."""
    previous: int
    """Generation of the file before; its last sequence and its end follow."""
    previous_sequence: int
    previous_tail: int


UNREAD = Header(0, 0, 0, 0)


class _Window:
    """Reads a file in big steps."""

    def __init__(self, file: WalFile) -> None:
        self._file = file.file
        self._start = 0
        self._data = memoryview(b"")

    def get(self, offset: int, length: int) -> memoryview:
        """Returns the bytes, fewer where the file ends."""
        if offset < self._start or offset + length > self._start + len(self._data):
            self._start = offset
            self._data = memoryview(self._file.pread(max(length, WINDOW_BYTES), offset))
        at = offset - self._start
        return self._data[at : at + length]


class WalReader:
    """Goes through the WAL files and collects `found` for each group."""

    def __init__(
        self,
        directory: Directory,
        manifest: Manifest,
        clusters: ClusterIds,
        size_max: int,
        report: RecoveryReport,
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._clusters = clusters
        self._size_max = size_max
        self._report = report
        self.files: dict[int, WalFile] = {}
        """Generation -> file, in order: those that were used."""
        self.found: dict[int, Found] = {}
        self.suspects = 0
        """Map of groups in doubt, found or not."""
        self.suspects_end = 0
        """No group above this one is in doubt; 0 = not known."""
        self.holes: list[Hole] = []
        self.leftovers: list[tuple[str, bool]] = []
        """Files that hold nothing needed, and whether they are whole."""
        self.last_generation = 0
        self.sequence = -1
        """Of the last batch, -1 = not known."""
        self.previous = (0, 0, 0)
        self._suspicion: Hole | None = None
        """The last hole that a group which is not found yet may have been in."""
        self._open_hole: Hole | None = None
        """Waits for the next batch of its file, which says whom it may have hit."""
        self._unsure = False
        """The last file may go on behind what could be read of it."""
        self._last = False
        """The file is the last one."""
        self._unread = False
        """The manifest names the file, but neither its header nor any batch can be read."""
        self._prior: Hole | None = None
        """Damage before the last table, as the table describes it."""
        self._table_of = 0
        """Generation of the last file whose table was read."""
        self._based = False
        """True if what all groups had at the beginning is known."""

    def read(self) -> None:
        """Reads all files. Raises StorageFault: files of another cluster or version; OSError."""
        unnamed = self._manifest.load()
        files, missing = self._open_files(known=not unnamed)
        for at, (file, size, header) in enumerate(files):
            for name in missing.pop(file.generation, ()):
                self._lose_all(Hole(name, 0, "the WAL file is missing"))
                self.sequence = -1
                self._unsure = False
            if self.sequence < 0 and header.first:
                self.sequence = header.first - 1
            following = files[at + 1][2] if at + 1 < len(files) else None
            self._read_file(file, size, header, following)
            began = file.tail > FILE_HEADER.size or self.suspects
            if began and self._table_of != file.generation and not self._based:
                self._lose_all(
                    Hole(file.name, FILE_HEADER.size, "the table of groups cannot be read")
                )
            self.files[file.generation] = file
            self.previous = (file.generation, max(self.sequence, 0), file.tail)
        for names in missing.values():
            for name in names:
                self._lose_all(Hole(name, 0, "the WAL file is missing"))
        self._report.wal_files = len(files)
        if unnamed and (files or self._has_groups()):
            self._lose_all(Hole(MANIFEST_NAME, 0, unnamed))
        elif unnamed:
            self._report.fresh = True
        for group, found in self.found.items():
            found.damage = found.damage or found.doubt or found.lost
            if found.damage is not None:
                found.damage.groups.append(group)

    def _has_groups(self) -> bool:
        packs = any(name.endswith(".pack") for name in self._directory.list(PACK_DIRECTORY))
        groups = self._directory.list("groups")
        return packs or any(holds_data(self._directory, name) for name in groups)

    def _open_files(
        self, *, known: bool
    ) -> tuple[list[tuple[WalFile, int, Header]], dict[int, list[str]]]:
        """Returns the used files in order, and names of the missing ones: before which generation.

        Files that hold nothing needed become leftovers.
        """
        manifest = self._manifest
        self.last_generation = max(manifest.files, default=0)
        used: list[tuple[WalFile, int, Header]] = []
        present = set()
        for name in self._directory.list("wal"):
            path = f"wal/{name}"
            if name.endswith(".preparing"):
                self._directory.remove(path)
                continue
            if not name.endswith((".wal", ".free")):
                continue
            handle = self._directory.open(path)
            size = handle.size()
            if name.endswith(".wal"):
                generation = int(name[:-4], 16)
                present.add(generation)
                self.last_generation = max(self.last_generation, generation)
                file = WalFile(handle, path, generation, size)
                named = not known or generation in manifest.files
                # Else nothing in it was ever reported as written, or nothing is needed any more.
                header = self._file_header(file, size, known=known) if named else None
                if header is not None:
                    used.append((file, size, header))
                    continue
            handle.close()
            self.leftovers.append((path, size >= self._size_max))
        missing: dict[int, list[str]] = {}
        at = len(used) - 1
        while at >= 0:
            file, _, header = used[at]
            before = used[at - 1][0].generation if at else 0
            if header.previous and before > header.previous:
                # Was not there when what follows began: a copy from elsewhere.
                stray = used.pop(at - 1)[0]
                self.holes.append(Hole(stray.name, 0, "the WAL file is not part of the log"))
                self.leftovers.append((stray.name, False))
                stray.file.close()
            elif header.previous > before and (at or header.previous in manifest.files):
                missing[file.generation] = [wal_name(header.previous)]
            at -= 1
        for generation in sorted(set(manifest.files) - present):
            name = wal_name(generation)
            if not any(name in names for names in missing.values()):
                after = [file.generation for file, _, _ in used if file.generation > generation]
                missing.setdefault(min(after, default=NO_FILE), []).append(name)
        return used, missing

    def _file_header(self, file: WalFile, size: int, *, known: bool) -> Header | None:
        """None when the file was prepared but never used. `known`: the manifest names it, so that
        it has a header of one kind or the other."""
        head = file.file.pread(FILE_HEADER.size, 0)
        if len(head) == FILE_HEADER.size:
            magic, generation, first, *link, cluster, checksum, _ = FILE_HEADER.unpack(head)
            if magic == FILE_MAGIC and crc32c(head[:FILE_HEADER_CHECKED]) == checksum:
                if generation != file.generation or not first:
                    return None  # has the header of its former use, or that of preparation
                self._clusters.check(cluster, file.name)
                return Header(first, *link)
            if crc32c(FILE_MAGIC + head[8:FILE_HEADER_CHECKED]) != checksum:
                check_version(head, FILE_MAGIC, file.name)
        if self._find_batch(file, _Window(file), FILE_HEADER.size, size, 0) is not None:
            self._note(file.name, 0, "the file's header is damaged, its batches are not")
        elif not known:
            return None
        return UNREAD

    def _batch(self, file: WalFile, window: _Window, offset: int) -> BatchHeader | None:
        """Returns the batch header there, when it is valid."""
        head = bytes(window.get(offset, BATCH_HEADER_BYTES))
        return read_batch_header(head, file.generation)

    def _find_batch(
        self,
        file: WalFile,
        window: _Window,
        offset: int,
        size: int,
        after: int,
        *,
        same_flush: bool = False,
    ) -> int | None:
        """Returns where the next valid batch begins whose flush started above the sequence `after`:
        at `offset` or later. When that flush started, everything up to `after` was durable.
        `same_flush`: any batch with a sequence above `after`."""
        needle = batch_prefix(file.generation)
        at = offset
        while at < size:
            data = bytes(window.get(at, min(WINDOW_BYTES, size - at)))
            hit = data.find(needle)
            while hit >= 0:
                batch = self._batch(file, window, at + hit)
                found = 0 if batch is None else batch.sequence if same_flush else batch.flush
                if found > after and (at + hit) % 8 == 0:
                    return at + hit
                hit = data.find(needle, hit + 1)
            if len(data) <= len(needle):
                return None
            at += len(data) - len(needle)
        return None

    # One file.

    def _read_file(
        self, file: WalFile, size: int, header: Header, following: Header | None
    ) -> None:
        """`following`: the header of the next file, None = it is the last one."""
        last = self._last = following is None
        link = following if following is not None else UNREAD
        known_tail = link.previous_tail if link.previous == file.generation else None
        window = _Window(file)
        limit = size if known_tail is None else min(known_tail, size)
        at = FILE_HEADER.size
        file.started = file.recovered = True
        self._unread = header == UNREAD and (
            self._find_batch(file, window, at, file.size, 0) is None
        )
        while at < limit:
            batch = self._batch(file, window, at)
            if batch is not None and (self.sequence < 0 or batch.sequence > self.sequence):
                self._begin_batch(file, at, batch)
                end = self._read_batch(file, window, at, batch, limit)
            elif known_tail is None and self._ends_here(file, window, at, size):
                end = -1
            else:
                end = self._read_without_header(file, window, at, limit, link.previous_sequence)
            if end < 0:
                break
            at = end
        file.tail = at
        if known_tail is not None and at < known_tail:
            self._open(Hole(file.name, at, "the WAL file ends early"))
            file.tail = known_tail
        elif last and self._report.torn_tail is None:
            self._note_torn(file, window, at)
        if self._open_hole is not None:
            self._lose_all(self._open_hole, again=True)
            self._open_hole = None
        if known_tail is not None:
            self.sequence = max(self.sequence, link.previous_sequence)

    def _begin_batch(self, file: WalFile, at: int, batch: BatchHeader) -> None:
        """A batch can be read: says who may be in the hole before it."""
        gap = self.sequence >= 0 and batch.sequence != self.sequence + 1
        if gap and self._open_hole is None:
            # Nothing of this file lies in between.
            reason = "batches are missing"
            if at == FILE_HEADER.size or self._unsure:
                self._lose_all(Hole(file.name, at, reason))
            else:
                self._open(Hole(file.name, at, reason))
        self._unsure = False
        hole, self._open_hole = self._open_hole, None
        if hole is not None:
            if batch.covered_from <= hole.offset:
                self._doubt(batch.map, hole)
            else:
                self._lose_all(hole, again=True)
        self.sequence = batch.sequence

    def _ends_here(self, file: WalFile, window: _Window, at: int, size: int) -> bool:
        """Nothing valid follows in this file: its torn tail, or (unless it is the last file) just
        its end."""
        if self._unread:
            return False
        last = self._last
        after = self.sequence + (1 if last else 0)
        follows = self._find_batch(file, window, at, size, after, same_flush=not last)
        self._unsure = self._unsure or (follows is None and not last)
        return follows is None

    def _note_torn(self, file: WalFile, window: _Window, at: int) -> None:
        """Reports a torn tail where the bytes at the end are a beginning of this generation."""
        prefix = batch_prefix(file.generation)
        if window.get(at, len(prefix)) == prefix:
            self._report.torn_tail = (file.name, at)

    def _read_batch(
        self,
        file: WalFile,
        window: _Window,
        at: int,
        batch: BatchHeader,
        limit: int,
    ) -> int:
        """Takes a batch whose header is right; returns its end, -1 when it is the torn tail."""
        length, count = batch.length, batch.records
        start = at + BATCH_HEADER_BYTES
        end = start + length + directory_bytes(count)
        if end > limit:
            if self._last:
                self._report.torn_tail = (file.name, at)
                return -1
            self._open(Hole(file.name, at, "a batch is longer than its file"))
            return limit
        data = window.get(start, end - start)
        sound = crc32c(data[length:]) == batch.checksum
        bad: list[tuple[int, int]] = []
        if sound:
            records, bad = split_records(data[:length], directory_rows(data[length:], count))
            unknown = False
        else:
            records, reached = walk_records(data[:length])
            unknown = reached != length or len(records) != count
        if bad or not sound:
            follows = self._find_batch(file, window, end, file.size, batch.sequence)
            if self._last and follows is None:
                self._report.torn_tail = (file.name, at)
                return -1
        if not (sound or unknown):
            self._note(
                file.name, start + length, "a batch's directory is damaged, its records are not"
            )
        self._take(file, data, start, records, bad)
        if unknown:
            self._open(Hole(file.name, at, "a batch cannot be read"))
        return end

    def _read_without_header(
        self, file: WalFile, window: _Window, at: int, limit: int, last_sequence: int
    ) -> int:
        """A batch's header is damaged: takes its records where the directory behind them can be
        told. Returns where the next batch begins, or `limit`."""
        start = at + BATCH_HEADER_BYTES
        following = self._find_batch(file, window, at + 8, limit, self.sequence, same_flush=True)
        end = limit if following is None else following
        upto = last_sequence
        if following is not None:
            batch = self._batch(file, window, following)
            assert batch is not None
            upto = batch.sequence - 1
        single = upto == self.sequence + 1 or self.sequence < 0
        if single and end > start and end - start <= 1 << 32:
            data = window.get(start, end - start)
            rows = directory_before(data)
            if rows is not None:
                records, bad = split_records(data[: len(data) - directory_bytes(len(rows))], rows)
                if self.sequence >= 0 or records:
                    if not bad:
                        self._note(
                            file.name, at, "a batch's header is damaged, its records are not"
                        )
                    self._unsure = False
                    self._take(file, data, start, records, bad)
                    self.sequence = upto
                    return end
        if self._unsure:
            self._lose_all(Hole(file.name, at, "a batch cannot be read"))
        else:
            self._open(Hole(file.name, at, "a batch cannot be read"))
        if upto > 0:
            self.sequence = upto
        return end

    def _take(
        self,
        file: WalFile,
        data: memoryview,
        start: int,
        records: list[tuple[int, int]],
        bad: list[tuple[int, int]],
    ) -> None:
        """Takes a batch's records; `bad`: (offset, group) of those that are damaged."""
        waiting = iter(sorted(bad))
        gone = next(waiting, None)
        for offset, size in records:
            while gone is not None and gone[0] < offset:
                self._lose_record(file, start + gone[0], gone[1])
                gone = next(waiting, None)
            self._apply(file, data[offset : offset + size], start + offset, size)
        while gone is not None:
            self._lose_record(file, start + gone[0], gone[1])
            gone = next(waiting, None)

    # Records.

    def _apply(self, file: WalFile, view: memoryview, offset: int, size: int) -> None:
        """Takes one record that is whole."""
        _, _, index, term, order, group, kind, _ = ENTRY_HEADER.unpack_from(view)
        if kind < KIND_CONTROL:
            place = file.generation << PLACE_FILE_SHIFT | offset >> 3
            self._of(group).add(index, term, place, size)
        elif kind == KIND_VOTE:
            self._vote(self._of(group), term, index)
        elif kind == KIND_TABLE:
            self._take_table(file, view, index, term)
        elif kind == KIND_REMOVED:
            found = self.found[group] = Found()
            found.era = order
            found.removed_in = file.generation
        elif kind == KIND_VOID:
            found = self._of(group)
            found.restart(index, term)
            found.era = max(found.era, order)
        elif kind != KIND_TAIL_MARKER:
            raise StorageFault(f"record kind {kind} is not known", path=file.name, offset=offset)

    def _of(self, group: int) -> Found:
        found = self.found.get(group)
        if found is None:
            found = self.found[group] = Found()
            if self.is_suspect(group):
                found.doubt = found.lost = self._suspicion
            if not self._based:
                found.last = -1
                found.based = False
        found.removed_in = 0
        return found

    def is_suspect(self, group: int) -> bool:
        """Returns whether a group that is not found may have had records here."""
        within = not self.suspects_end or group <= self.suspects_end
        return within and bool(self.suspects >> group % MAP_BITS & 1)

    def _vote(self, found: Found, term: int, voted_for: int) -> None:
        if (term, voted_for) >= (found.term, found.voted_for):
            found.term, found.voted_for = term, voted_for
            found.lost = None

    def _take_table(self, file: WalFile, view: memoryview, count: int, suspects_end: int) -> None:
        """Compares what was read with what the node had when it began this file."""
        if self._table_of == file.generation:
            return  # the second copy
        self._table_of = file.generation
        body = view[ENTRY_HEADER_SIZE : ENTRY_HEADER_SIZE + MAP_BYTES + count * TABLE_ROW.size]
        listed = set()
        for row in TABLE_ROW.iter_unpack(body[MAP_BYTES:]):
            listed.add(row[0])
            self._compare(file, *row)
        for group, found in self.found.items():
            if found.doubt is not None and group not in listed:
                # Its removal is in the hole, unless that was before it.
                if found.removed_in:
                    found.doubt = found.lost = None
                else:
                    found.damage = found.damage or found.doubt
        self._based = True
        self.suspects = int.from_bytes(body[:MAP_BYTES], "little")
        self.suspects_end = suspects_end
        if self.suspects:
            self._suspicion = Hole(file.name, 0, "was lost before this file")

    def _compare(
        self,
        file: WalFile,
        group: int,
        voted_for: int,
        term: int,
        era: int,
        flags: int,
        last: int,
        last_term: int,
    ) -> None:
        found = self._of(group)
        self._vote(found, term, voted_for)
        if flags & ROW_DAMAGED:
            if self._prior is None or self._prior.file != file.name:
                self._prior = Hole(file.name, 0, "was damaged before, and not rebuilt since")
                self.holes.append(self._prior)
            found.damage = found.damage or self._prior
            found.lost = self._prior if flags & ROW_VOTE_LOST else None
        else:
            found.lost = None
            if found.doubt is not None and not found.based and flags & ROW_IN_FILES:
                # What a file before the first known one had may be needed, though a snapshot
                # covers it: messages below a snapshot lie in the log.
                found.damage = found.damage or found.doubt
            elif found.last < 0 and not found.broken:
                found.era = era
                found.restart(last, last_term)
            elif found.broken or (found.last, found.last_term, found.era) != (last, last_term, era):
                hole = found.doubt
                if hole is None and found.damage is None:
                    hole = Hole(file.name, 0, "entries before this file are missing")
                    self.holes.append(hole)
                found.damage = found.damage or hole
        found.doubt = None
        found.broken = False
        found.based = True
        found.era = max(found.era, era)
        found.last, found.last_term = last, last_term

    # Damage.

    def _open(self, hole: Hole) -> None:
        """Notes a hole; the next batch will say whom it may have hit."""
        self.holes.append(hole)
        if self._open_hole is None:
            self._open_hole = hole

    def _lose_all(self, hole: Hole, *, again: bool = False) -> None:
        """Nobody can say whose records were in there."""
        if not again:
            self.holes.append(hole)
        hole.fallback = True
        self._doubt(EVERY_GROUP, hole)

    def _doubt(self, groups: int, hole: Hole) -> None:
        self.suspects |= groups
        self.suspects_end = 0
        self._suspicion = hole
        for group, found in self.found.items():
            if groups >> group % MAP_BITS & 1:
                self._doubt_one(found, hole)

    def _doubt_one(self, found: Found, hole: Hole) -> None:
        if found.doubt is None:
            found.doubt = hole
            found.broken = False
        found.lost = found.lost or hole

    def _lose_record(self, file: WalFile, offset: int, group: int) -> None:
        """A record is damaged; the directory says whose it was."""
        if group == NO_GROUP:
            self._note(file.name, offset, "a record that repeats what others say is damaged")
            return
        hole = Hole(file.name, offset, "a record is damaged")
        self.holes.append(hole)
        self._doubt_one(self._of(group), hole)

    def _note(self, name: str, offset: int, reason: str) -> None:
        self._report.notes.append(f"{name} at byte {offset}: {reason}")


NO_FILE = 1 << 62
"""Generation above those of all files."""


def holds_data(directory: Directory, name: str) -> bool:
    """Returns whether a group's directory has a snapshot or a segment."""
    names = directory.list(f"groups/{name}")
    return any(name == "snapshot" or name.endswith(".seg") for name in names)
