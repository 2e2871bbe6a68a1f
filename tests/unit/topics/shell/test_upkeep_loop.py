"""Retention of topics as the metadata leader carries it out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from convoymq.edges.http.metrics import render
from convoymq.metadata.commands import PutVhostLimit
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topics import partition_queue_name
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import PreconditionFailed
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.rules.answers import CursorAnswer
from convoymq.topics.rules.commands import ExpireProducers, OpenCursor, Trim
from convoymq.topics.rules.dedup import DedupTable
from convoymq.topics.rules.refusals import BadTopic, Code, DataExpired, TooManyPartitions
from convoymq.topics.shell.group_messages import GroupName
from convoymq.topics.shell.member import Member
from convoymq.topics.shell.upkeep_loop import UpkeepLoop
from tests.unit.queues.fake_cluster import FakeCluster, until

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    settings = DefaultsConfig(topic_group_ttl_ms=10_000, cluster_queues_max=20)
    async with FakeCluster(tmp_path, nodes=3, settings=settings) as made:
        made.raise_versions()
        yield made


class Time:
    """The clock of a loop, ahead of the others."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return int(self._clock.now_ms()) + self.ahead_ms


def record(cluster: FakeCluster, name: str = "orders", node: int = 2) -> TopicRecord:
    return cluster.nodes[node].machine.vhosts["/"].topics[name]


def loop_of(cluster: FakeCluster, node: int = 1) -> UpkeepLoop:
    return cluster.nodes[node].broker.topic_parts.upkeep


def time_of(cluster: FakeCluster, node: int = 1) -> Time:
    loop = loop_of(cluster, node)
    made = Time(loop._clock)
    loop._clock = made  # type: ignore[assignment]
    return made


def state_of(cluster: FakeCluster, pid: int) -> str:
    return record(cluster).state.lineage.partition(pid).state.value


async def becomes(cluster: FakeCluster, condition: Callable[[], bool]) -> None:
    """Waits for a condition while the loop looks at what is due."""

    def looked() -> bool:
        loop_of(cluster).tick()
        return condition()

    await until(looked)


async def metrics(cluster: FakeCluster) -> str:
    """The metrics of the node whose loop acts."""
    broker = cluster.nodes[1].broker
    return await render(broker)


async def create(cluster: FakeCluster, partitions: int = 1, **settings: Any) -> None:
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    await cluster.nodes[3].broker.topics.create(
        "/", "orders", partitions=partitions, logical=8, settings=named
    )


async def moved(cluster: FakeCluster, pid: int) -> int:
    """Moves a partition to another node, and returns its successor."""
    broker = cluster.nodes[3].broker
    leader = broker.topic_parts.partitions.leader(record(cluster, node=3), pid)
    row = await broker.topics.move("/", "orders", pid, 1 + leader % 3)
    done = await broker.topics.wait_change("/", "orders", row["change_id"], 10)
    return done["targets"][0]["pid"]


def machines_of(cluster: FakeCluster, pid: int) -> list[PartitionMachine]:
    """The replicas of a partition."""
    found = []
    for node in (1, 2, 3):
        partitions = cluster.nodes[node].broker.topic_parts.partitions
        machine = partitions.get(record(cluster, node=node), pid).machine()
        assert isinstance(machine, PartitionGroupMachine)
        found.append(machine.state)
    return found


@pytest.mark.provokes("topics.partitions_deleted")
async def test_a_sealed_partition_is_retired_and_goes_with_its_queue(cluster: FakeCluster) -> None:
    await create(cluster, max_age="1D")
    time = time_of(cluster)
    successor = await moved(cluster, 0)
    await becomes(cluster, lambda: state_of(cluster, 0) == "retired")
    assert successor == 1
    queue = cluster.nodes[1].broker.topic_parts.partitions.find("/", "orders", 1)
    assert queue is not None
    assert queue.machine().settings["max_age_ms"] == DAY_MS  # type: ignore[union-attr]
    # Nothing was published: its last message is the time floor, long ago.
    with structlog.testing.capture_logs() as logs:
        time.ahead_ms = 2 * DAY_MS
        loop_of(cluster)._due_ms.clear()
        loop_of(cluster)._term = -1
        await becomes(cluster, lambda: state_of(cluster, 0) == "deleted")
    assert partition_queue_name("orders", 0) not in cluster.nodes[2].machine.vhosts["/"].queues
    assert record(cluster).state.lineage.min_version == 1
    assert loop_of(cluster).counters.partitions_deleted == 1
    assert [
        each["partitions"] for each in logs if each["event"] == "topics.partitions_deleted"
    ] == [[0]]


