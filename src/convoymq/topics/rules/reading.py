"""A reader of a topic without a group: which partition may be read where, and what comes next.

    partition: waits ──▶ readable ──▶ finished
               for parents      at its CLOSE

A partition is readable when all of its parents that hold messages of this reader are finished, so
messages of a key come in their order over splits, merges and moves. A reader that begins in some
partitions reads their logical partitions only; a partition that a merge brings may hold others as
well (`is_partial`), and who reads it leaves those out.

Source: ordered topics, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from convoymq.topics.rules.refusals import BadPosition, DataExpired, UnknownPartition

FIRST_OFFSET = 1
"""Of the first message of a partition."""
DELETED = "deleted"
LOST = "lost"


class Line(Protocol):
    """A partition in the lineage of its topic."""

    @property
    def pid(self) -> int:
        """Returns its number."""

    @property
    def lo(self) -> int:
        """Returns its first logical partition."""

    @property
    def hi(self) -> int:
        """Returns the logical partition behind its last one."""

    @property
    def state(self) -> str:
        """Returns its state; `deleted` and `lost` ones have no messages."""

    @property
    def created_version(self) -> int:
        """Returns the route version that brought it."""

    @property
    def close_offset(self) -> int | None:
        """Returns the offset of CLOSE, when it is sealed and that is known."""

    @property
    def parents(self) -> tuple[int, ...]:
        """Returns the partitions that it came from."""

    @property
    def children(self) -> tuple[int, ...]:
        """Returns the partitions that came from it."""


@dataclass(frozen=True, slots=True)
class Readable:
    """A partition that may be read."""

    pid: int
    offset: int
    """Of the next message."""
    end: int | None
    """Offset of CLOSE; None: it is not sealed."""
    created_version: int


class ReadPlan:
    """The way of one reader through a topic.

    Args:
        lines: all partitions that ever were.
        places: next offsets by partition. All that comes before these partitions counts as read.
        whole: the places have to cover every logical partition; this is their number.
        ranges: logical partitions to read, of those that the places have; all of them without it.
        starts: where other partitions begin, if not at their first message.

    Raises:
        UnknownPartition: a place in a partition that never was.
        BadPosition: a logical partition has two places, or none though it has to have one.
        DataExpired: what is to be read is deleted.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        places: Mapping[int, int],
        whole: int | None = None,
        *,
        ranges: Sequence[tuple[int, int]] | None = None,
        starts: Mapping[int, int] | None = None,
    ) -> None:
        self._lines: dict[int, Line] = {line.pid: line for line in lines}
        self._listed = frozenset(places)
        given = {**(starts or {}), **places}
        self._offsets = {pid: max(FIRST_OFFSET, offset) for pid, offset in given.items()}
        self._is_begun = False
        self._finished: set[int] = set()
        listed = sorted((self._line(pid) for pid in places), key=lambda line: line.lo)
        self._check(listed, places, whole)
        self.ranges = tuple(ranges or ((line.lo, line.hi) for line in listed))
        for line in listed:
            self._finished |= self._before(line)
        if both := sorted(self._finished & places.keys()):
            raise BadPosition(
                f"the vector names partition {both[0]} and a partition that comes after it"
            )
        for line in listed:
            self._finish_if_over(line)
        self._is_begun = True

    def _line(self, pid: int) -> Line:
        found = self._lines.get(pid)
        if found is None:
            raise UnknownPartition(pid)
        return found

    @staticmethod
    def _check(listed: list[Line], places: Mapping[int, int], whole: int | None) -> None:
        if negative := [pid for pid, offset in places.items() if offset < 0]:
            raise BadPosition(f"the offset of partition {negative[0]} is negative")
        for line, following in pairwise(listed):
            if following.lo < line.hi:
                raise BadPosition(
                    f"the vector gives the logical partitions {following.lo} to "
                    f"{min(line.hi, following.hi)} (exclusive) two places, one of them in "
                    f"partition {following.pid}"
                )
        if not listed:
            raise BadPosition("the vector names no partition")
        if whole is None:
            return
        reached = 0
        for line in listed:
            if line.lo > reached:
                break
            reached = line.hi
        if reached < whole:
            raise BadPosition(f"the vector gives the logical partitions from {reached} on no place")

    def _before(self, line: Line) -> set[int]:
        found: set[int] = set()
        waiting = list(line.parents)
        for pid in waiting:
            if pid not in found:
                found.add(pid)
                waiting += self._line(pid).parents
        return found

    # --- what it learns --------------------------------------------------------------------

    def update(self, lines: Iterable[Line]) -> None:
        """Takes a newer lineage. Raises DataExpired: what is to be read next is deleted."""
        self._lines = {line.pid: line for line in lines}
        for each in self.readable():
            self._finish_if_over(self._line(each.pid))

    def advance(self, pid: int, offset: int) -> None:
        """A partition was read up to an offset (exclusive)."""
        assert offset >= self._offsets.get(pid, FIRST_OFFSET), (pid, offset)
        self._offsets[pid] = offset
        self._finish_if_over(self._line(pid))

    def _finish_if_over(self, line: Line) -> None:
        """Finishes a partition that is read, and those after it that hold nothing."""
        waiting = [line]
        while waiting:
            line = waiting.pop()
            if not self._is_over(line):
                continue
            self._finished.add(line.pid)
            children = [self._lines[pid] for pid in line.children if pid in self._lines]
            waiting += [
                each for each in children if each.pid not in self._finished and self._may_read(each)
            ]

    def _is_over(self, line: Line) -> bool:
        offset = self._offsets.get(line.pid, FIRST_OFFSET)
        if line.close_offset is not None and offset >= line.close_offset:
            return True
        if line.state == DELETED and (self._is_begun or line.pid in self._listed):
            raise DataExpired(line.pid, offset, None)
        return line.state in (DELETED, LOST)

    # --- what may be read ------------------------------------------------------------------

    def readable(self) -> list[Readable]:
        """Returns the partitions that may be read now, by age and range."""
        found = [
            line
            for line in self._lines.values()
            if line.pid not in self._finished and self._may_read(line)
        ]
        found.sort(key=lambda line: (line.created_version, line.lo))
        return [
            Readable(
                line.pid,
                self._offsets.get(line.pid, FIRST_OFFSET),
                line.close_offset,
                line.created_version,
            )
            for line in found
        ]

    def _may_read(self, line: Line) -> bool:
        if line.pid in self._listed:
            return True
        mine = [pid for pid in line.parents if self._overlaps(self._line(pid))]
        return bool(mine) and self._overlaps(line) and self._finished.issuperset(mine)

    def _overlaps(self, line: Line) -> bool:
        return any(line.lo < hi and lo < line.hi for lo, hi in self.ranges)

    def is_partial(self, pid: int) -> bool:
        """Returns whether a partition holds messages that are not this reader's."""
        line = self._line(pid)
        reached = line.lo
        for lo, hi in self.ranges:
            if lo <= reached < hi:
                reached = hi
        return reached < line.hi

    def is_mine(self, lp: int) -> bool:
        """Returns whether a logical partition is read."""
        return any(lo <= lp < hi for lo, hi in self.ranges)

    @property
    def position(self) -> dict[int, int]:
        """Returns the places to go on from: of a finished partition that the next one waits behind,
        its end."""
        found = {each.pid: each.offset for each in self.readable()}
        for pid in self._finished:
            line = self._line(pid)
            waiting = [
                child
                for child in line.children
                if child in self._lines
                and child not in found
                and child not in self._finished
                and self._overlaps(self._line(child))
            ]
            if waiting and self._overlaps(line) and line.close_offset is not None:
                found[pid] = line.close_offset
        return found
