"""A publisher and a consumer group of an ordered topic, under a referee of order per key.

Message `number` has the key `number % keys`. The publisher publishes again, in order, what was not
confirmed before its connection was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pika  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call
from tests.faults.traffic import Consumer, Publisher, name_of, padded, until
from tests.key_order import Delivery, KeyOrder

KEYS = 24
FINISHED = ("done", "aborted")


def path(topic: str, *rest: object) -> str:
    """A path of the HTTP API below a topic of the virtual host `/`."""
    return "/".join(("topics/%2F", topic, *map(str, rest)))


def create(cluster: LocalCluster, topic: str, partitions: int, **more: object) -> None:
    """Creates a topic; waits while the rules of topics are not in force yet."""
    body = {"partitions": partitions, **more}
    until(lambda: _answers(cluster, "PUT", path(topic), body, 201), f"topic {topic} is not made")


def _answers(cluster: LocalCluster, method: str, path: str, body: object, wanted: int) -> bool:
    """Whether a request is answered so; other answers go to the output of the test."""
    status, content = call(cluster, method, path, body)
    if status != wanted:
        print(method, path, status, content)
    return status == wanted


def open_pids(cluster: LocalCluster, topic: str) -> list[int]:
    """The partitions of the newest version, by range."""
    status, rows = call(cluster, "GET", path(topic, "route"))
    assert status == 200, rows
    return [row["pid"] for row in rows]


def leader_of(cluster: LocalCluster, topic: str, pid: int) -> int:
    """Number of the node that leads an open partition; 0 while nobody does."""
    status, rows = call(cluster, "GET", path(topic, "route"))
    assert status == 200, rows
    name = next(row["node"] for row in rows if row["pid"] == pid)
    return next(
        (n.number for n in cluster.nodes if n.pid and name_of(cluster, n.number) == name), 0
    )


def begin(cluster: LocalCluster, topic: str, verb: str, **body: object) -> str:
    """Begins a change, as soon as no other one runs; returns its id."""
    found: list[Any] = []

    def begun() -> bool:
        found[:] = call(cluster, "POST", path(topic, verb), body)
        # A link of a node that is slow to answer is away for a moment.
        away = found[0] == 400 and found[1]["reason"].startswith("node_not_running")
        assert away or found[0] in (202, 409, 503), found
        return found[0] == 202

    until(begun, "the change does not begin")
    return str(found[1]["change_id"])


def finished(cluster: LocalCluster, topic: str, change: str) -> dict[str, Any]:
    """Waits for the end of a change and returns it; it must not have been given up."""
    found: dict[str, Any] = {}

    def done() -> bool:
        status, row = call(cluster, "GET", path(topic, "changes", change))
        if status == 200:
            found.update(row)
        return bool(found) and found["phase"] in FINISHED

    until(done, f"the change does not end: {found}")
    assert found["phase"] == "done", found
    return found


def changed(cluster: LocalCluster, topic: str, verb: str, **body: object) -> list[int]:
    """Carries a change out; returns its targets."""
    change = finished(cluster, topic, begin(cluster, topic, verb, **body))
    return [target["pid"] for target in change["targets"]]


class KeyedPublisher(Publisher):
    """Publishes numbers to an exchange, with their key as the routing key."""

    def __init__(
        self, ports: Sequence[int], exchange: str, size: int, window: int, keys: int
    ) -> None:
        super().__init__(ports, exchange, size, window)
        self.keys = keys

    def publish(self, number: int) -> None:
        key = f"key-{number % self.keys}"
        properties = pika.BasicProperties(delivery_mode=2)
        self.channel.basic_publish(self.queue, key, padded(number, self.size), properties)


class Member(Consumer):
    """One member of a group. Notes deliveries in a list that all members share."""

    def __init__(
        self, ports: Sequence[int], queue: str, size: int, prefetch: int, log: list[Delivery]
    ) -> None:
        super().__init__(ports, queue, size, prefetch)
        self.log = log
        self.pids: set[int] = set()

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.log.append(Delivery(int(body), properties.headers["x-order-token"]))
        self.pids.add(properties.headers["x-pid"])
        super().on_message(channel, method, properties, body)


class TopicTraffic:
    """As `traffic.Traffic`, for a topic and one of its groups.

    Args:
        publish_at: nodes that the publisher tries, in turn.
        consume_at: for each member the nodes that it tries.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        topic: str,
        *,
        group: str = "readers",
        publish_at: Sequence[int] = (2, 3, 1),
        consume_at: Sequence[Sequence[int]] = ((1, 2), (3, 2)),
        keys: int = KEYS,
        window: int = 200,
        prefetch: int = 60,
        size: int = 60,
    ) -> None:
        ports = [node.amqp_port for node in cluster.nodes]
        self.keys = keys
        self.log: list[Delivery] = []
        self.publisher = KeyedPublisher(
            [ports[n - 1] for n in publish_at], topic, size, window, keys
        )
        self.members = [
            Member([ports[n - 1] for n in nodes], f"{topic}/{group}", size, prefetch, self.log)
            for nodes in consume_at
        ]

    def __enter__(self) -> TopicTraffic:
        for client in (*self.members, self.publisher):
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        for client in (self.publisher, *self.members):
            client.stopping = True
        for client in (self.publisher, *self.members):
            client.join(10.0)

    def goes_on(self, count: int = 150) -> None:
        """Waits until so many more are confirmed, and until something more is delivered."""
        confirmed, delivered = len(self.publisher.confirmed), len(self.log)
        enough = confirmed + count
        until(lambda: len(self.publisher.confirmed) >= enough, f"confirms stand still: {self}")
        until(lambda: len(self.log) > delivered, f"deliveries stand still: {self}")

    def finish(self) -> KeyOrder:
        """Lets the publisher end, waits for all confirms and deliveries, stops, and checks."""
        publisher = self.publisher
        publisher.ending = True
        until(lambda: len(publisher.confirmed) == publisher.next, f"not all confirmed: {self}")
        until(lambda: not self._missing(), f"not all delivered: {self}")
        self.__exit__()
        for client in (publisher, *self.members):
            assert client.failure is None, client.failure
        referee = KeyOrder(self.keys, publisher.resent)
        referee.take(self.log)
        assert not referee.violations, referee.violations[:5]
        assert not referee.missing(publisher.confirmed)
        return referee

    def _missing(self) -> set[int]:
        return self.publisher.confirmed - {each.number for each in list(self.log)}

    def __str__(self) -> str:
        clients = (self.publisher, *self.members)
        failures = [client.failure for client in clients if client.failure]
        return (
            f"published {self.publisher.next}, confirmed {len(self.publisher.confirmed)}, "
            f"delivered {len(self.log)}, failures {failures}"
        )
