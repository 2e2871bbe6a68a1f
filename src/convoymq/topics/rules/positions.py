"""Positions: where a group stands in a topic, and how it gets there (section 7).

A position is a cut: a route version and the next offset per partition, so that every logical
partition has exactly one place. Of the partitions that owned it, some are finished, then at most
one is begun, and the rest is untouched. A bare offset is no position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Lineage, Partition
from convoymq.topics.rules.refusals import BadPosition, DataExpired


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a group in a topic.

    A partition without a cursor begins at its first message, never at its end. `drained` are
    partitions that count as consumed although no cursor says so.
    """

    version: int
    cursors: Mapping[int, int] = field(default_factory=dict)
    drained: frozenset[int] = frozenset()

    def cursor(self, pid: int) -> int:
        """Return the next offset of a partition."""
        return max(self.cursors.get(pid, 0), FIRST_USER_OFFSET)

    def is_finished(self, partition: Partition) -> bool:
        """Return whether no message of a partition is left, whatever comes before it."""
        if partition.pid in self.drained or partition.is_deleted:
            return True
        if partition.is_behind(self.version):
            return True
        close = partition.close_offset
        return partition.is_closed and close is not None and self.cursor(partition.pid) >= close


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets of a partition that are kept: `start` to `end` (exclusive; control entries count)."""

    start: int = 0
    end: int = 0


def from_vector(
    lineage: Lineage, offsets: Mapping[int, int], bounds: Mapping[int, Bounds]
) -> Position:
    """Return the position of a vector of offsets, as checkpoints and external stores keep it.

    All that comes before the partitions of the vector counts as consumed. The version is that of
    the oldest change that is not complete then.

    Raises:
        UnknownPartition: the vector names one that never was.
        BadPosition: it covers a logical partition twice or not at all, or an offset lies beyond
            the end of its partition.
        DataExpired: what it asks for is deleted.
    """
    listed = sorted((lineage.partition(pid) for pid in offsets), key=lambda each: each.lo)
    check_cover(listed, lineage.latest.logical)
    before = frozenset(each for line in listed for each in lineage.ancestors(line.pid))
    if both := sorted(before & offsets.keys()):
        raise BadPosition(
            f"the vector names partition {both[0]} and a partition that comes after it"
        )
    for line in listed:
        _check_offset(line, offsets[line.pid], bounds.get(line.pid))
    marked = Position(0, dict(offsets), before)
    version = lineage.first_version()
    while version < lineage.latest.version and all(
        marked.is_finished(lineage.partitions[pid]) for pid in lineage.sources(version)
    ):
        version += 1
    position = Position(version, dict(offsets), before)
    check_position(lineage, position)
    return position


def check_cover(listed: list[Partition], logical: int) -> None:
    """Raises BadPosition unless sorted partitions cover all logical partitions once."""
    reached = 0
    for line in listed:
        if line.lo > reached:
            break
        if line.lo < reached:
            raise BadPosition(
                f"the vector gives the logical partitions {line.lo} to {min(reached, line.hi)} "
                f"(exclusive) two places, one of them in partition {line.pid}"
            )
        reached = line.hi
    if reached != logical:
        following = next((line.lo for line in listed if line.lo > reached), logical)
        raise BadPosition(
            f"the vector gives the logical partitions {reached} to {following} (exclusive) no place"
        )


def _check_offset(line: Partition, offset: int, kept: Bounds | None) -> None:
    if offset < 0:
        raise BadPosition(f"offset {offset} of partition {line.pid} is negative")
    if line.is_deleted:
        if line.close_offset is None or offset < line.close_offset:
            raise DataExpired(line.pid, offset, None)
        return
    end = line.close_offset
    if end is None and kept is not None:
        end = kept.end
    if end is not None and offset > end:
        raise BadPosition(f"offset {offset} of partition {line.pid} lies beyond its end, {end}")
    if kept is not None and offset < kept.start and kept.start > FIRST_USER_OFFSET:
        raise DataExpired(line.pid, offset, kept.start)


# --- checks --------------------------------------------------------------------------------


def check_position(lineage: Lineage, position: Position) -> None:
    """Raises BadPosition unless every logical partition has exactly one place."""
    for pid, line in lineage.partitions.items():
        if position.cursor(pid) <= FIRST_USER_OFFSET:
            continue
        if line.is_deleted:
            continue
        for parent in line.parents:
            if not position.is_finished(lineage.partitions[parent]):
                raise BadPosition(
                    f"the position has begun partition {pid} before partition {parent}, whose "
                    "messages come first, is finished"
                )
