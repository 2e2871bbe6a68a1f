"""The HTTP API over a cluster whose replication is immediate."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from convoymq.broker.access import AMQP, HTTP
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.edges.edge import message_metrics
from convoymq.edges.http.app import make_api, make_metrics
from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.messages import content_in, properties_json
from convoymq.edges.http.metrics import render
from convoymq.edges.http.served import Served
from convoymq.edges.http.server import ManagementServer
from convoymq.edges.sasl import LoginConfig
from convoymq.kernels.connection_buffer import Outbox
from convoymq.messages.record import names_of, read_record
from convoymq.model import slices
from convoymq.model.tables import Decimal, Field, Table
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.classic.support import Channel
from tests.unit.queues.fake_cluster import FakeCluster, FakeConnection, queue_end, until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        yield made


def client(
    cluster: FakeCluster,
    user: str = "guest",
    password: str = "guest",
    peer: str = "127.0.0.1",
    **served: Any,
) -> httpx.AsyncClient:
    login = LoginConfig(failed_login_delay_s=0.0)
    api = make_api(cluster.nodes[1].broker, served=Served(login=login, **served))
    transport = httpx.ASGITransport(api, client=(peer, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://api/api", auth=(user, password))


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client(cluster) as made:
        yield made


async def ok(response: httpx.Response | Any, status: int = 200) -> Any:
    answer = await response
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def test_only_management_users_with_the_right_password_get_in(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for user, password, peer in (
        ("guest", "wrong", "127.0.0.1"),
        ("guest", "guest", "10.1.1.1"),
        ("nobody", "x", "127.0.0.1"),
    ):
        async with client(cluster, user, password, peer) as unknown:
            answer = await unknown.get("/overview")
            assert answer.status_code == 401
            assert answer.json() == {"error": "not_authorized", "reason": "Login failed"}
            assert answer.headers["www-authenticate"] == 'Basic realm="RabbitMQ Management"'
    await ok(api.put("/users/plain", json={"password": "p", "tags": ""}), 201)
    async with client(cluster, "plain", "p") as plain:
        assert (await plain.get("/overview")).json()["reason"] == "Not management user"
    async with httpx.AsyncClient(transport=api._transport, base_url="http://api/api") as nobody:
        assert (await nobody.get("/overview")).status_code == 401


async def test_unknown_paths_and_methods(api: httpx.AsyncClient) -> None:
    expected = {"error": "Object Not Found", "reason": "Not Found"}
    assert await ok(api.get("/nonsense"), 404) == expected
    assert await ok(api.get("/queues/%2F/missing"), 404) == expected
    assert await ok(api.get("/queues/unknown-vhost"), 404) == expected
    await ok(api.post("/overview"), 405)
    answer = await api.put("/vhosts/v", content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"] == "bad_request"
    assert (await api.put("/vhosts/v", content=b"[]")).status_code == 400


async def test_overview_and_nodes(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    found = await ok(api.get("/overview"))
    assert found["cluster_name"] == "fake"
    assert found["node"] == "n1"
    assert found["object_totals"]["queues"] == 1
    assert found["queue_totals"]["messages"] == 0
    assert [row["name"] for row in found["exchange_types"]] == [
        "direct", "fanout", "topic", "headers",
        "x-consistent-hash", "x-modulus-hash", "x-random", "x-local-random",
        "x-delayed-message", "x-ordered",
    ]  # fmt: skip
    assert [row["running"] for row in await ok(api.get("/nodes"))] == [True] * 3
    cluster.down.add(3)
    rows = await ok(api.get("/nodes", params={"columns": "name,running"}))
    assert rows[2] == {"name": "n3", "running": False}
    assert (await ok(api.get("/nodes/n2")))["name"] == "n2"
    status = await ok(api.get("/convoy/node"))
    assert (status["state"], status["name"], status["groups_led"]) == ("running", "n1", 2)
    assert await ok(api.get("/whoami")) == {"name": "guest", "tags": ["administrator"]}


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_a_queue_is_declared_filled_read_and_deleted(
    cluster: FakeCluster, api: httpx.AsyncClient, kind: str
) -> None:
    declaration = {"durable": True, "arguments": {"x-queue-type": kind}}
    await ok(api.put("/queues/%2F/a%2Fb", json=declaration), 201)
    await ok(api.put("/queues/%2F/a%2Fb", json=declaration), 204)
    answer = await ok(api.put("/queues/%2F/a%2Fb", json={"durable": False}), 400)
    assert answer["reason"].startswith("406 PRECONDITION_FAILED - inequivalent arg")
    for payload, encoding in (("one", "string"), ("/w==", "base64")):
        message = {
            "properties": {"delivery_mode": 2, "headers": {"n": 1}, "message_id": "m"},
            "routing_key": "a/b",
            "payload": payload,
            "payload_encoding": encoding,
        }
        answer = await ok(api.post("/exchanges/%2F/amq.default/publish", json=message))
        assert answer == {"routed": True}
    body = {"count": 5, "ackmode": "ack_requeue_true", "encoding": "auto"}
    first, second = await ok(api.post("/queues/%2F/a%2Fb/get", json=body))
    assert first["payload"] == "one"
    assert first["properties"] == {"delivery_mode": 2, "headers": {"n": 1}, "message_id": "m"}
    assert first["routing_key"] == "a/b"
    assert first["redelivered"] is False
    assert first["message_count"] == 1
    assert (second["payload"], second["payload_encoding"]) == ("/w==", "base64")
    row = await ok(api.get("/queues/%2F/a%2Fb"))
    assert (row["type"], row["messages"], row["messages_ready"]) == (kind, 2, 2)
    assert (row["arguments"], row["ignored_arguments"]) == ({"x-queue-type": kind}, [])
    assert row["state"] == "running"
    if kind == "quorum":
        assert row["leader"] == "n1"
        assert row["members"] == ["n1", "n2", "n3"] == row["online"]
    body["ackmode"], body["count"] = "ack_requeue_false", 1
    (again,) = await ok(api.post("/queues/%2F/a%2Fb/get", json=body))
    assert (again["payload"], again["redelivered"]) == ("one", True)
    stats = (await ok(api.get("/queues/%2F/a%2Fb")))["message_stats"]
    names = ("publish", "deliver_get", "deliver", "redeliver", "ack")
    assert [stats.get(name) for name in names] == [2, 3, 3, 1 if kind == "quorum" else None, 1]
    assert {f"{name}_details" for name in stats if not name.endswith("_details")} <= stats.keys()
    assert "ready" not in stats
    broker = cluster.nodes[1].broker
    found = {
        name.removeprefix("global_messages_").removesuffix("_total"): value
        for _, name, labels, value in message_metrics(HTTP, broker.counters.of(HTTP))
        if value and labels == {"protocol": "http"}
    }
    assert found == {
        "received": 2, "received_confirm": 2, "routed": 2, "confirmed": 2, "delivered": 3,
        "delivered_get_manual_ack": 3, "get_empty": 1, "redelivered": 1, "acknowledged": 1,
    }  # fmt: skip
    assert not any(value for *_, value in message_metrics(AMQP, broker.counters.of(AMQP)))
    await ok(api.delete("/queues/%2F/a%2Fb/contents"), 204)
    assert (await ok(api.get("/queues/%2F/a%2Fb")))["messages"] == 0
    await ok(api.delete("/queues/%2F/a%2Fb"), 204)
    await ok(api.delete("/queues/%2F/a%2Fb"), 404)


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_a_queue_tells_its_single_active_consumer(
    cluster: FakeCluster, api: httpx.AsyncClient, kind: str
) -> None:
    arguments = {"x-queue-type": kind, "x-single-active-consumer": True}
    await cluster.queue(1, "q", arguments=arguments)
    queue = cluster.nodes[1].broker.queue_admin.find_queue("/", "q", None)

    async def active() -> str | None:
        row = await ok(api.get("/queues/%2F/q"))
        tag: str | None = row.get("single_active_consumer_tag")
        return tag

    assert await active() is None
    readers = [Channel(), Channel()]
    for number, reader in enumerate(readers, 1):
        reader.client = queue.client(cluster.nodes[1].new_session(), reader)
        reader.consume(number)
        await until(lambda reader=reader: reader.heard)
    assert await active() == "c1"
    readers[0].client.cancel(1)
    await until(lambda: ("cancel-ok", 1) in readers[0].heard)
    assert await active() == "c2"


@pytest.mark.parametrize(
    ("kind", "effective", "is_warned"),
    [("quorum", "drop-head", True), ("classic", "reject-publish-dlx", False)],
)
async def test_an_overflow_that_a_queue_type_does_not_serve_is_told(
    cluster: FakeCluster, api: httpx.AsyncClient, kind: str, effective: str, is_warned: bool
) -> None:
    cluster.raise_versions()
    arguments = {"x-queue-type": kind, "x-max-length": 5, "x-overflow": "reject-publish-dlx"}
    await cluster.queue(1, "q", arguments=arguments)
    row = await ok(api.get("/queues/%2F/q"))
    assert row["effective_settings"] == {"max-length": 5, "overflow": effective}
    assert ("reject-publish-dlx" in row.get("overflow_warning", "")) == is_warned


async def test_arguments_without_effect_are_no_settings(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    arguments = {"x-queue-type": "classic", "x-quorum-target-group-size": 5, "x-max-length": 5}
    await cluster.queue(1, "q", arguments=arguments)
    row = await ok(api.get("/queues/%2F/q"))
    assert row["ignored_arguments"] == ["x-quorum-target-group-size"]
    assert row["effective_settings"] == {"max-length": 5}


async def test_a_member_that_is_away_is_no_follower(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    cluster.down.add(3)
    rows = await ok(api.get("/queues/quorum/%2F/q/status"))
    assert {row["Node Name"]: row["Raft State"] for row in rows} == {
        "n1": "leader", "n2": "follower", "n3": "nodedown"
    }  # fmt: skip


async def test_machine_versions_and_stopped_replicas_are_shown(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    found = await ok(api.get("/convoy/node"))
    assert found["versions"]["quorum"] == {
        "oldest": 1, "newest": QuorumMachine.VERSION, "in_force_min": 1, "in_force_max": 1
    }  # fmt: skip
    assert found["versions"]["stream"] == {"oldest": 1, "newest": 2}
    assert found["replicas_stopped"] == []
    queue = await ok(api.get("/queues/%2F/q"))
    assert (queue["machine_version"], queue["stopped"]) == (1, {})
    (record,) = cluster.nodes[1].machine.records()
    replica = SimpleNamespace(stopped="entry 7: a command of type 99 is not known")
    cluster.nodes[2].host.stopped[record.group] = replica
    await cluster.tell()
    queue = await ok(api.get("/queues/%2F/q"))
    assert queue["stopped"] == {"n2": replica.stopped}
    assert "stopped_members" not in queue
    rows = await ok(api.get("/queues/quorum/%2F/q/status"))
    assert [(row["Raft State"], row["Machine Version"], row["Reason"]) for row in rows] == [
        ("leader", 1, ""), ("stopped", 1, replica.stopped), ("follower", 1, "")
    ]  # fmt: skip
    transport = httpx.ASGITransport(make_api(cluster.nodes[2].broker), client=("127.0.0.1", 1))
    url, auth = "http://api/api", ("guest", "guest")
    async with httpx.AsyncClient(transport=transport, base_url=url, auth=auth) as other:
        found = await ok(other.get("/convoy/node"))
    assert found["replicas_stopped"] == [
        {"group": record.group, "node": 2, "stopped": replica.stopped}
    ]
    assert found["replicas_behind"] == 1
    assert "supported_versions" in (await ok(api.get("/nodes/n1")))


@pytest.mark.parametrize("why", ["faulty", "lost_state", "quarantined"])
async def test_an_own_replica_that_has_lost_its_log_is_behind(
    cluster: FakeCluster, api: httpx.AsyncClient, why: str
) -> None:
    await cluster.queue(1, "q")
    assert (await ok(api.get("/convoy/node")))["replicas_behind"] == 0
    replica = next(iter(cluster.nodes[1].host.groups.values()))
    if why == "faulty":
        replica.faulty = "wal/1.wal at byte 7: spoiled"
    else:
        setattr(replica.core, why, True)
    assert (await ok(api.get("/convoy/node")))["replicas_behind"] == 1


async def test_exchanges_and_bindings(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    await ok(api.put("/exchanges/%2F/x", json={"type": "topic", "durable": True}), 201)
    await ok(api.put("/exchanges/%2F/x", json={"type": "topic", "durable": True}), 204)
    await ok(api.put("/exchanges/%2F/x", json={"type": "fanout", "durable": True}), 400)
    assert (await ok(api.get("/exchanges/%2F/x")))["type"] == "topic"
    assert (await ok(api.get("/exchanges/%2F/amq.default")))["name"] == ""
    path = "/bindings/%2F/e/x/q/q"
    answer = await api.post(path, json={"routing_key": "a.#", "arguments": {}})
    assert answer.status_code == 201
    answer = await api.post(path, json={"routing_key": "k", "arguments": {"n": 1}})
    assert answer.headers["location"].startswith("q/k~")
    await cluster.queue(1, "ü/é")
    answer = await api.post("/bindings/%2F/e/x/q/%C3%BC%2F%C3%A9", json={"routing_key": "k"})
    assert (answer.status_code, answer.headers["location"]) == (201, "%C3%BC%2F%C3%A9/k")
    rows = await ok(api.get(path))
    assert [row["routing_key"] for row in rows] == ["a.#", "k"]
    for row in rows:
        quoted = row["properties_key"].replace("%", "%25")
        assert await ok(api.get(f"{path}/{quoted}")) == row
        await ok(api.delete(f"{path}/{quoted}"), 204)
    assert await ok(api.get(path)) == []
    (default,) = await ok(api.get("/queues/%2F/q/bindings"))
    assert (default["source"], default["routing_key"]) == ("", "q")
    missing = {"properties": {}, "routing_key": "none", "payload": "", "payload_encoding": "string"}
    assert await ok(api.post("/exchanges/%2F/x/publish", json=missing)) == {"routed": False}
    await ok(api.delete("/exchanges/%2F/x"), 204)
    assert (await api.delete("/exchanges/%2F/amq.topic")).status_code == 401


async def test_users_permissions_and_virtual_hosts(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await ok(api.put("/vhosts/v", json={"default_queue_type": "classic", "tags": "a,b"}), 201)
    await ok(api.put("/vhosts/v", json={"description": "d"}), 204)
    assert (await ok(api.get("/vhosts/v")))["description"] == "d"
    await ok(api.put("/users/u", json={"password": "p", "tags": "management"}), 201)
    made = await ok(api.get("/users/u"))
    assert made["hashing_algorithm"] == "rabbit_password_hashing_sha256"
    assert len(base64.b64decode(made["password_hash"])) == 4 + 32
    await ok(api.put("/users/u", json={"password": "p"}), 400)
    rules = {"configure": "^u", "write": ".*", "read": ".*"}
    await ok(api.put("/permissions/v/u", json=rules), 201)
    await ok(api.put("/permissions/v/u", json=rules), 204)
    await ok(api.put("/permissions/v/u", json={**rules, "read": "("}), 400)
    topic = {"exchange": "amq.topic", "write": "^a", "read": ""}
    await ok(api.put("/topic-permissions/v/u", json=topic), 201)
    assert await ok(api.get("/topic-permissions/v/u")) == [{"user": "u", "vhost": "v", **topic}]
    async with client(cluster, "u", "p") as limited:
        assert [row["name"] for row in await ok(limited.get("/vhosts"))] == ["v"]
        await ok(limited.get("/queues/%2F"), 401)
        await ok(limited.get("/users"), 401)
        await ok(limited.put("/queues/v/mine", json={}), 401)
        await ok(limited.put("/queues/v/u-1", json={}), 201)
        message = {
            "properties": {},
            "routing_key": "b",
            "payload": "",
            "payload_encoding": "string",
        }
        await ok(limited.post("/exchanges/v/amq.topic/publish", json=message), 401)
    await ok(api.delete("/permissions/v/u"), 204)
    await ok(api.delete("/users/u"), 204)
    await ok(api.delete("/vhosts/v"), 204)
    assert [row["name"] for row in await ok(api.get("/users"))] == ["guest"]


async def test_lists_are_filtered_sorted_and_paged(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for name in ("b", "a", "c2", "c1"):
        await cluster.queue(1, name, arguments={"x-queue-type": "classic"})
    params: dict[str, Any] = {"sort": "name", "columns": "name", "sort_reverse": "true"}
    rows = await ok(api.get("/queues", params=params))
    assert [row["name"] for row in rows] == ["c2", "c1", "b", "a"]
    page = await ok(api.get("/queues", params={"page": 2, "page_size": 3, "columns": "name"}))
    assert len(page["items"]) == 1
    assert (page["page_count"], page["total_count"], page["filtered_count"]) == (2, 4, 4)
    page = await ok(
        api.get("/queues", params={"page": 1, "name": "^c", "use_regex": "true", "columns": "name"})
    )
    assert page["items"] == [{"name": "c1"}, {"name": "c2"}]
    await ok(api.get("/queues", params={"page": 9}), 400)
    await ok(api.get("/queues", params={"page": 1, "page_size": 501}), 400)
    await ok(api.get("/queues", params={"page": 1, "page_size": 500}), 200)


async def test_definitions_go_out_and_in(tmp_path: Path, cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    await cluster.queue(1, "mine", durable=False, exclusive=True, owner=1)
    broker = cluster.nodes[1].broker
    await broker.declarations.declare_exchange(
        "/", "x", "topic", durable=True, auto_delete=False, internal=False
    )
    await broker.declarations.bind("/", "x", queue_end("q"), "k")
    async with client(cluster) as api:
        document = await ok(api.get("/definitions"))
        assert [row["name"] for row in document["queues"]] == ["q"]
        assert [row["name"] for row in document["exchanges"]] == ["x"]
        (binding,) = document["bindings"]
        assert binding["destination"] == "q"
        single = await ok(api.get("/definitions/%2F"))
        assert single["queues"] == [
            {"name": "q", "durable": True, "auto_delete": False,
             "arguments": {"x-queue-type": "quorum"}}
        ]  # fmt: skip
        await ok(api.post("/definitions", json={"queues": [{"name": 5}]}), 400)
    async with FakeCluster(tmp_path / "other") as other, client(other) as api:
        await ok(api.post("/definitions", json=document), 204)
        await ok(api.post("/definitions", json=document), 204)
        again = await ok(api.get("/definitions"))
        for key in ("users", "permissions", "queues", "exchanges", "bindings"):
            assert again[key] == document[key]
        await ok(api.put("/vhosts/v"), 201)
        await ok(api.post("/definitions/v", json=single), 204)
        assert (await ok(api.get("/queues/v/q")))["type"] == "quorum"


async def test_arguments_of_bindings_keep_their_types(tmp_path: Path, cluster: FakeCluster) -> None:
    """Of a document that comes back, and of one whose arguments somebody has edited, those."""
    await cluster.queue(1, "q")
    typed = Table.from_fields([
        ("b", Field("x", b"\xff")), ("d", Field("D", Decimal(2, 315))), ("n", Field("I", 5)),
        ("t", Field("F", Table.from_fields([("in", Field("u", 1))]))), ("w", Field("T", 1 << 63)),
    ])  # fmt: skip
    plain = Table.of({"a": "text", "n": 5})
    for arguments in (typed, plain):
        declarations = cluster.nodes[1].broker.declarations
        await declarations.bind("/", "amq.headers", queue_end("q"), "", arguments)
    async with client(cluster) as api:
        document = await ok(api.get("/definitions"))
        assert ["arguments_encoded" in row for row in document["bindings"]] == [False, True]
        await ok(api.post("/definitions", json=document), 204)
        assert (await ok(api.get("/definitions")))["bindings"] == document["bindings"]

    async def imported(changed: dict[str, Any], status: int = 204) -> list[Table]:
        async with FakeCluster(tmp_path / str(len(list(tmp_path.iterdir())))) as other:
            async with client(other) as api:
                await ok(api.post("/definitions", json=changed), status)
            vhost = other.nodes[1].broker.metadata.tree.vhosts["/"]
            return [each.arguments for each in vhost.topology.bindings()]

    assert sorted(map(repr, await imported(document))) == sorted(map(repr, (plain, typed)))
    document["bindings"][1]["arguments"] = {"n": 6}
    found = await imported(document)
    assert {str(each.to_plain()["n"]) for each in found} == {"5", "6"}
    document["bindings"][1]["arguments_encoded"] = "AAA="
    assert await imported(document, 400) == []


async def test_connections_are_listed_and_closed(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    class Connection(FakeConnection):
        id, name, vhost, closed = 1, "1.2.3.4:5 -> 6.7.8.9:10", "/", ""

        def info(self) -> dict[str, Any]:
            return {"name": self.name, "vhost": "/", "user": "guest"}

        def channel_infos(self) -> list[dict[str, Any]]:
            row = {"name": f"{self.name} (1)", "vhost": "/", "user": "guest", "consumer_count": 1}
            return [{**row, "connection_details": {"name": self.name}}]

        def consumer_infos(self) -> list[dict[str, Any]]:
            return [{"consumer_tag": "c", "queue": {"name": "q", "vhost": "/"}}]

        def close(self, reason: str) -> None:
            self.closed = reason

    connection = Connection()
    cluster.nodes[2].broker.connections.add(connection)
    await cluster.queue(1, "q")
    await cluster.tell()
    (row,) = await ok(api.get("/connections"))
    assert row["node"] == "n2"
    path = "/connections/" + connection.name.replace(" ", "%20").replace(">", "%3E")
    assert await ok(api.get(path)) == row
    assert len(await ok(api.get(path + "/channels"))) == 1
    assert len(await ok(api.get("/vhosts/%2F/channels"))) == 1
    assert len(await ok(api.get("/consumers/%2F"))) == 1
    assert len((await ok(api.get("/queues/%2F/q")))["consumer_details"]) == 1
    await ok(api.delete(path, headers={"x-reason": "too old"}), 204)
    assert connection.closed == "too old"
    await ok(api.delete("/connections/none"), 404)


async def test_metrics_name_what_dashboards_ask_for(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    broker = cluster.nodes[1].broker
    broker.counters.of(AMQP).published = 12_345_678
    amqp = AmqpEdge(broker=broker, settings=AmqpConfig(), outbox=Outbox())
    transport = httpx.ASGITransport(make_metrics(broker, Served(edges=lambda: [amqp])))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as metrics:
        text = (await metrics.get("/metrics")).text
        assert 'rabbitmq_identity_info{rabbitmq_node="n1",rabbitmq_cluster="fake"' in text
        assert 'rabbitmq_global_messages_received_total{protocol="amqp091"} 12345678\n' in text
        assert (
            "# TYPE rabbitmq_queue_messages_ready gauge\n"
            "# HELP rabbitmq_queue_messages_ready Messages that wait\n"
            "rabbitmq_queue_messages_ready 0\n" in text
        )
        assert "rabbitmq_queues 1\n" in text
        assert "convoy_deliveries_local_total 0\n" in text
        per_object = (await metrics.get("/metrics/per-object")).text
        assert 'rabbitmq_queue_messages{vhost="/",queue="q"} 0' in per_object
        assert (await metrics.get("/")).status_code == 404


async def test_raft_is_told_under_the_names_of_rabbitmq(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    broker = cluster.nodes[1].broker
    group = next(group for group in broker.host.groups if group > 0)
    replica = broker.host.groups[group]
    replica.applying.commit_latency_ms = 25
    text = await render(broker)
    assert f"rabbitmq_raft_term {replica.core.term}\n" in text
    assert f"rabbitmq_raft_commit_index {replica.core.commit_index}\n" in text
    assert f"rabbitmq_raft_last_applied {replica.last_applied}\n" in text
    assert "rabbitmq_raft_commit_latency_seconds 0.025\n" in text
    per_object = await render(broker, per_object=True)
    labels = '{vhost="/",queue="q"}'
    assert f"rabbitmq_raft_last_written_index{labels} {replica.log.written_index}\n" in per_object
    assert f"rabbitmq_raft_num_segments{labels} {len(replica.log.segments)}\n" in per_object


async def test_others_have_their_turns_while_lines_of_queues_are_made(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20
    for number in range(count):
        await cluster.queue(1, f"q{number}")
    monkeypatch.setattr(slices, "SLICE_NS", 0)
    made = asyncio.create_task(render(cluster.nodes[1].broker, per_object=True))
    turns = 0
    while not made.done():
        turns += 1
        await asyncio.sleep(0)
    # For its row, and for its lines.
    assert turns >= 2 * count
    assert made.result().count("rabbitmq_queue_messages{") == count


async def test_a_real_socket_answers_and_stops(cluster: FakeCluster) -> None:
    server = ManagementServer(cluster.nodes[1].broker, [("127.0.0.1", 0)], [("127.0.0.1", 0)])
    await server.start()
    try:
        api, metrics = server.ports
        async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
            answer = await browser.get(f"http://127.0.0.1:{api}/api/vhosts/%2F")
            assert answer.json()["name"] == "/"
            answer = await browser.get(f"http://127.0.0.1:{metrics}/metrics")
            assert answer.status_code == 200
    finally:
        await server.stop()
    with pytest.raises(OSError):
        await asyncio.get_running_loop().run_in_executor(
            None, socket.create_connection, ("127.0.0.1", api)
        )


@pytest.mark.parametrize("asked", [{"expiration": "100"}, {"priority": 5}])
async def test_what_a_quorum_queue_does_not_serve_is_refused_by_name(
    cluster: FakeCluster, api: httpx.AsyncClient, asked: dict[str, Any]
) -> None:
    await cluster.queue(1, "q")
    path = "/exchanges/%2F/amq.default/publish"
    message = {"routing_key": "q", "payload": "x", "payload_encoding": "string"}
    answer = await ok(api.post(path, json={**message, "properties": asked}), 400)
    name = next(iter(asked))
    assert f"message property '{name}' is not served by quorum queues" in answer["reason"]
    assert await ok(api.post(path, json={**message, "properties": {"priority": 4}})) == {
        "routed": True
    }


def test_a_record_survives_the_round_trip() -> None:
    properties = {
        "content_type": "text/plain", "headers": {"a": 1, "b": "x", "c": True}, "delivery_mode": 2,
        "priority": 3, "correlation_id": "c", "reply_to": "r", "expiration": "100",
        "message_id": "m", "timestamp": 123, "type": "t", "user_id": "u", "app_id": "p",
    }  # fmt: skip
    body = bytes(range(256)) * 2000
    found = read_record(names_of("x", "rk") + content_in(properties, body))
    assert (found.exchange, found.routing_key, found.body) == ("x", "rk", body)
    assert properties_json(found.properties) == properties


def test_every_path_is_there_once() -> None:
    keys = [(method, path) for method, path, _ in ROUTES]
    assert len(keys) == len(set(keys)) > 90
