"""Requests of any shape: whatever is sent, nothing is answered with 500 and nothing is logged as
failed; and what is refused is refused before a command is made of it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from convoymq.edges.http.app import make_api
from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.served import Served
from convoymq.edges.sasl import LoginConfig
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import PutPermission, PutUser, PutVhost
from tests.patience import PATIENCE_S
from tests.unit.edges.http.test_api import api, cluster
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

GUEST = hash_sha256(b"guest")
#: What makes int(), encode() and struct fail, and what exists.
WORDS = st.sampled_from([
    "/", "q", "c", "s", "x", "amq.topic", "amq.default", "guest", "u", "n1", "1", "0", "-1", "²",
    "١", "9" * 5000, "e", "~", "k", "\x00", "é", "\U0001f600", "a" * 300, "(", ".*", "(a+)+$", "{}",
    "true", "None", "1e999", "reserved", "amq.x", "all", "limits", "cluster_name", " ", "[]",
])  # fmt: skip
TEXT = WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.sampled_from([0, 1, -1, 255, 256, 1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 200]) | (
    st.floats(allow_nan=False, allow_infinity=False)
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXT | st.sampled_from(["\ud800", math.nan])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([
    "name", "type", "durable", "auto_delete", "internal", "arguments", "routing_key", "properties",
    "payload", "payload_encoding", "count", "truncate", "ackmode", "encoding", "password",
    "password_hash", "hashing_algorithm", "tags", "users", "vhosts", "permissions", "exchange",
    "topic_permissions", "configure", "write", "read", "metadata", "description", "tracing",
    "default_queue_type", "queues", "exchanges", "bindings", "policies", "parameters", "limits",
    "global_parameters", "value", "vhost", "user", "source", "destination", "destination_type",
    "x-queue-type", "x-message-ttl", "headers", "delivery_mode", "priority", "expiration",
    "user_id", "timestamp", "correlation_id", "CC", "BCC", "pattern", "definition", "apply-to",
    "component", "max-length", "max-connections", "max-queues",
])  # fmt: skip
KNOWN = st.sampled_from([
    "quorum", "classic", "stream", "topic", "queue", "string", "base64", "auto", "/w==",
    "ack_requeue_true", "reject_requeue_false", "administrator", "2", "undefined",
])  # fmt: skip
#: Bodies that come nearer to what is asked for than any JSON does.
BODY = st.recursive(
    LEAVES | KNOWN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=8),
    max_leaves=30,
)
QUERY = st.dictionaries(
    st.sampled_from([
        "page", "page_size", "name", "use_regex", "sort", "sort_reverse", "columns", "pagination",
        "force", "if-unused", "if-empty", "lengths_age",
    ]),
    WORDS | st.sampled_from(["name", "name,name.x", "arguments.x,arguments", "true", "2", "vhost"]),
    max_size=3,
)  # fmt: skip


#: What mostly stands in a path, by the name of its place.
PLACES = {
    "vhost": ["/", "/", "v"], "name": [
        "q", "c", "s", "x", "amq.topic", "amq.default", "new", "limits", "max-queues",
        "max-connections",
    ],
    "user": ["guest", "u"], "node": ["n1", "1"], "source": ["amq.topic", "x", "amq.default"],
    "kind": ["q", "e"], "destination": ["q", "c", "x"], "key": ["~", "k", "q"], "p": [".*", "("],
    "exchange": ["amq.topic", "x"], "component": ["vhost-limits", "operator_policy"],
    "port": ["5672", "1"], "protocol": ["amqp"],
}  # fmt: skip
ROW = {"vhost": "/", "name": "made", "durable": True, "arguments": {"x-queue-type": "classic"}}
RULE = {"user": "u", "vhost": "/", "configure": "", "write": "^a", "read": ".*", "exchange": "x"}
POLICY = {
    "pattern": "^a", "definition": {"max-length": 5}, "priority": 0, "apply-to": "queues",
}  # fmt: skip
#: Acceptable bodies, by how a path begins; single values of them are replaced.
SOUND: dict[str, dict[str, Any]] = {
    "queues": {
        "durable": True, "auto_delete": False, "arguments": {"x-queue-type": "classic"},
        "count": 2, "ackmode": "ack_requeue_true", "encoding": "auto", "truncate": 3,
    },
    "exchanges": {
        "type": "topic", "durable": True, "internal": False, "arguments": {"a": 1},
        "routing_key": "q", "payload": "text", "payload_encoding": "string",
        "properties": {"delivery_mode": 2, "headers": {"CC": ["c"], "n": 1}, "expiration": "10"},
    },
    "bindings": {"routing_key": "k", "arguments": {"n": 1}},
    "vhosts": {"description": "d", "tags": ["a"], "metadata": {"description": "d"}},
    "users": {"password": "p", "tags": "management", "users": ["u"]},
    "permissions": RULE,
    "topic-permissions": RULE,
    "cluster-name": {"name": "n"},
    "policies": POLICY,
    "operator-policies": POLICY,
    "vhost-limits": {"value": 5},
    "user-limits": {"value": 5},
    "global-parameters": {"value": "n"},
    "parameters": {"value": POLICY},
    "definitions": {
        "users": [{"name": "u", "password_hash": "", "tags": [], "limits": {}}],
        "vhosts": [{"name": "v", "limits": [], "metadata": {"tags": []}}],
        "permissions": [{**RULE, "user": "guest"}], "topic_permissions": [{**RULE}],
        "policies": [{**POLICY, "vhost": "/", "name": "p"}],
        "parameters": [
            {"component": "vhost-limits", "name": "limits", "vhost": "/", "value": {}},
            {"component": "operator_policy", "name": "o", "vhost": "/", "value": POLICY},
        ],
        "global_parameters": [{"name": "cluster_name", "value": ""}],
        "exchanges": [{**ROW, "type": "fanout", "name": "made"}], "queues": [ROW],
        "bindings": [{"source": "made", "destination": "made", "destination_type": "queue",
                      "vhost": "/", "routing_key": "", "arguments": {}}],
    },
}  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A sound value, or one with a part that is something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(BODY)
    if isinstance(value, dict):
        return {key: draw(mutated(each)) for key, each in value.items() if draw(st.integers(0, 9))}
    if isinstance(value, list):
        return [draw(mutated(each)) for each in value]
    return value


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, str], bytes]:
    # A stream of events ends with its client.
    ended = [route for route in ROUTES if route.segments != ("events",)]
    method, pattern, _ = draw(st.sampled_from(ended))
    parts = []
    for part in pattern:
        likely = PLACES.get(part[1:-1], []) if draw(st.integers(0, 4)) else []
        free = st.sampled_from(likely) if likely else TEXT
        parts.append(quote(draw(free), safe="") if part.startswith("{") else part)
    if method == "GET":
        return method, "/".join(parts), draw(QUERY), b""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        content = draw(st.binary(max_size=30))
    elif kind < 3:
        content = json.dumps(draw(JSON if kind == 1 else BODY)).encode()
    else:
        content = json.dumps(draw(mutated(SOUND.get(pattern[0], {})))).encode()
    return method, "/".join(parts), draw(QUERY), content


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Any]]:
    """A cluster in a loop of its own, which keeps what requests leave behind."""
    directory: Path = tmp_path_factory.mktemp("shapes")
    with asyncio.Runner() as runner:
        cluster = runner.run(opened(directory))
        yield runner, cluster
        runner.run(cluster.__aexit__())


async def opened(directory: Path) -> FakeCluster:
    cluster = await FakeCluster(directory, nodes=2).__aenter__()
    for node in cluster.nodes.values():
        node.machine.set_version(node.machine.VERSION)
        # Neither members nor leaders change in it: nobody has to wait for that.
        node.broker.membership.timeout_s = node.broker.leadership.timeout_s = 0.02
    return cluster


async def prepare(cluster: FakeCluster) -> None:
    """Makes what requests have deleted: who asks must stay able to ask."""
    store = cluster.nodes[1].store
    await store.execute(
        PutUser(name="guest", password_hash=GUEST, algorithm=SHA256, tags=("administrator",))
    )
    if "/" not in store.tree.vhosts:
        await store.execute(PutVhost(name="/"))
    await store.execute(
        PutPermission(user="guest", vhost="/", configure=".*", write=".*", read=".*")
    )
    for node in cluster.nodes.values():
        node.machine.vhosts["/"].limits.clear()
        node.machine.user_limits.clear()
    for name, kind in (("q", "quorum"), ("c", "classic"), ("s", "stream")):
        if name not in store.tree.vhosts["/"].queues:
            await cluster.queue(1, name, arguments={"x-queue-type": kind})


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
def test_no_request_of_any_shape_fails(
    world: tuple[asyncio.Runner, FakeCluster], request_: tuple[str, str, dict[str, str], bytes]
) -> None:
    runner, cluster = world
    method, path, query, content = request_

    async def send() -> httpx.Response:
        await prepare(cluster)
        app = make_api(
            cluster.nodes[1].broker, served=Served(login=LoginConfig(failed_login_delay_s=0.0))
        )
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        auth = ("guest", "guest")
        async with httpx.AsyncClient(transport=transport, base_url="http://api", auth=auth) as api:
            async with asyncio.timeout(PATIENCE_S):
                return await api.request(method, f"/api/{path}", params=query, content=content)

    with capture_logs() as logs:
        answer = runner.run(send())
    failed = [row for row in logs if row["log_level"] == "error"]
    assert answer.status_code < 500 or answer.status_code == 503, (answer.text, failed)
    assert not failed
    if answer.content and answer.headers["content-type"] == "application/json":
        json.loads(answer.content)
