"""Pages of the ready messages of a quorum queue, in the order of delivery, by a filter (ADR 0053).

A page is a bounded piece of work: it lists at most RUNS_MAX runs at once, looks at most at
EXAMINED_MAX messages, and lets others run in between. A cursor says where the next page begins:

| where          | cursor                                      | what stays ready meanwhile        |
|----------------|---------------------------------------------|-----------------------------------|
| fresh, a level | place behind the message that was seen last | is seen once                      |
| what came back | the same, or how many messages stood there  | is seen once, unless the last one |
|                | before, when that one has left              | seen has left, with others        |

Positions of further pages count on from those of the first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from convoymq.kernels import batch
from convoymq.kernels.entries import Entry
from convoymq.messages.deaths import History, Origin, history_of
from convoymq.messages.record import cut_body, read_stored
from convoymq.model.errors import BrokerError, PeerError
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.quorum.backlog import Backlog
from convoymq.queues.quorum.levels import LEVEL_DEFAULT
from convoymq.queues.quorum.runs import LOW, Fifo, Run

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue

RUNS_MAX = 4096
EXAMINED_MAX = 16_384
ROWS_MAX = 4096
PAGE_BYTES_MAX = 2 << 20
"""Of records that are shown; one always fits."""
YIELD_MESSAGES = 256
SCANNED_YIELD = 65_536
"""Runs that are passed over before others have their turn."""

RETURNED, FRESH, REQUEUED, BEGINNING, MIXED = -1, -2, -3, -4, -5
"""Sources of messages, none yet, and an order of several of them; a level is its number."""

Row: TypeAlias = tuple[int, int, int, int, int, int, int, bytes | None, list[Origin] | None]
"""(entry index, command offset, record, position, time in ms, times handed out before, failed ones
of these, record or None, deaths)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Filter of messages; what is None is not looked at."""

    position_from: int = 1
    position_to: int | None = None
    time_from: int | None = None
    """Earliest time when the queue got it, in ms since the epoch."""
    time_to: int | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    """Name -> value, or its text."""
    header_exists: tuple[str, ...] = ()
    first_queue: str | None = None
    first_reason: str | None = None
    last_queue: str | None = None
    last_reason: str | None = None

    @property
    def reads_deaths(self) -> bool:
        """Returns whether deaths are asked for."""
        asked = (self.first_queue, self.first_reason, self.last_queue, self.last_reason)
        return any(each is not None for each in asked)

    @property
    def reads_records(self) -> bool:
        """Returns whether messages have to be looked at."""
        return bool(self.headers or self.header_exists or self.reads_deaths)

    @property
    def reads_entries(self) -> bool:
        """Returns whether the log has to be looked at."""
        return self.reads_records or self.time_from is not None or self.time_to is not None


class Cursor(NamedTuple):
    """Beginning of a page."""

    position: int
    source: int
    before: int
    """Messages of the source that stand before it."""
    entry: int
    command: int
    record: int
    """Place behind the message that was seen last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Request for a page."""

    filter: Filter
    cursor: Cursor | None = None
    rows: int = 100
    body_bytes: int | None = None
    """Most bytes shown of a body; None: only where messages are."""

    def pack(self) -> object:
        """Plain values, for another node."""
        return msgspec.to_builtins(self)


def question_of(packed: object) -> Question:
    """Returns the question of `pack`. Raises PeerError."""
    try:
        return msgspec.convert(packed, Question)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed question about messages: {error}") from error


class Page(NamedTuple):
    """Answer with one page."""

    rows: list[Row]
    cursor: Cursor | None
    """None: there is no more."""
    examined: int
    ready: int
    """Messages that are ready."""


def page_of(packed: object) -> Page:
    """Returns the page of `plain_page`. Raises PeerError."""
    try:
        return msgspec.convert(packed, Page)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed answer about messages: {error}") from error


def plain_page(page: Page) -> object:
    """Plain values, for another node."""
    return msgspec.to_builtins(page, builtin_types=(bytes,))


class _Segment(NamedTuple):
    """Messages begin … begin + messages - 1 of a source."""

    source: int
    fifo: Fifo
    begin: int
    messages: int
    ordered: bool
    """All of its FIFO, in the order of the log."""


def _segments(backlog: Backlog) -> list[_Segment]:
    """Returns the ready messages, in the order of delivery."""
    made = [_Segment(RETURNED, backlog.returned, 0, backlog.returned.messages, False)]
    levels = backlog.levels.by_level().items()
    beside = [_Segment(level, fifo, 0, fifo.messages, True) for level, fifo in levels]
    made += [each for each in beside if each.source > LEVEL_DEFAULT]
    fresh, requeued = backlog.fresh, backlog.requeued
    groups = requeued.groups()
    left = backlog.entered() - fresh.messages
    done = back = 0
    for entered, count in groups:
        upto = min(max(done, entered - left), fresh.messages)
        made.append(_Segment(FRESH, fresh, done, upto - done, False))
        made.append(_Segment(REQUEUED, requeued, back, count, False))
        done, back = upto, back + count
    made.append(_Segment(FRESH, fresh, done, fresh.messages - done, not groups))
    made += [each for each in beside if each.source < LEVEL_DEFAULT]
    return [each for each in made if each.messages]


class _Listed(NamedTuple):
    source: int
    before: int
    """Messages of the source before the run."""
    run: Run


async def _listed(backlog: Backlog, cursor: Cursor) -> tuple[list[_Listed], int, bool]:
    """Returns (the next runs, position of the first, whether these are all)"""
    if backlog.two_classes or backlog.levels.restored.messages:
        return _listed_mixed(backlog, cursor)
    segments = _segments(backlog)
    first, skip = await _start(segments, cursor)
    position = cursor.position
    made: list[_Listed] = []
    for number in range(first, len(segments)):
        segment = segments[number]
        room = RUNS_MAX - len(made)
        if room <= 0:
            return made, position, False
        begins = number == first
        if segment.ordered and (not begins or skip < 0):
            place = (cursor.entry, cursor.command, cursor.record) if begins else (0, 0, 0)
            runs = segment.fifo.runs_from(*place, segment.fifo.messages, room)
            at = cursor.before if begins else 0
            for run in runs:
                run = _from_place(run, place)
                made.append(_Listed(segment.source, at, run))
                at += run[3]
            whole = len(runs) < room
        else:
            start = segment.begin + (skip if begins else 0)
            end = segment.begin + segment.messages
            whole = await _scan(segment, start, end, room, made)
        if not whole:
            return made, position, False
    return made, position, True


def _listed_mixed(backlog: Backlog, cursor: Cursor) -> tuple[list[_Listed], int, bool]:
    """As `_listed`, where messages are at their places among others, or in two classes: by
    positions, which move when messages leave. Cost: O(runs)."""
    made: list[_Listed] = []
    before = 0
    for run in chain(backlog.returned.runs(), backlog.order.runs()):
        if len(made) >= RUNS_MAX:
            return made, cursor.position, False
        skip = max(0, cursor.position - 1 - before)
        if skip < run[3]:
            part = (*run[:2], run[2] + skip, run[3] - skip, *run[4:])
            made.append(_Listed(MIXED, before + skip, part))
        before += run[3]
    return made, cursor.position, True


async def _start(segments: list[_Segment], cursor: Cursor) -> tuple[int, int]:
    """Returns (number of the first segment, messages of it that are passed over; -1 = up to a
    place)"""
    if cursor.source in (BEGINNING, MIXED):
        # A position, counted from the first message.
        left = cursor.position - 1
        for number, segment in enumerate(segments):
            if left < segment.messages:
                return number, left
            left -= segment.messages
        return len(segments), 0
    behind = _rank(cursor.source)
    for number, segment in enumerate(segments):
        if segment.source != cursor.source:
            if _rank(segment.source) > behind:
                return number, 0
        elif segment.ordered:
            return number, -1
        else:
            # What was seen last is the message before this one.
            before = await _found(segment, cursor) - segment.begin
            if before < segment.messages:
                return number, max(0, before)
            if before == segment.messages:
                return number + 1, 0
    return len(segments), 0


def _rank(source: int) -> int:
    """Returns the rank of a source: what is delivered later has a higher one; what came to the tail
    stands among the fresh."""
    if source == RETURNED:
        return -100
    return 0 if source in (FRESH, REQUEUED) else LEVEL_DEFAULT - source


async def _found(segment: _Segment, cursor: Cursor) -> int:
    """Returns the number of messages of the source that stand before what comes behind the one that
    was seen last. What is fresh lies in the order of the log; elsewhere one that has left says
    nothing."""
    words, stride = segment.fifo.words()
    seen = (cursor.entry, cursor.command)
    before = 0
    for number, at in enumerate(range(0, len(words), stride)):
        place, count = words[at + 1], words[at + 2] >> 32
        skip = cursor.record - (place & LOW)
        if (words[at], place >> 32) == seen and 0 < skip <= count:
            return before + skip
        if segment.source == FRESH and (words[at], place >> 32, place & LOW) >= (
            *seen,
            cursor.record,
        ):
            return before
        before += count
        if not (number + 1) % SCANNED_YIELD:
            await asyncio.sleep(0)
    return before if segment.source == FRESH else cursor.before


async def _scan(segment: _Segment, start: int, end: int, room: int, made: list[_Listed]) -> bool:
    """Appends messages start … end - 1 of a source, in at most `room` runs; whether that is all."""
    words, stride = segment.fifo.words()
    counted = segment.fifo.counted
    before = 0
    for number, at in enumerate(range(0, len(words), stride)):
        if before >= end:
            break
        amount = words[at + 2]
        count = amount >> 32
        low, high = max(start - before, 0), min(end - before, count)
        if low < high:
            if not room:
                return False
            room -= 1
            place, counts = words[at + 1], words[at + 3] if counted else 0
            run = (words[at], place >> 32, (place & LOW) + low, high - low, amount & LOW,
                   counts >> 32, counts & LOW, 0)  # fmt: skip
            made.append(_Listed(segment.source, before + low, run))
        before += count
        if not (number + 1) % SCANNED_YIELD:
            await asyncio.sleep(0)
    return True


def _from_place(run: Run, place: tuple[int, int, int]) -> Run:
    """Returns a run without what stands before a place."""
    skip = place[2] - run[2] if run[:2] == place[:2] else 0
    return run if skip <= 0 else (*run[:2], run[2] + skip, run[3] - skip, *run[4:])


async def page(queue: QuorumQueue, machine: QuorumMachine, question: Question) -> Page:
    """Answers a question from this node's replica. What leaves meanwhile is left out."""
    wanted = question.filter
    cursor = question.cursor or Cursor(wanted.position_from, BEGINNING, 0, 0, 0, 0)
    ready = machine.backlog.ready()
    listed, position, complete = await _listed(machine.backlog, cursor)
    reading = _Reading(queue, question)
    examined = 0
    for source, before, run in listed:
        for i in range(run[3]):
            if wanted.position_to is not None and position > wanted.position_to:
                return Page(reading.rows, None, examined, ready)
            if examined >= EXAMINED_MAX or reading.is_full:
                return Page(reading.rows, cursor, examined, ready)
            reading.look_at(run, run[2] + i, position)
            position += 1
            examined += 1
            cursor = Cursor(position, source, before + i + 1, run[0], run[1], run[2] + i + 1)
            if not examined % YIELD_MESSAGES:
                await asyncio.sleep(0)
    return Page(reading.rows, None if complete else cursor, examined, ready)


