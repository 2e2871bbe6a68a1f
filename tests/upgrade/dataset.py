"""What a data fixture holds, and how it is checked: written once, read by every later release.

`fill` puts users, exchanges and queues of all types into a running cluster and consumes a part;
what must be found later is returned as plain values. `check` compares a cluster with them, through
AMQP and HTTP clients only, so it does not depend on any format.
"""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.node.admin_socket import ask
from tests.clusters import answered
from tests.faults.traffic import until
from tests.interop.test_columnar import values_frame
from tests.patience import PATIENCE_S
from tests.upgrade import since_0_4
from tests.upgrade.features import Filling, has_policies

SIZE = 1000
"""Bytes of a body: enough of them fill several log files, so that segments and snapshots exist."""
QUORUM = {"x-queue-type": "quorum"}
STREAM = {"x-queue-type": "stream"}
VHOST = "sales"
DIGEST = bytes(range(16))


def body(number: int) -> bytes:
    """The body of message `number`."""
    return (b"%d" % number).ljust(SIZE)


@contextmanager
def channel(
    cluster: LocalCluster, node: int = 1, user: str = "guest", vhost: str = "/"
) -> Iterator[Any]:
    """A channel with confirms on a node."""
    made: list[Any] = []

    def attempt() -> bool:
        made.append(
            pika.BlockingConnection(
                pika.ConnectionParameters(
                    "127.0.0.1",
                    cluster.nodes[node - 1].amqp_port,
                    vhost,
                    pika.PlainCredentials(user, user),
                    heartbeat=0,
                )
            )
        )
        return True

    until(attempt, f"no connection to node {node} as {user}")
    opened = made[0].channel()
    opened.confirm_delivery()
    try:
        yield opened
    finally:
        made[0].close()


