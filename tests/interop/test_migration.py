"""A RabbitMQ node's definitions and messages come over to ConvoyMQ, by the commands of the guide.

RabbitMQ is Debian's package (`make rabbitmq`); without it these tests are skipped by name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pika  # type: ignore[import-untyped]
import pytest
from benchmarks.convoy import ConvoyCluster
from benchmarks.rabbitmq import MANAGEMENT, SCRIPTS, RabbitCluster
from benchmarks.systems import SystemMissing, connect

from tests.docs.blocks import run_page
from tests.interop.helpers import eventually, fetch_all, numbered, publish_confirmed
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

OLD_PORT, NEW_PORT = cluster_ports(__name__), cluster_ports(__name__)
PLUGINS = (
    MANAGEMENT, "rabbitmq_shovel", "rabbitmq_federation", "rabbitmq_consistent_hash_exchange",
)  # fmt: skip
PAGE = "docs/migration.md"
QUORUM = {"x-queue-type": "quorum"}
CLASSIC = {"x-queue-type": "classic"}
#: Path -> what is made there in RabbitMQ.
OBJECTS: list[tuple[str, dict[str, Any]]] = [
    ("vhosts/shop", {"description": "orders and stock", "tags": "a,b"}),
    ("users/alice", {"password": "wonder land", "tags": "monitoring,policymaker"}),
    ("users/bob", {"password": "builder", "tags": ""}),
    ("permissions/shop/alice", {"configure": "^a", "write": ".*", "read": "^(a|b)"}),
    ("permissions/%2F/bob", {"configure": "", "write": ".*", "read": ".*"}),
    (
        "topic-permissions/shop/alice",
        {"exchange": "events", "write": "^{username}", "read": ".*"},
    ),
    ("exchanges/shop/events", {"type": "topic", "arguments": {"alternate-exchange": "rest"}}),
    ("exchanges/shop/rest", {"type": "fanout"}),
    # rabbitmqctl exports no internal exchanges: the guide says so.
    ("exchanges/shop/inside", {"type": "fanout", "internal": True}),
    ("exchanges/shop/by-header", {"type": "headers", "auto_delete": True}),
    ("exchanges/shop/direct", {"type": "direct", "durable": False}),
    ("exchanges/shop/shards", {"type": "x-consistent-hash", "arguments": {"hash-header": "key"}}),
    ("queues/%2F/orders", {"arguments": QUORUM | {"x-delivery-limit": 7}}),
    ("queues/%2F/audit", {"arguments": QUORUM | {"x-single-active-consumer": True}}),
    ("queues/%2F/untyped", {"arguments": {}}),
    ("queues/shop/cache", {"arguments": CLASSIC | {"x-message-ttl": 60000, "x-max-length": 9}}),
    ("queues/shop/full", {"arguments": CLASSIC | {"x-overflow": "reject-publish"}}),
    ("queues/shop/passing", {"durable": False, "arguments": {"x-expires": 600000}}),
    ("queues/shop/leaving", {"durable": False, "auto_delete": True}),
    ("queues/shop/log", {"arguments": {"x-queue-type": "stream", "x-max-age": "7D"}}),
    ("policies/shop/short", {"pattern": "^ca", "definition": {"max-length": 5}, "priority": 3}),
    (
        "policies/shop/rest",
        {
            "pattern": "^direct$",
            "definition": {"alternate-exchange": "rest"},
            "apply-to": "exchanges",
        },
    ),
    ("policies/%2F/tries", {"pattern": "^aud", "definition": {"delivery-limit": 4}}),
    (
        "operator-policies/shop/bound",
        {"pattern": "", "definition": {"max-length": 1000}, "apply-to": "queues"},
    ),
    (
        "parameters/shovel/shop/old-shovel",
        {
            "value": {
                "src-protocol": "amqp091",
                "src-uri": "amqp:///shop",
                "src-queue": "passing",
                "dest-protocol": "amqp091",
                "dest-uri": "amqp:///shop",
                "dest-queue": "full",
            }
        },
    ),
    ("vhost-limits/shop/max-queues", {"value": 50}),
    ("vhost-limits/shop/max-connections", {"value": 40}),
    ("user-limits/alice/max-channels", {"value": 30}),
]
BINDINGS = [
    ("bindings/shop/e/events/q/cache", {"routing_key": "a.*.#", "arguments": {}}),
    ("bindings/shop/e/by-header/q/full", {"arguments": {"x-match": "any", "kind": "x", "n": 5}}),
    ("bindings/shop/e/events/e/direct", {"routing_key": "#", "arguments": {}}),
    ("bindings/shop/e/shards/q/log", {"routing_key": "2", "arguments": {}}),
    ("bindings/%2F/e/amq.topic/q/orders", {"routing_key": "order.new", "arguments": {}}),
]
QUEUES = [path for path, _ in OBJECTS if path.startswith("queues/")]
#: What cannot come over. The guide says how it is taken out of the document.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "policies/%2F/mirrored",
        {"pattern": "^ord", "definition": {"ha-mode": "all", "delivery-limit": 9}, "priority": -1},
    ),
    ("parameters/federation-upstream/shop/up", {"value": {"uri": "amqp://127.0.0.1"}}),
]
#: List of the HTTP API -> the keys in which both brokers have to agree.
VIEWS = {
    "vhosts": ("name", "description", "tags"),
    "users": ("name", "tags", "password_hash", "hashing_algorithm", "limits"),
    "permissions": ("user", "vhost", "configure", "write", "read"),
    "topic-permissions": ("user", "vhost", "exchange", "write", "read"),
    "exchanges": ("name", "vhost", "type", "durable", "auto_delete", "internal", "arguments"),
    "queues": (
        "name", "vhost", "type", "durable", "auto_delete", "exclusive", "arguments", "policy",
        "operator_policy", "effective_policy_definition",
    ),
    "bindings": (
        "source", "vhost", "destination", "destination_type", "routing_key", "arguments",
    ),
    "policies": ("vhost", "name", "pattern", "apply-to", "definition", "priority"),
    "operator-policies": ("vhost", "name", "pattern", "apply-to", "definition", "priority"),
    "parameters": ("component", "vhost", "name", "value"),
    "vhost-limits": ("vhost", "value"),
    "user-limits": ("user", "value"),
}  # fmt: skip


class Api:
    """A broker's HTTP API."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}/api/", auth=("guest", "guest"), timeout=PATIENCE_S
        )

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def send(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = self.http.request(method, path, json=body)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def view(self, name: str) -> list[dict[str, Any]]:
        rows = [{key: row.get(key) or None for key in VIEWS[name]} for row in self.get(name)]
        return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


@pytest.fixture
def rabbit() -> Iterator[tuple[RabbitCluster, Api]]:
    """One RabbitMQ node with the plugins that the guide speaks of."""
    try:
        cluster = RabbitCluster(base_port=OLD_PORT, count=1, plugins=PLUGINS)
    except SystemMissing as error:
        pytest.skip(str(error))
    with cluster:
        cluster.start()
        api = Api(OLD_PORT + 41)
        with api.http:
            yield cluster, api


@pytest.fixture
def convoy() -> Iterator[tuple[ConvoyCluster, Api]]:
    """A ConvoyMQ node of its own: the documents change users, policies and names."""
    with ConvoyCluster(base_port=NEW_PORT, count=1) as cluster:
        cluster.start()
        api = Api(NEW_PORT + 21)
        with api.http:
            yield cluster, api


def test_a_rabbitmq_node_comes_over_by_the_guide(
    rabbit: tuple[RabbitCluster, Api], convoy: tuple[ConvoyCluster, Api], tmp_path: Path
) -> None:
    """The page runs as it stands. Both HTTP APIs show the same then, and every message is there."""
    (old, source), (new, target) = rabbit, convoy
    for path, body in OBJECTS:
        durable = {"durable": True} if path.startswith(("queues", "exchanges")) else {}
        source.send("PUT", path, durable | body)
    for path, body in BINDINGS:
        source.send("POST", path, body)
    publish(old.uris[0], "orders", 40)
    publish(old.uris[0], "audit", 30)
    publish(f"{old.uris[0]}shop", "log", 20)
    publish(f"{old.uris[0]}shop", "cache", 3)
    # Mirroring apart, this policy is expected to come over.
    tries = {"pattern": "^ord", "definition": {"delivery-limit": 9}, "priority": -1}
    source.send("PUT", "policies/%2F/mirrored", tries)
    eventually(lambda: shows_policies(source))
    expected = {name: source.view(name) for name in VIEWS}
    for path, body in REFUSED:
        source.send("PUT", path, body)
    places = {}
    for host, port, http in (
        ("rabbit", old.nodes[0].port, source.port),
        ("convoy", new.nodes[0].port, target.port),
    ):
        places[f"{host}.example.com:15672"] = f"127.0.0.1:{http}"
        places[f"{host}.example.com:5672"] = f"127.0.0.1:{port}"
    eventually(lambda: takes_policies(target))

    places["rabbitmqctl export"] = f"{SCRIPTS}/rabbitmqctl -n {old.nodes[0].name} export"
    printed = run_page(
        PAGE,
        tmp_path,
        replaced=places,
        environment=old.environment(0),
    )

    answer = json.loads((tmp_path / "answer.json").read_text())
    assert len(answer["refused"]) == len(REFUSED)
    for (path, _), words in zip(REFUSED, ("ha-mode", "federation-upstream"), strict=True):
        assert any(path.split("/")[-1] in line and words in line for line in answer["refused"])
    assert answer["notes"] == ["queue 'untyped' in vhost '/' is classic there and becomes quorum"]
    shown = {name: target.view(name) for name in VIEWS}
    wanted = {name: as_here(name, rows) for name, rows in expected.items()}
    differing = {name: difference(wanted[name], shown[name]) for name in VIEWS}
    assert not any(differing.values()), "\n".join(differing.values())
    again = target.send("POST", "definitions?dry_run=true", source.get("definitions"))
    assert sorted(again["refused"]) == sorted(answer["refused"])
    assert again["creates"] == {"exchanges": 1}
    assert re.findall(r"moved (\d+) queues", printed) == [str(len(QUEUES)), str(len(QUEUES) - 1)]
    eventually(lambda: messages(target) == {("shop", "log"): 20})
    assert read(old.uris[0], "orders", 40) == numbered(40)
    assert read(old.uris[0], "audit", 30) == numbered(30)
    for user, password, vhost in (("alice", "wonder land", "shop"), ("bob", "builder", "/")):
        credentials = pika.PlainCredentials(user, password)
        pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", new.nodes[0].port, vhost, credentials)
        ).close()


