# cython: annotation_typing=False
"""Blocks of a classic queue, ranges of their records that share a fate, and who holds them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from convoymq.kernels.batch import record
from convoymq.messages.record import traits_of
from convoymq.queues.classic.notes import NOTHING, Note

FLAG_EXPIRATION = 4
"""Flag of an ENQUEUE command: some record has a time limit of its own."""
FLAG_AGAIN = 16
"""Flag of an ENQUEUE command: a former master may have handed out its records."""
RECORD_HEADER = 32
"""Bytes in front of the body of a record in a log."""
ENDED_MAX = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Place of the body of a record of messages."""

    file: int
    offset: int
    length: int

    @property
    def start(self) -> int:
        """Returns the offset of the record."""
        return self.offset - RECORD_HEADER


class Block:
    """The records of one ENQUEUE command, in memory or in the queue's log."""

    __slots__ = (
        "bytes", "command", "count", "data", "length", "level", "live", "position", "time_ms",
        "transient", "where", "written",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes | None,
        command: int,
        length: int,
        count: int,
        position: int,
        size: int,
        time_ms: int,
        level: int = 0,
    ) -> None:
        self.data = data
        """The buffer that holds the command; None while the block is on disk only."""
        self.command = command
        """Offset of the command in `data`."""
        self.length = length
        """Length of the command in bytes."""
        self.count = count
        self.live = count
        """Records that are not settled."""
        self.position = position
        """Position of record 0 in the queue's history."""
        self.bytes = size
        """Body bytes of all records together."""
        self.time_ms = time_ms
        """Time when it came; of a log of before 0.4.0, when it was recovered."""
        self.level = level
        """Priority of all records."""
        self.transient = False
        """Goes to the log only to leave memory: a restart loses it."""
        self.where: Place | None = None
        """Place in the log, given by the shell."""
        self.written = False
        """The log has the bytes: they may leave memory."""

    @property
    def is_logged(self) -> bool:
        """Returns whether the log has it, or is to have it."""
        return self.where is not None or not self.transient

    def place(self) -> Place:
        """Returns its place in the log; it must be there."""
        assert self.where is not None, "the block is not in the log"
        return self.where


class Run:
    """Records [first, first + count) of a block."""

    __slots__ = ("acquired_count", "begins", "block", "count", "expires", "first", "note")

    def __init__(
        self,
        block: Block,
        first: int,
        count: int,
        acquired_count: int,
        expires: int,
        note: Note = NOTHING,
    ) -> None:
        assert count > 0
        self.block = block
        self.first = first
        self.count = count
        self.acquired_count = acquired_count
        """Number of times that these messages were handed out before."""
        self.expires = expires
        """Time in ms at which they expire; 0 = never."""
        self.note = note
        self.begins = False
        """True while no ready message of the block was taken that stood before them."""

    @property
    def position(self) -> int:
        """Returns the position of the first message."""
        return self.block.position + self.first

    def cut(self, first: int, count: int) -> Run:
        """Returns the part that starts `first` messages into the run."""
        assert first >= 0
        assert first + count <= self.count
        start = self.first + first
        return Run(self.block, start, count, self.acquired_count, self.expires, self.note)

    def split(self, count: int) -> tuple[Run, Run | None]:
        """Returns the first messages, and the others if there are some."""
        if count == self.count:
            return self, None
        return self.cut(0, count), self.cut(count, self.count - count)

    def body_bytes(self) -> int:
        """Returns the body bytes, divided in proportion when the block's messages differ."""
        return self.block.bytes * self.count // self.block.count


def runs_of(
    block: Block, dead: list[tuple[int, int]], handed_out: int, ttl_ms: int | None
) -> list[Run]:
    """Returns the runs of a block whose body is in memory, and counts what lives in it.

    Args:
        dead: record ranges (first, last) that are gone, ascending.
        handed_out: records below this were handed out before.
        ttl_ms: the queue's time for its messages.
    """
    made: list[Run] = []
    at = 0
    data = block.data
    assert data is not None
    flags = data[block.command + 5]
    single = flags & FLAG_EXPIRATION
    if flags & FLAG_AGAIN:
        handed_out = block.count
    expires = 0 if ttl_ms is None else block.time_ms + ttl_ms
    if not dead and not single and handed_out <= 0:
        whole = Run(block, 0, block.count, 0, expires)
        whole.begins = True
        return [whole]
    for first, last in [*dead, (block.count, block.count)]:
        if single:
            for i in range(at, first):
                own = traits_of(record(data, block.command, i)).expiration_ms
                times = [ms for ms in (own, ttl_ms) if ms is not None]
                until = block.time_ms + min(times) if times else 0
                made.append(Run(block, i, 1, int(i < handed_out), until))
        else:
            middle = min(max(handed_out, at), first)
            if middle > at:
                made.append(Run(block, at, middle - at, 1, expires))
            if first > middle:
                made.append(Run(block, middle, first - middle, 0, expires))
        at = last + 1
    block.live = sum(run.count for run in made)
    if made:
        made[0].begins = True
    return made


