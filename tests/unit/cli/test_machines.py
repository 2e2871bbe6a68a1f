"""Rows of machines, from those of their processes."""

from __future__ import annotations

from typing import Any

from convoymq.cli.machines import machines


def row(number: int, machine: int, process: int, **more: Any) -> dict[str, Any]:
    facts = {"running": True, "connections": 2, "mem_used": 10, "uptime": number}
    return (
        {"id": number, "machine": machine, "process": process, "name": f"n{number}"} | facts | more
    )


def test_processes_are_folded_into_their_machine() -> None:
    rows = [row(33, 1, 2, mem_alarm=True), row(1, 1, 1), row(65, 1, 3, running=False), row(2, 2, 1)]
    first, second = machines(rows)
    assert (first["name"], first["running"], first["uptime"]) == ("n1", "2/3 processes", 33)
    assert (first["connections"], first["mem_used"], first["mem_alarm"]) == (4, 20, True)
    assert second == row(2, 2, 1)


def test_nodes_that_tell_no_machine_keep_their_rows() -> None:
    old = {"id": 7, "name": "n7", "running": True}
    assert machines([old]) == [old]
