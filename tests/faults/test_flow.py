"""More than a link may queue is under way: all of it arrives, no link breaks, memory is bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pika

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes
from tests.faults.conftest import BASE_PORT, StartCluster
from tests.faults.proxies import ProxiedCluster
from tests.faults.traffic import connect, declare, fill, in_step, log_has, until

MIB = 1 << 20
BACKLOG = 4 * MIB
PUBLISHERS = 30
READERS = 30
RATE = 300_000
"""Bytes a second: 40 MB take longer than a test may."""
SETTINGS = {
    "cluster.link_backlog_max": str(BACKLOG),
    "publish_pending_max": str(8 * MIB),
}


def peak_bytes(cluster: LocalCluster, node: int) -> int:
    """The most memory that a node has had."""
    pid = cluster.nodes[node - 1].pid
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def goes_through(cluster: LocalCluster) -> None:
    for node in (1, 2, 3):
        assert not log_has(cluster, node, "link.dropped")
        assert not log_has(cluster, node, "link.bad_frame")


def test_a_fan_out_of_many_times_the_backlog_goes_through(start_cluster: StartCluster) -> None:
    """Two messages for 60 queues are 15 times what a link may queue. Their publisher is at a node
    that leads a third of the queues: entries and forwarded commands both wait."""
    cluster = start_cluster(settings={**SETTINGS, "queue_leader_locator": "balanced"})
    with ExitStack() as stack:
        connection = stack.enter_context(connect(cluster, 1))
        channel = connection.channel()
        channel.exchange_declare("fan", "fanout", durable=True)
        for number in range(60):
            channel.queue_declare(f"q{number}", durable=True, arguments={"x-queue-type": "quorum"})
            channel.queue_bind(f"q{number}", "fan")
        before = [peak_bytes(cluster, node) for node in (1, 2, 3)]
        channel.confirm_delivery()
        for _ in range(2):
            channel.basic_publish("fan", "", bytes(MIB // 2), pika.BasicProperties(delivery_mode=2))
        # From a node that leads other queues than the one that published.
        at = stack.enter_context(connect(cluster, 2)).channel()
        for number in range(60):
            for _ in range(2):
                method, _, body = at.basic_get(f"q{number}", auto_ack=True)
                assert method is not None
                assert len(body) == MIB // 2
        goes_through(cluster)
        grown = [peak_bytes(cluster, n) - b for n, b in zip((1, 2, 3), before, strict=True)]
        # 60 MiB went to each. The publisher's node keeps one message for every queue.
        assert max(grown) < 130 * MIB, grown


def test_many_connections_with_large_messages_go_through(start_cluster: StartCluster) -> None:
    """Thirty publishers at one node, their queue led by another one: 60 MiB of forwarded commands
    over a link that may queue 4."""
    cluster = start_cluster(settings=SETTINGS)
    with ExitStack() as stack:
        channel = stack.enter_context(connect(cluster, 1)).channel()
        channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})

        def publish() -> None:
            with connect(cluster, 2) as connection:
                publisher = connection.channel()
                publisher.confirm_delivery()
                for _ in range(2):
                    publisher.basic_publish("", "q", bytes(MIB))

        with ThreadPoolExecutor(PUBLISHERS) as pool:
            for done in [pool.submit(publish) for _ in range(PUBLISHERS)]:
                done.result()
        goes_through(cluster)
        assert channel.queue_declare("q", passive=True).method.message_count == 2 * PUBLISHERS


def test_many_readers_on_a_node_without_their_stream_go_on(start_cluster: StartCluster) -> None:
    """They wait for the same message, which then goes to each of them over one link."""
    cluster = start_cluster(settings={"cluster.link_backlog_max": str(BACKLOG)})
    with ExitStack() as stack:
        channel = stack.enter_context(connect(cluster, 1)).channel()
        arguments = {"x-queue-type": "stream", "x-initial-cluster-size": 1}
        channel.queue_declare("s", durable=True, arguments=arguments)
        channel.confirm_delivery()
        away = stack.enter_context(connect(cluster, 2))
        got = [0] * READERS
        for number in range(READERS):

            def count(reader: Any, method: Any, _properties: Any, _body: bytes, n: int) -> None:
                got[n] += 1
                reader.basic_ack(method.delivery_tag)

            reader = away.channel()
            reader.basic_qos(prefetch_count=10)
            reader.basic_consume("s", partial(count, n=number), arguments={"x-stream-offset": 0})
        for published in range(1, 4):
            channel.basic_publish("", "s", bytes(MIB))
            while min(got) < published:
                away.process_data_events(time_limit=1.0)
        assert got == [3] * READERS
        goes_through(cluster)


def test_clients_of_a_node_that_catches_up_are_served_by_the_leader(tmp_path: Path) -> None:
    """A node comes back over links so slow that catching up takes longer than any test may. Its
    clients publish and consume meanwhile. Then the links are quick again, and it catches up."""
    settings = {
        "raft.wal_max_size_bytes": "16MiB",
        "cluster.link_backlog_max": "1MiB",
        "cluster.suspect_after_min": "10000",
        "cluster.suspect_after_max": "10000",
    }
    with ProxiedCluster(tmp_path / "cluster", 3, BASE_PORT, settings) as cluster:
        cluster.wait_ready()
        declare(cluster, 1, "q")
        leader = cluster.leader_of("q")
        slow = leader % 3 + 1
        fill(cluster, leader, "q", 10, 100)
        cluster.kill(slow)
        fill(cluster, leader, "q", 400, 100_000)
        for node in {1, 2, 3} - {slow}:
            cluster.proxies.slow(slow, node, RATE)
        cluster.start_node(slow)
        cluster.wait_ready()
        with connect(cluster, slow) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"from the slow node")
            channel.basic_qos(prefetch_count=5)
            for method, _, _ in islice(channel.consume("q"), 8):
                channel.basic_ack(method.delivery_tag)
            channel.cancel()
        for node in {1, 2, 3} - {slow}:
            cluster.proxies.slow(slow, node, 0)
        in_step(cluster)


def test_a_channel_beyond_the_soft_limit_of_commands_is_in_flow(
    start_cluster: StartCluster,
) -> None:
    """While there is no majority nothing is applied: the channel and its connection say `flow`.
    Nothing is lost by it."""
    settings = {
        "quorum_queue.commands_soft_limit": "2",
        "quorum_queue.publish_timeout_without_leader": "0",
    }
    cluster = start_cluster(settings=settings)
    declare(cluster, 1, "q")
    at = cluster.leader_of("q")
    others = [node for node in (1, 2, 3) if node != at]
    with connect(cluster, at) as connection:
        channel = connection.channel()
        sent = 0

        def states() -> set[str]:
            rows = [*cluster.api("channels", at), *cluster.api("connections", at)]
            return {row["state"] for row in rows}

        def slowed_down() -> bool:
            nonlocal sent
            channel.basic_publish("", "q", b"%d" % sent, pika.BasicProperties(delivery_mode=2))
            sent += 1
            return states() == {"flow"}

        assert states() == {"running"}
        cut_power(cluster, *others)
        until(slowed_down, "the channel is not slowed down")
        start_nodes(cluster, *others)
        until(lambda: states() == {"running"}, "the channel does not go on")
        until(lambda: cluster.messages_in("q") == sent, "messages are lost")
