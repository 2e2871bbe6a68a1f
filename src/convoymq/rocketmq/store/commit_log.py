"""The commit log: all messages of all topics one after the other, in files of one size.

A file is named by the offset of its first byte, and has its full length from the start: zeros lie
behind the last record. What was appended last is in memory, and all that is not written yet; older
records are read by their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

from convoymq.model.errors import StorageFault
from convoymq.model.rounds import pass_on, run_each
from convoymq.rocketmq.store.jobs import Interrupted, Jobs
from convoymq.storage.types import Directory, Done, File

CACHE_BYTES = 8 << 20
"""Of the log's end that stay in memory."""
CACHE_BYTES_MORE = 1 << 20
READ_AHEAD_BYTES = 256 << 10
CHUNKS_MAX = 16
"""Read from files and kept, so that neighbours need no read of their own."""
FILES_OPEN_MAX = 32
PENDING_BYTES_MAX = 256 << 20
"""Appended and not written yet: more is refused."""


def file_name(offset: int) -> str:
    """Returns the name of the file that begins at an offset."""
    return f"{offset:020d}"


class CommitLog:
    """See the module text.

    Args:
        directory: has the files, in `path` ("": in itself).
        size: of each file.
        is_sync: whether what is reported as stored is on the disk.
        on_stored: called when `stored` has grown.

    Invariants:
        begin <= flushed <= written <= end.
    """

    def __init__(
        self,
        directory: Directory,
        path: str,
        size: int,
        jobs: Jobs,
        *,
        is_sync: bool,
        on_stored: Callable[[], None],
    ) -> None:
        self.directory = directory
        self._path = path
        self.size = size
        self._jobs = jobs
        self._is_sync = is_sync
        self._on_stored = on_stored
        self.begin = 0
        self.end = 0
        self.written = 0
        self.flushed = 0
        self.failure: BaseException | None = None
        """Of the last try to write, if nothing can be written at the moment."""
        self._starts: list[int] = []
        self._blocks: list[bytes] = []
        """The end of the log, in memory."""
        self._cached_bytes = 0
        self._busy = False
        self._waiting: list[tuple[int, int, Done]] = []
        """By offset, and by number among those of one offset."""
        self._numbers = 0
        self._files: OrderedDict[int, File] = OrderedDict()
        self._dirty: set[int] = set()
        """Files that were written since they were flushed."""
        self._chunks: OrderedDict[int, bytes] = OrderedDict()

    # --- append

    @property
    def stored(self) -> int:
        """Returns how far what was appended counts as stored."""
        return self.flushed if self._is_sync else self.written

    @property
    def room(self) -> int:
        """Returns the bytes that are left in the last file."""
        return self.size - self.end % self.size

    @property
    def is_full(self) -> bool:
        """Returns whether too much waits to be written."""
        return self.end - self.stored > PENDING_BYTES_MAX

    def append(self, block: bytes) -> None:
        """Adds bytes that fit into the last file. `kick` writes them."""
        assert 0 < len(block) <= self.room, (len(block), self.end)
        self._starts.append(self.end)
        self._blocks.append(block)
        self._cached_bytes += len(block)
        self.end += len(block)

    def when_stored(self, offset: int, call: Done) -> None:
        """Calls with None when the log is stored up to an offset, with the error when that failed
        so far: it is tried again, and may succeed later."""
        if self.stored >= offset:
            call(None)
        else:
            self._numbers += 1
            heappush(self._waiting, (offset, self._numbers, call))

    def kick(self) -> None:
        """Writes what was appended: at once, or, where that is flushed, beside the last flush."""
        if self.written == self.end:
            return
        if self._is_sync:
            self.flush()
            return
        try:
            for file, buffers, offset in self._plan():
                file.pwrite(buffers, offset)
        except OSError as error:
            self._fail(error)
            return
        self.written = self.end
        self._stored()

    def flush(self) -> None:
        """Makes what was appended durable; one flush runs at a time."""
        end = self.end if self._is_sync else self.written
        if self._busy or self.flushed == end:
            return
        try:
            plan = self._plan() if self._is_sync else []
            files = [self._file(base) for base in sorted(self._dirty)]
        except OSError as error:
            self._fail(error)
            return
        self._dirty.clear()

        def work() -> None:
            for file, buffers, offset in plan:
                file.pwrite(buffers, offset)
            for file in files:
                file.sync()

        self._busy = True
        self._jobs.submit(work, lambda _none, error: self._flushed(end, files, error))

    def _flushed(self, end: int, files: list[File], error: BaseException | None) -> None:
        self._busy = False
        if error is not None:
            bases = (base_of(file.name) for file in files)
            self._dirty.update(base for base in bases if base < self.end)
            if not isinstance(error, Interrupted):
                self._fail(error)
            return
        self.flushed = end
        self.failure = None
        if self._is_sync:
            self.written = self.flushed
            self._stored()
            self.kick()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        waiting, self._waiting = self._waiting, []
        run_each(waiting, lambda each: each[2](error), pass_on)

    def _stored(self) -> None:
        self.failure = None
        self._shrink()
        try:
            self._on_stored()
        finally:
            self._answer()

    def _answer(self) -> None:
        answered = []
        while self._waiting and self._waiting[0][0] <= self.stored:
            answered.append(heappop(self._waiting)[2])
        run_each(answered, lambda call: call(None), pass_on)

    def _plan(self) -> list[tuple[File, list[bytes | memoryview], int]]:
        """Returns what is to be written, a row for each file."""
        plan: list[tuple[File, list[bytes | memoryview], int]] = []
        first = bisect_right(self._starts, self.written) - 1
        base = -1
        for start, block in zip(self._starts[first:], self._blocks[first:], strict=True):
            if start - start % self.size != base:
                base = start - start % self.size
                plan.append((self._file(base, create=True), [], start - base))
                self._dirty.add(base)
            plan[-1][1].append(block)
        return plan

    def _shrink(self) -> None:
        """Forgets the oldest blocks that are stored: seldom, and many then."""
        if self._cached_bytes <= CACHE_BYTES + CACHE_BYTES_MORE:
            return
        count, stored = 0, self.stored
        for start, block in zip(self._starts, self._blocks, strict=True):
            if self._cached_bytes <= CACHE_BYTES or start + len(block) > stored:
                break
            self._cached_bytes -= len(block)
            count += 1
        del self._starts[:count]
        del self._blocks[:count]

    # --- read

    def read(self, offset: int, size: int, *, ahead: int = 0) -> memoryview | None:
        """Returns bytes of one block; None when they are not there.

        Args:
            ahead: bytes to read from a file at once, and to keep for the next reads.

        Raises:
            StorageFault: the file cannot be read.
        """
        if offset < self.begin or offset + size > self.end:
            return None
        if self._starts and offset >= self._starts[0]:
            at = bisect_right(self._starts, offset) - 1
            start, block = self._starts[at], self._blocks[at]
            if offset + size > start + len(block):
                return None
            return memoryview(block)[offset - start : offset - start + size]
        for start, chunk in self._chunks.items():
            if start <= offset and offset + size <= start + len(chunk):
                self._chunks.move_to_end(start)
                return memoryview(chunk)[offset - start : offset - start + size]
        return self._read_file(offset, size, ahead)

    def read_some(self, offset: int, limit: int) -> memoryview:
        """Returns what lies at an offset, at most `limit` bytes; less at the end of a file or of a
        block; empty at the end of the log."""
        if self._starts and offset >= self._starts[0]:
            at = bisect_right(self._starts, offset) - 1
            start, block = self._starts[at], self._blocks[at]
            return memoryview(block)[offset - start : offset - start + limit]
        left = min(limit, self.size - offset % self.size, self._file_end - offset)
        return self.read(offset, left) or memoryview(b"") if left > 0 else memoryview(b"")

    @property
    def _file_end(self) -> int:
        """Returns where what is in memory begins: all before it is in files."""
        return self._starts[0] if self._starts else self.end

    def _read_file(self, offset: int, size: int, ahead: int) -> memoryview | None:
        base = offset - offset % self.size
        if offset + size > min(base + self.size, self.end):
            return None
        try:
            length = min(max(size, ahead), base + self.size - offset)
            chunk = self._file(base).pread(min(length, self.written - offset), offset - base)
        except OSError as error:
            raise StorageFault(f"{self.name_of(base)}: cannot be read: {error}") from error
        if len(chunk) < size:
            return None
        if ahead:
            self._chunks[offset] = chunk
            if len(self._chunks) > CHUNKS_MAX:
                self._chunks.popitem(last=False)
        return memoryview(chunk)[:size]

    # --- files

    def name_of(self, base: int) -> str:
        """Returns the name in `directory` of the file that begins at an offset."""
        return f"{self._path}/{file_name(base)}" if self._path else file_name(base)

    def bases(self) -> list[int]:
        """Returns where the files begin, oldest first."""
        names = self.directory.list(self._path)
        return sorted(int(name) for name in names if name.isdigit() and len(name) == 20)

    def _file(self, base: int, *, create: bool = False) -> File:
        file = self._files.get(base)
        if file is not None:
            self._files.move_to_end(base)
            return file
        name = self.name_of(base)
        is_new = create and not self.directory.exists(name)
        file = self.directory.open(name, create=is_new)
        if file.size() < self.size:
            # New, or the disk was full when it was.
            file.truncate(self.size)
            self.directory.sync(self._path)
        self._files[base] = file
        if len(self._files) > FILES_OPEN_MAX:
            # Closed when the last job lets go of it.
            self._files.popitem(last=False)
        return file

    def begin_at(self, begin: int, end: int) -> None:
        """Says where the log begins and ends, after a recovery or in an empty log."""
        assert begin <= end
        self.begin = begin
        self.end = self.written = self.flushed = end

    def truncate(self, offset: int) -> None:
        """Removes all from an offset on. Jobs are interrupted.

        Raises:
            OSError: the log is as long as it was, or its end is damaged.
        """
        assert self.begin <= offset
        self._fail_behind(offset)
        if offset >= self.end:
            return
        keep = bisect_right(self._starts, offset - 1)
        del self._starts[keep:]
        del self._blocks[keep:]
        if self._starts:
            self._blocks[-1] = self._blocks[-1][: offset - self._starts[-1]]
        self._cached_bytes = sum(map(len, self._blocks))
        self._chunks.clear()
        for base in reversed(self.bases()):
            if base >= offset and base > self.begin:
                self._remove(base)
            elif base + self.size > offset:
                # What is cut must not be found by the next recovery.
                file = self._file(base)
                file.truncate(offset - base)
                file.truncate(self.size)
                file.sync()
        self.end = offset
        self.written = min(self.written, offset)
        self.flushed = min(self.flushed, offset)

    def _fail_behind(self, offset: int) -> None:
        """Answers those who wait for what was cut."""
        gone = [each for each in self._waiting if each[0] > offset]
        self._waiting = sorted(each for each in self._waiting if each[0] <= offset)
        run_each(gone, lambda each: each[2](Interrupted("the log was cut")), pass_on)

    def remove_before(self, offset: int) -> int:
        """Removes files that lie before an offset, never the last. Returns how many."""
        removed = 0
        for base in self.bases()[:-1]:
            if base + self.size > offset:
                break
            self._remove(base)
            self.begin = max(self.begin, base + self.size)
            removed += 1
        if removed:
            self._chunks.clear()
        return removed

    def _remove(self, base: int) -> None:
        """Removes a file, the first or the last: durably, so that there is never a hole."""
        self._files.pop(base, None)
        self._dirty.discard(base)
        self.directory.remove(self.name_of(base))
        self.directory.sync(self._path)

    def flush_now(self) -> None:
        """Makes everything durable, at once. Jobs are interrupted. Raises OSError."""
        for file, buffers, offset in self._plan():
            file.pwrite(buffers, offset)
        for base in sorted(self._dirty):
            self._file(base).sync()
        self._dirty.clear()
        self.written = self.flushed = self.end
        self._stored()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def base_of(name: str) -> int:
    """Returns the offset that a file's name says."""
    return int(name.rpartition("/")[2])
