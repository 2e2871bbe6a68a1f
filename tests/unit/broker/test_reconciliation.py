"""When quorum queues are looked at for missing members, and what is asked for then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.reconciliation import MembershipReconciliation
from convoymq.metadata.commands import PutPolicy
from convoymq.metadata.maintenance import set_drained
from convoymq.model.config import ReconciliationConfig
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tasks import Tasks
from convoymq.replication.raft.membership import Learner, Membership
from tests.unit.queues.fake_cluster import FakeCluster

TRIGGER_MS = 1000
INTERVAL_MS = 60_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def monotonic_ms(self) -> int:
        return self.now


class FakeMembership:
    """Notes what it is asked for, and refuses it when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.refusal = ""

    async def add(self, record: Any, node: int) -> int:
        return self._answer("add", record, node, 1)

    async def delete(self, record: Any, node: int) -> int:
        return self._answer("delete", record, node, -1)

    def _answer(self, what: str, record: Any, node: int, change: int) -> int:
        self.asked.append((what, record.name, node))
        if self.refusal:
            raise PreconditionFailed(self.refusal)
        return len(record.members) + change


class Bench:
    """The reconciliation of node 1 of a cluster."""

    def __init__(self, cluster: FakeCluster, **settings: Any) -> None:
        self.broker = cluster.nodes[1].broker
        self.host = cluster.nodes[1].host
        self.host.member_refusal = lambda group, node: ""  # type: ignore[method-assign]
        self.clock = Clock()
        self.membership = FakeMembership()
        self.tasks = Tasks()
        requests: Any = SimpleNamespace(
            nodes=self.broker.nodes,
            tree=self.broker.metadata.tree,
            host=self.host,
            clock=self.clock,
        )
        self.made = MembershipReconciliation(
            requests,
            settings=ReconciliationConfig(
                **{
                    "enabled": True,
                    "interval_ms": INTERVAL_MS,
                    "trigger_interval_ms": TRIGGER_MS,
                    **settings,
                }
            ),
            membership=self.membership,  # type: ignore[arg-type]
            tasks=self.tasks,
        )

    async def after(self, elapsed_ms: int) -> list[str]:
        """What is asked for, of which queue, once that time has passed."""
        self.clock.now += elapsed_ms
        self.membership.asked.clear()
        self.made.tick()
        running = list(self.tasks._tasks)
        await asyncio.gather(*running)
        return sorted(f"{what} {queue}" for what, queue, _ in self.membership.asked)

    async def execute(self, command: Any) -> None:
        await self.broker.metadata.execute(command)

    def replica(self, name: str) -> Any:
        (group,) = (r.group for r in self.broker.metadata.tree.records() if r.name == name)
        return self.host.replica(group)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=5) as made:
        for node in made.nodes.values():
            node.machine.set_version(2)
        yield made


def policy(size: int, *, operator: bool = False) -> PutPolicy:
    return PutPolicy(
        vhost="/", name="p", pattern=".*", definition={"target-group-size": size},
        apply_to="quorum_queues", operator=operator,
    )  # fmt: skip


@pytest.mark.provokes("quorum.members_reconciled", "quorum.members_not_reconciled")
async def test_the_largest_of_all_targets_counts(cluster: FakeCluster) -> None:
    await cluster.queue(1, "plain")
    await cluster.queue(1, "more", arguments={"x-quorum-target-group-size": 5})
    await cluster.queue(1, "classic", arguments={"x-queue-type": "classic"})
    await cluster.queue(1, "stream", arguments={"x-queue-type": "stream"})
    await cluster.queue(2, "elsewhere", arguments={"x-quorum-target-group-size": 5})
    bench = Bench(cluster)
    assert await bench.after(TRIGGER_MS - 1) == []
    # Node 1 leads it.
    assert await bench.after(1) == ["add more"]
    await bench.execute(policy(3))
    await bench.execute(policy(5, operator=True))
    bench.made.trigger()
    bench.membership.refusal = "not now"
    assert await bench.after(TRIGGER_MS) == ["add more", "add plain"]
    await bench.execute(policy(3, operator=True))
    assert await bench.after(TRIGGER_MS) == ["add more"]


async def test_the_target_of_the_configuration_is_for_all_quorum_queues(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(1, "plain")
    await cluster.queue(1, "stream", arguments={"x-queue-type": "stream"})
    bench = Bench(cluster, target_group_size=5)
    assert await bench.after(TRIGGER_MS) == ["add plain"]
    off = Bench(cluster, target_group_size=5, enabled=False)
    assert await off.after(INTERVAL_MS) == []


async def test_a_check_follows_soon_after_a_change_and_seldom_otherwise(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(1, "q")
    bench = Bench(cluster, target_group_size=3)
    assert await bench.after(TRIGGER_MS) == []
    bench.replica("q").core.members = Membership(frozenset((1, 2)))
    assert await bench.after(INTERVAL_MS - 1) == []
    assert await bench.after(1) == ["add q"]
    # What was changed may need another step.
    assert await bench.after(TRIGGER_MS) == ["add q"]


async def test_one_member_at_a_time(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q", arguments={"x-quorum-target-group-size": 5})
    bench = Bench(cluster)
    core = bench.replica("q").core
    core.members = Membership(frozenset((1, 2, 3)), (Learner(4, 100),))
    assert await bench.after(TRIGGER_MS) == []
    core.members = Membership(frozenset((1, 2, 3, 4)))
    assert await bench.after(TRIGGER_MS) == ["add q"]
    # A new member that is away holds nothing up.
    core.members = Membership(frozenset((1, 2, 3)), (Learner(4, 100),))
    cluster.down.add(4)
    assert await bench.after(TRIGGER_MS) == ["add q"]


async def test_drained_nodes_and_nodes_that_are_away_are_no_candidates(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(1, "q", arguments={"x-quorum-initial-group-size": 2})
    bench = Bench(cluster, target_group_size=3)
    core = bench.replica("q").core
    core.members = Membership(frozenset((1, 2)))
    cluster.down.add(3)
    await bench.execute(set_drained(4, drained=True))
    assert await bench.after(TRIGGER_MS) == ["add q"]
    assert bench.membership.asked == [("add", "q", 5)]
    # A drained leader leaves it to who takes over.
    await bench.execute(set_drained(1, drained=True))
    assert await bench.after(TRIGGER_MS) == []


async def test_members_outside_of_the_cluster_are_removed_when_asked_for(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(1, "q")
    for auto_remove, expected in ((False, []), (True, ["delete q"])):
        bench = Bench(cluster, auto_remove=auto_remove)
        bench.replica("q").core.members = Membership(frozenset((1, 2, 9)))
        assert await bench.after(TRIGGER_MS) == expected
        assert {node for _, _, node in bench.membership.asked} <= {9}
