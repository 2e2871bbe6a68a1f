"""Messages that are looked at by their position, against what is delivered later."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

MESSAGES = 7


async def publish(api: httpx.AsyncClient, queue: str, payload: str) -> None:
    body = {
        "routing_key": queue, "payload": payload, "payload_encoding": "string",
        "properties": {"message_id": f"id-{payload}", "headers": {"n": 1}},
    }  # fmt: skip
    assert (await ok(api.post("/exchanges/%2F/amq.default/publish", json=body)))["routed"]


async def take(api: httpx.AsyncClient, count: int, mode: str) -> list[str]:
    body = {"count": count, "ackmode": mode, "encoding": "auto"}
    rows = await ok(api.post("/queues/%2F/q/get", json=body))
    return [row["payload"] for row in rows]


async def peek(api: httpx.AsyncClient, position: object, queue: str = "q", code: int = 200) -> Any:
    return await ok(api.get(f"/queues/quorum/%2F/{queue}/peek/{position}"), code)


async def peek_all(api: httpx.AsyncClient, count: int) -> list[str]:
    return [(await peek(api, position))["payload"] for position in range(1, count + 1)]


async def test_positions_are_those_of_the_next_deliveries(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    for number in range(MESSAGES):
        await publish(api, "q", str(number))
    assert await peek_all(api, MESSAGES) == [str(number) for number in range(MESSAGES)]
    # Settled in the front, given back: what came back is first again.
    assert await take(api, 2, "ack_requeue_false") == ["0", "1"]
    assert await take(api, 2, "reject_requeue_true") == ["2", "3"]
    left = await peek_all(api, MESSAGES - 2)
    found = await peek(api, 1)
    assert (found["payload"], found["redelivered"], found["delivery_count"]) == ("2", True, 1)
    assert found["properties"] == {"message_id": "id-2", "headers": {"n": 1}}
    assert (found["exchange"], found["routing_key"]) == ("", "q")
    assert await take(api, MESSAGES, "ack_requeue_false") == left


@pytest.mark.parametrize("position", [1, 4])
async def test_there_is_no_message_at_that_position(
    cluster: FakeCluster, api: httpx.AsyncClient, position: int
) -> None:
    await cluster.queue(1, "q")
    for number in range(position - 1):
        await publish(api, "q", str(number))
    answer = await peek(api, position, code=404)
    assert answer["reason"] == "Target queue does not have a message at that position"


async def test_what_is_no_quorum_queue_or_no_position_is_refused(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "classic", arguments={"x-queue-type": "classic"})
    await cluster.queue(1, "stream", arguments={"x-queue-type": "stream"})
    await cluster.queue(1, "q")
    for kind in ("classic", "stream"):
        answer = await peek(api, 1, kind, 400)
        assert answer["reason"].endswith(f"Cannot peek into a {kind} queue")
    for position in ("0", "-1", "x"):
        await peek(api, position, code=400)
    await peek(api, 1, "missing", 404)


async def test_who_may_not_read_may_not_look(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    await publish(api, "q", "secret")
    await ok(api.put("/users/weak", json={"password": "p", "tags": "management"}), 201)
    rules = {"configure": ".*", "write": ".*", "read": ""}
    await ok(api.put("/permissions/%2F/weak", json=rules), 201)
    async with client(cluster, "weak", "p") as weak:
        await ok(weak.get("/queues/quorum/%2F/q/peek/1"), 401)
