"""Messages that wait for a time, by pika on three nodes: delays, cancelling, retries, a kill."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_leadership import convoy
from tests.faults.traffic import connect, until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
QUORUM = {"x-queue-type": "quorum"}
LATER = 3_600_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, on which the second version of the tree's rules is in force."""
    with serving_cluster(tmp_path_factory.mktemp("scheduled"), BASE_PORT, policies=True) as made:
        yield made


@contextlib.contextmanager
def channel_to(cluster: LocalCluster, node: int = 1) -> Iterator[Any]:
    connection = connect(cluster, node)
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    with contextlib.suppress(pika.exceptions.AMQPError):
        connection.close()


def publish(channel: Any, key: str, body: bytes, exchange: str = "", **headers: Any) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    properties = pika.BasicProperties(delivery_mode=2, headers=named, message_id=body.decode())
    channel.basic_publish(exchange, key, body, properties)


def delayed(cluster: LocalCluster, queue: str) -> int:
    return int(cluster.api(f"queues/%2F/{queue}")["messages_delayed"])


def take(channel: Any, queue: str, count: int) -> list[tuple[bytes, Any, float]]:
    """(body, properties, when it came) of the next messages, acknowledged."""
    found = []
    for method, properties, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
        assert method is not None, f"{len(found)} of {count} came"
        found.append((body, properties, time.time()))
        channel.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    channel.cancel()
    return found


def refused(cluster: LocalCluster, queue: str, **headers: Any) -> str:
    with channel_to(cluster) as channel:
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            publish(channel, queue, b"x", **headers)
        assert caught.value.reply_code == 406
        return str(caught.value.reply_text)


def test_messages_wait_in_the_order_of_their_times(cluster: LocalCluster) -> None:
    """By the exchange of RabbitMQ's plugin, and by the default exchange, from another node."""
    with channel_to(cluster, 2) as channel:
        channel.queue_declare("order", durable=True, arguments=QUORUM)
        kind = {"x-delayed-type": "topic"}
        channel.exchange_declare("later", "x-delayed-message", durable=True, arguments=kind)
        channel.exchange_declare("later", "x-delayed-message", durable=True, arguments=kind)
        channel.queue_bind("order", "later", "a.*")
        began = time.time()
        publish(channel, "a.b", b"third", "later", x_delay=1_500)
        publish(channel, "a.b", b"second", "later", x_delay=700)
        publish(channel, "b.a", b"elsewhere", "later", x_delay=1)
        publish(channel, "order", b"fourth", x_deliver_at=int((began + 2) * 1000))
        publish(channel, "a.b", b"first", "later", x_delay=-700)
        found = take(channel, "order", 4)
    assert [body for body, _, _ in found] == [b"first", b"second", b"third", b"fourth"]
    for (_, _, came), delay in zip(found, (0, 0.7, 1.5, 2.0), strict=True):
        assert came >= began + delay - 0.01
    assert found[1][1].headers == {"x-delay": 700}
    assert delayed(cluster, "order") == 0


def test_what_waits_is_listed_and_cancelled(cluster: LocalCluster) -> None:
    with channel_to(cluster) as channel:
        channel.queue_declare("list", durable=True, arguments=QUORUM)
        for i in range(5):
            publish(channel, "list", b"%d" % i, x_delay=LATER - i * 60_000)
        until(lambda: delayed(cluster, "list") == 5, "they do not wait")
        assert channel.queue_declare("list", passive=True).method.message_count == 0
    path = "convoy/queues/%2F/list/scheduled"
    status, page = call(cluster, "GET", f"{path}?limit=3", node=1)
    assert status == 200, page
    _, rest = call(cluster, "GET", f"{path}?after={page['next']}", node=2)
    assert rest["next"] is None
    rows = [*page["messages"], *rest["messages"]]
    assert [row["properties"]["message_id"] for row in rows] == ["4", "3", "2", "1", "0"]
    assert {row["reason"] for row in rows} == {"scheduled"}
    assert rows[0]["payload_bytes"] == 1
    shown = convoy(cluster, "queues", "list_scheduled", "list", "--formatter", "json", at=3)
    assert [row["id"] for row in json.loads(shown.stdout)] == [row["id"] for row in rows]
    gone = [row["id"] for row in rows[1:3]]
    done = convoy(cluster, "queues", "cancel_scheduled", "list", *gone, at=2)
    assert "2" in done.stdout.split()
    assert call(cluster, "DELETE", f"{path}/{rows[0]['id']}", node=3)[0] == 204
    assert call(cluster, "DELETE", f"{path}/{rows[0]['id']}")[0] == 404
    assert call(cluster, "DELETE", f"{path}/1-2-3")[0] == 400
    assert call(cluster, "GET", f"{path}?limit=0")[0] == 400
    until(lambda: delayed(cluster, "list") == 2, "they were not cancelled")
    with channel_to(cluster) as channel:
        assert channel.queue_purge("list").method.message_count == 2
        channel.queue_declare("plain", durable=True, arguments={"x-queue-type": "classic"})
    assert call(cluster, "GET", path.replace("list", "plain"))[0] == 400


