"""Streams on real nodes: kill -9 of leaders under confirms, reading anywhere, retention on disk."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from tests.clusters import cut_power, start_nodes
from tests.faults.traffic import Traffic, connect, fill, in_step, padded, until
from tests.patience import PATIENCE_S

QUEUE = "events"
STREAM = {"x-queue-type": "stream"}
SIZE = 100
MIB = 1 << 20


def declare(cluster: LocalCluster, number: int, **arguments: Any) -> None:
    """Declares the stream on a node, which thereby leads it at first."""
    connection = connect(cluster, number)
    named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    connection.channel().queue_declare(QUEUE, durable=True, arguments={**STREAM, **named})
    connection.close()


def read(
    cluster: LocalCluster,
    number: int,
    count: int,
    start: Any = "first",
    *,
    prefetch: int = 200,
    **arguments: Any,
) -> list[tuple[int, bytes]]:
    """(offset, body) of the next `count` messages as one consumer of a node gets them."""
    found: list[tuple[int, bytes]] = []
    connection = connect(cluster, number)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=prefetch)
    if start is not None:
        arguments["x-stream-offset"] = start
    for method, properties, body in channel.consume(
        QUEUE, arguments=arguments, inactivity_timeout=PATIENCE_S
    ):
        assert method is not None, f"node {number}: {len(found)} of {count} came"
        found.append((properties.headers["x-stream-offset"], body))
        channel.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    # Not only the connection: that the consumer is gone is what stores its offset.
    channel.cancel()
    connection.close()
    return found


def committed(cluster: LocalCluster) -> int:
    """The next offset, as the leader's row in the list of queues shows it."""
    return int(cluster.api(f"queues/%2F/{QUEUE}")["next_offset"])


def assert_whole(found: list[tuple[int, bytes]], confirmed: set[int]) -> None:
    """Dense offsets; all that was confirmed, in the order in which it was published first."""
    assert [offset for offset, _ in found] == list(range(len(found)))
    numbers = [int(body) for _, body in found]
    assert all(body == padded(n, SIZE) for n, (_, body) in zip(numbers, found, strict=True))
    assert confirmed <= set(numbers)
    firsts = list(dict.fromkeys(numbers))
    assert firsts == sorted(firsts)


def test_the_leader_is_killed_again_and_again_under_confirms(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3), consume_at=()) as traffic:
        for _ in range(3):
            traffic.goes_on(200)
            victim = cluster.leader_of(QUEUE)
            cluster.kill(victim)
            traffic.goes_on(200)
            cluster.start_node(victim)
            cluster.wait_ready()
        publisher = traffic.publisher
        publisher.ending = True
        until(lambda: len(publisher.confirmed) == publisher.next, f"not all confirmed: {traffic}")
    in_step(cluster)
    count = committed(cluster)
    found = read(cluster, 1, count)
    assert_whole(found, publisher.confirmed)
    # What was sent again after a lost connection may be there twice, and nothing else.
    times = Counter(int(body) for _, body in found)
    assert {number for number, n in times.items() if n > 1} <= publisher.resent
    for number in (2, 3):
        assert read(cluster, number, count) == found


def test_all_nodes_die_and_the_stream_is_read_from_each(cluster: LocalCluster) -> None:
    declare(cluster, 2)
    with Traffic(cluster, QUEUE, publish_at=(3,), consume_at=()) as traffic:
        traffic.goes_on(500)
        cut_power(cluster)
        confirmed = set(traffic.publisher.confirmed)
        traffic.publisher.stopping = True
        start_nodes(cluster, 3, 1, 2)
    until(lambda: committed(cluster) >= len(confirmed), "confirmed messages are missing")
    count = committed(cluster)
    found = read(cluster, 1, count)
    assert_whole(found, confirmed)
    assert read(cluster, 2, count) == read(cluster, 3, count) == found


def test_readers_go_on_while_nodes_are_killed(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=((3,),)) as traffic:
        # The reader begins at `next`; from there it sees all, whoever leads.
        traffic.goes_on(300)
        cluster.kill(1)
        traffic.goes_on(300)
        cluster.start_node(1)
        cluster.wait_ready()
        traffic.goes_on(300)
        publisher = traffic.publisher
        publisher.ending = True
        until(lambda: len(publisher.confirmed) == publisher.next, f"not all confirmed: {traffic}")
        last = publisher.next - 1
        got = traffic.consumers[0].deliveries
        until(lambda: bool(got) and got[-1][0] == last, f"the reader is behind: {traffic}")
        numbers = [number for number, redelivered in got]
        assert not any(redelivered for _, redelivered in got)
        assert numbers == list(range(numbers[0], last + 1))


