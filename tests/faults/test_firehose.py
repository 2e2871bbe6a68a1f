"""The firehose on three nodes: copies of what pika publishes and gets, while tracing is on."""

from __future__ import annotations

import json
from typing import Any

from pika import BasicProperties

from convoymq.cli.api import call
from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import StartCluster
from tests.faults.traffic import connect, until
from tests.patience import PATIENCE_S

TRACE = "amq.rabbitmq.trace"
BODY = bytes(range(256)) * 700
"""More than one frame."""
HEADERS = {"a": 1, "nested": {"b": [True, "x"]}}


def trace(cluster: LocalCluster, on: bool, vhost: str = "%2F", node: int = 1) -> None:
    url = f"http://127.0.0.1:{cluster.nodes[node - 1].http_port}/api/vhosts/{vhost}"
    call("PUT", url, PATIENCE_S, "guest:guest", json.dumps({"tracing": on}).encode())
    until(lambda: tracing(cluster, vhost) == {on}, "not every node follows")


def tracing(cluster: LocalCluster, vhost: str = "%2F") -> set[bool]:
    return {cluster.api(f"vhosts/{vhost}", node.number)["tracing"] for node in cluster.nodes}


def taken(channel: Any, queue: str, count: int) -> list[tuple[Any, Any, bytes]]:
    """Takes that many messages, and sees that there are no more."""
    found: list[tuple[Any, Any, bytes]] = []

    def take() -> bool:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is not None:
            found.append((method, properties, body))
        return len(found) >= count

    until(take, f"{len(found)} of {count} copies")
    assert channel.basic_get(queue, auto_ack=True)[0] is None
    return found


def test_copies_of_publishes_and_deliveries_have_rabbitmqs_headers(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(3)
    watching, publishing, consuming = (connect(cluster, node) for node in (1, 2, 3))
    watcher = watching.channel()
    watcher.queue_declare("copies", durable=True, arguments={"x-queue-type": "classic"})
    watcher.queue_bind("copies", TRACE, "#")
    publisher = publishing.channel()
    publisher.confirm_delivery()
    publisher.exchange_declare("x", "topic")
    for kind in ("quorum", "classic", "stream"):
        publisher.queue_declare(kind, durable=True, arguments={"x-queue-type": kind})
        publisher.queue_bind(kind, "x", f"{kind}.#")
    # Its route is remembered from now on: it must be looked up anew when tracing begins.
    publisher.basic_publish("x", "quorum.k", b"before")
    publisher.queue_purge("quorum")
    trace(cluster, True)
    sent = BasicProperties(content_type="t", delivery_mode=2, priority=3, timestamp=1_700_000_000,
                           message_id="m", app_id="a", headers=HEADERS)  # fmt: skip
    publisher.basic_publish("x", "quorum.k", BODY, sent)
    ((method, properties, body),) = taken(watcher, "copies", 1)
    assert (method.exchange, method.routing_key, body) == (TRACE, "publish.x", BODY)
    assert properties.delivery_mode is None
    headers = properties.headers
    assert "127.0.0.1" in headers.pop("connection")
    assert headers == {
        "exchange_name": "x",
        "routing_keys": ["quorum.k"],
        "properties": {"content_type": "t", "delivery_mode": 2, "priority": 3, "message_id": "m",
                       "timestamp": 1_700_000_000, "app_id": "a", "headers": HEADERS},
        "node": cluster.api("overview", 2)["node"],
        "vhost": "/",
        "channel": 1,
        "user": "guest",
        "routed_queues": ["quorum"],
    }  # fmt: skip

    # Gets and deliveries, of every type; a delivery that comes again says so.
    consumer = consuming.channel()
    got, _, _ = consumer.basic_get("quorum")
    consumer.basic_reject(got.delivery_tag, requeue=True)
    until(lambda: consumer.basic_get("quorum")[0] is not None, "nothing comes again")
    copies = taken(watcher, "copies", 2)
    assert [method.routing_key for method, _, _ in copies] == ["deliver.quorum"] * 2
    assert [properties.headers["redelivered"] for _, properties, _ in copies] == [0, 1]
    assert copies[0][2] == BODY
    assert copies[0][1].headers["exchange_name"] == "x"
    assert copies[0][1].headers["node"] == cluster.api("overview", 3)["node"]
    for kind, more in (("classic", {}), ("stream", {"x-stream-offset": "first"})):
        publisher.basic_publish("x", f"{kind}.k", b"one")
        consumer.basic_qos(prefetch_count=10)
        seen: list[bytes] = []

        def acknowledge(
            channel: Any, method: Any, _properties: Any, body: bytes, seen: list[bytes] = seen
        ) -> None:
            seen.append(body)
            channel.basic_ack(method.delivery_tag)

        tag = consumer.basic_consume(kind, acknowledge, arguments=more)
        while not seen:
            consuming.process_data_events(1)
        keys = []
        for method, properties, body in taken(watcher, "copies", 2):
            keys.append(method.routing_key)
            assert body == b"one"
            assert properties.headers["routing_keys"] == [f"{kind}.k"]
        assert sorted(keys) == [f"deliver.{kind}", "publish.x"]
        consumer.basic_cancel(tag)
    # What nobody gets is traced, and so is a message for several queues, once.
    publisher.basic_publish("x", "nothing", b"lost")
    ((_, properties, _),) = taken(watcher, "copies", 1)
    assert properties.headers["routed_queues"] == []

    trace(cluster, False, node=3)
    publisher.basic_publish("x", "quorum.k", b"after")
    assert taken(watcher, "copies", 0) == []
    for connection in (watching, publishing, consuming):
        connection.close()


def test_tracing_is_of_one_virtual_host_and_outlives_a_restart(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(3)
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/vhosts/v"
    call("PUT", url, PATIENCE_S, "guest:guest", b'{"description": "kept"}')
    trace(cluster, True, "v")
    assert cluster.api("vhosts/v")["description"] == "kept"
    assert tracing(cluster) == {False}
    cluster.kill(2)
    cluster.start_node(2)
    cluster.wait_ready()

    def follows() -> bool:
        return bool(cluster.api("vhosts/v", 2)["tracing"])

    until(follows, "the node does not follow after its restart")
    elsewhere = connect(cluster, 2)
    other = elsewhere.channel()
    other.queue_declare("copies", exclusive=True)
    other.queue_bind("copies", TRACE, "#")
    connection = connect(cluster, 2, virtual_host="v")
    channel = connection.channel()
    channel.queue_declare("copies", exclusive=True)
    channel.queue_bind("copies", TRACE, "publish.#")
    channel.confirm_delivery()
    # A transaction is traced when it is committed.
    committing = connection.channel()
    committing.tx_select()
    committing.basic_publish("amq.direct", "k", b"in tx")
    channel.basic_publish("", "none", b"direct")
    ((method, _, body),) = taken(channel, "copies", 1)
    assert (method.routing_key, body) == ("publish.", b"direct")
    committing.tx_commit()
    ((method, _, body),) = taken(channel, "copies", 1)
    assert (method.routing_key, body) == ("publish.amq.direct", b"in tx")
    assert taken(other, "copies", 0) == []
    for each in (connection, elsewhere):
        each.close()
    call("DELETE", url, PATIENCE_S, "guest:guest")
    call("PUT", url, PATIENCE_S, "guest:guest", b"{}")
    until(lambda: tracing(cluster, "v") == {False}, "the next virtual host is traced")
