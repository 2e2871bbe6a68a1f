"""Reading a stream's chunks from the local log, in order, from any offset.

A `ChunkReader` is a place in the log. It finds the index range of its offset in the machine's index
and from there takes ENQUEUE after ENQUEUE; at the end of an index range it looks the next one up.
It reads only what the machine has applied, so only what is committed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from convoymq.kernels import batch
from convoymq.kernels.entries import Entry
from convoymq.model.errors import EntryGone, OffsetOutOfRange
from convoymq.streamlog.chunks import ChunkIndex

#: How much one read of the log brings along when the entries lie on disk.
SPAN_BYTES = 1 << 20

ReadSpan = Callable[[int, int], Sequence[Entry]]
"""(entry index, about how many bytes) -> that entry and some that follow it."""


class Applied(Protocol):
    """Parts of a `StreamMachine`, or of a `ReadDescriptor`, that a reader needs."""

    @property
    def chunks(self) -> ChunkIndex:
        """Returns the places of the index ranges."""

    @property
    def first(self) -> int:
        """Returns the first offset that is kept."""

    @property
    def next(self) -> int:
        """Returns the offset behind the last message."""

    @property
    def index(self) -> int:
        """Returns the last entry that may be read."""


class Run(NamedTuple):
    """Consecutive records of one chunk."""

    block: bytes
    command: int
    """Position in `block` where the ENQUEUE command begins."""
    first: int
    messages: int
    offset: int
    """Stream offset of record `first`."""
    time_ms: int

    def __repr__(self) -> str:
        """Without the block: event loops print what tasks return, and it may be megabytes."""
        return f"Run(offset={self.offset}, messages={self.messages}, time_ms={self.time_ms})"


class ChunkReader:
    """See the module text. `offset` is the next one that it returns."""

    def __init__(self, machine: Applied, read: ReadSpan, offset: int) -> None:
        self.machine = machine
        self.offset = offset
        #: Body bytes of what `next` returned last; a part's share of its chunk.
        self.last_bytes = 0
        self._read = read
        self._span: Sequence[Entry] = ()
        #: The index range that is being read: its first offset (-1 = none), and where it ends as
        #: far as known.
        self._start = -1
        self._end = -1
        #: The open entry: (command, first record, count, body bytes) of its chunks, and which of
        #: them is next, from which record on.
        self._entry: Entry | None = None
        self._chunks: list[tuple[int, int, int]] = []
        self._at = 0
        self._record = 0
        #: The same without the entry: (entry index, which chunk, which record).
        self._parked: tuple[int, int, int] | None = None
        #: Runs since `mark`: (offset, entry index, which chunk, which record); None = nobody asked.
        self._marks: list[tuple[int, int, int, int]] | None = None

    def next(self, rows_max: int, bytes_max: int) -> Run | None:
        """Returns the next records, at most about so many body bytes of one chunk, at least one;
        None at the end of what is applied.

        Raises:
            OffsetOutOfRange: the offset is not kept any more.
            StorageFault: the log is damaged here. EntryGone: it was wiped meanwhile.
        """
        machine = self.machine
        if self.offset < machine.first or self.offset > machine.next:
            raise OffsetOutOfRange(machine.first, machine.next, self.offset)
        if self.offset >= self._end:
            if self.offset == machine.next:
                return None
            self._enter()
        if self._parked is not None:
            index, at, record = self._parked
            self._open(index)
            self._at = at
            self._record = record
        while self._at == len(self._chunks):
            assert self._entry is not None
            self._open(self._entry.index + 1)
        assert self._entry is not None
        command, count, size = self._chunks[self._at]
        first = self._record
        left = count - first
        # Of the last chunk of an index range the rest may not have been stored.
        taken = min(left, rows_max, self._end - self.offset)
        if size * taken > bytes_max * count:
            taken = max(1, min(taken, bytes_max * count // size))
        self.last_bytes = size * taken // count
        entry = self._entry
        run = Run(entry.data, command, first, taken, self.offset, entry.time_ms)
        if self._marks is not None:
            self._marks.append((self.offset, entry.index, self._at, first))
        self.offset += taken
        if taken == left:
            self._at += 1
            self._record = 0
        else:
            self._record += taken
        return run

    def _enter(self) -> None:
        """Goes to the index range that holds the offset."""
        chunks = self.machine.chunks
        position = chunks.find(self.offset)
        index, command, first, start = chunks.row(position)
        last = position + 1 == len(chunks)
        end = self.machine.next if last else chunks.offsets[position + 1]
        if start != self._start:
            # Until the place is found there is none: a read may fail.
            self._start = self._end = -1
            self._seek(index, command, first, self.offset - start)
            self._start = start
        # Else it has grown since, and the place in it is still right.
        self._end = end

    def _seek(self, index: int, command: int, first: int, behind: int) -> None:
        """Goes to the message that stands `behind` others from an index range's first one on."""
        self._open(index)
        while self._chunks[self._at][0] < command:
            self._at += 1
        self._record = first
        while behind:
            while self._at == len(self._chunks):
                assert self._entry is not None
                self._open(self._entry.index + 1)
            left = self._chunks[self._at][1] - self._record
            if behind < left:
                self._record += behind
                return
            behind -= left
            self._at += 1
            self._record = 0

    def _open(self, index: int) -> None:
        """Makes an entry the open one."""
        span = self._span
        if not span or not span[0].index <= index <= span[-1].index:
            # What is not applied yet may be replaced by another leader's.
            limit = self.machine.index
            read = self._read(index, SPAN_BYTES)
            span = [
                entry
                for place, entry in enumerate(read)
                if entry.index == index + place and entry.index <= limit
            ]
            if not span:
                raise EntryGone(f"entry {index} is not applied here")
            self._span = span
        entry = self._entry = span[index - span[0].index]
        self._at = 0
        self._record = 0
        self._parked = None
        data = entry.data
        self._chunks = [
            (offset, count, batch.enqueue_bytes(data, offset))
            for kind, _, _, _, count, _, offset, _ in batch.commands(data)
            if kind == batch.CMD_ENQUEUE and count
        ]

    def mark(self) -> None:
        """Remembers from here on where runs began, for `go_back`."""
        self._marks = []

    def go_back(self, offset: int) -> bool:
        """Goes to an offset that was read since `mark`, without looking for it in the log; False
        when it was not, or lies in another index range."""
        marks = self._marks
        if not marks or not max(self._start, marks[0][0]) <= offset < self.offset:
            return False
        start, index, at, record = marks[bisect_right(marks, offset, key=_offset_of) - 1]
        self._parked = (index, at, record + offset - start)
        self.offset = offset
        return True

    def release(self) -> None:
        """Lets go of what was read along; the place stays."""
        if self._entry is not None:
            self._span = (self._entry,)

    def park(self) -> None:
        """Lets go of all that was read; the place stays."""
        if self._entry is not None:
            if self._parked is None:
                self._parked = (self._entry.index, self._at, self._record)
            self._entry = None
            self._span = ()
            self._chunks = []


def _offset_of(mark: tuple[int, int, int, int]) -> int:
    return mark[0]


def offset_at(machine: Applied, read: ReadSpan, time_ms: int) -> tuple[int, int] | None:
    """Returns (offset, time) of the first message whose time is at or after `time_ms`; None = none
    yet.

    Raises as `ChunkReader.next` does.
    """
    position = machine.chunks.before(time_ms)
    start = machine.first if position < 0 else machine.chunks.offsets[position]
    reader = ChunkReader(machine, read, start)
    while True:
        # Whole chunks: all records of one have the same time.
        run = reader.next(1 << 62, 1 << 62)
        if run is None:
            return None
        if run.time_ms >= time_ms:
            return run.offset, run.time_ms
