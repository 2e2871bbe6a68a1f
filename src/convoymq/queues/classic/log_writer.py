# cython: annotation_typing=False
"""Writes and flushes the files of all classic queues of a node, one batch after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from convoymq.model.rounds import run_each
from convoymq.storage.types import File, Worker

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


@dataclass(slots=True)
class Piece:
    """A part of a file that one call writes."""

    file: File
    offset: int
    buffers: Buffers
    sync: bool
    end: int


class LogWriter:
    """See `Writer`. A `storage` worker carries batches out: what is handed over before the worker
    begins joins the batch, and flushes of one file merge.

    Args:
        worker: carries batches out.
        finished: called with the callbacks of a batch that was carried out.
    """

    def __init__(
        self, worker: Worker, finished: Callable[[list[Callable[[], None]]], None]
    ) -> None:
        self._worker = worker
        self._finished = finished
        self._jobs: list[Job] = []
        """The next batch: submitted when it is not empty, and not begun."""
        #: Between the worker's thread, which takes a batch, and the caller's.
        self._lock = threading.Lock()
        self._under_way = 0
        """Batches that were submitted and not answered."""
        self.backlog_bytes = 0
        """Bytes handed over and not yet written."""

    def write(self, file: File, offset: int, buffers: Buffers, sync: bool, done: Done) -> None:
        """See `Writer`."""
        job = Job(Kind.WRITE, file, offset, buffers, sync, done)
        self.backlog_bytes += job.size()
        self._add(job)

    def retire(self, file: File) -> None:
        """See `Writer`."""
        if self.is_idle:
            file.close()
        else:
            self._add(Job(Kind.CLOSE, file, 0, (), False, _nothing))

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is on its way to the files."""
        return not self._under_way

    def barrier(self, done: Callable[[], None]) -> None:
        """Calls `done` when everything handed over before is carried out."""
        self._add(Job(Kind.BARRIER, None, 0, (), False, lambda error: done()))

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Has the worker do something else behind what has begun; `done` gets its error."""

        def finished(_: None, error: BaseException | None) -> None:
            self._under_way -= 1
            done(error)

        self._under_way += 1
        self._worker.submit(work, finished)

    def close(self) -> None:
        """Finishes what was handed over. The last callbacks may never come."""
        self._worker.close()

    def _add(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            begins = len(self._jobs) == 1
        if begins:
            self._under_way += 1
            self._worker.submit(self._carry_out, self._on_carried_out)

    def _carry_out(self) -> tuple[int, list[Callable[[], None]]]:
        """Runs a batch, as the worker; returns its bytes and its callbacks."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
        return sum(job.size() for job in jobs), carry_out(jobs)

    def _on_carried_out(
        self, found: tuple[int, list[Callable[[], None]]] | None, error: BaseException | None
    ) -> None:
        if found is None:
            assert error is not None
            raise error
        self._under_way -= 1
        self.backlog_bytes -= found[0]
        self._finished(found[1])


def carry_out(jobs: Sequence[Job]) -> list[Callable[[], None]]:
    """Writes, flushes each file once, closes; returns the callbacks. Those of one
    file share its fate: nothing is confirmed that may not be on disk. A file is begun when what was
    written before is durable."""
    failed: dict[File, Exception] = {}
    writes = [(job, job.file) for job in jobs if job.kind is Kind.WRITE and job.file is not None]
    unsynced: dict[File, None] = {}

    def write(piece: Piece) -> None:
        if piece.sync:
            if not piece.offset:
                _sync(unsynced, failed)
            unsynced[piece.file] = None
        piece.file.pwrite(piece.buffers, piece.offset)

    def refuse(piece: Piece, error: Exception) -> None:
        failed[piece.file] = error

    run_each(joined(writes), write, refuse)
    _sync(unsynced, failed)
    closed = [job.file for job in jobs if job.kind is Kind.CLOSE and job.file is not None]
    # What was to be closed is of no use to anybody: an error of that changes nothing.
    run_each(closed, lambda file: file.close(), lambda _file, _error: None)
    reached = [(job, None) for job in jobs if job.kind is Kind.BARRIER]
    written = [(job, failed.get(file)) for job, file in writes]
    return [partial(job.done, error) for job, error in [*written, *reached]]


def joined(writes: Sequence[tuple[Job, File]]) -> list[Piece]:
    """Returns the writes, with those of a file that follow each other as one. None moves to before
    the first write of a file, which waits for what came earlier."""
    pieces: list[Piece] = []
    last: dict[File, Piece] = {}
    for job, file in writes:
        if job.sync and not job.offset:
            last.clear()
        piece = last.get(file)
        if piece is not None and piece.end == job.offset:
            piece.buffers += job.buffers
            piece.sync = piece.sync or job.sync
        else:
            piece = last[file] = Piece(file, job.offset, [*job.buffers], job.sync, job.offset)
            pieces.append(piece)
        piece.end += job.size()
    return pieces


def _sync(files: dict[File, None], failed: dict[File, Exception]) -> None:
    run_each(list(files), lambda file: file.sync(), failed.__setitem__)
    files.clear()


def _nothing(error: Exception | None) -> None:
    pass
