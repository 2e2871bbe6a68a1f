"""Small things that clients of the HTTP API notice."""

from __future__ import annotations

import httpx
import pytest

from convoymq.metadata.access import SHA256
from tests.unit.edges.http.test_api import api, cluster, ok
from tests.unit.edges.http.test_behaviour import Connection
from tests.unit.queues.fake_cluster import FakeCluster, FakeHost, until

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


async def test_global_parameters_have_any_name_and_value(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"a": [1, None, "ü"], "b": {"c": True}}
    await ok(api.put("/global-parameters/my%2Fown", json={"value": value}), 201)
    await ok(api.put("/global-parameters/my%2Fown", json={"value": value}), 204)
    await ok(api.put("/global-parameters/text", json={"value": "t"}), 201)
    await ok(api.put("/global-parameters/text", json={}), 400)
    own = {"name": "my/own", "value": value}
    assert await ok(api.get("/global-parameters/my%2Fown")) == own
    rows = [{"name": "cluster_name", "value": "fake"}, own, {"name": "text", "value": "t"}]
    assert await ok(api.get("/global-parameters")) == rows
    exported = await ok(api.get("/definitions"))
    assert exported["global_parameters"] == rows
    for name in ("my%2Fown", "text"):
        await ok(api.delete(f"/global-parameters/{name}"), 204)
        await ok(api.delete(f"/global-parameters/{name}"), 404)
    await ok(api.post("/definitions", json=exported), 204)
    assert await ok(api.get("/global-parameters")) == rows
    await ok(api.put("/cluster-name", json={"name": ""}), 400)
    monkeypatch.setattr("convoymq.metadata.global_parameters.PARAMETERS_MAX", 2)
    await ok(api.put("/global-parameters/text", json={"value": 1}), 204)
    answer = await ok(api.put("/global-parameters/third", json={"value": 1}), 400)
    assert "which is the most" in answer["reason"]
    answer = await ok(api.put("/global-parameters/text", json={"value": "x" * 70_000}), 400)
    assert "at most 65536 characters" in answer["reason"]
    document = {"global_parameters": [{"name": "internal_cluster_id", "value": "theirs"}]}
    await ok(api.post("/definitions", json=document), 204)
    assert len(await ok(api.get("/global-parameters"))) == 3


async def test_paths_that_tools_ask_for_are_there(
    cluster: FakeCluster, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("federation-links", "stream/connections", "stream/consumers", "stream/publishers"):
        assert await ok(api.get(f"/{path}")) == await ok(api.get(f"/{path}/%2F")) == []
        await ok(api.get(f"/{path}/none"), 404)
    for node in cluster.nodes.values():
        name = node.broker.node_name
        assert await ok(api.get(f"/healthchecks/node/{name}")) == {"status": "ok"}
    await ok(api.get("/healthchecks/node/none"), 404)
    await ok(api.put("/feature-flags/metadata_version_2/enable"), 400)
    # Every node supports it now, and it has not risen yet.
    monkeypatch.setattr(FakeHost, "floor_of", lambda _host, _kind: 2)
    await ok(api.put("/feature-flags/metadata_version_2/enable"), 204)
    await ok(api.put("/feature-flags/metadata_version_99/enable"), 404)
    exchange = await ok(api.get("/exchanges/%2F/amq.topic"))
    assert (exchange["incoming"], exchange["outgoing"]) == ([], [])


async def test_tracing_is_set_shown_exported_and_ends_with_its_virtual_host(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    body = {"tracing": True, "description": "d"}
    await ok(api.put("/vhosts/v", json=body), 201)
    await ok(api.put("/vhosts/v", json={"tracing": True}), 204)
    row = await ok(api.get("/vhosts/v"))
    assert (row["tracing"], row["description"]) == (True, "d")
    assert (await ok(api.get("/vhosts/%2F")))["tracing"] is False
    for node in cluster.nodes.values():
        await until(lambda node=node: node.broker.firehose.vhosts == {"v"})
    exported = await ok(api.get("/definitions"))
    await ok(api.put("/vhosts/v", json={"tracing": False}), 204)
    assert (await ok(api.get("/vhosts/v")))["tracing"] is False
    await ok(api.post("/definitions", json=exported), 204)
    assert (await ok(api.get("/vhosts/v")))["tracing"] is True
    await ok(api.delete("/vhosts/v"), 204)
    await ok(api.put("/vhosts/v", json={}), 201)
    assert (await ok(api.get("/vhosts/v")))["tracing"] is False


async def test_messages_of_the_http_api_are_traced(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for name in ("q", "copies"):
        await cluster.queue(1, name, arguments={"x-queue-type": "classic"})
    path = "/bindings/%2F/e/amq.rabbitmq.trace/q/copies"
    await ok(api.post(path, json={"routing_key": "#"}), 201)
    await ok(api.put("/vhosts/%2F", json={"tracing": True}), 204)
    message = {"routing_key": "q", "payload": "m", "payload_encoding": "string",
               "properties": {"message_id": "i"}}  # fmt: skip
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=message))
    look = {"count": 5, "ackmode": "ack_requeue_false", "encoding": "auto"}
    await ok(api.post("/queues/%2F/q/get", json=look))
    rows = await ok(api.post("/queues/%2F/copies/get", json=look))
    assert [row["routing_key"] for row in rows] == ["publish.", "deliver.q"]
    for row in rows:
        assert (row["payload"], row["exchange"]) == ("m", "amq.rabbitmq.trace")
        headers = row["properties"]["headers"]
        assert headers["properties"] == {"message_id": "i"}
        assert (headers["user"], headers["routing_keys"]) == ("guest", ["q"])
