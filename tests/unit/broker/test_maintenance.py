"""A node that is drained and revived: its ports, its clients, and what it may refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker.facade import Broker
from convoymq.broker.maintenance import REASON
from convoymq.model.errors import NotFound, PreconditionFailed
from tests.unit.queues.fake_cluster import FakeCluster, until


class Ports:
    """Fails to open as often as `failures` says."""

    def __init__(self) -> None:
        self.is_open = False
        self.failures = 0

    async def open(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the address is taken")
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        yield made


async def drain(broker: Broker, node: int, *, drained: bool = True) -> None:
    await broker.maintenance.set_drained(node, drained=drained)


@pytest.mark.provokes("cluster.node_not_revived")
async def test_ports_follow_the_setting(cluster: FakeCluster) -> None:
    broker, ports = cluster.nodes[2].broker, Ports()
    await broker.maintenance.attach(ports)
    assert ports.is_open
    closed: list[str] = []
    connection: Any = type(
        "Connection", (), {"id": 1, "close": lambda _, text: closed.append(text)}
    )()
    broker.connections.add(connection)
    await drain(cluster.nodes[1].broker, 2)
    await until(lambda: closed == [REASON])
    assert broker.maintenance.is_drained
    assert not ports.is_open
    broker.connections.remove(connection)
    ports.failures = 1
    await drain(cluster.nodes[1].broker, 2, drained=False)
    await until(lambda: ports.is_open)
    assert ports.failures == 0


async def test_a_drained_node_starts_without_listening(cluster: FakeCluster) -> None:
    await drain(cluster.nodes[1].broker, 3)
    ports = Ports()
    await until(lambda: cluster.nodes[3].broker.maintenance.is_drained)
    await cluster.nodes[3].broker.maintenance.attach(ports)
    cluster.nodes[3].broker.maintenance.tick()
    assert not ports.is_open


async def test_new_queues_avoid_a_drained_node(cluster: FakeCluster) -> None:
    await drain(cluster.nodes[1].broker, 1)
    broker = cluster.nodes[1].broker
    assert broker.nodes.for_placement() == [2, 3]
    await cluster.queue(1, "q")
    (record,) = broker.metadata.tree.records()
    assert record.home != 1


async def test_one_node_stays_for_clients(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    for node in (1, 2, 2):
        await drain(broker, node)
    with pytest.raises(PreconditionFailed, match="all other nodes are drained"):
        await drain(broker, 3)
    with pytest.raises(NotFound):
        await drain(broker, 9)
