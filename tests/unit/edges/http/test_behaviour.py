"""Who may do what through the HTTP API, and answers that clients rely on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from convoymq.broker.node_view import NodeView
from convoymq.edges.http import authentication, handlers
from convoymq.edges.http import listener as listener_module
from convoymq.edges.http.app import make_api, make_metrics
from convoymq.edges.http.served import Served
from convoymq.edges.http.server import ManagementServer
from convoymq.edges.http.times import Times
from convoymq.metadata.commands import DeleteQueue, DeleteVhost, PutNode
from convoymq.metadata.machine import User
from convoymq.model.tables import Field, Table
from convoymq.node import process_info as process
from convoymq.queues.classic.client import ClassicClient
from convoymq.queues.classic.queue import LocalQueue
from tests.patience import PATIENCE_S
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import (
    INCARNATION,
    FakeCluster,
    FakeConnection,
    queue_end,
    until,
)

__all__ = ["api", "cluster"]


class Connection(FakeConnection):
    """A client's connection, as far as lists and closing go."""

    def __init__(self, id: int, user: str) -> None:
        self.id, self.name, self.vhost, self.closed = id, f"1.2.3.4:{id} -> 6.7.8.9:10", "/", ""
        self.user = User(name=user)

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "vhost": "/", "user": self.user.name}

    def close(self, reason: str) -> None:
        self.closed = reason

    @property
    def path(self) -> str:
        return "/connections/" + self.name.replace(" ", "%20").replace(">", "%3E")


async def add_user(api: httpx.AsyncClient, name: str, tags: str) -> None:
    await ok(api.put(f"/users/{name}", json={"password": "p", "tags": tags}), 201)
    rules = {"configure": ".*", "write": ".*", "read": ".*"}
    await ok(api.put(f"/permissions/%2F/{name}", json=rules), 201)


# --- who may ---------------------------------------------------------------------------------


async def test_closing_the_connections_of_others_needs_an_administrator(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    theirs, own = Connection(1, "guest"), Connection(2, "watcher")
    for connection in (theirs, own):
        cluster.nodes[2].broker.connections.add(connection)
    await add_user(api, "watcher", "monitoring")
    async with client(cluster, "watcher", "p") as watcher:
        # What was opened a moment ago on another node can be found.
        await ok(watcher.get(theirs.path))
        answer = await ok(watcher.delete(theirs.path), 401)
        assert answer["error"] == "not_authorized"
        await ok(watcher.delete("/connections/username/guest"), 401)
        assert theirs.closed == ""
        await ok(watcher.delete(own.path), 204)
        assert own.closed
        own.closed = ""
        await ok(watcher.delete("/connections/username/watcher"), 204)
        assert own.closed
    await ok(api.delete("/connections/username/guest", headers={"x-reason": "r" * 999}), 204)
    assert theirs.closed == "r" * 100
    await ok(api.delete("/connections/username/nobody"), 204)
    await ok(api.delete("/connections/nobody"), 404)


async def test_a_message_names_its_user_truly(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    await add_user(api, "u", "management")
    await add_user(api, "actor", "management,impersonator")
    for user, claimed, status in (
        ("u", "guest", 400), ("u", "u", 200), ("actor", "guest", 200), ("u", 5, 400)
    ):  # fmt: skip
        message = {
            "properties": {"user_id": claimed},
            "routing_key": "q",
            "payload": "x",
            "payload_encoding": "string",
        }
        async with client(cluster, user, "p") as publisher:
            path = "/exchanges/%2F/amq.default/publish"
            answer = await ok(publisher.post(path, json=message), status)
        if claimed == "guest" and status == 400:
            assert answer["reason"] == (
                "406 PRECONDITION_FAILED - user_id property set to 'guest' but authenticated user "
                "was 'u'"
            )


async def test_an_alarm_refuses_what_is_published(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    path = "/exchanges/%2F/amq.default/publish"
    message = {"properties": {}, "routing_key": "q", "payload": "x"}
    # An alarm of any node blocks the publishers of all.
    cluster.nodes[2].broker.alarms.set("disk", True)
    await until(lambda: cluster.nodes[1].broker.alarms.effective)
    cluster.nodes[1].broker.alarms.set("memory", True)
    answer = await ok(api.post(path, json=message), 503)
    assert answer == {
        "error": "service_unavailable",
        "reason": "publishers are blocked by an alarm: disk and memory",
    }
    cluster.nodes[2].broker.alarms.set("disk", False)
    cluster.nodes[1].broker.alarms.set("memory", False)
    await until(lambda: not cluster.nodes[1].broker.alarms.effective)
    assert await ok(api.post(path, json=message)) == {"routed": True}
    (row,) = await ok(api.post("/queues/%2F/q/get", json={"count": 5}))
    assert row["message_count"] == 0


@pytest.mark.parametrize(
    ("mode", "ready"),
    [
        ("ack_requeue_false", 0),
        ("reject_requeue_false", 0),
        ("ack_requeue_true", 1),
        ("reject_requeue_true", 1),
    ],
)
async def test_a_get_is_answered_when_the_queue_has_settled(
    cluster: FakeCluster,
    api: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    ready: int,
) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": "classic"})
    message = {"properties": {}, "routing_key": "q", "payload": "x"}
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=message))
    (queue,) = cluster.nodes[1].broker.local.hosts["classic"].queues.values()
    assert isinstance(queue, LocalQueue)
    machine, waiting = queue.machine, []
    monkeypatch.setattr(ClassicClient, "when_settled", lambda _, call: waiting.append(call))
    path = "/queues/%2F/q/get"
    getting = asyncio.ensure_future(ok(api.post(path, json={"ackmode": mode})))
    await until(lambda: waiting)
    await until(lambda: (machine.ready_count, machine.unsettled_count) == (ready, 0))
    assert not getting.done()
    waiting[0](True)
    assert [row["payload"] for row in await getting] == ["x"]
    # Of a queue that is lost meanwhile the answer still has the messages.
    monkeypatch.undo()
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=message))
    monkeypatch.setattr(ClassicClient, "when_settled", lambda _, call: call(False))
    assert [row["payload"] for row in await ok(api.post(path, json={"ackmode": mode}))] == ["x"]