def noted(runs: list[Run], notes: Mapping[int, Note]) -> list[Run]:
    """Returns runs with the notes of their positions, cut where these differ."""
    made: list[Run] = []
    for run in runs:
        left: Run | None = run
        while left is not None:
            note = notes.get(left.position, NOTHING)
            count = 1
            while count < left.count and notes.get(left.position + count, NOTHING) == note:
                count += 1
            begins = left.begins
            part, left = left.split(count)
            part.begins, part.note = begins, note
            made.append(part)
    return made


def dead_in(block: Block, runs: list[Run]) -> list[int]:
    """Returns the positions (first, last, …) of a block that are in none of its runs."""
    dead: list[int] = []
    at = 0
    ends = [(run.first, run.first + run.count) for run in sorted(runs, key=lambda run: run.first)]
    for first, after in [*ends, (block.count, block.count)]:
        if first > at:
            dead += (block.position + at, block.position + first - 1)
        at = after
    return dead


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer and what is checked out to it."""

    session: int
    number: int
    tag: str
    window: int
    no_ack: bool
    exclusive: bool
    priority: int
    prefetch: int = 0
    arguments: dict[str, object] = field(default_factory=dict)
    next_id: int = 0
    outstanding: int = 0
    cancelled: bool = False
    limit: int = -1
    """Message id below which it gets messages; -1: its window alone says."""
    first_ids: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def room(self) -> int:
        """Returns how many messages may be handed out."""
        room = self.window - self.outstanding
        return room if self.limit < 0 else min(room, self.limit - self.next_id)

    def hold(self, run: Run) -> int:
        """Checks a run out and returns its first message id."""
        first = self.next_id
        self.next_id += run.count
        self.outstanding += run.count
        self.first_ids.append(first)
        self.runs.append(run)
        return first

    def between(self, first: int, end: int, runs_max: int) -> list[Run]:
        """Returns what is held under message ids first … end - 1, cut to them; at most `runs_max`
        runs."""
        ids, runs = self.first_ids, self.runs
        found: list[Run] = []
        for i in range(max(bisect_right(ids, first) - 1, 0), len(ids)):
            if ids[i] >= end or len(found) >= runs_max:
                break
            low = max(first - ids[i], 0)
            count = min(end - ids[i], runs[i].count) - low
            if count > 0:
                found.append(runs[i].cut(low, count))
        return found

    def release(self, first: int, last: int) -> list[Run]:
        """Takes message ids [first, last] out; ids that are not held are skipped."""
        ids, runs = self.first_ids, self.runs
        begin = max(bisect_right(ids, first) - 1, 0)
        if begin < len(ids) and ids[begin] + runs[begin].count <= first:
            begin += 1
        end = begin
        taken: list[Run] = []
        kept_ids: list[int] = []
        kept_runs: list[Run] = []
        while end < len(ids) and ids[end] <= last:
            base, run = ids[end], runs[end]
            low, high = max(base, first), min(base + run.count - 1, last)
            whole = high - low + 1 == run.count
            taken.append(run if whole else run.cut(low - base, high - low + 1))
            if low > base:
                kept_ids.append(base)
                kept_runs.append(run.cut(0, low - base))
            if high < base + run.count - 1:
                kept_ids.append(high + 1)
                kept_runs.append(run.cut(high + 1 - base, base + run.count - 1 - high))
            self.outstanding -= high - low + 1
            end += 1
        ids[begin:end] = kept_ids
        runs[begin:end] = kept_runs
        return taken


@dataclass(slots=True)
class Former:
    """Consumers of a former master of the queue."""

    session: int = 0
    """Session of the single active one, until it is back; 0 = none is waited for."""
    number: int = 0

    def choose(self, service: list[Consumer]) -> Consumer | None:
        """Returns the consumer that becomes the active one; None: there is none yet."""
        known = (self.session, self.number)
        for consumer in service:
            if not self.session or (consumer.session, consumer.number) == known:
                self.session = 0
                return consumer
        return None


class Session:
    """One channel's command stream."""

    __slots__ = ("answered_seq", "consumers", "published_seq", "refused_seq", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.consumers: dict[int, Consumer] = {}
        self.published_seq = 0
        """Last command whose messages the queue got in an earlier life of the session."""
        self.refused_seq = 0
        """Last command whose messages the queue refused."""
        self.answered_seq = 0
        """Last question that was answered in an earlier life of the session."""


class Ended(dict[int, None]):
    """The sessions that ended last: late frames of a broken link do not begin them anew."""

    def add(self, session: int) -> None:
        """A session has ended."""
        self[session] = None
        if len(self) > ENDED_MAX:
            del self[next(iter(self))]
