# cython: annotation_typing=False
"""Which message of a quorum queue is next, where more than the default level has some (ADR 0043,
ADR 0050). What came back to the head (`Backlog.returned`) goes before all of this.

A level's messages are served by their places in the log, whether they were handed out before or
not; what went to the tail of the default level comes when its turn there has come, and behind what
stands at its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from convoymq.queues.quorum.levels import LEVEL_DEFAULT, due_of
from convoymq.queues.quorum.restored import place_of
from convoymq.queues.quorum.runs import LOW, Fifo, Run

if TYPE_CHECKING:
    from convoymq.queues.quorum.backlog import Backlog


class _Cutter:
    """Hands runs out by the number of messages."""

    def __init__(self, found: list[Run]) -> None:
        self._left = deque(found)

    def take(self, count: int) -> Iterator[Run]:
        """At most `count` of the next messages."""
        while count and self._left:
            run = self._left.popleft()
            if run[3] > count:
                run, rest = cut(run, count)
                self._left.appendleft(rest)
            count -= run[3]
            yield run


def cut(run: Run, count: int) -> tuple[Run, Run]:
    """The first `count` messages of a run, and the others."""
    assert 0 < count < run[3], "a part of a run is none"
    size = run[4] * count // run[3]
    rest = (run[2] + count, run[3] - count, run[4] - size)
    return (*run[:3], count, size, *run[5:]), (*run[:2], *rest, *run[5:])


class Order:
    """What is next in a backlog, behind what came back to the head."""

    __slots__ = ("_backlog",)

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    # ---------------------------------------------------------------- levels

    def _next_level(self) -> int:
        """The level of the next message. There must be one."""
        highest = self._backlog.levels.highest()
        if highest < LEVEL_DEFAULT and self._has_plain():
            return LEVEL_DEFAULT
        return highest

    def _has_plain(self) -> bool:
        """Whether the default level has messages beside those at their places."""
        return bool(self._backlog.fresh.messages or self._backlog.requeued.messages)

    def _own(self, level: int) -> tuple[Fifo | None, int]:
        """The FIFO whose head is next at a level, beside what stands at its place, and how many of
        its messages may be taken in a row; None = there is none."""
        backlog = self._backlog
        if level != LEVEL_DEFAULT:
            return backlog.levels.fifo(level), LOW
        if backlog.requeued.messages:
            ahead = backlog.ahead()
            return (backlog.fresh, ahead) if ahead else (backlog.requeued, LOW)
        return (backlog.fresh if backlog.fresh.messages else None), LOW

    def _is_restored(self, level: int, own: Fifo | None) -> bool:
        """Whether the next message of a level is one at its place; `own`: the FIFO beside."""
        backlog = self._backlog
        place = backlog.levels.restored.head_place(level)
        if place is None or own is None or own is backlog.requeued:
            return place is not None
        return place < own.head_place()

    # ---------------------------------------------------------------- taking

    def take(self, limit: int) -> Run:
        """Removes at most `limit` messages of the next run. There must be one."""
        return self._take_at(self._next_level(), limit)

    def _take_at(self, level: int, limit: int) -> Run:
        own, room = self._own(level)
        if self._is_restored(level, own):
            return self._backlog.levels.take(level, limit, restored=True)
        assert own is not None, "nothing is ready at a level"
        if level == LEVEL_DEFAULT:
            return own.take(min(limit, room))
        return self._backlog.levels.take(level, limit, restored=False)

    def next_amount(self) -> tuple[int, int]:
        """(messages, body bytes) of the next run."""
        level = self._next_level()
        own, _ = self._own(level)
        head = self._backlog.levels.restored.head(level)
        if head is not None and self._is_restored(level, own):
            return head[3], head[4]
        assert own is not None, "nothing is ready at a level"
        return own.head_amount()

    # ---------------------------------------------------------------- expiry

    def _levels(self) -> list[int]:
        """Levels with messages, the highest first, the default one last."""
        found = [n for n in self._backlog.levels.with_messages() if n != LEVEL_DEFAULT]
        if self._has_plain() or self._backlog.levels.restored.count(LEVEL_DEFAULT):
            found.append(LEVEL_DEFAULT)
        return found

    def _head_mark(self, level: int) -> int:
        own, _ = self._own(level)
        head = self._backlog.levels.restored.head(level)
        if head is not None and self._is_restored(level, own):
            return head[7]
        return own.head_mark() if own is not None else 0

    def head_marks(self) -> list[int]:
        """Of the next run of every level."""
        return [self._head_mark(level) for level in self._levels()]

    def take_expired(self, now_ms: int) -> Run | None:
        """Takes a run out that is next at its level, and whose time is over; None = there is
        none."""
        for level in self._levels():
            if 0 < due_of(self._head_mark(level)) <= now_ms:
                return self._take_at(level, LOW)
        return None

    # ---------------------------------------------------------------- looking at it

    def runs(self) -> Iterator[Run]:
        """All runs, in the order in which they would be delivered if nothing happened
        meanwhile."""
        for level in sorted(self._levels(), reverse=True):
            yield from self._level_runs(level)

    def _level_runs(self, level: int) -> Iterator[Run]:
        restored = deque(self._backlog.levels.restored.runs(level))
        for run, at_tail in self._own_runs(level):
            place = place_of(run)
            while restored and (at_tail or place_of(restored[0]) < place):
                yield restored.popleft()
            yield run
        yield from restored

    def _own_runs(self, level: int) -> Iterator[tuple[Run, bool]]:
        """(run, it went to the tail) of a level, without what stands at its place."""
        backlog = self._backlog
        if level != LEVEL_DEFAULT:
            fifo = backlog.levels.fifo(level)
            yield from ((run, False) for run in (fifo.runs() if fifo is not None else ()))
            return
        fresh, requeued = _Cutter(backlog.fresh.runs()), _Cutter(backlog.requeued.runs())
        left = backlog.entered() - backlog.fresh.messages
        for entered, count in backlog.requeued.groups():
            yield from ((run, False) for run in fresh.take(max(0, entered - left)))
            left = max(left, entered)
            yield from ((run, True) for run in requeued.take(count))
        yield from ((run, False) for run in fresh.take(backlog.fresh.messages))