@pytest.mark.parametrize(
    ("expiration", "reason"),
    [
        ("abc", "invalid expiration 'abc': no_integer"),
        ("5s", "invalid expiration '5s': {leftover_string,\"s\"}"),
        ("-1", "invalid expiration '-1': {value_negative,-1}"),
        (
            "315360000001",
            "invalid expiration '315360000001': {value_too_large,315360000001}",
        ),
        ("9" * 5000, "a name or property of more than 255 bytes"),
    ],
)
async def test_an_expiration_is_checked_as_for_amqp(
    cluster: FakeCluster, api: httpx.AsyncClient, expiration: str, reason: str
) -> None:
    await cluster.queue(1, "q", arguments={"x-queue-type": "classic"})
    message = {"properties": {"expiration": expiration}, "routing_key": "q", "payload": "x"}
    path = "/exchanges/%2F/amq.default/publish"
    answer = await ok(api.post(path, json=message), 400)
    assert answer["reason"] == f"406 PRECONDITION_FAILED - {reason}"
    message["properties"] = {"expiration": "315360000000"}
    assert await ok(api.post(path, json=message)) == {"routed": True}


async def test_copies_of_a_message_go_where_its_headers_say(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for name in ("a", "b", "c"):
        await cluster.queue(1, name)
    headers = {"CC": ["b"], "BCC": ["c"]}
    message = {"properties": {"headers": headers}, "routing_key": "a", "payload": "x"}
    path = "/exchanges/%2F/amq.default/publish"
    assert await ok(api.post(path, json=message)) == {"routed": True}
    for name in ("a", "b", "c"):
        (found,) = await ok(api.post(f"/queues/%2F/{name}/get", json={}))
        assert found["properties"]["headers"] == {"CC": ["b"]}
    message["properties"] = {"headers": {"CC": "b"}}
    await ok(api.post(path, json=message), 400)


async def test_permissions_come_before_the_body(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await add_user(api, "u", "management")
    await ok(api.delete("/permissions/%2F/u"), 204)
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(3):
            read += 1
            yield b" " * 1000

    async with client(cluster, "u", "p") as nobody:
        for method, pattern, _ in handlers.ROUTES:
            # The body of a log-in says who it is; it is small.
            if method in ("GET", "DELETE") or pattern[0] in ("convoy", "login"):
                continue
            path = "/".join("x" if part.startswith("{") else part for part in pattern)
            path = path.replace("bindings/x/e/x/x/", "bindings/%2F/e/x/q/").replace("vhosts/", "")
            for place in ("/x/x", "/x/x/get", "/x/x/publish"):
                path = path.replace("queues" + place, "queues/%2F/x" + place[4:])
            answer = await nobody.request(method, f"/{path}", content=body())
            assert answer.status_code in (401, 404, 405), (method, path, answer.text)
    assert read == 0


async def test_bodies_are_bounded(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    for size, path, method in (
        (1 << 20, "/queues/%2F/q", "PUT"),
        (20_000_000, "/definitions", "POST"),
        (20_000_000, "/exchanges/%2F/amq.topic/publish", "POST"),
    ):
        answer = await ok(api.request(method, path, content=b" " * (size + 1)), 400)
        assert answer["reason"] == f"a body of this request has at most {size} bytes"
    small = make_api(cluster.nodes[1].broker, served=Served(message_bytes_max=10))
    transport = httpx.ASGITransport(small, client=("127.0.0.1", 1))
    message = {"routing_key": "q", "payload": "x" * 11}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api/api", auth=("guest", "guest")
    ) as limited:
        path = "/exchanges/%2F/amq.default/publish"
        assert "larger than" in (await ok(limited.post(path, json=message), 400))["reason"]


async def test_a_large_document_holds_nobody_up(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    """The loop runs while five million characters of lists are parsed and refused."""
    content = b'{"queues": [' + b"[[],[]]," * 120_000 + b'"' + b"\\n" * 1_000_000 + b'"]}'
    longest, ended = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not ended:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    watching = asyncio.ensure_future(watch())
    answer = await ok(api.post("/definitions", content=content), 400)
    assert "queues is not a list of objects" in answer["reason"]
    ended = True
    await watching
    # CPU time of the loop's own thread: what it did in one round, however busy the machine is.
    assert longest < 0.5


# --- logging in ------------------------------------------------------------------------------


@pytest.mark.provokes("management.login_refused")
async def test_a_refused_login_is_logged_and_answered_late(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(authentication.asyncio, "sleep", sleep)
    app = make_api(cluster.nodes[1].broker)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://api/api") as browser:
        with capture_logs() as logs:
            # A browser asks without credentials first.
            assert (await browser.get("/whoami")).status_code == 401
            assert slept == []
            assert (await browser.get("/whoami", auth=("guest", "no"))).status_code == 401
            answer = await browser.get("/whoami", headers={"authorization": b"Basic =\xe9="})
            assert answer.status_code == 401
            assert (await browser.get("/whoami", auth=("guest", "guest"))).status_code == 200
    assert slept == [3.0, 3.0]
    refused = [row for row in logs if row["event"] == "management.login_refused"]
    assert [(row["user"], row["peer"]) for row in refused] == [
        ("guest", "127.0.0.1"),
        ("", "127.0.0.1"),
    ]
    assert "PLAIN" in refused[0]["reason"]


@pytest.mark.provokes("management.request_failed")
async def test_a_fault_is_logged_and_answered(
    cluster: FakeCluster, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(cluster.nodes[1].broker.cluster, "nodes", broken)
    with capture_logs() as logs:
        assert (await ok(api.get("/nodes"), 500))["error"] == "internal_error"
    (row,) = [row for row in logs if row["event"] == "management.request_failed"]
    assert (row["method"], row["path"]) == ("GET", "/api/nodes")


# --- what goes away meanwhile ----------------------------------------------------------------


@pytest.mark.parametrize("command", [DeleteQueue(vhost="/", name="q"), DeleteVhost(name="/")])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/queues/%2F/q", 404), ("/queues/%2F", 200), ("/queues", 200), ("/overview", 200),
        ("/vhosts", 200), ("/consumers/%2F", 200),
        ("/health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/.*", 200),
    ],
)  # fmt: skip
async def test_what_goes_away_during_a_request_is_not_found(
    cluster: FakeCluster, api: httpx.AsyncClient, command: Any, path: str, status: int
) -> None:
    await cluster.queue(1, "q")
    broker = cluster.nodes[1].broker
    sampler = broker.cluster.sampler
    read = sampler.read_figures

    async def slow() -> None:
        await read()
        if "q" in getattr(cluster.nodes[1].machine.vhosts.get("/"), "queues", ()):
            await broker.metadata.execute(command)

    sampler.read_figures = slow  # type: ignore[method-assign]
    found = await ok(api.get(path), status)
    if status == 404:
        assert found == {"error": "Object Not Found", "reason": "Not Found"}
    if path == "/vhosts/%2F":
        assert found["messages"] == 0


async def test_a_vhost_that_goes_away_during_its_get_is_not_found(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    broker = cluster.nodes[1].broker
    read = broker.cluster.sampler.read_figures

    async def slow() -> None:
        await broker.metadata.execute(DeleteVhost(name="/"))
        await read()

    broker.cluster.sampler.read_figures = slow  # type: ignore[method-assign]
    await ok(api.get("/vhosts/%2F"), 404)


# --- answers as RabbitMQ's -------------------------------------------------------------------


async def test_what_is_missing_is_told_as_elsewhere(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    plain = {"error": "Object Not Found", "reason": "Not Found"}
    for method, path in (
        ("GET", "/exchanges/%2F/none"), ("DELETE", "/exchanges/%2F/none"),
        ("DELETE", "/queues/%2F/none/contents"), ("DELETE", "/queues/%2F/none"),
        ("GET", "/topic-permissions/%2F/none"), ("GET", "/queues/%FF/x"),
        ("GET", "/queues/%2F/%FF"), ("GET", "/global-parameters/none"), ("GET", "/policies/none"),
        ("GET", "/bindings/%2F/e/amq.topic/q/q/zz"), ("GET", "/nodes/none"),
        ("GET", "/policies/%2F/none"), ("GET", "/operator-policies/%2F/none"),
        ("GET", "/parameters/federation-upstream/%2F/none"), ("GET", "/policies/none/none"),
    ):  # fmt: skip
        assert await ok(api.request(method, path), 404) == plain
    for path, reason in (
        ("/bindings/%2F/e/none/q/q", "no exchange 'none' in vhost '/'"),
        ("/bindings/%2F/e/amq.topic/q/none", "no queue 'none' in vhost '/'"),
        ("/queues/%2F/none/get", "no queue 'none' in vhost '/'"),
    ):
        answer = await ok(api.post(path, json={}), 404)
        assert answer == {"error": "not_found", "reason": reason}
    message = {"routing_key": "q", "payload": "x"}
    answer = await ok(api.post("/exchanges/%2F/none/publish", json=message), 400)
    assert answer["reason"] == "404 NOT_FOUND - no exchange 'none' in vhost '/'"


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("page=²", "bad_request"), ("page=x", "bad_request"), ("page=1&page_size=١", "bad_request"),
        ("page=" + "9" * 5000, "bad_request"), ("page=-1", "bad_request"),
        ("page=0", "invalid_pagination_parameters"),
        ("page=1&page_size=0", "invalid_pagination_parameters"),
        ("page=1&page_size=501", "invalid_pagination_parameters"),
        ("page=2", "page_out_of_range"),
        ("name=(&use_regex=true", "bad_request"), (r"name=(a)\1&use_regex=true", "bad_request"),
    ],
)  # fmt: skip
async def test_pages_that_are_none_are_refused(
    api: httpx.AsyncClient, query: str, error: str
) -> None:
    assert (await ok(api.get(f"/queues?{query}"), 400))["error"] == error


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/vhosts/v", '{"tags": ["\\ud800"]}'), ("/vhosts/v", "[" * 100_000),
        ("/vhosts/v", '{"tags":' * 70 + "1" + "}" * 70), ("/vhosts/v", '{"metadata": 5}'),
        ("/vhosts/v", '{"tags": 5}'), ("/vhosts/v", '{"protected_from_deletion": 7}'),
        ("/users/u", '{"tags": 5}'), ("/users/u", '{"tags": "", "password": "\\udc00"}'),
        ("/queues/%2F/q", '{"arguments": {"x": 1e400}}'), ("/queues/%2F/q", '{"arguments": [1]}'),
        ("/queues/%2F/q", '{"arguments": {"x": 99999999999999999999}}'),
        ("/queues/%2F/q", '{"arguments": {"x": NaN}}'),
    ],
)  # fmt: skip
async def test_odd_bodies_are_refused(api: httpx.AsyncClient, path: str, content: str) -> None:
    assert (await ok(api.put(path, content=content.encode()), 400))["error"] == "bad_request"


async def test_topic_permissions_go_one_by_one(api: httpx.AsyncClient) -> None:
    await add_user(api, "u", "")
    path = "/topic-permissions/%2F/u"
    rows = [{"exchange": name, "write": "^a", "read": ""} for name in ("amq.topic", "x")]
    for row in rows:
        assert (await api.put(path, json=row)).status_code in (201, 204)
    assert await ok(api.get(f"{path}/x")) == [{"user": "u", "vhost": "/", **rows[1]}]
    await ok(api.delete(f"{path}/amq.topic"), 204)
    await ok(api.delete(f"{path}/amq.topic"), 404)
    assert [row["exchange"] for row in await ok(api.get(path))] == ["x"]
    await ok(api.delete(path), 204)
    await ok(api.get(path), 404)
    await ok(api.delete(path), 404)


async def test_contexts_and_sockets_are_shown(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    addresses = {"http": "127.0.0.1:15672", "metrics": "[::1]:15692", "amqp": "127.0.0.1:5672"}
    node = PutNode(id=2, name="n2", incarnation=INCARNATION, addresses=addresses)
    await cluster.nodes[1].store.execute(node)
    contexts = (await ok(api.get("/overview")))["contexts"]
    shown = [(row["node"], row["description"], row["port"]) for row in contexts]
    assert shown == [("n2", "RabbitMQ Management", "15672"), ("n2", "RabbitMQ Prometheus", "15692")]
    cluster.nodes[2].broker.connections.add(Connection(1, "guest"))
    cluster.nodes[2].broker.cluster.node = NodeView(info=process.process_info)
    await cluster.tell()
    row = await ok(api.get("/nodes/n2"))
    assert row["contexts"] == contexts
    assert (row["sockets_used"], row["sockets_total"]) == (1, row["fd_total"])
    assert 0 < row["proc_used"] < row["proc_total"]
    assert 0 < row["fd_used"] < row["fd_total"]


async def test_columns_may_overlap(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q", arguments={"x-delivery-limit": 3})
    for columns in ("arguments,arguments.x-delivery-limit", "arguments.x-delivery-limit,arguments"):
        (row,) = await ok(api.get("/queues", params={"columns": columns}))
        assert row["arguments"]["x-delivery-limit"] == 3
    (row,) = await ok(api.get("/queues", params={"columns": "name,name.x,name.y.z"}))
    assert row == {"name": "q"}


async def test_numbers_that_json_has_not_are_null(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    arguments = Table.from_fields([("n", Field("d", float("nan"))), ("i", Field("d", 1e400))])
    await cluster.nodes[1].broker.declarations.bind(
        "/", "amq.headers", queue_end("q"), "", arguments
    )
    answer = await api.get("/queues/%2F/q/bindings")
    assert "NaN" not in answer.text
    assert json.loads(answer.text)[1]["arguments"] == {"n": None, "i": None}


# --- definitions -----------------------------------------------------------------------------

#: What RabbitMQ 3.10 and 4 hold without anything having been set.
EXPORT = {
    "rabbit_version": "3.10.8", "rabbitmq_version": "3.10.8", "product_name": "RabbitMQ",
    "product_version": "3.10.8", "rabbitmq_definition_format": "cluster",
    "original_cluster_name": "old", "explanation": "…",
    "users": [{"name": "guest", "password_hash": "4HyyOhxmXNuF1O5DgVXNQ0r+Qht70jdklyxa7nM4HDF556ID",
               "hashing_algorithm": "rabbit_password_hashing_sha256", "tags": ["administrator"],
               "limits": {}}],
    "vhosts": [{"name": "/"}, {"name": "v", "limits": [], "tracing": False, "metadata": {
        "description": "", "tags": [], "default_queue_type": "classic",
        "protected_from_deletion": False}}],
    "permissions": [], "topic_permissions": [], "parameters": [],
    "global_parameters": [
        {"name": "cluster_name", "value": "old"},
        {"name": "internal_cluster_id", "value": "rabbitmq-cluster-id-57lbsGFdAq0fOZQlISu-Dg"},
    ],
    "policies": [], "queues": [], "exchanges": [], "bindings": [],
}  # fmt: skip


async def test_an_export_of_rabbitmq_comes_in(api: httpx.AsyncClient) -> None:
    assert await ok(api.post("/definitions", json=EXPORT), 204) is None
    assert await ok(api.get("/cluster-name")) == {"name": "old"}
    found = await ok(api.get("/definitions"))
    assert found["global_parameters"] == [{"name": "cluster_name", "value": "old"}]
    assert await ok(api.get("/global-parameters/cluster_name")) == found["global_parameters"][0]
    assert [row["default_queue_type"] for row in found["vhosts"]] == ["undefined", "classic"]
    single = {"rabbit_version": "3.10.8", "parameters": [], "policies": [], "queues": [],
              "exchanges": [], "bindings": [], "metadata": {}, "description": "d"}  # fmt: skip
    await ok(api.post("/definitions/v", json=single), 204)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"parameters": [{"component": "other", "name": "o", "vhost": "v", "value": {}}]},
         "parameter 'o' in vhost 'v': component other is not served"),
        ({"parameters": [{"component": "shovel", "name": "o", "vhost": "/", "value": {}}]},
         "parameter 'o' in vhost '/': Must specify 'src-exchange' or 'src-queue' Key "
         '"dest-uri" not found in o Key "src-uri" not found in o'),
        ({"global_parameters": [{"name": "", "value": {}}]},
         "global parameter '': the name of a global parameter has 1 to 255 bytes"),
        ({"users": [{"name": "u", "limits": {"max-connections": 5}}]},
         "user 'u': version 2 of the metadata machine is needed, 1 is in force: some nodes have an "
         "older release"),
        ({"shovels": [{"name": "s"}]}, "shovels: not served"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(
    cluster: FakeCluster, api: httpx.AsyncClient, more: dict[str, Any], named: str
) -> None:
    sound = {"queues": [{"name": "new", "vhost": "/", "durable": True}]}
    answer = await ok(api.post("/definitions", json=sound | more), 400)
    assert answer["error"] == "bad_request"
    assert answer["reason"] == f"nothing was imported: {named}"
    assert answer["refused"] == [named]
    await ok(api.get("/queues/%2F/new"), 404)
    assert set(cluster.nodes[1].machine.users) == {"guest"}


@pytest.mark.parametrize(
    "document",
    [
        {"queues": [{"name": 5, "vhost": "/"}]}, {"queues": {}, "vhosts": {"a": 1}},
        {"queues": [5]}, {"users": [{"name": "u", "hashing_algorithm": 5}]},
        {"topic_permissions": [{"user": "guest", "vhost": "/", "exchange": 5, "write": ""}]},
        {"bindings": [{"source": "amq.topic", "destination_type": "x", "vhost": "/"}]},
        {"queues": [{"name": "n", "vhost": "/", "arguments": 5}]},
        {"global_parameters": [{"name": "cluster_name", "value": {}}]},
        {"permissions": [{"user": "guest"}]}, {"queues": [{"name": "n", "vhost": "none"}]},
    ],
)  # fmt: skip
async def test_malformed_definitions_are_refused(
    api: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    await ok(api.post("/definitions", json=document), 400)


#: Everything in it that is not acceptable is named in one answer, and what hangs on it is not.
MIXED = {
    "users": [{"name": "u", "tags": []}, {"name": "bad", "hashing_algorithm": "md5",
                                          "password_hash": "x"}],
    "vhosts": [{"name": "v", "default_queue_type": "classic"},
               {"name": "w", "metadata": 5}],
    "permissions": [
        {"user": "u", "vhost": "v", "configure": "(?=a)", "write": "", "read": ""},
        {"user": "bad", "vhost": "v", "configure": "", "write": "", "read": ""},
    ],
    "exchanges": [{"name": "delayed", "vhost": "v", "type": "x-nothing"},
                  {"name": "x", "vhost": "v", "type": "topic"}],
    "queues": [
        {"name": "q", "vhost": "v", "arguments": {"x-queue-type": "quorum"}, "type": "quorum"},
        {"name": "bad", "vhost": "v", "arguments": {"x-max-length": -5}},
        {"name": "other", "vhost": "w", "arguments": {}},
        {"name": 5, "vhost": "v"},
    ],
    "bindings": [
        {"source": "delayed", "vhost": "v", "destination": "q", "destination_type": "queue"},
        {"source": "x", "vhost": "v", "destination": "bad", "destination_type": "queue"},
        {"source": "x", "vhost": "v", "destination": "absent", "destination_type": "queue"},
        {"source": "x", "vhost": "v", "destination": "q", "destination_type": "queue",
         "routing_key": "#.#.#"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("dry", [True, False])
async def test_all_that_is_refused_is_named_at_once(
    cluster: FakeCluster, api: httpx.AsyncClient, dry: bool
) -> None:
    index = cluster.nodes[1].machine.applied_index
    answer = await ok(
        api.post(f"/definitions{'?dry_run=true' if dry else ''}", json=MIXED), 200 if dry else 400
    )
    starts = [
        "user 'bad': unsupported hashing algorithm 'md5'",
        "vhost 'w': key metadata is not an object",
        "permission of user 'u' in vhost 'v': invalid pattern '(?=a)'",
        "exchange 'delayed' in vhost 'v': unknown exchange type 'x-nothing'",
        "invalid arg 'x-max-length' for queue 'bad' in vhost 'v': {value_negative,-5}",
        "queue '5' in vhost 'v': malformed definitions: name is missing or not a string",
        "binding '' of queue 'absent' to exchange 'x' in vhost 'v': no queue 'absent' in vhost 'v'",
        "binding '#.#.#' of queue 'q' to exchange 'x' in vhost 'v': Topic binding key",
    ]
    assert len(answer["refused"]) == len(starts)
    for line, start in zip(answer["refused"], starts, strict=True):
        assert line.startswith(start)
    assert dry or answer["reason"] == f"nothing was imported: {'; '.join(answer['refused'])}"
    assert cluster.nodes[1].machine.applied_index == index
    assert set(cluster.nodes[1].machine.vhosts) == {"/"}


async def test_a_dry_run_says_what_an_import_would_do(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "old", arguments={"x-queue-type": "classic"})
    document = {
        "users": [{"name": "u"}],
        "vhosts": [{"name": "/"}, {"name": "v"}],
        "exchanges": [{"name": "x", "vhost": "v", "type": "fanout"}],
        "queues": [{"name": "old", "vhost": "/", "type": "classic"},
                   {"name": "new", "vhost": "v", "type": "classic", "arguments": {}},
                   {"name": "bare", "vhost": "v"},
                   {"name": "passing", "vhost": "v", "durable": False}],
        "bindings": [{"source": "x", "vhost": "v", "destination": "new",
                      "destination_type": "queue", "routing_key": ""}],
    }  # fmt: skip
    found = await ok(api.post("/definitions?dry_run=true", json=document))
    assert found["refused"] == []
    assert found["creates"] == {
        "users": 1, "vhosts": 1, "exchanges": 1, "queues": 3, "bindings": 1
    }  # fmt: skip
    assert found["notes"] == [
        "queue 'old' in vhost '/' stays as it is: inequivalent arg 'x-queue-type' for queue 'old' "
        "in vhost '/': received 'quorum' but current is 'classic'",
        "queue 'new' in vhost 'v' is classic there and becomes quorum",
        "queue 'bare' in vhost 'v' says no type and becomes quorum",
    ]
    await ok(api.get("/vhosts/v"), 404)
    await ok(api.post("/definitions", json=document), 204)
    assert (await ok(api.get("/queues/v/new")))["type"] == "quorum"
    found = await ok(api.post("/definitions?dry_run=true", json=document))
    assert found["creates"] == {}
    single = {part: document[part] for part in ("exchanges", "queues", "bindings")}
    found = await ok(api.post("/definitions/v?dry_run=true", json=single))
    assert found["creates"] == {"queues": 1}


async def test_text_is_no_truth(api: httpx.AsyncClient) -> None:
    row = {"name": "n", "vhost": "/", "durable": "false", "arguments": {"x-queue-type": "classic"}}
    await ok(api.post("/definitions", json={"queues": [row]}), 204)
    assert (await ok(api.get("/queues/%2F/n")))["durable"] is False


async def test_setting_what_is_not_served_is_refused_by_name(api: httpx.AsyncClient) -> None:
    await add_user(api, "u", "management")
    for path, reason in (
        (
            "/parameters/federation-upstream/%2F/p",
            "Validation failed\n\ncomponent federation-upstream not found",
        ),
        ("/global-parameters/cluster_name", "cluster_name is not text, or empty"),
        (f"/global-parameters/{'p' * 256}", "the name of a global parameter has 1 to 255 bytes"),
    ):
        answer = await ok(api.put(path, json={"value": {}}), 400)
        assert answer == {"error": "bad_request", "reason": reason}
    for path in ("/policies", "/operator-policies/%2F", "/parameters/x", "/user-limits"):
        assert await ok(api.get(path)) == []


# --- metrics ---------------------------------------------------------------------------------


async def test_metrics_per_object_know_all_types(cluster: FakeCluster) -> None:
    for kind in ("quorum", "classic", "stream"):
        await cluster.queue(1, kind, arguments={"x-queue-type": kind})
    transport = httpx.ASGITransport(make_metrics(cluster.nodes[1].broker))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as metrics:
        answer = await metrics.get("/metrics/per-object")
        for kind in ("quorum", "classic", "stream"):
            assert f'rabbitmq_queue_messages{{vhost="/",queue="{kind}"}} 0\n' in answer.text
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        # A queue that is deleted is on the node for a moment longer than in the tree.
        cluster.nodes[1].machine.vhosts["/"].queues.pop("classic")
        cluster.nodes[1].machine._records = None
        assert (await metrics.get("/metrics/per-object")).status_code == 200


async def test_open_metrics_are_given_to_who_asks(cluster: FakeCluster) -> None:
    transport = httpx.ASGITransport(make_metrics(cluster.nodes[1].broker))
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as metrics:
        answer = await metrics.get("/metrics", headers={"accept": accept})
    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["content-type"] == kind
    assert answer.text.endswith("\n# EOF\n")
    assert "# TYPE rabbitmq_connections_opened counter\n" in answer.text
    assert "\nrabbitmq_connections_opened_total 0\n" in answer.text
    for family in (line.split()[2] for line in answer.text.splitlines() if "# TYPE" in line):
        assert f"# HELP {family} " in answer.text


# --- slow clients ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"GET /api/whoami HTT", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: b",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /api HT",
        # The answer came early; the rest of the body does not.
        b"PUT /api/queues/x/y HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{",
    ],
)  # fmt: skip
@pytest.mark.provokes("management.slow_client")
async def test_half_a_request_is_given_up(cluster: FakeCluster, sent: bytes) -> None:
    broker = cluster.nodes[1].broker
    server = ManagementServer(broker, [("127.0.0.1", 0)], times=Times(head_s=0.05))
    await server.start()
    try:
        with capture_logs() as logs:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()
        assert "management.slow_client" in [row["event"] for row in logs]
    finally:
        await server.stop()


async def test_a_client_that_reads_nothing_is_given_up(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    broker.cluster.node = NodeView(info=lambda: {"pad": "x" * 8_000_000})
    server = ManagementServer(broker, [("127.0.0.1", 0)], times=Times(answer_s=0.05))
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
        writer.write(
            b"GET /api/nodes HTTP/1.1\r\nhost: x\r\nauthorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n\r\n"
        )
        with capture_logs() as logs:
            async with asyncio.timeout(PATIENCE_S):
                while not logs:
                    await asyncio.sleep(0.01)
        assert logs[0]["reason"] == "answer not read"
        writer.close()
    finally:
        await server.stop()


async def test_an_idle_connection_is_no_slow_client(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    server = ManagementServer(broker, [("127.0.0.1", 0)], times=Times(head_s=0.05))
    await server.start()
    try:
        async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
            url = f"http://127.0.0.1:{server.ports[0]}/api/whoami"
            with capture_logs() as logs:
                for _ in range(3):
                    assert (await browser.get(url)).status_code == 200
                    await asyncio.sleep(0.15)
        assert [row for row in logs if row["event"] == "management.slow_client"] == []
    finally:
        await server.stop()


@pytest.mark.provokes("management.start_failed")
async def test_the_server_starts_when_files_can_be_opened_again(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modules are imported for the first client, which may come when no file can be opened."""
    broker = cluster.nodes[1].broker
    times = Times(start_pause_s=0.01)
    server = ManagementServer(broker, [("127.0.0.1", 0)], times=times)
    make, failed = listener_module._import_server, 0

    def flaky() -> Any:
        nonlocal failed
        failed += 1
        if failed < 3:
            raise OSError(24, "Too many open files")
        return make()

    monkeypatch.setattr(listener_module, "_import_server", flaky)
    await server.start()
    try:
        with capture_logs() as logs:
            async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
                url = f"http://127.0.0.1:{server.ports[0]}/api/whoami"
                assert (await browser.get(url)).status_code == 200
        assert [row["event"] for row in logs] == ["management.start_failed"] * 2
    finally:
        await server.stop()


async def test_a_dead_letter_exchange_needs_its_own_permissions(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.raise_versions()
    await add_user(api, "u", "management")
    queue = {"arguments": {"x-queue-type": "quorum", "x-dead-letter-exchange": "secret"}}
    rules = {"configure": ".*", "write": "^mine$", "read": ".*"}
    await ok(api.put("/permissions/%2F/u", json=rules), 204)
    async with client(cluster, "u", "p") as user:
        assert (await user.put("/queues/%2F/work", json=queue)).status_code == 401
        queue["arguments"]["x-dead-letter-exchange"] = "mine"
        await ok(user.put("/queues/%2F/work", json=queue), 201)
        shown = await ok(user.get("/queues/%2F/work"))
        # One that exists asks for no more than `configure`, and so does one without an exchange.
        await ok(api.put("/permissions/%2F/u", json=rules | {"write": "", "read": ""}), 204)
        await ok(user.put("/queues/%2F/work", json=queue), 204)
        await ok(user.put("/queues/%2F/other", json={}), 201)
    assert (shown["messages_dlx"], shown["dead_letter_strategy"]) == (0, "at_most_once")


async def test_an_import_needs_an_administrator_and_no_permissions(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    """As in RabbitMQ: the document of a cluster names exchanges that its owners may not all reach,
    and who may import may give himself every permission."""
    cluster.raise_versions()
    for name, tags in (("boss", "administrator"), ("p", "policymaker")):
        await add_user(api, name, tags)
        await ok(api.delete(f"/permissions/%2F/{name}"), 204)
    linked = {"arguments": {"alternate-exchange": "amq.topic"}, "type": "fanout", "durable": True}
    arguments = {"x-queue-type": "quorum", "x-dead-letter-exchange": "amq.fanout"}
    document = {
        "exchanges": [{"name": "x", "vhost": "/", **linked}],
        "queues": [{"name": "q", "vhost": "/", "durable": True, "arguments": arguments}],
    }
    for path in ("/definitions", "/definitions/%2F"):
        async with client(cluster, "p", "p") as user:
            await ok(user.post(path, json=document), 401)
    async with client(cluster, "boss", "p") as user:
        await ok(user.put("/queues/%2F/q", json={"arguments": arguments}), 401)
        await ok(user.post("/definitions", json=document), 204)
    assert (await ok(api.get("/queues/%2F/q")))["arguments"] == arguments
    assert (await ok(api.get("/exchanges/%2F/x")))["arguments"] == linked["arguments"]


async def test_an_alternate_exchange_needs_its_own_permissions(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    """Or who may publish to nothing but an exchange of their own reaches any other by it."""
    await add_user(api, "u", "management")
    rules = {"configure": "^mine", "write": "^mine", "read": "^mine"}
    await ok(api.put("/permissions/%2F/u", json=rules), 204)
    exchange = {"type": "fanout", "arguments": {"alternate-exchange": "amq.topic"}}
    async with client(cluster, "u", "p") as user:
        assert (await user.put("/exchanges/%2F/mine", json=exchange)).status_code == 401
        exchange["arguments"] = {"alternate-exchange": "mine-too"}
        await ok(user.put("/exchanges/%2F/mine", json=exchange), 201)
        await ok(api.put("/permissions/%2F/u", json=rules | {"write": "", "read": ""}), 204)
        await ok(user.put("/exchanges/%2F/mine", json=exchange), 204)
