"""Checks over control rows: routes, steps of groups, gates, leases, counts (A4 to A7, A10, A14).

A weak topic is judged by what it promises: its groups may skip a partition that they say so of
(A6), and gates are not looked at (A7).

Each yields what is wrong, one `Wrong` a place. Of a topic or partition whose rows are not all there
nothing is yielded by what is missing, only by what is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from convoymq.model import trace as words
from convoymq.spark.audit.findings import FindingRow
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.topics.control import (
    NEVER_US,
    Grant,
    PartitionFacts,
    Reader,
    Step,
    TopicFacts,
    TopicsFacts,
)


class Wrong(NamedTuple):
    """One violation."""

    invariant: Invariant
    group: int
    """Raft group of the partition; of what is about a topic, that of its first one."""
    example: dict[str, object]


@dataclass(slots=True)
class Seen:
    """Findings of the sweep over a partition's messages, all parts together."""

    keyed: int = 0
    published: int = 0
    last: int = 0
    """The highest offset of a message."""
    delivered_us: dict[Reader, int] = field(default_factory=lambda: defaultdict(lambda: NEVER_US))
    """Of the first hand-out."""
    settled_us: dict[Reader, int] = field(default_factory=lambda: defaultdict(lambda: -1))
    """Of the latest first acknowledgement."""

    def take(self, row: FindingRow) -> bool:
        """Takes a finding of the sweep up; returns whether it is one of these."""
        match row["what"]:
            case "topic_keyed":
                self.keyed += row["n"]
            case "topic_published":
                self.published += row["n"]
            case "topic_last":
                self.last = max(self.last, row["n"])
            case "edge":
                reader = (row["k2"], row["k3"])
                self.delivered_us[reader] = min(self.delivered_us[reader], row["v1"])
                self.settled_us[reader] = max(self.settled_us[reader], row["v2"])
            case _:
                return False
        return True


def check_topics(facts: TopicsFacts, seen: dict[int, Seen]) -> Iterator[Wrong]:
    """Yields what is wrong with control rows."""
    for topic in facts.topics.values():
        yield from check_versions(topic)
        yield from check_steps(facts, topic)
        yield from check_grants(facts, topic)
        for partition in topic.partitions.values():
            yield from check_places(facts, topic, partition)
            yield from check_leases(facts, topic, partition)
            found = seen.get(partition.group)
            if found is not None:
                if not topic.weak:
                    yield from check_gate(facts, topic, partition, seen)
                yield from check_counts(topic, partition, found)


def _of(topic: TopicFacts, **more: object) -> dict[str, object]:
    return {"topic": topic.name, **more}


# --- A5 ------------------------------------------------------------------------------------


def check_versions(topic: TopicFacts) -> Iterator[Wrong]:
    """A5: versions are consecutive, cover everything, and differ by one change."""

    def wrong(version: int, why: str) -> Wrong:
        return Wrong(Invariant.TOPIC_VERSIONS, topic.home, _of(topic, version=version, why=why))

    versions = sorted(topic.versions)
    if topic.whole and versions and versions[0] != 0:
        yield wrong(versions[0], "the first version is not 0")
    for version in versions:
        ranges = sorted(topic.versions[version])
        ends = [0, *(hi for _, hi, _ in ranges)]
        covers = [lo for lo, _, _ in ranges] == ends[:-1] and ends[-1] == topic.logical
        if not covers and topic.logical:
            yield wrong(version, "its ranges do not cover every logical partition once")
    for before, version in pairwise(versions):
        if version != before + 1:
            yield wrong(version, f"it follows version {before}")
            continue
        why = _change_fault(topic.versions[before], topic.versions[version])
        if why:
            yield wrong(version, why)


def _change_fault(old: list[tuple[int, int, int]], new: list[tuple[int, int, int]]) -> str:
    """Returns why two route versions do not differ by one change; "" = they do."""
    sources, targets = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    if not sources or not targets:
        return "nothing changes"
    if {pid for _, _, pid in old} & {pid for _, _, pid in targets}:
        return "a partition returns with another range"
    if min(len(sources), len(targets)) > 1:
        return "more than one split, merge or move"
    for spans in (sources, targets):
        if any(a[1] != b[0] for a, b in pairwise(spans)):
            return "its ranges are no neighbours"
    ends = [(spans[0][0], spans[-1][1]) for spans in (sources, targets)]
    return "" if ends[0] == ends[1] else "targets have another range than sources"


