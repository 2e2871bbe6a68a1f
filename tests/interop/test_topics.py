"""Ordered topics with pika on three nodes: created over HTTP, published to, consumed by groups,
split, merged and moved while messages flow, and everything that is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.command import TOPICS
from convoymq.cli.ctl.main import main
from convoymq.client import Client, ClientConfig, errors
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from convoymq.client.topic_producer import TopicProducer
from convoymq.client.topics import TopicRoute
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import (
    TopicTraffic,
    changed,
    create,
    finished,
    leader_of,
    name_of,
    open_pids,
    path,
)
from tests.faults.traffic import until
from tests.interop.test_topic_consumer import ctx_like
from tests.key_order import Delivery, KeyOrder
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
LOGICAL = 1024
KEYS = 12
HALF = 240
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") != "convoy":
        pytest.skip("RabbitMQ has no ordered topics")
    with serving_cluster(tmp_path_factory.mktemp("topics"), BASE_PORT) as made:
        create(made, "first", 1)
        yield made


@pytest.fixture
def opened(cluster: LocalCluster) -> Iterator[Opened]:
    """Opens channels with confirms, each on a connection of its own."""
    made: list[Any] = []

    def channel(node: int = 1) -> Any:
        port = cluster.nodes[node - 1].amqp_port
        made.append(
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0))
        )
        found = made[-1].channel()
        found.confirm_delivery()
        return found

    yield channel
    for connection in made:
        if connection.is_open:
            connection.close()


def publish(channel: Any, topic: str, numbers: range, keys: int = KEYS) -> None:
    for number in numbers:
        properties = pika.BasicProperties(delivery_mode=2)
        channel.basic_publish(topic, f"key-{number % keys}", b"%d" % number, properties)


def take(channel: Any, queue: str, count: int, **more: Any) -> list[tuple[Any, Any, bytes]]:
    """Consumes and acknowledges so many messages."""
    found: list[tuple[Any, Any, bytes]] = []
    channel.basic_qos(prefetch_count=50)

    def on_message(source: Any, method: Any, properties: Any, body: bytes) -> None:
        if len(found) < count:
            found.append((method, properties, body))
            source.basic_ack(method.delivery_tag)

    tag = channel.basic_consume(queue, on_message, **more)
    until(lambda: _pumped(channel) and len(found) >= count, f"{queue}: too few messages")
    channel.basic_cancel(tag)
    return found


def _pumped(channel: Any) -> bool:
    channel.connection.process_data_events(time_limit=0.02)
    return True


def order_of(deliveries: list[tuple[Any, Any, bytes]], keys: int = KEYS) -> KeyOrder:
    referee = KeyOrder(keys)
    referee.take(
        Delivery(int(body), properties.headers["x-order-token"])
        for _, properties, body in deliveries
    )
    return referee


# --- published and consumed --------------------------------------------------------------------


def test_a_topic_is_created_published_to_and_consumed(
    cluster: LocalCluster, opened: Opened
) -> None:
    create(cluster, "orders", 4)
    status, rows = call(cluster, "GET", path("orders", "route"))
    assert status == 200
    assert [(row["pid"], row["lo"], row["hi"]) for row in rows] == [
        (0, 0, 256), (1, 256, 512), (2, 512, 768), (3, 768, 1024)
    ]  # fmt: skip
    assert {row["state"] for row in rows} == {"open"}
    names = {name_of(cluster, node.number) for node in cluster.nodes}
    assert {row["node"] for row in rows} <= names
    status, topic = call(cluster, "GET", path("orders"))
    assert (topic["logical"], topic["mode"], topic["version"]) == (LOGICAL, "strict", 0)
    publish(opened(2), "orders", range(HALF))
    found = take(opened(3), "orders/billing", HALF)
    assert not order_of(found).violations
    ranges = {row["pid"]: range(row["lo"], row["hi"]) for row in rows}
    for method, properties, body in found:
        headers = properties.headers
        key = f"key-{int(body) % KEYS}"
        assert method.routing_key == key
        assert headers["x-lp"] == logical_partition(key.encode(), LOGICAL, topic["hash_seed"])
        assert headers["x-lp"] in ranges[headers["x-pid"]]
        token = OrderToken.parse(headers["x-order-token"])
        assert (token.created_version, token.offset) == (0, headers["x-offset"])
        assert headers["x-route-version"] == 0


def test_a_header_may_be_the_order_key(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "by-header", 4)
    channel = opened()
    for number in range(20):
        headers = {"x-order-key": "account-7"}
        properties = pika.BasicProperties(headers=headers, delivery_mode=2)
        channel.basic_publish("by-header", f"other-{number}", b"%d" % number, properties)
    found = take(opened(), "by-header/g", 20)
    assert [int(body) for _, _, body in found] == list(range(20))
    assert len({properties.headers["x-pid"] for _, properties, _ in found}) == 1
    assert {properties.headers["x-order-key"] for _, properties, _ in found} == {"account-7"}


def test_groups_have_progress_of_their_own(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "two-groups", 2)
    publish(opened(), "two-groups", range(50))
    channel = opened(2)
    assert not order_of(take(channel, "two-groups/a", 50)).violations
    publish(opened(), "two-groups", range(50, 60))
    assert [int(body) for _, _, body in take(channel, "two-groups/a", 10)]
    assert not order_of(take(channel, "two-groups/b", 60)).violations


def test_a_partition_is_read_without_a_group(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "read", 1)
    publish(opened(), "read", range(30))
    for node in (1, 2, 3):
        arguments = {"x-stream-offset": "first"}
        found = take(opened(node), "amq.partition.read.0", 30, arguments=arguments)
        assert [int(body) for _, _, body in found] == list(range(30))


# --- changes -----------------------------------------------------------------------------------


def test_partitions_split_merge_and_move_while_messages_flow(cluster: LocalCluster) -> None:
    create(cluster, "live", 2)
    with TopicTraffic(cluster, "live") as traffic:
        traffic.goes_on()
        left, right = changed(cluster, "live", "split", pid=0)
        traffic.goes_on()
        (merged,) = changed(cluster, "live", "merge", pids=[right, 1])
        traffic.goes_on()
        to = next(n for n in (1, 2, 3) if n != leader_of(cluster, "live", merged))
        (moved,) = changed(cluster, "live", "move", pid=merged, node=str(to))
        until(lambda: leader_of(cluster, "live", moved) == to, "the partition is led elsewhere")
        traffic.goes_on()
        cut = changed(cluster, "live", "split", pid=moved, at=[400, 900])
        traffic.goes_on()
        referee = traffic.finish()
    assert open_pids(cluster, "live") == [left, *cut]
    versions = {
        OrderToken.parse(token).created_version
        for tokens in referee.tokens.values()
        for token in tokens
    }
    assert versions == {0, 1, 2, 3, 4}
    status, rows = call(cluster, "GET", path("live", "route?lineage=true"))
    assert status == 200
    by_pid = {row["pid"]: row for row in rows}
    assert by_pid[merged]["parents"] == [right, 1]
    assert by_pid[merged]["children"] == [moved]
    assert (by_pid[0]["created_version"], by_pid[0]["sealed_version"]) == (0, 1)
    for version in range(5):
        status, rows = call(cluster, "GET", path("live", f"route?version={version}"))
        assert status == 200
        assert [row["lo"] for row in rows] == [0, *(row["hi"] for row in rows[:-1])]
        assert rows[-1]["hi"] == LOGICAL


def test_modulo_breaks_the_order_that_a_topic_keeps(cluster: LocalCluster, opened: Opened) -> None:
    """The same load, with the number of partitions changed half-way: first through an exchange
    that routes by `hash mod n`, then through a topic."""
    channel = opened()
    queues = ["mod-0", "mod-1", "mod-2"]
    channel.exchange_declare("mod", "x-modulus-hash", durable=True)
    for queue in queues:
        channel.queue_declare(queue, durable=True)
    for queue in queues[:2]:
        channel.queue_bind(queue, "mod", "")
    publish(channel, "mod", range(HALF))
    channel.queue_bind(queues[2], "mod", "")
    publish(channel, "mod", range(HALF, 2 * HALF))
    plain = KeyOrder(KEYS)
    reader = opened(2)
    while len(plain.tokens) < 2 * HALF:
        # As three consumers of the same speed would.
        for queue in queues:
            method, _, body = reader.basic_get(queue, auto_ack=True)
            if method is not None:
                plain.take([Delivery(int(body))])
    assert len(plain.violations) > 0
    create(cluster, "not-mod", 2)
    publish(channel, "not-mod", range(HALF))
    changed(cluster, "not-mod", "split", pid=0)
    publish(channel, "not-mod", range(HALF, 2 * HALF))
    referee = order_of(take(reader, "not-mod/g", 2 * HALF))
    assert not referee.violations
    assert not referee.missing(range(2 * HALF))


def test_a_drained_node_leads_no_open_partition(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "drained", 3)
    publish(opened(), "drained", range(60))
    name = name_of(cluster, 3)
    status, rows = call(cluster, "POST", "topics/drain", {"node": name})
    assert status == 200, rows
    assert not [row for row in rows if row["error"]]
    status, rows = call(cluster, "GET", path("drained", "route"))
    assert name not in {row["node"] for row in rows}
    assert call(cluster, "DELETE", f"convoy/topics/drains/{name}")[0] == 204
    publish(opened(), "drained", range(60, 120))
    assert not order_of(take(opened(2), "drained/g", 120)).violations


# --- groups ------------------------------------------------------------------------------------


def lag(cluster: LocalCluster, topic: str, group: str) -> int:
    status, rows = call(cluster, "GET", path(topic, "groups", group, "lag"))
    assert status == 200, rows
    return sum(row["lag"] or 0 for row in rows)


def test_lag_and_seek_of_a_group(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "sought", 2)
    publish(opened(), "sought", range(40))
    channel = opened(2)
    channel.queue_declare("sought/g", passive=True)
    take(channel, "sought/g", 40)
    until(lambda: lag(cluster, "sought", "g") == 0, "the lag does not fall")
    publish(opened(), "sought", range(40, 50))
    until(lambda: lag(cluster, "sought", "g") == 10, "the lag does not rise")
    _, rows = call(cluster, "GET", path("sought", "groups"))
    assert [row["group"] for row in rows] == ["g"]
    seek = path("sought", "groups", "g", "seek")

    def sought() -> bool:
        # As long as the member's lease is not given back, the group has a member.
        return call(cluster, "POST", seek, {"position": "earliest"})[0] == 200

    until(sought, "the group cannot be sought")
    referee = order_of(take(channel, "sought/g", 50))
    assert not referee.violations
    assert not referee.missing(range(50))


def test_a_group_with_members_is_not_sought(cluster: LocalCluster, opened: Opened) -> None:
    create(cluster, "busy", 1)
    channel = opened()
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume("busy/g", lambda *_: None)
    seek = path("busy", "groups", "g", "seek")
    until(
        lambda: (
            _pumped(channel)
            and [row["members"] for row in call(cluster, "GET", path("busy", "groups"))[1]] != [[]]
        ),
        "nobody becomes a member",
    )
    status, answer = call(cluster, "POST", seek, {"position": "earliest"})
    assert status == 400, answer
    assert "member" in answer["reason"]
    status, answer = call(cluster, "DELETE", path("busy", "groups", "g"))
    assert status == 400, answer


# --- refused -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refusing(cluster: LocalCluster) -> str:
    create(cluster, "refusing", 3)
    return "refusing"


@pytest.mark.parametrize(
    ("method", "rest", "body", "status", "code", "text"),
    [
        ("POST", "split", {"pid": 0, "at": [900]}, 400, "BAD_CUT", "rising numbers from 1 to"),
        ("POST", "split", {"pid": 9}, 404, "UNKNOWN_PARTITION", "no partition 9"),
        ("POST", "merge", {"pids": [0, 2]}, 400, "NOT_ADJACENT", "partitions 0, 2"),
        ("POST", "merge", {"pids": [0]}, 400, "NOT_ADJACENT", "partitions 0"),
        ("POST", "move", {"pid": 7, "node": "1"}, 404, "UNKNOWN_PARTITION", "no partition 7"),
        ("POST", "move", {"pid": 0, "node": "n99"}, 404, None, "no node 'n99'"),
        ("POST", "declare-lost", {"pid": 42}, 404, "UNKNOWN_PARTITION", "no partition 42"),
        ("GET", "route?version=3", None, 404, "STALE_ROUTE", "version 3 is not kept"),
        ("GET", "groups/none/lag", None, 404, None, "no group 'none'"),
    ],
)
def test_changes_that_cannot_be(
    cluster: LocalCluster,
    refusing: str,
    method: str,
    rest: str,
    body: Any,
    status: int,
    code: str | None,
    text: str,
) -> None:
    found, answer = call(cluster, method, path(refusing, rest), body)
    assert (found, answer.get("code")) == (status, code), answer
    assert text in answer["reason"]


@pytest.mark.parametrize(
    ("name", "body", "text"),
    [
        ("too-many", {"partitions": 9, "logical": 8}, "8"),
        ("none", {"partitions": 0}, "0"),
        ("amq.topic", {"partitions": 1}, "amq.topic"),
        ("like-a-queue", {"partitions": 1}, "a queue of that name"),
        ("refusing", {"partitions": 99}, "exists with other settings: "),
        ("other-mode", {"partitions": 1, "mode": "lax"}, "lax"),
    ],
)
def test_topics_that_cannot_be(
    cluster: LocalCluster, opened: Opened, refusing: str, name: str, body: Any, text: str
) -> None:
    assert refusing
    opened().queue_declare("like-a-queue", durable=True)
    status, answer = call(cluster, "PUT", path(name), body)
    assert status == 400, answer
    assert text in answer["reason"]


def closed_with(channel: Any, act: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        act()
    return caught.value.reply_code, caught.value.reply_text


def test_what_amqp_clients_may_not_do(opened: Opened, refusing: str) -> None:
    partition = f"amq.partition.{refusing}.0"
    group = f"{refusing}/g"
    part = f"queue '{partition}' in vhost '/'"
    acts: list[tuple[Callable[[Any], object], int, str]] = [
        (lambda c: c.queue_declare(refusing, durable=True), 406, "a queue cannot have its name"),
        (lambda c: c.queue_declare(group, durable=True), 406, "names a group of topic 'refusing'"),
        (lambda c: c.queue_declare(partition, durable=True), 406, "arg 'x-queue-type' for queue"),
        (lambda c: c.queue_delete(partition), 403, f"{part} is a partition of a topic"),
        (lambda c: c.queue_purge(partition), 403, f"{part} is a partition of a topic"),
        (lambda c: c.queue_bind(partition, "amq.fanout"), 403, f"{part} is a partition of a topic"),
        (lambda c: c.exchange_delete(refusing), 403, "it is deleted with the topic"),
        (lambda c: c.exchange_declare(refusing, "fanout"), 406, "current is 'x-ordered'"),
        (lambda c: c.basic_get(group), 406, "basic.get not supported by groups of topics"),
        (lambda c: c.queue_purge(group), 406, "queue.purge not supported by groups of topics"),
        (lambda c: c.queue_declare("unknown/g", passive=True), 404, "no queue 'unknown/g' in"),
        (lambda c: c.basic_consume("unknown/g", print), 404, "no queue 'unknown/g' in vhost '/'"),
        (
            lambda c: c.basic_publish("", partition, b"directly", mandatory=True), 403,
            f"cannot publish to a partition: {part}",
        ),
    ]  # fmt: skip
    for act, code, text in acts:
        channel = opened()
        found, told = closed_with(channel, lambda act=act, channel=channel: act(channel))  # type: ignore[misc]
        assert found == code, told
        assert text in told


def test_the_default_exchange_does_not_lead_to_topics(opened: Opened, refusing: str) -> None:
    with pytest.raises(pika.exceptions.UnroutableError):
        opened().basic_publish("", refusing, b"by the default exchange", mandatory=True)


# --- errors, as docs/topics.md has them --------------------------------------------------------


AMQP, HTTP, PYTHON = "AMQP", "HTTP", "Python"


class OtherSeed(Client):
    """A client that takes another seed of the hash for the topic's."""

    def topic_route(self, *args: Any, **more: Any) -> TopicRoute:
        route = super().topic_route(*args, **more)
        return replace(route, hash_seed=route.hash_seed + 1)


