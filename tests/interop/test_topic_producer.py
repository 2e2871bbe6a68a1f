"""Producers of topics on three nodes: partitions are split, merged and moved, and nodes killed,
while they publish, and every message is there once, in the order of its key."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig, errors
from convoymq.client.async_topic_producer import AsyncTopicProducer
from convoymq.client.rows import routing_keys_of, values_of
from convoymq.client.topic_producer import (
    TopicProducer,
    TopicReceipt,
    producer_number,
)
from convoymq.client.topic_rows import TopicRow, frame_of_rows
from convoymq.kernels.columns import ROUTING_KEY, VALUE
from convoymq.model.columnar import Op
from tests.clusters import serving_cluster
from tests.faults.topic_traffic import begin, changed, create, finished, leader_of, open_pids
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
KEYS = 16
LOAD_PENDING = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") != "convoy":
        pytest.skip("RabbitMQ has no ordered topics")
    with serving_cluster(tmp_path_factory.mktemp("topics"), BASE_PORT) as made:
        create(made, "first", 1)
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    servers = tuple(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)
    with Client(ClientConfig(servers)) as made:
        yield made


def histories(client: Client, topic: str) -> dict[bytes, list[bytes]]:
    """Bodies by order key, in the order of the topic."""
    found: dict[bytes, list[bytes]] = {}
    for partition in client.topic_route(topic).partitions:
        name = f"amq.partition.{topic}.{partition.pid}"
        ((end, _),) = client.offsets([(name, "latest", None)])
        offset = 0
        while end is not None and offset < end:
            result = client.fetch(name, offset, end=end, columns=VALUE | ROUTING_KEY)
            pairs = zip(routing_keys_of(result.frame), values_of(result.frame), strict=True)
            for key, body in pairs:
                found.setdefault(key, []).append(body or b"")
            offset = result.next
    return found


class Load(threading.Thread):
    """Publishes message `number` with the key `number % KEYS`, until it is stopped."""

    def __init__(self, producer: TopicProducer) -> None:
        super().__init__(daemon=True)
        self.producer = producer
        self.sent = 0
        self.futures: list[Future[TopicReceipt]] = []
        self.failure: Exception | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self.join(30.0)

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                key = b"key-%d" % (self.sent % KEYS)
                self.futures.append(self.producer.send(key, b"%d" % self.sent, timeout=30.0))
                self.sent += 1
                # Bounds the load, whatever the machine can do.
                self._stopping.wait(0.001)
        except Exception as error:
            self.failure = error

    @property
    def stored(self) -> int:
        return sum(each.done() for each in list(self.futures))

    def goes_on(self, count: int = 150) -> None:
        """Waits until so many more messages are stored."""
        enough = self.stored + count
        until(lambda: self.stored >= enough or self.failure is not None, "stores stand still")
        assert self.failure is None

    def finish(self, client: Client) -> None:
        """Stops, and compares what the topic has with what was sent."""
        self.__exit__()
        assert self.failure is None
        self.producer.flush(40.0)
        for future in self.futures:
            future.result(0.0)
        expected: dict[bytes, list[bytes]] = {}
        for number in range(self.sent):
            expected.setdefault(b"key-%d" % (number % KEYS), []).append(b"%d" % number)
        assert histories(client, self.producer.topic) == expected


def produce_raw(
    client: Client, topic: str, pid: int, key: bytes, first: int, bodies: list[bytes], *, epoch: int
) -> list[object]:
    """One request; returns the answer to its run."""
    lp = client.topic_route(topic, lineage=False).lp_of(key)
    fields = {
        "topic": topic, "pid": pid, "producer": 7, "epoch": epoch,
        "runs": [[lp, first, len(bodies), first, b""]],
    }  # fmt: skip
    frame = frame_of_rows([TopicRow(key, body) for body in bodies])
    answer = client._call(Op.TOPIC_PRODUCE, fields, frame)
    rows = answer.map["runs"]
    assert isinstance(rows, list)
    return list(rows[0])


def test_every_message_is_there_once_through_changes_and_kills(
    cluster: LocalCluster, client: Client
) -> None:
    create(cluster, "load", 2)
    with TopicProducer(client, "load", producer_id="load") as producer, Load(producer) as load:
        load.goes_on()
        changed(cluster, "load", "split", pid=0)
        load.goes_on()
        killed = leader_of(cluster, "load", 1)
        change = begin(cluster, "load", "split", pid=1)
        cluster.kill(killed)
        finished(cluster, "load", change)
        load.goes_on()
        cluster.start_node(killed)
        cluster.wait_ready()
        changed(cluster, "load", "merge", pids=open_pids(cluster, "load")[:2])
        load.goes_on()
        pid = open_pids(cluster, "load")[0]
        killed = leader_of(cluster, "load", pid)
        cluster.kill(killed)
        load.goes_on()
        cluster.start_node(killed)
        cluster.wait_ready()
        other = next(n for n in (1, 2, 3) if n != leader_of(cluster, "load", pid))
        changed(cluster, "load", "move", pid=pid, node=str(other))
        load.goes_on()
        load.finish(client)


def test_what_is_sent_again_over_a_split_and_a_merge_is_stored_once(
    cluster: LocalCluster, client: Client
) -> None:
    create(cluster, "again", 1)
    key = b"key"
    assert produce_raw(client, "again", 0, key, 1, [b"1", b"2"], epoch=1)[0] == "OK"
    changed(cluster, "again", "split", pid=0)
    assert produce_raw(client, "again", 0, key, 1, [b"1", b"2"], epoch=1)[0] == "CLOSED"
    route = client.topic_route("again").route
    pid = route.pid_of(client.topic_route("again").lp_of(key))
    assert produce_raw(client, "again", pid, key, 4, [b"4"], epoch=1)[0] == "OUT_OF_SEQ"
    assert produce_raw(client, "again", pid, key, 1, [b"1", b"2", b"3"], epoch=1)[0] == "OK"
    (pid,) = changed(cluster, "again", "merge", pids=list(route.pids))
    assert produce_raw(client, "again", pid, key, 2, [b"2", b"3"], epoch=1)[0] == "DUPLICATE"
    assert histories(client, "again") == {key: [b"1", b"2", b"3"]}


def test_a_new_session_goes_on_from_its_source(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "source", 2)
    source = [(b"key-%d" % (i % KEYS), b"%d" % i, b"%08d" % i) for i in range(400)]
    first = TopicProducer(client, "source", producer_id="importer")
    futures = [first.send(key, body, source_pos=pos) for key, body, pos in source[:300]]
    until(lambda: sum(each.done() for each in futures) >= 100, "nothing is stored")
    # It is gone with what it had under way.
    first.close(0.0)
    changed(cluster, "source", "split", pid=1)
    with TopicProducer(client, "source", producer_id="importer") as second:
        assert second.epoch == first.epoch + 1
        assert second.last_positions()
        skipped = 0
        for key, body, pos in source:
            if second.is_stored(key, pos):
                skipped += 1
            else:
                second.send(key, body, source_pos=pos)
        assert skipped >= 100
        second.flush(30.0)
        number = producer_number("importer")
        session = client.open_producer("source", number, query=True)
        assert {lp: pos for lp, (_, pos) in session.stored.items()} == second.last_positions()
    expected: dict[bytes, list[bytes]] = {}
    for key, body, _ in source:
        expected.setdefault(key, []).append(body)
    assert histories(client, "source") == expected


def test_a_newer_session_ends_the_one_before(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "fenced", 1)
    first = TopicProducer(client, "fenced", producer_id="p")
    first.send("k", b"1").result(30.0)
    with TopicProducer(client, "fenced", producer_id="p") as second:
        with pytest.raises(errors.ProducerFenced, match="newer session"):
            first.send("k", b"lost").result(30.0)
        with pytest.raises(errors.ProducerFenced):
            first.send("k", b"lost")
        second.send("k", b"2").result(30.0)
    first.close(0.0)
    assert histories(client, "fenced") == {b"k": [b"1", b"2"]}


async def test_asyncio_and_amqp_consumers_see_the_same(
    cluster: LocalCluster, client: Client
) -> None:
    create(cluster, "async", 2)
    odd = b"\xff" * 300
    async with await AsyncTopicProducer.open(client, "async") as producer:
        receipts = await asyncio.gather(
            *[await producer.send(b"key", b"%d" % i, {"n": str(i)}) for i in range(50)]
        )
        await (await producer.send(odd, b"odd"))
        await producer.flush()
        assert producer.pending == 0
    assert [each.seq for each in receipts] == list(range(1, 51))
    found = await asyncio.to_thread(consume, cluster, "async/readers", 51)
    assert [body for key, body, _ in found if key == "key"] == [b"%d" % i for i in range(50)]
    ((_, body, headers),) = [each for each in found if each[0] == ""]
    assert (body, headers["x-order-key"]) == (b"odd", odd)
    route = client.topic_route("async")
    assert headers["x-lp"] == route.lp_of(odd)
    assert {h["x-lp"] for key, _, h in found if key} == {receipts[0].lp} == {route.lp_of(b"key")}


def consume(
    cluster: LocalCluster, queue: str, count: int
) -> list[tuple[str, bytes, dict[str, object]]]:
    """(routing key, body, headers) of so many messages, as an AMQP client gets them."""
    port = cluster.nodes[0].amqp_port
    found = []
    parameters = pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=100)
        for method, properties, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
            assert method is not None, f"{len(found)} messages of {count}"
            found.append((method.routing_key, body, properties.headers))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                channel.cancel()
                return found
    raise AssertionError("the consumer ended")


def test_bad_input(cluster: LocalCluster, client: Client) -> None:
    create(cluster, "bad", 1)
    with pytest.raises(errors.NotFound, match="no topic 'nobody'"):
        TopicProducer(client, "nobody")
    for id, text in (("", "not empty"), (0, "number of a producer")):
        with pytest.raises(ValueError, match=text):
            TopicProducer(client, "bad", producer_id=id)
    with TopicProducer(client, "bad") as producer:
        for arguments, text in (
            ((b"", b"v"), "order key"),
            ((b"k", b"v", {"x-order-key": "l"}), "x-order-key"),
            ((b"k", b"v", {"n" * 256: "l"}), "name of a header"),
            ((b"k", b"v", None, bytes(256)), "source position"),
        ):
            with pytest.raises(ValueError, match=text):
                producer.send(*arguments)
        # A header that topics do not serve: found out by the server, among good ones.
        good = [producer.send(b"good", b"%d" % i) for i in range(20)]
        bad = producer.send(b"bad", b"v", {"x-delay": "soon"})
        behind = producer.send(b"bad", b"w")
        good += [producer.send(b"good", b"%d" % i) for i in range(20, 40)]
        for future in (bad, behind):
            with pytest.raises(errors.PreconditionFailed, match="x-delay"):
                future.result(30.0)
        for future in good:
            future.result(30.0)
    assert histories(client, "bad") == {b"good": [b"%d" % i for i in range(40)]}
