"""A partition in real brokers: everything but the topic that owns it, and replication."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.edges.http import definitions
from convoymq.metadata import store as metadata_store
from convoymq.metadata.commands import DeclareQueue
from convoymq.model.errors import AccessRefused
from convoymq.model.tables import Table
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.machine.reads import Fetch
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.refusals import Code
from tests.unit.queues.classic.support import Channel
from tests.unit.queues.fake_cluster import FakeCluster, until
from tests.unit.queues.stream.cluster import Result
from tests.unit.topics.machine.support import OPEN, SEAL
from tests.unit.topics.machine.test_driver import FIXED, NAME


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        with monkeypatch.context() as patch:
            # Clients may not; a topic does it by commands of its own.
            patch.setattr(metadata_store, "validated", lambda command, _tree: command)
            await made.nodes[1].store.execute(
                DeclareQueue(
                    vhost="/",
                    name=NAME,
                    type="partition",
                    arguments=Table.of(FIXED).encoded,
                    members=(1, 2),
                )
            )
        yield made


async def handle(cluster: FakeCluster, node: int) -> PartitionQueue:
    broker = cluster.nodes[node].broker
    await until(lambda: NAME in cluster.nodes[node].machine.vhosts["/"].queues)
    queue = broker.queue_admin.find_queue("/", NAME)
    assert isinstance(queue, PartitionQueue)
    await queue.ready(5)
    return queue


@pytest.mark.parametrize("node", [1, 2, 3])
async def test_a_partition_lives_from_open_to_close(cluster: FakeCluster, node: int) -> None:
    queue = await handle(cluster, node)
    assert (await queue.ask(OPEN)).code is Code.OK
    channel = Channel()
    channel.client = queue.client(cluster.nodes[node].new_session(), channel)
    channel.publish(b"a", b"b", tag=1)
    await until(lambda: ("published", [1, 2], True) in channel.heard)
    assert (await queue.ask(c.OpenCursor("g", 1))).code is Code.OK
    assert (await queue.ask(c.Lease("g", 1, 1, "m"))).code is Code.OK
    read = Result()
    queue.fetch(Fetch("g", 1, 1, -1, 10, 1 << 20), read)
    await until(lambda: bool(read.calls))
    assert sum(run.messages for run in read.found.runs) == 2
    assert (await queue.ask(SEAL)).code is Code.OK
    channel.publish(b"c", tag=3)
    await until(lambda: ("published", [3, 3], False) in channel.heard)
    assert not (await queue.description()).groups["g"].drained
    await queue.ask(c.AckRanges("g", 1, 1, (1, 2)))
    assert (await queue.description()).groups["g"].drained


async def test_clients_leave_its_queue_alone(cluster: FakeCluster) -> None:
    await handle(cluster, 3)
    broker = cluster.nodes[3].broker
    with pytest.raises(AccessRefused, match="is a partition of a topic"):
        await broker.queue_admin.delete_queue("/", NAME)
    assert NAME not in str(definitions.export(broker))