class Stage:
    """A cluster with topics for each error, and a client of each protocol."""

    def __init__(self, cluster: LocalCluster, opened: Opened) -> None:
        self.cluster = cluster
        self.opened = opened
        self.servers = tuple(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)

    def amqp(self, act: Callable[[Any], object]) -> tuple[object, ...]:
        """Returns code and text with which a channel was closed."""
        channel = self.opened()
        return closed_with(channel, lambda: act(channel))

    def http(self, method: str, path: str, body: object = None) -> tuple[object, ...]:
        """Returns status, `code` and reason of a refusal."""
        url = f"http://127.0.0.1:{self.cluster.nodes[0].http_port}/api/{path}"
        answer = httpx.request(method, url, json=body, auth=("guest", "guest"), timeout=PATIENCE_S)
        found = answer.json()
        return answer.status_code, found.get("code"), found.get("reason", "")

    def python(
        self, act: Callable[[Client], object], kind: type[Client] = Client
    ) -> tuple[object, ...]:
        """Returns class, code and text of an exception."""
        with kind(ClientConfig(self.servers)) as client, pytest.raises(errors.ClientError) as found:
            act(client)
        error = found.value
        return type(error).__name__, getattr(error, "topic_code", None), error.text

    def topic(self, name: str, partitions: int = 3, **settings: object) -> str:
        """Returns a topic, which is created when it is asked for first."""
        if call(self.cluster, "GET", path(name))[0] == 404:
            create(self.cluster, name, partitions, **settings)
        return name

    def seek(self, topic: str, body: object) -> tuple[object, ...]:
        return self.http("POST", path(topic, "groups", "g", "seek"), body)

    def group(self, topic: str) -> dict[str, Any]:
        """Returns the topic's group `g`."""
        status, rows = call(self.cluster, "GET", path(topic, "groups"))
        assert status == 200, rows
        return next(row for row in rows if row["group"] == "g")

    # What it takes

    def bound(self) -> str:
        """Returns a topic whose partition 1 came from a split of 0, with a group `g`."""
        topic = self.topic("twice", 1)
        if len(open_pids(self.cluster, topic)) == 1:
            changed(self.cluster, topic, "split", pid=0)
            assert call(self.cluster, "PUT", path(topic, "groups", "g"), {})[0] == 201
        return topic

    def expired(self) -> str:
        """Returns a topic whose group `g` has expired, and what it had not read is deleted."""
        settings = {"max-age": "1s", "group-ttl": "1s"}
        topic = self.topic("expired", 1, **settings)
        if open_pids(self.cluster, topic) == [0]:
            publish(self.opened(), topic, range(3))
            take(self.opened(), f"{topic}/g", 1)
            to = next(n for n in (1, 2, 3) if n != leader_of(self.cluster, topic, 0))
            changed(self.cluster, topic, "move", pid=0, node=str(to))
        until(lambda: self.group(topic)["state"] == "data_expired", "it lives")
        return topic

    @contextmanager
    def live(self) -> Iterator[str]:
        """A topic whose group `g` has a member."""
        topic = self.topic("live-group", 1)
        channel = self.opened()
        channel.basic_qos(prefetch_count=10)
        channel.basic_consume(f"{topic}/g", lambda *_: None)
        until(lambda: _pumped(channel) and self.group(topic)["members"] != [], "nobody is a member")
        yield topic
        channel.connection.close()

    # Acts that are more than a call

    def named_like_a_queue(self) -> tuple[object, ...]:
        self.opened().queue_declare("like-a-queue", durable=True)
        return self.http("PUT", path("like-a-queue"), {"partitions": 1})

    def without_key(self) -> tuple[object, ...]:
        body = {"routing_key": "", "payload": "x", "payload_encoding": "string", "properties": {}}
        return self.http("POST", f"exchanges/%2F/{self.topic('strict')}/publish", body)

    def send(self, key: bytes | None, kind: type[Client] = Client) -> tuple[object, ...]:
        topic = self.topic("strict")

        def sent(client: Client) -> None:
            with TopicProducer(client, topic) as producer:
                producer.send(key, b"x").result(PATIENCE_S)

        return self.python(sent, kind)

    def late(self) -> tuple[object, ...]:
        topic = self.topic("fenced", 1)
        publish(self.opened(), topic, range(1))

        def acknowledged(client: Client) -> None:
            with TopicConsumer(client, topic, "g") as consumer:
                ctx = consumer.poll(PATIENCE_S)
                assert ctx is not None
                ctx.nack()
            TopicDelivery(ctx_like(ctx), consumer).ack()

        return self.python(acknowledged)

    def change_running(self) -> tuple[object, ...]:
        """Asks for two changes at a time. Both are taken when the first is done before the second
        arrives: then it is tried again."""
        topic = self.topic("one", 2)
        for _ in range(20):
            # The widest ones: a partition of one logical partition cannot be split.
            rows = call(self.cluster, "GET", path(topic, "route"))[1]
            widest = [r["pid"] for r in sorted(rows, key=lambda r: r["hi"] - r["lo"])][-2:]
            with ThreadPoolExecutor(2) as both:
                split = lambda pid: self.http("POST", path(topic, "split"), {"pid": pid})  # noqa: E731
                answers = list(both.map(split, widest))
            changes = call(self.cluster, "GET", path(topic, "changes"))[1]
            for row in changes:
                finished(self.cluster, topic, row["change_id"])
            for status, code, reason in answers:
                if status == 409:
                    return status, code, reason
        raise AssertionError("every change was done before the next one was asked for")

    def seek_live(self) -> tuple[object, ...]:
        with self.live() as topic:
            return self.seek(topic, {"position": "earliest"})

    def seek_live_from_python(self) -> tuple[object, ...]:
        with self.live() as topic:
            return self.python(lambda c: c.seek_group(topic, "g", "earliest"))


