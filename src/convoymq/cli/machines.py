"""Machines in place of their processes, for tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""Row of `GET /api/nodes`."""
SUMS = ("connections", "mem_used")


def machines(rows: Iterable[Row]) -> list[Row]:
    """Returns a row for each machine, from those of nodes: that of its process 1, with the sums of
    all. A machine of one process keeps its row, and so does a node whose release tells none."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["machine"] if "machine" in row else row["id"], []).append(row)
    return [
        group[0] if len(group) == 1 else _folded(sorted(group, key=lambda row: int(row["process"])))
        for group in found.values()
    ]


def _folded(rows: list[Row]) -> Row:
    running = [row for row in rows if row["running"]]
    return {
        **rows[0],
        "running": f"{len(running)}/{len(rows)} processes",
        "uptime": max((row.get("uptime", 0) for row in running), default=None),
        "mem_alarm": any(row.get("mem_alarm") for row in running),
        **{name: sum(row.get(name, 0) for row in running) for name in SUMS},
    }
