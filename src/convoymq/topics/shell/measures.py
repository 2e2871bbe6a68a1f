"""Costs of changes of topics, as this node has measured them since its start: durations by phase,
stalls of groups, and counts of partitions that it leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from convoymq.metadata.machine import TopicRecord, Vhost
from convoymq.topics.rules.changes import FINISHED, Change, Phase

if TYPE_CHECKING:
    from convoymq.topics.machine.queue import PartitionQueue

GROUPS_MAX = 10_000
"""Groups whose stalls are kept apart; those of further ones count in the sums only."""


@dataclass(slots=True)
class Durations:
    """Count and sum of durations."""

    count: int = 0
    total_ms: int = 0

    def add(self, ms: int) -> None:
        """Adds one."""
        self.count += 1
        self.total_ms += max(0, ms)

    def plus(self, count: int, total_ms: int) -> Durations:
        """Returns the sum with others."""
        return Durations(self.count + count, self.total_ms + total_ms)

    @property
    def total_s(self) -> float:
        """Returns the sum in seconds."""
        return self.total_ms / 1000


class ChangePhases:
    """Durations of the phases of changes, as the node that drives them sees it.

    A phase that began before this node looked is measured from its first look.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, Durations] = {
            phase: Durations() for phase in Phase if phase not in FINISHED
        }
        self.ended: Counter[str] = Counter()
        """By kind of change, and `aborted`."""
        self._seen: dict[object, tuple[str, Phase, int]] = {}

    def look(self, topic: object, change: Change | None, now_ms: int) -> None:
        """Takes note of the latest change of a topic."""
        if change is None:
            return
        known = self._seen.get(topic)
        if known is not None and known[:2] == (change.change_id, change.phase):
            return
        if known is not None and known[0] == change.change_id:
            self.seconds[known[1]].add(now_ms - known[2])
        if change.is_finished:
            self._seen.pop(topic, None)
            if known is not None and known[0] == change.change_id:
                is_done = change.phase is Phase.DONE
                self.ended[change.kind.value if is_done else "aborted"] += 1
        else:
            self._seen[topic] = (change.change_id, change.phase, now_ms)

    def forget(self) -> None:
        """Another node drives them now."""
        self._seen.clear()


class GroupStalls:
    """Times for which groups have nothing to do at a change: from the moment when all sources are
    known to be drained until the first target has the lease of a member."""

    def __init__(self) -> None:
        self.all = Durations()
        self.by_group: dict[tuple[str, ...], Durations] = {}

    def add(self, group: tuple[str, ...], ms: int) -> None:
        """A group has waited."""
        self.all.add(ms)
        own = self.by_group.get(group)
        if own is None and len(self.by_group) < GROUPS_MAX:
            own = self.by_group[group] = Durations()
        if own is not None:
            own.add(ms)


@dataclass(slots=True)
class PartitionCounts:
    """Counts of partitions, taken while this node leads them: what a replica counted before belongs
    to another node's counts."""

    fenced: int = 0
    """Acknowledgements by owners whose lease was over."""
    duplicates: int = 0
    """Messages of producers with sequences that were stored already."""
    parked_keys: int = 0
    """Now."""
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, partitions: Iterable[PartitionQueue]) -> None:
        """Takes the counts of the partitions on this node."""
        seen: dict[int, tuple[int, int]] = {}
        self.parked_keys = 0
        for queue in partitions:
            machine = queue.machine()
            if machine is None:
                continue
            now = machine.fenced, machine.duplicates
            if queue.leads:
                # Counts of a replica that was opened anew begin again.
                was = min(now, self._seen.get(queue.group, (0, 0)))
                self.fenced += max(0, now[0] - was[0])
                self.duplicates += max(0, now[1] - was[1])
                groups = machine.state.groups.values()
                self.parked_keys += sum(len(own.parked.keys) for own in groups)
            seen[queue.group] = now
        self._seen = seen


class GroupWait(NamedTuple):
    """Distance of a group from the newest route version."""

    vhost: str
    topic: str
    group: str
    versions: int
    seconds: float
    """Since the next version was published: its partitions wait for those before them."""


def group_waits(vhosts: Iterable[Vhost], now_ms: int) -> list[GroupWait]:
    """Returns the groups of all topics that have not expired."""
    return [
        _wait(record, name, now_ms)
        for vhost in vhosts
        for _, record in sorted(vhost.topics.items())
        for name, group in sorted(record.groups.items())
        if not group.expired
    ]


def _wait(record: TopicRecord, name: str, now_ms: int) -> GroupWait:
    lineage, cv = record.state.lineage, record.groups[name].cv
    latest = record.state.route.version
    published = lineage.published.get(cv + 1)
    seconds = 0.0 if published is None else max(0, now_ms - published.published_at) / 1000
    return GroupWait(record.vhost, record.name, name, latest - cv, seconds)
