"""A node that is drained and revived: its ports, its clients, and what it may refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.facade import Broker
from convoymq.broker.leadership import RebalanceRequest
from convoymq.broker.maintenance import AT_ONCE, REASON
from convoymq.broker.selection import Selection
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


async def test_a_node_can_end_its_maintenance_when_it_starts(cluster: FakeCluster) -> None:
    await drain(cluster.nodes[1].broker, 3)
    ports = Ports()
    maintenance = cluster.nodes[3].broker.maintenance
    await until(lambda: maintenance.is_drained)
    await maintenance.attach(ports, revive=True)
    await until(lambda: not maintenance.is_drained)
    maintenance.tick()
    await until(lambda: ports.is_open)


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


async def test_a_node_of_an_older_release_is_not_drained_nor_asked(cluster: FakeCluster) -> None:
    """Its release would not act on the setting, nor answer what operators ask for."""
    broker = cluster.nodes[1].broker
    nodes = broker.metadata.tree.nodes
    nodes[2] = replace(nodes[2], supports={"metadata": (1, 1)})
    with pytest.raises(PreconditionFailed, match="older release"):
        await drain(broker, 2)
    with pytest.raises(PreconditionFailed, match="older release"):
        await broker.cluster.set_prefetch("/", "q", "tag", 5)
    with pytest.raises(PreconditionFailed, match="older release"):
        await broker.rebalancer.start(RebalanceRequest(queues=Selection()), 1.0)
    # Who was drained before is revived.
    await drain(broker, 2, drained=False)
    await drain(broker, 3)


class Led:
    """A group that the drained node leads, with two voters beside it."""

    def __init__(self) -> None:
        self.is_leader = True
        peers = [SimpleNamespace(node=node, voter=True, voteless=False) for node in (2, 3)]
        self.core = SimpleNamespace(peers=peers)

    def is_live(self, node: int) -> bool:
        return True


class Elections:
    """Host and leadership: a transfer is over at the second look, and every tenth fails once."""

    def __init__(self, groups: int) -> None:
        self.groups = {group: Led() for group in range(groups)}
        self.under_way: dict[int, int] = {}
        self.begun: list[tuple[int, int]] = []
        self.most = 0

    def replica(self, group: int) -> Led:
        return self.groups[group]

    def wake(self) -> None:
        self.most = max(self.most, len(self.under_way))

    def begin(self, group: int, to: int) -> str:
        self.begun.append((group, to))
        self.under_way[group] = 2
        return ""

    def is_under_way(self, group: int) -> bool:
        self.under_way[group] -= 1
        if self.under_way[group]:
            return True
        del self.under_way[group]
        failed = group % 10 == 1 and sum(1 for each, _ in self.begun if each == group) == 1
        self.groups[group].is_leader = failed
        return False


async def test_a_bounded_number_of_leaderships_moves_at_a_time(cluster: FakeCluster) -> None:
    broker, elections = cluster.nodes[1].broker, Elections(5 * AT_ONCE)
    maintenance = broker.maintenance
    made: Any = elections
    maintenance._host = maintenance._leadership = made
    ports = Ports()
    await maintenance.attach(ports)
    await drain(broker, 1)
    await until(lambda: not any(each.is_leader for each in elections.groups.values()))
    assert elections.most == AT_ONCE
    first = elections.begun[: len(elections.groups)]
    assert [group for group, _ in first] == [*range(1, len(elections.groups)), 0]
    given = Counter(to for _, to in first)
    assert abs(given[2] - given[3]) <= 2
