"""Reading a stream's messages from the node's own file, where client and node share a machine.

The node answers a FETCH that names its machine with a segment read descriptor
(`streamlog.read_descriptor`) when the messages lie in a segment file. Whether the client may open
it is the file system's to say. What is read is checked as the node checks it; whatever does not
fit ends it, and the node is asked for rows
as if there were no file (ADR 0014).
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time

from convoymq.client.results import FetchResult
from convoymq.messages.columns import ColumnWriter
from convoymq.model.errors import EntryGone, StorageFault
from convoymq.model.machine import machine_id
from convoymq.streamlog.read_descriptor import ReadDescriptor
from convoymq.streamlog.reader import ChunkReader, Run

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a file that could not be read, rows come from the node for so long."""
FRAME_BYTES_MAX = 1 << 20
"""Of one frame: no round trip has to be paid for, and what is copied next is still in the cache."""
AGE_MAX_S = 1.0
"""A descriptor is asked for anew after so long: retention and deletions are not heard of before."""


class LocalReads:
    """The open descriptor of one client, read from front to back. Threads wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._machine = machine_id()
        self._retry_at = 0.0
        self._open: _Open | None = None

    @property
    def machine(self) -> str:
        """For FETCH: which machine's files can be read here; empty = none."""
        return self._machine if time.monotonic() >= self._retry_at else ""

    def open(
        self,
        stream: str,
        group: int,
        offset: int,
        payload: bytes | memoryview,
        first: int,
        high: int,
    ) -> None:
        """Turns to a descriptor from `offset` on, if its file can be read here; see `FetchResult`
        for the rest."""
        with self._lock:
            self._open = None
            try:
                descriptor = ReadDescriptor.unpack(payload)
                if descriptor.first != offset:
                    raise ValueError(f"a descriptor from {descriptor.first} on, not from {offset}")
                if group not in (0, descriptor.group):
                    raise ValueError(f"a descriptor of group {descriptor.group}, not of {group}")
                self._open = _Open(stream, group, descriptor, first, high)
            except (OSError, ValueError, StorageFault) as error:
                self._give_up(error)

    def rows(
        self,
        stream: str,
        group: int,
        offset: int,
        end: int | None,
        max_rows: int,
        max_bytes: int,
        columns: int,
    ) -> FetchResult | None:
        """Returns the result that FETCH would give; None when the node has to be asked."""
        with self._lock:
            found = self._open
            if found is None or (found.stream, found.group, found.offset) != (
                stream,
                group,
                offset,
            ):
                return None
            max_bytes = min(max_bytes, FRAME_BYTES_MAX)
            stop = found.end if end is None else min(end, found.end)
            if offset >= stop or time.monotonic() >= found.until:
                self._open = None
                return None
            try:
                return found.rows(stop, ColumnWriter(columns, max_rows, max_bytes), max_bytes)
            except (OSError, ValueError, IndexError, StorageFault, EntryGone) as error:
                # The node, asked for the same rows, finds out what is wrong with them.
                self._give_up(error)
                return None

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            self._open = None

    def _give_up(self, error: Exception) -> None:
        self._open = None
        self._retry_at = time.monotonic() + RETRY_S
        log.info("rows come from the node, not from its file: %s", error)


class _File:
    """A file that is read, until nobody refers to it. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._fd = -1
        # What is no file must not make the reader wait.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def status(self) -> os.stat_result:
        """Returns the status of the open file."""
        return os.fstat(self._fd)

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes."""
        return os.pread(self._fd, length, offset)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _Open:
    """A descriptor whose file is open. Raises OSError and StorageFault: it is not that file."""

    def __init__(
        self, stream: str, group: int, descriptor: ReadDescriptor, first: int, high: int
    ) -> None:
        path, device, inode = descriptor.place
        # Looked at first: opening what is no file may wait, or do something.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (device, inode):
            raise StorageFault("another file has its name", path=path)
        if descriptor.segment.end > found.st_size:
            raise StorageFault("the file is shorter than the descriptor", path=path)
        file = _File(path)
        if not os.path.samestat(found, file.status()):
            raise StorageFault("another file was given its name", path=path)
        self.stream = stream
        self.group = group
        self.offset = descriptor.first
        self.end = descriptor.next
        self.until = time.monotonic() + AGE_MAX_S
        self._first = first
        self._high = high
        self._reader = ChunkReader(
            descriptor, lambda index, size: descriptor.read(file, index, size), descriptor.first
        )
        #: What the last frame had no room for.
        self._rest: Run | None = None

    def rows(self, stop: int, writer: ColumnWriter, max_bytes: int) -> FetchResult:
        """Returns the next ones, up to offset `stop`; at least one."""
        while not writer.full and self.offset < stop:
            run = self._rest
            if run is None:
                room = max(1, max_bytes - writer.bytes)
                run = self._rest = self._reader.next(stop - self.offset, room)
            assert run is not None
            wanted = min(run.messages, stop - self.offset)
            got = writer.append(run.block, run.command, run.first, wanted, run.offset, run.time_ms)
            self.offset += got
            left = run.messages - got
            self._rest = (
                run._replace(first=run.first + got, messages=left, offset=run.offset + got)
                if left
                else None
            )
        frame = writer.frame(self.offset)
        return FetchResult(frame=frame, first=self._first, high=self._high)