def test_nothing_that_waits_is_lost_or_early_when_the_leader_is_killed(
    cluster: LocalCluster,
) -> None:
    count = 300
    with channel_to(cluster, 1) as channel:
        channel.queue_declare("kill", durable=True, arguments=QUORUM)
        due_ms = int(time.time() * 1000) + 4_000
        for i in range(count):
            publish(channel, "kill", b"%d" % i, x_deliver_at=due_ms + (i * 7 % count) * 5)
    leader = cluster.leader_of("kill")
    until(lambda: delayed(cluster, "kill") == count, "they do not wait")
    cluster.kill(leader, signal.SIGKILL)
    with channel_to(cluster, leader % 3 + 1) as channel:
        found = take(channel, "kill", count)
    cluster.start_node(leader)
    cluster.wait_ready()
    expected = sorted(range(count), key=lambda i: i * 7 % count)
    assert [int(body) for body, _, _ in found] == expected
    for body, properties, came in found:
        assert came * 1000 >= properties.headers["x-deliver-at"] - 5, body
    until(lambda: cluster.messages_in("kill") == 0, "more came")
    until(lambda: delayed(cluster, "kill") == 0, "some wait")


@pytest.mark.parametrize("by", ["argument", "policy"])
def test_a_retry_waits(cluster: LocalCluster, by: str) -> None:
    queue = f"retry {by}"
    settings = {"delayed-retry-type": "failed", "delayed-retry-min": 400, "delayed-retry-max": 600}
    arguments = {f"x-{key}": value for key, value in settings.items()} if by == "argument" else {}
    with channel_to(cluster) as channel:
        channel.queue_declare(queue, durable=True, arguments=QUORUM | arguments)
        if by == "policy":
            policy = {"pattern": f"^{queue}$", "definition": settings}
            assert call(cluster, "PUT", "policies/%2F/retry", policy)[0] < 300
            path = f"queues/%2F/{queue.replace(' ', '%20')}"
            until(lambda: cluster.api(path)["policy"] == "retry", "no policy")
        publish(channel, queue, b"x")
        times = []
        for method, properties, _ in channel.consume(queue, inactivity_timeout=PATIENCE_S):
            assert method is not None
            times.append(time.monotonic())
            if len(times) == 3:
                assert properties.headers["x-delivery-count"] == 2
                channel.basic_ack(method.delivery_tag)
                break
            channel.basic_reject(method.delivery_tag, requeue=True)
        channel.cancel()
    if by == "argument":
        # The settings of a policy reach the log in their own time.
        assert times[1] - times[0] >= 0.39
    assert times[2] - times[1] >= (0.59 if by == "argument" else 0)


def test_what_cannot_wait_is_refused_by_name(cluster: LocalCluster) -> None:
    with channel_to(cluster) as channel:
        for kind in ("classic", "stream", "quorum"):
            channel.queue_declare(f"a {kind}", durable=True, arguments={"x-queue-type": kind})
    for kind in ("classic", "stream"):
        text = refused(cluster, f"a {kind}", x_delay=5)
        assert f"message header 'x-delay' is not served by {kind} queues" in text
        assert "x-deliver-at" in refused(cluster, f"a {kind}", x_deliver_at=5)
    assert "must be an integer" in refused(cluster, "a quorum", x_delay="soon")
    assert "at most" in refused(cluster, "a quorum", x_delay=1 << 60)
    assert "excludes" in refused(cluster, "a quorum", x_delay=1, x_deliver_at=1)
    with channel_to(cluster) as channel:
        publish(channel, "a classic", b"now", x_delay=-5)
    for arguments in ({}, {"x-delayed-type": "none"}, {"x-delayed-type": "x-delayed-message"}):
        with channel_to(cluster) as channel:
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
                channel.exchange_declare("bad", "x-delayed-message", arguments=arguments)
            assert caught.value.reply_code == 406
            assert "'x-delayed-type' must be an existing exchange type" in caught.value.reply_text
    body = {"properties": {"headers": {"x-delay": 5}}, "routing_key": "a classic", "payload": "x"}
    assert call(cluster, "POST", "exchanges/%2F/amq.default/publish", body)[0] == 400
    body["routing_key"] = "a quorum"
    body["properties"] = {"headers": {"x-delay": LATER}}
    assert call(cluster, "POST", "exchanges/%2F/amq.default/publish", body)[0] == 200
    until(lambda: delayed(cluster, "a%20quorum") == 1, "HTTP does not delay")
