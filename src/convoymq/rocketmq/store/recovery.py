"""Recovery: finds where the log ends, and makes what follows from it agree with it.

| last run | read from | queues and index |
|---|---|---|
| ended in order, ours | where it ended | as they are |
| ended in order, RocketMQ's | the last three files | as they are |
| did not end, ours | the last checkpoint | cut there, made anew |
| did not end, RocketMQ's | a file that its checkpoint is newer than | cut there, made anew |

The first record that is not whole ends the log. If records follow that are, something was damaged,
and the report names the place.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.kernels import rocketmq_records as records
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.checkpoint import Checkpoint, Progress
from convoymq.rocketmq.store.commit_log import CommitLog
from convoymq.rocketmq.store.consume_queues import ALL, ConsumeQueues, is_topic
from convoymq.rocketmq.store.index import Index
from convoymq.rocketmq.store.types import Damage, Run, StoreReport, stored_ms_of
from convoymq.storage.types import Directory, File

SCAN_BYTES = 4 << 20
NORMAL_FILES = 3
HEAD_BYTES = 64 << 10
"""Enough for the first record of a file up to its time."""
_MAGICS = (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab")


@dataclass(slots=True)
class Recovery:
    """See the module text."""

    directory: Directory
    log: CommitLog
    queues: ConsumeQueues
    index: Index
    delays: list[int]
    check: int
    """Checksums that are compared (`StoreSettings.checked`)."""
    record_bytes_max: int
    """A longer one is damage, not a record."""
    checkpoint: Checkpoint
    report: StoreReport
    stored_ms: int = 0
    """Of the last message."""

    def run(self) -> None:
        """Recovers. Raises StorageFault for files that other settings made, OSError."""
        bases = self._contiguous()
        self.report.is_fresh = not bases
        begin = bases[0] if bases else 0
        end = bases[-1] + self.log.size if bases else 0
        self.log.begin_at(begin, end)
        start = self._start(bases)
        self.queues.open()
        self.index.open(self.checkpoint.progress, start, was_aborted=self.report.was_aborted)
        if self.report.was_aborted:
            self.queues.load_limit = start
            for place in self.queues.places():
                self.queues.find(*place)
            self.queues.load_limit = ALL
        whole = self._replay([base for base in bases if base + self.log.size > start], start)
        self.log.truncate(whole)
        self.log.begin_at(begin, whole)
        if not self.report.was_aborted:
            return
        self.queues.write_now()
        self.index.write_now()
        for directory in {id(each): each for each in (self.directory, self.log.directory)}.values():
            directory.sync_all()

    def _contiguous(self) -> list[int]:
        """Returns the files that follow each other up to the last, which have their size then."""
        bases = self.log.bases()
        size = self.log.size
        for base in bases:
            name = self.log.name_of(base)
            file = self.log.directory.open(name)
            length = file.size()
            if length > size or base % size:
                raise StorageFault(
                    f"{name} has {length} bytes, and mappedFileSizeCommitLog says {size}"
                )
            if length < size:
                # It was about to be made.
                file.truncate(size)
            file.close()
        for at in range(len(bases) - 1, 0, -1):
            if bases[at - 1] + size != bases[at]:
                self._damaged(
                    bases[at] - size, "a file is missing; those before it are passed over"
                )
                return bases[at:]
        return bases

    def _start(self, bases: list[int]) -> int:
        """Returns where to read from."""
        if not bases:
            return 0
        progress = self.checkpoint.progress
        if progress is not None and bases[0] <= progress.physical <= bases[-1] + self.log.size:
            return progress.physical
        self.checkpoint.progress = None
        if not self.report.was_aborted:
            return bases[-NORMAL_FILES:][0]
        for base in reversed(bases):
            head = self.log.read_some(base, HEAD_BYTES)
            if bytes(head[4:8]) in _MAGICS and stored_ms_of(head) <= self.checkpoint.safe_ms:
                return base
        return bases[0]

    def _replay(self, bases: list[int], start: int) -> int:
        """Dispatches what is whole from an offset on. Returns where that ends."""
        end = start
        for base in bases:
            file = self.log.directory.open(self.log.name_of(base))
            try:
                end = self._replay_file(file, base, max(start, base))
            finally:
                file.close()
            if end < base + self.log.size:
                break
        return end

    def _replay_file(self, file: File, base: int, start: int) -> int:
        size = self.log.size
        at, want = start - base, SCAN_BYTES
        while at < size:
            data = file.pread(min(want, size - at), at)
            why, read, length, count, stored, runs, keys = records.scan(
                data, 0, base + at, self.check, self.delays
            )
            self.report.records_checked += count
            if count:
                self.stored_ms = stored
            self._enter(runs, keys)
            at += read
            left = size - at
            if why == records.ENDED:
                want = SCAN_BYTES
            elif (
                why == records.CUT
                and length <= min(left, self.record_bytes_max)
                and len(data) - read < left
            ):
                want = max(length, SCAN_BYTES)
            elif why == records.BLANK and length == left:
                return base + size
            else:
                if why != records.ZEROS:
                    self._judge(file, base, at)
                return base + at
        return base + size

    def _enter(self, runs: list[tuple[str, int, int, int, bytes, int]], keys: bytes) -> None:
        for row in runs:
            run = Run(*row)
            if is_topic(run.topic) and run.queue_id >= 0:
                self.queues.append(run.topic, run.queue_id, run.queue_offset, run.entries)
        self.index.add(keys)
        if self.queues.is_due:
            self.queues.write_now()
        if self.index.is_due:
            self.index.write_now()

    def _judge(self, file: File, base: int, at: int) -> None:
        """Reports what is cut from `at` on if it is more than a write that was cut short."""
        start = at
        while start < self.log.size:
            data = file.pread(min(SCAN_BYTES, self.log.size - start), start)
            for magic in _MAGICS:
                found = data.find(magic)
                while found >= 0:
                    place = start + found - 4
                    if place > at and self._is_whole(file, base, place):
                        self._damaged(base + at, "it is no whole record, and others follow it")
                        return
                    found = data.find(magic, found + 1)
            # A magic may lie on the border.
            start += max(1, len(data) - 8) if start + len(data) < self.log.size else len(data)

    def _is_whole(self, file: File, base: int, place: int) -> bool:
        head = file.pread(36, place)
        length = int.from_bytes(head[:4], "big")
        return (
            head[28:] == (base + place).to_bytes(8, "big")
            and length <= min(self.log.size - place, self.record_bytes_max)
            and records.is_record(file.pread(length, place), base + place, self.check)
        )

    def _damaged(self, physical: int, reason: str) -> None:
        base = physical - physical % self.log.size
        self.report.damages.append(
            Damage(file=self.log.name_of(base), offset=physical - base, reason=reason)
        )

    def progress(self) -> Progress:
        """Returns what a checkpoint after the recovery says."""
        return Progress(self.log.end, *self.index.place)
