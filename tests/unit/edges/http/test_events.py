"""Server-sent events: what a page that stays open gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from convoymq.edges.http.handlers import events
from convoymq.edges.http.server import ManagementServer
from tests.patience import PATIENCE_S
from tests.unit.edges.http.test_api import api, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]


@pytest.fixture
async def server(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(events, "PAUSE_S", 0.01)
    monkeypatch.setattr(events, "PAUSES_OF_COST", 1)
    made = ManagementServer(cluster.nodes[1].broker, [("127.0.0.1", 0)])
    await made.start()
    base = f"http://127.0.0.1:{made.ports[0]}/api"
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S) as browser:
        yield browser
    await made.stop()


async def received(lines: AsyncIterator[str]) -> tuple[str, Any]:
    """Returns the next event and its content."""
    event = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            return event, json.loads(value)
    raise AssertionError("the stream has ended")


async def until_event(lines: AsyncIterator[str], wanted: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event, content = await received(lines)
            if event == wanted:
                return content


async def test_a_page_of_queues_is_followed(
    cluster: FakeCluster, api: httpx.AsyncClient, server: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "b")
    await server.post("/login", json={"username": "guest", "password": "guest"})
    query = {"topics": "queues,overview,alarms", "columns": "name,vhost,messages"}
    async with server.stream("GET", "/events", params=query) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        page = await until_event(lines, "queues")
        row = {"name": "b", "vhost": "/", "messages": 0}
        assert (page["keys"], page["rows"]) == (["%2F/b"], {"%2F/b": row})
        assert (page["page"], page["total_count"]) == (1, 1)
        await cluster.queue(1, "a")
        page = await until_event(lines, "queues")
        assert (page["keys"], list(page["rows"])) == (["%2F/a", "%2F/b"], ["%2F/a"])
        body = {"properties": {}, "routing_key": "b", "payload": "m", "payload_encoding": "string"}
        await ok(api.post("/exchanges/%2F/amq.default/publish", json=body))
        page = await until_event(lines, "queues")
        assert page["rows"] == {"%2F/b": row | {"messages": 1}}
        # Another password ends the session, and the stream.
        await ok(api.put("/users/guest", json={"password": "new", "tags": "administrator"}), 204)
        assert await until_event(lines, "end") == {"reason": "session ended"}


async def test_single_queues_are_followed_to_their_end(
    cluster: FakeCluster, api: httpx.AsyncClient, server: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "a/b")
    query = {"topics": "alarms", "queue": "%2F/a%2Fb"}
    async with server.stream("GET", "/events", params=query, auth=("guest", "guest")) as answer:
        lines = answer.aiter_lines()
        assert (await until_event(lines, "queue"))["name"] == "a/b"
        await ok(api.delete("/queues/%2F/a%2Fb"), 204)
        found = await until_event(lines, "queue")
        assert found == {"vhost": "/", "name": "a/b", "gone": True}


async def test_a_stream_ends_with_its_page_or_its_virtual_host(
    cluster: FakeCluster, api: httpx.AsyncClient, server: httpx.AsyncClient
) -> None:
    guest = ("guest", "guest")
    await cluster.queue(1, "a")
    await cluster.queue(1, "b")
    query = {"topics": "queues", "page": 2, "page_size": 1}
    async with server.stream("GET", "/events", params=query, auth=guest) as answer:
        lines = answer.aiter_lines()
        await until_event(lines, "queues")
        await ok(api.delete("/queues/%2F/b"), 204)
        found = await until_event(lines, "end")
        assert found["reason"].startswith("Page out of range")
        assert [line async for line in lines] == [""]
    await ok(api.put("/vhosts/v"), 201)
    query = {"topics": "queues", "vhost": "v"}
    async with server.stream("GET", "/events", params=query, auth=guest) as answer:
        lines = answer.aiter_lines()
        await until_event(lines, "queues")
        await ok(api.delete("/vhosts/v"), 204)
        assert (await until_event(lines, "end"))["reason"]


async def test_users_get_what_they_may_see(
    cluster: FakeCluster, api: httpx.AsyncClient, server: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    await ok(api.put("/users/u", json={"password": "p", "tags": "management"}), 201)
    assert (await server.get("/events")).status_code == 401
    query = {"topics": "nodes,queues,overview", "queue": "%2F/q"}
    async with server.stream("GET", "/events", params=query, auth=("u", "p")) as answer:
        lines = answer.aiter_lines()
        found = dict([await received(lines) for _ in range(3)])
    assert found["queues"]["keys"] == []
    assert found["overview"]["object_totals"]["queues"] == 0
    assert found["queue"]["gone"]
    assert "nodes" not in found


async def test_a_silent_stream_says_that_it_is_alive(
    cluster: FakeCluster, server: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BEAT_S", 0.02)
    query = {"topics": "alarms"}
    async with server.stream("GET", "/events", params=query, auth=("guest", "guest")) as answer:
        lines = answer.aiter_lines()
        for _ in range(2):
            assert await until_event(lines, "beat") == {}


async def test_streams_are_bounded(
    cluster: FakeCluster, server: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "USER_STREAMS_MAX", 1)
    guest = ("guest", "guest")
    for query in ({"topics": "weather"}, {"queue": "q"}, {"queue": ["%2F/q"] * 101}):
        assert (await server.get("/events", params=query, auth=guest)).status_code == 400
    async with server.stream("GET", "/events", auth=guest) as answer:
        await until_event(answer.aiter_lines(), "overview")
        assert (await server.get("/events", auth=guest)).status_code == 429
    # A client that went away makes room.
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with server.stream("GET", "/events", auth=guest) as answer:
                if answer.status_code == 200:
                    break
            await asyncio.sleep(0.01)
