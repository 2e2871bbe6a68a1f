"""Replacing a group's log by a snapshot that a leader sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.entries import Entry
from convoymq.logformat.entry import KIND_VOTE
from convoymq.logformat.segment import ERA_SHIFT, Segment
from convoymq.model.errors import Misuse, Refused
from convoymq.storage.segments import SegmentWriter
from convoymq.storage.snapshots import write_snapshot
from convoymq.storage.types import Done, Snapshot

if TYPE_CHECKING:
    from convoymq.storage.log import GroupLog


class SnapshotReceiver:
    """Takes a leader's snapshot: first the live entries it leaves behind, then the state.

    Nothing of the former log is touched before `finish` is durable.
    """

    def __init__(self, log: GroupLog, index: int, term: int) -> None:
        self.log = log
        self.index = index
        self.term = term
        self.backlog_bytes = 0
        """Bytes taken and not yet written."""
        self._last = 0
        store = log.store
        config = store.config
        self._era = log.new_era()
        self._writer = SegmentWriter(
            store.directory,
            log.group,
            self._era << ERA_SHIFT,
            config.segment_max_entries,
            config.segment_max_size_bytes,
            cluster=store.clusters.current,
        )
        self._failure: BaseException | None = None
        self._aborted = False
        self.finishing = False

    def add_entries(self, entries: list[Entry]) -> None:
        """Takes live entries, ascending, up to the snapshot's index. Raises Misuse."""
        size = 0
        for entry in entries:
            if not self._last < entry.index <= self.index or entry.group != self.log.group:
                raise Misuse(f"entry {entry.index} does not belong to this snapshot")
            self._last = entry.index
            size += entry.size
        self.backlog_bytes += size
        writer = self._writer

        def work() -> None:
            if not self._aborted and self._failure is None:
                for entry in entries:
                    writer.add(entry.index, entry.term, entry.data)

        def done(_: object, error: BaseException | None) -> None:
            self.backlog_bytes -= size
            self._failure = self._failure or error

        self.log.store.worker.submit(work, done)

    def finish(self, membership: bytes, state: bytes, done: Done) -> None:
        """Makes the snapshot the log: done(None) when that is durable, done(error) when it failed
        and the former log stands."""
        log, store = self.log, self.log.store
        snapshot = Snapshot(index=self.index, term=self.term, membership=membership, state=state)
        era = self._era
        writer = self._writer
        version = log.version
        self.finishing = True
        # From here on a snapshot of the former log would replace this one.
        log.claim_snapshot(self.index)

        def work() -> list[Segment]:
            if self._failure is not None:
                raise self._failure
            segments = writer.finish(era << ERA_SHIFT)
            write_snapshot(store.directory, log.group, snapshot, era, store.clusters.current)
            return segments

        def leave() -> None:
            if log.receiver is self:
                log.receiver = None

        def durable() -> None:
            # Until now the machine may still be the former one: nobody was to plan with it.
            leave()
            done(None)

        def written(segments: list[Segment] | None, error: BaseException | None) -> None:
            if error is not None or segments is None or log.removed or log.version != version:
                leave()
                if log.version == version:
                    log.claim_snapshot(log.snapshot_index)
                done(error or Refused("the log was replaced meanwhile"))
                return
            old = [*log.segments, *log.stale_segments]
            log.replaced(snapshot, segments)
            log.begin_era(era)
            log.next_order += len(segments)
            wal = store.wal
            wal.seal()
            log.void(snapshot.index, snapshot.term)
            wal.tell(durable)
            wal.kick()
            store.drop_segments(log.group, old)

        if log.known:
            store.worker.submit(work, written)
            return
        # Files of a group that the WAL does not know would be taken for remains of a lost WAL.
        store.wal.add_control(KIND_VOTE, log.group, log.voted_for, log.term)
        store.wal.tell(lambda: store.worker.submit(work, written))
        store.wal.kick()

    def abort(self) -> None:
        """Gives up; the former log stands. Too late once `finish` was called."""
        if self.finishing:
            return
        self._aborted = True
        if self.log.receiver is self:
            self.log.receiver = None