class _Reading:
    """Reads messages, and keeps those that are wanted."""

    def __init__(self, queue: QuorumQueue, question: Question) -> None:
        self.rows: list[Row] = []
        self._queue = queue
        self._filter = question.filter
        self._rows_max = max(1, min(question.rows, ROWS_MAX))
        self._body_bytes = question.body_bytes
        self._bytes = 0
        self._index = 0
        self._entry: Entry | None = None

    @property
    def is_full(self) -> bool:
        """Returns whether the page ends."""
        return len(self.rows) >= self._rows_max or self._bytes >= PAGE_BYTES_MAX

    def look_at(self, run: Run, number: int, position: int) -> None:
        """Takes a message into the page if it is wanted."""
        index, offset = run[0], run[1]
        shown: bytes | None = None
        deaths: list[Origin] | None = None
        time_ms = 0
        if self._filter.reads_entries or self._body_bytes is not None:
            if index != self._index:
                self._index, self._entry = index, self._queue.entry(index)
            entry = self._entry
            if entry is None:
                # It has left the queue since it was listed.
                return
            time_ms = entry.time_ms
            if not _in_range(time_ms, self._filter.time_from, self._filter.time_to):
                return
            if self._filter.reads_records or self._body_bytes is not None:
                found = self._read(batch.record(entry.data, offset, number))
                if found is None:
                    return
                shown, deaths = found
        self._bytes += len(shown) if shown is not None else 0
        self.rows.append((index, offset, number, position, time_ms, run[5], run[6], shown, deaths))

    def _read(self, record: bytes) -> tuple[bytes | None, list[Origin] | None] | None:
        """Returns (what is shown of a record, its deaths); None = it is not wanted."""
        try:
            message = read_stored(record)
            content, headers = message.content, message.headers
        except BrokerError:
            # Nobody can read it, but it can be seen, and deleted.
            content, headers = b"", EMPTY
        history = history_of(content, headers) if content else None
        if not matches(self._filter, headers, history):
            return None
        if self._body_bytes is None:
            return None, None
        deaths = (
            None if history is None else [history.first.for_people(), history.last.for_people()]
        )
        return cut_body(record, self._body_bytes), deaths


def record_at(entry: Entry, offset: int, number: int) -> bytes | None:
    """Returns the record of a message that an entry brought; None: there is none at that place."""
    for kind, _, _, _, count, _, at, _ in batch.commands(entry.data):
        if at == offset and kind == batch.CMD_ENQUEUE and 0 <= number < count:
            return batch.record(entry.data, offset, number)
    return None


def _in_range(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def matches(wanted: Filter, headers: Table, history: History | None) -> bool:
    """Returns whether a message with these headers and deaths is wanted."""
    if wanted.reads_deaths:
        if history is None:
            return False
        pairs = (
            (wanted.first_queue, history.first.queue),
            (wanted.first_reason, history.first.reason),
            (wanted.last_queue, history.last.queue),
            (wanted.last_reason, history.last.reason),
        )
        if any(asked is not None and asked != found for asked, found in pairs):
            return False
    if not (wanted.headers or wanted.header_exists):
        return True
    known = headers.to_plain()
    if any(name not in known for name in wanted.header_exists):
        return False
    return all(
        name in known and (known[name] == value or _as_text(known[name]) == value)
        for name, value in wanted.headers.items()
    )


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