Found = tuple[object, ...]
CELLS: dict[tuple[str, str], tuple[Callable[[Stage], Found], Found]] = {
    ("unknown topic", AMQP): (
        lambda s: s.amqp(lambda c: c.basic_publish("unknown", "k", b"x")),
        (404, "NOT_FOUND - no exchange 'unknown' in vhost '/'"),
    ),
    ("unknown topic", HTTP): (
        lambda s: s.http("GET", path("unknown")),
        (404, None, "no topic 'unknown' in vhost '/'"),
    ),
    ("unknown topic", PYTHON): (
        lambda s: s.python(lambda c: TopicProducer(c, "unknown")),
        ("NotFound", None, "no topic 'unknown' in vhost '/'"),
    ),
    ("hash mismatch", PYTHON): (
        lambda s: s.send(b"k", OtherSeed),
        ("TopicRefused", "BAD_HASH", "its hash function or seed is not the topic's"),
    ),
    ("null key in strict mode", AMQP): (
        lambda s: s.amqp(lambda c: c.basic_publish(s.topic("strict"), "", b"x")),
        (406, "PRECONDITION_FAILED - message has no order key"),
    ),
    ("null key in strict mode", HTTP): (
        Stage.without_key,
        (400, "NO_KEY", "message has no order key"),
    ),
    ("null key in strict mode", PYTHON): (
        lambda s: s.send(None),
        ("TopicRefused", "NO_KEY", "has no order key"),
    ),
    ("member fenced", PYTHON): (
        Stage.late,
        ("MemberFenced", "LEASE_FENCED", "another member gets the message again"),
    ),
    ("change running", HTTP): (
        Stage.change_running,
        (409, "CHANGE_RUNNING", "is still running, and a topic has one at a time"),
    ),
    ("not adjacent", HTTP): (
        lambda s: s.http("POST", path(s.topic("strict"), "merge"), {"pids": [0, 2]}),
        (400, "NOT_ADJACENT", "partitions 0, 2 cannot be merged"),
    ),
    ("bad cut", HTTP): (
        lambda s: s.http("POST", path(s.topic("strict"), "split"), {"pid": 0, "at": [900]}),
        (400, "BAD_CUT", "cut points are rising numbers from 1 to"),
    ),
    ("data expired", AMQP): (
        lambda s: s.amqp(lambda c: c.basic_consume(f"{s.expired()}/g", print)),
        (406, "PRECONDITION_FAILED - DATA_EXPIRED: queue 'expired/g' in vhost '/'"),
    ),
    ("data expired", HTTP): (
        lambda s: s.seek(s.expired(), {"vector": {"0": 1}}),
        (410, "DATA_EXPIRED", "of partition 0 is not kept: it is deleted"),
    ),
    ("data expired", PYTHON): (
        lambda s: s.python(lambda c: TopicConsumer(c, s.expired(), "g")),
        ("DataExpired", "DATA_EXPIRED", "had no member for too long"),
    ),
    ("seek of a live group", HTTP): (
        Stage.seek_live,
        (400, "GROUP_LIVE", "group 'g' has 1 members: stop them first"),
    ),
    ("seek of a live group", PYTHON): (
        Stage.seek_live_from_python,
        ("GroupLive", "GROUP_LIVE", "group 'g' has 1 members: stop them first"),
    ),
    ("vector that covers a range twice", HTTP): (
        lambda s: s.seek(s.bound(), {"vector": {"0": 1, "1": 1, "2": 1}}),
        (400, "BAD_POSITION", "two places"),
    ),
    ("vector that covers a range twice", PYTHON): (
        lambda s: s.python(lambda c: c.seek_group(s.bound(), "g", {0: 1, 1: 1, 2: 1})),
        ("BadPosition", "BAD_POSITION", "two places"),
    ),
    ("topic named like a queue", AMQP): (
        lambda s: s.amqp(lambda c: c.queue_declare(s.topic("strict"), durable=True)),
        (406, "topic 'strict' in vhost '/' exists: a queue cannot have its name"),
    ),
    ("topic named like a queue", HTTP): (
        Stage.named_like_a_queue,
        (400, "BAD_TOPIC", "there is a queue of that name"),
    ),
}
"""By error and protocol: what is done, and what is answered; of the last one a part. Those that are
missing here are not possible."""