async def test_without_limits_nothing_is_deleted(cluster: FakeCluster) -> None:
    await create(cluster)
    time = time_of(cluster)
    await moved(cluster, 0)
    await becomes(cluster, lambda: state_of(cluster, 0) == "retired")
    time.ahead_ms = 900 * DAY_MS
    loop_of(cluster)._term = -1
    loop_of(cluster).tick()
    loop_of(cluster).tick()
    assert state_of(cluster, 0) == "retired"
    assert not loop_of(cluster)._due_ms


@pytest.mark.moves("convoy_topic_partitions_deleted_total", "convoy_topic_groups_expired_total")
@pytest.mark.provokes("topics.group_expired")
async def test_a_group_holds_what_it_has_not_read_until_it_expires(cluster: FakeCluster) -> None:
    await create(cluster, max_age="1s")
    assert "convoy_topic_groups_expired_total 0" in await metrics(cluster)
    time = time_of(cluster)
    topics = cluster.nodes[3].broker.topics
    await topics.create_group("/", "orders", "g")
    await moved(cluster, 0)
    time.ahead_ms = 5_000
    loop_of(cluster).tick()
    assert state_of(cluster, 0) == "sealed"
    (row,) = await topics.groups("/", "orders")
    assert row["state"] == "idle"
    with structlog.testing.capture_logs() as logs:
        time.ahead_ms = 15_000
        await becomes(cluster, lambda: state_of(cluster, 0) == "deleted")
    assert loop_of(cluster).counters.groups_expired == 1
    assert "convoy_topic_groups_expired_total 1" in await metrics(cluster)
    (event,) = [each for each in logs if each["event"] == "topics.group_expired"]
    assert (event["topic"], event["group"], event["log_level"]) == ("orders", "g", "warning")
    (row,) = await topics.groups("/", "orders")
    assert row["state"] == "data_expired"
    handle = cluster.nodes[3].broker.topic_parts.groups.find(
        cluster.nodes[3].machine.vhosts["/"], "orders/g"
    )
    assert handle is not None
    with pytest.raises(DataExpired, match="DATA_EXPIRED: queue 'orders/g' in vhost '/' had"):
        await handle.create("earliest", None)
    assert await handle.counts() == (0, 0)
    row = await topics.seek("/", "orders", "g", "earliest")
    assert (row["state"], row["cv"]) == ("idle", 1)
    await handle.create("earliest", None)


async def test_a_topic_says_when_its_groups_expire(cluster: FakeCluster) -> None:
    await create(cluster, group_ttl="1h")
    time = time_of(cluster)
    await cluster.nodes[3].broker.topics.create_group("/", "orders", "g")
    time.ahead_ms = 60_000
    loop_of(cluster).tick()
    assert not record(cluster).groups["g"].expired
    time.ahead_ms = 3_700_000
    await becomes(cluster, lambda: record(cluster).groups["g"].expired)


async def test_the_next_leader_of_the_tree_goes_on(cluster: FakeCluster) -> None:
    await create(cluster, max_age="1s")
    topics = cluster.nodes[3].broker.topics
    await topics.create_group("/", "orders", "g")
    await moved(cluster, 0)
    for node in (1, 2, 3):
        cluster.nodes[node].store.on_leader(0, 2, 7)
    time = time_of(cluster, 2)
    time.ahead_ms = 20_000

    def deleted() -> bool:
        loop_of(cluster, 2).tick()
        return state_of(cluster, 0) == "deleted"

    await until(deleted)
    loop_of(cluster, 1).tick()
    assert loop_of(cluster, 1).counters.partitions_deleted == 0


