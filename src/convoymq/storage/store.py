"""A node's storage: the common WAL, the logs of all groups, and what happens in the background.

*WAL compaction* empties full WAL files, oldest first, one group at a time: it asks its owner what
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
from convoymq.logformat.pack import Pack, Section, drop_sections
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
from convoymq.model.config import RaftConfig
from convoymq.storage.live_parts import (
    alive_ranges,
    below,
    clip,
    dead_since_snapshot,
)
from convoymq.storage.log import GroupLog
from convoymq.storage.manifest import Manifest
from convoymq.storage.packs import PACK_SECTIONS, Made, Packs, Part, joinable
from convoymq.storage.recovery import recover
from convoymq.storage.segment_compaction import SegmentCompaction
from convoymq.storage.segments import Piece, copy_to_segments, piece_of
from convoymq.storage.snapshots import remove_former
from convoymq.storage.types import (
    Damage,
    Directory,
    File,
    Flusher,
    GroupPlan,
    LogOwner,
    NoPace,
    Pace,
    RecoveryReport,
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
NEVER = 1 << 62
"""Generation of a WAL file that is never released."""


def _ignore(*_: object) -> None:
    """An answer that nobody needs."""


class _Copy:
    """Copy of the entries of a group that are alive in a WAL file, on its way to segments."""

    __slots__ = ("error", "file", "joined", "keep", "log", "made", "part", "plan", "version")

    def __init__(
        self, log: GroupLog, file: WalFile, plan: GroupPlan | None, keep: int, version: int
    ) -> None:
        self.log = log
        self.file = file
        self.plan = plan
        self.keep = keep
        self.version = version
        self.part: Part | None = None
        """The part of a pack that it becomes."""
        self.joined: Sequence[Section] = ()
        """Sections that go along, from other packs."""
        self.made: list[Segment] = []
        self.error: BaseException | None = None


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
        config: RaftConfig | None = None,
    ) -> None:
        self.directory = directory
        self.worker = worker
        self.config = config or RaftConfig()
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
        self.wal.on_client_failed = self._client_failed
        self.owner: LogOwner | None = None
        """While there is none no WAL file is emptied, and all bodies may be needed."""
        self.give_back: Callable[[], None] = _ignore
        """Called by `tick` when much memory was freed: the shell hands it to the system."""
        self.pace: Pace = NoPace()
        """Pace at which entries are copied from the WAL to segments, and from segments to
        others."""
        self._known: set[int] = set()
        """Removed groups that the WAL on disk knows."""
        self._line: deque[GroupLog] = deque()
        self._caches: OrderedDict[int, GroupLog] = OrderedDict()
        self._open_files: OrderedDict[str, Segment | Pack] = OrderedDict()
        self.segment_compaction = SegmentCompaction(self)
        self.packs = Packs(self)
        self.may_pack: Callable[[], bool] = lambda: True
        """Asked before packs are written: whether no release that does not know them opens them."""
        self._compacting_file: WalFile | None = None
        self._compacting_logs: list[GroupLog] = []
        self._to_pack, self._packed = list[_Copy](), deque[_Copy]()
        self._in_step = False
        self._step_again = False
        self._stalled = False
        self._refused: list[Callable[[], None]] = []
        self._memory_peak = 0
        self._forget_above = FORGET_BYTES
        self._ticks = 0
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
            if self._compacting_file is None:
                self.segment_compaction.reclaim_next()
                self.packs.tidy()
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
        if self.owner is not None:
            self.owner.on_queued()

    def _client_failed(self, group: int, error: Exception) -> None:
        if self.owner is None:
            raise error
        self.owner.on_log_failed(group, error)

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
            log.forget(self.owner.needed_from(log.group) - 1 if self.owner is not None else -1)
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
        """Returns the open file that the segment is in. Raises OSError."""
        holder = segment.pack if isinstance(segment, Section) else segment
        if holder.file is None:
            holder.file = self.directory.open(holder.name)
            self._open_files[holder.name] = holder
            if len(self._open_files) > SEGMENT_FILES_OPEN_MAX:
                # The worker may still read it: the last reference closes it.
                _, oldest = self._open_files.popitem(last=False)
                oldest.file = None
        file: File = holder.file
        return file

    def forget_files(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if not isinstance(segment, Section):
                self.forget_file(segment)

    def forget_file(self, holder: Segment | Pack) -> None:
        """The file is going to be removed or replaced."""
        self._open_files.pop(holder.name, None)
        holder.file = None

    def drop_segments(self, group: int, segments: Sequence[Segment]) -> None:
        """Nobody needs the group's segments any more: has the worker remove those that are files of
        their own, and make that durable."""
        drop_sections(segments)
        path = group_path(group)
        doomed = [segment.name for segment in segments if not isinstance(segment, Section)]
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
        if self.owner is not None:
            self.owner.on_damaged(damage)

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
        if self._compacting_file is not None or self.owner is None or self._stalled:
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
        if self._packed:
            self._copied(self._packed.popleft())
            return
        while self._compacting_logs and len(self._to_pack) < PACK_SECTIONS:
            log = self._compacting_logs.pop()
            wanted = self._count_in(log, file) or _is_purgeable(log)
            if wanted and not log.removed and log.damaged is None:
                self._plan_compaction(log, file)
                return
        if self._to_pack:
            self._pack()
            return
        if self.wal.written_sequence < self.wal.barrier:
            self._stall()
            return
        purging = self.packs.purging()
        if purging:
            if not self.packs.purge(purging, self._purged):
                self._stall()
            return
        self._compacting_file = None
        self.compacted_files += 1
        self.wal.release(file)
        gone = [g for g, (_, held) in self.left.items() if held <= file.generation]
        packed = self.packs.groups() if gone else set()
        for group in gone:
            # The worker removes the file before it writes anything for a new log of the group.
            if group not in packed:
                del self.left[group]
        next_file = self.wal.oldest_full()
        if next_file is not None:
            self._compacting_file = next_file
            self._compacting_logs = self._logs_in(next_file)
            self._step_again = True

    def _stall(self) -> None:
        """Not possible now: the file stays as it is, `tick` tries again."""
        for copy in self._packed:
            drop_sections(copy.made)
        self._packed.clear()
        self._to_pack = []
        self._stalled = True
        self._compacting_file = None

    def _logs_in(self, file: WalFile) -> list[GroupLog]:
        """Returns the logs of the groups with entries in the file; removed groups need nothing of
        it."""
        return [self.logs[group] for group in file.groups if group in self.logs]

    def _count_in(self, log: GroupLog, file: WalFile) -> int:
        """Returns the number of the log's first entries that lie in that file, the oldest one."""
        return bisect_left(log.places, (file.generation + 1) << PLACE_FILE_SHIFT)

    def _plan_compaction(self, log: GroupLog, file: WalFile) -> None:
        owner = self.owner if log.receiver is None else None
        plan = owner.plan(log.group) if owner is not None else None
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
        copy = _Copy(log, file, plan, keep, log.version)
        if not wanted or not count:
            self._copied(copy)
            return
        # Only memory is copied here; what takes time per entry is the worker's.
        places, sizes = log.places[:count], log.sizes[:count]
        alive = sum([sum(sizes[a - first : b - first + 1]) for a, b in wanted]) << 3
        if alive < self.config.pack_below_bytes and self.may_pack():
            self._gather(copy, _piece_of(file, first, places, sizes, wanted))
            return
        order = log.next_order
        log.next_order += 2 + count // self.config.segment_max_entries
        # Two neighbours of what was closed for its size are together larger than the limit.
        log.next_order += 2 * (sum(sizes) << 3) // self.config.segment_max_size_bytes
        config, directory, group, pace = self.config, self.directory, log.group, self.pace
        cluster = self.clusters.current

        def done(made: list[Segment] | None, error: BaseException | None) -> None:
            copy.made, copy.error = made or [], error
            self._copied(copy)

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
            done,
        )

    def _gather(self, copy: _Copy, piece: Piece) -> None:
        """The group goes to the next pack, with what little it has at the end of others."""
        log, plan = copy.log, copy.plan
        order = since = log.next_order
        log.next_order += 1
        pieces = [piece]
        joined = joinable(log, plan, self.config.pack_below_bytes)
        if plan is not None and joined:
            try:
                pieces = [
                    piece_of(self.segment_file(s), s, alive_ranges(s, plan.live_ranges, copy.keep))
                    for s in joined
                ]
                pieces.append(piece)
                copy.joined = joined
                since = joined[0].since
            except OSError:
                pieces = [piece]
        copy.part = Part(log.group, order, since, pieces)
        self._to_pack.append(copy)
        self._compact_next()

    def _pack(self) -> None:
        """Has the worker write a pack of what was gathered."""
        copies, self._to_pack = self._to_pack, []

        def done(made: Made | None, error: BaseException | None) -> None:
            if made is None:
                self._stall()
                return
            for copy, section, fault in zip(copies, made.sections, made.faults, strict=True):
                copy.error = fault
                if section is not None:
                    section.pack.add(section)
                    copy.made = [section]
            self._packed.extend(copies)
            self._compact_next()

        self.packs.submit([copy.part for copy in copies if copy.part is not None], done)

    def _purged(self, error: BaseException | None) -> None:
        """Packs with truncated entries are gone, or the disk has refused."""
        if error is None:
            self._compact_next()
        else:
            self._stall()

    def _copied(self, copy: _Copy) -> None:
        """Takes what is alive of a group in the file over from the worker."""
        log, error = copy.log, copy.error
        if isinstance(error, StorageFault):
            log.mark_damaged(error)
        elif error is not None:
            self._stall()  # no space, most likely
            return
        elif log.removed or log.version != copy.version:
            self.drop_segments(log.group, copy.made)
        else:
            log.moved(self._count_in(log, copy.file), copy.made, copy.keep, copy.joined)
            drop_sections(copy.joined)
            if _is_purgeable(log):
                # What replaced truncated entries may go with this file: they must not come back.
                self._purge_stale(log)
                return
            if copy.plan is not None:
                self.segment_compaction.compact(log, copy.plan)
        self._compact_next()

    def _purge_stale(self, log: GroupLog) -> None:
        """Rids the disk of truncated entries, then goes on with the compaction."""
        if log.compacting:
            self._stall()  # both would write a file of the same name
            return
        cut = [segment for segment in log.segments if segment.stale]
        stale, log.stale_segments = log.stale_segments, []
        for segment in (*stale, *cut):
            if isinstance(segment, Section):
                segment.purge = segment.pack.purge = True
        self.drop_segments(log.group, stale)
        log.stale_index = 0
        version = log.version
        files = [segment for segment in cut if not isinstance(segment, Section)]

        def rewritten(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, StorageFault) and log.version == version:
                log.stale_index = log.written_index
                self._stall()
                return
            if len(files) > 1 and log.version == version:
                self._purge_stale(log)
                return
            self._compact_next()

        if files and log.damaged is None:
            self.segment_compaction.rewrite(
                log, [(files[0], [(files[0].first, files[0].last)])], rewritten
            )
        else:
            rewritten(None)


def _is_purgeable(log: GroupLog) -> bool:
    """Returns whether segments have entries of which it is durable that they were truncated."""
    return 0 < log.stale_index <= log.written_index


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
