# cython: annotation_typing=False
"""Order of delivery of a quorum queue with several levels (ADR 0043, ADR 0050). What came back to
the head (`Backlog.returned`) goes before all of this.

A level's messages are served by their places in the log, whether they were handed out before or
not; what went to the tail of the default level comes when its turn there has come, and behind what
stands at its place.

With `Backlog.two_classes` levels above the default one are a class, and the others are: see
`choose`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from convoymq.queues.quorum.levels import LEVEL_DEFAULT, due_of
from convoymq.queues.quorum.restored import Place, place_of
from convoymq.queues.quorum.runs import LOW, Fifo, Run

if TYPE_CHECKING:
    from convoymq.queues.quorum.backlog import Backlog


HIGH_IN_A_ROW = 2
TURNS = HIGH_IN_A_ROW + 1


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
    """Returns the first `count` messages of a run, and the others."""
    assert 0 < count < run[3], "a part of a run is none"
    size = run[4] * count // run[3]
    rest = (run[2] + count, run[3] - count, run[4] - size)
    return (*run[:3], count, size, *run[5:]), (*run[:2], *rest, *run[5:])


def choose(places: Mapping[int, Place], turn: int) -> tuple[int, int]:
    """Returns the next level by RabbitMQ's rule of 4.0 to 4.2, and how many of its messages may be
    taken in a row. `places`: where the next message of each level was published, of one level at
    least.

    Each class is served in the order of the log. Where both have messages, two of the higher class
    are followed by one of the other, unless the next one of the higher class is the older one.
    """
    high = _oldest({level: place for level, place in places.items() if level > LEVEL_DEFAULT})
    normal = _oldest({level: place for level, place in places.items() if level <= LEVEL_DEFAULT})
    if high is None or normal is None:
        level = high if high is not None else normal
        assert level is not None, "nothing is ready"
        return level, LOW
    if turn < HIGH_IN_A_ROW:
        return high, HIGH_IN_A_ROW - turn
    return (high if places[high] < places[normal] else normal), 1


def _oldest(places: Mapping[int, Place]) -> int | None:
    return min(places, key=lambda level: places[level]) if places else None


class Order:
    """Order of a backlog, behind what came back to the head."""

    __slots__ = ("_backlog", "turn")

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        #: Two classes: messages that were taken, modulo TURNS.
        self.turn = 0

    # ---------------------------------------------------------------- levels

    def _next_level(self) -> tuple[int, int]:
        """Returns the level of the next message, and how many may be taken there in a row. There
        must be one."""
        if self._backlog.two_classes:
            return choose({level: self._place(level) for level in self._levels()}, self.turn)
        highest = self._backlog.levels.highest()
        if highest < LEVEL_DEFAULT and self._has_plain():
            return LEVEL_DEFAULT, LOW
        return highest, LOW

    def _place(self, level: int) -> Place:
        """Returns where the next message of a level that has some was published."""
        own, _ = self._own(level)
        place = self._backlog.levels.restored.head_place(level)
        if place is not None and self._is_restored(level, own):
            return place
        assert own is not None, "nothing is ready at a level"
        return own.head_place()

    def _has_plain(self) -> bool:
        """Returns whether the default level has messages beside those at their places."""
        return bool(self._backlog.fresh.messages or self._backlog.requeued.messages)

    def _own(self, level: int) -> tuple[Fifo | None, int]:
        """Returns the FIFO whose head is next at a level, beside what stands at its place, and how
        many of its messages may be taken in a row; None = there is none."""
        backlog = self._backlog
        if level != LEVEL_DEFAULT:
            return backlog.levels.fifo(level), LOW
        if backlog.requeued.messages:
            ahead = backlog.ahead()
            return (backlog.fresh, ahead) if ahead else (backlog.requeued, LOW)
        return (backlog.fresh if backlog.fresh.messages else None), LOW

    def _is_restored(self, level: int, own: Fifo | None) -> bool:
        """Returns whether the next message of a level is one at its place; `own`: the FIFO
        beside."""
        backlog = self._backlog
        place = backlog.levels.restored.head_place(level)
        if place is None or own is None or own is backlog.requeued:
            return place is not None
        return place < own.head_place()

    # ---------------------------------------------------------------- taking

    def took(self, count: int) -> None:
        """Counts messages that were taken while only the default level had some."""
        self.turn = (self.turn + count) % TURNS

    def take(self, limit: int) -> Run:
        """Removes at most `limit` messages of the next run. There must be one."""
        level, room = self._next_level()
        run = self._take_at(level, min(limit, room))
        if self._backlog.two_classes:
            self.took(run[3])
        return run

    def _take_at(self, level: int, limit: int) -> Run:
        own, room = self._own(level)
        if self._is_restored(level, own):
            return self._backlog.levels.take(level, limit, True)
        assert own is not None, "nothing is ready at a level"
        if level == LEVEL_DEFAULT:
            return own.take(min(limit, room))
        return self._backlog.levels.take(level, limit, False)

    def next_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the next run."""
        level, _ = self._next_level()
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

    def take_expired(self, now_ms: int, limit: int) -> Run | None:
        """Takes at most `limit` messages of a run out that is next at its level, and whose time is
        over; None = there is none."""
        for level in self._levels():
            if 0 < due_of(self._head_mark(level)) <= now_ms:
                return self._take_at(level, limit)
        return None

    # ---------------------------------------------------------------- looking at it

    def runs(self) -> Iterator[Run]:
        """Yields all runs, in the order in which they would be delivered if nothing happened
        meanwhile."""
        if self._backlog.two_classes:
            yield from self._runs_of_classes()
            return
        for level in sorted(self._levels(), reverse=True):
            yield from self._level_runs(level)

    def _runs_of_classes(self) -> Iterator[Run]:
        lines = {level: self._level_runs(level) for level in self._levels()}
        heads = {level: next(line) for level, line in lines.items()}
        turn = self.turn
        while heads:
            level, room = choose({n: place_of(run) for n, run in heads.items()}, turn)
            run = heads.pop(level)
            rest = None
            if run[3] > room:
                run, rest = cut(run, room)
            following = rest or next(lines[level], None)
            if following is not None:
                heads[level] = following
            turn = (turn + run[3]) % TURNS
            yield run

    def _level_runs(self, level: int) -> Iterator[Run]:
        restored = deque(self._backlog.levels.restored.runs(level))
        for run, at_tail in self._own_runs(level):
            place = place_of(run)
            while restored and (at_tail or place_of(restored[0]) < place):
                yield restored.popleft()
            yield run
        yield from restored

    def _own_runs(self, level: int) -> Iterator[tuple[Run, bool]]:
        """Yields (run, it went to the tail) of a level, without what stands at its place."""
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
