"""Group consumers and readers of `convoymq.client` on three nodes, under a referee of order per
key: shared partitions, changes, killed nodes, failing handlers, seeks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import changed, create, path
from tests.faults.traffic import connect, until
from tests.key_order import Delivery, KeyOrder
from tests.ports import cluster_ports

BASE_PORT = cluster_ports()
KEYS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") != "convoy":
        pytest.skip("RabbitMQ has no ordered topics")
    with serving_cluster(tmp_path_factory.mktemp("topic-consumer"), BASE_PORT) as made:
        yield made


def config(cluster: LocalCluster, *nodes: int) -> ClientConfig:
    ports = [cluster.nodes[node - 1].amqp_port for node in nodes or (1, 2, 3)]
    return ClientConfig(tuple(f"127.0.0.1:{port}" for port in ports), spread=False)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(config(cluster)) as made:
        yield made


def publish(
    cluster: LocalCluster,
    topic: str,
    messages: Sequence[tuple[str, bytes]],
    headers: dict[str, Any] | None = None,
) -> None:
    """Each is an order key and a body; all are confirmed at the end."""
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.tx_select()
    properties = pika.BasicProperties(delivery_mode=2, headers=headers)
    for key, body in messages:
        channel.basic_publish(topic, key, body, properties)
    channel.tx_commit()
    connection.close()


def numbers(first: int, end: int) -> list[tuple[str, bytes]]:
    """Messages as the referee knows them."""
    return [(f"key-{n % KEYS}", b"%d" % n) for n in range(first, end)]


class Reader:
    """A consumer with a handler that notes what it gets, in a thread of its own."""

    def __init__(
        self, cluster: LocalCluster, topic: str, log: list[Delivery], *nodes: int, **more: Any
    ) -> None:
        self.client = Client(config(cluster, *nodes))
        self.consumer = TopicConsumer(self.client, topic, "g", **more)
        self.log = log
        self.epochs: dict[int, set[int]] = {}
        self.failure: Exception | None = None
        self.busy: set[bytes] = set()
        self.overlaps: list[bytes] = []
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self.consumer.run(self.handle)
        except Exception as error:
            self.failure = error

    def handle(self, ctx: TopicDelivery) -> None:
        with self.lock:
            if ctx.key in self.busy:
                self.overlaps.append(ctx.key)
            self.busy.add(ctx.key)
            self.log.append(Delivery(int(ctx.body), str(ctx.order_token)))
            self.epochs.setdefault(ctx.pid, set()).add(ctx.epoch)
        with self.lock:
            self.busy.discard(ctx.key)

    @property
    def pids(self) -> set[int]:
        return set(self.consumer.leases)

    def close(self) -> None:
        self.consumer.close()
        self.thread.join(10.0)
        self.client.close()
        assert not self.thread.is_alive()
        assert self.failure is None, self.failure
        assert not self.overlaps, "two messages of a key were handled at once"


Opened = Callable[..., Reader]


@pytest.fixture
def reader(cluster: LocalCluster) -> Iterator[Opened]:
    made: list[Reader] = []

    def opened(*arguments: Any, **more: Any) -> Reader:
        made.append(Reader(cluster, *arguments, **more))
        return made[-1]

    yield opened
    for each in made:
        each.consumer.close(timeout_s=0.1)


def judged(log: list[Delivery], count: int) -> None:
    """Waits until all numbers below `count` are delivered, and checks their order."""
    until(lambda: len({each.number for each in list(log)}) == count, f"{len(log)} of {count}")
    referee = KeyOrder(KEYS)
    referee.take(log)
    assert not referee.violations, referee.violations[:5]
    assert not referee.missing(range(count))


def lag(cluster: LocalCluster, topic: str) -> int:
    status, rows = call(cluster, "GET", path(topic, "groups", "g", "lag"))
    assert status == 200, rows
    return sum(row["lag"] for row in rows)


def test_two_members_share_a_topic_and_follow_a_split(
    cluster: LocalCluster, reader: Opened
) -> None:
    create(cluster, "shared", 2)
    log: list[Delivery] = []
    publish(cluster, "shared", numbers(0, 300))
    first = reader("shared", log, 1)
    until(lambda: len(log) > 50, "nothing comes")
    second = reader("shared", log, 2)
    until(lambda: len(first.pids) == len(second.pids) == 1, "the partitions are not shared")
    publish(cluster, "shared", numbers(300, 600))
    changed(cluster, "shared", "split", pid=0)
    publish(cluster, "shared", numbers(600, 900))
    judged(log, 900)
    assert {0, 1, 2, 3} == set(first.epochs) | set(second.epochs)
    first.close()
    until(lambda: second.pids == {1, 2, 3}, "the other one takes over")
    publish(cluster, "shared", numbers(900, 1000))
    judged(log, 1000)
    until(lambda: lag(cluster, "shared") == 0, "not all is acknowledged")
    second.close()
