"""Rows by which tools show ordered topics. Nodes are named as in other lists."""

from __future__ import annotations

from typing import TypeAlias, TypedDict


class TopicRow(TypedDict):
    """One topic in a list."""

    vhost: str
    name: str
    mode: str
    logical: int
    hash_id: int
    hash_seed: int
    version: int
    """The newest published route version."""
    min_version: int
    """The oldest version that is still described."""
    partitions: int
    """Partitions of that version."""
    groups: list[str]
    change: str
    """Id of the running change; empty: none runs."""
    created_ms: int
    settings: dict[str, bool | int | str]
    """As given when it was created, or to its autoscaler later."""


class SpanRow(TypedDict):
    """The range of a target."""

    pid: int
    lo: int
    hi: int


class ChangeRow(TypedDict):
    """A change of a topic's route."""

    change_id: str
    kind: str
    """`split`, `merge`, `move` or `rebucket`."""
    base_version: int
    next_version: int
    phase: str
    attempt: int
    sources: list[int]
    targets: list[SpanRow]
    ready: list[int]
    """Targets that exist."""
    sealed: list[int]
    """Sources that are sealed."""
    is_finished: bool


class ChangeTimesRow(TypedDict):
    """Durations of the phases of a change, as one node has seen it."""

    change_id: str
    kind: str
    """`split`, `merge`, `move` or `rebucket`."""
    phase: str
    """The present phase, or `done` or `aborted`."""
    phases_ms: dict[str, int]
    """Milliseconds of the phases that have ended, in their order; without those that began before
    the node was there to see it."""


class PartitionRow(TypedDict):
    """One partition."""

    pid: int
    lo: int
    hi: int
    node: str
    """The leader, or who is expected to lead; empty when the partition is deleted."""
    state: str
    """`creating`, `open`, `sealed`, `retired` or `deleted`; `lost` when an operator said so."""
    created_version: int
    sealed_version: int | None
    parents: list[int]
    children: list[int]
    open_offset: int
    close_offset: int | None


class PartitionDetail(PartitionRow):
    """One partition with what its leader says; None where it did not answer in time."""

    members: list[str]
    log_start: int | None
    end_offset: int | None
    messages: int | None
    bytes: int | None


class TopicDetail(TopicRow):
    """A topic with all that is kept of it."""

    partition_rows: list[PartitionDetail]
    """Partitions that are not deleted, by version and range."""
    latest_change: ChangeRow | None
    """The running change, or the latest one."""


class OwnerRow(TypedDict):
    """Owner of a partition within a group."""

    pid: int
    member: str
    epoch: int


class GroupRow(TypedDict):
    """One consumer group."""

    group: str
    mode: str
    """`linear` or `dag`."""
    state: str
    """`active`, `idle` without members, `expired`: it holds nothing back, or `data_expired`: so it
    is, and messages are deleted that it has not read."""
    idle_since_ms: int | None
    """Time when the last member left, or the group was created; None while it has members."""
    cv: int
    """The route version that the group reads."""
    latest: int
    group_epoch: int
    members: list[str]
    owners: list[OwnerRow]
    waits_for: list[int]
    """Sealed partitions that the group has to finish before its version goes on."""
    skipped: list[int]
    """Partitions that a group of a weak topic has gone on without, and reads when they are back."""


class LagRow(TypedDict):
    """Position of a group in a partition that it has not left behind."""

    pid: int
    state: str
    owner: str
    """Empty: nobody."""
    epoch: int
    watermark: int | None
    """The first offset that is not acknowledged; None: the partition did not answer."""
    end_offset: int | None
    close_offset: int | None
    lag: int | None
    """Messages that are not acknowledged."""
    parked_keys: int
    data_expired: bool
    """Retention has cut what the group has not read: it stops here until somebody accepts the
    loss, or seeks."""
    waits_for: list[int]
    """Sealed partitions that the group has to finish before it may read this one."""


class GapRow(TypedDict):
    """Messages that retention cut, and that a group goes on without."""

    pid: int
    first: int
    end: int
    """Exclusive."""


class LossRow(TypedDict):
    """Messages of a partition that a group goes on without."""

    group: str
    group_epoch: int
    pid: int
    lo: int
    hi: int
    first: int
    """The first offset that was not acknowledged, as far as known."""
    end: int | None
    """Offset behind the last message; None: nobody knows."""
    parked_keys: int | None
    """Keys that were parked in the partition; None: nobody knows."""
    reason: str
    """`declared_lost`."""
    time_ms: int


class DrainRow(TypedDict):
    """Outcome of moving one partition away from a node."""

    vhost: str
    topic: str
    pid: int
    to_pid: int | None
    node: str
    """The node that leads now."""
    error: str
    """Empty: done."""


class DrainStateRow(TypedDict):
    """A node that gives its partitions away, and what is left on it."""

    node: str
    state: str
    """`draining`, `read_only` or `removable`."""
    open: int
    """Open partitions of which it is a member."""
    sealed: int
    """Sealed ones."""
    bytes: int
    """Of both, as far as they answered in time."""
    slowest_group: str
    """The group, as `TOPIC/GROUP`, that is furthest behind the changes that sealed them; empty:
    none is."""


TopicRows: TypeAlias = list[TopicRow]
PartitionRows: TypeAlias = list[PartitionRow]
PartitionDetails: TypeAlias = list[PartitionDetail]
DrainRows: TypeAlias = list[DrainRow]
DrainStateRows: TypeAlias = list[DrainStateRow]
GroupRows: TypeAlias = list[GroupRow]
LagRows: TypeAlias = list[LagRow]
LossRows: TypeAlias = list[LossRow]
GapRows: TypeAlias = list[GapRow]
