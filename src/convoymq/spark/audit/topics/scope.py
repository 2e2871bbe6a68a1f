"""Facts about partitions, readers and leases, for the sweeps of topics.

It is small, and sent to every worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from convoymq.spark.audit.topics.control import NEVER_US, Reader, TopicsFacts
from convoymq.spark.audit.topics.rules import release_times

NEVER = 1 << 62


class LeaseSpan(NamedTuple):
    """A lease in the order of its partition's log, and in time."""

    group_epoch: int
    member: int
    from_order: int
    to_order: int
    from_us: int
    to_us: int


class ReaderPlace(NamedTuple):
    """Begin and end of a reader in a partition."""

    start: int
    left_order: int
    """NEVER: it is not left yet."""


@dataclass(slots=True)
class PartitionScope:
    """One partition."""

    topic: int
    name: str
    pid: int
    lo: int
    hi: int
    created: int
    close_offset: int
    seal_order: int
    whole: bool
    told: bool
    readers: dict[Reader, ReaderPlace] = field(default_factory=dict)
    leases: dict[tuple[int, int], LeaseSpan] = field(default_factory=dict)
    """By (consumer group, epoch)."""
    ungrouped: frozenset[int] = frozenset()
    given_up: bool = False
    """Declared lost, or deleted: groups go on without what they had not read."""
    weak: bool = False
    """Of a weak topic: two members may have it at once, and order is that of the partition."""
    repeats: bool = False
    """A partition before it was closed from outside: what was stored there may come again, and
    members leave it out."""


@dataclass(slots=True)
class TopicScope:
    """All partitions, by Raft group."""

    partitions: dict[int, PartitionScope]
    bound_us: int
    names: dict[int, str]
    sinks: frozenset[tuple[int, int]] = frozenset()
    """(Topic, consumer group) of which effects are recorded."""

    def name(self, number: int) -> str:
        """Returns a name for people."""
        return self.names.get(number, f"{number & (1 << 64) - 1:016x}")


def scope_of(facts: TopicsFacts, sinks: Iterable[tuple[int, int]] = ()) -> TopicScope:
    """Returns what the sweeps need."""
    ends = release_times(facts)
    made: dict[int, PartitionScope] = {}
    for group, each in facts.by_group.items():
        scope = made[group] = PartitionScope(
            each.topic,
            facts.topics[each.topic].name,
            each.pid,
            each.lo,
            each.hi,
            each.created,
            each.close_offset,
            each.seal_order,
            each.whole,
            each.told,
            ungrouped=frozenset(each.ungrouped),
            given_up=each.pid in facts.topics[each.topic].given_up,
            weak=facts.topics[each.topic].weak,
            repeats=any(line.external for line in facts.topics[each.topic].ancestors(each)),
        )
        for reader, cursor in each.cursors.items():
            left = each.handed_over.get(reader)
            scope.readers[reader] = ReaderPlace(cursor.start, NEVER if left is None else left[0])
        for consumers, leases in each.leases.items():
            for lease, following in zip(leases, [*leases[1:], None], strict=True):
                key = (consumers, lease.epoch)
                known = scope.leases.get(key)
                to_us = NEVER_US if following is None else following.time_us
                scope.leases[key] = LeaseSpan(
                    lease.group_epoch,
                    lease.member,
                    lease.order if known is None else known.from_order,
                    NEVER if following is None else following.order,
                    lease.time_us if known is None else known.from_us,
                    min(to_us, ends.get((group, *key), NEVER_US)),
                )
    return TopicScope(made, facts.bound_us, dict(facts.names), frozenset(sinks))
