"""Facts that the autoscaler of a topic decides from, and the rows by which tools show them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_settings import Settings
from convoymq.topics.machine.load import LoadReport, Means
from convoymq.topics.rules.autoscaler import GroupLoad, Layout, PartitionLoad, Policy, Rates
from convoymq.topics.shell.scaling_rows import (
    ScalingGroupRow,
    ScalingPartitionRow,
    ScalingPolicyRow,
)

Loads: TypeAlias = Mapping[int, tuple[LoadReport, int]]
"""By partition, the last answer of its leader and its time."""


def is_on(settings: Settings) -> bool:
    """Returns whether a topic scales by itself."""
    return settings.get("autoscale") == "on"


def policy_of(settings: Settings) -> Policy:
    """Returns the bounds that settings say; what they leave out is as `Policy` has it."""
    base = Policy()
    number = partial(_number, settings)
    most = number("autoscale-partitions-max", base.partitions_max)
    return Policy(
        unit_ms=number("autoscale-unit", base.unit_ms),
        target_bytes=float(number("autoscale-target-bytes", int(base.target_bytes))),
        target_messages=float(number("autoscale-target-messages", int(base.target_messages))),
        partitions_min=min(most, number("autoscale-partitions-min", base.partitions_min)),
        partitions_max=most,
        changes_per_hour_max=number("autoscale-changes-per-hour", base.changes_per_hour_max),
        lag_max_s=number("autoscale-unit", base.unit_ms) / 1000,
    )


def _number(settings: Settings, name: str, default: int) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) else default


def policy_row(settings: Settings, policy: Policy) -> ScalingPolicyRow:
    """Returns the bounds as tools show them."""
    return {
        "autoscale": "on" if is_on(settings) else "off",
        "target_messages": policy.target_messages,
        "target_bytes": policy.target_bytes,
        "partitions_min": policy.partitions_min,
        "partitions_max": policy.partitions_max,
        "changes_per_hour": policy.changes_per_hour_max,
        "unit_ms": policy.unit_ms,
    }


def load_of(report: LoadReport) -> PartitionLoad:
    """Returns what a partition's leader measured, for the decision."""
    return PartitionLoad(
        _rates(report.byte_rates),
        _rates(report.message_rates),
        array("f", report.lp_bytes),
        array("f", report.lp_messages),
        {
            lp: [key.decode(errors="backslashreplace") for key, _ in rows]
            for lp, rows in report.top_keys.items()
        },
    )


def _rates(means: Means) -> Rates:
    return Rates(*means)


def groups_of(record: TopicRecord, loads: Loads) -> list[GroupLoad]:
    """Returns the groups that have members."""
    made = []
    for name, group in sorted(record.groups.items()):
        if not group.members:
            continue
        owners = {owner.member for owner in group.owners.values()}
        lags = {
            pid: report.groups[name] for pid, (report, _) in loads.items() if name in report.groups
        }
        made.append(
            GroupLoad(
                name=name,
                version=group.cv,
                spare_members=len(group.members - owners),
                lag_s={pid: lag.seconds for pid, lag in lags.items()},
                drain_rate={
                    pid: lag.drain_rate for pid, lag in lags.items() if lag.drain_rate >= 0
                },
            )
        )
    return made


def group_row(group: GroupLoad) -> ScalingGroupRow:
    """Returns a group as tools show it."""
    return {
        "group": group.name,
        "cv": group.version,
        "spare_members": group.spare_members,
        "lag_s": {str(pid): value for pid, value in group.lag_s.items()},
        "drain_rate": {str(pid): value for pid, value in group.drain_rate.items()},
    }


def partition_rows(
    layout: Layout, loads: Loads, policy: Policy, now_ms: int
) -> list[ScalingPartitionRow]:
    """Returns the loads of the open partitions that have answered."""
    rows: list[ScalingPartitionRow] = []
    for pid, placement in layout.placements.items():
        known = loads.get(pid)
        if known is None:
            continue
        report, _ = known
        rows.append(
            {
                "pid": pid,
                "node": placement.server,
                "age_units": (now_ms - placement.created_at) / policy.unit_ms,
                "messages": list(report.message_rates),
                "bytes": list(report.byte_rates),
                "is_replicated": report.is_replicated,
            }
        )
    return rows