@pytest.mark.parametrize(("error", "surface"), CELLS, ids=str)
def test_an_error_is_the_same_on_every_surface(
    cluster: LocalCluster, opened: Opened, error: str, surface: str
) -> None:
    act, expected = CELLS[error, surface]
    *found, text = act(Stage(cluster, opened))
    assert found == list(expected[:-1]), text
    assert str(expected[-1]) in str(text)


def test_a_late_acknowledgement_has_no_answer(cluster: LocalCluster, opened: Opened) -> None:
    """A member does not settle what it has of a partition that another one is to have. What it
    acknowledges later counts for nothing, and its channel stays open."""
    topic, queue = "late-acks", "late-acks/g"
    create(cluster, topic, 2)
    sender, slow, other = opened(), opened(1), opened(2)
    publish(sender, topic, range(20))
    slow_has: list[tuple[Any, Any, bytes]] = []
    other_has: list[tuple[Any, Any, bytes]] = []
    for channel, has in ((slow, slow_has), (other, other_has)):
        channel.basic_qos(prefetch_count=100)
        channel.basic_consume(
            queue,
            lambda _, *message, has=has: has.append(message),
            arguments={"x-key-in-flight": 0},
        )
        if channel is slow:
            until(lambda: _pumped(slow) and len(slow_has) == 20, "too few messages")
    places = [(each[1].headers["x-pid"], each[2]) for each in slow_has]

    def came_again() -> bool:
        return (
            _pumped(slow)
            and _pumped(other)
            and len(other_has) > 0
            and {each[2] for each in other_has}
            == {body for pid, body in places if pid == other_has[0][1].headers["x-pid"]}
        )

    until(came_again, "the messages do not come again")
    slow.basic_ack(0, multiple=True)
    # The acknowledgement counts for the partition that it still has, and for no other.
    until(
        lambda: _pumped(slow) and lag(cluster, topic, "g") == len(other_has),
        "the lag is another one",
    )
    other.basic_ack(0, multiple=True)
    until(lambda: _pumped(other) and lag(cluster, topic, "g") == 0, "the lag does not fall")
    publish(sender, topic, range(20, 40))
    until(
        lambda: (
            _pumped(slow)
            and _pumped(other)
            and {int(each[2]) for each in slow_has + other_has} == set(range(40))
        ),
        "not all come",
    )
    # It has new ones of the partition that it kept.
    assert slow.is_open
    assert {int(each[2]) for each in slow_has} > set(range(20))


