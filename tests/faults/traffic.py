"""Clients under faults: a publisher and consumers that go on until told to stop, and a ledger.

The publisher keeps a bounded number of messages unconfirmed and publishes them again, in order,
after every lost connection. Each consumer acknowledges in bundles and comes back to its nodes.
`Traffic.check` holds what they saw against the promises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster, LocalNode
from convoymq.model.errors import Unavailable
from tests.patience import PATIENCE_S, pause_s

PUMP_S = 0.01
PER_PUMP = 15
ACK_EVERY = 20
PER_TRANSACTION = 40
RETRY_S = 0.05

# Lost connections are what these tests are about; pika reports each with a traceback.
logging.getLogger("pika").setLevel(logging.CRITICAL)


def until(
    condition: Callable[[], object],
    what: str = "what was waited for did not come",
    deadline_s: float = PATIENCE_S,
) -> None:
    """Waits for a condition; an answer that is not there yet counts as no."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(Unavailable, LookupError, OSError, pika.exceptions.AMQPError):
            if condition():
                return
        assert time.monotonic() < began + deadline_s, what
        time.sleep(pause_s(began))


def parameters(port: int, **more: Any) -> pika.ConnectionParameters:
    """How tests connect: no heartbeats, so that only what the broker does ends a connection."""
    return pika.ConnectionParameters(
        "127.0.0.1", port, heartbeat=0, socket_timeout=5, blocked_connection_timeout=None, **more
    )


def connect(cluster: LocalCluster, number: int, **more: Any) -> pika.BlockingConnection:
    """Opens a connection to a node that runs; tries again while the node is not ready."""
    made: list[pika.BlockingConnection] = []
    to = parameters(cluster.nodes[number - 1].amqp_port, **more)

    def attempt() -> bool:
        made.append(pika.BlockingConnection(to))
        return True

    until(attempt, f"no connection to node {number}")
    return made[0]


def name_of(cluster: LocalCluster, number: int, at: int = 0) -> str:
    """Name of a node, as node `at` knows it; 0 = the first one that answers."""
    rows = cluster.api("nodes", at or None)
    return next(str(row["name"]) for row in rows if row["id"] == number)


def declare(
    cluster: LocalCluster, number: int, queue: str, arguments: dict[str, Any] | None = None
) -> None:
    """Declares a quorum queue on a node, which thereby leads it at first."""
    connection = connect(cluster, number)
    connection.channel().queue_declare(
        queue, durable=True, arguments={"x-queue-type": "quorum", **(arguments or {})}
    )
    connection.close()


def fill(
    cluster: LocalCluster, number: int, queue: str, count: int, size: int, first: int = 0
) -> None:
    """Publishes `count` numbers from `first` on, padded to `size`, as transactions: all confirmed
    at the end."""
    connection = connect(cluster, number)
    channel = connection.channel()
    channel.tx_select()
    for i in range(count):
        body = padded(first + i, size)
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
        if i % PER_TRANSACTION == PER_TRANSACTION - 1:
            channel.tx_commit()
    channel.tx_commit()
    connection.close()


def drain(cluster: LocalCluster, number: int, queue: str, least: int, size: int) -> list[int]:
    """Takes and acknowledges all that a queue has, at least so many; every body must be whole."""
    found: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    connection = connect(cluster, number)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=200)
    for method, _, body in channel.consume(queue, inactivity_timeout=0.2):
        if method is None:
            assert time.monotonic() < deadline, f"{len(found)} of {least} messages came"
            if len(found) >= least and is_empty(cluster, queue):
                break
            continue
        found.append(int(body))
        assert body == padded(found[-1], size)
        channel.basic_ack(method.delivery_tag)
    connection.close()
    return found


def is_empty(cluster: LocalCluster, queue: str) -> bool:
    """Whether the queue's leader, if there is one just now, has no message."""
    with contextlib.suppress(Unavailable, LookupError):
        return cluster.messages_in(queue) == 0
    return False


def padded(number: int, size: int) -> bytes:
    """The body of message `number`."""
    return (b"%d" % number).ljust(size)


def log_has(cluster: LocalCluster, number: int, *words: str) -> bool:
    """Whether one line of a node's log has all the words."""
    text = cluster.log_file(number).read_text("utf-8", "replace")
    return any(all(word in line for word in words) for line in text.splitlines())


def counter(cluster: LocalCluster, number: int, name: str) -> int:
    """A number of a node's own status."""
    return int(cluster.api("convoy/node", number)[name])


def in_step(cluster: LocalCluster) -> None:
    """Waits until every replica on a running node has all that is committed."""
    until(
        lambda: all(
            counter(cluster, node.number, "replicas_behind") == 0
            and sum(counter(cluster, n.number, "groups_led") for n in running(cluster))
            == counter(cluster, node.number, "groups_led")
            + counter(cluster, node.number, "groups_followed")
            for node in running(cluster)
        ),
        "a replica does not catch up",
    )


