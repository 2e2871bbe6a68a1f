"""What a running node says of its cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from convoymq.node.cluster_entry import LEADERLESS_MS, LeaderWatch


class Parts:
    """Replica of the metadata group, links and clock of node 1."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.leader: int | None = None
        self.linked = {2, 3}
        core = SimpleNamespace(quarantined=False)
        self.replica: Any = SimpleNamespace(members=(1, 2, 3), faulty="", core=core)
        host: Any = SimpleNamespace(
            node=1, replica=lambda group: self.replica, leader_of=lambda group: self.leader
        )
        links: Any = SimpleNamespace(is_connected=lambda node: node in self.linked)
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.watch = LeaderWatch(host, links, clock, structlog.get_logger())

    def pass_by(self, ms: int) -> list[Any]:
        with structlog.testing.capture_logs() as said:
            self.watch.tick()
            self.now_ms += ms
            self.watch.tick()
        return [line for line in said if line["event"] == "cluster.no_leader"]


@pytest.mark.provokes("cluster.no_leader")
def test_a_linked_majority_without_a_leader_is_named_once() -> None:
    parts = Parts()
    parts.watch.tick()
    parts.now_ms += LEADERLESS_MS
    # Not captured: the claim of this test is about what is logged.
    parts.watch.tick()
    assert parts.pass_by(10 * LEADERLESS_MS) == []
    parts.leader = 2
    parts.watch.tick()
    parts.leader = None
    parts.replica.core.quarantined = True
    (line,) = parts.pass_by(LEADERLESS_MS)
    assert "convoy recover" in line["text"]
    assert line["own_fault"] == "its metadata was lost"


@pytest.mark.parametrize("why", ["short", "led", "cut off", "not a member yet"])
def test_nothing_is_said_while_a_leader_may_still_come(why: str) -> None:
    parts = Parts()
    parts.leader = 2 if why == "led" else None
    if why == "cut off":
        parts.linked.clear()
    if why == "not a member yet":
        parts.replica = None
    assert parts.pass_by(LEADERLESS_MS - 1 if why == "short" else 10 * LEADERLESS_MS) == []
