# cython: annotation_typing=False
"""Log of a classic queue: append-only files, one directory per queue.

Format (little-endian): a file starts with the 16 bytes `CVCQ` · u16 version 1 · u16 spare · u32
CRC32C of its path · u32 CRC32C of the 12 bytes before; both are 0 before 0.4.0. Records follow,
each a multiple of 8 bytes:

    0   u32  length of the record, header included
    4   u32  CRC32C of the bytes from 8 on
    8   u8   kind: 1 messages, 2 settled, 3 handed out, 4 time to live, 5 noted
    9   u32  so many units of 8 bytes at the begin of the file were durable when this was added;
             0 = not known (always, before 0.4.0)
    13  3 spare bytes
    16  u64  kind 1: position of the first message · kind 3: positions below this were handed out
             kind 4: messages from this position on have the time · kind 5: of the first message
    24  u64  kind 1: time of arrival, ms since the epoch; 0 = not known (written before 0.4.0)
             kind 3: of messages with this priority · kind 4: ms + 1; 0 = they have no limit
             kind 5: position of the last message
    32  kind 1: one ENQUEUE command (docs/formats/entries-and-frames.md)
        kind 2: pairs of u64 positions (first, last)
        kind 5: the note of the messages (`notes.pack_note`)

Files go when no message in them, and in all older ones, is alive: a *settled* record is needed
as long as the messages it speaks of can be found in an older file. A long-lived message at the
front is moved to the end (`LocalQueue._compact`), so it does not pin what follows. So a *time to
live* stands before the first messages of each file that it is for, where they were published or
moved to. Beside a full file lies its index (`file_index`).

Writing is the work of a `LogWriter`'s worker, which creates the files as well (`NewFile`);
positions in the file are assigned at once. A file is begun on disk when those before it are
durable: recovery cuts the torn tail of the newest file that has a record, and of those after it.
Damage anywhere else, or where a later record says that all was durable, costs the records that it
hit: recovery goes on behind them, and counts the places (`damages`).
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from crc32c import crc32c

from convoymq.kernels.classic_records import level_of, transient_records
from convoymq.model.errors import StorageFault
from convoymq.queues.classic.backing import Stored
from convoymq.queues.classic.file_index import FileIndex, decode_index
from convoymq.queues.classic.log_writer import Buffers, Done, Writer
from convoymq.queues.classic.new_file import Names, NewFile
from convoymq.queues.classic.runs import RECORD_HEADER, Place
from convoymq.queues.classic.times_to_live import TimesToLive
from convoymq.storage.types import Directory, File

MAGIC = b"CVCQ" + struct.pack("<H", 1) + bytes(2)
FILE_HEADER = 16
MESSAGES = 1
SETTLED = 2
HANDED_OUT = 3
TIME_TO_LIVE = 4
NOTED = 5
FILE_BYTES_MAX = 64 << 20
LEVEL_MAX = 255
BATCH_BYTES = 1 << 20
OLD_HEADER = MAGIC + bytes(8)

_HEADER = struct.Struct("<IIBI3xQQ")
_REST = struct.Struct("<BI3xQQ")
_KINDS = frozenset((MESSAGES, SETTLED, HANDED_OUT, TIME_TO_LIVE, NOTED))


@dataclass(frozen=True, slots=True)
class Found:
    """One record met by recovery; `body` is the ENQUEUE command or the packed pairs."""

    kind: int
    position: int
    place: Place
    body: bytes
    time_ms: int = 0
    """Time of arrival of messages, 0 = not known; priority of those that were handed out; ms + 1 of
    a time to live; last position of a note."""
    durable: int = 0
    """So many bytes at the begin of the file were durable when the record was added."""


def _nothing(error: Exception | None) -> None:
    pass


class ClassicLog:
    """The files of one queue."""

    def __init__(
        self,
        directory: Directory,
        path: str,
        writer: Writer,
        *,
        sync: bool,
        file_bytes_max: int = FILE_BYTES_MAX,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """
        Args:
            path: of the queue's own directory in `directory`.
            sync: writes are flushed (durable queues); else the files are mere room for bodies.
            file_bytes_max: a file is full at this size.
            batch_bytes: so much is read at a time.
        """
        self._file_bytes_max = file_bytes_max
        self._batch_bytes = batch_bytes
        self._directory = directory
        self._path = path
        self.sync = sync
        self._writer = writer
        self._names = cast(File, Names(directory, path))
        self._removing = False
        """A removal is being made durable."""
        self._returns = False
        """The file that was removed last may come back when the power goes."""
        self._files: dict[int, File] = {}
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        #: Of the active file.
        self._index = FileIndex(0, 0)
        self._indexes: dict[int, NewFile] = {}
        """Indexes that are being written, by file."""
        self._may_exist = True
        """The queue may have a directory."""
        self._due: list[tuple[int, bytes]] = []
        """Indexes to be written once the active file is there: number of the full file, content."""
        self._active = 0
        self._end = 0
        #: Of the active file, as far as known.
        self._durable = 0
        self._buffers: Buffers = []
        self._buffered_from = 0
        self._unflushed = False
        """Something was written that is not durable yet."""
        #: (file, offset) -> what could not be written there. What follows in the file is not safe
        #: before it is: recovery ends at the gap.
        self._gaps: dict[tuple[int, int], Buffers] = {}
        self.damages: list[tuple[str, int, int]] = []
        """(file, offset, length) of what could not be read since the queue last looked; a length of
        0: the whole file is missing."""
        self.without_file: list[FileIndex] = []
        """Indexes that recovery found without their files."""
        self.times = TimesToLive()
        self.is_older = False
        """Some file is of before 0.4.0, and says no time to live."""
        self.cut: list[tuple[str, int]] = []
        """(file, offset) where recovery cut a torn tail."""
        self._damaged: set[tuple[str, int]] = set()

    # --- recovery ------------------------------------------------------------------------

    def recover(self, level_max: int = 0) -> Iterator[FileIndex]:
        """Yields what every file holds, oldest first. Raises StorageFault when the files are of an
        unknown version."""
        names = self._directory.list(self._path)
        numbers = sorted(int(name[:-4]) for name in names if name.endswith(".log"))
        self._find_missing(numbers, [int(name[:-4]) for name in names if name.endswith(".idx")])
        newest = self._newest_with_a_record(numbers)
        for number in numbers:
            self._live[number] = 0
            index = self._load_index(number) if number < newest else None
            if index is None:
                file = self._files[number] = self._directory.open(self._name(number))
                index = FileIndex(number, self._index.next_position)
                for found in self._read_file(file, number, may_be_torn=number >= newest):
                    _add_to(index, found, level_max)
                if number != numbers[-1]:
                    del self._files[number]
                    file.close()
            self._sizes.setdefault(number, index.size)
            self._index = index
            for entry in index.times.entries:
                self.times.add(*entry)
            yield index
        self.times.join()
        if numbers:
            self._active = numbers[-1]
            # A damaged end stays: records are found at multiples of 8.
            self._end = self._buffered_from = -(-self._sizes[self._active] // 8) * 8
            if self._is_foreign(self._files[self._active], self._active):
                # Not a file to go on with.
                self._end = self._file_bytes_max
                self._roll_if_full()

    def _find_missing(self, numbers: list[int], indexes: list[int]) -> None:
        """Notes the files that are missing. Files go oldest first; a full one gets its index when
        the next one is there. An index without its file is of one that went, or is missing."""
        for number in sorted(set(indexes).difference(numbers)):
            file = self._directory.open(self._index_name(number))
            index = decode_index(number, file.pread(file.size(), 0), self._name(number))
            file.close()
            self._directory.remove(self._index_name(number))
            if index is not None:
                self.without_file.append(index)
        due = {*numbers, *(number + 1 for number in indexes if number in numbers)}
        for number in sorted(due.union(range(min(due), max(due)) if due else ())):
            if number not in numbers:
                self.note_missing(number)

    def note_missing(self, number: int) -> None:
        """Notes that a file is not there."""
        self._note_damage(self._name(number), 0, 0)

    def _header(self, number: int) -> bytes:
        named = MAGIC + struct.pack("<I", crc32c(self._name(number).encode()))
        return named + struct.pack("<I", crc32c(named))

    def _is_foreign(self, file: File, number: int) -> bool:
        """Returns whether a file was written as another one."""
        head = file.pread(FILE_HEADER, 0)
        return _is_whole(head) and head[:8] == MAGIC and head != self._header(number)

    def _newest_with_a_record(self, numbers: list[int]) -> int:
        """Returns the newest file that begins with a whole record: all before it are durable."""
        for number in reversed(numbers):
            file = self._directory.open(self._name(number))
            try:
                if self._has_record(file, number):
                    return number
            finally:
                file.close()
        return 0

    def _load_index(self, number: int) -> FileIndex | None:
        name = self._index_name(number)
        if not self._directory.exists(name):
            return None
        log, file = self._directory.open(self._name(number)), self._directory.open(name)
        try:
            head = log.pread(FILE_HEADER, 0)
            if head not in (self._header(number), OLD_HEADER):
                return None
            self.is_older |= head == OLD_HEADER
            index = decode_index(number, file.pread(file.size(), 0), self._name(number))
            if index is not None and index.size > log.size():
                self._note_damage(log.name, log.size(), index.size - log.size())
            return index if index is not None and index.size == log.size() else None
        finally:
            log.close()
            file.close()

    def _note_damage(self, name: str, offset: int, length: int) -> None:
        if (name, offset) not in self._damaged:
            self._damaged.add((name, offset))
            self.damages.append((name, offset, length))

    def _has_record(self, file: File, number: int) -> bool:
        """Returns whether the file begins with a whole record: then all files before it are
        durable."""
        head = file.pread(FILE_HEADER + RECORD_HEADER, 0)
        if head[: len(MAGIC)] != MAGIC or len(head) < FILE_HEADER + RECORD_HEADER:
            return False
        length = _HEADER.unpack_from(head, FILE_HEADER)[0]
        data = file.pread(length, FILE_HEADER) if length >= RECORD_HEADER else b""
        return self._read_record(data, number, 0) is not None

    def _read_file(self, file: File, number: int, *, may_be_torn: bool) -> Iterator[Found]:
        data = file.pread(file.size(), 0)
        self._sizes[number] = len(data)
        at = self._read_header(file, data, number, may_be_torn=may_be_torn)
        while at < len(data):
            found = self._read_record(data, number, at)
            if found is not None:
                at += RECORD_HEADER + len(found.body)
                yield found
                continue
            if may_be_torn and not self._was_durable(data, number, at):
                file.truncate(at)
                self.cut.append((file.name, at))
                self._sizes[number] = at
                return
            after = self._find_record(data, number, at + 8)
            self._note_damage(file.name, at, after - at)
            at = after

    def _read_header(self, file: File, data: bytes, number: int, *, may_be_torn: bool) -> int:
        """Returns where the records of a file begin."""
        size = FILE_HEADER
        own = self._header(number)
        if data[:size] in (own, OLD_HEADER):
            self.is_older |= data[:size] == OLD_HEADER
            return size
        if self._is_foreign(file, number):
            self._note_damage(file.name, 0, len(data))
            return len(data)
        if data[:4] == MAGIC[:4] and (_is_whole(data) or data[6:size] == OLD_HEADER[6:]):
            raise StorageFault("classic queue log of an unknown version", path=file.name, offset=4)
        if may_be_torn and not self._was_durable(data, number, 0):
            # The first write to the file was cut short: nothing in it was confirmed.
            file.truncate(0)
            file.pwrite([own], 0)
            self._sizes[number] = size
            return len(data)
        self._note_damage(file.name, 0, size)
        return size

    def _was_durable(self, data: bytes, number: int, at: int) -> bool:
        """Returns whether a whole record behind a place says that the place was durable."""
        while (at := self._find_record(data, number, at + 8)) < len(data):
            found = self._read_record(data, number, at)
            if found is not None and found.durable > at - 8:
                return True
        return False

    def _find_record(self, data: bytes, number: int, start: int) -> int:
        """Returns where the next whole record begins, at `start` or behind it; the end of `data`
        when there is none."""
        for at in range(start, len(data) - RECORD_HEADER + 1, 8):
            if data[at + 8] in _KINDS and self._read_record(data, number, at) is not None:
                return at
        return len(data)

    @staticmethod
    def _check_record(data: bytes, at: int) -> tuple[int, int, int, int] | None:
        """Returns (length, kind, position, time) of the record at `at`; None = it is not whole."""
        if len(data) - at < RECORD_HEADER:
            return None
        length, checksum, kind, _durable, position, time_ms = _HEADER.unpack_from(data, at)
        if length < RECORD_HEADER or length % 8 or length > len(data) - at:
            return None
        if crc32c(memoryview(data)[at + 8 : at + length]) != checksum:
            return None
        return length, kind, position, time_ms

    @staticmethod
    def _read_record(data: bytes, number: int, at: int) -> Found | None:
        head = ClassicLog._check_record(data, at)
        if head is None:
            return None
        length, kind, position, time_ms = head
        durable = int.from_bytes(data[at + 9 : at + 13], "little")
        start = at + RECORD_HEADER
        place = Place(number, start, length - RECORD_HEADER)
        return Found(kind, position, place, data[start : at + length], time_ms, 8 * durable)

    # --- writing -------------------------------------------------------------------------

    def add_messages(
        self,
        position: int,
        command: memoryview | bytes,
        time_ms: int = 0,
        *,
        level: int = 0,
        live: int | None = None,
    ) -> Place:
        """Appends an ENQUEUE command that arrived at `time_ms`, with messages of one priority; the
        next `flush` writes it. `live`: so many of its messages are alive; None = all."""
        self._roll_if_full()
        if self.times.entries and self.sync:
            self._say_time_to_live(position)
        place = Place(self._active, self._end + RECORD_HEADER, len(command))
        self._add(self._record(MESSAGES, position, command, time_ms))
        count = int.from_bytes(command[24:28], "little")
        self._live[self._active] += count if live is None else live
        if self.sync:
            data = bytes(command)
            transient, unreadable = transient_records(data, 0, count)
            self._index.unreadable += unreadable
            self._index.add_messages(position, data, place.offset, place.length, level, transient)
        return place

    def add_settled(self, pairs: Sequence[int]) -> None:
        """Appends positions that are gone (first, last, first, last, …)."""
        if self._active:
            self._add(self._record(SETTLED, 0, struct.pack(f"<{len(pairs)}Q", *pairs)))
            self._index.add_settled(pairs)

    def move_messages(
        self,
        position: int,
        command: memoryview | bytes,
        time_ms: int,
        settled: Sequence[int],
        *,
        level: int = 0,
    ) -> Place:
        """Appends messages that the log has already and whose former place is about to go, and
        which of them are settled."""
        count = int.from_bytes(command[24:28], "little")
        gone = sum(settled[i + 1] - settled[i] + 1 for i in range(0, len(settled), 2))
        place = self.add_messages(position, command, time_ms, level=level, live=count - gone)
        if settled:
            self.add_settled(settled)
        return place

    def add_handed_out(self, position: int, level: int = 0) -> None:
        """Appends that positions of a priority below this were handed out."""
        self._index.add_handed_out(level, position)
        if self._active:
            self._add(self._record(HANDED_OUT, position, b"", level))

    def add_noted(self, first: int, last: int, note: bytes) -> None:
        """Appends what consumers have said of messages."""
        if self._active:
            self._add(self._record(NOTED, first, note, last))
            self._index.notes.append((first, last, note))

    def set_time_to_live(self, position: int, ttl_ms: int | None) -> None:
        """Sets the queue's time of messages from a position on, which is the highest."""
        if self.times.at(position)[1] != ttl_ms:
            self.times.add(position, ttl_ms)

    def _say_time_to_live(self, position: int) -> None:
        since, ttl_ms = self.times.at(position)
        said = self._index.times
        if not said.entries or said.at(position)[0] < since or said.at(position)[1] != ttl_ms:
            word = 0 if ttl_ms is None else ttl_ms + 1
            self._add(self._record(TIME_TO_LIVE, position, b"", word))
            said.add(position, ttl_ms)

    @property
    def lacks_records(self) -> bool:
        """Returns whether something could not be written; it is tried again with what follows."""
        return bool(self._gaps)

    @property
    def is_settled(self) -> bool:
        """Returns whether `flush` has nothing to do."""
        return not self._buffers and not (self.sync and self._unflushed)

    def flush(self, done: Done, *, durable: bool = True) -> bool:
        """Hands what was added to the writer; False when there was nothing. `done` gets an error
        too when something before could not be written. `durable`: it comes when all that was added
        so far is durable, in a log that is flushed."""
        # A file is begun when those before it are durable.
        durable = self.sync and (durable or not self._buffered_from)
        if not self._buffers and not (durable and self._unflushed):
            return False
        for (number, offset), buffers in self._gaps.items():
            self._write(number, offset, buffers, self.sync, _nothing)
        buffers, self._buffers = self._buffers, []
        offset, self._buffered_from = self._buffered_from, self._end
        active = self._active

        def flushed(error: Exception | None) -> None:
            if error is None and self._due and self._due[0][0] < active:
                self._write_index()
            done(error)

        self._write(active, offset, buffers, durable, flushed)
        self._unflushed = not durable
        return True

    def _write_index(self) -> None:
        """Writes the index of the oldest file that is due, as the next file is there."""
        number, encoded = self._due.pop(0)
        file = self._indexes[number]

        def written(_error: Exception | None) -> None:
            self._indexes.pop(number, None)

        self._writer.write(file, 0, [encoded], False, written)
        self._writer.retire(file)

    def _record(
        self, kind: int, position: int, body: memoryview | bytes, time_ms: int = 0
    ) -> Buffers:
        assert len(body) % 8 == 0, "the body of a record is padded"
        durable = self._durable // 8
        checksum = crc32c(body, crc32c(_REST.pack(kind, durable, position, time_ms)))
        length = RECORD_HEADER + len(body)
        return [_HEADER.pack(length, checksum, kind, durable, position, time_ms), body]

    def _write(self, number: int, offset: int, buffers: Buffers, durable: bool, done: Done) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)

        def written(error: Exception | None) -> None:
            if number not in self._live:
                # Nobody needs the file any more.
                error = None
            if error is None:
                self._gaps.pop((number, offset), None)
            else:
                self._gaps[number, offset] = buffers
            if error is None and self._gaps:
                error = OSError(errno.EIO, "an earlier write failed")
            if error is None and durable and number == self._active:
                self._durable = max(self._durable, end)
            done(error)

        self._writer.write(self._files[number], offset, buffers, durable, written)

    def _add(self, buffers: Buffers) -> None:
        self._buffers += buffers
        self._end += sum(len(buffer) for buffer in buffers)
        self._sizes[self._active] = self._end

    def _roll_if_full(self) -> None:
        if self._active and self._end < self._file_bytes_max:
            return
        # What belongs to the old file is written first; the writer keeps the order.
        self.flush(_nothing)
        if self._active and self.sync:
            # Not flushed: recovery can do without it.
            number = self._active
            name = self._index_name(number)
            self._indexes[number] = NewFile(self._directory, self._path, name, sync=False)
            self._due.append((number, self._index.encode(self._end, self._name(number))))
        self._active += 1
        self._may_exist = True
        before = self._index
        self._index = FileIndex(self._active, before.next_position)
        self._durable = 0
        name = self._name(self._active)
        self._files[self._active] = NewFile(self._directory, self._path, name, sync=self.sync)
        self._live[self._active] = 0
        self._buffers = [self._header(self._active)]
        self._buffered_from = 0
        self._end = self._sizes[self._active] = FILE_HEADER
        for level, position in before.handed_out.items():
            # Concerns messages that come to this file, or are moved to it; older files go.
            self.add_handed_out(position, level)

    # --- room ----------------------------------------------------------------------------

    def keep(self, file: int, count: int) -> None:
        """Recovery found so many messages in a file alive."""
        self._live[file] += count

    def drop(self, file: int, count: int) -> None:
        """So many messages in a file are gone."""
        self._live[file] -= count
        assert self._live[file] >= 0

    def collect(self) -> None:
        """Removes the oldest files that hold nothing alive. One that cannot be removed keeps those
        after it, which say what in it is settled; the next call tries again. So does one whose
        removal is not durable: it would come back without them when the power goes."""
        for number in sorted(self._live):
            if self._removing or self._live[number] or number == self._active:
                return
            if not self._returns:
                try:
                    self._forget(number)
                except OSError:
                    return
            if self.sync:
                self._removing = self._returns = True
                self._writer.write(self._names, 1, [], True, self._removed)

    def _removed(self, error: Exception | None) -> None:
        self._removing = False
        if error is None:
            self._returns = False
            self.collect()

    def oldest_is_sparse(self) -> int | None:
        """Returns the number of the oldest file when few messages pin it while at least four files
        follow."""
        numbers = sorted(self._live)
        if len(numbers) > 4 and 0 < self._live[numbers[0]] <= 64:
            return numbers[0]
        return None

    def _opened(self, number: int) -> File:
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = self._directory.open(self._name(number))
        return file

    def read_batch(self, number: int, offset: int, end: int) -> tuple[list[Stored], int]:
        """Returns some records of messages of a file from `offset` on, and the offset behind them,
        at most `end`. Damaged ones are left out, and noted in `damages`. Raises OSError."""
        file = self._opened(number)
        data = file.pread(min(end - offset, self._batch_bytes), offset)
        found: list[Stored] = []
        at = 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            is_cut = length > len(data) - at and length % 8 == 0 and offset + at + length <= end
            if is_cut or (len(data) - at < RECORD_HEADER and offset + len(data) < end):
                if at:
                    return found, offset + at
                # Longer than a batch, or damaged.
                data = file.pread(length, offset)
            head = self._check_record(data, at)
            if head is None:
                after = self._find_record(data, number, at + 8)
                self._note_damage(file.name, offset + at, after - at)
                at = after
                continue
            length, kind, position, time_ms = head
            start = at + RECORD_HEADER
            if kind == MESSAGES:
                place = Place(number, offset + start, length - RECORD_HEADER)
                ttl_ms = self.times.at(position)[1]
                found.append(Stored(position, place, data, start, time_ms, ttl_ms))
            at += length
        return found, min(offset + at, end) if data else end

    def read(self, place: Place) -> bytes:
        """Returns the body of a record. Raises StorageFault when it is damaged."""
        file = self._opened(place.file)
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
    def end(self) -> tuple[int, int]:
        """Returns the file that is written to, and its length."""
        return self._active, self._end

    def indexes(self, end: tuple[int, int]) -> Iterator[FileIndex]:
        """Yields the indexes of the files up to an earlier `end`, oldest first; all must be on
        disk. What they say of messages may be newer than `end`. A file without one is read."""
        for number in [number for number in sorted(self._live) if number <= end[0]]:
            index = self._index if number == self._active else self._load_index(number)
            if index is None:
                index = FileIndex(number, 0)
                for found in self._read_file(self._opened(number), number, may_be_torn=False):
                    if found.kind != MESSAGES:
                        _add_to(index, found, LEVEL_MAX)
            yield index

    def messages(self, end: tuple[int, int]) -> Iterator[Found]:
        """Yields the whole records of messages before an earlier `end`, oldest first; all must be
        on disk. Reads a batch at a time."""
        for number in [number for number in sorted(self._live) if number <= end[0]]:
            at, size = FILE_HEADER, end[1] if number == end[0] else self._sizes[number]
            while at < size:
                batch, at = self.read_batch(number, at, size)
                for one in batch:
                    body = one.data[one.command : one.command + one.place.length]
                    yield Found(MESSAGES, one.position, one.place, body, one.time_ms)

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
        self._due.clear()

    def remove(self) -> None:
        """Deletes everything."""
        for file in [*self._files.values(), *self._indexes.values()]:
            _give_up(file)
        self.close()
        self._live.clear()
        if self._may_exist:
            with contextlib.suppress(OSError):
                self._directory.remove(self._path)
                self._may_exist = False

    def _forget(self, number: int) -> None:
        file = self._files.get(number)
        if file is not None:
            _give_up(file)
        if self.sync:
            # First: one without its file would say that the file is missing.
            if number in self._indexes:
                self._indexes[number].give_up()
            self._directory.remove(self._index_name(number))
        self._directory.remove(self._name(number))
        if file is not None:
            self._writer.retire(file)
            del self._files[number]
        del self._live[number]
        self._sizes.pop(number, None)
        for gap in [gap for gap in self._gaps if gap[0] == number]:
            del self._gaps[gap]

    def _name(self, number: int) -> str:
        return f"{self._path}/{number:08d}.log"

    def _index_name(self, number: int) -> str:
        return f"{self._path}/{number:08d}.idx"


