"""Durations of changes as each node sees them: order, bound, what a node did not see."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.machine import Change, ChangeKind
from convoymq.topics.rules.changes import Change as TopicChange
from convoymq.topics.rules.changes import Kind, Phase, plan_split
from convoymq.topics.rules.routes import first_route
from convoymq.topics.shell.change_times import CHANGES_MAX, ChangeTimes
from tests.unit.queues.fake_cluster import FakeCluster, until

ORDERS = ("/", "orders")
WHOLE = tuple(phase for phase in Phase if phase is not Phase.ABORTED)


class Rig:
    """A tree with the topic `orders`, and a clock."""

    def __init__(self) -> None:
        self.now_ms = 1000
        self.tree: Any = SimpleNamespace(vhosts={"/": SimpleNamespace(topics={})})
        self.times = ChangeTimes(self.tree, SimpleNamespace(monotonic_ms=lambda: self.now_ms))  # type: ignore[arg-type]
        self.create(1)

    def create(self, created_ms: int) -> None:
        self.tree.vhosts["/"].topics["orders"] = SimpleNamespace(
            vhost="/", name="orders", created_ms=created_ms, state=SimpleNamespace(change=None)
        )

    def tell(self) -> None:
        self.times.on_change(Change(ChangeKind.TOPIC, vhost="/", topic="orders"))

    def phase(self, change: TopicChange, phase: Phase, after_ms: int = 0) -> None:
        self.now_ms += after_ms
        state = self.tree.vhosts["/"].topics["orders"].state
        state.change = dataclasses.replace(change, phase=phase)
        self.tell()

    def run(self, change_id: str) -> None:
        for number, phase in enumerate(WHOLE):
            self.phase(planned(change_id), phase, number)

    def rows(self) -> list[tuple[str, str, list[int]]]:
        return [
            (row["change_id"], row["phase"], list(row["phases_ms"].values()))
            for row in self.times.rows(*ORDERS)
        ]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def planned(change_id: str = "c1") -> TopicChange:
    return plan_split(first_route(8, 1), 0, (4,), 1, change_id)


def test_each_phase_has_its_time(rig: Rig) -> None:
    assert rig.times.rows(*ORDERS) == []
    rig.tell()
    rig.phase(planned(), Phase.PREPARED)
    rig.phase(planned(), Phase.PREPARED, 5)
    rig.phase(planned(), Phase.TARGETS_READY, 15)
    rig.phase(planned(), Phase.SEALING, 1)
    assert rig.rows() == [("c1", "sealing", [20, 1])]
    rig.phase(dataclasses.replace(planned(), kind=Kind.MOVE), Phase.PUBLISHED, 30)
    rig.phase(dataclasses.replace(planned(), kind=Kind.MOVE), Phase.DONE, 7)
    rig.phase(planned(), Phase.DONE, 100)
    assert rig.times.rows(*ORDERS) == [
        {
            "change_id": "c1",
            "kind": "move",
            "phase": "done",
            "phases_ms": {
                "prepared": 20, "targets_ready": 1, "sealing": 30, "sealed": 0, "published": 7,
            },
        }
    ]  # fmt: skip


def test_an_aborted_change_has_the_phases_that_it_came_to(rig: Rig) -> None:
    rig.phase(planned(), Phase.PREPARED)
    rig.phase(planned(), Phase.ABORTED, 9)
    rig.run("c2")
    assert rig.rows() == [("c1", "aborted", [9]), ("c2", "done", [1, 2, 3, 4, 5])]


def test_the_oldest_changes_are_forgotten(rig: Rig) -> None:
    for number in range(CHANGES_MAX + 2):
        rig.run(f"c{number}")
    assert [row[0] for row in rig.rows()] == [f"c{n}" for n in range(2, CHANGES_MAX + 2)]
    rig.phase(planned("next"), Phase.PREPARED)
    assert rig.rows()[-1] == ("next", "prepared", [])


def test_what_a_node_did_not_see_begin_has_no_time(rig: Rig) -> None:
    rig.phase(planned("before"), Phase.DONE)
    rig.phase(planned(), Phase.SEALING, 10)
    rig.phase(planned(), Phase.SEALED, 10)
    rig.phase(planned(), Phase.PUBLISHED, 3)
    assert rig.times.rows(*ORDERS)[0]["phases_ms"] == {"sealed": 3}
    rig.phase(planned(), Phase.DONE, 4)
    assert rig.rows() == [("c1", "done", [3, 4])]
    rig.phase(planned("c2"), Phase.PUBLISHED)
    rig.phase(planned("c2"), Phase.DONE, 4)
    assert rig.rows() == [("c1", "done", [3, 4])], "nothing is known of the other"


def test_a_snapshot_ends_what_was_seen_of_a_running_change(rig: Rig) -> None:
    rig.run("c1")
    rig.phase(planned("c2"), Phase.PREPARED)
    rig.times.on_change(Change(ChangeKind.RESTORED))
    rig.phase(planned("c2"), Phase.PUBLISHED, 10)
    rig.phase(planned("c2"), Phase.DONE, 10)
    assert [row[0] for row in rig.rows()] == ["c1"]
    rig.create(2)
    rig.times.on_change(Change(ChangeKind.RESTORED))
    assert rig.rows() == []


def test_a_topic_that_is_deleted_is_forgotten(rig: Rig) -> None:
    rig.run("c1")
    rig.create(2)
    rig.tell()
    assert rig.rows() == [], "it is another topic of that name"
    rig.run("c2")
    del rig.tree.vhosts["/"].topics["orders"]
    rig.tell()
    assert rig.rows() == []
    assert rig.times._topics == {}
    rig.create(3)
    rig.run("c3")
    rig.tree.vhosts.clear()
    rig.times.on_change(Change(ChangeKind.RESTORED))
    assert rig.times._topics == {}


async def test_every_node_sees_a_change_and_one_counts_it(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        cluster.raise_versions()
        topics = cluster.nodes[2].broker.topics
        await topics.create("/", "orders", partitions=1, logical=8)
        split = await topics.split("/", "orders", 0)
        await topics.wait_change("/", "orders", split["change_id"])
        parts = [node.broker.topic_parts for node in cluster.nodes.values()]
        await until(lambda: all(_is_done(each.change_times) for each in parts))
        for each in parts:
            (row,) = each.change_times.rows("/", "orders")
            assert (row["change_id"], row["kind"]) == (split["change_id"], "split")
            assert list(row["phases_ms"]) == [phase.value for phase in WHOLE[:-1]]
        assert sum(each.controller.phases.ended.total() for each in parts) == 1
        await topics.delete("/", "orders")
        await until(lambda: not any(each.change_times.rows("/", "orders") for each in parts))


def _is_done(times: ChangeTimes) -> bool:
    return [row["phase"] for row in times.rows("/", "orders")] == ["done"]
