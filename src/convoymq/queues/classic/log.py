"""Where a classic queue keeps messages on disk: append-only files, one directory per queue.

Format (little-endian): a file starts with the 16 bytes `CVCQ` · u16 version 1 · 10 spare bytes.
Records follow, each a multiple of 8 bytes:

    0   u32  length of the record, header included
    4   u32  CRC32C of the bytes from 8 on
    8   u8   kind: 1 messages, 2 settled, 3 handed out
    9   7 spare bytes
    16  u64  kind 1: position of the first message · kind 3: positions below this were handed out
    24  u64  spare
    32  kind 1: one ENQUEUE command (docs/formats/entries-and-frames.md)
        kind 2: pairs of u64 positions (first, last)

Files go when no message in them, and in all older ones, is alive: a *settled* record is needed
as long as the messages it speaks of can be found in an older file. A long-lived message at the
front is moved to the end (`ClassicLog.move`), so it does not pin what follows.

Writing happens in the one thread of a `LogWriter`; positions in the file are assigned at once. A
torn tail of the newest file is cut at recovery; damage anywhere else raises StorageFault.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crc32c import crc32c

from convoymq.model.errors import StorageFault

MAGIC = b"CVCQ" + struct.pack("<H", 1) + bytes(10)
RECORD_HEADER = 32
MESSAGES = 1
SETTLED = 2
HANDED_OUT = 3
FILE_SIZE_MAX = 64 << 20
IOVECS_MAX = 512

_CLOSE = -1
_BARRIER = -2
_HEADER = struct.Struct("<IIB7xQQ")
_REST = struct.Struct("<B7xQQ")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the body of a record of kind 1 lies."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Found:
    """One record met by recovery; `body` is the ENQUEUE command or the packed pairs."""

    kind: int
    position: int
    place: Place
    body: bytes


class LogWriter:
    """One thread that writes and flushes for all classic queues of a node; flushes merge.

    `notify` is called from the thread with the callbacks of finished jobs; it must hand them to
    the loop.
    """

    def __init__(self, notify: Callable[[list[Callable[[], None]]], None]) -> None:
        self._notify = notify
        self._jobs: deque[
            tuple[int, int, list[bytes | memoryview], bool, Callable[[OSError | None], None]]
        ] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.backlog_bytes = 0
        """Bytes handed over and not yet written."""

    def write(
        self,
        descriptor: int,
        offset: int,
        buffers: list[bytes | memoryview],
        sync: bool,
        done: Callable[[OSError | None], None],
    ) -> None:
        """Queues a write; `done` comes after it, and after fdatasync when `sync`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="classic-log", daemon=True)
            self._thread.start()
        with self._wake:
            self.backlog_bytes += sum(len(buffer) for buffer in buffers)
            self._jobs.append((descriptor, offset, buffers, sync, done))
            self._wake.notify()

    def retire(self, descriptor: int) -> None:
        """Closes a descriptor once everything queued for it is written."""
        if self._thread is None:
            os.close(descriptor)
            return
        with self._wake:
            self._jobs.append((descriptor, _CLOSE, [], False, _nothing))
            self._wake.notify()

    @property
    def is_idle(self) -> bool:
        """Whether the thread was never needed."""
        return self._thread is None

    def barrier(self, done: Callable[[], None]) -> None:
        """Calls `done` in the writer thread when everything queued before is carried out."""
        with self._wake:
            self._jobs.append((-1, _BARRIER, [], False, lambda error: done()))
            self._wake.notify()

    def close(self) -> None:
        """Finishes what is queued and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._stopping:
                    self._wake.wait()
                jobs = list(self._jobs)
                self._jobs.clear()
            if not jobs:
                return
            self._carry_out(jobs)

    def _carry_out(
        self,
        jobs: list[tuple[int, int, list[bytes | memoryview], bool, Callable[..., None]]],
    ) -> None:
        failed: dict[int, OSError] = {}
        written = 0
        for descriptor, offset, buffers, _, _ in jobs:
            if offset < 0:
                continue
            try:
                _write_all(descriptor, offset, buffers)
            except OSError as error:
                failed[descriptor] = error
            written += sum(len(buffer) for buffer in buffers)
        for descriptor in {job[0] for job in jobs if job[3]}:
            try:
                os.fdatasync(descriptor)
            except OSError as error:
                failed[descriptor] = error
        for descriptor, offset, _, _, _ in jobs:
            if offset == _CLOSE:
                os.close(descriptor)
        with self._wake:
            self.backlog_bytes -= written
        # Callbacks of one descriptor share its fate: nothing is confirmed that may not be on disk.
        finished: list[Callable[[], None]] = [
            partial(done, failed.get(descriptor))
            for descriptor, offset, _, _, done in jobs
            if offset >= 0
        ]
        if finished:
            self._notify(finished)
        for _, offset, _, _, done in jobs:
            if offset == _BARRIER:
                done(None)


def _nothing(error: OSError | None) -> None:
    pass


def _write_all(descriptor: int, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
    for at in range(0, len(buffers), IOVECS_MAX):
        part = list(buffers[at : at + IOVECS_MAX])
        wanted = sum(len(buffer) for buffer in part)
        written = os.pwritev(descriptor, part, offset)
        if written < wanted:
            # A short write is rare (a full disk, a signal): finish it in one piece.
            rest = b"".join(part)[written:]
            while rest:
                more = os.pwrite(descriptor, rest, offset + written)
                written += more
                rest = rest[more:]
        offset += wanted


def _record(kind: int, position: int, body: memoryview | bytes) -> list[bytes | memoryview]:
    assert len(body) % 8 == 0
    rest = _REST.pack(kind, position, 0)
    checksum = crc32c(body, crc32c(rest))
    return [_HEADER.pack(RECORD_HEADER + len(body), checksum, kind, position, 0), body]


class ClassicLog:
    """The files of one queue."""

    def __init__(self, directory: Path, writer: LogWriter, *, sync: bool) -> None:
        """`sync`: writes are flushed (durable queues); else the files are mere room for bodies."""
        self.directory = directory
        self.sync = sync
        self._writer = writer
        self._descriptors: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._active = 0
        self._end = 0
        self._buffers: list[bytes | memoryview] = []
        self._buffered_from = 0
        self.failure: OSError | None = None
        """A write of an earlier file failed: what came with it is not safe."""

    # --- recovery ------------------------------------------------------------------------

    def recover(self) -> Iterator[Found]:
        """Yields all records, oldest first. Raises StorageFault on damage that is no torn tail."""
        if not self.directory.is_dir():
            return
        numbers = sorted(int(path.stem) for path in self.directory.glob("*.log"))
        for number in numbers:
            self._live[number] = 0
            yield from self._read_file(number, last=number == numbers[-1])
        if numbers:
            self._active = numbers[-1]
            self._descriptors[self._active] = os.open(self._path(self._active), os.O_RDWR)
            self._end = self._buffered_from = self._sizes[self._active]

    def _read_file(self, number: int, *, last: bool) -> Iterator[Found]:
        path = self._path(number)
        data = path.read_bytes()
        self._sizes[number] = len(data)
        at = len(MAGIC)
        if data[:at] != MAGIC:
            if last and len(data) < at:
                path.write_bytes(MAGIC)
                self._sizes[number] = at
                return
            raise StorageFault("classic queue log has no header", path=str(path), offset=0)
        while at < len(data):
            found = self._read_record(data, number, at)
            if found is None:
                if not last:
                    raise StorageFault("damaged classic queue log", path=str(path), offset=at)
                with path.open("r+b") as file:
                    file.truncate(at)
                self._sizes[number] = at
                return
            at += RECORD_HEADER + len(found.body)
            yield found

    @staticmethod
    def _read_record(data: bytes, number: int, at: int) -> Found | None:
        if len(data) - at < RECORD_HEADER:
            return None
        length, checksum, kind, position, _ = _HEADER.unpack_from(data, at)
        if length < RECORD_HEADER or length % 8 or length > len(data) - at:
            return None
        if crc32c(memoryview(data)[at + 8 : at + length]) != checksum:
            return None
        start = at + RECORD_HEADER
        place = Place(number, start, length - RECORD_HEADER)
        return Found(kind, position, place, data[start : at + length])

    # --- writing -------------------------------------------------------------------------

    def add_messages(self, position: int, command: memoryview | bytes) -> Place:
        """Appends an ENQUEUE command; it is written by the next `flush`."""
        self._roll_if_full()
        place = Place(self._active, self._end + RECORD_HEADER, len(command))
        self._add(_record(MESSAGES, position, command))
        self._live[self._active] += 1
        return place

    def add_settled(self, pairs: Sequence[int]) -> None:
        """Appends positions that are gone (first, last, first, last, …)."""
        if self._active:
            self._add(_record(SETTLED, 0, struct.pack(f"<{len(pairs)}Q", *pairs)))

    def add_handed_out(self, position: int) -> None:
        """Appends that positions below this were handed out."""
        if self._active:
            self._add(_record(HANDED_OUT, position, b""))

    def flush(self, done: Callable[[OSError | None], None]) -> bool:
        """Hands what was added to the writer; False when there was nothing."""
        if not self._buffers:
            return False
        buffers, self._buffers = self._buffers, []
        offset, self._buffered_from = self._buffered_from, self._end
        self._writer.write(self._descriptors[self._active], offset, buffers, self.sync, done)
        return True

    def _add(self, buffers: list[bytes | memoryview]) -> None:
        self._buffers += buffers
        self._end += sum(len(buffer) for buffer in buffers)
        self._sizes[self._active] = self._end

    def _roll_if_full(self) -> None:
        if self._active and self._end < FILE_SIZE_MAX:
            return
        if self._buffers:
            # What belongs to the old file is written first; the writer keeps the order.
            self.flush(self._note_failure)
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, mode=0o700)
        self._active += 1
        path = self._path(self._active)
        self._descriptors[self._active] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        if self.sync:
            _sync_directory(self.directory)
        self._live[self._active] = 0
        self._buffers = [MAGIC]
        self._buffered_from = 0
        self._end = self._sizes[self._active] = len(MAGIC)

    def _note_failure(self, error: OSError | None) -> None:
        self.failure = self.failure or error

    # --- room ----------------------------------------------------------------------------

    def keep(self, place: Place) -> None:
        """Recovery found this block alive."""
        self._live[place.file] += 1

    def drop(self, place: Place) -> None:
        """The block's messages are all gone."""
        self._live[place.file] -= 1
        assert self._live[place.file] >= 0

    def collect(self) -> None:
        """Removes the oldest files that hold nothing alive."""
        for number in sorted(self._live):
            if self._live[number] or number == self._active:
                return
            self._forget(number)

    def oldest_is_sparse(self) -> int | None:
        """Number of the oldest file when few blocks pin it while at least four files follow."""
        numbers = sorted(self._live)
        if len(numbers) > 4 and 0 < self._live[numbers[0]] <= 64:
            return numbers[0]
        return None

    def read(self, place: Place) -> bytes:
        """Returns the body of a record. Raises StorageFault when it is damaged."""
        descriptor = self._descriptors.get(place.file)
        if descriptor is None:
            descriptor = os.open(self._path(place.file), os.O_RDWR)
            self._descriptors[place.file] = descriptor
        data = os.pread(descriptor, place.length + RECORD_HEADER, place.offset - RECORD_HEADER)
        found = self._read_record(data, place.file, 0)
        if found is None or len(found.body) != place.length:
            raise StorageFault(
                "damaged classic queue log",
                path=str(self._path(place.file)),
                offset=place.offset - RECORD_HEADER,
            )
        return found.body

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes[number] for number in self._live)

    def close(self) -> None:
        """Closes the files; what was added and not flushed is lost."""
        for descriptor in self._descriptors.values():
            self._writer.retire(descriptor)
        self._descriptors.clear()

    def remove(self) -> None:
        """Deletes everything."""
        self.close()
        self._live.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _forget(self, number: int) -> None:
        descriptor = self._descriptors.pop(number, None)
        if descriptor is not None:
            self._writer.retire(descriptor)
        self._path(number).unlink(missing_ok=True)
        del self._live[number]
        self._sizes.pop(number, None)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
