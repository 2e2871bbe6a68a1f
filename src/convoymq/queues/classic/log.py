"""Log of a classic queue: append-only files, one directory per queue.

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
front is moved to the end (`LocalQueue._compact`), so it does not pin what follows.

Writing happens in the one thread of a `LogWriter`; positions in the file are assigned at once. A
file is begun on disk when those before it are durable: recovery cuts the torn tail of the newest
file that has a record, and of those after it; damage anywhere else raises StorageFault.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crc32c import crc32c

from convoymq.model.errors import StorageFault
from convoymq.queues.classic.log_writer import Buffers, Done, Writer
from convoymq.storage.types import Directory, File

MAGIC = b"CVCQ" + struct.pack("<H", 1) + bytes(10)
RECORD_HEADER = 32
MESSAGES = 1
SETTLED = 2
HANDED_OUT = 3
FILE_SIZE_MAX = 64 << 20

_HEADER = struct.Struct("<IIB7xQQ")
_REST = struct.Struct("<B7xQQ")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of the body of a record of kind 1."""

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


def _record(kind: int, position: int, body: memoryview | bytes) -> Buffers:
    assert len(body) % 8 == 0, "the body of a record is padded"
    rest = _REST.pack(kind, position, 0)
    checksum = crc32c(body, crc32c(rest))
    return [_HEADER.pack(RECORD_HEADER + len(body), checksum, kind, position, 0), body]


def _nothing(error: OSError | None) -> None:
    pass


class ClassicLog:
    """The files of one queue."""

    def __init__(self, directory: Directory, path: str, writer: Writer, *, sync: bool) -> None:
        """
        Args:
            path: of the queue's own directory in `directory`.
            sync: writes are flushed (durable queues); else the files are mere room for bodies.
        """
        self._directory = directory
        self._path = path
        self.sync = sync
        self._writer = writer
        self._files: dict[int, File] = {}
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._active = 0
        self._end = 0
        self._buffers: Buffers = []
        self._buffered_from = 0
        #: (file, offset) -> what could not be written there. What follows in the file is not safe
        #: before it is: recovery ends at the gap.
        self._gaps: dict[tuple[int, int], Buffers] = {}

    # --- recovery ------------------------------------------------------------------------

    def recover(self) -> Iterator[Found]:
        """Yields all records, oldest first. Raises StorageFault on damage that is no torn tail."""
        names = self._directory.list(self._path)
        numbers = sorted(int(name[:-4]) for name in names if name.endswith(".log"))
        files = {number: self._directory.open(self._name(number)) for number in numbers}
        durable = max((n for n, file in files.items() if self._has_record(file, n)), default=0)
        for number, file in files.items():
            self._live[number] = 0
            self._files[number] = file
            yield from self._read_file(file, number, may_be_torn=number >= durable)
            if number != numbers[-1]:
                del self._files[number]
                file.close()
        if numbers:
            self._active = numbers[-1]
            self._end = self._buffered_from = self._sizes[self._active]

    def _has_record(self, file: File, number: int) -> bool:
        """Returns whether the file begins with a whole record: then all files before it are
        durable."""
        head = file.pread(len(MAGIC) + RECORD_HEADER, 0)
        if head[: len(MAGIC)] != MAGIC or len(head) < len(MAGIC) + RECORD_HEADER:
            return False
        length = _HEADER.unpack_from(head, len(MAGIC))[0]
        data = file.pread(length, len(MAGIC)) if length >= RECORD_HEADER else b""
        return self._read_record(data, number, 0) is not None

    def _read_file(self, file: File, number: int, *, may_be_torn: bool) -> Iterator[Found]:
        data = file.pread(file.size(), 0)
        self._sizes[number] = len(data)
        at = len(MAGIC)
        if data[:at] != MAGIC:
            if may_be_torn and (len(data) < at or not any(data[:at])):
                # The first write to the file was cut short: nothing in it was confirmed.
                file.truncate(0)
                file.pwrite([MAGIC], 0)
                self._sizes[number] = at
                return
            raise StorageFault("classic queue log has no header", path=file.name, offset=0)
        while at < len(data):
            found = self._read_record(data, number, at)
            if found is None:
                if not may_be_torn:
                    raise StorageFault("damaged classic queue log", path=file.name, offset=at)
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

    def flush(self, done: Done) -> bool:
        """Hands what was added to the writer; False when there was nothing. `done` hears an error
        too when something before could not be written."""
        if not self._buffers:
            return False
        for (number, offset), buffers in self._gaps.items():
            self._write(number, offset, buffers, _nothing)
        buffers, self._buffers = self._buffers, []
        offset, self._buffered_from = self._buffered_from, self._end
        self._write(self._active, offset, buffers, done)
        return True

    def _write(self, number: int, offset: int, buffers: Buffers, done: Done) -> None:
        def written(error: OSError | None) -> None:
            if error is None or number not in self._live:
                self._gaps.pop((number, offset), None)
            else:
                self._gaps[number, offset] = buffers
            if error is None and self._gaps:
                error = OSError(errno.EIO, "an earlier write failed")
            done(error)

        self._writer.write(self._files[number], offset, buffers, self.sync, written)

    def _add(self, buffers: Buffers) -> None:
        self._buffers += buffers
        self._end += sum(len(buffer) for buffer in buffers)
        self._sizes[self._active] = self._end

    def _roll_if_full(self) -> None:
        if self._active and self._end < FILE_SIZE_MAX:
            return
        if self._buffers:
            # What belongs to the old file is written first; the writer keeps the order.
            self.flush(_nothing)
        self._directory.make(self._path)
        self._active += 1
        file = self._directory.open(self._name(self._active), create=True)
        if file.size():
            file.truncate(0)
        self._files[self._active] = file
        if self.sync:
            self._directory.sync(self._path)
        self._live[self._active] = 0
        self._buffers = [MAGIC]
        self._buffered_from = 0
        self._end = self._sizes[self._active] = len(MAGIC)

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
        """Returns the number of the oldest file when few blocks pin it while at least four files
        follow."""
        numbers = sorted(self._live)
        if len(numbers) > 4 and 0 < self._live[numbers[0]] <= 64:
            return numbers[0]
        return None

    def read(self, place: Place) -> bytes:
        """Returns the body of a record. Raises StorageFault when it is damaged."""
        file = self._files.get(place.file)
        if file is None:
            file = self._files[place.file] = self._directory.open(self._name(place.file))
        data = file.pread(place.length + RECORD_HEADER, place.offset - RECORD_HEADER)
        found = self._read_record(data, place.file, 0)
        if found is None or len(found.body) != place.length:
            raise StorageFault(
                "damaged classic queue log",
                path=file.name,
                offset=place.offset - RECORD_HEADER,
            )
        return found.body

    @property
    def size_bytes(self) -> int:
        """Returns the number of bytes of all files."""
        return sum(self._sizes[number] for number in self._live)

    def close(self) -> None:
        """Closes the files; what was added and not flushed is lost."""
        for file in self._files.values():
            self._writer.retire(file)
        self._files.clear()
        self._gaps.clear()

    def remove(self) -> None:
        """Deletes everything."""
        self.close()
        self._live.clear()
        with contextlib.suppress(OSError):
            self._directory.remove(self._path)

    def _forget(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is not None:
            self._writer.retire(file)
        self._directory.remove(self._name(number))
        del self._live[number]
        self._sizes.pop(number, None)
        for gap in [gap for gap in self._gaps if gap[0] == number]:
            del self._gaps[gap]

    def _name(self, number: int) -> str:
        return f"{self._path}/{number:08d}.log"
