# cython: annotation_typing=False
"""The backing queue of a classic queue: its ready messages, in memory and on disk (ADR 0126).

A *line* holds the ready messages of one priority, in the order of their positions:

    returned   runs that were handed out and came back; all are older than the others
    waiting    runs and *spans*, oldest first

A run is α (its block is in memory) or β (its block is on disk only). A span is a part of one file
of the log; nothing of its messages is in memory (δ). RabbitMQ's names for the parts of `waiting`:

    q4, q3   α and β in front of the first span, and what came back
    delta    messages in spans
    q2, q1   β and α behind the first span

Memory is left from the newest side (`page_out`), and comes back at the head, a batch of the log at
a time (`head`). A run goes into a span if it is written, and only together with all runs of its
block that are in the line: then a span is what lies in its part of the file, between its first and
last position, and was not dead when the queue was opened.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, pairwise

from convoymq.kernels.classic_records import level_of
from convoymq.queues.classic.notes import Note
from convoymq.queues.classic.positions import PositionSet
from convoymq.queues.classic.runs import Block, Place, Run, noted, runs_of

RUN_BYTES = 512
"""Memory of a run and its block, without the messages."""
SMALL_BYTES_MAX = 4096
"""A block of this size takes about as much memory as what is known of it: it leaves whole."""
HEAD_RUNS = 8
"""Runs at the head of a line that never leave memory."""


class Span:
    """Messages of a line in one file of the log, of which nothing is in memory."""

    __slots__ = ("bytes", "count", "end", "file", "first", "last", "start")

    def __init__(
        self, file: int, start: int, end: int, first: int, last: int, count: int, size: int
    ) -> None:
        self.file = file
        self.start = start
        """Offset of the first record."""
        self.end = end
        """Offset behind the last record."""
        self.first = first
        """No message has a position below this."""
        self.last = last
        self.count = count
        self.bytes = size
        """Bytes of the bodies."""

    @property
    def position(self) -> int:
        """Returns the position of the first message."""
        return self.first


Item = Run | Span


@dataclass(slots=True)
class Stored:
    """A record of messages that was read back."""

    position: int
    place: Place
    data: bytes
    command: int
    time_ms: int
    ttl_ms: int | None
    """The queue's time for these messages; None = they have no limit."""


ReadBatch = Callable[[int, int, int], tuple[list[Stored], int]]
"""(file, offset, end) -> some of the records of messages from there on, and the offset behind them.
Damaged ones are left out. Raises OSError."""


def no_log(_file: int, _offset: int, _end: int) -> tuple[list[Stored], int]:
    """Reads nothing: the queue has no log."""
    raise AssertionError("nothing was paged out")


class Line:
    """The ready messages of one priority."""

    __slots__ = ("bytes", "count", "delivered_to", "level", "returned", "waiting")

    def __init__(self, level: int) -> None:
        self.level = level
        self.returned: list[Run] = []
        self.waiting: deque[Item] = deque()
        self.count = 0
        self.bytes = 0
        self.delivered_to = 0
        """Positions below this were handed out at least once."""

    def head(self) -> Run:
        """Returns the first run; it is in memory."""
        run = (self.returned or self.waiting)[0]
        assert isinstance(run, Run)
        return run

    def runs(self) -> Iterator[Run]:
        """Yields the runs that are in memory, oldest first."""
        yield from self.returned
        for item in self.waiting:
            if isinstance(item, Run):
                yield item


@dataclass(slots=True)
class Recovered:
    """Facts about the messages that a former run of the node left."""

    upto: int = 0
    """Their positions are below this."""
    gone: PositionSet | None = None
    """Positions below it that are settled or transient."""
    handed_out: dict[int, int] | None = None
    """Level -> positions below this were handed out."""
    now_ms: int = 0
    """Time of the recovery: no message came later."""
    notes: dict[int, Note] = field(default_factory=dict)
    """Position -> what consumers have said of a message."""


