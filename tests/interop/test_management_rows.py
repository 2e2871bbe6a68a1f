"""Rows of the HTTP API about what real clients hold."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pika  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import api, eventually, publish_confirmed


@pytest.mark.parametrize("consuming", [False, True])
def test_queues_of_connections_have_what_rabbitmqs_have(
    cluster: Cluster, connection: Any, names: Names, consuming: bool
) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel = connection.channel()
    queue = names.queue()
    channel.queue_declare(queue, exclusive=True)
    publish_confirmed(channel, queue, [b"x" * 10, b"x" * 5])
    if consuming:
        channel.basic_qos(prefetch_count=5)
        channel.basic_consume(queue, lambda *_: None)

    def held() -> bool:
        row = api(cluster, "GET", f"queues/%2F/{queue}")
        return bool(row.get("messages_unacknowledged") == (2 if consuming else 0))

    eventually(held)
    row = api(cluster, "GET", f"queues/%2F/{queue}")
    assert row["message_bytes"] == 15
    assert row["message_bytes_ready"] == (0 if consuming else 15)
    assert row["message_bytes_unacknowledged"] == (15 if consuming else 0)
    assert row["consumer_capacity"] == (1.0 if consuming else 0.0)
    (owner,) = [
        each
        for each in api(cluster, "GET", "connections")
        if each["name"] == row["owner_pid_details"]["name"]
    ]
    assert {key: owner[key] for key in ("name", "peer_host", "peer_port")} == (
        row["owner_pid_details"]
    )
    assert "owner" not in row
    (listed,) = api(cluster, "GET", f"queues?name={queue}&columns=owner_pid_details.name")
    assert listed == {"owner_pid_details": {"name": owner["name"]}}


def test_the_user_that_declared_is_shown(cluster: Cluster, connection: Any, names: Names) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel, queue = connection.channel(), names.queue()
    channel.queue_declare(queue, exclusive=True)
    channel.exchange_declare(queue, "fanout", auto_delete=True)
    (listed,) = api(cluster, "GET", f"users/guest/queues?name={queue}&columns=name,exclusive")
    assert listed == {"name": queue, "exclusive": True}
    exchange = api(cluster, "GET", f"exchanges/%2F/{queue}")
    assert exchange["user_who_performed_action"] == "guest"
    channel.exchange_delete(queue)


def test_messages_are_counted_where_they_pass(
    cluster: Cluster, connection: Any, names: Names
) -> None:
    """By exchange, queue and channel: what the frame scanner routes by itself, and what is looked
    at message by message (mandatory and unroutable, with CC)."""
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel = connection.channel()
    exchange, queue, other = names.exchange(), names.queue("one"), names.queue("two")
    channel.exchange_declare(exchange, "topic")
    for each, key in ((queue, "a.*"), (other, "#.both")):
        channel.queue_declare(each, exclusive=True)
        channel.queue_bind(each, exchange, key)
    channel.confirm_delivery()
    for key in ("a.one", "a.both", "a.one", "none"):
        channel.basic_publish(exchange, key, b"x")
    copied = pika.BasicProperties(headers={"CC": ["a.both"]})
    channel.basic_publish(exchange, "none", b"x", copied)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish(exchange, "none", b"x", mandatory=True)
    method, _, body = next(iter(channel.consume(queue)))
    assert body == b"x"
    channel.basic_ack(method.delivery_tag)
    channel.cancel()

    def stats(path: str) -> Any:
        return api(cluster, "GET", path)

    row = stats(f"exchanges/%2F/{exchange}")
    assert row["message_stats"]["publish_in"] == 6
    assert row["message_stats"]["publish_out"] == 6
    sent = {each["queue"]["name"]: each["stats"]["publish"] for each in row["outgoing"]}
    assert sent == {queue: 4, other: 2}
    (source,) = row["incoming"]
    assert source["stats"]["publish"] == 6
    name = source["channel_details"]["name"]
    (listed,) = [each for each in stats("exchanges/%2F") if each["name"] == exchange]
    assert listed["message_stats"]["publish_in"] == 6
    assert "incoming" not in listed
    row = stats(f"channels/{quote(name, safe='')}")
    assert row["message_stats"]["publish"] == 6
    assert row["message_stats"]["confirm"] == 6
    assert row["message_stats"]["return_unroutable"] == 1
    (published,) = row["publishes"]
    assert published["exchange"] == {"name": exchange, "vhost": "/"}
    assert published["stats"]["publish"] == 6
    (delivered,) = row["deliveries"]
    assert delivered["queue"] == {"name": queue, "vhost": "/"}
    assert delivered["stats"]["deliver_get"] == row["message_stats"]["deliver_get"] >= 1
    (listed,) = [each for each in stats("channels") if each["name"] == name]
    assert listed["message_stats"]["publish"] == 6
    assert not {"publishes", "published_to", "counters"} & set(listed)
    row = stats(f"queues/%2F/{other}")
    (source,) = row["incoming"]
    assert (source["exchange"]["name"], source["stats"]["publish"]) == (exchange, 2)
    assert row["deliveries"] == []
    (taken,) = stats(f"queues/%2F/{queue}")["deliveries"]
    assert taken["channel_details"]["name"] == name


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_http_publishes_and_what_dies_is_counted_by_exchange(
    cluster: Cluster, connection: Any, names: Names, kind: str
) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel = connection.channel()
    exchange, graves = names.exchange("x"), names.exchange("graves")
    queue, grave = names.queue("q"), names.queue("grave")
    for each in (exchange, graves):
        channel.exchange_declare(each, "fanout", durable=True)
    types = {"x-queue-type": kind}
    dying = {**types, "x-dead-letter-exchange": graves}
    for name, bound, arguments in ((queue, exchange, dying), (grave, graves, types)):
        channel.queue_declare(name, durable=True, arguments=arguments)
        channel.queue_bind(name, bound)
    message = {"routing_key": "", "properties": {}, "payload": "x", "payload_encoding": "string"}
    for _ in range(3):
        api(cluster, "POST", f"exchanges/%2F/{exchange}/publish", message)
    for _ in range(2):
        method, _, _ = channel.basic_get(queue)
        channel.basic_nack(method.delivery_tag, requeue=False)
    eventually(lambda: channel.queue_declare(grave, passive=True).method.message_count == 2)

    def stats(name: str) -> Any:
        row = api(cluster, "GET", f"exchanges/%2F/{name}")
        sent = {each["queue"]["name"]: each["stats"]["publish"] for each in row["outgoing"]}
        return row["message_stats"]["publish_in"], row["message_stats"]["publish_out"], sent

    assert stats(exchange) == (3, 3, {queue: 3})
    assert stats(graves) == (2, 2, {grave: 2})


RANGED = {
    "overview": [("queue_totals", "messages"), ("message_stats", "publish")],
    "nodes": [("", "mem_used")],
    "connections": [("", "recv_oct")],
    "channels": [("message_stats", "publish")],
    "queues/%2F/{queue}": [("", "messages"), ("message_stats", "publish")],
    "exchanges/%2F/amq.default": [("message_stats", "publish_in")],
    "vhosts/%2F": [("", "messages")],
}
RANGES = ("lengths", "msg_rates", "data_rates", "node_stats")


@pytest.mark.parametrize("path", RANGED)
def test_objects_have_samples_over_time(
    cluster: Cluster, connection: Any, names: Names, path: str
) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel = connection.channel()
    queue = names.queue()
    channel.queue_declare(queue, exclusive=True)
    publish_confirmed(channel, queue, [b"x"] * 3)
    query = "&".join(f"{name}_age=60&{name}_incr=1" for name in RANGES)
    whole = f"{path.format(queue=queue)}?{query}"

    def details() -> list[Any]:
        rows = api(cluster, "GET", whole)
        (row, *_) = rows if isinstance(rows, list) else [rows]
        return [(row[place] if place else row)[f"{name}_details"] for place, name in RANGED[path]]

    def risen() -> bool:
        return all(len(each["samples"]) > 1 for each in details())

    eventually(risen)
    for each in details():
        stamps = [sample["timestamp"] for sample in each["samples"]]
        assert stamps == sorted(stamps, reverse=True)
        assert all(stamp % 1000 == 0 for stamp in stamps)
        assert {"rate", "avg", "avg_rate"} <= set(each)
