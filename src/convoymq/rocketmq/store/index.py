"""The index: messages by key, in files that hash keys into slots.

Rows wait in memory, and are entered in bulk beside the loop: a page of slots is read and written
once for all of its rows. What was entered since the last checkpoint is entered anew after a crash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from convoymq.kernels import rocketmq_index as kernel
from convoymq.kernels.rocketmq_index import PAGE_BYTES, PAGE_SLOTS, ROW_BYTES, UNIT_BYTES
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.checkpoint import Progress
from convoymq.storage.types import Directory, File

_HEADER = struct.Struct(">qqqqii")
_UNIT = struct.Struct(">IqiI")
ROWS_MAX = 1 << 16
"""Rows that wait: more are entered at once."""
REBUILD_UNITS = 1 << 16


@dataclass(slots=True)
class Header:
    """Head of an index file."""

    name: str
    begin_ms: int = 0
    end_ms: int = 0
    begin: int = 0
    end: int = 0
    """Physical offsets of the first and of the last message."""
    slots_used: int = 0
    next: int = 1
    """Number of the next unit."""

    @property
    def path(self) -> str:
        """Returns the name of the file."""
        return f"index/{self.name}"

    def encode(self) -> bytes:
        """Returns the bytes of the head."""
        return _HEADER.pack(
            self.begin_ms, self.end_ms, self.begin, self.end, self.slots_used, self.next
        )


class Index:
    """See the module text.

    Args:
        slots: of each file.
        units: of each file, one of which is never used.
        clock: wall clock in ms: it names files.
        unsynced: files that were written and are not durable.
        is_kept: whether messages are entered; files that are there can be searched anyway.
    """

    def __init__(
        self,
        directory: Directory,
        slots: int,
        units: int,
        clock: Callable[[], int],
        unsynced: set[str],
        *,
        is_kept: bool = True,
    ) -> None:
        self._directory = directory
        self._slots = slots
        self._units = units
        self._clock = clock
        self.headers: list[Header] = []
        """Of all files, oldest first; rows go to the last."""
        self._rows = bytearray()
        self._entering = b""
        """Rows that the worker is entering."""
        self._unsynced = unsynced
        self._is_kept = is_kept

    @property
    def place(self) -> tuple[int, int]:
        """Returns the last file and the number of its next unit; zeros without one."""
        return (int(self.headers[-1].name), self.headers[-1].next) if self.headers else (0, 0)

    @property
    def last_ms(self) -> int:
        """Returns the time of the last message that was entered."""
        return self.headers[-1].end_ms if self.headers else 0

    # --- enter

    def add(self, rows: bytes) -> None:
        """Adds rows, in the order of the log. Those of messages that have theirs are left out."""
        if not self._is_kept:
            return
        if self.headers and rows and not self._rows and not self._entering:
            end, at = self.headers[-1].end, 0
            while at < len(rows) and _place_of(rows[at : at + ROW_BYTES])[0] < end:
                at += ROW_BYTES
            rows = rows[at:]
        self._rows += rows

    @property
    def is_due(self) -> bool:
        """Returns whether many rows wait."""
        return len(self._rows) > ROWS_MAX * ROW_BYTES

    @property
    def is_full(self) -> bool:
        """Returns whether too much waits to be written."""
        return len(self._rows) > 64 * ROWS_MAX * ROW_BYTES

    def take(self) -> bytes:
        """Returns the rows that are to be written; `entered` follows."""
        assert not self._entering
        self._entering, self._rows = bytes(self._rows), bytearray()
        return self._entering

    def entered(self, headers: list[Header] | None) -> None:
        """Ends what `take` began: with what `write` returned, or None when it failed."""
        if headers is None:
            # Units are written again from the same number on.
            self._rows[:0] = self._entering
        elif headers:
            self._unsynced.update(header.path for header in headers)
            del self.headers[-1:]
            self.headers += headers
        self._entering = b""

    def write(self, rows: bytes) -> list[Header]:
        """Writes rows, on any thread. Returns the new heads of the last file and of those behind
        it. Raises OSError: the files are as good as before."""
        last = self.headers[-1] if self.headers else None
        made: list[Header] = []
        header = replace(last) if last is not None else self._make(last)
        while rows:
            if header.next >= self._units:
                made.append(header)
                header = self._make(header)
            count = min(self._units - header.next, len(rows) // ROW_BYTES)
            self._write_part(header, rows[: count * ROW_BYTES])
            rows = rows[count * ROW_BYTES :]
        return [*made, header]

    def _write_part(self, header: Header, rows: bytes) -> None:
        file = self._open(header)
        try:
            if header.next == 1:
                header.begin, header.begin_ms = _place_of(rows[:ROW_BYTES])
            numbers = kernel.pages_of(rows, self._slots)
            pages = {
                number: bytearray(file.pread(PAGE_BYTES, 40 + number * PAGE_BYTES))
                for number in numbers
            }
            units, used = kernel.enter(rows, self._slots, header.next, header.begin_ms, pages)
            file.pwrite([units], self._unit_at(header.next))
            for number, page in pages.items():
                # The last page of slots lies beside the first unit.
                length = min(PAGE_BYTES, (self._slots - number * PAGE_SLOTS) * 4)
                file.pwrite([bytes(page[:length])], 40 + number * PAGE_BYTES)
            header.next += len(rows) // ROW_BYTES
            header.slots_used += used
            header.end, header.end_ms = _place_of(rows[-ROW_BYTES:])
            file.pwrite([header.encode()], 0)
        finally:
            file.close()

    def _make(self, before: Header | None) -> Header:
        """Makes a file, named by the time, and behind the one before it."""
        now = datetime.fromtimestamp(self._clock() / 1000, UTC)
        name = now.strftime("%Y%m%d%H%M%S") + f"{now.microsecond // 1000:03d}"
        if before is not None and name <= before.name:
            name = str(int(before.name) + 1)
        header = Header(name)
        if before is not None:
            header.begin = header.end = before.end
            header.begin_ms = header.end_ms = before.end_ms
        file = self._directory.open(f"index/{name}", create=True)
        try:
            file.truncate(self._unit_at(self._units))
        finally:
            file.close()
        self._directory.sync("index")
        return header

    def _unit_at(self, number: int) -> int:
        return 40 + 4 * self._slots + UNIT_BYTES * number

    def _open(self, header: Header) -> File:
        return self._directory.open(header.path)

    def write_now(self) -> None:
        """Enters the rows that wait, at once. Raises OSError."""
        if self._rows:
            self.entered(self.write(self.take()))

    # --- find

    def find(self, hash_: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yields physical offsets of messages whose key may have a hash, newest first."""
        for rows in (bytes(self._rows), self._entering):
            for physical, ms in kernel.find(rows, hash_):
                if begin_ms <= ms <= end_ms:
                    yield physical
        for header in reversed(self.headers):
            if header.begin_ms <= end_ms and begin_ms <= header.end_ms + 1000:
                yield from self._find_in(header, hash_, begin_ms, end_ms)

    def _find_in(self, header: Header, hash_: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        file = self._open(header)
        try:
            slot = file.pread(4, 40 + 4 * (hash_ % self._slots))
            number, bound = int.from_bytes(slot, "big"), header.next
            # Each is older than the one before, so a damaged file has no circle either.
            while 0 < number < bound:
                found, physical, seconds, older = _UNIT.unpack(
                    file.pread(UNIT_BYTES, self._unit_at(number)).ljust(UNIT_BYTES, b"\0")
                )
                ms = header.begin_ms + 1000 * seconds
                # A unit has whole seconds.
                if found == hash_ and begin_ms - 1000 < ms <= end_ms:
                    yield physical
                number, bound = older, number
        finally:
            file.close()

    # --- recovery and retention

    def open(self, progress: Progress | None, start: int, *, was_aborted: bool) -> None:
        """Finds the files that are there; after a crash those parts that are durable.

        Args:
            progress: of the last checkpoint, if it counts.
            start: physical offset from which on messages are read again.

        Raises:
            StorageFault: other settings made the files.
        """
        for name in self._directory.list("index"):
            if not name.isdigit():
                continue
            file = self._directory.open(f"index/{name}")
            header = Header(name, *_HEADER.unpack(file.pread(40, 0).ljust(40, b"\0")))
            size = file.size()
            file.close()
            is_torn = was_aborted and (
                size < self._unit_at(self._units)
                if progress is None
                else int(name) > progress.index_file
            )
            if header.next < 1 or is_torn:
                self._remove(header)
                continue
            if size != self._unit_at(self._units) or header.next > self._units:
                raise StorageFault(
                    f"{header.path} has {size} bytes, and maxHashSlotNum and maxIndexNum say "
                    f"{self._unit_at(self._units)}"
                )
            self.headers.append(header)
        if was_aborted:
            self._cut(progress, start)

    def _cut(self, progress: Progress | None, start: int) -> None:
        """Makes the slots of the last file of its durable units: slots may be there in part."""
        if progress is None:
            # RocketMQ's own: units as well, which are compared with messages when they are found.
            self.truncate(start)
        if self.headers:
            last = self.headers[-1]
            is_known = progress is not None and int(last.name) == progress.index_file
            self._shorten(last, progress.index_units if progress and is_known else last.next)

    def truncate(self, physical: int) -> None:
        """Forgets messages from a physical offset on. Nothing is being written."""
        assert not self._entering
        while self._rows and _place_of(self._rows[-ROW_BYTES:])[0] >= physical:
            del self._rows[-ROW_BYTES:]
        while self.headers and self.headers[-1].end >= physical:
            header = self.headers[-1]
            if header.begin >= physical:
                self._remove(header)
                del self.headers[-1]
                continue
            file = self._open(header)
            number = header.next
            while number > 1:
                unit = file.pread(UNIT_BYTES, self._unit_at(number - 1))
                if _UNIT.unpack(unit)[1] < physical:
                    break
                number -= 1
            file.close()
            self._shorten(header, number)
            break

    def _shorten(self, header: Header, units: int) -> None:
        """Makes `units` the next unit of a file, and its slots of what is left."""
        file = self._open(header)
        slots = bytearray(4 * self._slots)
        header.slots_used = 0
        last = b""
        header.next = max(1, min(units, self._units))
        for first in range(1, header.next, REBUILD_UNITS):
            count = min(REBUILD_UNITS, header.next - first)
            last = file.pread(count * UNIT_BYTES, self._unit_at(first))
            header.slots_used += kernel.rebuild(last, first, self._slots, slots)
        if last:
            _, header.end, seconds, _ = _UNIT.unpack(last[-UNIT_BYTES:])
            header.end_ms = header.begin_ms + 1000 * seconds
        file.pwrite([header.encode(), bytes(slots)], 0)
        file.sync()
        file.close()

    def remove_before(self, physical: int) -> None:
        """Removes files all of whose messages are gone, never the last."""
        while len(self.headers) > 1 and self.headers[0].end < physical:
            self._remove(self.headers.pop(0))

    def _remove(self, header: Header) -> None:
        self._unsynced.discard(header.path)
        self._directory.remove(header.path)


def _place_of(row: bytes | bytearray) -> tuple[int, int]:
    """Returns physical offset and time of a row."""
    return int.from_bytes(row[4:12], "big"), int.from_bytes(row[12:20], "big")
