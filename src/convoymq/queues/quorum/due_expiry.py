"""Expiry by due time: expired messages leave a quorum queue wherever they stand (ADR 0043).

The setting `expire_by_due`. Without it a message leaves when it has expired and is next; that stays
so, whatever the setting, because nothing that has expired may be handed out. With it a *sweep* at
the beginning of an entry takes out what has expired behind others: when some is known to have, and
SWEEP_MS after the sweep before at the earliest.

Work of an entry is bounded: at most SWEEP_RUNS_MAX runs leave, the rest with the next entries. What
was never handed out lies in segments (`SegmentedFifo`), of which a sweep looks at those that have
something to give. What came back, and what is blocked in groups, is looked at as a whole, and while
it is more than SCANNED_RUNS_MAX runs only at its head.

What waits for a time (`Waiting`) expires no earlier than it is due; what somebody holds does not.

Invariants: `wanted_ms` is not later than the first time at which a sweep would find something; it
and `swept_ms` depend on the log alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from convoymq.model.words import words_to_bytes
from convoymq.queues.quorum.groups import Groups
from convoymq.queues.quorum.levels import LEVEL_BITS, due_of
from convoymq.queues.quorum.runs import LOW, MARKED, Fifo, Run, Tail, widened

if TYPE_CHECKING:
    from convoymq.queues.quorum.backlog import Backlog

SWEEP_MS = 100
"""Least time between two sweeps that find something."""
SWEEP_RUNS_MAX = 4096
"""So many runs may leave with one entry."""
SCANNED_RUNS_MAX = 16_384
"""So many runs of one container without segments are looked at."""
LOOK_AGAIN_MS = 1_000
"""Pause, when a container is too large to be looked at."""
SEGMENT_RUNS = 1024
STRIDE = 4
"""Words of a run with a mark that was never handed out."""


class _Segment:
    """Neighbouring runs of a FIFO."""

    __slots__ = ("due_ms", "fifo", "runs", "whole")

    def __init__(self) -> None:
        self.fifo = Fifo(False)
        self.runs = 0
        #: When the first of them expires; 0 = none does.
        self.due_ms = 0
        #: Nothing was taken out of its middle.
        self.whole = True

    def close(self) -> None:
        """Gives back the room for more."""
        words, _ = self.fifo.words()
        self.fifo.replace(words, self.fifo.messages, self.fifo.size)


class SegmentedFifo(Fifo):
    """A FIFO of fresh runs from which those that have expired can be taken at the cost of a segment
    each, wherever they stand. Runs lie in the order of the log."""

    __slots__ = ("_segments",)

    def __init__(self) -> None:
        Fifo.__init__(self, False)
        self._segments: list[_Segment] = []

    @classmethod
    def of(cls, fifo: Fifo) -> SegmentedFifo:
        """Makes one with the runs of another FIFO of fresh runs. Cost: O(runs)."""
        made = cls()
        made.replace(_marked_words(fifo), fifo.messages, fifo.size)
        return made

    # ---------------------------------------------------------------- as of Fifo

    def push(
        self,
        index: int,
        offset: int,
        first: int,
        count: int,
        size: int,
        acquired_count: int,
        failed_delivery_count: int,
        mark: int = 0,
    ) -> None:
        """Appends a run that was never handed out."""
        segments = self._segments
        if not segments or segments[-1].runs >= SEGMENT_RUNS:
            if segments:
                segments[-1].close()
            segments.append(_Segment())
        segment = segments[-1]
        segment.fifo.push(
            index, offset, first, count, size, acquired_count, failed_delivery_count, mark
        )
        segment.runs += 1
        due_ms = due_of(mark)
        if due_ms and (not segment.due_ms or due_ms < segment.due_ms):
            segment.due_ms = due_ms
        self.messages += count
        self.size += size

    def take(self, limit: int) -> Run:
        """Removes at most `limit` messages from the head run. The queue must not be empty."""
        fifo = self._segments[0].fifo
        run = fifo.take(limit)
        if not fifo.messages:
            del self._segments[0]
        self.messages -= run[3]
        self.size -= run[4]
        return run

    @property
    def has_marks(self) -> bool:
        """True if some run may have a mark."""
        return bool(self._segments)

    def head_mark(self) -> int:
        """Returns the mark of the oldest run; 0 as well when there is none."""
        return self._segments[0].fifo.head_mark() if self._segments else 0

    def head_place(self) -> tuple[int, int]:
        """Returns (entry index, offset above record) of the oldest message."""
        return self._segments[0].fifo.head_place()

    def head_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the oldest run."""
        return self._segments[0].fifo.head_amount()

    def first_index(self) -> int:
        """Returns the entry index of the oldest run."""
        return self._segments[0].fifo.first_index()

    def last_index(self) -> int:
        """Returns the entry index of the youngest run."""
        return self._segments[-1].fifo.last_index()

    def clear(self) -> None:
        """Drops everything."""
        self._segments.clear()
        self.messages = 0
        self.size = 0

    def words(self) -> tuple[array[int], int]:
        """Returns a copy of the packed words, and how many of them a run has."""
        made: array[int] = array("Q")
        for segment in self._segments:
            made += _marked_words(segment.fifo)
        return made, STRIDE

    def replace(self, words: array[int], messages: int, size: int) -> None:
        """Takes other words of the same form; `messages` and `size` are what they add up to."""
        self._segments.clear()
        for start in range(0, len(words), SEGMENT_RUNS * STRIDE):
            part = words[start : start + SEGMENT_RUNS * STRIDE]
            segment = _Segment()
            segment.fifo.unpack(MARKED + words_to_bytes(part))
            segment.runs = len(part) // STRIDE
            segment.due_ms = _first_due(part)
            segment.whole = False
            self._segments.append(segment)
        self.messages = messages
        self.size = size

    def runs(self) -> list[Run]:
        """Returns all runs, oldest first. Cost: O(runs)."""
        return [run for segment in self._segments for run in segment.fifo.runs()]

    def indexes(self) -> list[int]:
        """Returns the entry index of every run, oldest first."""
        return [index for segment in self._segments for index in segment.fifo.indexes()]

    def runs_from(
        self, index: int, offset: int, record: int, limit: int, runs_max: int
    ) -> list[Run]:
        """See `Fifo.runs_from`."""
        made: list[Run] = []
        listed = 0
        for segment in self._segments:
            if segment.fifo.last_index() < index:
                continue
            if listed >= limit or len(made) >= runs_max:
                break
            left = runs_max - len(made)
            part = segment.fifo.runs_from(index, offset, record, limit - listed, left)
            listed += sum([run[3] for run in part])
            if part and not made and part[0][:2] == (index, offset):
                listed -= max(0, record - part[0][2])
            made += part
        return made

    def runs_after(self, index: int, offset: int, record: int, runs_max: int) -> list[Run]:
        """See `Fifo.runs_after`."""
        return self.runs_from(index, offset, record, LOW, runs_max)

    def run_count(self) -> int:
        """Returns the number of runs."""
        return sum(segment.fifo.run_count() for segment in self._segments)

    def memory_bytes(self) -> int:
        """Returns how many bytes the packed words take."""
        return sum(segment.fifo.memory_bytes() for segment in self._segments)

    def pack(self) -> bytes:
        """Packs as `Fifo` does; runs have marks, where there are some."""
        return MARKED + words_to_bytes(self.words()[0]) if self._segments else b""

    def unpack(self, data: bytes) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        plain = Fifo(False)
        plain.unpack(data)
        self.replace(_marked_words(plain), plain.messages, plain.size)

    # ---------------------------------------------------------------- expiry

    def take_expired(self, now_ms: int, runs_max: int) -> list[tuple[int, Run]]:
        """Takes out at most `runs_max` runs that have expired: (messages before it, run) of each,
        oldest first. Cost: O(segments), and O(SEGMENT_RUNS) for each that has some."""
        taken: list[tuple[int, Run]] = []
        before = 0
        for segment in self._segments:
            if len(taken) >= runs_max:
                break
            messages = segment.fifo.messages
            if 0 < segment.due_ms <= now_ms:
                room = runs_max - len(taken)
                found, segment.due_ms = cut_expired(segment.fifo, now_ms, room)
                segment.whole = segment.whole and not found
                taken += [(before + at, run) for at, run in found]
            before += messages
        if taken:
            self._segments = [each for each in self._segments if each.fifo.messages]
            self.messages -= sum([run[3] for _, run in taken])
            self.size -= sum([run[4] for _, run in taken])
        return taken

    def first_due_ms(self) -> int:
        """Returns when the first message expires; 0 = none does. Cost: O(segments), and
        O(SEGMENT_RUNS)."""
        if not self._segments:
            return 0
        # Messages of the first segment were taken; those of the others leave by `take_expired`.
        head = self._segments[0]
        head.due_ms = _first_due(head.fifo.words()[0]) if head.fifo.has_marks else 0
        return earliest(segment.due_ms for segment in self._segments)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields ranges of entries that hold its messages, ascending. Entries that lie between
        messages of a segment that lost none from its middle are in them."""
        for segment in self._segments:
            fifo = segment.fifo
            if segment.whole:
                yield fifo.first_index(), fifo.last_index()
                continue
            low = high = fifo.first_index()
            for index in fifo.indexes():
                if index > high + 1:
                    yield low, high
                    low = index
                high = index
            yield low, high


def plain(fifo: Fifo) -> Fifo:
    """Returns the same runs without segments. Cost: O(runs)."""
    made = Fifo(False)
    made.unpack(fifo.pack())
    return made


def earliest(dues: Iterable[int]) -> int:
    """Returns the lowest time; 0 = none."""
    return min((due_ms for due_ms in dues if due_ms), default=0)


def _marked_words(fifo: Fifo) -> array[int]:
    """Returns a copy of the packed words of fresh runs, each with a mark."""
    words, stride = fifo.words()
    return words if stride == STRIDE else widened(words, 0, len(words), stride)


def _first_due(words: array[int]) -> int:
    return earliest(mark >> LEVEL_BITS for mark in words[STRIDE - 1 :: STRIDE])


def cut_expired(fifo: Fifo, now_ms: int, runs_max: int) -> tuple[list[tuple[int, Run]], int]:
    """Takes at most `runs_max` runs that have expired out of a FIFO: (messages before it, run) of
    each; and when the first of those that stay expires, 0 = none does. Cost: O(runs)."""
    taken: list[tuple[int, Run]] = []
    first_due_ms = before = 0
    if not fifo.has_marks:
        return taken, 0
    words, stride = fifo.words()
    kept: array[int] = array("Q")
    copied = messages = size = 0
    for at in range(0, len(words), stride):
        due_ms = words[at + stride - 1] >> LEVEL_BITS
        amount = words[at + 2]
        if 0 < due_ms <= now_ms and len(taken) < runs_max:
            kept += words[copied:at]
            copied = at + stride
            taken.append((before, _run_of(words, at, stride)))
            messages += amount >> 32
            size += amount & LOW
        elif due_ms and (not first_due_ms or due_ms < first_due_ms):
            first_due_ms = due_ms
        before += amount >> 32
    if taken:
        kept += words[copied:]
        fifo.replace(kept, fifo.messages - messages, fifo.size - size)
    return taken, first_due_ms


def _run_of(words: array[int], at: int, stride: int) -> Run:
    place, amount = words[at + 1], words[at + 2]
    counts = words[at + 3] if stride > STRIDE else 0
    where = (words[at], place >> 32, place & LOW)
    return (*where, amount >> 32, amount & LOW, counts >> 32, counts & LOW, words[at + stride - 1])


class _Pieces:
    """Runs that were taken out of a FIFO, by the messages that stood before them."""

    def __init__(self, taken: list[tuple[int, Run]]) -> None:
        self._starts = [before for before, _ in taken]
        self._ends = [before + run[3] for before, run in taken]
        self._sums = [0, *accumulate(run[3] for _, run in taken)]
        self.messages = self._sums[-1]

    def before(self, position: int) -> int:
        """Returns how many of their messages stood before a position."""
        begun = bisect_left(self._starts, position)
        if not begun:
            return 0
        return self._sums[begun] - max(0, self._ends[begun - 1] - position)


def _take_from_groups(tail: Tail, gone: _Pieces) -> None:
    """Takes messages that left a tail out of its groups."""
    made: list[tuple[int, int]] = []
    start = 0
    for entered, count in tail.groups():
        kept = count - gone.before(start + count) + gone.before(start)
        if kept:
            made.append((entered, kept))
        start += count
    tail.regroup(made)


def _keep_turns(tail: Tail, gone: _Pieces, left: int) -> None:
    """Keeps the turns of a tail when fresh messages were taken out, and `left` had left before:
    those that stood behind a group do not bring its turn nearer."""
    made: list[tuple[int, int]] = []
    for entered, count in tail.groups():
        turn = entered + gone.messages - gone.before(max(0, entered - left))
        if made and made[-1][0] == turn:
            made[-1] = (turn, made[-1][1] + count)
        else:
            made.append((turn, count))
    tail.regroup(made)


class DueExpiry:
    """Time of the next sweep of a queue, and what it takes out."""

    __slots__ = ("_backlog", "swept_ms", "wanted_ms")

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        #: When a sweep found something last.
        self.swept_ms = 0
        #: When the next one is to look; 0 = nothing will expire.
        self.wanted_ms = 0

    def expect(self, due_ms: int) -> None:
        """Notes that a message that expires then enters, or is ready again."""
        at_ms = max(due_ms, self.swept_ms + SWEEP_MS)
        if not self.wanted_ms or at_ms < self.wanted_ms:
            self.wanted_ms = at_ms

    def begin(self) -> None:
        """Looks with the next entry: the setting is in force from now on."""
        self.wanted_ms = 1

    def sweep(self, now_ms: int) -> list[Run]:
        """Takes out what has expired, when that is due: runs that are in no FIFO any more, in the
        order of the log."""
        if not 0 < self.wanted_ms <= now_ms:
            return []
        taken, more, next_ms = self._take(now_ms)
        if taken:
            self.swept_ms = now_ms
        if more:
            self.wanted_ms = now_ms
        else:
            self.wanted_ms = max(next_ms, self.swept_ms + SWEEP_MS) if next_ms else 0
        return sorted(taken)

    def _take(self, now_ms: int) -> tuple[list[Run], bool, int]:
        """Returns (runs, there may be more, when the first of those that stay expires; 0 = none
        does)."""
        backlog, levels = self._backlog, self._backlog.levels
        room = SWEEP_RUNS_MAX
        dues: list[int] = []
        # What is blocked goes first: so nothing makes way for it that has expired as well.
        taken, due_ms = self._take_blocked(now_ms)
        dues.append(due_ms)
        for fifo in (backlog.returned, backlog.requeued):
            if fifo.run_count() > SCANNED_RUNS_MAX:
                dues.append(now_ms + LOOK_AGAIN_MS)
                continue
            found, due_ms = cut_expired(fifo, now_ms, room - len(taken))
            if fifo is backlog.requeued and found:
                _take_from_groups(backlog.requeued, _Pieces(found))
            taken += [run for _, run in found]
            dues.append(due_ms)
        restored = levels.restored
        if restored.run_count() > SCANNED_RUNS_MAX:
            dues.append(now_ms + LOOK_AGAIN_MS)
        elif restored.messages:
            taken += levels.take_restored(now_ms, room - len(taken))
            dues.append(earliest(due_of(run[7]) for run in restored.all_runs()))
        left = backlog.entered() - backlog.fresh.messages
        found = self._fresh().take_expired(now_ms, room - len(taken))
        if found and backlog.requeued.messages:
            _keep_turns(backlog.requeued, _Pieces(found), left)
        taken += [run for _, run in found]
        dues.append(self._fresh().first_due_ms())
        for fifo in levels.fifos():
            assert isinstance(fifo, SegmentedFifo), "a level has no segments"
            found = fifo.take_expired(now_ms, room - len(taken))
            levels.count_out([run for _, run in found])
            taken += [run for _, run in found]
            dues.append(fifo.first_due_ms())
        return taken, len(taken) >= room, earliest(dues)

    def _take_blocked(self, now_ms: int) -> tuple[list[Run], int]:
        """Takes out what is blocked in groups and has expired; returns the runs, and when the first
        of those that stay expires, 0 = none does."""
        backlog = self._backlog
        taken: list[Run] = []
        if not backlog.groups.messages:
            return taken, 0
        if backlog.groups.run_count() > SCANNED_RUNS_MAX:
            return taken, now_ms + LOOK_AGAIN_MS
        blocked = backlog.groups.blocked_runs()
        if not any(0 < due_of(run[7]) <= now_ms for run in blocked):
            return taken, earliest(due_of(run[7]) for run in blocked)
        dues: list[int] = []
        kept: list[list[object]] = []
        for key, runs in backlog.groups.blocked_by_key().items():
            stays = Fifo(False)
            for run in runs:
                due_ms = due_of(run[7])
                if 0 < due_ms <= now_ms and len(taken) < SWEEP_RUNS_MAX:
                    taken.append(run)
                else:
                    stays.push(*run)
                    dues.append(due_ms)
            if stays.messages:
                kept.append([key, stays.pack()])
        heads: list[list[object]] = [[*at, key] for at, key in backlog.groups.keys().items()]
        backlog.groups = Groups(backlog.levels)
        backlog.groups.unpack(heads, kept)
        return taken, earliest(dues)

    def _fresh(self) -> SegmentedFifo:
        fresh = self._backlog.fresh
        assert isinstance(fresh, SegmentedFifo), "what is fresh has no segments"
        return fresh