def http(cluster: LocalCluster, method: str, path: str, content: Any = None) -> Any:
    """One call of the HTTP API of node 1; None when the answer is empty."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/{path}",
        data=None if content is None else json.dumps(content).encode(),
        method=method,
        headers={"Authorization": "Basic " + b64encode(b"guest:guest").decode()},
    )
    with answered(request) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def fill(cluster: LocalCluster) -> dict[str, Any]:
    """Fills an empty cluster; returns what `check` wants to find."""
    until(lambda: cluster.api("users", 1), "the HTTP API does not answer")
    until(lambda: has_policies(cluster, http), "the versions of the machines are not raised")
    http(cluster, "PUT", f"vhosts/{VHOST}", {"description": "fixture", "tags": "a,b"})
    http(cluster, "PUT", "users/clerk", {"password": "clerk", "tags": "monitoring"})
    everything = {"configure": ".*", "write": ".*", "read": "^(ledger|audit)"}
    http(cluster, "PUT", f"permissions/{VHOST}/clerk", everything)
    topic = {"exchange": "amq.topic", "write": "^eu\\.", "read": ".*"}
    http(cluster, "PUT", f"topic-permissions/{VHOST}/clerk", topic)
    with channel(cluster) as main:
        _declare(main)
        for number in range(400):
            main.basic_publish("", "orders", body(number), pika.BasicProperties(delivery_mode=2))
        for number in range(200):
            main.basic_publish("", "events", body(number), pika.BasicProperties(delivery_mode=2))
        for number in range(60):
            main.basic_publish("", "jobs", body(number), pika.BasicProperties(delivery_mode=2))
        for number in range(10):
            main.basic_publish("", "retries", body(number), pika.BasicProperties(delivery_mode=2))
        for number in range(20):
            # What a message without a priority has; the command says that there is one.
            usual = pika.BasicProperties(delivery_mode=2, priority=4)
            main.basic_publish("", "turns", body(number), usual)
    with channel(cluster, 2) as main:
        _consume(main)
    _produce(cluster)
    with channel(cluster, user="clerk", vhost=VHOST) as main:
        main.queue_declare("ledger", durable=True, arguments=QUORUM)
        for number in range(30):
            main.basic_publish("", "ledger", body(number), pika.BasicProperties(delivery_mode=2))
    with channel(cluster) as main:
        features = Filling(cluster, main, http).fill()
    newer = since_0_4.NEWER_VHOST
    http(cluster, "PUT", f"vhosts/{newer}", {"rabbitmq_compatibility": "4.3"})
    http(cluster, "PUT", f"permissions/{newer}/guest", dict.fromkeys(everything, ".*"))
    with channel(cluster) as main, channel(cluster, vhost=newer) as later:
        since = since_0_4.fill(cluster, main, later, http)
    return {
        "features": features,
        "since_0_4": since,
        "orders": [number for number in range(400) if number >= 250 or number in (7, 9)],
        "orders_redelivered": [7, 9],
        "events": 200,
        "jobs": list(range(20, 60)),
        "turns": list(range(5, 20)),
        "retries": [*range(3, 10), 0, 1, 2],
        "metered": 90,
        "ledger": list(range(30)),
        "bindings": sorted(_bindings(cluster)),
        "users": sorted(user["name"] for user in http(cluster, "GET", "users")),
        "permissions": http(cluster, "GET", f"permissions/{VHOST}/clerk"),
        "topic_permissions": http(cluster, "GET", f"topic-permissions/{VHOST}/clerk"),
        "groups": _groups(cluster),
    }


def _declare(main: Any) -> None:
    main.queue_declare("orders", durable=True, arguments={**QUORUM, "x-delivery-limit": 5})
    main.queue_declare(
        "turns", durable=True, arguments={**QUORUM, "x-single-active-consumer": True}
    )
    main.queue_declare("retries", durable=True, arguments={**QUORUM, "x-delivery-limit": -1})
    main.queue_declare("events", durable=True, arguments=STREAM)
    main.queue_declare("metered", durable=True, arguments=STREAM)
    main.queue_declare("jobs", durable=True, arguments={"x-queue-type": "classic"})
    main.exchange_declare("spill", "fanout", durable=True)
    main.exchange_declare("in", "topic", durable=True, arguments={"alternate-exchange": "spill"})
    main.exchange_declare("match", "headers", durable=True)
    main.queue_bind("orders", "in", "order.#")
    main.queue_bind("jobs", "spill")
    main.queue_bind("turns", "match", arguments={"x-match": "any", "kind": "turn"})
    main.exchange_bind("match", "in", "kind.*")


def _consume(main: Any) -> None:
    """Takes 250 of orders and gives 7 and 9 back; 20 of jobs; 5 of turns. Three of retries go back
    to the tail."""
    taken: dict[int, int] = {}
    for _ in range(250):
        method, _, content = main.basic_get("orders")
        taken[int(content)] = method.delivery_tag
    for number, tag in taken.items():
        if number not in (7, 9):
            main.basic_ack(tag)
    for number in (7, 9):
        main.basic_nack(taken[number], requeue=True)
    for method, _, _ in [main.basic_get("retries") for _ in range(3)]:
        main.basic_nack(method.delivery_tag, requeue=True)
    main.basic_qos(prefetch_count=0)
    for name, count in (("jobs", 20), ("turns", 5)):
        main.basic_qos(prefetch_count=count)
        for method, _, content in main.consume(name, inactivity_timeout=PATIENCE_S):
            assert method is not None
            main.basic_ack(method.delivery_tag)
            if int(content) == count - 1:
                break
        main.cancel()


def _produce(cluster: LocalCluster) -> None:
    """Rows of two producers, one known by its numbers, one by content; and a reader's place."""
    with producing(cluster) as client:
        for part in range(2):
            rows = _rows(30 * part)
            client.produce(rows, stream="metered", producer="by-number", sequence=30 * part + 1)
        client.produce(
            _rows(60), stream="metered", producer="by-content", sequence=1, digest=DIGEST
        )
        client.store_offset("metered", "reader", 42)


@contextmanager
def producing(cluster: LocalCluster) -> Iterator[Client]:
    """A client of the columnar protocol on node 1."""
    server = f"127.0.0.1:{cluster.nodes[0].amqp_port}"
    with Client(ClientConfig((server,), spread=False)) as client:
        yield client


def _rows(first: int) -> bytes:
    return values_frame([body(number) for number in range(first, first + 30)])


