"""A node's storage: the common WAL, the logs of all groups, and what happens in the background.

*WAL compaction* empties full WAL files, oldest first, one group at a time: it asks the planner what
is still alive, snapshots the group where that saves copying, has the worker copy the rest to
segment files, and recycles the file. Nothing here waits. Formats: docs/formats/storage.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from convoymq.logformat.entry import KIND_REMOVED, KIND_TAIL_MARKER, NO_GROUP
from convoymq.logformat.identity import ClusterIds
from convoymq.logformat.segment import Segment, group_path
from convoymq.logformat.wal_file import (
    MAP_BITS,
    MAP_BYTES,
    PLACE_FILE_SHIFT,
    ROW_DAMAGED,
    ROW_IN_FILES,
    ROW_VOTE_LOST,
    TABLE_ROW,
)
from convoymq.model.rounds import pass_on
from convoymq.storage.live_parts import (
    alive_ranges,
    below,
    clip,
    dead_since_snapshot,
    dead_size,
    size_of,
)
from convoymq.storage.log import GroupLog
from convoymq.storage.manifest import Manifest
from convoymq.storage.recovery import recover
from convoymq.storage.segments import Piece, SegmentWriter, copy_to_segments, read_piece
from convoymq.storage.snapshots import remove_former
from convoymq.storage.types import (
    Damage,
    Directory,
    File,
    Flusher,
    GroupPlan,
    NoPace,
    Pace,
    RecoveryReport,
    StorageConfig,
    StorageFault,
    Worker,
)
from convoymq.storage.wal import Wal, WalFile

SEGMENT_FILES_OPEN_MAX = 256
GIVE_BACK_BYTES = 4 << 20
FORGET_BYTES = 1 << 20
"""Each time so much has come in, the bodies that nobody needs any more leave memory."""
FORGET_LOGS = 64
"""So many logs are looked at then."""
RECLAIM_EVERY_TICKS = 8
RECLAIM_ENTRIES = 1 << 16
"""So many entries of segments are looked at then, or those of one group."""
NEVER = 1 << 62
"""Generation of a WAL file that is never released."""


def _ignore(*_: object) -> None:
    """An answer that nobody needs."""


def _keep_all(_group: int) -> int:
    return 0


class Storage:
    """Everything a node keeps on disk for its Raft groups.

    Args:
        directory: where; `wal/` and `groups/` are made in it.
        flusher: writes the WAL. worker: does all other slow file work, in order.

    Call `recover` first. All callbacks come on the caller's thread.
    """

    def __init__(
        self,
        directory: Directory,
        flusher: Flusher,
        worker: Worker,
        config: StorageConfig | None = None,
    ) -> None:
        self.directory = directory
        self.worker = worker
        self.config = config or StorageConfig()
        self.logs: dict[int, GroupLog] = {}
        self.left: dict[int, tuple[int, int]] = {}
        """Removed groups of which the disk may still know: (era that begins when the group is
        opened again, generation of the WAL file with the removal)."""
        self.memory_bytes = 0
        """Entry bodies in memory, all groups."""
        self.cache_bytes = 0
        """Read-ahead in memory, all groups."""
        self.clusters = ClusterIds()
        self.suspects = 0
        """Map of groups of which this node may have lost all trace (bit group % MAP_BITS)."""
        self.suspects_end = 0
        """No group above this one is a suspect; 0 = not known."""
        manifest = self.manifest = Manifest(directory, self.clusters)
        self.wal = Wal(
            directory, flusher, worker, self.config, self._table, manifest, self.clusters
        )
        self.kick: Callable[[], None] = self.wal.kick
        """End of a round: what was queued goes to the disk."""
        self.wal.on_written = self._written
        self.wal.on_queued = self._queued
        self.wal.on_full = self._compact_wal
        self.wal.on_client_failed = lambda group, error: self.on_client_failed(group, error)
        self.planner: Callable[[int], GroupPlan | None] | None = None
        """Asked for each group when a WAL file is to be emptied; None for a group: keep everything.
        While it is not set, no file is emptied."""
        self.needed_from: Callable[[int], int] = _keep_all
        """Asked for a group with bodies in memory: those below that index are not expected to be
        read again. Whoever does reads them from disk."""
        self.on_queued: Callable[[], None] = _ignore
        """Something waits for a `kick` that did not before."""
        self.on_damaged: Callable[[Damage], None] = _ignore
        """A read found damage; that log serves nothing any more."""
        self.on_client_failed: Callable[[int, Exception], None] = pass_on
        """(group, error): who hears that entries or a vote of a group are durable has failed."""
        self.give_back: Callable[[], None] = _ignore
        """Called by `tick` when much memory was freed: the shell hands it to the system."""
        self.pace: Pace = NoPace()
        """Pace at which entries are copied from the WAL to segments, and from segments to
        others."""
        self._known: set[int] = set()
        """Removed groups that the WAL on disk knows."""
        self._line: deque[GroupLog] = deque()
        self._caches: OrderedDict[int, GroupLog] = OrderedDict()
        self._open_segments: OrderedDict[str, Segment] = OrderedDict()
        self._compacting_file: WalFile | None = None
        self._compacting_logs: list[GroupLog] = []
        self._in_step = False
        self._step_again = False
        self._stalled = False
        self._refused: list[Callable[[], None]] = []
        self._memory_peak = 0
        self._forget_above = FORGET_BYTES
        self._ticks = 0
        self._reclaim_at = 0
        self._reclaiming = False
        self.compacted_files = 0

    # Outside.

    @property
    def identity(self) -> str:
        """Returns the id of the cluster that the node belongs to, "" = none yet."""
        current = self.clusters.current
        return current.hex() if any(current) else ""

    def set_identity(self, cluster: str, former: Sequence[str] = ()) -> None:
        """Says which cluster the node belongs to (32 hexadecimal digits, "" = none yet), and what
        ids that cluster had before. Files of other clusters are refused by `recover`; what is
        written from now on carries the id. Raises ValueError.
        """
        if cluster != self.identity:
            self.wal.turn()
        self.clusters.set(cluster, former)

    def recover(self) -> RecoveryReport:
        """Rebuilds all logs from disk. Call once, before anything else. Raises OSError."""
        return recover(self)

    def open_group(self, group: int) -> GroupLog:
        """Returns the group's log; a new, empty one when there is none."""
        log = self.logs.get(group)
        if log is None:
            log = self.logs[group] = GroupLog(self, group)
            log.known = group in self._known
            era, _ = self.left.pop(group, (-1, 0))
            if era >= 0:
                # A later table names the era too, but the removal's file may be gone before.
                log.begin_era(era)
                log.void(0, 0)
            elif self.suspects >> group % MAP_BITS & 1 and group <= (self.suspects_end or group):
                log.damaged = Damage(
                    file="wal",
                    offset=0,
                    group=group,
                    reason=f"what group {group} had here may be lost",
                    vote_lost=True,
                )
        return log

    def limit_suspects(self, group: int) -> None:
        """Says that the node never had a group of a higher number: those are new."""
        self.suspects_end = group
        if group < 1:
            self.suspects = 0

    def remove_group(self, group: int) -> None:
        """Deletes everything of a group, its vote as well. When it is opened again it is empty,
        whether or not the files are gone by then."""
        log = self.logs.pop(group, None)
        if log is None:
            return
        if log.receiver is not None:
            log.receiver.abort()
        log.clear()
        log.removed = True
        if log.known:
            self._known.add(group)
        directory = self.directory
        era = log.new_era()

        def done(_: object, error: BaseException | None) -> None:
            if error is not None and group not in self.logs:
                # What could not be removed must never be taken for the group's own.
                self.left[group] = (max(era, self.left.get(group, (0, 0))[0]), NEVER)

        def work() -> None:
            remove_former(directory, group, era, self.clusters)

        place = self.wal.add_control(KIND_REMOVED, group, 0, 0, era=era)
        self.left[group] = (era, place >> PLACE_FILE_SHIFT)
        self.wal.tell(lambda: self.worker.submit(work, done))
        self.wal.kick()

    def remember_removed(self, group: int, era: int, generation: int) -> None:
        """Recovery found the removal of a group, in the WAL file of that generation."""
        self.left[group] = (era, generation)
        self._known.add(group)

    @property
    def blocked(self) -> StorageFault | None:
        """Returns why nothing can be written now, or None."""
        return self.wal.blocked

    @property
    def on_blocked(self) -> Callable[[StorageFault | None], None]:
        """Told when the WAL stops being writable, and (None) when it is again."""
        return self.wal.on_blocked

    @on_blocked.setter
    def on_blocked(self, callback: Callable[[StorageFault | None], None]) -> None:
        self.wal.on_blocked = callback

    @property
    def backlog_bytes(self) -> int:
        """Queued for the WAL or being written."""
        return self.wal.backlog_bytes

    @property
    def wal_files_waiting(self) -> int:
        """Full WAL files that are not emptied yet: above 2 the disk does not keep up."""
        return self.wal.files_waiting

    def tick(self) -> None:
        """Regular upkeep, every quarter of a second or so: retries, read-ahead and memory."""
        self.wal.retry()
        self.wal.mark_tail()
        refused, self._refused = self._refused, []
        for attempt in refused:
            attempt()
        self._stalled = False
        self._compact_wal()
        self._ticks += 1
        if self._ticks % RECLAIM_EVERY_TICKS == 0:
            self._drop_idle_caches()
            self._reclaim_next()
        if self.memory_bytes > FORGET_BYTES:
            self._forget()
        held = self.memory_bytes + self.cache_bytes
        if self._memory_peak - held > GIVE_BACK_BYTES:
            self._memory_peak = held
            self.give_back()
        self._memory_peak = max(self._memory_peak, held)

    def close(self, done: Callable[[], None]) -> None:
        """Writes what is queued and a mark of the end, then calls back."""
        self.wal.closing = True
        if self.wal.blocked is None:
            self.wal.add_control(KIND_TAIL_MARKER, NO_GROUP, 0, 0)
        self.wal.when_idle(done)

    # Memory.

    def remember(self, log: GroupLog) -> None:
        """The log has bodies in memory from now on."""
        log.remembered = True
        self._line.append(log)

    def _queued(self) -> None:
        self.on_queued()

    def _written(self) -> None:
        if self.memory_bytes > self._forget_above:
            self._forget()
        excess = self.memory_bytes - self.config.mem_table_max_bytes
        if excess > 0:
            self._evict(excess)

    def _forget(self) -> None:
        """Drops written bodies that no machine and no follower is expected to need."""
        self._memory_peak = max(self._memory_peak, self.memory_bytes)
        for _ in range(min(len(self._line), FORGET_LOGS)):
            log = self._line.popleft()
            log.forget(self.needed_from(log.group) - 1)
            self._return_to_line(log)
        self._forget_above = self.memory_bytes + FORGET_BYTES

    def _return_to_line(self, log: GroupLog) -> None:
        if log.memory_bytes:
            self._line.append(log)
        else:
            log.remembered = False

    def _evict(self, excess: int) -> None:
        self._memory_peak = max(self._memory_peak, self.memory_bytes)
        target = self.memory_bytes - excess
        for _ in range(len(self._line)):
            if self.memory_bytes <= target:
                return
            log = self._line.popleft()
            log.evict(self.memory_bytes - target)
            self._return_to_line(log)

    def release_memory(self, log: GroupLog) -> None:
        """Drops the bodies and the read-ahead of one log that are on disk, and gives what is free
        to the system."""
        log.evict(log.memory_bytes)
        self.uncached(log)
        log.drop_cache()
        self.give_back()

    def cached(self, log: GroupLog) -> None:
        """The log holds read-ahead now."""
        self._caches[log.group] = log
        self.cache_bytes += log.cache_bytes
        limit = max(4 * self.config.read_ahead_bytes, self.config.mem_table_max_bytes // 4)
        while self.cache_bytes > limit and len(self._caches) > 1:
            _, oldest = self._caches.popitem(last=False)
            self.cache_bytes -= oldest.cache_bytes
            oldest.drop_cache()

    def uncached(self, log: GroupLog) -> None:
        """The log gives its read-ahead up."""
        if self._caches.pop(log.group, None) is not None:
            self.cache_bytes -= log.cache_bytes

    def _drop_idle_caches(self) -> None:
        for log in list(self._caches.values()):
            if log.cache_used:
                log.cache_used = False
            else:
                self.uncached(log)
                log.drop_cache()

    def segment_file(self, segment: Segment) -> File:
        """Returns the segment's open file. Raises OSError."""
        if segment.file is None:
            segment.file = self.directory.open(segment.name)
            self._open_segments[segment.name] = segment
            if len(self._open_segments) > SEGMENT_FILES_OPEN_MAX:
                # The worker may still read it: the last reference closes it.
                _, oldest = self._open_segments.popitem(last=False)
                oldest.file = None
        file: File = segment.file
        return file

    def _forget_segment(self, segment: Segment) -> None:
        self._open_segments.pop(segment.name, None)
        segment.file = None

    def remove_files(self, path: str, names: Iterable[str]) -> None:
        """Has the worker remove files and make that durable."""
        doomed = list(names)
        if not doomed:
            return
        directory = self.directory

        def work() -> None:
            for name in doomed:
                directory.remove(name)
            if directory.exists(path):
                directory.sync(path)

        self.worker.submit(work, _ignore)

    def repeat(self, attempt: Callable[[], None]) -> None:
        """The disk refused something that has to be done: the next `tick` tries it again."""
        self._refused.append(attempt)

    def on_damage(self, damage: Damage) -> None:
        """A log found itself damaged."""
        self.on_damaged(damage)

    def _table(self) -> tuple[int, int, bytes]:
        """Returns the table that begins each WAL file: the last suspect, the map of suspects, and a
        row for each group."""
        rows = [self.suspects.to_bytes(MAP_BYTES, "little")]
        for log in self.logs.values():
            index, term, era = log.logged or (log.last_index, log.last_term, log.era)
            flags = ROW_IN_FILES if log.places or log.logged is not None else 0
            if log.damaged is not None and log.damaged.file:
                flags |= ROW_DAMAGED | (ROW_VOTE_LOST if log.damaged.vote_lost else 0)
            rows.append(TABLE_ROW.pack(log.group, log.voted_for, log.term, era, flags, index, term))
        return len(rows) - 1, self.suspects_end, b"".join(rows)

    # WAL compaction.

    def turn_wal(self) -> int:
        """Has the WAL go on in another file, and what it holds so far emptied like a full file;
        returns a number for `has_emptied`."""
        current = self.wal.current
        if current is None or not current.started:
            return 0
        self.wal.turn()
        # The next batch begins the file: this one is there at once.
        self.wal.add_control(KIND_TAIL_MARKER, NO_GROUP, 0, 0)
        self.wal.kick()
        generation: int = current.generation
        return generation

    def has_emptied(self, generation: int) -> bool:
        """Returns whether no file of the WAL up to that one is left; see `turn_wal`."""
        return all(file.generation > generation for file in self.wal.files.values())

    def _compact_wal(self) -> None:
        """Empties the oldest full WAL file, when none is being emptied."""
        if self._compacting_file is not None or self.planner is None or self._stalled:
            return
        file = self.wal.oldest_full()
        if file is not None:
            self._compacting_file = file
            self._compacting_logs = self._logs_in(file)
            self._compact_next()

    def _compact_next(self) -> None:
        """Goes on with the next group. Answers may come at once: hence no recursion."""
        self._step_again = True
        if self._in_step:
            return
        self._in_step = True
        while self._step_again:
            self._step_again = False
            self._compact_step()
        self._in_step = False

    def _compact_step(self) -> None:
        """Moves one group's entries out of the file being emptied; releases it after the last."""
        file = self._compacting_file
        assert file is not None
        while self._compacting_logs:
            log = self._compacting_logs[-1]
            if not log.removed and log.damaged is None and self._count_in(log, file):
                self._plan_compaction(log, file)
                return
            self._compacting_logs.pop()
        self._compacting_file = None
        if self.wal.written_sequence < self.wal.barrier:
            self._stalled = True
            return
        self.compacted_files += 1
        self.wal.release(file)
        for group in [g for g, (_, held) in self.left.items() if held <= file.generation]:
            # The worker removes the file before it writes anything for a new log of the group.
            del self.left[group]
        next_file = self.wal.oldest_full()
        if next_file is not None:
            self._compacting_file = next_file
            self._compacting_logs = self._logs_in(next_file)
            self._step_again = True

    def _logs_in(self, file: WalFile) -> list[GroupLog]:
        """Returns the logs of the groups with entries in the file; removed groups need nothing of
        it."""
        return [self.logs[group] for group in file.groups if group in self.logs]

    def _count_in(self, log: GroupLog, file: WalFile) -> int:
        """Returns the number of the log's first entries that lie in that file, the oldest one."""
        return bisect_left(log.places, (file.generation + 1) << PLACE_FILE_SHIFT)

    def _plan_compaction(self, log: GroupLog, file: WalFile) -> None:
        planner = self.planner if log.receiver is None else None
        plan = None if planner is None else planner(log.group)
        count = self._count_in(log, file)
        if plan is None or plan.take_snapshot is None or plan.applied <= log.snapshot_index:
            self._copy(log, file, plan)
            return
        first, last = log.base, log.base + count - 1
        total = sum(log.sizes[:count])
        alive = sum(
            sum(log.sizes[a - first : b - first + 1])
            for a, b in clip([*plan.live_ranges, (plan.applied + 1, last)], first, last)
        )
        least = self.config.snapshot_min_dead_bytes
        dead = (total - alive) << 3
        # What was copied because it was little adds up, file by file.
        worth = dead >= least or dead + dead_since_snapshot(log, plan) >= least
        if not worth or plan.applied > log.written_index:
            self._copy(log, file, plan)
            return
        version = log.version

        def saved(_: BaseException | None) -> None:
            # A log that was replaced meanwhile is not what was planned for.
            self._copy(log, file, plan if log.version == version else None)

        log.save_snapshot(plan.take_snapshot(), saved)

    def _copy(self, log: GroupLog, file: WalFile, plan: GroupPlan | None) -> None:
        """Has the worker copy what is alive in the file to new segments."""
        count = self._count_in(log, file)
        first, last = log.base, log.base + count - 1
        keep = log.first_index
        wanted: list[tuple[int, int]] = [(first, last)]
        if plan is not None:
            keep = max(keep, min(log.snapshot_index + 1, plan.keep_from))
            wanted = clip([*below(plan.live_ranges, keep), (keep, last)], first, last)
        elif log.removed:
            wanted = []
        if not wanted or not count:
            self._copied(log, file, keep, log.version, [], None)
            return
        # Only memory is copied here; what takes time per entry is the worker's.
        places, sizes = log.places[:count], log.sizes[:count]
        order = log.next_order
        log.next_order += 2 + count // self.config.segment_max_entries
        # Two neighbours of what was closed for its size are together larger than the limit.
        log.next_order += 2 * (sum(sizes) << 3) // self.config.segment_max_size_bytes
        version = log.version
        config, directory, group, pace = self.config, self.directory, log.group, self.pace
        cluster = self.clusters.current
        self.worker.submit(
            lambda: copy_to_segments(
                directory,
                group,
                order,
                [_piece_of(file, first, places, sizes, wanted)],
                config.segment_max_entries,
                config.segment_max_size_bytes,
                pace,
                cluster,
            ),
            lambda made, error: self._copied(log, file, keep, version, made or [], error, plan),
        )

    def _copied(
        self,
        log: GroupLog,
        file: WalFile,
        keep: int,
        version: int,
        made: list[Segment],
        error: BaseException | None,
        plan: GroupPlan | None = None,
    ) -> None:
        if isinstance(error, StorageFault):
            log.mark_damaged(error)
        elif error is not None:
            # No space, most likely: the file stays as it is, `tick` tries again.
            self._stalled = True
            self._compacting_file = None
            return
        elif log.removed or log.version != version:
            self.remove_files(group_path(log.group), [segment.name for segment in made])
        else:
            log.moved(self._count_in(log, file), made, keep)
            if log.stale_index and log.written_index >= log.stale_index:
                # What replaced truncated entries may go with this file: they must not come back.
                self._purge_stale(log)
                return
            if plan is not None:
                self._compact_segments(log, plan)
        self._compacting_logs.pop()
        self._compact_next()

    def _purge_stale(self, log: GroupLog) -> None:
        """Rids the disk of truncated entries, then goes on with the compaction."""
        cut = [segment for segment in log.segments if segment.stale]
        names, log.stale_names = log.stale_names, []
        self.remove_files(group_path(log.group), names)
        log.stale_index = 0
        version = log.version

        def rewritten(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, StorageFault) and log.version == version:
                log.stale_index = log.written_index
                self._stalled = True
                self._compacting_file = None
                return
            if len(cut) > 1 and log.version == version:
                self._purge_stale(log)
                return
            self._compacting_logs.pop()
            self._compact_next()

        if cut and log.damaged is None:
            self._rewrite(log, [(cut[0], [(cut[0].first, cut[0].last)])], rewritten)
        else:
            rewritten(None)

    # Compaction of segments.

    def _reclaim_next(self) -> None:
        """Looks at groups that have segments, until one has something to give: a drained queue
        gives its disk space back."""
        if self.planner is None or self._reclaiming or self._compacting_file is not None:
            return
        groups = list(self.logs)
        left = RECLAIM_ENTRIES
        for _ in range(min(len(groups), 256)):
            self._reclaim_at += 1
            log = self.logs[groups[self._reclaim_at % len(groups)]]
            if log.segments and log.damaged is None and log.receiver is None:
                left -= sum([len(segment.sizes) for segment in log.segments])
                if self._reclaim(log) or left <= 0:
                    return

    def _reclaim(self, log: GroupLog) -> bool:
        """Frees what is dead in a group's segments, when that is at least half; whether it is."""
        plan = self.planner(log.group) if self.planner is not None else None
        if plan is None:
            return False
        size = sum([segment.size for segment in log.segments])
        if dead_size(log.segments, plan) * 2 < size:
            return False
        snapshot_due = plan.applied > log.snapshot_index and plan.applied <= log.written_index
        if not snapshot_due or plan.take_snapshot is None:
            log.raise_first(max(log.first_index, min(log.snapshot_index + 1, plan.keep_from)))
            self._compact_segments(log, plan)
            return True
        self._reclaiming = True
        version = log.version

        def saved(error: BaseException | None) -> None:
            self._reclaiming = False
            if error is None and log.version == version and not log.removed:
                log.raise_first(max(log.first_index, min(log.snapshot_index + 1, plan.keep_from)))
                self._compact_segments(log, plan)

        log.save_snapshot(plan.take_snapshot(), saved)
        return True

    def _compact_segments(self, log: GroupLog, plan: GroupPlan) -> None:
        """Removes dead segments, rewrites those that are mostly dead, joins small ones."""
        if log.compacting:
            return
        keep = log.first_index
        dead: list[Segment] = []
        left: list[Segment] = []
        runs: list[list[tuple[Segment, list[tuple[int, int]]]]] = [[]]
        entries = 0
        size = 0
        for segment in log.segments:
            ranges = alive_ranges(segment, plan.live_ranges, keep)
            count = sum(segment.lower(b + 1) - segment.lower(a) for a, b in ranges)
            if not count:
                dead.append(segment)
                continue
            left.append(segment)
            alive_size = size_of(segment, ranges)
            sparse = alive_size * 2 < segment.size
            small = (
                count * 4 < self.config.segment_max_entries
                and alive_size * 4 < self.config.segment_max_size_bytes
            )
            fits = (
                entries + count <= self.config.segment_max_entries
                and size + alive_size <= self.config.segment_max_size_bytes
            )
            if not (sparse or small):
                runs.append([])
                entries = size = 0
                continue
            if not fits:
                runs.append([])
                entries = size = 0
            runs[-1].append((segment, ranges))
            entries += count
            size += alive_size
        if dead:
            log.segments = left
            for segment in dead:
                self._forget_segment(segment)
            self.remove_files(group_path(log.group), [segment.name for segment in dead])
        for run in runs:
            worth = len(run) >= 4 or any(
                size_of(segment, ranges) * 2 < segment.size for segment, ranges in run
            )
            if run and worth:
                self._rewrite(log, run)
                return

    def _rewrite(
        self,
        log: GroupLog,
        run: list[tuple[Segment, list[tuple[int, int]]]],
        answer: Callable[[BaseException | None], None] = _ignore,
    ) -> None:
        """Has the worker replace some neighbouring segments by one with what is alive in them."""
        pieces = []
        try:
            for segment, ranges in run:
                piece = Piece(self.segment_file(segment), array("Q"), array("I"), array("I"))
                for a, b in ranges:
                    low, high = segment.lower(a), segment.lower(b + 1)
                    piece.indexes.extend([segment.index_at(i) for i in range(low, high)])
                    piece.offsets.extend(segment.offsets[low:high])
                    piece.sizes.extend(segment.sizes[low:high])
                pieces.append(piece)
        except OSError as error:
            fault = StorageFault(f"a segment cannot be opened: {error}")
            log.mark_damaged(fault)
            answer(fault)
            return
        old = [segment for segment, _ in run]
        last = old[-1]
        tag = log.next_order
        log.next_order += 1
        log.compacting = True
        version = log.version
        config, directory, group, pace = self.config, self.directory, log.group, self.pace
        cluster = self.clusters.current

        def work() -> list[Segment]:
            # The limits held for each source; one file takes all, whatever a changed config says.
            writer = SegmentWriter(
                directory,
                group,
                tag,
                1 << 30,
                max(config.segment_max_size_bytes, 1 << 34),
                pace,
                cluster,
            )
            for piece in pieces:
                for index, term, view in read_piece(piece, group):
                    writer.add(index, term, view)
            return writer.finish(last.order)

        def done(made: list[Segment] | None, error: BaseException | None) -> None:
            log.compacting = False
            if isinstance(error, StorageFault):
                log.mark_damaged(error)
            elif made is not None and not log.removed and log.version == version:
                self._replace(log, old, made)
            answer(error)

        self.worker.submit(work, done)

    def _replace(self, log: GroupLog, old: list[Segment], made: list[Segment]) -> None:
        """The segment file that was `old[-1]`'s has what is alive of all of them."""
        still = [segment for segment in old if segment in log.segments]
        for segment in old:
            self._forget_segment(segment)
        if not still:
            return  # all truncated meanwhile: the log knows the names as stale
        at = log.segments.index(still[0])
        log.segments[at : at + len(still)] = made
        if made[-1].last > still[-1].last:
            log.truncated_meanwhile(still[-1].last + 1)
        self.remove_files(group_path(log.group), [s.name for s in old if s is not old[-1]])


def _piece_of(
    file: WalFile,
    first: int,
    places: array[int],
    sizes: array[int],
    wanted: Iterable[tuple[int, int]],
) -> Piece:
    """Returns the wanted index ranges of entries that lie in a WAL file, `first` at places[0]."""
    piece = Piece(file.file, array("Q"), array("I"), array("I"))
    start = file.generation << PLACE_FILE_SHIFT
    for a, b in wanted:
        piece.indexes.extend(range(a, b + 1))
        piece.offsets.extend([place - start for place in places[a - first : b - first + 1]])
        piece.sizes.extend(sizes[a - first : b - first + 1])
    return piece
