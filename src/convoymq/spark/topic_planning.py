"""Plan of a read of an ordered topic. Pure: no clock, no broker.

A place in a topic is a *cut*: the next offset by partition, so that every logical partition stands
in it once. Partitions before those of a cut are read to their ends, and what comes after them is
untouched. A partition enters a cut when all partitions of the change that made it are read to
their ends; these leave it then. So no message of a key is planned before one that was published
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from convoymq.spark.errors import SourceError
from convoymq.spark.planning import share
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Partition
from convoymq.topics.rules.positions import check_cover
from convoymq.topics.rules.refusals import BadPosition

Cut = dict[int, int]
"""Next offset by partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A topic, now: all partitions that it ever had."""

    topic: str
    created_ms: int
    """Time of creation: a topic that is deleted and created again has another one."""
    version: int
    """Of the newest route."""
    logical: int
    hash_seed: int
    partitions: Mapping[int, Partition]
    lost: frozenset[int] = field(default_factory=frozenset)
    """Partitions that were declared lost: their ends are not known."""

    def is_gone(self, pid: int) -> bool:
        """Returns whether nothing of a partition can be read."""
        return pid in self.lost or self.partitions[pid].is_deleted

    def is_out_of_reach(self, pid: int) -> bool:
        """Returns whether a partition is gone, or was closed without being asked and nobody knows
        its end yet: whoever leads it again says so."""
        line = self.partitions[pid]
        return self.is_gone(pid) or (line.is_closed and line.close_offset is None)

    def is_finished(self, pid: int, offset: int) -> bool:
        """Returns whether no message of a partition is left from an offset on."""
        line = self.partitions[pid]
        close = line.close_offset
        return self.is_gone(pid) or (line.is_closed and close is not None and offset >= close)

    def first_pids(self) -> list[int]:
        """Returns the partitions with which the topic began."""
        return [pid for pid, line in self.partitions.items() if not line.parents]

    def open_pids(self) -> list[int]:
        """Returns the partitions of the newest route."""
        return [pid for pid, line in self.partitions.items() if not line.is_closed]

    def with_ancestors(self, pids: Iterable[int]) -> set[int]:
        """Returns partitions and all that come before them."""
        return self._reached(pids, lambda line: line.parents)

    def with_descendants(self, pids: Iterable[int]) -> set[int]:
        """Returns partitions and all that come after them."""
        return self._reached(pids, lambda line: line.children)

    def _reached(
        self, pids: Iterable[int], following: Callable[[Partition], Iterable[int]]
    ) -> set[int]:
        waiting = list(pids)
        found: set[int] = set()
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += following(self.partitions[pid])
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch."""

    ranges: dict[int, tuple[int, int]]
    """Offsets [start, end) by partition; none is empty."""
    cut: Cut
    """Behind it."""

    @property
    def rows(self) -> int:
        """Returns the number of messages."""
        return sum(end - start for start, end in self.ranges.values())


def first_offset(_pid: int) -> int:
    """Returns where a partition begins that nothing was dropped from."""
    return FIRST_USER_OFFSET


def advanced(
    history: History, cut: Mapping[int, int], begin: Callable[[int], int] = first_offset
) -> Cut:
    """Returns the cut with partitions that are read to their ends replaced by those after them.

    Args:
        begin: where the latter begin.
    """
    made = dict(cut)
    waiting = [pid for pid, offset in made.items() if history.is_finished(pid, offset)]
    while waiting:
        children = history.partitions[waiting.pop()].children
        if not children:
            continue
        # A change has all of its sources for parents of each target.
        sources = history.partitions[children[0]].parents
        if not all(pid in made and history.is_finished(pid, made[pid]) for pid in sources):
            continue
        for pid in sources:
            del made[pid]
        for child in children:
            made[child] = begin(child)
            if history.is_finished(child, made[child]):
                waiting.append(child)
    return made


def placed(history: History, begin: Callable[[int], int]) -> Cut:
    """Returns the cut that gives every logical partition the first place that is left when each
    partition is read from `begin` on."""
    return advanced(history, {pid: begin(pid) for pid in history.first_pids()}, begin)


def planned(
    history: History,
    cut: Mapping[int, int],
    ends: Mapping[int, int],
    allowed: int | None = None,
    *,
    same_batch: bool,
) -> Plan:
    """Returns the batch behind a cut.

    Args:
        ends: the offset behind the last message by partition; nothing is read of others.
        allowed: at most so many messages; None = all.
        same_batch: whether the batch goes on with what comes after a partition that it reads to
            its end.
    """
    made = advanced(history, cut)
    ranges: dict[int, tuple[int, int]] = {}
    fresh = set(made)
    left = allowed
    while fresh:
        backlog = {
            pid: ends[pid] - made[pid] for pid in sorted(fresh) if ends.get(pid, 0) > made[pid]
        }
        shares = backlog if left is None else share(left, backlog)
        for pid, rows in shares.items():
            if rows:
                ranges[pid] = (made[pid], made[pid] + rows)
                made[pid] += rows
        following = advanced(history, made)
        fresh = following.keys() - made.keys()
        made = following
        if left is not None:
            left -= sum(shares.values())
        if not same_batch or left == 0:
            break
    return Plan(ranges, made)


def check_vector(history: History, offsets: Mapping[int, int]) -> None:
    """Raises SourceError unless partitions with offsets are a cut: they exist, and every logical
    partition has one place."""
    unknown = sorted(offsets.keys() - history.partitions.keys())
    if unknown:
        raise SourceError(f"topic {history.topic} has no partition {unknown[0]}")
    listed = sorted((history.partitions[pid] for pid in offsets), key=lambda line: line.lo)
    try:
        check_cover(listed, history.logical)
    except BadPosition as error:
        raise SourceError(f"topic {history.topic}: {error}") from None
