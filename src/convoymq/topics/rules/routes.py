"""Route versions: which physical partition owns which logical partitions.

A route covers all logical partitions exactly once (I2), and never changes once it is published
(I1). Ranges are half open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from convoymq.model.errors import check
from convoymq.topics.rules.refusals import BadTopic, UnknownPartition

LOGICAL_DEFAULT = 1024
LOGICAL_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Span:
    """The logical partitions `lo` to `hi` (exclusive) in physical partition `pid`."""

    lo: int
    hi: int
    pid: int

    def __contains__(self, lp: int) -> bool:
        return self.lo <= lp < self.hi

    @property
    def width(self) -> int:
        """Number of logical partitions in it."""
        return self.hi - self.lo

    def overlaps(self, lo: int, hi: int) -> bool:
        """Return whether a logical partition from `lo` to `hi` (exclusive) is in it."""
        return self.lo < hi and lo < self.hi


def _start(span: Span) -> int:
    return span.lo


@dataclass(frozen=True, slots=True)
class Route:
    """One route version. `spans` are sorted and cover 0 to `logical` (exclusive)."""

    version: int
    logical: int
    spans: tuple[Span, ...]

    def pid_of(self, lp: int) -> int:
        """Return the partition that owns a logical partition. Cost: O(log n)."""
        assert 0 <= lp < self.logical, lp
        return self.spans[bisect_right(self.spans, lp, key=_start) - 1].pid

    def span_of(self, pid: int) -> Span:
        """Return the range of a partition. Raises UnknownPartition."""
        for span in self.spans:
            if span.pid == pid:
                return span
        raise UnknownPartition(pid, self.version)

    @property
    def pids(self) -> tuple[int, ...]:
        """The partitions, in the order of their ranges."""
        return tuple(span.pid for span in self.spans)


def covers(spans: Iterable[Span], lo: int, hi: int) -> bool:
    """Return whether sorted, not empty spans cover `lo` to `hi` exactly once."""
    reached = lo
    for span in spans:
        if span.lo != reached or span.hi <= span.lo:
            return False
        reached = span.hi
    return reached == hi


def check_invariants(route: Route) -> None:
    """Raises InvariantViolated unless the route covers everything once (I2), by distinct pids."""
    check(route.version >= 0, f"route version {route.version} is negative")
    check(covers(route.spans, 0, route.logical), f"route {route} does not cover each range once")
    check(len(set(route.pids)) == len(route.spans), f"route {route} names a partition twice")


def first_route(logical: int, partitions: int) -> Route:
    """Return version 0: partitions 0 to `partitions` (exclusive), of equal ranges up to one.

    Raises:
        BadTopic: there are too few or too many of either.
    """
    if not 1 <= logical <= LOGICAL_MAX:
        raise BadTopic(f"a topic has 1 to {LOGICAL_MAX} logical partitions, not {logical}")
    if not 1 <= partitions <= logical:
        raise BadTopic(
            f"a topic with {logical} logical partitions has 1 to {logical} partitions, "
            f"not {partitions}"
        )
    cuts = [number * logical // partitions for number in range(partitions + 1)]
    route = Route(
        0, logical, tuple(Span(cuts[pid], cuts[pid + 1], pid) for pid in range(partitions))
    )
    check_invariants(route)
    return route
