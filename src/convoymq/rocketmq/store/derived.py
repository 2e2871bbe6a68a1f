"""Derived files on their way to the disk: consume queues, index, checkpoint.

    entries and rows in memory ─▶ files (each second) ─▶ durable ─▶ checkpoint (each ten seconds)

A checkpoint says that everything before a physical offset is durable: in the log as well, so it
waits for the log's flush. Writes go on beside the loop, one at a time.
"""

from __future__ import annotations

from dataclasses import replace

from convoymq.rocketmq.store.checkpoint import Checkpoint, Progress, save
from convoymq.rocketmq.store.commit_log import CommitLog
from convoymq.rocketmq.store.consume_queues import ConsumeQueues
from convoymq.rocketmq.store.index import Header, Index
from convoymq.rocketmq.store.jobs import Jobs
from convoymq.storage.types import Directory

CHECKPOINT_MS = 10_000
SYNC_FILES_MAX = 16
"""Files made durable one by one; more of them together with the whole file system."""


class Derived:
    """See the module text.

    Args:
        interval_ms: between two writes.
        unsynced: files of queues and index that are written and not durable.

    Invariants:
        checkpoint.progress.physical <= log.flushed.
    """

    def __init__(
        self,
        directory: Directory,
        log: CommitLog,
        queues: ConsumeQueues,
        index: Index,
        jobs: Jobs,
        *,
        interval_ms: int,
        unsynced: set[str],
    ) -> None:
        self._directory = directory
        self._log = log
        self._queues = queues
        self._index = index
        self._jobs = jobs
        self._interval_ms = interval_ms
        self._unsynced = unsynced
        self.checkpoint = Checkpoint()
        self.dispatched = 0
        """Physical offset behind the last message that queues and index have, in memory at least.
        """
        self.stored_ms = 0
        """Of that message."""
        self.failure: BaseException | None = None
        """Of the last write, if it failed."""
        self._is_busy = False
        self._written_ms = 0
        self._synced_ms = 0
        self._next: Checkpoint | None = None
        """Waits for the log's flush."""

    @property
    def is_full(self) -> bool:
        """Returns whether too much waits to be written."""
        return self._queues.is_full or self._index.is_full

    def tick(self, now_ms: int) -> None:
        """Writes what has waited for long enough, or has become much."""
        if self._is_busy:
            return
        if self._next is not None:
            self._save(self._next)
            return
        is_due = self._queues.is_due or self._index.is_due
        if not is_due and 0 <= now_ms - self._written_ms < self._interval_ms:
            return
        self._written_ms = now_ms
        progress = self.checkpoint.progress
        is_synced = not 0 <= now_ms - self._synced_ms < CHECKPOINT_MS and (
            progress is None or progress.physical != self.dispatched
        )
        if is_synced:
            self._synced_ms = now_ms
        self._write(is_synced=is_synced)

    def _write(self, *, is_synced: bool) -> None:
        plan, rows = self._queues.plan(), self._index.take()
        if not plan and not rows and not is_synced:
            return
        names = self._unsynced.union(name for _, name, _, _ in plan)
        dispatched, stored_ms = self.dispatched, self.stored_ms

        def work() -> list[Header]:
            self._queues.write(plan)
            headers = self._index.write(rows) if rows else []
            if is_synced:
                names.update(header.path for header in headers)
                self._sync(names)
            return headers

        def done(headers: list[Header] | None, error: BaseException | None) -> None:
            self._is_busy = False
            self.failure = error
            self._index.entered(headers)
            if headers is None:
                return
            self._queues.wrote(plan)
            if is_synced:
                self._unsynced.difference_update(names)
                self._next = self._made(dispatched, stored_ms)

        self._is_busy = True
        self._jobs.submit(work, done)

    def _sync(self, names: set[str]) -> None:
        """Makes files durable. Raises OSError."""
        if len(names) > SYNC_FILES_MAX:
            self._directory.sync_all()
            return
        for name in sorted(names):
            if self._directory.exists(name):
                file = self._directory.open(name)
                file.sync()
                file.close()

    def _made(self, dispatched: int, stored_ms: int) -> Checkpoint:
        return replace(
            self.checkpoint, log_ms=stored_ms, queues_ms=stored_ms, index_ms=self._index.last_ms,
            progress=Progress(dispatched, *self._index.place),
        )  # fmt: skip

    def _save(self, checkpoint: Checkpoint) -> None:
        if not self._is_flushed(checkpoint):
            return

        def done(_none: object, error: BaseException | None) -> None:
            self._is_busy = False
            self.failure = error
            if error is None:
                self.checkpoint, self._next = checkpoint, None

        self._is_busy = True
        self._jobs.submit(lambda: save(self._directory, checkpoint), done)

    def _is_flushed(self, checkpoint: Checkpoint) -> bool:
        progress = checkpoint.progress
        return progress is not None and progress.physical <= self._log.flushed

    def save_now(self) -> None:
        """Writes everything, makes it durable and says so, at once: the log is. Raises OSError."""
        self._queues.write_now()
        self._index.write_now()
        self._sync(self._unsynced)
        self._unsynced.clear()
        assert self._log.flushed >= self.dispatched
        self.checkpoint, self._next = self._made(self.dispatched, self.stored_ms), None
        save(self._directory, self.checkpoint)

    def lower(self, physical: int) -> None:
        """Takes back what checkpoints said of messages from an offset on, which the index has not
        any more. Raises OSError."""
        progress = self.checkpoint.progress
        if self._next is not None and self._is_flushed(self._next):
            # It may be in the file already.
            progress = self._next.progress
        self._next = None
        if progress is not None and progress.physical > physical:
            place = min((progress.index_file, progress.index_units), self._index.place)
            self.checkpoint = replace(self.checkpoint, progress=Progress(physical, *place))
            save(self._directory, self.checkpoint)
        self.dispatched = min(self.dispatched, physical)
