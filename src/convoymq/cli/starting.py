"""Steps of a start of a local cluster's nodes, and why one does not go on, by their logs."""

from __future__ import annotations

import json

from convoymq.model.json import JsonObject

STALLED_S = 60.0
"""So long without progress, and a start is given up."""
PROGRESS_CPU_S = 1.0
"""So much processor time is progress: recovery of a large log says nothing meanwhile."""
WAITS = "waits: "
LAST_LINES = 3


def steps(log: bytes) -> list[str]:
    """Returns the steps of a node's start that its log output shows, in words."""
    found = []
    for line in log.splitlines():
        entry = _entry(line)
        text = _step(entry) if entry is not None else ""
        if text:
            found.append(text)
    return found


def reason(log: bytes) -> str:
    """Returns why a node ended or does not go on: its last error, else its last step, else the end
    of what it wrote."""
    text = log.decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    entries = [_entry(line.encode()) for line in lines]
    for entry in reversed(entries):
        if entry is not None and entry.get("level") in ("error", "critical"):
            return _error(entry)
    if entries and entries[-1] is not None:
        done = steps(log)
        return f"the last that its log tells: {done[-1]}" if done else ""
    return " | ".join(lines[-LAST_LINES:])


def _entry(line: bytes) -> JsonObject | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _step(entry: JsonObject) -> str:
    match entry["event"]:
        case "storage.recovered":
            return (
                f"has read its data: {entry.get('groups')} groups, {entry.get('entries')} entries"
            )
        case "cluster.waiting":
            return f"{WAITS}{entry.get('reason', '')}"
        case "cluster.forming":
            return f"founds a cluster of nodes {_numbers(entry.get('members'))}"
        case "cluster.joining":
            return f"joins the cluster of nodes {_numbers(entry.get('members'))}"
        case "node.ready":
            return "is ready"
    return _error(entry) if entry.get("level") in ("error", "critical") else ""


def _numbers(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _error(entry: JsonObject) -> str:
    known = ("event", "level", "timestamp", "node")
    facts = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in known)
    said = entry.get("reason") or facts
    return f"{entry['event']}: {said}" if said else str(entry["event"])
