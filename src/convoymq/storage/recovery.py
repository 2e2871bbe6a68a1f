"""Rebuilding the logs of a node from its WAL files, segments and snapshots.

`wal_reader` says what the WAL has of each group; here that is joined with the group's files. Where
WAL and segments both have an entry the WAL is right, where two segments have it the later one.
Formats: docs/formats/storage.md.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from convoymq.logformat.segment import ERA_SHIFT, ORDER_MASK, Segment, group_path
from convoymq.logformat.wal_file import PLACE_FILE_SHIFT
from convoymq.storage.log import GroupLog
from convoymq.storage.packs import Found as PackFound
from convoymq.storage.segments import load_segment
from convoymq.storage.snapshots import read_snapshot, snapshot_name
from convoymq.storage.types import (
    Damage,
    RecoveryReport,
    Snapshot,
    StorageFault,
)
from convoymq.storage.wal_reader import Found, Hole, WalReader, holds_data

if TYPE_CHECKING:
    from convoymq.storage.store import Storage


def recover(store: Storage) -> RecoveryReport:
    """Fills `store.logs` and starts its WAL behind what was found.

    Raises:
        StorageFault: files are of another cluster, or of another version of their format.
        OSError: the disk refuses.
    """
    report = RecoveryReport()
    # A process that was killed leaves in the page cache what is not on the disk yet (ADR 0118).
    store.directory.sync_all()
    store.directory.make("wal")
    store.directory.make("groups")
    reader = WalReader(
        store.directory, store.manifest, store.clusters, store.config.wal_max_size_bytes, report
    )
    reader.read()
    store.wal.files.update(reader.files)
    sections, unread = store.packs.load(store.directory, store.clusters, report)
    replaced = _load_groups(store, report, reader, sections)
    for path in unread:
        _lose_pack(store, report, path)
    store.packs.adopt()
    for hole in reader.holes:
        if hole.groups or hole.fallback:
            report.damages.append(hole.report())
        else:
            report.notes.append(f"{hole.file} at byte {hole.offset}: {hole.reason}")
    store.suspects = reader.suspects
    store.suspects_end = reader.suspects_end
    store.wal.start(
        reader.last_generation,
        max(reader.sequence, 0),
        reader.previous,
        reader.leftovers,
        damaged=bool(reader.suspects or unread or any(hole.groups for hole in reader.holes)),
    )
    for group in replaced:
        # The WAL did not know yet; what follows must not be joined with what was dropped.
        log = store.logs[group]
        log.void(log.snapshot_index, log.snapshot_term)
    report.groups = len(store.logs)
    report.entries = sum(log.last_index + 1 - log.first_index for log in store.logs.values())
    return report


def _lose_pack(store: Storage, report: RecoveryReport, path: str) -> None:
    """Neither directory of a pack can be read: nobody can say whose entries were in it."""
    reason = "the pack's directory cannot be read; it cannot be told whose data it was"
    # Before what groups found of it by themselves.
    report.damages.insert(0, Damage(file=path, offset=0, group=None, reason=reason))
    for group, log in store.logs.items():
        if log.damaged is None:
            _mark(log, Damage(file=path, offset=0, group=group, reason=reason))


def _load_groups(
    store: Storage,
    report: RecoveryReport,
    reader: WalReader,
    packed: dict[int, list[PackFound]],
) -> list[int]:
    """Makes the logs; returns groups whose WAL entries belong to a log that their snapshot
    replaced."""
    replaced = []
    directory = store.directory
    on_disk = set()
    removed = set()
    for group, gone in list(reader.found.items()):
        # What cannot be read may have been the group's new beginning: then it is damaged.
        if gone.removed_in and gone.damage is None:
            removed.add(group)
            del reader.found[group]
            store.remember_removed(group, gone.era, gone.removed_in)
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
    on_disk |= _lost_groups(store, packed, known={*on_disk, *reader.found}, reader=reader)
    for group in sorted(on_disk | set(reader.found)):
        log = store.open_group(group)
        found = reader.found.get(group)
        if found is None:
            found = Found()
            if holds_data(directory, f"{group:08x}") or reader.is_suspect(group):
                found.damage = found.lost = Hole(
                    group_path(group), 0, "the log knows nothing of a group that has files"
                )
                found.damage.groups.append(group)
                reader.holes.append(found.damage)
        log.known = group in reader.found
        log.term, log.voted_for = found.term, found.voted_for
        try:
            has_files = group in on_disk or group in packed
            if _load_group(store, report, log, found, packed.get(group, []), present=has_files):
                replaced.append(group)
        except StorageFault as fault:
            damage = Damage(
                file=fault.path,
                offset=fault.offset,
                group=group,
                reason=fault.text,
                vote_lost=found.lost is not None,
            )
            report.damages.append(damage)
            _mark(log, damage)
        if found.damage is not None:
            _mark(log, found.damage.of_group(group, found.lost is not None))
        elif log.damaged is None and found.last >= 0:
            logged = (found.last, found.last_term, found.era)
            if logged != (log.last_index, log.last_term, log.era):
                log.logged = logged
    for log in store.logs.values():
        for file in store.wal.files.values():
            start = bisect_left(log.places, file.generation << PLACE_FILE_SHIFT)
            if start < bisect_left(log.places, (file.generation + 1) << PLACE_FILE_SHIFT):
                file.groups[log.group] = None
    return replaced


def _lost_groups(
    store: Storage, packed: dict[int, list[PackFound]], known: set[int], reader: WalReader
) -> set[int]:
    """Returns the groups in packs of which the WAL has lost what it knew. What else it does not
    know was removed: should it come back, it begins in an era of its own."""
    lost = set()
    for group, sections in packed.items():
        if group in known:
            continue
        if group not in store.left and reader.is_suspect(group):
            lost.add(group)
            continue
        era, generation = store.left.get(group, (0, 0))
        newest = max([found.row.order >> ERA_SHIFT for found in sections])
        store.left[group] = (max(era, newest + 1), generation)
    return lost


def _mark(log: GroupLog, damage: Damage) -> None:
    """Leaves a damaged group nothing but its vote."""
    log.clear()
    log.damaged = damage


def _load_group(
    store: Storage,
    report: RecoveryReport,
    log: GroupLog,
    found: Found,
    sections: list[PackFound],
    *,
    present: bool,
) -> bool:
    """Joins a group's three sources; True when the WAL's entries are void. Raises StorageFault."""
    replaced = False
    snapshot: Snapshot | None = None
    segments: list[Segment] = []
    runs: list[tuple[int, int]] = []
    log.begin_era(found.era)
    if present:
        segments, runs, snapshot = _load_segments(store, report, log, found.era, sections)
    if found.damage is not None:
        return False
    expected = found.last
    saved = (snapshot.index, snapshot.term) if snapshot is not None else (0, 0)
    if snapshot is not None:
        # The WAL has not heard of the snapshot's era: it still tells of the log before.
        replaced = log.era > found.era
        if replaced:
            found.clear()
            found.holed = False
            expected = -1
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
        if expected >= 0 and base != expected + 1:
            raise StorageFault(
                f"group {log.group} ended at entry {expected}, its files end at {base - 1}",
                path=group_path(log.group),
                offset=0,
            )
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


def _load_segments(
    store: Storage, report: RecoveryReport, log: GroupLog, era: int, packed: list[PackFound]
) -> tuple[list[Segment], list[tuple[int, int]], Snapshot | None]:
    directory = store.directory
    path = group_path(log.group)
    names = directory.list(path)
    files = {int(name[:-4], 16): f"{path}/{name}" for name in names if name.endswith(".seg")}
    sections = {found.row.order: found for found in packed}
    orders = sorted({*files, *sections})
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
    joined = {
        order
        for since, upto in [(found.row.since, order) for order, found in sections.items()]
        for order in orders
        if since <= order < upto
    }
    for order in orders:
        if order >> ERA_SHIFT != era:
            if order in files:
                directory.remove(files[order])
                report.stale.append(files[order])
            continue
        if order in joined:
            continue
        if order in files:
            name = files[order]
            segment, terms = load_segment(directory, log.group, name, order, store.clusters)
        else:
            segment, terms = sections[order].get()
        report.segments += 1
        segments = [*_cut(log, segments, segment.first), segment]
        runs = [run for run in runs if run[0] < segment.first]
        runs += terms
    return segments, runs, snapshot


def _cut(log: GroupLog, segments: list[Segment], index: int) -> list[Segment]:
    """Returns the segments without the entries >= index, which have successors elsewhere."""
    left = [segment for segment in segments if segment.first < index]
    if len(left) < len(segments) or (left and left[-1].last >= index):
        log.stale_index = min(log.stale_index or index, index)
        log.stale_segments += segments[len(left) :]
    if left and left[-1].last >= index:
        left[-1].cut(index)
    return left


def _start_of_run(log: GroupLog, snapshot_index: int) -> tuple[int, bool]:
    """Returns where the unbroken entries up to the last one begin; whether the term before is
    known."""
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
    """Returns the runs of terms that cover first - 1 and all after it."""
    kept = [run for run in runs if run[0] > first - 1]
    before = [run for run in runs if run[0] <= first - 1]
    if first - 1 == saved[0]:
        return [(first - 1, saved[1]), *kept]
    return [before[-1], *kept] if before else kept or [(first, 0)]
