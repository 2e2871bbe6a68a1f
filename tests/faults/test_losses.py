"""What clients see when nodes are few, empty, far away, or out of room."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster, resident_bytes
from tests.clusters import cut_power, start_nodes
from tests.faults.conftest import StartCluster, ballast
from tests.faults.traffic import (
    Traffic,
    connect,
    counter,
    declare,
    drain,
    fill,
    in_step,
    log_has,
    until,
)

QUEUE = "orders"
SIZE = 1000
MIB = 1 << 20


def test_a_minority_confirms_and_delivers_nothing(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(1,), consume_at=((1,),)) as traffic:
        traffic.goes_on()
        cut_power(cluster, 2, 3)
        until(
            lambda: cluster.api("convoy/node", 1)["state"] == "no majority",
            "the last node does not notice that it is alone",
        )
        # What was committed before has reached the clients when nothing more comes for a while;
        # what is published from here on must wait.
        settled(traffic)
        confirmed, delivered = traffic.confirmed, traffic.delivered
        beginning = traffic.publisher.next
        traffic.publisher.window += 100
        until(lambda: traffic.publisher.next >= beginning + 100, f"nothing published: {traffic}")
        settled(traffic)
        assert (traffic.confirmed, traffic.delivered) == (confirmed, delivered)
        cluster.start_node(2)
        cluster.start_node(3)
        cluster.wait_ready()
        traffic.goes_on()
        traffic.finish()


def settled(traffic: Traffic) -> None:
    """Waits until a second passes without a confirm or a delivery."""
    last = (-1, -1)
    since = time.monotonic()

    def quiet() -> bool:
        nonlocal last, since
        now = (traffic.confirmed, traffic.delivered)
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 1.0

    until(quiet, f"never quiet: {traffic}")


def test_a_wiped_node_gets_all_its_groups_back(cluster: LocalCluster) -> None:
    queues = [f"{QUEUE}-{k}" for k in range(5)]
    for number, queue in enumerate(queues):
        declare(cluster, number % 3 + 1, queue)
        fill(cluster, 1, queue, 200, SIZE)
    cluster.kill(3)
    shutil.rmtree(cluster.data / "node-3" / "data")
    cluster.start_node(3)
    cluster.wait_ready()
    until(
        lambda: counter(cluster, 3, "groups_led") + counter(cluster, 3, "groups_followed") == 6,
        "the wiped node lacks groups",
    )
    in_step(cluster)
    # With another node gone, nothing can be served without what the wiped one got back.
    cluster.kill(1)
    for queue in queues:
        assert drain(cluster, 3, queue, 200, SIZE) == list(range(200))


@pytest.mark.parametrize("size", [1, 3])
def test_consumers_and_publishers_on_nodes_without_a_replica(
    start_cluster: StartCluster, size: int
) -> None:
    cluster = start_cluster(nodes=3 if size == 1 else 5)
    declare(cluster, 1, QUEUE, {"x-quorum-initial-group-size": size})
    names = cluster.api(f"queues/%2F/{QUEUE}")["members"]
    members = [int(re.findall(r"-(\d+)@", name)[0]) for name in names]
    assert len(members) == size
    far = [node.number for node in cluster.nodes if node.number not in members]
    consume_at = [(far[0],), (far[1],)]
    with Traffic(cluster, QUEUE, publish_at=(far[0],), consume_at=consume_at) as traffic:
        traffic.all_consume()
        victim = cluster.leader_of(QUEUE)
        assert counter(cluster, victim, "deliveries_proxied") > 0
        cluster.kill(victim)
        if size > 1:
            traffic.goes_on(300)
        cluster.start_node(victim)
        cluster.wait_ready()
        traffic.goes_on(300)
        traffic.all_consume()
        traffic.finish()


# Room: a small file system of its own.


def test_publishers_are_blocked_while_the_disk_is_nearly_full(
    small_disk: Path, start_cluster: StartCluster
) -> None:
    settings = {"disk_free_limit.absolute": "20MiB", "raft.wal_max_size_bytes": "1MiB"}
    cluster = start_cluster(settings=settings)
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        traffic.goes_on()
        heavy = ballast(small_disk, 10 * MIB)
        until(lambda: traffic.publisher.blocked, "the publisher is not told")
        assert any(log_has(cluster, number, "alarm.disk") for number in (1, 2, 3))
        # Consumers go on: what is there is taken out.
        until(lambda: cluster.messages_in(QUEUE) == 0, "consumers do not go on")
        heavy.unlink()
        until(lambda: not traffic.publisher.blocked, "the publisher stays blocked")
        traffic.goes_on()
        traffic.finish()


def test_nothing_is_confirmed_that_a_full_disk_did_not_take(
    small_disk: Path, start_cluster: StartCluster
) -> None:
    settings = {"disk_free_limit.absolute": "0", "raft.wal_max_size_bytes": "1MiB"}
    cluster = start_cluster(settings=settings)
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=(), size=2000) as traffic:
        traffic.goes_on()
        heavy = ballast(small_disk, 0)
        until(
            lambda: any(log_has(cluster, number, "storage.blocked") for number in (1, 2, 3)),
            "the disk does not get full",
        )
        until(lambda: traffic.publisher.blocked, "the publisher is not told")
        settled(traffic)
        confirmed = set(traffic.publisher.confirmed)
        # The power fails while the disk is full: what was confirmed is there all the same.
        cut_power(cluster)
        heavy.unlink()
        start_nodes(cluster, 1, 2, 3)
        traffic.goes_on()
        traffic.finish()
    found = set(drain(cluster, 3, QUEUE, len(traffic.publisher.confirmed), 2000))
    assert confirmed <= found
    assert traffic.publisher.confirmed <= found


def test_confirms_resume_when_a_full_disk_has_room_again(
    small_disk: Path, start_cluster: StartCluster
) -> None:
    settings = {"disk_free_limit.absolute": "0", "raft.wal_max_size_bytes": "1MiB"}
    cluster = start_cluster(settings=settings)
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,), size=2000) as traffic:
        traffic.goes_on()
        heavy = ballast(small_disk, 0)
        until(
            lambda: any(log_has(cluster, number, "storage.blocked") for number in (1, 2, 3)),
            "the disk does not get full",
        )
        heavy.unlink()
        until(lambda: not traffic.publisher.blocked, "the publisher stays blocked")
        traffic.goes_on(300)
        traffic.finish()


# Unknown clients, and memory.


def unknown_clients(port: int, count: int, words: bytes) -> None:
    """So many connections that say something and wait for their end."""
    for _ in range(count // 50):
        with ExitStack() as stack:
            group = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 30.0))
                for _ in range(50)
            ]
            for peer in group:
                with suppress(ConnectionError):
                    peer.sendall(words)
            for peer in group:
                with suppress(ConnectionError):
                    while peer.recv(4096):
                        pass


def test_unknown_clients_are_closed_and_harm_nobody(start_cluster: StartCluster) -> None:
    cluster = start_cluster(settings={"handshake_timeout": "300"})
    declare(cluster, 1, QUEUE)
    port = cluster.nodes[1].amqp_port
    pid = cluster.nodes[1].pid
    assert pid is not None
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        traffic.goes_on()
        # Silent ones, and ones that stop after the header, until the time is up.
        unknown_clients(port, 50, b"")
        unknown_clients(port, 50, b"AMQP\x00\x00\x09\x01")
        # A malformed frame is answered with connection.close, and its answer awaited for a while.
        unknown_clients(port, 50, b"AMQP\x00\x00\x09\x01" + b"\xff" * 3000)
        junk = (b"GET / HTTP/1.1\r\n\r\n", os.urandom(3000))
        for words in junk:
            unknown_clients(port, 500, words)
        before = resident_bytes(pid)
        for words in junk:
            unknown_clients(port, 1000, words)
        assert resident_bytes(pid) - before < 16 * MIB
        traffic.goes_on()
        traffic.finish()
    assert counter(cluster, 2, "connections") == 0


def stays_below(pids: list[int], before: list[int], more: int, what: str) -> None:
    """Waits until no process has more than so many bytes more than before."""
    until(
        lambda: all(
            resident_bytes(pid) - base < more for pid, base in zip(pids, before, strict=True)
        ),
        what,
    )


def test_a_backlog_beyond_the_memory_goes_to_disk_and_comes_back(
    start_cluster: StartCluster,
) -> None:
    settings = {"raft.mem_table_max_bytes": "8MiB", "raft.wal_max_size_bytes": "16MiB"}
    cluster = start_cluster(settings=settings)
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 200, 100_000)
    drain(cluster, 2, QUEUE, 200, 100_000)
    pids = [node.pid for node in cluster.nodes if node.pid is not None]
    before = [resident_bytes(pid) for pid in pids]
    fill(cluster, 1, QUEUE, 2000, 100_000)
    stays_below(pids, before, 96 * MIB, "200 MB stay in memory")
    assert drain(cluster, 2, QUEUE, 2000, 100_000) == list(range(2000))
    stays_below(pids, before, 48 * MIB, "memory is not given back")


def test_a_consumer_that_does_not_read_costs_no_memory(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    lazy = connect(cluster, 2)
    lazy.channel().basic_consume(QUEUE, lambda *_: None, auto_ack=True)
    pid = cluster.nodes[1].pid
    assert pid is not None
    before = resident_bytes(pid)
    # Nobody calls `lazy`: its socket fills and what follows must wait in the queue.
    fill(cluster, 1, QUEUE, 1500, 100_000)
    until(lambda: resident_bytes(pid) - before < 128 * MIB, "150 MB wait for a lazy consumer")
    lazy.close()
