"""Weak topics, and messages without a key, with pika and the Python client on three nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client as ColumnarClient
from convoymq.client import ClientConfig, errors
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from convoymq.client.topic_producer import TopicProducer
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import changed, create, path
from tests.faults.traffic import until
from tests.interop.test_topic_groups import Client, parked
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
WEAK = {"mode": "weak"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") != "convoy":
        pytest.skip("RabbitMQ has no ordered topics")
    with serving_cluster(tmp_path_factory.mktemp("weak-topics"), BASE_PORT) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def opened(node: int = 1, prefetch: int = 0) -> Client:
        made.append(Client(cluster, node, prefetch))
        return made[-1]

    yield opened
    for each in made:
        if each.connection.is_open:
            each.connection.close()


@pytest.fixture
def columnar(cluster: LocalCluster) -> Iterator[ColumnarClient]:
    servers = tuple(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)
    with ColumnarClient(ClientConfig(servers)) as made:
        yield made


Opened = Callable[..., Client]


def lag(cluster: LocalCluster, topic: str) -> int:
    status, rows = call(cluster, "GET", path(topic, "groups", "g", "lag"))
    assert status == 200, rows
    return sum(row["lag"] for row in rows)


def headers_of(each: tuple[Any, Any, bytes]) -> dict[str, Any]:
    return dict(each[1].headers)


# --- messages without a key ----------------------------------------------------------------


def test_a_strict_topic_refuses_messages_without_a_key(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "keyed", 1)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no order key"):
        client().channel.basic_publish("keyed", "", b"nobody's")


def test_messages_of_a_channel_without_a_key_go_one_way(
    cluster: LocalCluster, client: Opened
) -> None:
    """Of a strict topic with null-key sticky; in their order, also through a split."""
    create(cluster, "sticky", 3, **{"null-key": "sticky"})
    sender, reader = client(1), client(2, prefetch=100)
    reader.consume("sticky/g", arguments={"x-key-in-flight": 0})
    for number in range(20):
        sender.channel.basic_publish("sticky", "", b"%d" % number)
    reader.wait(*map(str, range(20)))
    places = {headers_of(each)["x-pid"] for each in reader.hand}
    assert len(places) == 1
    assert {headers_of(each)["x-lp"] for each in reader.hand} == {-1}
    (pid,) = places
    changed(cluster, "sticky", "split", pid=pid)
    for number in range(20, 40):
        sender.channel.basic_publish("sticky", "", b"%d" % number)
    reader.channel.basic_ack(0, multiple=True)
    reader.wait(*map(str, range(40)))


def test_a_weak_topic_spreads_messages_without_a_key(cluster: LocalCluster, client: Opened) -> None:
    create(cluster, "spread", 3, **WEAK)
    sender, reader = client(1), client(2)
    reader.consume("spread/g")
    for number in range(30):
        sender.channel.basic_publish("spread", "", b"%d" % number)
    until(lambda: reader.pump() and len(reader.hand) == 30, "not all came")
    found = Counter(headers_of(each)["x-pid"] for each in reader.hand)
    assert found == {0: 10, 1: 10, 2: 10}
    for pid in found:
        mine = [int(e[2]) for e in reader.hand if headers_of(e)["x-pid"] == pid]
        assert mine == sorted(mine)


def test_a_producer_with_sequences_sends_messages_without_a_key(
    cluster: LocalCluster, columnar: ColumnarClient, client: Opened
) -> None:
    create(cluster, "numbered", 3, **WEAK)
    with TopicProducer(columnar, "numbered") as producer:
        receipts = [producer.send(None, b"%d" % n, {"h": "x"}) for n in range(10)]
        for receipt in receipts:
            receipt.result(20)
    reader = client(3)
    reader.consume("numbered/g")
    reader.wait(*map(str, range(10)))
    assert len({headers_of(each)["x-pid"] for each in reader.hand}) == 1
    create(cluster, "numbered-strict", 1)
    with TopicProducer(columnar, "numbered-strict") as producer:
        refused = producer.send(None, b"x").exception(20)
        assert isinstance(refused, errors.TopicRefused)
        assert refused.topic_code == "NO_KEY"


def test_settings_of_the_other_mode_are_refused(cluster: LocalCluster) -> None:
    for settings in (
        {"weak-wait": "5s"},
        {"lost-after": "5s"},
        {"retry-exchange": "failed"},
        {"null-key": "spread"},
        {"null-key": "anything"},
        {"mode": "weak", "weak-wait": "soon"},
        {"mode": "loose"},
    ):
        status, answer = call(cluster, "PUT", path("refused"), {"partitions": 1, **settings})
        assert status in (400, 501), (settings, answer)


# --- handlers that fail ----------------------------------------------------------------------


def declare_failed(client: Client, name: str) -> None:
    client.channel.exchange_declare(name, "fanout", durable=True)
    client.channel.queue_declare(f"{name}-queue", durable=True)
    client.channel.queue_bind(f"{name}-queue", name)


def test_what_a_client_rejects_goes_to_the_retry_exchange(
    cluster: LocalCluster, client: Opened
) -> None:
    """The key goes on meanwhile, nothing is parked, and the copy names the group."""
    sender, reader = client(1), client(2, prefetch=100)
    declare_failed(sender, "failed")
    create(cluster, "logs", 1, **WEAK, **{"retry-exchange": "failed"})
    reader.consume("logs/g")
    sender.publish("logs", "a1", "a2", "b1")
    reader.wait("a1", "a2", "b1")
    reader.nack(requeue=False)
    reader.ack()
    reader.ack()
    until(lambda: lag(cluster, "logs") == 0, "a1 is not acknowledged")
    _, properties, body = sender.channel.basic_get("failed-queue")
    assert body == b"a1"
    death = properties.headers["x-death"][0]
    assert (death["queue"], death["reason"], death["count"]) == ("logs/g", "rejected", 1)
    assert death["exchange"] == "logs"
    assert parked(cluster, "logs") == []


def test_a_returned_message_does_not_hold_its_key(cluster: LocalCluster, client: Opened) -> None:
    """It comes again, as often as the limit says, and goes to the retry exchange then."""
    sender, reader = client(1), client(3, prefetch=1)
    declare_failed(sender, "again")
    create(cluster, "tries", 1, **WEAK, **{"retry-exchange": "again"})
    sender.publish("tries", "a1", "a2", "a3")
    reader.consume("tries/g", arguments={"x-delivery-limit": 2})
    reader.wait("a1")
    reader.nack(requeue=True)
    seen: list[str] = []

    def next_one() -> None:
        until(lambda: reader.pump() and bool(reader.hand), "nothing comes")
        seen.append(reader.bodies[0])
        if seen[-1] == "a1":
            reader.nack(requeue=True)
        else:
            reader.ack()

    while seen.count("a1") < 2 or not {"a2", "a3"} <= set(seen):
        next_one()
    assert seen.count("a1") == 2
    assert seen.index("a2") < len(seen) - 1 or seen[-1] == "a2"
    until(lambda: lag(cluster, "tries") == 0, "a1 is not acknowledged")
    assert sender.channel.basic_get("again-queue")[2] == b"a1"


@pytest.mark.parametrize("start", ["before", "after"])
def test_nothing_is_acknowledged_without_a_copy(
    cluster: LocalCluster, client: Opened, start: str
) -> None:
    """The retry exchange is missing, or leads nowhere: the message stays until it does."""
    name = f"late-{start}"
    sender, reader = client(1), client(2, prefetch=10)
    if start == "before":
        sender.channel.exchange_declare(name, "fanout", durable=True)
    create(cluster, f"topic-{name}", 1, **WEAK, **{"retry-exchange": name})
    reader.consume(f"topic-{name}/g")
    sender.publish(f"topic-{name}", "a1")
    reader.wait("a1")
    reader.nack(requeue=False)
    reader.pump()
    assert lag(cluster, f"topic-{name}") == 1
    declare_failed(sender, name)
    until(lambda: lag(cluster, f"topic-{name}") == 0, "the copy does not come")
    assert sender.channel.basic_get(f"{name}-queue")[2] == b"a1"


def test_a_handler_that_raises_sends_its_message_to_a_retry_topic(
    cluster: LocalCluster, columnar: ColumnarClient, client: Opened
) -> None:
    create(cluster, "events.retry", 2, **WEAK)
    create(cluster, "events", 1, **WEAK, **{"retry-exchange": "events.retry"})
    client().publish("events", "a1", "a2", "b1", "a3")
    handled: list[bytes] = []
    tried: list[bytes] = []
    with TopicConsumer(columnar, "events", "g", retries=1, retry_ms=10, lanes=2) as consumer:

        def handle(ctx: TopicDelivery) -> None:
            tried.append(ctx.body)
            if ctx.body == b"a1":
                raise ValueError("a1 cannot be handled")
            handled.append(ctx.body)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(consumer.run, handle)
            # A member that leaves leaves what fails to the next one, so it stays until then.
            until(lambda: len(tried) == 5 and lag(cluster, "events") == 0, "a1 is not acknowledged")
            consumer.stop()
            running.result()
        assert sorted(handled) == [b"a2", b"a3", b"b1"]
    with TopicConsumer(columnar, "events.retry", "g") as retries:
        ctx = retries.poll(PATIENCE_S)
        assert ctx is not None
        assert (ctx.key, ctx.body) == (b"a", b"a1")
        assert b"events/g" in (ctx.headers["x-first-death-queue"] or b"")
        ctx.ack()


def test_a_message_without_an_outcome_holds_nothing_else(
    cluster: LocalCluster, columnar: ColumnarClient, client: Opened
) -> None:
    create(cluster, "pending", 1, **WEAK, **{"retry-exchange": "failed-pending"})
    client().publish("pending", "a1", "a2", "a3")
    with TopicConsumer(columnar, "pending", "g", lanes=2) as consumer:
        first = consumer.poll(PATIENCE_S)
        assert first is not None
        assert first.body == b"a1"
        for body in (b"a2", b"a3"):
            ctx = consumer.poll(PATIENCE_S)
            assert ctx is not None
            assert ctx.body == body
            ctx.ack()
        first.ack()
        until(lambda: lag(cluster, "pending") == 0, "a1 is not acknowledged")