def running(cluster: LocalCluster) -> list[LocalNode]:
    """The nodes whose processes run."""
    return [node for node in cluster.nodes if node.pid is not None]


class _Client(threading.Thread):
    """A pika connection in a thread of its own that dials again until it is stopped."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.ports = ports
        self.attempt = 0
        self.stopping = False
        self.failure: BaseException | None = None
        self.blocked = False
        self.connection: Any = None

    def run(self) -> None:
        try:
            while not self.stopping:
                port = self.ports[self.attempt % len(self.ports)]
                self.attempt += 1
                self.connection = pika.SelectConnection(
                    parameters(port),
                    on_open_callback=self._on_open,
                    on_open_error_callback=lambda c, _: c.ioloop.stop(),
                    on_close_callback=lambda c, _: c.ioloop.stop(),
                )
                self.connection.ioloop.start()
                self.connection.ioloop.close()
                self.blocked = False
                self.on_lost()
                if not self.stopping:
                    time.sleep(RETRY_S)
        except BaseException as error:
            self.failure = error

    def _on_open(self, connection: Any) -> None:
        connection.add_on_connection_blocked_callback(lambda *_: self._on_blocked(True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._on_blocked(False))
        connection.channel(on_open_callback=self._on_channel)
        connection.ioloop.call_later(PUMP_S, self._tick)

    def _on_blocked(self, blocked: bool) -> None:
        self.blocked = blocked

    def _on_channel(self, channel: Any) -> None:
        # A channel that the broker closes is as good as a lost connection.
        channel.add_on_close_callback(lambda *_: self._drop())
        self.on_open(channel)

    def _drop(self) -> None:
        if self.connection.is_open:
            self.connection.close()

    def _tick(self) -> None:
        if self.stopping:
            self._drop()
            return
        self.on_tick()
        self.connection.ioloop.call_later(PUMP_S, self._tick)

    def on_open(self, channel: Any) -> None:
        raise NotImplementedError

    def on_tick(self) -> None:
        raise NotImplementedError

    def on_lost(self) -> None:
        raise NotImplementedError


class Publisher(_Client):
    """Publishes 0, 1, 2, … as bodies, padded to `size` bytes, with confirms."""

    def __init__(self, ports: Sequence[int], queue: str, size: int, window: int) -> None:
        super().__init__(ports)
        self.queue = queue
        self.size = size
        self.window = window
        self.next = 0
        self.ending = False
        self.channel: Any = None
        self.unconfirmed: dict[int, int] = {}
        self.again: list[int] = []
        self.confirmed: set[int] = set()
        self.resent: set[int] = set()

    def on_open(self, channel: Any) -> None:
        self.tag = 0
        channel.confirm_delivery(self.on_confirm, callback=lambda _: self.ready(channel))

    def ready(self, channel: Any) -> None:
        self.channel = channel

    def on_confirm(self, frame: Any) -> None:
        method = frame.method
        tags = (
            [tag for tag in self.unconfirmed if tag <= method.delivery_tag]
            if method.multiple
            else [method.delivery_tag]
        )
        for tag in tags:
            number = self.unconfirmed.pop(tag)
            if isinstance(method, pika.spec.Basic.Nack):
                self.again.append(number)
                self.resent.add(number)
            else:
                self.confirmed.add(number)

    def on_tick(self) -> None:
        if self.channel is None or not self.channel.is_open or self.blocked:
            return
        for _ in range(PER_PUMP):
            if len(self.unconfirmed) >= self.window:
                return
            if self.again:
                number = self.again.pop(0)
            elif not self.ending:
                number = self.next
                self.next += 1
            else:
                return
            self.tag += 1
            self.unconfirmed[self.tag] = number
            self.publish(number)

    def publish(self, number: int) -> None:
        """Publishes one message; its confirm comes later."""
        self.channel.basic_publish(
            "", self.queue, padded(number, self.size), pika.BasicProperties(delivery_mode=2)
        )

    def on_lost(self) -> None:
        self.channel = None
        self.resent.update(self.unconfirmed.values())
        self.again = sorted({*self.unconfirmed.values(), *self.again})
        self.unconfirmed.clear()


class Consumer(_Client):
    """Notes (number, redelivered) of every delivery and acknowledges in bundles."""

    def __init__(self, ports: Sequence[int], queue: str, size: int, prefetch: int) -> None:
        super().__init__(ports)
        self.queue = queue
        self.size = size
        self.prefetch = prefetch
        self.deliveries: list[tuple[int, bool]] = []
        self.unacked = 0
        self.tag = 0
        self.channel: Any = None

    def on_open(self, channel: Any) -> None:
        self.channel = channel
        channel.add_on_cancel_callback(lambda _: self._drop())
        channel.basic_qos(prefetch_count=self.prefetch)
        channel.basic_consume(self.queue, self.on_message)

    def on_message(self, channel: Any, method: Any, _: Any, body: bytes) -> None:
        number = int(body)
        assert body == padded(number, self.size), f"message {number} is damaged"
        self.deliveries.append((number, method.redelivered))
        self.tag = method.delivery_tag
        self.unacked += 1
        if self.unacked >= ACK_EVERY:
            self.acknowledge()

    def acknowledge(self) -> None:
        self.channel.basic_ack(self.tag, multiple=True)
        self.unacked = 0

    def on_tick(self) -> None:
        if self.unacked and self.channel.is_open:
            self.acknowledge()

    def on_lost(self) -> None:
        self.unacked = 0


class Traffic:
    """One publisher and some consumers of a queue. As a context manager it never leaves threads.

    Args:
        publish_at: nodes that the publisher tries, in turn.
        consume_at: for each consumer the nodes that it tries.
        filled: what `fill` has put into the queue; the publisher goes on from there.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        queue: str,
        *,
        publish_at: Sequence[int] = (2,),
        consume_at: Sequence[Sequence[int]] = ((1,), (2,), (3,)),
        size: int = 100,
        window: int = 300,
        prefetch: int = 100,
        filled: int = 0,
    ) -> None:
        ports = [node.amqp_port for node in cluster.nodes]
        self.cluster = cluster
        self.queue = queue
        self.publisher = Publisher([ports[n - 1] for n in publish_at], queue, size, window)
        self.publisher.next = filled
        self.publisher.confirmed.update(range(filled))
        self.consumers = [
            Consumer([ports[n - 1] for n in nodes], queue, size, prefetch) for nodes in consume_at
        ]

    def __enter__(self) -> Traffic:
        for client in (*self.consumers, self.publisher):
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        for client in (self.publisher, *self.consumers):
            client.stopping = True
        for client in (self.publisher, *self.consumers):
            client.join(10.0)

    @property
    def confirmed(self) -> int:
        """Messages confirmed so far."""
        return len(self.publisher.confirmed)

    @property
    def delivered(self) -> int:
        """Deliveries so far, repeats included."""
        return sum(len(consumer.deliveries) for consumer in self.consumers)

    def goes_on(self, count: int = 150) -> None:
        """Waits until so many more are confirmed, and until something more is delivered."""
        confirmed, delivered = self.confirmed, self.delivered
        until(lambda: self.confirmed >= confirmed + count, f"confirms stand still: {self}")
        if self.consumers:
            until(lambda: self.delivered > delivered, f"deliveries stand still: {self}")

    def all_consume(self, count: int = 50) -> None:
        """Waits until every consumer got so many more."""
        for consumer in self.consumers:
            deliveries = consumer.deliveries
            target = len(deliveries) + count

            def enough(got: list[tuple[int, bool]] = deliveries, least: int = target) -> bool:
                return len(got) >= least

            until(enough, f"a consumer starves: {self}")

    def finish(self) -> None:
        """Lets the publisher end, waits for all confirms and deliveries, stops, and checks."""
        self.publisher.ending = True
        publisher = self.publisher
        until(lambda: len(publisher.confirmed) == publisher.next, f"not all confirmed: {self}")
        if self.consumers:
            until(lambda: not self.missing(), f"not all delivered: {self}")
            until(lambda: self.cluster.messages_in(self.queue) == 0, f"not all settled: {self}")
        self.__exit__()
        self.check()

    def missing(self) -> set[int]:
        """Confirmed, and not seen by any consumer."""
        seen = {n for consumer in self.consumers for n, _ in list(consumer.deliveries)}
        return self.publisher.confirmed - seen

    def check(self) -> None:
        """Nothing lost, nothing delivered twice without a word, order kept."""
        for client in (self.publisher, *self.consumers):
            assert client.failure is None, client.failure
        if not self.consumers:
            return
        assert not self.missing()
        resent = self.publisher.resent
        first: set[int] = set()
        for consumer in self.consumers:
            last = -1
            for number, redelivered in consumer.deliveries:
                if redelivered or number in resent:
                    continue
                assert number > last, f"{number} after {last}"
                last = number
                assert number not in first, f"{number} delivered twice without the flag"
                first.add(number)

    def __str__(self) -> str:
        clients = (self.publisher, *self.consumers)
        return (
            f"published {self.publisher.next}, confirmed {self.confirmed}, delivered "
            f"{[len(consumer.deliveries) for consumer in self.consumers]}, "
            f"failures {[client.failure for client in clients if client.failure]}"
        )
