"""Rows of machines, from those of their processes."""

from __future__ import annotations

from typing import Any

from convoymq.model.machine_rows import machines, state_of


def row(number: int, machine: int, process: int, **more: Any) -> dict[str, Any]:
    facts = {"running": True, "connections": 2, "mem_used": 10, "uptime": number}
    return (
        {"id": number, "machine": machine, "process": process, "name": f"n{number}"} | facts | more
    )


def test_processes_are_folded_into_their_machine() -> None:
    rows = [row(33, 1, 2, mem_alarm=True), row(1, 1, 1), row(65, 1, 3, running=False), row(2, 2, 1)]
    first, second = machines(rows)
    assert (first["name"], first["nodes"], first["uptime"]) == ("n1", [1, 33, 65], 33)
    assert (first["running"], first["processes_running"]) == (True, 2)
    assert (first["connections"], first["mem_used"], first["mem_alarm"]) == (4, 20, True)
    assert (second["nodes"], second["connections"]) == ([2], 2)
    assert [state_of(each) for each in (first, second)] == ["2/3 processes", True]


def test_a_machine_is_drained_when_all_its_processes_are() -> None:
    rows = [row(1, 1, 1, being_drained=True), row(33, 1, 2, being_drained=True)]
    assert machines(rows)[0]["being_drained"]
    rows[1]["being_drained"] = False
    assert not machines(rows)[0]["being_drained"]


def test_a_machine_without_a_running_process_uses_nothing() -> None:
    (found,) = machines([row(1, 1, 1, running=False), row(33, 1, 2, running=False)])
    assert (found["running"], found["uptime"], found["connections"]) == (False, None, 0)


def test_nodes_that_tell_no_machine_are_machines() -> None:
    (found,) = machines([{"id": 7, "name": "n7", "running": True}])
    assert (found["nodes"], found["name"], found["running"]) == ([7], "n7", True)
