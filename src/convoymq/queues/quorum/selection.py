"""Takes chosen messages out of the ready ones of a quorum queue, wherever they stand.

A message is named by its place in the log, which it keeps for as long as it is in the queue: entry
index, byte offset of its ENQUEUE command, number of its record.

Neighbouring records are one `Range`. Fresh messages and levels lie in the order of the log: there
a range is looked up, and what stands between ranges is copied as a whole. What came back lies in
any order and is gone through.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from convoymq.queues.quorum.backlog import Backlog
from convoymq.queues.quorum.runs import LOW, Fifo, Run

Range: TypeAlias = tuple[int, int, int, int]
"""(entry index, command offset, first record, last record)"""
_Wanted: TypeAlias = list[tuple[int, int, int, int, int]]
"""Ranges in the order of the log, each with its number in the request."""


class Overlapping(ValueError):
    """A message is named twice, or a range is empty."""


class _Cut:
    """Messages that were cut out of a FIFO."""

    def __init__(self) -> None:
        self.removed: list[tuple[int, Run]] = []
        """(number of the range, run)"""
        self.before: list[tuple[int, int]] = []
        """(messages that stood before, messages) of each of these, where they were counted."""
        self.messages = 0
        self.size = 0


def in_log_order(ranges: Sequence[Range]) -> _Wanted:
    """Raises Overlapping."""
    wanted = sorted((*each, number) for number, each in enumerate(ranges))
    place = (-1, -1)
    end = -1
    for index, offset, first, last, _ in wanted:
        if first > last or ((index, offset) == place and first <= end):
            raise Overlapping("a message is named twice, or a range is empty")
        place, end = (index, offset), last
    return wanted


def remove(backlog: Backlog, ranges: Sequence[Range]) -> list[Run]:
    """Takes out what is ready of the ranges, in the order in which these were given. What is not
    ready is left out. Raises Overlapping, and then nothing has changed.

    Cost: O(ranges log runs) and a copy of the packed words; O(runs) of what came back, and of
    fresh messages while some wait behind them.
    """
    wanted = in_log_order(ranges)
    found: list[tuple[int, Run]] = []
    groups = backlog.requeued.groups()
    left = backlog.entered() - backlog.fresh.messages
    fresh = _cut(backlog.fresh, wanted, ordered=not groups)
    requeued = _cut(backlog.requeued, wanted, ordered=False)
    if groups:
        backlog.requeued.regroup(_regrouped(groups, left, fresh.before, requeued.before))
    for cut in (fresh, requeued, _cut(backlog.returned, wanted, ordered=False)):
        found += cut.removed
    for fifo in backlog.levels.fifos():
        cut = _cut(fifo, wanted, ordered=True)
        backlog.levels.messages -= cut.messages
        backlog.levels.size -= cut.size
        found += cut.removed
    found += _cut_restored(backlog, wanted)
    # A command's records lie in the order of their numbers within a range.
    found.sort(key=_in_request)
    return [run for _, run in found]


def _in_request(found: tuple[int, Run]) -> tuple[int, int]:
    return found[0], found[1][2]


def _cut(fifo: Fifo, wanted: _Wanted, *, ordered: bool) -> _Cut:
    """Takes the wanted messages out of a FIFO. `ordered`: its runs lie in the order of the log, and
    nobody asks what stood before them."""
    cut = _Cut()
    if not fifo.messages or not wanted:
        return cut
    words, stride = fifo.words()
    made: array[int] = array("Q")
    copied = 0
    seen = 0
    for at in _hits(words, stride, wanted) if ordered else range(0, len(words), stride):
        amount = words[at + 2]
        count = amount >> 32
        parts = _parts(words, at, wanted)
        if parts:
            made += words[copied:at]
            copied = at + stride
            _cut_run(words[at:copied], fifo.counted, parts, made, cut, seen)
        seen += count
    if cut.messages:
        made += words[copied:]
        fifo.replace(made, fifo.messages - cut.messages, fifo.size - cut.size)
    return cut


def _cut_restored(backlog: Backlog, wanted: _Wanted) -> list[tuple[int, Run]]:
    """Takes the wanted messages out of those that came back to their places."""
    levels, restored = backlog.levels, backlog.levels.restored
    if not restored.messages:
        return []
    cut = _Cut()
    kept: list[tuple[int, Run]] = []
    for level in restored.levels():
        for run in restored.runs(level):
            index, offset, first, count, size, acquired_count, failed, mark = run
            counts = acquired_count << 32 | failed
            words = array("Q", (index, offset << 32 | first, count << 32 | size, counts, mark))
            left: array[int] = array("Q")
            parts = _parts(words, 0, wanted)
            if parts:
                _cut_run(words, True, parts, left, cut, 0)
            else:
                left = words
            for at in range(0, len(left), 5):
                place, amount = left[at + 1], left[at + 2]
                part = (index, offset, place & LOW, amount >> 32, amount & LOW)
                kept.append((level, (*part, acquired_count, failed, mark)))
    if cut.messages:
        restored.clear()
        for level, run in kept:
            restored.add(level, run)
        levels.messages -= cut.messages
        levels.size -= cut.size
    return cut.removed


def _hits(words: array[int], stride: int, wanted: _Wanted) -> Iterator[int]:
    """Positions of the runs that hold wanted messages, ascending, by binary search."""
    low = 0
    runs = len(words) // stride
    for index, offset, first, last, _ in wanted:
        start, high = low, runs
        while start < high:
            middle = (start + high) // 2
            at = middle * stride
            place = words[at + 1]
            end = (place & LOW) + (words[at + 2] >> 32) - 1
            if (words[at], place >> 32, end) < (index, offset, first):
                start = middle + 1
            else:
                high = middle
        while start < runs:
            at = start * stride
            place = words[at + 1]
            if (words[at], place >> 32) != (index, offset) or place & LOW > last:
                break
            yield at
            start += 1
        # The last run of this range may have messages of the next one: it was cut by all of them.
        low = start


def _parts(words: array[int], at: int, wanted: _Wanted) -> list[tuple[int, int, int]]:
    """Returns (first record, last record, number of the range) of what is wanted of the run at a
    position, ascending."""
    index, place = words[at], words[at + 1]
    offset, first = place >> 32, place & LOW
    end = first + (words[at + 2] >> 32) - 1
    # The range before may reach into the run.
    k = max(0, bisect_left(wanted, (index, offset, first)) - 1)
    made: list[tuple[int, int, int]] = []
    while k < len(wanted):
        each = wanted[k]
        if (each[0], each[1]) > (index, offset) or (each[:2] == (index, offset) and each[2] > end):
            break
        if each[:2] == (index, offset) and each[3] >= first:
            made.append((max(each[2], first), min(each[3], end), each[4]))
        k += 1
    return made


def _cut_run(
    run: array[int],
    counted: bool,
    parts: list[tuple[int, int, int]],
    made: array[int],
    cut: _Cut,
    before: int,
) -> None:
    """Splits a run into what stays, which is appended to `made`, and what goes."""
    place, amount = run[1], run[2]
    offset, first, count, size = place >> 32, place & LOW, amount >> 32, amount & LOW
    counts = run[3] if counted else 0
    plain = 4 if counted else 3
    mark = run[plain] if len(run) > plain else 0
    at = done = 0
    for low, high, number in [*parts, (first + count, first + count - 1, -1)]:
        if low - first > at:
            share = size * (low - first) // count - done
            made += array("Q", (run[0], offset << 32 | first + at))
            made.append((low - first - at) << 32 | share)
            made += run[3:]
            done += share
        at = high - first + 1
        if number < 0:
            break
        share = size * at // count - done
        done += share
        taken = high - low + 1
        piece = (run[0], offset, low, taken, share, counts >> 32, counts & LOW, mark)
        cut.removed.append((number, piece))
        cut.before.append((before + low - first, taken))
        cut.messages += taken
        cut.size += share


def _regrouped(
    groups: list[tuple[int, int]],
    left: int,
    fresh: list[tuple[int, int]],
    requeued: list[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Returns the groups of the tail, when messages were taken out of it and out of what is fresh.
    `left`: how many had left what is fresh before."""
    gone = sum(count for _, count in fresh)
    made: list[tuple[int, int]] = []
    start = 0
    for entered, count in groups:
        end = start + count
        kept = count - _within(requeued, start, end)
        ahead = max(0, entered - left)
        # What is taken out counts as having left: that it did not stand before is made good.
        turn = entered + gone - _within(fresh, 0, ahead)
        if kept and made and made[-1][0] == turn:
            made[-1] = (turn, made[-1][1] + kept)
        elif kept:
            made.append((turn, kept))
        start = end
    return made


def _within(pieces: list[tuple[int, int]], start: int, end: int) -> int:
    """Returns how many messages of the pieces stood at positions start … end - 1."""
    return sum(max(0, min(at + count, end) - max(at, start)) for at, count in pieces)