# --- the tool ----------------------------------------------------------------------------------


def test_the_tool_over_http(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://guest:guest@127.0.0.1:{cluster.nodes[1].http_port}"

    def run(*words: str) -> Any:
        assert main(TOPICS, [*words, "--url", url, "--format", "json"]) == 0
        text = capsys.readouterr().out
        return json.loads(text) if text else None

    run("create", "tool", "--partitions", "2", "--logical", "64")
    assert "tool" in [row["name"] for row in run("list")]
    assert run("describe", "tool")["logical"] == 64
    rows = run("route", "tool")
    assert [set(row) for row in rows] == [{"pid", "lo", "hi", "node", "state"}] * 2
    (split,) = run("split", "tool", "0", "--at", "10,20")
    assert (split["kind"], split["phase"]) == ("split", "done")
    assert [row["lo"] for row in run("route", "tool")] == [0, 10, 20, 32]
    assert [row["lo"] for row in run("route", "tool", "--version", "0")] == [0, 32]
    first, second, *_ = [row["pid"] for row in run("route", "tool")]
    (merge,) = run("merge", "tool", str(first), str(second))
    assert merge["sources"] == [first, second]
    to = next(n for n in (1, 2, 3) if n != leader_of(cluster, "tool", 1))
    (move,) = run("move", "tool", "1", "--to", str(to))
    assert run("changes", "tool") == [move]
    assert len(run("route", "tool", "--lineage")) == 7
    assert run("groups", "tool") == []
    for words, code in (
        (("split", "tool", "1"), 65),
        (("route", "tool", "--version", "9"), 65),
        (("lag", "tool", "none"), 65),
        (("create", "tool", "--partitions", "1"), 65),
        (("describe", "none"), 65),
    ):
        assert main(TOPICS, [*words, "--url", url]) == code
        assert capsys.readouterr().err.startswith("Error:")
    run("delete", "tool")
    assert main(TOPICS, ["describe", "tool", "--url", url]) == 65