@pytest.mark.provokes("topics.loss_accepted")
async def test_a_group_goes_on_behind_what_was_cut_when_somebody_accepts_it(
    cluster: FakeCluster,
) -> None:
    await create(cluster)
    broker = cluster.nodes[3].broker
    queue = broker.topic_parts.partitions.get(record(cluster, node=3), 0)
    await broker.topics.create_group("/", "orders", "g")
    assert await broker.topics.accept_loss("/", "orders", "g") == []
    assert await queue.ask(OpenCursor("g", 1, -1), 5) == CursorAnswer(Code.OK)
    for state in machines_of(cluster, 0):
        state.append_until(9, 1)
        state.trim(Trim(5))
    (row,) = await broker.topics.lag("/", "orders", "g")
    assert row["data_expired"] is True
    rows = await broker.topics.accept_loss("/", "orders", "g")
    assert rows == [{"pid": 0, "first": 1, "end": 5}]
    (row,) = await broker.topics.lag("/", "orders", "g")
    assert row["data_expired"] is False


# --- producers -----------------------------------------------------------------------------


async def test_partitions_forget_producers_that_are_silent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(cluster, partitions=2)
    table = DedupTable()
    table.record(7, 1, 5, 3, 1000, b"")
    machines = machines_of(cluster, 1)
    for state in machines:
        state.dedup = DedupTable.load(table.pack())
    told: list[str] = []
    tell = PartitionQueue.tell

    def note(queue: PartitionQueue, command: Any, done: Any) -> None:
        if isinstance(command, ExpireProducers):
            told.append(queue.name)
        tell(queue, command, done)

    monkeypatch.setattr(PartitionQueue, "tell", note)
    time = time_of(cluster)
    loop = loop_of(cluster)
    loop.tick()
    loop._forget_producers(1000)
    assert told == []
    time.ahead_ms = 8 * DAY_MS
    loop.tick()
    await until(lambda: not any(state.dedup.rows for state in machines))
    assert told == ["amq.partition.orders.1"], "the other one knows no producers"


# --- limits --------------------------------------------------------------------------------


async def test_partitions_count_as_queues_of_their_virtual_host(cluster: FakeCluster) -> None:
    store, topics = cluster.nodes[3].store, cluster.nodes[3].broker.topics
    await store.execute(PutVhostLimit(vhost="/", name="max-queues", value=3))
    with pytest.raises(BadTopic, match=r"queue limit in vhost '/' \(3\) is reached"):
        await create(cluster, partitions=4)
    await create(cluster, partitions=2)
    with pytest.raises(PreconditionFailed, match="cannot create partitions of topic 'orders'"):
        await topics.split("/", "orders", 0)
    merge = await topics.merge("/", "orders", [0, 1])
    await topics.wait_change("/", "orders", merge["change_id"], 10)
    await moved(cluster, 2)
    assert len(cluster.nodes[3].machine.vhosts["/"].queues) == 4, "moves and merges go on"


async def test_partitions_count_as_queues_of_the_cluster(cluster: FakeCluster) -> None:
    with pytest.raises(BadTopic, match=r"queue limit in cluster \(20\) is reached"):
        await cluster.nodes[3].broker.topics.create("/", "many", partitions=21, logical=64)


async def test_a_topic_has_so_many_partitions_and_no_more(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoymq.metadata.topic_validation.PARTITIONS_MAX", 3)
    with pytest.raises(TooManyPartitions, match="4 partitions are too many"):
        await create(cluster, partitions=4)
    await create(cluster, partitions=2)
    with pytest.raises(TooManyPartitions, match="at most 3 at a time"):
        await cluster.nodes[3].broker.topics.split("/", "orders", 0, [1, 2])
    assert record(cluster).state.running is None
    await cluster.nodes[3].broker.topics.split("/", "orders", 0, [1])


@pytest.mark.provokes("topics.data_expired")
def test_a_member_says_once_in_a_lease_that_what_it_should_read_is_gone() -> None:
    member = object.__new__(Member)
    member.name, member._expired = GroupName("/", "orders", "g"), set()
    strict = TopicRecord.__new__(TopicRecord)
    strict.mode = "strict"
    member._record = lambda: strict
    with structlog.testing.capture_logs() as logs:
        for epoch in (1, 1, 2):
            member._note_expired(0, epoch, 1)
    assert [each["partition"] for each in logs] == [0, 0]
