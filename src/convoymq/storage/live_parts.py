"""Live parts of a group's segments, and the amount of the dead ones: pure functions.

Ranges of indexes are ascending, disjoint and inclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convoymq.logformat.segment import Segment
from convoymq.storage.log import GroupLog
from convoymq.storage.types import GroupPlan

DEAD_SEGMENTS = 16
"""So many of a group's newest segments are looked at for dead entries when a WAL file is emptied:
those that came since the last snapshot."""


def clip(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Returns the parts of ascending ranges inside [first, last]."""
    return [(max(a, first), min(b, last)) for a, b in ranges if b >= first and a <= last and a <= b]


def below(ranges: Iterable[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Returns the parts of ascending ranges below `limit`."""
    return [(a, min(b, limit - 1)) for a, b in ranges if a < limit]


def alive_ranges(
    segment: Segment, live: Iterable[tuple[int, int]], keep: int
) -> list[tuple[int, int]]:
    """Ranges of the segment's entries that must stay."""
    return clip([*below(live, keep), (keep, segment.last)], segment.first, segment.last)


def size_of(segment: Segment, ranges: Iterable[tuple[int, int]]) -> int:
    """Returns the number of bytes of the entries in the ranges."""
    return 8 * sum(sum(segment.sizes[segment.lower(a) : segment.lower(b + 1)]) for a, b in ranges)


def dead_since_snapshot(log: GroupLog, plan: GroupPlan) -> int:
    """Returns the number of bytes of a log's segments that only wait for a newer snapshot to go."""
    keep = min(plan.applied + 1, plan.keep_from)
    found = 0
    for segment in reversed(log.segments[-DEAD_SEGMENTS:]):
        if segment.last <= log.snapshot_index:
            break
        first = max(segment.first, log.snapshot_index + 1)
        alive = clip(alive_ranges(segment, plan.live_ranges, keep), first, segment.last)
        found += size_of(segment, [(first, segment.last)]) - size_of(segment, alive)
    return found


def dead_size(segments: Sequence[Segment], plan: GroupPlan) -> int:
    """Returns the number of bytes of segments that may go once a snapshot covers what is
    applied."""
    keep = min(plan.applied + 1, plan.keep_from)
    size = sum([segment.size for segment in segments])
    return size - sum([alive_size(segment, plan.live_ranges, keep) for segment in segments])


def alive_size(segment: Segment, live: Iterable[tuple[int, int]], keep: int) -> int:
    """Returns the number of bytes of the segment's entries that must stay."""
    return size_of(segment, alive_ranges(segment, live, keep))
