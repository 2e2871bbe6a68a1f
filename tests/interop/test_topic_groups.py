"""Members of topics' groups with pika on three nodes: what they return, reject and leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.topics.rules.order_token import OrderToken
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import changed, create, path
from tests.faults.traffic import until
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") != "convoy":
        pytest.skip("RabbitMQ has no ordered topics")
    with serving_cluster(tmp_path_factory.mktemp("topic-groups"), BASE_PORT) as made:
        yield made


class Client:
    """A connection with one channel, and what its consumer got and has not settled."""

    def __init__(self, cluster: LocalCluster, node: int, prefetch: int = 0) -> None:
        port = cluster.nodes[node - 1].amqp_port
        parameters = pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)
        self.connection = pika.BlockingConnection(parameters)
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        if prefetch:
            self.channel.basic_qos(prefetch_count=prefetch)
        self.hand: list[tuple[Any, Any, bytes]] = []

    def consume(self, queue: str, **more: Any) -> str:
        tag: str = self.channel.basic_consume(
            queue,
            lambda _, method, properties, body: self.hand.append((method, properties, body)),
            **more,
        )
        return tag

    def publish(self, topic: str, *messages: str, headers: dict[str, Any] | None = None) -> None:
        """Each message is its key and a number."""
        for message in messages:
            properties = pika.BasicProperties(delivery_mode=2, headers=headers)
            self.channel.basic_publish(topic, message[0], message.encode(), properties)

    def pump(self) -> bool:
        self.connection.process_data_events(time_limit=0.02)
        return True

    @property
    def bodies(self) -> list[str]:
        return [body.decode() for _, _, body in self.hand]

    def wait(self, *bodies: str) -> None:
        """Waits until the client has just these."""
        until(lambda: self.pump() and self.bodies == list(bodies), f"{bodies} did not come: {self}")

    def take(self) -> tuple[Any, Any, bytes]:
        return self.hand.pop(0)

    def ack(self) -> None:
        self.channel.basic_ack(self.take()[0].delivery_tag)

    def nack(self, *, requeue: bool) -> None:
        self.channel.basic_nack(self.take()[0].delivery_tag, requeue=requeue)

    def __str__(self) -> str:
        return f"it has {self.bodies}"


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


Opened = Callable[..., Client]


def parked(cluster: LocalCluster, topic: str) -> list[tuple[str, int]]:
    status, rows = call(cluster, "GET", path(topic, "groups", "g", "park"))
    assert status == 200, rows
    return [(row["key"], row["messages"]) for row in rows]


def owners(cluster: LocalCluster, topic: str) -> dict[int, str]:
    status, rows = call(cluster, "GET", path(topic, "groups"))
    assert status == 200, rows
    return {owner["pid"]: owner["member"] for row in rows for owner in row["owners"]}


def test_a_returned_message_comes_again_before_the_rest_of_its_key(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "returned", 1)
    client().publish("returned", "a1", "a2", "b1")
    reader = client(2, prefetch=1)
    reader.consume("returned/g")
    reader.wait("a1")
    reader.nack(requeue=True)
    reader.wait("b1")
    reader.ack()
    reader.wait("a1")
    method, properties, _ = reader.hand[0]
    assert method.redelivered
    assert properties.headers["x-delivery-count"] == 1
    assert properties.headers["x-offset"] == 1
    reader.ack()
    reader.wait("a2")
    assert not reader.hand[0][0].redelivered
    reader.ack()


def test_a_rejected_message_is_parked_with_those_behind_it_until_its_key_resumes(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "rejected", 1)
    publisher = client()
    publisher.publish("rejected", "a1", "b1", "a2")
    reader = client(3, prefetch=10)
    reader.consume("rejected/g", arguments={"x-key-in-flight": 0})
    reader.wait("a1", "b1", "a2")
    reader.nack(requeue=False)
    reader.ack()
    until(lambda: reader.pump() and parked(cluster, "rejected") == [("a", 1)], "a1 is not parked")
    # What the client had already it may process; what comes now waits.
    reader.ack()
    publisher.publish("rejected", "a3", "b2")
    reader.wait("b2")
    reader.ack()
    until(lambda: reader.pump() and parked(cluster, "rejected") == [("a", 2)], "a3 is not parked")
    status, answer = call(
        cluster, "POST", path("rejected", "groups", "g", "park", "resume"), {"keys": ["a"]}
    )
    assert status in (200, 204), answer
    reader.wait("a1")
    assert reader.hand[0][1].headers["x-offset"] == 1
    reader.ack()
    reader.wait("a3")
    token = OrderToken.parse(reader.hand[0][1].headers["x-order-token"])
    assert (token.created_version, token.offset) == (0, 4)
    reader.ack()
    until(lambda: reader.pump() and not parked(cluster, "rejected"), "a key is still parked")
    publisher.publish("rejected", "a4")
    reader.wait("a4")


def test_a_message_that_fails_too_often_is_parked_and_moves_with_its_range(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "failing", 1)
    publisher = client()
    publisher.publish("failing", "a1", "a2")
    reader = client(2, prefetch=1)
    reader.consume("failing/g", arguments={"x-delivery-limit": 1})
    for _ in range(2):
        reader.wait("a1")
        reader.nack(requeue=True)
    until(lambda: reader.pump() and parked(cluster, "failing") == [("a", 2)], "it is not parked")
    changed(cluster, "failing", "split", pid=0)
    publisher.publish("failing", "a3", "b1", "c1", "d1")
    got: list[str] = []

    def others() -> bool:
        reader.pump()
        while reader.hand:
            got.append(reader.hand[0][2].decode())
            reader.ack()
        return sorted(got) == ["b1", "c1", "d1"]

    until(others, f"the others do not come: {got}")
    until(lambda: reader.pump() and parked(cluster, "failing") == [("a", 3)], "a3 is not parked")
    call(cluster, "POST", path("failing", "groups", "g", "park", "resume"), {"keys": ["a"]})
    for number in (1, 2, 3):
        reader.wait(f"a{number}")
        reader.ack()


@pytest.mark.parametrize("arguments", [None, {"x-key-in-flight": 1}])
def test_one_message_of_a_key_at_a_time_with_any_prefetch(
    cluster: LocalCluster, client: Opened, arguments: dict[str, int] | None
) -> None:
    topic = "single" if arguments else "strict"
    create(cluster, topic, 1)
    client().publish(topic, "a1", "a2", "b1", "a3")
    reader = client(2, prefetch=100)
    reader.consume(f"{topic}/g", arguments=arguments)
    until(lambda: reader.pump() and len(reader.hand) == 2, "two keys do not come")
    assert [body for _, _, body in reader.hand] == [b"a1", b"b1"]
    reader.nack(requeue=True)
    until(lambda: reader.pump() and len(reader.hand) == 2, "it does not come again")
    assert [body for _, _, body in reader.hand] == [b"b1", b"a1"]
    reader.ack()
    for body in ("a1", "a2", "a3"):
        reader.wait(body)
        reader.ack()


def test_a_client_that_asks_for_no_limit_has_several_messages_of_a_key(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "several", 1)
    create(cluster, "logs", 1, mode="weak")
    for topic, arguments in (("several", {"x-key-in-flight": 0}), ("logs", None)):
        client().publish(topic, "a1", "a2", "a3")
        reader = client(2, prefetch=100)
        reader.consume(f"{topic}/g", arguments=arguments)
        until(lambda reader=reader: reader.pump() and len(reader.hand) == 3, "they do not come")


def test_a_rejected_message_does_not_come_behind_later_ones_of_its_key(
    cluster: LocalCluster, client: Opened
) -> None:
    """The first of six is rejected with a prefetch of 50, and resumed when all are parked."""
    create(cluster, "poisoned", 1)
    client().publish("poisoned", *(f"a{n}" for n in range(6)))
    reader = client(2, prefetch=50)
    reader.consume("poisoned/g")
    reader.wait("a0")
    reader.nack(requeue=False)
    until(lambda: reader.pump() and parked(cluster, "poisoned") == [("a", 6)], "not all are parked")
    assert not reader.hand
    call(cluster, "POST", path("poisoned", "groups", "g", "park", "resume"), {"keys": ["a"]})
    for number in range(6):
        reader.wait(f"a{number}")
        method, _, _ = reader.hand[0]
        assert method.redelivered == (number == 0), "the others come for the first time"
        reader.ack()


def test_members_share_partitions_and_take_over_what_one_leaves(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "shared", 4)
    readers = [client(node, prefetch=4) for node in (1, 2, 3)]
    for reader in readers:
        reader.consume("shared/g")

    def spread(members: int) -> bool:
        for reader in readers:
            if reader.connection.is_open:
                reader.pump()
        found = owners(cluster, "shared")
        return len(found) == 4 and len(set(found.values())) == members

    until(lambda: spread(3), "the partitions are not shared")
    keys = "abcdefghijklmnop"
    publisher = client()
    publisher.publish("shared", *(f"{key}1" for key in keys))
    until(lambda: spread(3) and readers[0].hand, "the first member gets nothing")
    # It has messages, and says nothing of them.
    left = set(readers[0].bodies)
    readers[0].connection.close()
    publisher.publish("shared", *(f"{key}2" for key in keys))
    got: list[str] = []

    def rest() -> bool:
        for reader in readers[1:]:
            reader.pump()
            while reader.hand:
                got.append(reader.hand[0][2].decode())
                reader.ack()
        return len(set(got)) == 2 * len(keys)

    until(rest, "not all messages come")
    assert left <= set(got)
    for key in keys:
        assert [body for body in dict.fromkeys(got) if body[0] == key] == [f"{key}1", f"{key}2"]
    until(lambda: spread(2), "a partition has no owner")


def test_acknowledgements_of_many_are_one_range(cluster: LocalCluster, client: Opened) -> None:
    create(cluster, "ranges", 1)
    client().publish("ranges", *(f"{'abc'[n % 3]}{n}" for n in range(60)))
    reader = client(2, prefetch=20)
    reader.consume("ranges/g", arguments={"x-key-in-flight": 0})
    got: list[str] = []
    while len(got) < 60:
        until(lambda: reader.pump() and len(reader.hand) == 20, "the window is not filled")
        got += reader.bodies
        reader.channel.basic_ack(reader.hand[-1][0].delivery_tag, multiple=True)
        reader.hand.clear()
    assert [int(body[1:]) for body in got] == list(range(60))
    declared = reader.channel.queue_declare("ranges/g", passive=True).method
    until(
        lambda: reader.channel.queue_declare("ranges/g", passive=True).method.message_count == 0,
        "acknowledged messages count as ready",
    )
    assert declared.consumer_count == 1


def test_headers_of_the_broker_replace_those_of_a_publisher(
    cluster: LocalCluster, client: Opened
) -> None:
    create(cluster, "headers", 1)
    set_by_publisher = {"x-pid": 77, "x-order-token": "mine", "other": "kept", "x-lp": "no"}
    client().publish("headers", "a1", headers=set_by_publisher)
    reader = client(2)
    reader.consume("headers/g")
    reader.wait("a1")
    headers = reader.hand[0][1].headers
    assert headers.pop("x-lp") in range(1024)
    assert headers == {
        "other": "kept",
        "x-pid": 0,
        "x-offset": 1,
        "x-route-version": 0,
        "x-order-token": str(OrderToken(0, 1)),
    }


def test_a_new_group_may_begin_behind_what_is_there(cluster: LocalCluster, client: Opened) -> None:
    create(cluster, "begun", 1)
    publisher = client()
    publisher.publish("begun", "a1")
    reader = client(2)
    reader.consume("begun/g", arguments={"x-stream-offset": "next"})
    until(lambda: reader.pump() and owners(cluster, "begun"), "nobody owns the partition")
    publisher.publish("begun", "a2")
    reader.wait("a2")


def test_consumers_hear_that_their_topic_is_gone(cluster: LocalCluster, client: Opened) -> None:
    create(cluster, "gone", 1)
    reader = client(2)
    cancelled: list[object] = []
    reader.channel.add_on_cancel_callback(cancelled.append)
    reader.consume("gone/g")
    status, answer = call(cluster, "DELETE", path("gone"))
    assert status == 204, answer
    until(lambda: reader.pump() and cancelled, "nobody cancels the consumer")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        reader.channel.queue_declare("gone/g", passive=True)
    assert caught.value.reply_code == 404


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda c: c.basic_consume("refused/g", print, auto_ack=True), "acknowledgement"),
        (lambda c: c.basic_consume("refused/g", print, exclusive=True), "exclusive"),
        (
            lambda c: c.basic_consume("refused/g", print, arguments={"x-delivery-limit": "two"}),
            "x-delivery-limit",
        ),
        (
            lambda c: c.basic_consume("refused/g", print, arguments={"x-key-in-flight": 2}),
            "x-key-in-flight",
        ),
        (
            lambda c: c.basic_consume("refused/g", print, arguments={"x-stream-offset": 7}),
            "x-stream-offset",
        ),
        (lambda c: c.basic_get("refused/g"), "basic.get"),
        (lambda c: c.queue_purge("refused/g"), "queue.purge"),
        (lambda c: c.queue_delete("refused/g"), "queue.delete"),
    ],
)
def test_what_a_group_does_not_do_is_refused_by_name(
    cluster: LocalCluster, client: Opened, act: Callable[[Any], object], text: str
) -> None:
    if call(cluster, "GET", path("refused"))[0] == 404:
        create(cluster, "refused", 1)
    channel = client().channel
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        act(channel)
    assert caught.value.reply_code == 406
    assert text in caught.value.reply_text
