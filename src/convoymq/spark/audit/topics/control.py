"""Routes, groups and leases of topics, from the rows that are few: one per change, step or lease.

They are collected, and every worker gets what of them the sweeps need (`TopicScope`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from convoymq.model import trace as words
from convoymq.spark.audit.coverage import QueueFacts

ControlRow: TypeAlias = Mapping[str, int]
"""A decided row, with `order` in the log of its group."""
NEVER_US = 1 << 62
ONE_HOST_US = 3_000
"""Clocks of one machine: entries have whole milliseconds."""
MANY_HOSTS_US = 1_000_000
"""Clocks of nodes are held within 500 ms of their median (transport.cluster_clock)."""
CONTROL_KINDS = (
    words.OPENED, words.SEALED, words.CURSOR, words.LEASED, words.HANDED_OVER, words.UNGROUPED,
    words.TOPIC, words.RANGE, words.GROUP, words.GRANTED, words.RELEASED, words.ADVANCED,
    words.SOUGHT, words.GIVEN_UP, words.NAME, words.SKIPPED,
)  # fmt: skip

Reader: TypeAlias = tuple[int, int]
"""A consumer group (hash), and its group epoch: a seek makes another reader."""


class Lease(NamedTuple):
    """One lease of a partition in a group, as the partition knows it."""

    epoch: int
    group_epoch: int
    member: int
    node: int
    order: int
    time_us: int


class CursorRow(NamedTuple):
    """Begin of a reader in a partition."""

    start: int
    order: int
    time_us: int
    states: int


@dataclass(slots=True)
class PartitionFacts:
    """One partition: its line of the lineage, and what its log says."""

    group: int
    topic: int
    pid: int
    lo: int
    hi: int
    created: int
    sealed: int | None = None
    """The first version without it."""
    close_offset: int = -1
    seal_order: int = -1
    seal_us: int = -1
    external: bool = False
    open_us: int = -1
    traced: bool = False
    whole: bool = False
    """Every decided entry is in the trace."""
    told: bool = False
    """So is every act of every node."""
    cursors: dict[Reader, CursorRow] = field(default_factory=dict)
    handed_over: dict[Reader, tuple[int, int]] = field(default_factory=dict)
    """Reader -> (order, time)."""
    leases: dict[int, list[Lease]] = field(default_factory=lambda: defaultdict(list))
    """By consumer group, in the order of the log."""
    ungrouped: set[int] = field(default_factory=set)
    """Consumer groups that were deleted: they are judged no more."""


@dataclass(slots=True)
class Step:
    """A group's way through the versions: creation, advance, or seek."""

    kind: int
    order: int
    time_us: int
    to: int
    expect: int
    group_epoch: int


@dataclass(slots=True)
class Grant:
    """A lease begins or ends, as the metadata group decides it."""

    is_grant: bool
    order: int
    time_us: int
    group: int
    pid: int
    epoch: int
    member: int


@dataclass(slots=True)
class TopicFacts:
    """One topic."""

    number: int
    name: str = ""
    logical: int = 0
    versions: dict[int, list[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Version -> [lo, hi, pid]."""
    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Version -> (order, time)."""
    partitions: dict[int, PartitionFacts] = field(default_factory=dict)
    groups: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))
    dag: set[int] = field(default_factory=set)
    grants: list[Grant] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)
    weak: bool = False
    """The topic is a weak one: it promises less."""
    skipped: set[tuple[Reader, int]] = field(default_factory=set)
    """(Reader, partition) of what groups of a weak topic went on without, also what they read
    later."""
    whole: bool = False
    """Every decided entry about topics is in the trace."""

    @property
    def home(self) -> int:
        """Returns the Raft group of the first partition that is traced; 0 = none is."""
        traced = (each.group for each in self.partitions.values() if each.traced)
        return min(traced, default=0)

    def sources(self, version: int) -> list[PartitionFacts]:
        """Returns what `version` has and the next one has not."""
        pids = {pid for _, _, pid in self.versions.get(version + 1, ())}
        return [
            self.partitions[pid] for _, _, pid in self.versions.get(version, ()) if pid not in pids
        ]

    def ancestors(self, partition: PartitionFacts) -> list[PartitionFacts]:
        """Returns the partitions that owned some of the range before."""
        return [
            each
            for each in self.partitions.values()
            if each.sealed is not None
            and each.sealed <= partition.created
            and each.lo < partition.hi
            and partition.lo < each.hi
        ]