def _check_producers(cluster: LocalCluster) -> None:
    """What was sent before is known, and what is new is not taken for it."""
    with producing(cluster) as client:
        repeated = client.produce(_rows(30), stream="metered", producer="by-number", sequence=31)
        assert (repeated.count, repeated.duplicates) == (30, 30)
        repeated = client.produce(
            _rows(60), stream="metered", producer="by-content", sequence=1, digest=DIGEST
        )
        assert (repeated.count, repeated.duplicates) == (30, 30)
        assert client.query_offset("metered", "reader") == 42


def _bindings(cluster: LocalCluster) -> list[str]:
    return [
        f"{row['vhost']}|{row['source']}|{row['destination']}|{row['routing_key']}"
        for row in http(cluster, "GET", "bindings")
    ]


def _groups(cluster: LocalCluster) -> dict[str, str]:
    """Number -> kind of machine, of all groups: a queue must keep its number for ever."""
    rows = ask(cluster.data / "node-1" / "data", {"op": "groups"}, print)
    return {str(row["group"]): row["kind"] for row in rows}


def check(cluster: LocalCluster, expected: dict[str, Any]) -> None:
    """Asserts that a cluster has what `fill` returned. Consumes the queues."""
    until(lambda: cluster.api("users", 1), "the HTTP API does not answer")
    assert sorted(user["name"] for user in http(cluster, "GET", "users")) == expected["users"]
    assert http(cluster, "GET", f"permissions/{VHOST}/clerk") == expected["permissions"]
    found = http(cluster, "GET", f"topic-permissions/{VHOST}/clerk")
    assert found == expected["topic_permissions"]
    assert sorted(_bindings(cluster)) == expected["bindings"]
    assert _groups(cluster) == expected["groups"]
    _check_producers(cluster)
    with channel(cluster, 3) as main:
        orders = _drain(main, "orders", len(expected["orders"]))
        assert sorted(number for number, _ in orders) == expected["orders"]
        again = sorted(number for number, redelivered in orders if redelivered)
        assert again == expected["orders_redelivered"]
        fresh = [number for number, redelivered in orders if not redelivered]
        assert fresh == sorted(fresh)
        for name in ("jobs", "turns", "retries"):
            numbers = [number for number, _ in _drain(main, name, len(expected[name]))]
            assert numbers == expected[name], (name, numbers)
        main.basic_qos(prefetch_count=100)
        for name in ("events", "metered"):
            _check_stream(main, name, expected[name])
    if "features" in expected:
        with channel(cluster) as main:
            Filling(cluster, main, http).check(expected["features"])
    if "since_0_4" in expected:
        with channel(cluster) as main, channel(cluster, vhost=since_0_4.NEWER_VHOST) as later:
            since_0_4.check(cluster, main, later, http, expected["since_0_4"])
    with channel(cluster, 2, user="clerk", vhost=VHOST) as main:
        ledger = _drain(main, "ledger", len(expected["ledger"]))
        assert [number for number, _ in ledger] == expected["ledger"]


def _check_stream(main: Any, stream: str, count: int) -> None:
    """Reads a stream from its first message on: all are there, in order and with their offsets."""
    found: list[int] = []
    arguments = {"x-stream-offset": "first"}
    for method, properties, content in main.consume(
        stream, arguments=arguments, inactivity_timeout=PATIENCE_S
    ):
        assert method is not None, f"{stream}: {len(found)} of {count} messages came"
        assert properties.headers["x-stream-offset"] == len(found)
        assert content == body(int(content))
        found.append(int(content))
        main.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    main.cancel()
    assert found == list(range(count))


def _drain(main: Any, queue: str, count: int) -> list[tuple[int, bool]]:
    """Takes and acknowledges so many messages; nothing may be left behind them."""
    found: list[tuple[int, bool]] = []
    main.basic_qos(prefetch_count=50)
    for method, _, content in main.consume(queue, inactivity_timeout=PATIENCE_S):
        assert method is not None, f"{queue}: {len(found)} of {count} messages came"
        assert content == body(int(content)), f"{queue}: message {int(content)} is damaged"
        found.append((int(content), method.redelivered))
        main.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    main.cancel()
    assert main.queue_declare(queue, passive=True).method.message_count == 0
    return found
