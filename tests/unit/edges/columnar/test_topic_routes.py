"""TOPIC_ROUTE: the route and the lineage, waiting for a newer version, permissions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.model.columnar import ErrorCode, Op
from tests.patience import PATIENCE_S
from tests.unit.edges.columnar.support import Peer, Rig, reader


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as made:
        made.cluster.raise_versions()
        await made.broker.topics.create("/", "orders", partitions=2, logical=8)
        yield made


async def test_the_route_comes_with_the_lineage(rig: Rig, client: Peer) -> None:
    answer = await client.ask(Op.TOPIC_ROUTE, topic="orders", vhost="/")
    assert answer.status == 0, answer.map
    assert isinstance(answer.map["created_ms"], int)
    del answer.map["created_ms"]
    assert answer.map == {
        "vhost": "/",
        "topic": "orders",
        "version": 0,
        "logical": 8,
        "hash_id": 1,
        "hash_seed": 0,
        "mode": "strict",
        "ranges": [[0, 4, 0], [4, 8, 1]],
        "partitions": [
            [0, 0, 4, "open", 0, None, None, [], []],
            [1, 4, 8, "open", 0, None, None, [], []],
        ],
    }
    change = await rig.broker.topics.split("/", "orders", 0)
    await rig.broker.topics.wait_change("/", "orders", change["change_id"])
    answer = await client.ask(Op.TOPIC_ROUTE, topic="orders")
    assert answer.map["version"] == 1
    assert answer.map["ranges"] == [[0, 2, 2], [2, 4, 3], [4, 8, 1]]
    rows = answer.map["partitions"]
    assert isinstance(rows, list)
    assert rows[0] == [0, 0, 4, "sealed", 0, 1, 1, [], [2, 3]]
    assert rows[2] == [2, 0, 2, "open", 1, None, None, [0], []]
    answer = await client.ask(Op.TOPIC_ROUTE, topic="orders", lineage=False)
    assert "partitions" not in answer.map


async def test_who_follows_a_change_waits_for_the_next_version(rig: Rig, client: Peer) -> None:
    answer = await client.ask(Op.TOPIC_ROUTE, topic="orders", newer_than=0, wait_ms=1)
    assert answer.map["version"] == 0
    number = client.send(Op.TOPIC_ROUTE, {"topic": "orders", "newer_than": 0, "wait_ms": 5000})
    change = await rig.broker.topics.split("/", "orders", 0)
    async with asyncio.timeout(PATIENCE_S):
        while (found := client.answer_to(number)) is None:
            await asyncio.sleep(0.005)
    assert found.map["version"] == 1
    await rig.broker.topics.wait_change("/", "orders", change["change_id"])
    answer = await client.ask(Op.TOPIC_ROUTE, topic="orders", newer_than=0, wait_ms=5000)
    assert answer.map["version"] == 1


async def test_a_topic_that_goes_meanwhile_is_not_found(rig: Rig, client: Peer) -> None:
    number = client.send(Op.TOPIC_ROUTE, {"topic": "orders", "newer_than": 0, "wait_ms": 5000})
    await rig.broker.topics.delete("/", "orders")
    async with asyncio.timeout(PATIENCE_S):
        while (found := client.answer_to(number)) is None:
            await asyncio.sleep(0.005)
    assert (found.status, found.map["text"]) == (
        ErrorCode.NOT_FOUND,
        "no topic 'orders' in vhost '/'",
    )


async def test_wrong_requests_are_refused(rig: Rig, client: Peer) -> None:
    assert await client.refusal(Op.TOPIC_ROUTE, topic="nobody") == (
        ErrorCode.NOT_FOUND,
        "no topic 'nobody' in vhost '/'",
    )
    code, text = await client.refusal(Op.TOPIC_ROUTE, topic="orders", vhost="other")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert "is open on vhost '/'" in text
    code, text = await client.refusal(Op.TOPIC_ROUTE, topic="")
    assert (code, "topic" in text) == (ErrorCode.PRECONDITION_FAILED, True)


@pytest.mark.parametrize(
    ("read", "write", "group", "allowed"),
    [
        ("", "", None, False),
        ("", "orders", None, True),
        ("orders", "", None, True),
        ("orders/billing", "", None, False),
        ("orders/billing", "", "billing", True),
        ("orders/billing", "orders", "audit", False),
    ],
)
async def test_writers_and_readers_may_ask(
    rig: Rig, read: str, write: str, group: str | None, allowed: bool
) -> None:
    peer = await reader(rig, read=read, write=write)
    fields = {"topic": "orders"} if group is None else {"topic": "orders", "group": group}
    answer = await peer.ask(Op.TOPIC_ROUTE, **fields)
    assert answer.status == (0 if allowed else ErrorCode.ACCESS_REFUSED), answer.map