class Backing:
    """The ready messages of a queue.

    Args:
        level_max: highest priority; 0 = the queue has none.
        read: reads what was paged out.
    """

    def __init__(self, level_max: int = 0, read: ReadBatch = no_log) -> None:
        self.level_max = level_max
        self.lines = [Line(level) for level in range(level_max + 1)]
        self.count = 0
        self.bytes = 0
        self.memory_bytes = 0
        """Bytes of all blocks of the queue that are in memory."""
        self.recovered = Recovered()
        self.may_expire = False
        """Some message has a time limit."""
        self.missing: list[tuple[int, int]] = []
        """(file, messages) that could not be read back since the shell last looked; a negative
        number of them can be read again."""
        self._occupied = 0
        """Bit n: line n is not empty."""
        self._paged = False
        """Something that is ready may be on disk only."""
        self._read = read

    # --- the head --------------------------------------------------------------------------

    def top(self) -> Line | None:
        """Returns the line of the next message, which is in memory then; None = there is none.
        Raises StorageFault and OSError."""
        while self._occupied:
            line = self.lines[self._occupied.bit_length() - 1]
            if line.returned:
                return line
            if line.waiting and (isinstance(line.waiting[0], Run) or self._fill(line)):
                return line
            assert not line.count, "a line counts messages that it does not have"
            self._check_empty(line)
        return None

    def bottom(self) -> Line | None:
        """Returns the lowest line, whose head is in memory then; None = there is no message."""
        while self._occupied:
            line = self.lines[(self._occupied & -self._occupied).bit_length() - 1]
            if line.returned or (line.waiting and self.head_is_here(line)):
                return line
            assert not line.count, "a line counts messages that it does not have"
            self._check_empty(line)
        return None

    def occupied(self) -> list[Line]:
        """Returns the lines with messages, lowest first."""
        found = self._occupied
        lines: list[Line] = []
        while found:
            low = found & -found
            lines.append(self.lines[low.bit_length() - 1])
            found ^= low
        return lines

    def head_is_here(self, line: Line) -> bool:
        """Reads the head of `waiting` back if it is on disk only; False = the line is empty."""
        return bool(line.waiting) and (isinstance(line.waiting[0], Run) or self._fill(line))

    def take(self, line: Line, limit: int) -> Run:
        """Takes at most `limit` messages from the front of a line whose head is in memory."""
        assert limit > 0
        run = line.head()
        if run.count <= limit:
            return self.take_from(line, line.returned or line.waiting)
        (line.returned or line.waiting)[0] = run.cut(limit, run.count - limit)
        return self._taken(line, run.cut(0, limit))

    def take_from(self, line: Line, source: list[Run] | deque[Item]) -> Run:
        """Takes the first run of `returned` or `waiting`, which is in memory."""
        run = source[0]
        assert isinstance(run, Run)
        del source[0]
        return self._taken(line, run)

    def _taken(self, line: Line, run: Run) -> Run:
        size = run.body_bytes()
        line.count -= run.count
        line.bytes -= size
        self.count -= run.count
        self.bytes -= size
        self._check_empty(line)
        return run

    def _check_empty(self, line: Line) -> None:
        if not line.count:
            # Proportions of blocks do not add up to the whole.
            self.bytes -= line.bytes
            line.bytes = 0
            self._occupied &= ~(1 << line.level)
            assert not line.returned
            assert not line.waiting

    # --- coming ------------------------------------------------------------------------------

    def push(self, run: Run) -> None:
        """Adds the newest messages of a line."""
        self._count(self.lines[run.block.level], run.count, run.body_bytes())
        self.lines[run.block.level].waiting.append(run)

    def give_back(self, run: Run) -> None:
        """Adds messages that were handed out, at their old place."""
        self._count(self.lines[run.block.level], run.count, run.body_bytes())
        insort(self.lines[run.block.level].returned, run, key=position_of)
        self._paged = self._paged or run.block.data is None

    def extend(self, level: int, items: list[Item], count: int, size: int) -> None:
        """Adds what recovery found, oldest first."""
        if count:
            self._count(self.lines[level], count, size)
            self.lines[level].waiting.extend(items)
            self._paged = True

    def _count(self, line: Line, count: int, size: int) -> None:
        line.count += count
        line.bytes += size
        self.count += count
        self.bytes += size
        self._occupied |= 1 << line.level

    def clear(self) -> Iterator[Item]:
        """Yields everything that is here, and empties the lines."""
        for line in self.occupied():
            yield from line.returned
            yield from line.waiting
            line.returned.clear()
            line.waiting.clear()
            self.count -= line.count
            line.count = 0
            self._check_empty(line)

    # --- paging ------------------------------------------------------------------------------

    @property
    def run_count(self) -> int:
        """Returns the number of runs and spans in memory."""
        return sum(len(line.returned) + len(line.waiting) for line in self.occupied())

    @property
    def footprint(self) -> int:
        """Returns about how many bytes of memory the messages take."""
        return self.memory_bytes + RUN_BYTES * self.run_count

    def page_out(self, keep_bytes: int, drop_body: Callable[[Block], None]) -> None:
        """Leaves memory, newest messages first, until `keep_bytes` stay: first the bodies of large
        blocks (β), then whole messages (δ)."""
        self._paged = True
        excess = self.footprint - keep_bytes
        for run in self.newest():
            block = run.block
            if excess <= 0:
                return
            if block.written and block.data is not None and block.length > SMALL_BYTES_MAX:
                excess -= block.length
                drop_body(block)
        for line in self.occupied():
            excess -= self._page_out(line, excess, drop_body)
            if excess <= 0:
                return

    def newest(self) -> Iterator[Run]:
        """Yields the runs that may leave memory, newest first."""
        for line in self.occupied():
            for item in islice(reversed(line.waiting), max(0, len(line.waiting) - HEAD_RUNS)):
                if isinstance(item, Run):
                    yield item

    def _page_out(self, line: Line, excess: int, drop_body: Callable[[Block], None]) -> int:
        """Turns the newest runs of a line into spans; returns how many bytes that gave."""
        behind: list[Item] = []
        """Items behind the place where paging is, newest first."""
        gained = 0
        waiting = line.waiting
        while gained < excess and len(waiting) > HEAD_RUNS:
            item = waiting.pop()
            if isinstance(item, Span):
                behind.append(item)
                self._merge(behind)
                continue
            group = [item]
            while not group[-1].begins and waiting and _is_part(waiting[-1], item.block):
                run = waiting.pop()
                assert isinstance(run, Run)
                group.append(run)
            block = item.block
            if not group[-1].begins or not block.written or block.where is None:
                behind += group
                continue
            gained += RUN_BYTES * len(group) + (block.length if block.data is not None else 0)
            drop_body(block)
            place = block.where
            behind.append(
                Span(
                    place.file,
                    place.start,
                    place.offset + place.length,
                    block.position,
                    block.position + block.count - 1,
                    sum(run.count for run in group),
                    sum(run.body_bytes() for run in group),
                )
            )
            self._merge(behind)
        waiting.extend(reversed(behind))
        return gained

    @staticmethod
    def _merge(behind: list[Item]) -> None:
        """Joins the last two items, an older span and one behind it, if they lie so in one file."""
        if len(behind) < 2:
            return
        older, newer = behind[-1], behind[-2]
        if not isinstance(older, Span) or not isinstance(newer, Span):
            return
        if older.file == newer.file and older.end <= newer.start:
            newer.start, newer.first = older.start, older.first
            newer.count += older.count
            newer.bytes += older.bytes
            behind.pop()

    def _fill(self, line: Line) -> bool:
        """Reads the span at the head of a line back, a part of it; False = the line is empty."""
        while line.waiting:
            span = line.waiting[0]
            if isinstance(span, Run):
                return True
            runs = self._take_batch(line, span)
            # Behind the last of its messages are copies, and what is others'.
            if span.start >= span.end or not span.count:
                line.waiting.popleft()
                self._give_up(line, span)
            line.waiting.extendleft(reversed(runs))
        return False

    def load_file(self, file: int) -> None:
        """Reads everything back that lies in a file."""
        for line in self.occupied():
            if not any(isinstance(item, Span) and item.file == file for item in line.waiting):
                continue
            items: deque[Item] = deque()
            for item in line.waiting:
                if isinstance(item, Run) or item.file != file:
                    items.append(item)
                    continue
                while item.start < item.end:
                    items.extend(self._take_batch(line, item))
                self._give_up(line, item)
            line.waiting = items
            self._check_empty(line)

    def _take_batch(self, line: Line, span: Span) -> list[Run]:
        runs: list[Run] = []
        found, span.start = self._read(span.file, span.start, span.end)
        for stored in found:
            made = self._runs_in(line, span, stored)
            if not made:
                continue
            block = made[0].block
            self.memory_bytes += block.length
            span.first = block.position + block.count
            for run in made:
                span.count -= run.count
                span.bytes -= run.body_bytes()
            runs += made
        if span.count < 0:
            # What could not be read before, and was given up, can be read now.
            self._give_up(line, span)
        return runs

    def _give_up(self, line: Line, span: Span) -> None:
        """Stops counting what a span was to have and its file does not; begins to count what the
        file has and the span was not to have (a negative count)."""
        line.count -= span.count
        line.bytes -= span.bytes
        self.count -= span.count
        self.bytes -= span.bytes
        if span.count:
            self.missing.append((span.file, span.count))
        span.count = span.bytes = 0

    def _runs_in(self, line: Line, span: Span, stored: Stored) -> list[Run]:
        """Returns the messages of a record that belong to a span."""
        count = int.from_bytes(stored.data[stored.command + 24 : stored.command + 28], "little")
        position = stored.position
        if position + count <= span.first or position > span.last:
            # Of another line or span, or a copy that compaction made.
            return []
        if self.level_max and line.level != level_of(stored.data, stored.command, self.level_max):
            return []
        runs = [
            run
            for run in self.recovered_runs(stored, count, line.level)
            # What is missing was moved by compaction.
            if span.first <= run.position <= span.last
        ]
        if runs:
            runs[0].begins = True
            runs[0].block.live = sum(run.count for run in runs)
        return runs

    def recovered_runs(self, stored: Stored, count: int, level: int) -> list[Run]:
        """Returns the messages of a record that are not dead."""
        known = self.recovered
        position, time_ms = stored.position, stored.time_ms
        size = int.from_bytes(stored.data[stored.command + 32 : stored.command + 40], "little")
        dead: list[tuple[int, int]] = []
        split = position
        if position < known.upto:
            # A clock that was set back makes no message live longer.
            time_ms = min(time_ms or known.now_ms, known.now_ms)
            assert known.gone is not None
            assert known.handed_out is not None
            dead = known.gone.within(position, count)
            split = known.handed_out.get(level, 0)
        block = Block(
            stored.data, stored.command, stored.place.length, count, position, size, time_ms, level
        )
        block.where = stored.place
        block.written = True
        runs = runs_of(block, dead, split - position, stored.ttl_ms)
        return noted(runs, known.notes) if known.notes and position < known.upto else runs

    # --- looking -----------------------------------------------------------------------------

    def walk(self, level: int, position: int) -> Iterator[Run]:
        """Yields the ready messages in the order in which they are handed out, from a place on; it
        changes nothing. Raises StorageFault and OSError."""
        for line in reversed(self.occupied()):
            if line.level > level:
                continue
            yield from self._walk_line(line, position if line.level == level else 0)

    def by_position(self, since: int = 0) -> Iterator[Run]:
        """As `walk` all messages from a position on, in the order in which they were published. The
        first run may begin before it."""
        return merge(*(self._walk_line(line, since) for line in self.occupied()), key=position_of)

    def _walk_line(self, line: Line, since: int) -> Iterator[Run]:
        for item in [*line.returned, *line.waiting]:
            if isinstance(item, Run):
                if item.position + item.count > since:
                    yield item
            elif item.last >= since:
                yield from (r for r in self._read_all(line, item) if r.position + r.count > since)

    def _read_all(self, line: Line, span: Span) -> Iterator[Run]:
        at = span.start
        while at < span.end:
            found, at = self._read(span.file, at, span.end)
            for stored in found:
                yield from self._runs_in(line, span, stored)

    def check(self) -> None:
        """Asserts what the module text promises. Cost: O(runs)."""
        for line in self.lines:
            items: list[Item] = [*line.returned, *line.waiting]
            for before, after in pairwise(items):
                assert _last_of(before) < after.position
            assert line.count == sum(item.count for item in items)
            assert bool(self._occupied >> line.level & 1) == bool(line.count)
            assert all(run.block.level == line.level for run in line.runs())
            if not self._paged:
                assert all(isinstance(i, Run) and i.block.data is not None for i in items)
        assert self.count == sum(line.count for line in self.lines)

    def lengths(self) -> dict[str, int]:
        """Returns the messages in RabbitMQ's five parts. Cost: O(runs) while something is paged
        out: a queue that is shown often holds nobody up."""
        found = dict.fromkeys(("q1", "q2", "delta", "q3", "q4"), 0)
        if not self._paged:
            return found | {"q4": self.count}
        for line in self.occupied():
            behind = False
            for item in [*line.returned, *line.waiting]:
                if isinstance(item, Span):
                    behind = True
                    found["delta"] += item.count
                elif item.block.data is not None:
                    found["q1" if behind else "q4"] += item.count
                else:
                    found["q2" if behind else "q3"] += item.count
        self._paged = found["q1"] + found["q4"] < self.count
        return found


def position_of(item: Item) -> int:
    """Returns the position of the first message."""
    return item.position


def _last_of(item: Item) -> int:
    return item.last if isinstance(item, Span) else item.position + item.count - 1


def _is_part(item: Item, block: Block) -> bool:
    return isinstance(item, Run) and item.block is block