def _is_whole(head: bytes) -> bool:
    """Returns whether the header of a file is as it was written, since 0.4.0."""
    return head[12:FILE_HEADER] == struct.pack("<I", crc32c(head[:12]))


def _add_to(index: FileIndex, found: Found, level_max: int) -> None:
    """Adds a record that recovery read."""
    if found.kind == MESSAGES:
        count = int.from_bytes(found.body[24:28], "little")
        try:
            level = level_of(found.body, 0, level_max) if count else 0
            transient, unreadable = transient_records(found.body, 0, count)
        except ValueError:
            level, transient, unreadable = 0, [0, count - 1], count
        index.unreadable += unreadable
        place = found.place
        index.add_messages(found.position, found.body, place.offset, place.length, level, transient)
    elif found.kind == SETTLED:
        index.add_settled(memoryview(found.body).cast("Q").tolist())
    elif found.kind == HANDED_OUT:
        index.add_handed_out(min(found.time_ms, level_max), found.position)
    elif found.kind == TIME_TO_LIVE:
        index.times.add(found.position, found.time_ms - 1 if found.time_ms else None)
    elif found.kind == NOTED:
        index.notes.append((found.position, found.time_ms, found.body))


def _give_up(file: File) -> None:
    if isinstance(file, NewFile):
        file.give_up()
