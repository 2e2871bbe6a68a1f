"""Machines in place of their processes, for lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""Row of `GET /api/nodes`."""
SUMS = ("connections", "mem_used")


def machines(rows: Iterable[Row]) -> list[Row]:
    """Returns a row for each machine, from those of nodes: that of its process 1, with the `nodes`
    of the machine and sums over those that run. A node whose release tells no machine is one."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["machine"] if "machine" in row else row["id"], []).append(row)
    return [
        _folded(sorted(each, key=lambda row: int(row.get("process", 1)))) for each in found.values()
    ]


def _folded(rows: list[Row]) -> Row:
    running = [row for row in rows if row["running"]]
    return {
        **rows[0],
        "nodes": [row["id"] for row in rows],
        "running": bool(running),
        "processes_running": len(running),
        "uptime": max((row.get("uptime", 0) for row in running), default=None),
        "mem_alarm": any(row.get("mem_alarm") for row in running),
        "being_drained": all(row.get("being_drained") for row in rows),
        **{name: sum(row.get(name, 0) for row in running) for name in SUMS},
    }


def state_of(machine: Row) -> str | bool:
    """Returns what a table shows of whether a machine runs."""
    count = len(machine["nodes"])
    if count == 1:
        return bool(machine["running"])
    return f"{machine['processes_running']}/{count} processes"
