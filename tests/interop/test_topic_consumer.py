"""Group consumers and readers of `convoymq.client` on three nodes, under a referee of order per
key: shared partitions, changes, killed nodes, failing handlers, seeks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig, errors
from convoymq.client.member_thread import Delivered, Handle
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from convoymq.client.topic_reader import TopicReader
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import changed, create, leader_of, name_of, path
from tests.faults.traffic import connect, until
from tests.key_order import Delivery, KeyOrder
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
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


def test_a_member_keeps_its_leases_when_the_node_that_it_speaks_through_is_killed(
    cluster: LocalCluster, reader: Opened
) -> None:
    create(cluster, "killed", 2)
    log: list[Delivery] = []
    member = reader("killed", log, 2, 3)
    publish(cluster, "killed", numbers(0, 200))
    judged(log, 200)
    before = {pid: lease.epoch for pid, lease in member.consumer.leases.items()}
    publish(cluster, "killed", numbers(200, 400))
    cluster.kill(2)
    try:
        publish(cluster, "killed", numbers(400, 600))
        judged(log, 600)
        until(lambda: lag(cluster, "killed") == 0, "not all is acknowledged")
        assert {pid: lease.epoch for pid, lease in member.consumer.leases.items()} == before
    finally:
        cluster.start_node(2)
        cluster.wait_ready()
    member.close()


def test_a_message_that_fails_is_parked_with_its_key_and_comes_back(
    cluster: LocalCluster, client: Client
) -> None:
    create(cluster, "failing", 1)
    publish(cluster, "failing", [("a", b"a1"), ("b", b"b1"), ("a", b"a2")])
    seen: list[tuple[bytes, int]] = []
    refused = {b"a1"}

    def handle(ctx: TopicDelivery) -> None:
        seen.append((ctx.body, ctx.attempt))
        if ctx.body in refused:
            raise ValueError(ctx.body)

    with TopicConsumer(client, "failing", "g", retries=2, retry_ms=20) as consumer:
        thread = threading.Thread(target=consumer.run, args=(handle,), daemon=True)
        thread.start()
        until(lambda: parked(cluster, "failing") == [("a", 2)], "nothing is parked")
        assert [each for each in seen if each[0] == b"a1"] == [(b"a1", n) for n in (1, 2, 3)]
        assert (b"a2", 1) not in seen
        assert (b"b1", 1) in seen
        # Another body helps the first one; a retry is for it alone.
        change_parked(cluster, "failing", "replace", payload="a9")
        assert parked(cluster, "failing") == [("a", 2)]
        change_parked(cluster, "failing", "retry")
        until(lambda: parked(cluster, "failing") == [("a", 1)], "the first one is not retried")
        assert seen[-1][0] == b"a9"
        publish(cluster, "failing", [("a", b"a3")])
        until(lambda: parked(cluster, "failing") == [("a", 2)], "a3 is not parked behind a2")
        change_parked(cluster, "failing", "resume")
        until(lambda: not parked(cluster, "failing"), "a key is still parked")
        publish(cluster, "failing", [("a", b"a4")])
        until(lambda: (b"a4", 1) in seen, "the key is not live again")
        assert [body for body, _ in seen if body in (b"a2", b"a3", b"a4")] == [b"a2", b"a3", b"a4"]


def parked(cluster: LocalCluster, topic: str) -> list[tuple[str, int]]:
    status, rows = call(cluster, "GET", path(topic, "groups", "g", "park"))
    assert status == 200, rows
    return [(row["key"], row["messages"]) for row in rows]


def change_parked(cluster: LocalCluster, topic: str, action: str, **more: str) -> None:
    status, answer = call(
        cluster, "POST", path(topic, "groups", "g", "park", action), {"keys": ["a"], **more}
    )
    assert status in (200, 204), answer


def taken(client: Client, topic: str, count: int, **more: Any) -> list[bytes]:
    """The next bodies that a member gets; it acknowledges them and leaves."""
    with TopicConsumer(client, topic, "g", **more) as consumer:
        found: list[bytes] = []
        while len(found) < count:
            ctx = consumer.poll(PATIENCE_S)
            assert ctx is not None, found
            found.append(ctx.body)
            ctx.ack()
    return found


def test_groups_are_sought_by_time_vector_and_end(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "sought", 1)
    publish(cluster, "sought", [("k", b"%d" % n) for n in range(3)])
    rows = TopicReader(client, "sought").read(30.0)
    assert rows is not None
    # Times have whole milliseconds.
    until(lambda: now_ms() > rows.messages()[-1].time_ms + 1, "the clock stands still")
    between = now_ms()
    until(lambda: now_ms() > between, "the clock stands still")
    publish(cluster, "sought", [("k", b"%d" % n) for n in range(3, 6)])
    assert taken(client, "sought", 6) == [b"%d" % n for n in range(6)]
    client.seek_group("sought", "g", between)
    assert taken(client, "sought", 3) == [b"3", b"4", b"5"]
    client.seek_group("sought", "g", {0: 5})
    assert taken(client, "sought", 2) == [b"4", b"5"]
    client.seek_group("sought", "g", "earliest")
    assert taken(client, "sought", 1) == [b"0"]
    client.seek_group("sought", "g", "latest")
    with TopicConsumer(client, "sought", "g") as consumer:
        # The end is that of when the group begins to read again.
        until(lambda: consumer.leases, "nobody owns the partition")
        publish(cluster, "sought", [("k", b"6")])
        ctx = consumer.poll(PATIENCE_S)
        assert ctx is not None
        assert ctx.body == b"6"
        ctx.ack()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_what_cannot_be_is_refused_by_type(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "typed", 2)
    publish(cluster, "typed", numbers(0, 4))
    with pytest.raises(errors.NotFound, match="no topic 'nowhere'"):
        TopicConsumer(client, "nowhere", "g")
    with pytest.raises(errors.NotFound, match="no topic 'nowhere'"):
        TopicReader(client, "nowhere")
    with pytest.raises(errors.NotFound, match="no group 'nobody'"):
        client.seek_group("typed", "nobody", "earliest")
    with pytest.raises(errors.UnknownPartition):
        TopicConsumer(client, "typed", "new", start={0: 1, 9: 1})
    with pytest.raises(errors.BadPosition, match="no place"):
        TopicReader(client, "typed", {0: 1})
    with TopicConsumer(client, "typed", "g") as consumer:
        ctx = consumer.poll(PATIENCE_S)
        assert ctx is not None
        assert consumer.leases[ctx.pid].epoch == ctx.epoch
        with pytest.raises(errors.GroupLive, match="members"):
            client.seek_group("typed", "g", "earliest")
        ctx.ack()
    assert not ctx.is_current
    late = TopicDelivery(ctx_like(ctx), consumer)
    with pytest.raises(errors.MemberFenced):
        late.ack()
    changed(cluster, "typed", "merge", pids=[0, 1])
    with pytest.raises(errors.BadPosition, match="two places"):
        client.seek_group("typed", "g", {0: 1, 1: 1, 2: 1})
    status, answer = call(cluster, "DELETE", path("typed"))
    assert status == 204, answer


def ctx_like(ctx: TopicDelivery) -> Delivered:
    """The same message, not settled."""
    handle = Handle(ctx.pid, ctx.epoch, ctx.offset)
    return Delivered(handle, ctx, 1)


def test_readers_follow_a_split_and_a_merge(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "read", 2)
    publish(cluster, "read", numbers(0, 120))
    reader = TopicReader(client, "read")
    single = TopicReader(client, "read", at={0: 1})
    log: list[Delivery] = []
    some: list[Delivery] = []

    def read(count: int) -> None:
        while len(log) < count:
            rows = reader.read(30.0, max_rows=25)
            assert rows is not None, len(log)
            log.extend(Delivery(int(m.body), str(m.order_token)) for m in rows.messages())

    read(50)
    targets = changed(cluster, "read", "split", pid=0)
    publish(cluster, "read", numbers(120, 240))
    merged = changed(cluster, "read", "merge", pids=[targets[1], 1])
    publish(cluster, "read", numbers(240, 360))
    read(200)
    # Another reader goes on from there.
    reader = TopicReader(client, "read", reader.position)
    read(360)
    assert reader.read() is None
    assert reader.position.keys() == {targets[0], *merged}
    judged(log, 360)
    while (rows := single.read(0.5)) is not None:
        some += [Delivery(int(m.body), str(m.order_token)) for m in rows.messages()]
    keys = {n % KEYS for n in range(360) if lp(client, "read", f"key-{n % KEYS}") < 512}
    assert {each.number for each in some} == {n for n in range(360) if n % KEYS in keys}
    assert [each for each in log if each in some] != []
    referee = KeyOrder(KEYS)
    referee.take(some)
    assert not referee.violations, referee.violations[:5]


def lp(client: Client, topic: str, key: str) -> int:
    return client.topic_route(topic).lp_of(key.encode())


def test_a_reader_begins_at_a_time_and_at_the_end(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "timed", 1)
    publish(cluster, "timed", [("k", b"0")])
    other = 1 + leader_of(cluster, "timed", 0) % 3
    changed(cluster, "timed", "move", pid=0, node=name_of(cluster, other))
    first = TopicReader(client, "timed").read(30.0)
    assert first is not None
    moment = first.messages()[-1].time_ms + 1
    until(lambda: now_ms() > moment, "the clock stands still")
    at_end = TopicReader(client, "timed", "latest")
    publish(cluster, "timed", [("k", b"1"), ("k", b"2")])
    for reader in (at_end, TopicReader(client, "timed", moment)):
        rows = reader.read(30.0)
        assert rows is not None
        assert [each.body for each in rows.messages()] == [b"1", b"2"]
        assert rows.route_version == 1
