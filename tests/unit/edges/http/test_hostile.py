"""Values that a sender chose, over HTTP: none hides another message, or costs it a delivery."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from convoymq.broker.facade import Broker
from convoymq.edges.one_shot import OneShot
from convoymq.messages.amqp091 import Properties, encode_properties
from convoymq.messages.record import names_of, read_record
from tests import hostile
from tests.patience import PATIENCE_S
from tests.unit.edges.http.test_api import api, cluster, ok
from tests.unit.edges.http.test_selections import act
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]


async def send(broker: Broker, queue: str, content: bytes) -> None:
    """Publishes as the AMQP edge does, once the frame scanner has looked at a message."""
    shot = OneShot(broker, broker.queue_admin.find_queue("/", queue))
    shot.client.target.publish((names_of("", queue), content), 1, 1, 0)
    shot.client.settle(0, ())
    assert await shot.wait()
    shot.client.close()


async def get(api: httpx.AsyncClient, queue: str, mode: str) -> list[dict[str, Any]]:
    body = {"count": 100, "ackmode": mode, "encoding": "auto"}
    answer = await api.post(f"/queues/%2F/{queue}/get", json=body)
    assert answer.status_code == 200, answer.text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    rows: list[dict[str, Any]] = json.loads(answer.content, parse_constant=refuse)
    return rows


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_looking_at_hostile_messages_changes_nothing(
    cluster: FakeCluster, api: httpx.AsyncClient, kind: str
) -> None:
    """As often as the delivery limit, and once more."""
    cluster.raise_versions()
    await cluster.queue(1, "q", arguments={"x-queue-type": kind})
    broker = cluster.nodes[1].broker
    await send(broker, "q", hostile.content(Properties(), b"good"))
    for properties in hostile.SEVERAL:
        await send(broker, "q", hostile.content(properties))
    for _ in range(22):
        rows = await get(api, "q", "ack_requeue_true")
        assert len(rows) == 1 + len(hostile.SEVERAL)
    assert rows[0]["payload"] == "good"
    properties = rows[1]["properties"]
    assert properties["correlation_id"] == "Not UTF-8, base64 is: //4AAQ=="
    assert rows[2]["properties"]["headers"] == {"Not UTF-8, base64 is: 6Q==": "v"}
    assert rows[3]["properties"]["timestamp"] == 1_700_000_000_000_000
    assert len(await get(api, "q", "ack_requeue_false")) == 1 + len(hostile.SEVERAL)


async def test_browse_peek_move_and_republish_keep_the_bytes(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.raise_versions()
    for name in ("q", "to", "edited"):
        await cluster.queue(1, name)
    broker = cluster.nodes[1].broker
    for properties in hostile.SEVERAL:
        await send(broker, "q", hostile.content(properties))
    path = "/convoy/queues/%2F/q/messages"
    page = await ok(api.post(f"{path}/browse", json={}))
    assert len(page["messages"]) == len(hostile.SEVERAL)
    assert not any("unreadable" in row for row in page["messages"])
    name = next(iter(page["messages"][1]["properties"]["headers"]))
    found = await ok(api.post(f"{path}/browse", json={"filter": {"header_exists": name}}))
    assert [row["id"] for row in found["messages"]] == [page["messages"][1]["id"]]
    for position in range(1, len(hostile.SEVERAL) + 1):
        await ok(api.get(f"/queues/quorum/%2F/q/peek/{position}"))
    # What JSON shows of properties is taken again as the same bytes.
    first = page["messages"][0]
    body = {"id": first["id"], "properties": first["properties"], "queue": "edited"}
    await act(api, "q", "republish", **body)
    await act(api, "q", "move", filter={}, queue="to")

    async def stored(queue: str, count: int) -> list[str]:
        shot = OneShot(broker, broker.queue_admin.find_queue("/", queue))
        made: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(made) < count:
                shot.client.get(no_ack=True)
                result: Any = await shot.wait()
                if result.block is not None:
                    message = read_record(hostile.taken(result))
                    made.append(encode_properties(message.properties).hex())
                else:
                    await asyncio.sleep(0.01)
        shot.client.close()
        return made

    sent = [encode_properties(each).hex() for each in hostile.SEVERAL]
    assert await stored("edited", 1) == sent[:1]
    assert await stored("to", len(sent) - 1) == sent[1:]


async def test_a_damaged_record_is_shown_as_what_it_is(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    broker = cluster.nodes[1].broker
    await send(broker, "q", b"\x02nonsense")
    await send(broker, "q", hostile.content(Properties(), b"good"))
    rows = await get(api, "q", "ack_requeue_true")
    assert [row.get("unreadable", False) for row in rows] == [True, False]
    assert rows[1]["payload"] == "good"
