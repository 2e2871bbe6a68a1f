"""Rebuilding the logs of a node from its WAL files, segments and snapshots.

The rules (docs/formats/storage.md gives the formats):

- WAL files are read in the order of their generations, batches in the order of their sequences;
- the end of the last file is *torn* when nothing valid of that file lies behind it: it is cut
  there, nothing in it had been confirmed;
- anything else that does not fit is *damage*: the groups whose records are hit are marked damaged
  and hold nothing; the other groups go on;
- where WAL and segments both have an entry the WAL is right, where two segments have it the later
  one.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

from crc32c import crc32c

from convoymq.storage.identity import check_version
from convoymq.storage.log import GroupLog
from convoymq.storage.segments import ERA_SHIFT, ORDER_MASK, group_path, load_segment
from convoymq.storage.snapshots import read_snapshot, snapshot_name
from convoymq.storage.types import Damage, RecoveryReport, Snapshot, StorageFault
from convoymq.storage.wal import (
    BATCH_HEADER,
    BATCH_MAGIC,
    FILE_HEADER,
    FILE_HEADER_CHECKED,
    FILE_MAGIC,
    KIND_CONTROL,
    KIND_FENCE,
    KIND_REMOVED,
    KIND_TABLE,
    KIND_VOID,
    KIND_VOTE,
    PLACE_FILE_SHIFT,
    RECORD_HEADER_BYTES,
    VOTE_ROW,
    WalFile,
)
from convoymq.streamlog.segment import Segment

if TYPE_CHECKING:
    from convoymq.storage.store import Storage

WINDOW_BYTES = 8 << 20
RECORD_HEAD = struct.Struct("<IIQQQIBB")
"""The fields of an entry's header that recovery needs: length, crc, index, term, time, group, kind,
version."""


class Found:
    """What the WAL says about one group."""

    __slots__ = (
        "base",
        "damage",
        "era",
        "holed",
        "places",
        "removed_in",
        "runs",
        "sizes",
        "term",
        "vote_lost",
        "voted_for",
    )

    def __init__(self) -> None:
        self.term = 0
        self.voted_for = 0
        self.vote_lost = False
        self.damage: Damage | None = None
        self.holed = False
        self.era = 0
        """Segments and snapshots of earlier eras are void."""
        self.removed_in = 0
        """Generation of the WAL file with the removal, when nothing of the group follows it."""
        self.clear()

    def clear(self) -> None:
        """Forgets the entries."""
        self.base = 1
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.runs: list[tuple[int, int]] = []

    def add(self, index: int, term: int, place: int, size: int) -> None:
        """Takes an entry; it replaces what the group has from its index on."""
        end = self.base + len(self.places)
        if not self.places:
            self.base = index
        elif index < end:
            keep = max(index - self.base, 0)
            del self.places[keep:]
            del self.sizes[keep:]
            if not keep:
                self.base = index
            while self.runs and self.runs[-1][0] >= index:
                self.runs.pop()
        elif index > end:
            self.holed = True
            self.clear()
            self.base = index
        if not self.runs or self.runs[-1][1] != term:
            self.runs.append((index, term))
        self.places.append(place)
        self.sizes.append(size >> 3)


class _Window:
    """Reads a file in big steps."""

    def __init__(self, file: WalFile, size: int) -> None:
        self._file = file.file
        self._size = size
        self._start = 0
        self._data = memoryview(b"")

    def get(self, offset: int, length: int) -> memoryview:
        """The bytes, fewer where the file ends."""
        if offset < self._start or offset + length > self._start + len(self._data):
            self._start = offset
            self._data = memoryview(self._file.pread(max(length, WINDOW_BYTES), offset))
        at = offset - self._start
        return self._data[at : at + length]


def recover(store: Storage) -> RecoveryReport:
    """Fills `store.logs` and starts its WAL behind what was found. Raises OSError."""
    report = RecoveryReport()
    store.directory.make("wal")
    store.directory.make("groups")
    reader = _WalReader(store, report)
    reader.read()
    _load_groups(store, report, reader)
    store.wal.start(reader.last_generation, reader.sequence, reader.previous)
    store.wal.adopt_pool(reader.pool)
    for group in reader.replaced:
        # The WAL did not know yet; what follows must not be joined with what was dropped.
        log = store.logs[group]
        store.wal.add_control(KIND_VOID, group, log.snapshot_index, log.snapshot_term, era=log.era)
    report.groups = len(store.logs)
    report.entries = sum(log.last_index + 1 - log.first_index for log in store.logs.values())
    return report


class _WalReader:
    """Goes through the WAL files and collects `found` for each group."""

    def __init__(self, store: Storage, report: RecoveryReport) -> None:
        self._store = store
        self._directory = store.directory
        self._report = report
        self.found: dict[int, Found] = {}
        self.replaced: list[int] = []
        """Groups whose WAL entries belong to a log that their snapshot replaced."""
        self.pool: list[str] = []
        self.last_generation = 0
        self.sequence = 0
        self.previous = (0, 0, 0)
        self._tables = 0
        self._damaged_tables = 0
        self.all_damaged: Damage | None = None

    def read(self) -> None:
        files = self._open_files()
        links = [header for _, _, header in files]
        for at, (file, size, header) in enumerate(files):
            link = links[at + 1] if at + 1 < len(files) else None
            known_tail: int | None = None
            if link is not None and link[2] == file.generation:
                known_tail = link[4]
            elif link is not None and link[2] > file.generation:
                self._damage(None, link_name(link[2]), 0, "the WAL file is missing")
            if at == 0 and header[1]:
                self.sequence = header[1] - 1
            self._read_file(file, size, known_tail, last=link is None)
            self._store.wal.files[file.generation] = file
            self.previous = (file.generation, self.sequence, file.tail)
        self._report.wal_files = len(files)
        if self.all_damaged is not None:
            for found in self.found.values():
                found.damage = found.damage or self.all_damaged
                found.vote_lost = True

    def _open_files(self) -> list[tuple[WalFile, int, tuple[int, int, int, int, int]]]:
        """The used files in order: (file, size, (generation, first sequence, link…)).

        Files that hold nothing of their own generation go to the pool or away.
        """
        used = []
        for name in self._directory.list("wal"):
            path = f"wal/{name}"
            if name.endswith(".preparing"):
                self._directory.remove(path)
                continue
            handle = self._directory.open(path)
            size = handle.size()
            if name.endswith(".wal"):
                generation = int(name[:-4], 16)
                self.last_generation = max(self.last_generation, generation)
                file = WalFile(handle, path, generation, size)
                header = self._file_header(file, size)
                if header is not None:
                    used.append((file, size, header))
                    continue
            handle.close()
            if size >= self._store.config.wal_max_size_bytes:
                pooled = path
                if name.endswith(".wal"):
                    pooled = path[:-4] + ".free"
                    self._directory.rename(path, pooled)
                if pooled not in self.pool:
                    self.pool.append(pooled)
            else:
                self._directory.remove(path)
        return used

    def _file_header(self, file: WalFile, size: int) -> tuple[int, int, int, int, int] | None:
        """(generation, first sequence, previous generation, its last sequence, its tail); None when
        the file was prepared but never used."""
        head = file.file.pread(FILE_HEADER.size, 0)
        if len(head) < FILE_HEADER.size or head == bytes(FILE_HEADER.size):
            return None
        magic, generation, first, *link, cluster, checksum, _ = FILE_HEADER.unpack(head)
        if magic == FILE_MAGIC and crc32c(head[:FILE_HEADER_CHECKED]) == checksum:
            if generation != file.generation:
                return None  # recycled: still has the header of its former life
            self._store.clusters.check(cluster, file.name)
            return generation, first, link[0], link[1], link[2]
        if crc32c(FILE_MAGIC + head[8:FILE_HEADER_CHECKED]) != checksum:
            check_version(head, FILE_MAGIC, file.name)
        window = _Window(file, size)
        if self._find_batch(file, window, FILE_HEADER.size, size, 0) is None:
            return None
        self._report.damages.append(
            Damage(file=file.name, offset=0, group=0, reason="the file's header is damaged")
        )
        return file.generation, 0, 0, 0, 0

    def _batch(
        self, file: WalFile, window: _Window, offset: int, size: int
    ) -> tuple[int, int, int, int, int] | None:
        """(sequence, length, count, directory checksum, first sequence of its flush) of a valid
        batch header, or None."""
        head = bytes(window.get(offset, BATCH_HEADER.size))
        if len(head) < BATCH_HEADER.size or head[:8] != BATCH_MAGIC:
            return None
        _, generation, sequence, length, count, position, directory, checksum = BATCH_HEADER.unpack(
            head
        )
        if generation != file.generation or crc32c(head[:44]) != checksum:
            return None
        return sequence, length, count, directory, sequence - position

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
        """Where the next valid batch begins whose flush started above the sequence `after`: at
        `offset` or later. When that flush started, everything up to `after` was durable.
        `same_flush`: any batch with a sequence above `after`."""
        needle = BATCH_MAGIC + struct.pack("<Q", file.generation)
        at = offset
        while at < size:
            data = bytes(window.get(at, min(WINDOW_BYTES, size - at)))
            hit = data.find(needle)
            while hit >= 0:
                batch = self._batch(file, window, at + hit, size)
                found = 0 if batch is None else batch[0] if same_flush else batch[4]
                if found > after and (at + hit) % 8 == 0:
                    return at + hit
                hit = data.find(needle, hit + 1)
            if len(data) <= len(needle):
                return None
            at += len(data) - len(needle)
        return None

    def _read_file(self, file: WalFile, size: int, known_tail: int | None, *, last: bool) -> None:
        window = _Window(file, size)
        limit = size if known_tail is None else min(known_tail, size)
        at = FILE_HEADER.size
        file.started = file.recovered = True
        while at < limit:
            batch = self._batch(file, window, at, limit)
            expected = batch is not None and (
                batch[0] == self.sequence + 1 or (at == FILE_HEADER.size and self.sequence == 0)
            )
            if batch is not None and expected:
                end = self._read_batch(file, window, at, batch, limit, known_tail)
            elif known_tail is None and last and self._nothing_follows(file, window, at, size):
                end = -1
            else:
                end = self._read_without_header(file, window, at, limit)
            if end < 0:
                break
            at = end
        file.tail = at
        if known_tail is not None and at < known_tail:
            self._damage(None, file.name, at, "the WAL file ends early")
            file.tail = known_tail
        elif known_tail is None and last and self._report.torn_tail is None:
            self._note_torn(file, window, at, size)

    def _nothing_follows(self, file: WalFile, window: _Window, at: int, size: int) -> bool:
        return self._find_batch(file, window, at, size, self.sequence + 1) is None

    def _note_torn(self, file: WalFile, window: _Window, at: int, size: int) -> None:
        """Reports a torn tail where the bytes at the end are a beginning of this generation."""
        head = bytes(window.get(at, 16))
        if head[:8] == BATCH_MAGIC and head[8:] == struct.pack("<Q", file.generation):
            self._report.torn_tail = (file.name, at)

    def _read_batch(
        self,
        file: WalFile,
        window: _Window,
        at: int,
        batch: tuple[int, int, int, int, int],
        limit: int,
        known_tail: int | None,
    ) -> int:
        """Takes a batch whose header is right; returns its end, -1 when it is the torn tail."""
        sequence, length, count, checksum, _ = batch
        start = at + BATCH_HEADER.size
        end = start + length + 8 * count
        if end > limit:
            if known_tail is None:
                self._report.torn_tail = (file.name, at)
                return -1
            self._damage(None, file.name, at, "a batch is longer than its file")
            return limit
        data = window.get(start, length + 8 * count)
        rows = array("I", bytes(data[length:]))
        bad: list[tuple[int, int]] = []
        records: list[tuple[int, int]] = []
        if crc32c(data[length:]) == checksum:
            offset = 0
            for i in range(0, len(rows), 2):
                size = rows[i + 1] << 3
                if _is_record(data[offset : min(offset + size, length)], size, rows[i]):
                    records.append((offset, size))
                else:
                    bad.append((rows[i], offset))
                offset += size
            unknown = offset != length
        else:
            records, reached = _walk(data[:length])
            unknown = reached != length or len(records) != count
        if bad or unknown:
            if known_tail is None and self._nothing_follows_batch(file, window, end, sequence):
                self._report.torn_tail = (file.name, at)
                return -1
            for group, offset in bad:
                self._damage_record(group, file, start + offset)
            if unknown:
                self._damage(None, file.name, start, "a batch cannot be read")
        elif crc32c(data[length:]) != checksum:
            self._note(
                file.name, start + length, "a batch's directory is damaged, its records are not"
            )
        for offset, size in records:
            self._apply(file, data[offset : offset + size], start + offset, size)
        self.sequence = sequence
        return end

    def _nothing_follows_batch(
        self, file: WalFile, window: _Window, end: int, sequence: int
    ) -> bool:
        return self._find_batch(file, window, end, file.size, sequence) is None

    def _read_without_header(self, file: WalFile, window: _Window, at: int, limit: int) -> int:
        """A batch's header is damaged: takes its records if they are whole, and where the directory
        behind them fits. Returns where the next batch begins, or `limit`."""
        start = at + BATCH_HEADER.size
        following = self._find_batch(file, window, at + 8, limit, self.sequence, same_flush=True)
        end = limit if following is None else following
        if end - start > 1 << 32:
            self._damage(None, file.name, at, "a batch cannot be read")
            return end
        data = window.get(start, max(end - start, 0))
        records, reached = _walk(data)
        rows = array("I")
        for offset, size in records:
            rows.append(RECORD_HEAD.unpack_from(data, offset)[5])
            rows.append(size >> 3)
        if records and bytes(data[reached:]) == rows.tobytes():
            self._note(file.name, at, "a batch's header is damaged, its records are not")
            for offset, size in records:
                self._apply(file, data[offset : offset + size], start + offset, size)
            self.sequence += 1
            return end
        self._damage(None, file.name, at, "a batch cannot be read")
        if following is not None:
            batch = self._batch(file, window, following, limit)
            assert batch is not None
            self.sequence = batch[0] - 1
        return end

    def _apply(self, file: WalFile, view: memoryview, offset: int, size: int) -> None:
        """Takes one record that is whole."""
        _, _, index, term, order, group, kind, _ = RECORD_HEAD.unpack_from(view)
        if kind < KIND_CONTROL:
            place = file.generation << PLACE_FILE_SHIFT | offset >> 3
            self._of(group).add(index, term, place, size)
        elif kind == KIND_VOTE:
            self._vote(group, term, index)
        elif kind == KIND_TABLE:
            self._tables += 1
            rows = view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + index * VOTE_ROW.size]
            for owner, voted_for, owner_term, era in VOTE_ROW.iter_unpack(rows):
                self._vote(owner, owner_term, voted_for)
                found = self._of(owner)
                found.era = max(found.era, era)
        elif kind == KIND_REMOVED:
            found = self.found[group] = Found()
            found.era = order
            found.removed_in = file.generation
        elif kind == KIND_VOID:
            found = self._of(group)
            found.clear()
            found.base = index + 1
            found.damage = None
            found.holed = False
            found.era = max(found.era, order)
        elif kind != KIND_FENCE:
            raise StorageFault(f"record kind {kind} is not known", path=file.name, offset=offset)

    def _of(self, group: int) -> Found:
        found = self.found.get(group)
        if found is None:
            found = self.found[group] = Found()
        found.removed_in = 0
        return found

    def _vote(self, group: int, term: int, voted_for: int) -> None:
        found = self._of(group)
        if (term, voted_for) >= (found.term, found.voted_for):
            found.term, found.voted_for = term, voted_for
            found.vote_lost = False

    def _damage_record(self, group: int, file: WalFile, offset: int) -> None:
        """A record is damaged; the directory says whose it was."""
        if group == 0 and self._is_table_copy(file, offset):
            return
        self._damage(group, file.name, offset, "a record is damaged")
        self._of(group).vote_lost = True

    def _is_table_copy(self, file: WalFile, offset: int) -> bool:
        """True when the damaged record can only be one of the two tables of a file."""
        first = FILE_HEADER.size + BATCH_HEADER.size
        head = file.file.pread(RECORD_HEADER_BYTES, first)
        length = RECORD_HEAD.unpack(head[: RECORD_HEAD.size])[0]
        if offset != first and not (offset == first + length and _is_record_at(file, first)):
            return False
        self._damaged_tables += 1
        self._note(file.name, offset, "one of two copies of the table of votes is damaged")
        return True

    def _damage(self, group: int | None, name: str, offset: int, reason: str) -> None:
        damage = Damage(file=name, offset=offset, group=group, reason=reason)
        self._report.damages.append(damage)
        if group is None:
            self.all_damaged = self.all_damaged or damage
        else:
            found = self._of(group)
            found.damage = found.damage or damage

    def _note(self, name: str, offset: int, reason: str) -> None:
        self._report.notes.append(f"{name} at byte {offset}: {reason}")


def link_name(generation: int) -> str:
    """Name of a WAL file in reports."""
    return f"wal/{generation:016x}.wal"


def _is_record(view: memoryview, size: int, group: int) -> bool:
    if len(view) != size or size < RECORD_HEADER_BYTES:
        return False
    length, checksum, _, _, _, owner, _, _ = RECORD_HEAD.unpack_from(view)
    return bool(length == size and owner == group and crc32c(view[8:]) == checksum)


def _is_record_at(file: WalFile, offset: int) -> bool:
    head = file.file.pread(RECORD_HEADER_BYTES, offset)
    length = RECORD_HEAD.unpack(head[: RECORD_HEAD.size])[0]
    if not RECORD_HEADER_BYTES <= length <= file.size:
        return False
    return _is_record(memoryview(file.file.pread(length, offset)), length, 0)


def _walk(data: memoryview) -> tuple[list[tuple[int, int]], int]:
    """(offset, size) of the whole records from the start on, and where they end."""
    records = []
    at = 0
    while at + RECORD_HEADER_BYTES <= len(data):
        length, checksum, *_ = RECORD_HEAD.unpack_from(data, at)
        if length < RECORD_HEADER_BYTES or length % 8 or at + length > len(data):
            break
        if crc32c(data[at + 8 : at + length]) != checksum:
            break
        records.append((at, length))
        at += length
    return records, at


# Groups: segments and snapshots, joined with what the WAL says.


def _load_groups(store: Storage, report: RecoveryReport, reader: _WalReader) -> None:
    directory = store.directory
    on_disk = set()
    removed = set()
    for group, gone in list(reader.found.items()):
        # What cannot be read may have been the group's new beginning: then it is damaged.
        if gone.removed_in and gone.damage is None:
            removed.add(group)
            del reader.found[group]
            store.left[group] = (gone.era, gone.removed_in)
    for name in directory.list("groups"):
        try:
            group = int(name, 16)
        except ValueError:
            continue
        if group in removed:
            directory.remove(group_path(group))
            report.stale.append(group_path(group))
        else:
            on_disk.add(group)
    if report.stale:
        directory.sync("groups")
    for group in sorted(on_disk | set(reader.found)):
        log = store.open_group(group)
        found = reader.found.get(group)
        if found is None:
            found = Found()
            found.damage = reader.all_damaged
            found.vote_lost = reader.all_damaged is not None
        log.term, log.voted_for = found.term, found.voted_for
        try:
            if _load_group(store, report, log, found, present=group in on_disk):
                reader.replaced.append(group)
        except StorageFault as fault:
            damage = Damage(
                file=fault.path,
                offset=fault.offset,
                group=group,
                reason=fault.text,
                vote_lost=found.vote_lost,
            )
            report.damages.append(damage)
            _mark(log, damage)
    for log in store.logs.values():
        for file in store.wal.files.values():
            start = bisect_left(log.places, file.generation << PLACE_FILE_SHIFT)
            if start < bisect_left(log.places, (file.generation + 1) << PLACE_FILE_SHIFT):
                file.logs[log.group] = log


def _mark(log: GroupLog, damage: Damage) -> None:
    """Leaves a damaged group nothing but its vote."""
    log.clear()
    log.damaged = damage


def _load_group(
    store: Storage, report: RecoveryReport, log: GroupLog, found: Found, *, present: bool
) -> bool:
    """Joins a group's three sources; True when the WAL's entries are void. Raises StorageFault."""
    replaced = False
    snapshot: Snapshot | None = None
    segments: list[Segment] = []
    runs: list[tuple[int, int]] = []
    log.begin_era(found.era)
    if present:
        segments, runs, snapshot = _load_directory(store, report, log, found.era)
    if found.damage is not None:
        raise StorageFault(found.damage.reason, path=found.damage.file, offset=found.damage.offset)
    saved = (snapshot.index, snapshot.term) if snapshot is not None else (0, 0)
    if snapshot is not None:
        # The WAL has not heard of the snapshot's era: it still tells of the log before.
        replaced = log.era > found.era
        if replaced:
            found.clear()
            found.holed = False
        log.snapshot_index, log.snapshot_term = saved
        log.snapshot_membership = snapshot.membership
    if found.holed:
        raise StorageFault(f"entries of group {log.group} are missing", path="wal", offset=0)
    if found.places:
        base = found.base
        segments = _cut(log, segments, base)
        runs = [run for run in runs if run[0] < base]
        if not runs or runs[-1][1] != found.runs[0][1]:
            runs.append((base, found.runs[0][1]))
        runs += [run for run in found.runs if run[0] > base]
    else:
        base = max(saved[0], segments[-1].last if segments else 0) + 1
    log.segments = segments
    log.base, log.places, log.sizes = base, found.places, found.sizes
    log.last_index = log.written_index = base + len(found.places) - 1
    first, term_known = _start_of_run(log, saved[0])
    if first > saved[0] + 1:
        raise StorageFault(
            f"entries {saved[0] + 1} to {first - 1} of group {log.group} are missing",
            path=group_path(log.group),
            offset=0,
        )
    if not term_known and first <= log.last_index:
        first += 1
    log.first_index = first
    runs = _runs_from(runs, first, saved)
    log.set_runs(runs)
    log.restart_memory()
    log.last_term = log.term_at(log.last_index) if log.last_index else 0
    return replaced


def _load_directory(
    store: Storage, report: RecoveryReport, log: GroupLog, era: int
) -> tuple[list[Segment], list[tuple[int, int]], Snapshot | None]:
    directory = store.directory
    path = group_path(log.group)
    names = directory.list(path)
    orders = [int(name[:-4], 16) for name in names if name.endswith(".seg")]
    log.eras_used = max([era, *(order >> ERA_SHIFT for order in orders)])
    for name in names:
        if name.endswith(".part"):
            directory.remove(f"{path}/{name}")
            report.stale.append(f"{path}/{name}")
    loaded = read_snapshot(directory, log.group, store.clusters)
    snapshot: Snapshot | None = None
    if loaded is not None and loaded[1] >= era:
        snapshot, era = loaded
    elif loaded is not None:
        directory.remove(snapshot_name(log.group))
        report.stale.append(snapshot_name(log.group))
    log.begin_era(era)
    log.next_order += max([o + 1 for o in orders if o >> ERA_SHIFT == era], default=0) & ORDER_MASK
    segments: list[Segment] = []
    runs: list[tuple[int, int]] = []
    for name in names:
        if not name.endswith(".seg"):
            continue
        if int(name[:-4], 16) >> ERA_SHIFT != era:
            directory.remove(f"{path}/{name}")
            report.stale.append(f"{path}/{name}")
            continue
        segment, terms = load_segment(directory, log.group, f"{path}/{name}", store.clusters)
        report.segments += 1
        segments = [*_cut(log, segments, segment.first), segment]
        runs = [run for run in runs if run[0] < segment.first]
        runs += terms
    return segments, runs, snapshot


def _cut(log: GroupLog, segments: list[Segment], index: int) -> list[Segment]:
    """The segments without the entries >= index, which have successors elsewhere."""
    left = [segment for segment in segments if segment.first < index]
    if len(left) < len(segments) or (left and left[-1].last >= index):
        log.stale_index = min(log.stale_index or index, index)
        log.stale_names += [segment.name for segment in segments[len(left) :]]
    if left and left[-1].last >= index:
        left[-1].cut(index)
    return left


def _start_of_run(log: GroupLog, snapshot_index: int) -> tuple[int, bool]:
    """Where the unbroken entries up to the last one begin; whether the term before is known."""
    first = log.base
    for segment in reversed(log.segments):
        if segment.last != first - 1:
            break
        position = len(segment)
        while position and segment.index_at(position - 1) == first - 1:
            position -= 1
            first -= 1
        if position:
            break
    return first, first - 1 in (0, snapshot_index)


def _runs_from(
    runs: list[tuple[int, int]], first: int, saved: tuple[int, int]
) -> list[tuple[int, int]]:
    """The runs of terms that cover first - 1 and all after it."""
    kept = [run for run in runs if run[0] > first - 1]
    before = [run for run in runs if run[0] <= first - 1]
    if first - 1 == saved[0]:
        return [(first - 1, saved[1]), *kept]
    return [before[-1], *kept] if before else kept or [(first, 0)]
