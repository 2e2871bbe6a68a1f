"""Topics of a cluster of fakes: created, changed, shown and deleted through `Broker.topics`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.metadata.records import TopicRecord
from convoymq.model.errors import NotFound, NotServed, PreconditionFailed, Unavailable
from convoymq.topics.rules.refusals import (
    BadCut,
    BadTopic,
    ChangePhase,
    ChangeRunning,
    NotAdjacent,
    StaleRoute,
    UnknownPartition,
)
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.drains import Place
from tests.unit.queues.fake_cluster import FakeCluster, until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        yield made


def admin(cluster: FakeCluster, node: int = 1) -> TopicAdmin:
    return cluster.nodes[node].broker.topics


def record(cluster: FakeCluster, node: int = 1) -> TopicRecord:
    return cluster.nodes[node].machine.vhosts["/"].topics["orders"]


async def test_a_topic_is_created_and_deleted(cluster: FakeCluster) -> None:
    assert await admin(cluster, 2).create("/", "orders", partitions=3, logical=12)
    (row,) = await admin(cluster, 2).list()
    assert (row["version"], row["partitions"], row["logical"], row["mode"]) == (0, 3, 12, "strict")
    assert await admin(cluster).list() == await admin(cluster).list("/") == [row]
    route = await admin(cluster).route("/", "orders")
    assert [(each["pid"], each["lo"], each["hi"], each["state"]) for each in route] == [
        (0, 0, 4, "open"), (1, 4, 8, "open"), (2, 8, 12, "open"),
    ]  # fmt: skip
    # Leaders are spread over the nodes.
    assert {each["node"] for each in route} == {"n1", "n2", "n3"}
    shown = await admin(cluster, 3).describe("/", "orders")
    assert [each["end_offset"] for each in shown["partition_rows"]] == [1, 1, 1]
    assert (shown["partition_rows"][0]["messages"], shown["latest_change"]) == (0, None)
    assert set(shown["partition_rows"][0]["members"]) == {"n1", "n2", "n3"}
    await admin(cluster).delete("/", "orders")
    assert await admin(cluster).list() == []
    assert cluster.nodes[1].machine.vhosts["/"].queues == {}
    with pytest.raises(NotFound, match="no topic 'orders' in vhost '/'"):
        await admin(cluster).delete("/", "orders")


async def test_what_makes_no_topic_is_refused(cluster: FakeCluster) -> None:
    await cluster.queue(1, "queue")
    for name, more, kind in (
        ("orders", {"partitions": 0}, BadTopic),
        ("orders", {"partitions": 9, "logical": 8}, BadTopic),
        ("orders", {"partitions": 1, "mode": "loose"}, NotServed),
        ("orders", {"partitions": 1, "settings": {"weak-wait": "5s"}}, BadTopic),
        ("queue", {"partitions": 1}, BadTopic),
        ("amq.x", {"partitions": 1}, BadTopic),
    ):
        with pytest.raises(kind):
            await admin(cluster).create("/", name, **more)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="vhost x not found"):
        await admin(cluster).create("x", "orders", partitions=1)
    assert await admin(cluster).list() == []


async def test_nothing_is_left_of_a_topic_whose_partitions_do_not_open(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_queue: object, _timeout: float) -> None:
        raise Unavailable("no majority")

    monkeypatch.setattr("convoymq.topics.machine.queue.PartitionQueue.wait_until_open", never)
    with pytest.raises(Unavailable, match="no majority"):
        await admin(cluster).create("/", "orders", partitions=2)
    assert await admin(cluster).list() == []


async def test_a_partition_splits_merges_and_moves(cluster: FakeCluster) -> None:
    topics = admin(cluster, 2)
    await topics.create("/", "orders", partitions=1, logical=8)
    assert await topics.change("/", "orders") is None
    split = await topics.split("/", "orders", 0)
    assert (split["kind"], split["base_version"], split["sources"]) == ("split", 0, [0])
    done = await topics.wait_change("/", "orders", split["change_id"])
    assert (done["phase"], done["next_version"], done["sealed"]) == ("done", 1, [0])
    assert [each["lo"] for each in await topics.route("/", "orders")] == [0, 4]
    merge = await topics.merge("/", "orders", [2, 1])
    await topics.wait_change("/", "orders", merge["change_id"])
    (whole,) = await topics.route("/", "orders")
    other = "n3" if whole["node"] != "n3" else "n1"
    move = await topics.move("/", "orders", whole["pid"], int(other[1:]))
    await topics.wait_change("/", "orders", move["change_id"])
    (moved,) = await topics.route("/", "orders")
    assert (moved["node"], moved["parents"], moved["state"]) == (other, [whole["pid"]], "open")
    former = await topics.change("/", "orders", split["change_id"])
    assert former is not None
    assert (former["kind"], former["targets"], former["is_finished"]) == (
        "split", split["targets"], True,
    )  # fmt: skip
    old = await topics.route("/", "orders", 1)
    assert [each["pid"] for each in old] == [1, 2]
    assert {each["state"] for each in old} <= {"sealed", "retired"}
    lineage = await topics.route("/", "orders", lineage=True)
    assert [each["pid"] for each in lineage] == [0, 1, 2, 3, 4]
    assert [each["close_offset"] for each in lineage] == [1, 1, 1, 1, None]
    with pytest.raises(StaleRoute):
        await topics.route("/", "orders", 9)


async def test_what_is_no_change_is_refused(cluster: FakeCluster) -> None:
    topics = admin(cluster)
    await topics.create("/", "orders", partitions=3, logical=6)
    (leader,) = {each["node"] for each in await topics.route("/", "orders") if each["pid"] == 0}
    for wrong, kind in (
        (topics.split("/", "orders", 9), UnknownPartition),
        (topics.split("/", "orders", 0, [5]), BadCut),
        (topics.merge("/", "orders", [0, 2]), NotAdjacent),
        (topics.merge("/", "orders", [0]), NotAdjacent),
        (topics.move("/", "orders", 9, 2), UnknownPartition),
        (topics.move("/", "orders", 0, 9), PreconditionFailed),
        (topics.move("/", "orders", 0, int(leader[1:])), PreconditionFailed),
        (topics.split("/", "none", 0), NotFound),
        (topics.wait_change("/", "orders", "none"), NotFound),
        (topics.abort("/", "orders", "none"), ChangePhase),
        (topics.drains.drain(9), NotFound),
    ):
        with pytest.raises(kind):
            await wrong
    assert record(cluster).state.change is None


async def test_one_change_runs_at_a_time_and_may_be_given_up(cluster: FakeCluster) -> None:
    topics = admin(cluster)
    await topics.create("/", "orders", partitions=2, logical=8)
    # Nobody drives it: the leader of the tree has no other node's answers.
    cluster.nodes[1].broker.topic_parts.controller.tick = lambda: None  # type: ignore[method-assign]
    cluster.nodes[1].broker.topic_parts.controller._run = lambda: None  # type: ignore[method-assign]
    split = await topics.split("/", "orders", 0)
    assert (await topics.list())[0]["change"] == split["change_id"]
    with pytest.raises(ChangeRunning):
        await topics.split("/", "orders", 1)
    with pytest.raises(Unavailable, match="is not done yet, and goes on"):
        await topics.wait_change("/", "orders", split["change_id"], 0.01)
    await topics.abort("/", "orders", split["change_id"])
    with pytest.raises(PreconditionFailed, match="was aborted"):
        await topics.wait_change("/", "orders", split["change_id"])


@pytest.mark.provokes("topics.partition_not_moved")
async def test_a_partition_that_cannot_be_given_away_stays_for_now(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    await broker.topics.create("/", "orders", partitions=1)

    async def refuse(*of: Any) -> Any:
        raise Unavailable("another change was first")

    drains = broker.topics.drains
    drains._move = refuse  # type: ignore[assignment]
    await drains._move_away(Place("/", "orders", 0))


async def test_a_drained_node_leads_nothing(cluster: FakeCluster) -> None:
    topics = admin(cluster, 3)
    await topics.create("/", "orders", partitions=3, logical=12)
    await topics.create("/", "other", partitions=3, logical=12)
    rows = await topics.drains.drain(2)
    assert {row["topic"] for row in rows} == {"orders", "other"}
    assert all(not row["error"] and row["node"] != "n2" and row["to_pid"] for row in rows)
    for name in ("orders", "other"):
        assert "n2" not in {each["node"] for each in await topics.route("/", name)}
    assert await topics.drains.drain(2) == []
    # Its replicas stay: there is no other node for them.
    (left,) = await topics.drains.report()
    assert (left["node"], left["state"], left["slowest_group"]) == ("n2", "read_only", "")
    assert left["open"] + left["sealed"] > 0
    (pid, _, _) = (each["pid"] for each in await topics.route("/", "orders"))
    with pytest.raises(PreconditionFailed, match="node n2 is drained"):
        await topics.move("/", "orders", pid, 2)
    for name in ("orders", "other"):
        await topics.delete("/", name)
    assert (await topics.drains.report())[0]["state"] == "removable"
    await topics.drains.revive(2)
    assert await topics.drains.report() == []
    with pytest.raises(NotFound):
        await topics.drains.revive(9)


async def test_a_topic_that_is_asked_for_again_is_the_same(cluster: FakeCluster) -> None:
    topics = admin(cluster, 2)
    wanted = {"partitions": 2, "logical": 8, "settings": {"max-age": "7D"}}
    assert await topics.create("/", "orders", **wanted) is True  # type: ignore[arg-type]
    split = await topics.split("/", "orders", 0)
    await topics.wait_change("/", "orders", split["change_id"])
    assert await topics.create("/", "orders", **wanted) is False  # type: ignore[arg-type]
    other = "logical 8, not 16; max-age 7D, not unset; partitions 2, not 3"
    with pytest.raises(BadTopic, match=f"exists with other settings: {other}"):
        await topics.create("/", "orders", partitions=3, logical=16)


async def test_groups_begin_and_seek_where_they_are_told(cluster: FakeCluster) -> None:
    topics = admin(cluster, 2)
    await topics.create("/", "orders", partitions=2, logical=8)
    assert await topics.create_group("/", "orders", "g") is True
    assert await topics.create_group("/", "orders", "g") is False
    # The ends are those of now, not of when the first member comes.
    assert record(cluster).groups["g"].starts == {0: 0, 1: 0}
    split = await topics.split("/", "orders", 0)
    await topics.wait_change("/", "orders", split["change_id"])
    (row,) = await topics.groups("/", "orders")
    assert (row["group"], row["cv"], row["latest"], row["members"]) == ("g", 0, 1, [])
    assert row["waits_for"] == [0]
    lag = await topics.lag("/", "orders", "g")
    assert [(each["pid"], each["lag"], each["waits_for"]) for each in lag] == [
        (0, 0, []), (1, 0, []), (2, 0, [0]), (3, 0, [0]),
    ]  # fmt: skip
    row = await topics.seek("/", "orders", "g", "latest")
    assert (row["cv"], row["group_epoch"], row["waits_for"]) == (1, 2, [])
    assert record(cluster).groups["g"].starts == {1: 1, 2: 1, 3: 1}
    row = await topics.seek("/", "orders", "g", {2: 1, 3: 1, 1: 1})
    assert record(cluster).groups["g"].starts == {1: 1, 2: 1, 3: 1}
    row = await topics.seek("/", "orders", "g", 10**12 * 9)
    assert (row["cv"], record(cluster).groups["g"].starts) == (1, {1: 1, 2: 1, 3: 1})
    with pytest.raises(NotFound, match="no group 'h' of topic 'orders'"):
        await topics.seek("/", "orders", "h", "earliest")
    await topics.delete_group("/", "orders", "g")
    assert await topics.groups("/", "orders") == []


async def test_a_new_leader_of_the_tree_goes_on(cluster: FakeCluster) -> None:
    topics = admin(cluster, 3)
    await topics.create("/", "orders", partitions=1, logical=8)
    cluster.nodes[1].broker.topic_parts.controller._run = lambda: None  # type: ignore[method-assign]
    split = await topics.split("/", "orders", 0)
    for node in cluster.nodes.values():
        node.store.on_leader(0, 2, 7)
    await topics.wait_change("/", "orders", split["change_id"])
    await until(lambda: record(cluster, 2).state.route.pids == (1, 2))
