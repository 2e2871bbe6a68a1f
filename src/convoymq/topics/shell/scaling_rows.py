"""Rows by which tools show what the autoscaler of a topic knows and does."""

from __future__ import annotations

from typing import TypedDict

from convoymq.model.json import JsonObject


class ScalingPolicyRow(TypedDict):
    """Bounds that act in a topic: its settings, its policies, and what both leave out."""

    autoscale: str
    """`on` or `off`."""
    target_messages: float
    target_bytes: float
    partitions_min: int
    partitions_max: int
    changes_per_hour: int
    unit_ms: int


class ScalingPartitionRow(TypedDict):
    """Load of an open partition. Rates are per second over the last 2, 5, 10 and 20 units."""

    pid: int
    node: str
    age_units: float
    """Of the partition, or of what its leader has measured, if that is shorter."""
    messages: list[float]
    bytes: list[float]
    is_replicated: bool


class ScalingGroupRow(TypedDict):
    """A group with members. Numbers are by partition."""

    group: str
    cv: int
    spare_members: int
    lag_s: dict[str, float]
    drain_rate: dict[str, float]


class ConsideredRow(TypedDict):
    """A rule that was met, or an action that was held back."""

    subject: str
    rule: str
    outcome: str
    inputs: JsonObject


class HotRow(TypedDict):
    """A logical partition that carries most of a partition which is too busy."""

    pid: int
    lp: int
    keys: list[str]
    """The largest first."""


class ScaledRow(TypedDict):
    """A change that the autoscaler began, or could not."""

    time_ms: int
    decision: str
    rule: str
    change_id: str
    error: str


class ScalingRow(TypedDict):
    """All that `autoscale explain` shows."""

    vhost: str
    name: str
    node: str
    """The node that decides: it leads the metadata group."""
    version: int
    policy: ScalingPolicyRow
    at_ms: int | None
    """Time of the last look; None: there was none yet."""
    held: str
    """Reason for which no change is made now, whatever is met."""
    decision: str
    rule: str
    considered: list[ConsideredRow]
    partitions: list[ScalingPartitionRow]
    groups: list[ScalingGroupRow]
    hot: list[HotRow]
    history: list[ScaledRow]
    """Changes since this node leads, the newest last."""
