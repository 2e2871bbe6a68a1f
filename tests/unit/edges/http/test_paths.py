"""Paths of the HTTP API that RabbitMQ's tools ask for beside the main ones."""

from __future__ import annotations

import json

import httpx
import pytest

from convoymq.broker.access import AMQP
from convoymq.edges.http.handlers.nodes import MEMORY_PARTS
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]


async def test_users_are_deleted_together(api: httpx.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await ok(api.put(f"/users/{name}", json={"password": "p", "tags": ""}), 201)
    rule = {"configure": "", "write": "", "read": ".*"}
    await ok(api.put("/permissions/%2F/b", json=rule), 201)
    rows = await ok(api.get("/users/without-permissions"))
    assert [row["name"] for row in rows] == ["a", "c"]
    await ok(api.post("/users/bulk-delete", json={"users": "a"}), 400)
    await ok(api.post("/users/bulk-delete", json={"users": ["a", "c", "nobody"]}), 204)
    assert [row["name"] for row in await ok(api.get("/users"))] == ["b", "guest"]


async def test_permissions_are_listed_by_user_and_by_virtual_host(api: httpx.AsyncClient) -> None:
    await ok(api.put("/users/a", json={"password": "p", "tags": ""}), 201)
    rule = {"configure": "^c", "write": "^w", "read": "^r"}
    topic = {"exchange": "amq.topic", "write": "^a", "read": ""}
    await ok(api.put("/permissions/%2F/a", json=rule), 201)
    await ok(api.put("/topic-permissions/%2F/a", json=topic), 201)
    owner = {"user": "a", "vhost": "/"}
    assert await ok(api.get("/users/a/permissions")) == [owner | rule]
    assert owner | rule in await ok(api.get("/vhosts/%2F/permissions"))
    for path in ("/users/a/topic-permissions", "/vhosts/%2F/topic-permissions"):
        assert await ok(api.get(path)) == [owner | topic]


async def test_queues_are_listed_by_the_user_that_declared_them(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.raise_versions()
    await ok(api.put("/users/ann", json={"password": "p", "tags": "management"}), 201)
    rule = {"configure": ".*", "write": ".*", "read": ".*"}
    await ok(api.put("/permissions/%2F/ann", json=rule), 201)
    async with client(cluster, "ann", "p") as ann:
        classic = {"arguments": {"x-queue-type": "classic"}}
        await ok(ann.put("/queues/%2F/of-ann", json=classic), 201)
        await ok(ann.put("/exchanges/%2F/of-ann", json={"type": "fanout"}), 201)
    document = {
        "queues": [{"name": "imported", "vhost": "/"} | classic],
        "exchanges": [{"name": "imported", "vhost": "/", "type": "fanout"}],
    }
    await ok(api.post("/definitions", json=document), 204)
    await ok(api.put("/queues/%2F/of-ann", json=classic), 204)
    assert [row["name"] for row in await ok(api.get("/users/ann/queues"))] == ["of-ann"]
    page = await ok(api.get("/users/guest/queues?page=1&columns=name,user_who_performed_action"))
    assert page["items"] == [{"name": "imported", "user_who_performed_action": "guest"}]
    assert await ok(api.get("/users/nobody/queues")) == []
    for name, user in (
        ("of-ann", "ann"), ("imported", "guest"), ("amq.topic", "rmq-internal")
    ):  # fmt: skip
        row = await ok(api.get(f"/exchanges/%2F/{name}"))
        assert row["user_who_performed_action"] == user
    # The name is no virtual host's: queues of others are not shown.
    await ok(api.delete("/permissions/%2F/ann"), 204)
    async with client(cluster, "ann", "p") as ann:
        assert await ok(ann.get("/users/ann/queues")) == []


@pytest.mark.parametrize("end", ["source", "destination"])
async def test_bindings_are_listed_by_either_end(api: httpx.AsyncClient, end: str) -> None:
    for name in ("a", "b"):
        await ok(api.put(f"/exchanges/%2F/{name}", json={"type": "fanout"}), 201)
    await ok(api.post("/bindings/%2F/e/a/e/b", json={"routing_key": "k"}), 201)
    inside, outside = ("a", "b") if end == "source" else ("b", "a")
    (row,) = await ok(api.get(f"/exchanges/%2F/{inside}/bindings/{end}"))
    assert (row["source"], row["destination"], row["routing_key"]) == ("a", "b", "k")
    assert await ok(api.get(f"/exchanges/%2F/{outside}/bindings/{end}")) == []


async def test_deleting_may_have_conditions(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": "classic"})
    await ok(api.put("/exchanges/%2F/x", json={"type": "fanout"}), 201)
    await ok(api.post("/bindings/%2F/e/x/q/q", json={}), 201)
    refused = await ok(api.delete("/exchanges/%2F/x?if-unused=true"), 400)
    assert "exchange 'x' in vhost '/' in use" in refused["reason"]
    body = {"properties": {}, "routing_key": "q", "payload": "m", "payload_encoding": "string"}
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=body))
    refused = await ok(api.delete("/queues/%2F/q?if-empty=true"), 400)
    assert "queue 'q' in vhost '/' not empty" in refused["reason"]
    await ok(api.delete("/queues/%2F/q/contents"), 204)
    await ok(api.delete("/queues/%2F/q?if-empty=true&if-unused=true"), 204)
    await ok(api.delete("/exchanges/%2F/x?if-unused=true"), 204)


async def test_definitions_may_come_as_the_file_of_a_form(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    document = json.dumps({"vhosts": [{"name": "from-a-form"}]}).encode()
    form = {"file": ("d.json", document, "application/json")}
    await ok(api.post("/definitions", files={"other": b"x"} | form), 204)
    assert "from-a-form" in cluster.nodes[1].machine.vhosts
    large = json.dumps(
        {"vhosts": [{"name": f"v{n}", "description": "d" * 1000} for n in range(40)]}
    )
    await ok(api.post("/definitions", files={"file": large.encode()}), 204)
    assert "v39" in cluster.nodes[1].machine.vhosts
    refused = await ok(api.post("/definitions", files={"other": document}), 400)
    assert refused["reason"] == "the form has no part 'file'"
    kind = {"content-type": "multipart/form-data"}
    refused = await ok(api.post("/definitions", content=document, headers=kind), 400)
    assert refused["reason"] == "the form names no boundary"
    # Only definitions do.
    await ok(api.put("/vhosts/x", files=form), 400)


async def test_a_reset_makes_rates_begin_anew(
    cluster: FakeCluster, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = [100_000]
    queries = cluster.nodes[1].broker.cluster
    monkeypatch.setattr(queries.sampler._clock, "monotonic_ms", lambda: now_ms[0])
    counters = cluster.nodes[1].broker.counters.of(AMQP)

    async def rate() -> float:
        now_ms[0] += 1000
        stats = (await ok(api.get("/overview")))["message_stats"]
        return float(stats["publish_details"]["rate"])

    await rate()
    counters.published += 500
    assert await rate() == 500.0
    await ok(api.delete("/reset"), 204)
    now_ms[0] -= 1000
    assert await rate() == 0.0
    counters.published += 700
    assert await rate() == 700.0
    await ok(api.delete("/reset/n1"), 204)
    now_ms[0] -= 1000
    assert await rate() == 0.0
    await ok(api.delete("/reset/n2"), 400)
    await ok(api.delete("/reset/nowhere"), 404)


async def test_lists_that_tools_expect_are_there(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": "classic"})
    assert [row["name"] for row in await ok(api.get("/queues/detailed"))] == ["q"]
    for path in ("/vhosts/%2F/connections", "/vhosts/%2F/channels", "/consumers/%2F"):
        assert await ok(api.get(path)) == []
    for path in ("/feature-flags", "/deprecated-features", "/extensions"):
        assert isinstance(await ok(api.get(path)), list)
    (node, *_) = await ok(api.get("/nodes"))
    await cluster.queue(1, "quorum", arguments={"x-queue-type": "quorum"})
    storage = cluster.nodes[1].host.storage
    storage.memory_bytes, storage.cache_bytes = 100, 20
    memory = (await ok(api.get(f"/nodes/{node['name']}/memory")))["memory"]
    assert memory["binary"] == 120
    assert memory["total"]["rss"] >= memory["other_proc"] >= 0
    assert memory.keys() == {*MEMORY_PARTS, "strategy", "total"}
    shares = (await ok(api.get(f"/nodes/{node['name']}/memory/relative")))["memory"]
    assert shares.keys() == {*MEMORY_PARTS, "total"}
    assert (shares["total"], shares["plugins"]) == (100, 0)
    assert 1 <= shares["binary"] <= 100
    other = (await ok(api.get("/nodes/n2/memory")))["memory"]
    assert (other["binary"], other["other_proc"]) == (0, other["total"]["rss"])
    await ok(api.get("/nodes/nobody/memory"), 404)


async def test_log_ins_are_counted_by_protocol_until_they_are_forgotten(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    async with client(cluster, "guest", "wrong") as unknown:
        assert (await unknown.get("/overview")).status_code == 401
    (row,) = await ok(api.get("/auth/attempts/n1"))
    assert row["protocol"] == "http"
    assert (row["auth_attempts_failed"], row["auth_attempts"]) == (
        1,
        row["auth_attempts_succeeded"] + 1,
    )
    await ok(api.delete("/auth/attempts/n1"), 204)
    (row,) = await ok(api.get("/auth/attempts/n1"))
    assert (row["auth_attempts"], row["auth_attempts_failed"]) == (1, 0)
    assert "each node counts" in (await ok(api.get("/auth/attempts/n2"), 400))["reason"]
    await ok(api.get("/auth/attempts/nowhere"), 404)
    await ok(api.put("/users/monitor", json={"password": "p", "tags": "monitoring"}), 201)
    async with client(cluster, "monitor", "p") as monitor:
        assert (await monitor.get("/auth/attempts/n1")).status_code == 401
        assert (await monitor.get("/auth/hash_password/p")).status_code == 401


async def test_a_hashed_password_lets_in(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    made = await ok(api.get("/auth/hash_password/s%2Fecret"))
    user = {"password_hash": made["ok"], "tags": "monitoring"}
    await ok(api.put("/users/hashed", json=user), 201)
    async with client(cluster, "hashed", "s/ecret") as hashed:
        assert (await hashed.get("/whoami")).json()["name"] == "hashed"


async def test_definitions_have_their_second_name(api: httpx.AsyncClient) -> None:
    document = await ok(api.get("/all-configuration"))
    assert document.keys() == (await ok(api.get("/definitions"))).keys()
    await ok(api.post("/all-configuration", json={"vhosts": [{"name": "second"}]}), 204)
    assert (await ok(api.get("/vhosts/second")))["name"] == "second"


async def test_flags_are_enabled_when_they_are(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    flag = "metadata_version_2"
    rows = {row["name"]: row["state"] for row in await ok(api.get("/feature-flags"))}
    if rows[flag] == "disabled":
        refused = await ok(api.put(f"/feature-flags/{flag}/enable"), 400)
        assert "by itself" in refused["reason"]
    cluster.raise_versions()
    await ok(api.put(f"/feature-flags/{flag}/enable"), 204)
    await ok(api.put("/feature-flags/nothing/enable"), 404)


async def test_deprecated_features_that_are_used_are_listed(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    assert await ok(api.get("/deprecated-features/used")) == []
    queue = {"durable": False, "arguments": {"x-queue-type": "classic"}}
    await ok(api.put("/queues/%2F/passing", json=queue), 201)
    (row,) = await ok(api.get("/deprecated-features/used"))
    assert (row["name"], row["state"]) == ("transient_nonexcl_queues", "permitted")


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_lists_without_statistics_have_what_a_queue_is(
    cluster: FakeCluster, api: httpx.AsyncClient, kind: str
) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": kind})
    body = {"properties": {}, "routing_key": "q", "payload": "m", "payload_encoding": "string"}
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=body))
    (row,) = await ok(api.get("/queues", params={"disable_stats": "true"}))
    assert (row["name"], row["type"], row["state"], row["durable"]) == ("q", kind, "running", True)
    assert not {"messages", "message_stats"} & row.keys()
    light = {"disable_stats": "true", "enable_queue_totals": "true"}
    (row,) = await ok(api.get("/queues", params=light))
    assert row["messages"] == row["messages_ready"] == 1
    assert "message_stats" not in row


async def test_queues_of_some_types_are_listed(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for kind in ("classic", "quorum", "stream"):
        await cluster.queue(1, kind, arguments={"x-queue-type": kind})
    page = await ok(api.get("/queues", params={"type": "stream,quorum", "page": "1"}))
    assert [row["name"] for row in page["items"]] == ["quorum", "stream"]
    assert page["total_count"] == 2
    assert await ok(api.get("/queues/%2F", params={"type": "unknown"})) == []


async def test_queues_are_sorted_by_any_column(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for number, name in enumerate(("b", "c", "a")):
        await cluster.queue(1, name, arguments={"x-delivery-limit": 10 - number})
        for _ in range(number):
            body = {"properties": {}, "routing_key": name, "payload": "m"}
            await ok(api.post("/exchanges/%2F/amq.default/publish", json=body))

    async def order(**query: str) -> list[str]:
        page = await ok(api.get("/queues", params={"page": "1", "page_size": "2", **query}))
        assert (page["total_count"], page["item_count"]) == (3, 2)
        return [row["name"] for row in page["items"]]

    assert await order() == ["a", "b"]
    assert await order(sort="name", sort_reverse="true") == ["c", "b"]
    assert await order(sort="messages") == ["b", "c"]
    assert await order(sort="message_bytes_ready", sort_reverse="true") == ["a", "c"]
    # These are in rows alone.
    assert await order(sort="arguments.x-delivery-limit") == ["a", "c"]
    assert await order(sort="message_stats.publish", sort_reverse="true") == ["a", "c"]


async def test_a_protected_virtual_host_is_not_deleted(api: httpx.AsyncClient) -> None:
    await ok(api.put("/vhosts/v", json={"tracing": True}), 201)
    assert not (await ok(api.get("/vhosts/v")))["protected_from_deletion"]
    await ok(api.post("/vhosts/v/deletion/protection"), 204)
    row = await ok(api.get("/vhosts/v"))
    assert row["protected_from_deletion"]
    assert row["metadata"]["protected_from_deletion"]
    assert await ok(api.delete("/vhosts/v"), 412) == {
        "error": "precondition_failed",
        "reason": "Refusing to delete virtual host 'v' because it is protected from deletion",
    }
    assert (await ok(api.get("/vhosts/v")))["tracing"]
    # A body that does not speak of it leaves it.
    await ok(api.put("/vhosts/v", json={"description": "d"}), 204)
    exported = await ok(api.get("/definitions"))
    await ok(api.delete("/vhosts/v/deletion/protection"), 204)
    await ok(api.delete("/vhosts/v"), 204)
    await ok(api.post("/definitions", json={"vhosts": exported["vhosts"]}), 204)
    await ok(api.delete("/vhosts/v"), 412)
    await ok(api.put("/vhosts/v", json={"protected_from_deletion": False}), 204)
    await ok(api.delete("/vhosts/v"), 204)
    await ok(api.put("/vhosts/v", json={"metadata": {"protected_from_deletion": True}}), 201)
    await ok(api.delete("/vhosts/v"), 412)
    await ok(api.post("/vhosts/none/deletion/protection"), 404)