@pytest.mark.parametrize("reader", [1, 2, 3])
def test_one_replica_is_read_from_every_node(cluster: LocalCluster, reader: int) -> None:
    declare(cluster, 2, initial_cluster_size=1)
    row = cluster.api(f"queues/%2F/{QUEUE}")
    assert len(row["members"]) == 1
    fill(cluster, 3, QUEUE, 500, SIZE)
    whole = [(n, padded(n, SIZE)) for n in range(500)]
    assert read(cluster, reader, 500) == whole
    assert read(cluster, reader, 10, 490, prefetch=1) == whole[490:]
    # Its only node goes and comes back: readers elsewhere wait and go on.
    cluster.kill(2)
    cluster.start_node(2)
    cluster.wait_ready()
    fill(cluster, 1, QUEUE, 10, SIZE)
    assert read(cluster, reader, 15, 495)[:5] == whole[495:]


def test_a_wiped_node_gets_the_stream_back(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    fill(cluster, 1, QUEUE, 2000, SIZE)
    cluster.kill(3)
    shutil.rmtree(cluster.data / "node-3" / "data")
    fill(cluster, 1, QUEUE, 100, SIZE)
    cluster.start_node(3)
    cluster.wait_ready()
    in_step(cluster)
    # Alone with the wiped one: what it answers is its own.
    cluster.kill(1)
    found = read(cluster, 3, 2100)
    assert [int(body) for _, body in found] == [*range(2000), *range(100)]


def segment_bytes(cluster: LocalCluster, number: int) -> int:
    """What a node's groups take on disk, without the write-ahead log."""
    groups = cluster.data / f"node-{number}" / "data" / "groups"
    return sum(file.stat().st_size for file in groups.rglob("*") if file.is_file())


def test_retention_frees_the_disk(cluster: LocalCluster) -> None:
    declare(cluster, 1, max_length_bytes=8 * MIB, stream_max_segment_size_bytes=2 * MIB)
    size = 100_000
    total = 1200
    fill(cluster, 1, QUEUE, total, size)
    row = cluster.api(f"queues/%2F/{QUEUE}")
    assert row["message_bytes"] <= 11 * MIB
    first, end = row["first_offset"], row["next_offset"]
    assert end == total
    assert row["messages"] == end - first
    # 120 MB were written; the WAL was compacted several times and what is dead went with it.
    for number in (1, 2, 3):
        until(
            lambda n=number: segment_bytes(cluster, n) < 40 * MIB,
            f"node {number} keeps {segment_bytes(cluster, number) / MIB:.0f} MiB",
        )
    found = read(cluster, 2, total - first)
    assert found[0][0] == first
    assert [int(body) for _, body in found] == list(range(first, total))
    # A reader who asks for what is gone begins with what is left.
    assert read(cluster, 3, 1, 0)[0][0] == first


def test_what_is_too_old_goes(cluster: LocalCluster) -> None:
    declare(cluster, 1, max_age="2s", stream_max_segment_size_bytes=10_000)
    fill(cluster, 1, QUEUE, 500, SIZE)
    until(
        lambda: cluster.api(f"queues/%2F/{QUEUE}")["messages"] <= 200,
        "segments older than two seconds stay",
    )
    # The open segment stays, however old.
    row = cluster.api(f"queues/%2F/{QUEUE}")
    assert row["messages"] > 0
    assert row["next_offset"] == 500


def test_a_producer_that_repeats_itself_is_heard_once(cluster: LocalCluster) -> None:
    declare(cluster, 1)

    def publish(number: int, first: int, end: int) -> None:
        connection = connect(cluster, number)
        channel = connection.channel()
        channel.confirm_delivery()
        for sequence in range(first, end):
            headers = {"x-stream-producer": "loader", "x-stream-sequence": sequence}
            properties = pika.BasicProperties(delivery_mode=2, headers=headers)
            channel.basic_publish("", QUEUE, padded(sequence, SIZE), properties)
        connection.close()

    publish(1, 0, 60)
    # It crashed, does not know how far it came, and begins again, elsewhere, under a new leader.
    cluster.kill(1)
    publish(2, 30, 100)
    cluster.start_node(1)
    cluster.wait_ready()
    publish(1, 0, 110)
    found = read(cluster, 3, 110)
    assert [int(body) for _, body in found] == list(range(110))
    assert committed(cluster) == 110


def test_a_named_consumer_goes_on_behind_its_stored_offset(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    fill(cluster, 1, QUEUE, 300, SIZE)
    name = {"x-stream-consumer-name": "billing"}
    assert [o for o, _ in read(cluster, 2, 120, **name)] == list(range(120))
    # It is stored behind the consumer's end, and the node that is asked next must have heard of it.
    with Client(ClientConfig((f"127.0.0.1:{cluster.nodes[2].amqp_port}",))) as client:
        until(lambda: client.query_offset(QUEUE, "billing") == 119, "the last offset is not stored")
    cluster.kill(cluster.leader_of(QUEUE))
    # Elsewhere, under another leader; `first` counts only where nothing is stored.
    assert [o for o, _ in read(cluster, 3, 100, **name)] == list(range(120, 220))
    other = {"x-stream-consumer-name": "other"}
    assert [o for o, _ in read(cluster, 3, 5, **other)] == list(range(5))
