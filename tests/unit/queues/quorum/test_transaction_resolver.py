"""Queues finish among themselves what a node has left behind that asked for a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.model.errors import BrokerError
from convoymq.model.tables import Field
from convoymq.queues.null_events import NullEvents
from convoymq.queues.quorum import transaction_resolver
from convoymq.queues.transactions import COMMIT, PREPARE
from tests.unit.queues.fake_cluster import FakeCluster, until

ID = "1-1"
SOON_MS = 100
LATER_MS = 60_000
RECORD = (b"\0\1q", b"h")


class Left:
    """Queues a, led by node 1, and b, led by node 2, and what was asked of them."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def queue(self, name: str, node: int = 1) -> Any:
        return self.cluster.nodes[node].broker.queue_admin.find_queue("/", name, 0)

    def machine(self, name: str) -> Any:
        queue = self.queue(name, 2)
        group = self.cluster.groups[queue.group]
        return group.replicas[group.leader].machine

    def target(self, name: str) -> list[Any]:
        return [name, self.queue(name).group]

    async def end(self, name: str, op: str, after_ms: int, **fields: Any) -> BrokerError | None:
        """Publishes a message in a transaction, which ends by this op, and goes away."""
        queue = self.queue(name)
        client = queue.client(self.cluster.nodes[1].new_session(), NullEvents())
        answered: asyncio.Future[BrokerError | None] = asyncio.Future()
        deadline = self.cluster.nodes[1].broker.now_ms() + after_ms
        client.transact(
            lambda: client.target.publish(RECORD, 1, 0, 0),
            {"op": op, "id": ID, "deadline": deadline, **fields},
            answered.set_result,
        )
        error = await answered
        client.close()
        return error

    def counts(self) -> tuple[int, int]:
        return self.machine("a").backlog.stored(), self.machine("b").backlog.stored()


@pytest.fixture
async def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Left]:
    monkeypatch.setattr(transaction_resolver, "PATIENCE_MS", 20)
    monkeypatch.setattr(transaction_resolver, "AGAIN_MS", 20)
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        cluster.raise_versions()
        for node, name in ((1, "a"), (2, "b")):
            await cluster.queue(node, name, arguments={"x-queue-type": Field("S", b"quorum")})
        yield Left(cluster)


@pytest.mark.provokes("quorum.transaction_resolved")
async def test_what_nobody_has_decided_is_undone_when_its_time_is_over(left: Left) -> None:
    assert await left.end("b", PREPARE, SOON_MS, home=left.target("a")) is None
    assert left.machine("b").transactions.prepared
    await until(lambda: not left.machine("b").transactions.is_open)
    assert left.counts() == (0, 0)


async def test_what_its_home_has_decided_is_done(left: Left) -> None:
    assert await left.end("b", PREPARE, LATER_MS, home=left.target("a")) is None
    assert await left.end("a", COMMIT, LATER_MS, left=[left.target("b")]) is None
    await until(lambda: not left.machine("a").transactions.decided[ID].left)
    assert left.counts() == (1, 1)
    assert not left.machine("b").transactions.is_open


async def test_a_participant_asks_its_home(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left.queue("a").resolver, "_tell", lambda *_: None)
    assert await left.end("a", COMMIT, LATER_MS, left=[left.target("b")]) is None
    assert await left.end("b", PREPARE, LATER_MS, home=left.target("a")) is None
    await until(lambda: left.counts() == (1, 1))
    assert not left.machine("b").transactions.is_open


async def test_a_participant_that_is_deleted_needs_to_know_nothing(left: Left) -> None:
    gone = ["gone", 1]
    assert await left.end("a", COMMIT, LATER_MS, left=[gone]) is None
    await until(lambda: not left.machine("a").transactions.decided[ID].left)


async def test_a_home_that_is_deleted_has_decided_nothing(left: Left) -> None:
    assert await left.end("b", PREPARE, LATER_MS, home=["gone", 1]) is None
    await until(lambda: not left.machine("b").transactions.is_open)
    assert left.counts() == (0, 0)


async def test_while_a_queue_cannot_be_asked_the_other_waits(left: Left) -> None:
    not_known_yet = ["later", 1 << 40]
    assert await left.end("b", PREPARE, SOON_MS, home=not_known_yet) is None
    resolver = left.queue("b", 2).resolver
    await until(lambda: resolver._due and min(resolver._due.values()) > 0)
    await left.end("a", COMMIT, SOON_MS, left=[])
    assert left.machine("b").transactions.prepared
