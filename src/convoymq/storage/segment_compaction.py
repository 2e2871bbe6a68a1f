"""Compaction of segments: what is dead of a group's segment files leaves the disk.

Dead files are removed, files that are mostly dead are rewritten, small ones joined; a group whose
dead entries only wait for it is snapshotted. Sections in packs are dropped here, their packs go
their own way (`packs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.logformat.pack import Section
from convoymq.logformat.segment import Segment
from convoymq.storage.live_parts import alive_ranges, dead_size, size_of
from convoymq.storage.segments import SegmentWriter, piece_of, read_piece
from convoymq.storage.types import GroupPlan, StorageFault

if TYPE_CHECKING:
    from convoymq.storage.log import GroupLog
    from convoymq.storage.store import Storage

RECLAIM_ENTRIES = 1 << 16
"""So many entries of segments are looked at in one turn, or those of one group."""


def _ignore(*_: object) -> None:
    """An answer that nobody needs."""


class SegmentCompaction:
    """Frees what is dead in the segments of a node's logs."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self._reclaim_at = 0
        self._reclaiming = False

    def reclaim_next(self) -> None:
        """Looks at groups that have segments, until one has something to give: a drained queue
        gives its disk space back."""
        if self._store.owner is None or self._reclaiming:
            return
        groups = list(self._store.logs)
        left = RECLAIM_ENTRIES
        for _ in range(min(len(groups), 256)):
            self._reclaim_at += 1
            log = self._store.logs[groups[self._reclaim_at % len(groups)]]
            if log.segments and log.damaged is None and log.receiver is None:
                left -= sum([len(segment.sizes) for segment in log.segments])
                if self._reclaim(log) or left <= 0:
                    return

    def _reclaim(self, log: GroupLog) -> bool:
        """Frees what is dead in a group's segments, when that is at least half; whether it is."""
        owner = self._store.owner
        plan = owner.plan(log.group) if owner is not None else None
        if plan is None:
            return False
        size = sum([segment.size for segment in log.segments])
        if dead_size(log.segments, plan) * 2 < size:
            return False
        snapshot_due = plan.applied > log.snapshot_index and plan.applied <= log.written_index
        if snapshot_due and size < self._store.config.pack_below_bytes:
            return False  # the snapshot would be a file of its own
        if not snapshot_due or plan.take_snapshot is None:
            log.raise_first(max(log.first_index, min(log.snapshot_index + 1, plan.keep_from)))
            self.compact(log, plan)
            return True
        self._reclaiming = True
        version = log.version

        def saved(error: BaseException | None) -> None:
            self._reclaiming = False
            if error is None and log.version == version and not log.removed:
                log.raise_first(max(log.first_index, min(log.snapshot_index + 1, plan.keep_from)))
                self.compact(log, plan)

        log.save_snapshot(plan.take_snapshot(), saved)
        return True

    def compact(self, log: GroupLog, plan: GroupPlan) -> None:
        """Removes dead segments, rewrites those that are mostly dead, joins small ones.

        Leaves a log alone while truncated entries in its segments may come back after a crash: the
        WAL then says that the log ends with them.
        """
        if log.compacting or log.stale_index > log.written_index:
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
            if isinstance(segment, Section):
                # Its pack goes as a whole; what is joined lies between two of them.
                runs.append([])
                entries = size = 0
                continue
            alive_size = size_of(segment, ranges)
            sparse = alive_size * 2 < segment.size
            small = (
                count * 4 < self._store.config.segment_max_entries
                and alive_size * 4 < self._store.config.segment_max_size_bytes
            )
            fits = (
                entries + count <= self._store.config.segment_max_entries
                and size + alive_size <= self._store.config.segment_max_size_bytes
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
            self._store.forget_files(dead)
            self._store.drop_segments(log.group, dead)
        for run in runs:
            worth = len(run) >= 4 or any(
                size_of(segment, ranges) * 2 < segment.size for segment, ranges in run
            )
            if run and worth:
                self.rewrite(log, run)
                return

    def rewrite(
        self,
        log: GroupLog,
        run: list[tuple[Segment, list[tuple[int, int]]]],
        answer: Callable[[BaseException | None], None] = _ignore,
    ) -> None:
        """Has the worker replace some neighbouring segments by one with what is alive in them."""
        pieces = []
        try:
            for segment, ranges in run:
                pieces.append(piece_of(self._store.segment_file(segment), segment, ranges))
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
        store, group = self._store, log.group
        config, directory, pace = store.config, store.directory, store.pace
        cluster = store.clusters.current

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

        self._store.worker.submit(work, done)

    def _replace(self, log: GroupLog, old: list[Segment], made: list[Segment]) -> None:
        """The segment file that was `old[-1]`'s has what is alive of all of them."""
        still = [segment for segment in old if segment in log.segments]
        self._store.forget_files(old)
        if not still:
            return  # all truncated meanwhile: the log knows the names as stale
        at = log.segments.index(still[0])
        log.segments[at : at + len(still)] = made
        if made[-1].last > still[-1].last:
            log.truncated_meanwhile(still[-1].last + 1)
        self._store.drop_segments(log.group, [s for s in old if s is not old[-1]])