def messages(api: Api) -> dict[tuple[str, str], int]:
    """The numbers of messages of the queues that have any."""
    found = {(row["vhost"], row["name"]): row["messages"] for row in api.get("queues")}
    return {queue: count for queue, count in found.items() if count}


def takes_policies(api: Api) -> bool:
    """Whether the node has raised its machines to the version that knows policies."""
    policy = {"vhost": "/", "name": "p", "pattern": "", "definition": {"max-length": 1}}
    answer = api.send("POST", "definitions?dry_run=true", {"policies": [policy]})
    return bool(answer["refused"] == [])


def shows_policies(api: Api) -> bool:
    """Whether RabbitMQ has gathered what it shows of queues: it does so every five seconds."""
    found = {row["policy"]: row["effective_policy_definition"] for row in api.view("queues")}
    return found.keys() == {None, "short", "tries", "mirrored"} and all(
        definition for name, definition in found.items() if name
    )


def as_here(view: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What RabbitMQ shows, less what its export lacks, and with durable queues that have a type."""
    if view == "exchanges":
        rows = [row for row in rows if row["name"] != "inside"]
    if view == "queues":
        for row in rows:
            if row["durable"] and "x-queue-type" not in (row["arguments"] or {}):
                row |= {"type": "quorum", "arguments": QUORUM}
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def difference(wanted: list[dict[str, Any]], shown: list[dict[str, Any]]) -> str:
    texts = [json.dumps(rows, indent=1, sort_keys=True).splitlines() for rows in (wanted, shown)]
    return "\n".join(difflib.unified_diff(*texts, "RabbitMQ", "ConvoyMQ", lineterm=""))


def publish(uri: str, queue: str, count: int) -> None:
    connection = connect(uri)
    publish_confirmed(connection.channel(), queue, numbered(count))
    connection.close()


def read(uri: str, queue: str, count: int) -> list[bytes]:
    """Takes what is in a queue, once it is there."""
    connection = connect(uri)
    channel = connection.channel()
    found: list[bytes] = []
    if re.search("audit", queue):
        # Queues with a single active consumer have no basic.get.
        channel.basic_consume(queue, lambda *message: found.append(message[3]), auto_ack=True)
        eventually(lambda: len(found) >= count, connection=connection)
    else:
        eventually(lambda: channel.queue_declare(queue, passive=True).method.message_count >= count)
        found = fetch_all(channel, queue)
    connection.close()
    return found