@dataclass(slots=True)
class TopicsFacts:
    """All topics of a trace."""

    topics: dict[int, TopicFacts] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    bound_us: int = MANY_HOSTS_US
    """Bound of contradictions between clocks."""

    @property
    def by_group(self) -> dict[int, PartitionFacts]:
        """Returns the partitions by the number of their Raft group."""
        return {
            partition.group: partition
            for topic in self.topics.values()
            for partition in topic.partitions.values()
            if partition.group
        }

    def name(self, number: int) -> str:
        """Returns a name for people."""
        return self.names.get(number, f"{number & (1 << 64) - 1:016x}")


def topics_facts(
    rows: Iterable[ControlRow], facts: Iterable[QueueFacts], hosts: Sequence[str]
) -> TopicsFacts:
    """Joins control rows to facts about every topic.

    Args:
        rows: of all groups, any order.
        facts: of all queues: which of them are recorded without a gap.
        hosts: of all files.
    """
    made = TopicsFacts()
    one_host = len(set(hosts)) == 1 and bool(hosts[0])
    made.bound_us = ONE_HOST_US if one_host else MANY_HOSTS_US
    known = {each.group: each for each in facts}
    ordered = sorted(rows, key=lambda row: (row["group"], row["order"]))
    for row in ordered:
        if row["kind"] in _METADATA:
            _METADATA[row["kind"]](made, row)
    for topic in made.topics.values():
        topic.whole = any(
            each.type == words.TOPICS_TYPE and _is_whole(each) for each in known.values()
        )
        _take_lives(topic)
        for partition in topic.partitions.values():
            queue = known.get(partition.group)
            partition.traced = queue is not None
            partition.whole = queue is not None and _is_whole(queue)
            partition.told = queue is not None and partition.whole and not queue.gaps
    by_group = made.by_group
    for row in ordered:
        found = by_group.get(row["group"])
        if found is not None and row["kind"] in _PARTITION:
            _PARTITION[row["kind"]](found, row)
    return made


def _is_whole(facts: QueueFacts) -> bool:
    return not (
        facts.start or facts.lost or facts.missing or any(not gap.node for gap in facts.gaps)
    )


def _take_lives(topic: TopicFacts) -> None:
    for version in sorted(topic.versions):
        following = topic.versions.get(version + 1)
        if following is None:
            continue
        left = {pid for _, _, pid in following}
        for _, _, pid in topic.versions[version]:
            if pid not in left:
                topic.partitions[pid].sealed = version + 1


# --- rows of the metadata group ------------------------------------------------------------


def _topic_of(made: TopicsFacts, row: ControlRow) -> TopicFacts:
    number = row["session"]
    topic = made.topics.get(number)
    if topic is None:
        topic = made.topics[number] = TopicFacts(number, made.names.get(number, ""))
    return topic


def _on_name(made: TopicsFacts, row: ControlRow) -> None:
    made.names[row["session"]] = words.name_of(row)


def _on_topic(made: TopicsFacts, row: ControlRow) -> None:
    if not row["flags"] & words.GROUP_GONE:
        topic = _topic_of(made, row)
        topic.logical, topic.weak = row["consumer"], bool(row["flags"] & words.WEAK)


