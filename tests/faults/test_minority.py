"""One node of three is left: what clients hear, how long they wait, and that nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power
from tests.faults.traffic import connect
from tests.forked_nodes import ForkedCluster
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
SETTINGS = {
    "operation_timeout": "1000",
    "quorum_queue.publish_timeout_without_leader": "2500",
    "quorum_queue.consumer_timeout_without_leader": "2500",
}
PATIENT = SETTINGS | {
    "quorum_queue.publish_timeout_without_leader": "0",
    "quorum_queue.consumer_timeout_without_leader": "0",
    "quorum_queue.publish_register_timeout": "2500",
}
QUEUE = "orders"


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    settings = getattr(request, "param", SETTINGS)
    with ForkedCluster(tmp_path, 3, BASE_PORT, settings) as made:
        made.wait_ready()
        yield made


class Consumer:
    """A consumer that collects what it hears, on a connection of its own."""

    def __init__(self, cluster: LocalCluster, **properties: Any) -> None:
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.connection = connect(cluster, 1, client_properties=properties or None)
        channel = self.connection.channel()
        channel.add_on_cancel_callback(self._on_cancel)
        channel.basic_consume(QUEUE, self._on_message, auto_ack=True)

    def _on_cancel(self, _frame: Any) -> None:
        self.cancelled += 1

    def _on_message(self, _channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        self.bodies.append(body)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.bodies, self.cancelled)
            self.connection.process_data_events(0.05)


class Confirms:
    """A confirming channel whose answers are collected instead of waited for."""

    def __init__(self, connection: Any) -> None:
        self.acked: list[int] = []
        self.nacked: list[int] = []
        self._connection = connection
        self._channel = connection.channel()
        # pika's blocking channel waits for each publish; the channel below it does not.
        self._channel._impl.confirm_delivery(self._heard)
        self._last = 0

    def _heard(self, frame: Any) -> None:
        method = frame.method
        answered = self.nacked if isinstance(method, pika.spec.Basic.Nack) else self.acked
        known = len(self.acked) + len(self.nacked)
        first = known + 1 if method.multiple else method.delivery_tag
        answered.extend(range(first, method.delivery_tag + 1))

    def publish(self, count: int, queue: str = QUEUE) -> None:
        for _ in range(count):
            self._last += 1
            properties = pika.BasicProperties(delivery_mode=2)
            self._channel._impl.basic_publish("", queue, b"%d" % self._last, properties)

    def publish_until_confirmed(self) -> bytes:
        """Returns the body that was confirmed."""
        while not self.acked:
            self._last += 1
            body = b"again %d" % self._last
            self._channel._impl.basic_publish("", QUEUE, body)
            self.until(lambda: len(self.acked) + len(self.nacked) == self._last)
        return body

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.acked, self.nacked)
            self._connection.process_data_events(0.05)


def refused(cluster: LocalCluster, action: Callable[[Any], object]) -> tuple[int, str]:
    connection = connect(cluster, 1)
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as raised:
        action(connection.channel())
    return raised.value.reply_code, raised.value.reply_text


@pytest.mark.parametrize("leader", [1, 2])
def test_publishers_and_consumers_hear_in_time_that_nobody_leads(
    cluster: LocalCluster, leader: int
) -> None:
    with closing(connect(cluster, leader)) as first:
        first.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    connection = connect(cluster, 1)
    known = Confirms(connection)
    known.publish(1)
    known.until(lambda: known.acked == [1])
    hears = Consumer(cluster)
    stays = Consumer(cluster, capabilities={"consumer_cancel_notify": False})
    cut_power(cluster, 2, 3)
    known.publish(5)
    fresh = Confirms(connection)
    fresh.publish(2)

    known.until(lambda: known.nacked == [2, 3, 4, 5, 6])
    fresh.until(lambda: fresh.nacked == [1, 2])
    known.publish(1)
    known.until(lambda: known.nacked == [2, 3, 4, 5, 6, 7])
    hears.until(lambda: hears.cancelled == 1)
    assert (known.acked, fresh.acked) == ([1], [])
    cluster.start_node(2)
    cluster.start_node(3)
    # What was nacked is published again, and one that was confirmed comes exactly once.
    retried = Confirms(connection)
    safe = retried.publish_until_confirmed()
    hears.connection.close()
    stays.until(lambda: safe in stays.bodies)
    assert (known.acked, fresh.acked, stays.cancelled) == ([1], [], 0)
    assert (hears.bodies + stays.bodies).count(safe) == 1
    connection.close()
    stays.connection.close()


@pytest.mark.parametrize("cluster", [PATIENT], indirect=True)
@pytest.mark.parametrize("leader", [1, 2])
def test_a_node_that_is_alone(cluster: LocalCluster, leader: int) -> None:
    with closing(connect(cluster, leader)) as first:
        first.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    connection = connect(cluster, 1)
    known = Confirms(connection)
    known.publish(1)
    known.until(lambda: known.acked == [1])
    cut_power(cluster, 2, 3)
    known.publish(5)
    fresh = Confirms(connection)
    fresh.publish(2)

    code, text = refused(cluster, lambda c: c.basic_consume(QUEUE, lambda *_: None))
    assert (code, text) == (
        541,
        "INTERNAL_ERROR - timed out consuming from quorum queue 'orders' in vhost '/'",
    )
    code, text = refused(cluster, lambda c: c.basic_get(QUEUE))
    assert (code, "timed out" in text) == (541, True)
    code, text = refused(cluster, lambda c: c.queue_purge(QUEUE))
    assert (code, "timed out" in text) == (541, True)
    assert refused(cluster, lambda c: c.queue_declare("other", durable=True))[0] == 541
    assert refused(cluster, lambda c: c.queue_delete(QUEUE))[0] == 541
    with closing(connect(cluster, 1)) as asking:
        assert asking.channel().queue_declare(QUEUE, passive=True).method.message_count in (0, 1)

    fresh.until(lambda: fresh.nacked == [1, 2])
    assert (known.acked, known.nacked, fresh.acked) == ([1], [], [])
    cluster.start_node(2)
    cluster.start_node(3)
    known.until(lambda: known.acked == [1, 2, 3, 4, 5, 6])
    assert (known.nacked, fresh.acked) == ([], [])
    connection.close()
