"""Writes and flushes the files of all classic queues of a node, in one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from convoymq.model.rounds import run_each
from convoymq.storage.types import File

Buffers = list[bytes | memoryview]
Done = Callable[[Exception | None], None]


class Writer(Protocol):
    """Writer of a log. Jobs are carried out in their order."""

    def write(self, file: File, offset: int, buffers: Buffers, sync: bool, done: Done) -> None:
        """Queues a write; `done` comes after it, and after it is durable when `sync`."""

    def retire(self, file: File) -> None:
        """Closes a file once everything queued for it is written."""


class Kind(Enum):
    """Kind of a job."""

    WRITE = 1
    CLOSE = 2
    BARRIER = 3


class Job(NamedTuple):
    """One thing to do."""

    kind: Kind
    file: File | None
    offset: int
    buffers: Sequence[bytes | memoryview]
    sync: bool
    done: Done

    def size(self) -> int:
        """Returns the number of bytes to write."""
        return sum(len(buffer) for buffer in self.buffers)


class LogWriter:
    """See `Writer`; flushes of one file merge.

    `notify` is called from the thread with the callbacks of finished jobs; it must hand them to
    the loop.
    """

    def __init__(self, notify: Callable[[list[Callable[[], None]]], None]) -> None:
        self._notify = notify
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.backlog_bytes = 0
        """Bytes handed over and not yet written."""

    def write(self, file: File, offset: int, buffers: Buffers, sync: bool, done: Done) -> None:
        """See `Writer`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="classic-log", daemon=True)
            self._thread.start()
        job = Job(Kind.WRITE, file, offset, buffers, sync, done)
        with self._wake:
            self.backlog_bytes += job.size()
            self._jobs.append(job)
            self._wake.notify()

    def retire(self, file: File) -> None:
        """See `Writer`."""
        if self._thread is None:
            file.close()
            return
        self._submit(Job(Kind.CLOSE, file, 0, (), False, _nothing))

    @property
    def is_idle(self) -> bool:
        """Returns whether the thread was never needed."""
        return self._thread is None

    def barrier(self, done: Callable[[], None]) -> None:
        """Calls `done` in the writer thread when everything queued before is carried out."""
        self._submit(Job(Kind.BARRIER, None, 0, (), False, lambda error: done()))

    def close(self) -> None:
        """Finishes what is queued and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _submit(self, job: Job) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._stopping:
                    self._wake.wait()
                jobs = list(self._jobs)
                self._jobs.clear()
            if not jobs:
                return
            finished = carry_out(jobs)
            with self._wake:
                self.backlog_bytes -= sum(job.size() for job in jobs)
            if finished:
                self._notify(finished)
            for job in jobs:
                if job.kind is Kind.BARRIER:
                    job.done(None)


def carry_out(jobs: Iterable[Job]) -> list[Callable[[], None]]:
    """Writes, flushes each file once, closes; returns the callbacks of the writes. Those of one
    file share its fate: nothing is confirmed that may not be on disk. A file is begun when what was
    written before is durable."""
    failed: dict[File, Exception] = {}
    writes = [(job, job.file) for job in jobs if job.kind is Kind.WRITE and job.file is not None]
    unsynced: dict[File, None] = {}

    def write(one: tuple[Job, File]) -> None:
        job, file = one
        if job.sync:
            if not job.offset:
                _sync(unsynced, failed)
            unsynced[file] = None
        file.pwrite(job.buffers, job.offset)

    def refuse(one: tuple[Job, File], error: Exception) -> None:
        failed[one[1]] = error

    run_each(writes, write, refuse)
    _sync(unsynced, failed)
    closed = [job.file for job in jobs if job.kind is Kind.CLOSE and job.file is not None]
    # What was to be closed is of no use to anybody: an error of that changes nothing.
    run_each(closed, lambda file: file.close(), lambda _file, _error: None)
    return [partial(job.done, failed.get(file)) for job, file in writes]


def _sync(files: dict[File, None], failed: dict[File, Exception]) -> None:
    run_each(list(files), lambda file: file.sync(), failed.__setitem__)
    files.clear()


def _nothing(error: Exception | None) -> None:
    pass