# --- A6 ------------------------------------------------------------------------------------


def check_steps(facts: TopicsFacts, topic: TopicFacts) -> Iterator[Wrong]:
    """A6: a group moves by one, to a version that is published, when its sources are left."""
    for group, steps in topic.groups.items():
        at = -1
        for step in sorted(steps, key=lambda each: each.order):
            why = ""
            if step.kind == words.ADVANCED:
                why = _step_fault(facts, topic, group, step, at)
            elif step.to not in topic.published and topic.whole:
                why = "it begins at a version that is not published"
            if why:
                example = _of(topic, group=facts.name(group), at=at, to=step.to, why=why)
                yield Wrong(Invariant.TOPIC_GROUP_STEPS, topic.home, example)
            at = step.to


def _step_fault(facts: TopicsFacts, topic: TopicFacts, group: int, step: Step, at: int) -> str:
    if step.to != step.expect + 1 or (at >= 0 and at != step.expect):
        return "it is no step to the next version"
    published = topic.published.get(step.to)
    if published is None:
        return "the version is not published" if topic.whole else ""
    if published[0] > step.order:
        return "the version is published later"
    for source in topic.sources(step.expect):
        if source.pid in topic.given_up or group in source.ungrouped or not source.whole:
            continue
        if ((group, step.group_epoch), source.pid) in topic.skipped:
            continue
        left = source.handed_over.get((group, step.group_epoch))
        if left is None or left[1] > step.time_us + facts.bound_us:
            return f"partition {source.pid} is not handed over"
    return ""


# --- A7 ------------------------------------------------------------------------------------


def check_gate(
    facts: TopicsFacts, topic: TopicFacts, partition: PartitionFacts, seen: dict[int, Seen]
) -> Iterator[Wrong]:
    """A7: the first delivery to a group comes after its step to a version with the partition, and
    after the last acknowledgement in every ancestor."""
    for reader, first_us in seen[partition.group].delivered_us.items():
        group, group_epoch = reader
        begins = [s for s in topic.groups.get(group, ()) if s.group_epoch == group_epoch]
        if not begins or group in partition.ungrouped:
            continue
        until_us = first_us + facts.bound_us

        def wrong(why: str, *, late_us: int, name: str = facts.name(group)) -> Wrong:
            example = _of(topic, pid=partition.pid, group=name, why=why, early_us=late_us)
            return Wrong(Invariant.TOPIC_GATE, partition.group, example)

        if group not in topic.dag:
            step = _entered(partition, sorted(begins, key=lambda each: each.order))
            if step is None and topic.whole:
                yield wrong("the group never came to its versions", late_us=0)
            elif step is not None and step.time_us > until_us:
                yield wrong("before the group's step", late_us=step.time_us - first_us)
        start = min(each.to for each in begins)
        for ancestor in topic.ancestors(partition):
            found = seen.get(ancestor.group)
            if found is None or ancestor.sealed is None or ancestor.sealed <= start:
                continue
            settled_us = found.settled_us.get(reader, -1)
            if settled_us > until_us:
                why = f"before the last acknowledgement in partition {ancestor.pid}"
                yield wrong(why, late_us=settled_us - first_us)


def _entered(partition: PartitionFacts, steps: list[Step]) -> Step | None:
    """Returns the step with which a group came to a version that has the partition."""
    for step in steps:
        if partition.created <= step.to and (
            partition.sealed is None or step.to < partition.sealed
        ):
            return step
    return None


# --- A4 ------------------------------------------------------------------------------------


def check_places(
    facts: TopicsFacts, topic: TopicFacts, partition: PartitionFacts
) -> Iterator[Wrong]:
    """A4 for control entries: a target opens after its sources were closed, and reads of it begin
    at its start."""
    for ancestor in topic.ancestors(partition):
        late_us = ancestor.seal_us - partition.open_us
        opened = partition.open_us >= 0 and not ancestor.external
        if opened and ancestor.seal_us >= 0 and late_us > facts.bound_us:
            example = _of(topic, pid=partition.pid, source=ancestor.pid, early_us=late_us)
            yield Wrong(Invariant.TOPIC_ONE_PLACE, partition.group, example)
    for (group, group_epoch), cursor in partition.cursors.items():
        steps = [s for s in topic.groups.get(group, ()) if s.group_epoch == group_epoch]
        begins = [s.to for s in steps if s.kind != words.ADVANCED]
        if not begins or cursor.start <= 1 or group in partition.ungrouped:
            continue
        sealed = partition.sealed
        if not (partition.created <= begins[0] and (sealed is None or begins[0] < sealed)):
            example = _of(topic, pid=partition.pid, group=facts.name(group), start=cursor.start)
            yield Wrong(Invariant.TOPIC_NOTHING_LOST, partition.group, example)


