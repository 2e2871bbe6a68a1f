"""The simulated disk of a node: what storage stands on, with crashes, slowness and damage.

A crash keeps or loses each unsynced sector and each unsynced name on its own, so records are torn
and files vanish. It may come between any two file operations: the crash hook counts operations down
and stops the node inside whatever it was doing.

Bit rot hits what lies in segments, in snapshots, in WAL files that are full, and in the newest one
before its last flush: there a damaged record can be told from a torn one. In the last batches of
the WAL nobody could: a flipped bit there looks exactly like a write that was cut short by a power
failure, and cutting it is the right answer to that; so the simulator does not damage what only a
replica's own promise protects. And it damages one replica at a time: two damaged copies of three
are beyond what a majority can repair.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from convoymq.sim.clock import Process, Scheduler
from convoymq.storage.files import CAPACITY_MAX, MemoryDirectory
from convoymq.storage.types import File

Result = TypeVar("Result")


class PowerLost(BaseException):
    """The node crashed in the middle of a file operation: unwinds everything it was doing."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node}")
        self.node = node


@dataclass(slots=True, kw_only=True)
class DiskConfig:
    """Speed of one node's disk. Times in microseconds."""

    flush_min_us: int = 60
    flush_max_us: int = 600
    spike_chance: float = 0.0
    spike_max_us: int = 200_000
    work_max_us: int = 20_000
    """A job of the worker waits up to this long."""


class SimDisk(MemoryDirectory):
    """A directory in memory that outlives its node's runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = self._count
        self.owner = 0
        """The node."""
        self.operations_left = -1
        """The power goes at this many operations from now; -1 = not planned."""
        self.failing = False
        """Writes and syncs answer EIO."""
        self.refused = False
        """Something may have been refused in this life of the node, and its answer be under way."""
        self.off = False
        """The power is gone: a crash unwinds, nothing may be changed any more."""

    def _count(self, operation: str, path: str) -> None:
        if self.off:
            raise PowerLost(self.owner)
        if self.operations_left >= 0:
            self.operations_left -= 1
            if self.operations_left < 0:
                self.off = True
                raise PowerLost(self.owner)
        if self.failing and operation in ("pwrite", "sync", "create", "truncate"):
            self.refused = True
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def lose_power(self, keep: Callable[[], bool]) -> None:
        """Crashes, and is ready for the next start."""
        self.operations_left = -1
        self.off = False
        self.crash(keep)

    def fill(self, spare: int) -> None:
        """Leaves only `spare` bytes of room."""
        self.capacity = self.used_bytes() + spare
        self.refused = True

    def empty(self) -> None:
        """Makes room on the disk again."""
        self.capacity = CAPACITY_MAX

    def wipe(self) -> None:
        """Everything is gone: the node gets a new disk."""
        self.names.clear()
        self.durable_names.clear()

    def rot(self, path: str, offset: int, bit: int) -> None:
        """Flips one bit of a file, durably."""
        inode = self.names[path]
        assert inode is not None
        for data in (inode.content, inode.durable):
            if offset < len(data):
                data[offset] ^= 1 << bit

    def spoil(self, path: str, offset: int, length: int) -> None:
        """Fills a region of a file with zeros, durably."""
        inode = self.names[path]
        assert inode is not None
        for data in (inode.content, inode.durable):
            end = min(offset + length, len(data))
            if offset < end:
                data[offset:end] = bytes(end - offset)

    def lose(self, path: str) -> None:
        """A file is gone, durably."""
        self.names.pop(path, None)
        self.durable_names.pop(path, None)


class SimFlusher:
    """Writes at once, syncs and answers after the disk's time."""

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        config: DiskConfig,
        slow: list[int],
        wake: Callable[[], None],
    ) -> None:
        self.on_completed: Callable[[object, int], None] | None = None
        self._scheduler = scheduler
        self._process = process
        self._config = config
        self._slow = slow
        self._wake = wake
        """[extra microseconds of every flush]"""
        self._busy = False
        self.flushes = 0
        self.skips_sync = False
        """A planted bug: answers before anything is durable."""

    def submit(self, file: File, offset: int, buffers: Sequence[bytes], token: object) -> None:
        """Starts a flush."""
        assert not self._busy, "one flush at a time"
        self._busy = True
        code = 0
        try:
            file.pwrite(buffers, offset)
        except OSError as error:
            code = error.errno or errno.EIO
        config = self._config
        delay_us = self._scheduler.between(config.flush_min_us, config.flush_max_us) + self._slow[0]
        if self._scheduler.chance(config.spike_chance):
            delay_us += self._scheduler.skewed(0, config.spike_max_us)
        self._scheduler.after(delay_us, self._process, self._complete, file, token, code)

    def _complete(self, file: File, token: object, code: int) -> None:
        if not code and not self.skips_sync:
            try:
                file.sync()
            except OSError as error:
                code = error.errno or errno.EIO
        self._busy = False
        self.flushes += 1
        assert self.on_completed is not None
        self.on_completed(token, code)
        self._wake()


class SimWorker:
    """Carries out jobs one by one, each after a drawn time."""

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        config: DiskConfig,
        slow: list[int],
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._process = process
        self._config = config
        self._slow = slow
        self._wake = wake
        self._jobs: deque[tuple[Callable[[], object], Callable[..., None]]] = deque()
        self._busy = False

    def submit(
        self,
        work: Callable[[], Result],
        done: Callable[[Result | None, BaseException | None], None],
    ) -> None:
        """Queues a job."""
        self._jobs.append((work, done))
        self._next()

    def close(self) -> None:
        """Carries out what waits, at once; nobody is answered."""
        while self._jobs:
            work, _ = self._jobs.popleft()
            work()

    def _next(self) -> None:
        if self._busy or not self._jobs:
            return
        self._busy = True
        delay_us = self._scheduler.skewed(50, self._config.work_max_us) + self._slow[0]
        self._scheduler.after(delay_us, self._process, self._run)

    def _run(self) -> None:
        if not self._jobs:
            return
        work, done = self._jobs.popleft()
        result: object = None
        failure: BaseException | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        # The answer takes its own way back: the caller goes on meanwhile.
        delay_us = self._scheduler.skewed(10, 5000)
        self._scheduler.after(delay_us, self._process, self._answer, done, result, failure)

    def _answer(
        self,
        done: Callable[..., None],
        result: object,
        failure: BaseException | None,
    ) -> None:
        self._busy = False
        self._next()
        done(result, failure)
        self._wake()
