"""The text of `convoy topics autoscale NAME explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOWS = "2u, 5u, 10u, 20u"


def explained(found: Mapping[str, Any]) -> str:
    """Returns what the autoscaler of a topic decides, and from what, as lines."""
    policy = found["policy"]
    unit_s = policy["unit_ms"] / 1000
    lines = [
        f"autoscale {policy['autoscale']}, decided by {found['node']}, route version "
        f"{found['version']}",
        f"unit u = {unit_s:g} s; targets: {policy['target_messages']:g} messages/s, "
        f"{policy['target_bytes']:g} bytes/s; {policy['partitions_min']} to "
        f"{policy['partitions_max']} partitions; at most {policy['changes_per_hour']} changes/h",
    ]
    if found["at_ms"] is None:
        return "\n".join([*lines, "no look was taken yet"])
    lines += [_partition(row) for row in found["partitions"]]
    lines += [_group(row) for row in found["groups"]]
    lines += [
        f"hot: logical partition {row['lp']} of partition {row['pid']}, largest keys: "
        f"{', '.join(row['keys']) or 'not known yet'}"
        for row in found["hot"]
    ]
    lines += [
        f"{row['subject']}: {row['rule']} ({shown(row['inputs'])}): {row['outcome']}"
        for row in found["considered"]
    ]
    if found["held"]:
        lines.append(f"no change now: {found['held']}")
    rule = f" (rule {found['rule']})" if found["rule"] else ""
    lines.append(f"decision: {found['decision']}{rule}")
    lines += [_done(row) for row in found["history"]]
    return "\n".join(lines)


def _partition(row: Mapping[str, Any]) -> str:
    messages, sizes = (_rates(row[name]) for name in ("messages", "bytes"))
    lagging = "" if row["is_replicated"] else ", a replica is behind"
    return (
        f"partition {row['pid']} on {row['node']}, {row['age_units']:.1f} u old: messages/s "
        f"{messages}, bytes/s {sizes} ({WINDOWS}){lagging}"
    )


def _group(row: Mapping[str, Any]) -> str:
    lags = ", ".join(f"{pid}: {lag:.1f}" for pid, lag in row["lag_s"].items())
    return (
        f"group {row['group']} at version {row['cv']}, spare members {row['spare_members']}, lag "
        f"in s by partition: {lags or 'none'}"
    )


def _done(row: Mapping[str, Any]) -> str:
    outcome = row["change_id"] or f"refused: {row['error']}"
    return f"done: {row['decision']} by rule {row['rule']}: {outcome}"


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.4g}" for rate in rates)


def shown(inputs: Mapping[str, Any]) -> str:
    """Returns the numbers that a rule compared."""
    return ", ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in inputs.items()
    )