# --- A10 -----------------------------------------------------------------------------------


def check_grants(facts: TopicsFacts, topic: TopicFacts) -> Iterator[Wrong]:
    """A10 in the metadata log: a lease is given when the one before is over; epochs rise."""
    by_lease: dict[tuple[int, int], list[Grant]] = defaultdict(list)
    for grant in topic.grants:
        by_lease[grant.group, grant.pid].append(grant)
    for (group, pid), grants in by_lease.items():
        owner: Grant | None = None
        epoch = 0
        for grant in sorted(grants, key=lambda each: each.order):
            why = ""
            if grant.is_grant:
                if owner is not None and topic.whole:
                    why = f"epoch {owner.epoch} is not over"
                elif grant.epoch <= epoch:
                    why = f"epoch {grant.epoch} follows {epoch}"
                owner, epoch = grant, max(epoch, grant.epoch)
            else:
                if owner is not None and owner.epoch != grant.epoch:
                    why = f"the end of epoch {grant.epoch} in that of {owner.epoch}"
                owner = None
            if why:
                example = _of(topic, pid=pid, group=facts.name(group), why=why)
                known = topic.partitions.get(pid)
                place = topic.home if known is None else known.group
                yield Wrong(Invariant.TOPIC_ONE_OWNER, place, example)


def check_leases(
    facts: TopicsFacts, topic: TopicFacts, partition: PartitionFacts
) -> Iterator[Wrong]:
    """A10 in the partition's log: epochs rise, and each was granted to this member."""
    granted = {
        (each.group, each.epoch): each.member
        for each in topic.grants
        if each.is_grant and each.pid == partition.pid
    }
    for group, leases in partition.leases.items():
        if group in partition.ungrouped:
            continue
        before = None
        for lease in leases:
            why = ""
            if before is not None and lease.epoch < before.epoch:
                why = f"epoch {lease.epoch} follows {before.epoch}"
            elif before is not None and lease.epoch == before.epoch != 0:
                why = "" if lease.member == before.member else "one epoch has two members"
            elif topic.whole and granted.get((group, lease.epoch)) != lease.member:
                why = f"epoch {lease.epoch} was not granted to this member"
            if why:
                example = _of(topic, pid=partition.pid, group=facts.name(group), why=why)
                yield Wrong(Invariant.TOPIC_ONE_OWNER, partition.group, example)
            before = lease


# --- A14 -----------------------------------------------------------------------------------


def check_counts(topic: TopicFacts, partition: PartitionFacts, seen: Seen) -> Iterator[Wrong]:
    """A14: messages, keys and CLOSE of a partition agree."""
    if not partition.whole:
        return
    counts = {"keyed": seen.keyed, "published": seen.published}
    if partition.close_offset >= 0:
        counts["between OPEN and CLOSE"] = partition.close_offset - 1
    else:
        counts["up to the last offset"] = seen.last
    if len(set(counts.values())) > 1:
        example = _of(topic, pid=partition.pid, **counts)
        yield Wrong(Invariant.TOPIC_COUNTS, partition.group, example)


def release_times(facts: TopicsFacts) -> dict[tuple[int, int, int], int]:
    """Returns when leases ended, by (Raft group, consumer group, epoch)."""
    found: dict[tuple[int, int, int], int] = {}
    for topic in facts.topics.values():
        for grant in topic.grants:
            partition = topic.partitions.get(grant.pid)
            if partition is not None and not grant.is_grant:
                found[partition.group, grant.group, grant.epoch] = grant.time_us
    return found


def summary(wrongs: Iterable[Wrong]) -> dict[tuple[Invariant, int], list[dict[str, object]]]:
    """Returns examples by invariant and Raft group."""
    found: dict[tuple[Invariant, int], list[dict[str, object]]] = defaultdict(list)
    for wrong in wrongs:
        found[wrong.invariant, wrong.group].append(wrong.example)
    return found
