"""Small things that clients of the HTTP API notice."""

from __future__ import annotations

import httpx
import pytest

from convoymq.metadata.access import SHA256
from tests.unit.management.test_api import api, cluster, ok
from tests.unit.management.test_behaviour import Connection
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]


@pytest.mark.parametrize("given", ["because ü → 終", "plain", "ü".encode("latin-1")])
async def test_the_reason_of_a_close_is_utf8(
    cluster: FakeCluster, api: httpx.AsyncClient, given: str | bytes
) -> None:
    connection = Connection(1, "guest")
    cluster.nodes[2].broker.connections.add(connection)
    header = given.encode() if isinstance(given, str) else given
    await ok(api.delete(connection.path, headers={b"x-reason": header}), 204)
    assert connection.closed == (given if isinstance(given, str) else "ü")


async def test_columns_are_chosen_of_one_object_and_of_pages(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": "classic"})
    query = "?columns=name,arguments.x-queue-type"
    row = {"name": "q", "arguments": {"x-queue-type": "classic"}}
    assert await ok(api.get(f"/queues/%2F/q{query}")) == row
    assert await ok(api.get("/vhosts/%2F?columns=name")) == {"name": "/"}
    assert await ok(api.get("/overview?columns=object_totals.queues")) == {
        "object_totals": {"queues": 1}
    }
    page = await ok(api.get(f"/queues{query}&page=1"))
    assert (page["items"], page["total_count"]) == ([row], 1)


async def test_a_bad_password_hash_is_called_so(api: httpx.AsyncClient) -> None:
    user = {"password_hash": "notbase64!!", "tags": ""}
    for algorithm in (None, SHA256):
        body = {**user, **({"hashing_algorithm": algorithm} if algorithm else {})}
        answer = await ok(api.put("/users/u", json=body), 400)
        assert answer["reason"] == f"password_hash is not a hash of algorithm '{SHA256}'"
    answer = await ok(api.put("/users/u", json={**user, "hashing_algorithm": "md5"}), 400)
    assert answer["reason"] == "unsupported hashing algorithm 'md5'"
    document = {"users": [{"name": "u", **user}]}
    answer = await ok(api.post("/definitions", json=document), 400)
    assert "user 'u': password_hash is not a hash" in answer["reason"]


async def test_definitions_with_a_queue_without_a_name_are_refused(api: httpx.AsyncClient) -> None:
    await ok(api.put("/vhosts/v"), 201)
    document: dict[str, object] = {"queues": [{"name": "", "vhost": "v", "arguments": {}}]}
    for path in ("/definitions", "/definitions/v"):
        answer = await ok(api.post(path, json=document), 400)
        assert "a queue without a name" in answer["reason"]
    assert await ok(api.get("/queues/v")) == []
    # The default exchange is there already.
    document = {"exchanges": [{"name": "", "vhost": "v", "type": "direct", "arguments": {}}]}
    for _ in range(2):
        await ok(api.post("/definitions", json=document), 204)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("permissions/%2F/guest", {"configure": "(", "write": "", "read": ""}),
        ("topic-permissions/%2F/guest", {"exchange": "x", "write": "(", "read": ""}),
        ("users/u", {"password_hash": "x", "tags": ""}),
        ("users/u", {"password": "x", "tags": 5}),
        ("vhosts/v", {"default_queue_type": "bogus"}),
    ],
)
async def test_only_what_amqp_clients_may_do_is_refused_with_amqps_codes(
    api: httpx.AsyncClient, path: str, body: object
) -> None:
    answer = await ok(api.put(f"/{path}", json=body), 400)
    assert "PRECONDITION_FAILED" not in answer["reason"]
    answer = await ok(api.put("/exchanges/%2F/x", json={"type": "bogus"}), 400)
    assert answer["reason"].startswith("406 PRECONDITION_FAILED - ")