def _on_range(made: TopicsFacts, row: ControlRow) -> None:
    topic = _topic_of(made, row)
    pid, version, lo, count = row["consumer"], row["seq"], row["first_id"], row["count"]
    topic.versions[version].append((lo, lo + count, pid))
    topic.published.setdefault(version, (row["order"], row["time_us"]))
    if pid not in topic.partitions:
        topic.partitions[pid] = PartitionFacts(
            row["position_index"], topic.number, pid, lo, lo + count, row["position_command"]
        )


def _on_group(made: TopicsFacts, row: ControlRow) -> None:
    topic = _topic_of(made, row)
    if row["first_id"]:
        topic.dag.add(row["seq"])
    if not row["flags"] & words.GROUP_GONE:
        _step(topic, row, row["consumer"], -1)
    else:
        topic.groups.pop(row["seq"], None)


def _step(topic: TopicFacts, row: ControlRow, to: int, expect: int) -> None:
    topic.groups[row["seq"]].append(
        Step(row["kind"], row["order"], row["time_us"], to, expect, row["position_index"])
    )


def _on_advanced(made: TopicsFacts, row: ControlRow) -> None:
    _step(_topic_of(made, row), row, row["consumer"], row["first_id"])


def _on_sought(made: TopicsFacts, row: ControlRow) -> None:
    _step(_topic_of(made, row), row, row["consumer"], -1)


def _on_grant(made: TopicsFacts, row: ControlRow) -> None:
    _topic_of(made, row).grants.append(
        Grant(
            row["kind"] == words.GRANTED, row["order"], row["time_us"], row["seq"],
            row["consumer"], row["count"], row["first_id"],
        )
    )  # fmt: skip


def _on_given_up(made: TopicsFacts, row: ControlRow) -> None:
    _topic_of(made, row).given_up.add(row["consumer"])


def _on_skipped(made: TopicsFacts, row: ControlRow) -> None:
    reader = (row["seq"], row["position_index"])
    _topic_of(made, row).skipped.add((reader, row["consumer"]))


_METADATA = {
    words.NAME: _on_name,
    words.TOPIC: _on_topic,
    words.RANGE: _on_range,
    words.GROUP: _on_group,
    words.ADVANCED: _on_advanced,
    words.SOUGHT: _on_sought,
    words.GRANTED: _on_grant,
    words.RELEASED: _on_grant,
    words.GIVEN_UP: _on_given_up,
    words.SKIPPED: _on_skipped,
}


# --- rows of partitions --------------------------------------------------------------------


def _on_opened(partition: PartitionFacts, row: ControlRow) -> None:
    partition.open_us = row["time_us"]


def _on_sealed(partition: PartitionFacts, row: ControlRow) -> None:
    partition.close_offset = row["first_id"]
    partition.seal_order = row["order"]
    partition.seal_us = row["time_us"]
    partition.external = bool(row["flags"] & words.EXTERNAL)


def _on_cursor(partition: PartitionFacts, row: ControlRow) -> None:
    partition.cursors[row["session"], row["seq"]] = CursorRow(
        row["first_id"], row["order"], row["time_us"], row["count"]
    )


def _on_leased(partition: PartitionFacts, row: ControlRow) -> None:
    partition.leases[row["session"]].append(
        Lease(
            row["consumer"], row["seq"], row["first_id"], row["position_index"], row["order"],
            row["time_us"],
        )
    )  # fmt: skip


def _on_handed_over(partition: PartitionFacts, row: ControlRow) -> None:
    partition.handed_over[row["session"], row["seq"]] = (row["order"], row["time_us"])


def _on_ungrouped(partition: PartitionFacts, row: ControlRow) -> None:
    partition.ungrouped.add(row["session"])


_PARTITION = {
    words.OPENED: _on_opened,
    words.SEALED: _on_sealed,
    words.CURSOR: _on_cursor,
    words.LEASED: _on_leased,
    words.HANDED_OVER: _on_handed_over,
    words.UNGROUPED: _on_ungrouped,
}
