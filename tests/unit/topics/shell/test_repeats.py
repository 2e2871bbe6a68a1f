"""Changes that are asked for again, under the id of the first request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.metadata.records import TopicRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.topics.rules.changes import Kind, Phase, Seal, amend, plan_merge
from convoymq.topics.rules.refusals import ChangeRunning, UnknownPartition
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.repeats import Asked, repeat_of
from tests.unit.queues.fake_cluster import FakeCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        await made.nodes[2].broker.topics.create("/", "orders", partitions=2, logical=8)
        yield made


@pytest.fixture
def topics(cluster: FakeCluster) -> TopicAdmin:
    return cluster.nodes[2].broker.topics


def record(cluster: FakeCluster) -> TopicRecord:
    return cluster.nodes[2].machine.vhosts["/"].topics["orders"]


def stop(cluster: FakeCluster) -> None:
    """Nobody drives changes."""
    loop = cluster.nodes[1].broker.topic_parts.controller
    loop.tick = loop._run = lambda: None  # type: ignore[method-assign]


async def test_a_repeat_finds_the_change_while_it_runs(
    cluster: FakeCluster, topics: TopicAdmin
) -> None:
    stop(cluster)
    begun = await topics.split("/", "orders", 0, change_id="s")
    assert await topics.split("/", "orders", 0, change_id="s") == begun
    assert await topics.split("/", "orders", 0, [2], change_id="s") == begun, "the middle"
    with pytest.raises(ChangeRunning, match="change 's' is still running"):
        await topics.split("/", "orders", 0)
    await topics.abort("/", "orders", "s")
    assert (await topics.split("/", "orders", 0, change_id="s"))["phase"] == "aborted"


async def test_a_repeat_finds_the_change_when_it_is_done_and_others_followed(
    topics: TopicAdmin,
) -> None:
    split = await topics.split("/", "orders", 0, [1, 3], change_id="s")
    await topics.wait_change("/", "orders", "s")
    merge = await topics.merge("/", "orders", [3, 2], change_id="m")
    await topics.wait_change("/", "orders", "m")
    (leader,) = {row["node"] for row in await topics.route("/", "orders") if row["pid"] == 1}
    node = 1 if leader != "n1" else 2
    await topics.move("/", "orders", 1, node, change_id="v")
    await topics.wait_change("/", "orders", "v")
    for again, first in (
        (await topics.split("/", "orders", 0, [1, 3], change_id="s"), split),
        (await topics.merge("/", "orders", [2, 3], change_id="m"), merge),
    ):
        assert (again["phase"], again["targets"]) == ("done", first["targets"])
    # The partition is led there already, and is in no route any more.
    assert (await topics.move("/", "orders", 1, node, change_id="v"))["is_finished"]
    with pytest.raises(UnknownPartition):
        await topics.move("/", "orders", 1, node)


async def test_another_change_under_an_id_that_is_taken_is_refused_by_name(
    cluster: FakeCluster, topics: TopicAdmin
) -> None:
    await topics.split("/", "orders", 0, [1], change_id="s")
    await topics.wait_change("/", "orders", "s")
    for wrong in (
        topics.split("/", "orders", 1, change_id="s"),
        topics.split("/", "orders", 0, change_id="s"),
        topics.split("/", "orders", 0, [1, 2], change_id="s"),
        topics.merge("/", "orders", [0, 1], change_id="s"),
        topics.move("/", "orders", 0, 2, change_id="s"),
    ):
        with pytest.raises(PreconditionFailed, match="the split of 0, and not what is asked"):
            await wrong
    stop(cluster)
    (leader,) = {row["node"] for row in await topics.route("/", "orders") if row["pid"] == 1}
    there, elsewhere = [node for node in (1, 2, 3) if f"n{node}" != leader]
    await topics.move("/", "orders", 1, there, change_id="v")
    assert (await topics.move("/", "orders", 1, there, change_id="v"))["kind"] == "move"
    with pytest.raises(PreconditionFailed, match="is the move of 1, and not what is asked for"):
        await topics.move("/", "orders", 1, elsewhere, change_id="v")


async def test_two_requests_at_once_are_one_change(
    cluster: FakeCluster, topics: TopicAdmin
) -> None:
    other = cluster.nodes[3].broker.topics
    rows = await asyncio.gather(
        topics.split("/", "orders", 0, change_id="s"), other.split("/", "orders", 0, change_id="s")
    )
    assert rows[0]["targets"] == rows[1]["targets"]
    await topics.wait_change("/", "orders", "s")
    assert record(cluster).state.route.version == 1
    found = await asyncio.gather(
        topics.split("/", "orders", 1, change_id="x"),
        other.merge("/", "orders", [2, 3], change_id="x"),
        return_exceptions=True,
    )
    assert [type(each) for each in found].count(PreconditionFailed) == 1, found


async def test_a_merge_that_went_on_without_a_source_is_the_one_that_was_asked_for(
    cluster: FakeCluster,
) -> None:
    topic = record(cluster)
    planned = plan_merge(topic.state.route, [0, 1], 2, "m")
    sealing = dataclasses.replace(planned, phase=Phase.SEALING, seals={0: Seal(1)})
    topic.state.change = amend(sealing, topic.state.route, 3)
    row = repeat_of(topic, Asked("m", Kind.MERGE, (1, 0)))
    assert row is not None
    assert (row["kind"], row["sources"]) == ("move", [0])
    with pytest.raises(PreconditionFailed, match="is the merge of 0, 1"):
        repeat_of(topic, Asked("m", Kind.MOVE, (0,)))
