"""The ways to replicate that are compared: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.replication import broker_groups, real, real_groups, simulated
from benchmarks.replication.faults import NODES, Fault


@dataclass(frozen=True, slots=True)
class Way:
    """One way to replicate a queue.

    Args:
        text: how a queue gets it.
        simulate: returns the world of a schedule and a seed.
        run: runs a schedule with real nodes.
        loses: schedules in which it may lose what is confirmed.
        disorders: schedules in which it may repeat without `redelivered`, or reorder.
    """

    name: str
    title: str
    text: str
    simulate: Callable[[Fault], simulated.Maker]
    run: real.Runner
    loses: frozenset[str] = frozenset()
    disorders: frozenset[str] = frozenset()


MIRRORS = {"ha-mode": "all"}
SAFE = {**MIRRORS, "ha-sync-mode": "automatic", "ha-promote-on-failure": "when-synced"}
CLASSIC = {"x-queue-type": "classic"}
GROUP = {
    "totalReplicas": len(NODES),
    "inSyncReplicas": 2,
    "flushDiskType": "SYNC_FLUSH",
    "enableSlaveActingMaster": "true",
    "slaveReadEnable": "true",
}

WAYS = (
    Way(
        "quorum",
        "quorum",
        "`x-queue-type: quorum`, three members",
        simulated.quorum,
        real.queue({"x-queue-type": "quorum"}, {}),
    ),
    Way(
        "mirrored",
        "mirrored",
        "classic, policy `ha-mode: all`, else defaults",
        simulated.mirrored(MIRRORS),
        real.queue(CLASSIC, MIRRORS),
        loses=frozenset({"backlog"}),
    ),
    Way(
        "mirrored-synced",
        "mirrored, synced",
        "classic, `ha-mode: all`, `ha-sync-mode: automatic`, `ha-promote-on-failure: when-synced`",
        simulated.mirrored(SAFE),
        real.queue(CLASSIC, SAFE),
    ),
    Way(
        "classic",
        "classic",
        "one copy, durable",
        simulated.classic,
        real.queue(CLASSIC, {}),
        loses=frozenset({"lost", "backlog"}),
        # What was handed out last may not be on disk.
        disorders=frozenset({"power"}),
    ),
    Way(
        "group",
        "broker group",
        "a topic of a master and two slaves: SYNC_MASTER, `inSyncReplicas=2`, SYNC_FLUSH,"
        " `enableSlaveActingMaster`",
        broker_groups.group,
        real_groups.group(GROUP),
    ),
)
"""A new way is a line here: what makes its world, and what runs it with real nodes."""


def ways_of(names: Sequence[str]) -> list[Way]:
    """The ways of these names, in the order of the table; all for no name."""
    return [way for way in WAYS if not names or way.name in names]


def broken_promises(way: Way, fault: Fault, counts: Mapping[str, Any], where: str) -> list[str]:
    """What a way promises, and a run did not keep."""
    broken = []
    if counts.get("failure"):
        broken.append(f"{where}: {counts['failure']}")
    if counts["lost"] and fault.name not in way.loses:
        broken.append(f"{where}: {counts['lost']} confirmed messages lost")
    if fault.name not in way.disorders:
        for name in ("unflagged", "reorders"):
            if counts[name]:
                broken.append(f"{where}: {name} {counts[name]}")
    return broken
