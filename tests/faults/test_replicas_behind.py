"""A node whose replica lacks what its clients ask for: the leader serves them meanwhile.

What would let the replica go on is lost on its way, so it stays where it is until a test ends that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.kernels.columns import OFFSET, VALUE
from convoymq.kernels.link_frames import FRAME_APPEND, FRAME_RAFT
from convoymq.replication.raft.types import REJOIN
from convoymq.shells.groups import transfer
from tests.faults.conftest import BASE_PORT, StartCluster
from tests.faults.proxies import HEADER_SIZE, ProxiedCluster, SeenFrame
from tests.faults.test_damage import (
    QUEUE,
    SIZE,
    VICTIM,
    flip,
    log_directory,
    prepare,
    segments,
    snapshot,
)
from tests.faults.test_streams import QUEUE as STREAM
from tests.faults.test_streams import read
from tests.faults.traffic import (
    Traffic,
    connect,
    counter,
    declare,
    fill,
    in_step,
    log_has,
    padded,
    until,
)

COUNT = 300
SETTINGS = {"raft.wal_max_size_bytes": "16MiB"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(tmp_path / "cluster", 3, BASE_PORT, SETTINGS) as made:
        made.wait_ready()
        yield made


def asks_to_be_taken_in(victim: int) -> Callable[[SeenFrame], bool]:
    """Frames in which a node's replica of the queue says that it has lost its copy."""
    return lambda seen: (
        (seen.sender, seen.type, seen.message) == (victim, FRAME_RAFT, REJOIN) and seen.group > 0
    )


def brings_entries(victim: int) -> Callable[[SeenFrame], bool]:
    """Frames with entries of the queue, or with its snapshot, for a node."""

    def brings(seen: SeenFrame) -> bool:
        if seen.receiver != victim or seen.group == 0:
            return False
        if seen.type == FRAME_RAFT:
            return transfer.BEGIN <= seen.message <= transfer.END
        return seen.type == FRAME_APPEND and seen.size > HEADER_SIZE

    return brings


def lose_copy(cluster: LocalCluster, victim: int, lost: str) -> None:
    """Deletes the log of a node that is down, or all that it has."""
    log = log_directory(cluster, victim)
    for path in (log / "wal", log / "groups") if lost == "log" else (log.parent,):
        shutil.rmtree(path)


def nothing(_: SeenFrame) -> bool:
    """No frame is lost."""
    return False


def waits(cluster: LocalCluster, victim: int) -> bool:
    """Whether one replica of a node, and no more, has lost its copy and not got it back."""
    return (
        counter(cluster, victim, "groups_followed") == 2
        and counter(cluster, victim, "replicas_behind") == 1
    )


def takes_part_again(cluster: LocalCluster, victim: int, traffic: Traffic) -> None:
    """A node's replica gets everything: without the leader of before it makes the majority. Nothing
    is lost, delivered twice or out of order."""
    in_step(cluster)
    traffic.goes_on(500)
    cluster.kill(cluster.leader_of(QUEUE))
    traffic.goes_on(500)
    traffic.finish()
    assert not traffic.publisher.resent


def hand_over(cluster: LocalCluster, queue: str, leader: int, to: int) -> int:
    """Kills the leader of a queue, so that the only other node with a whole copy is elected, and
    starts it again."""
    cluster.kill(leader)
    words = ("raft.role_changed", '"group": 1', '"role": "leader"')
    until(lambda: log_has(cluster, to, *words), "nobody else is elected")
    cluster.start_node(leader)
    cluster.wait_ready()
    until(lambda: cluster.leader_of(queue) == to, "nobody else leads")
    return to


@pytest.mark.parametrize("held", ["not taken in", "without entries"])
@pytest.mark.parametrize("lost", ["log", "everything"])
def test_clients_of_a_replica_that_lost_its_copy_are_served(
    cluster: ProxiedCluster, lost: str, held: str
) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, COUNT, SIZE)
    in_step(cluster)
    leader = cluster.leader_of(QUEUE)
    victim = leader % 3 + 1
    cluster.kill(victim)
    lose_copy(cluster, victim, lost)
    hold = asks_to_be_taken_in if held == "not taken in" else brings_entries
    cluster.proxies.loses = hold(victim)
    cluster.start_node(victim)
    cluster.wait_ready()
    until(lambda: waits(cluster, victim), "only the queue's replica should wait")
    with Traffic(
        cluster, QUEUE, publish_at=(victim,), consume_at=((victim,),), size=SIZE, filled=COUNT
    ) as traffic:
        traffic.goes_on(500)
        until(lambda: traffic.missing().isdisjoint(range(COUNT)), f"not all came: {traffic}")
        assert waits(cluster, victim)
        cluster.proxies.loses = nothing
        takes_part_again(cluster, victim, traffic)


@pytest.mark.parametrize("how", ["same leader", "new leader"])
def test_clients_go_on_when_the_replica_of_their_node_falls_behind(
    cluster: ProxiedCluster, how: str
) -> None:
    declare(cluster, 1, QUEUE)
    leader = cluster.leader_of(QUEUE)
    victim, third = leader % 3 + 1, (leader + 1) % 3 + 1
    with Traffic(
        cluster, QUEUE, publish_at=(victim,), consume_at=((victim,),), size=SIZE
    ) as traffic:
        traffic.goes_on(500)
        cluster.proxies.loses = brings_entries(victim)
        traffic.goes_on(500)
        if how == "new leader":
            leader = hand_over(cluster, QUEUE, leader, third)
            traffic.goes_on(500)
        assert counter(cluster, leader, "replicas_behind") == 1
        cluster.proxies.loses = nothing
        takes_part_again(cluster, victim, traffic)


def test_clients_of_a_replica_whose_damaged_log_cannot_be_removed_are_served(
    start_cluster: StartCluster,
) -> None:
    cluster, count = prepare(start_cluster)
    # What cannot be read as a file stops the removal of the group's files.
    obstacle = snapshot(cluster, VICTIM)
    obstacle.unlink()
    obstacle.mkdir()
    for path in segments(cluster, VICTIM):
        flip(path, path.stat().st_size // 2)
    with Traffic(
        cluster,
        QUEUE,
        publish_at=(VICTIM,),
        consume_at=((VICTIM,),),
        size=SIZE,
        filled=count,
    ) as traffic:
        until(lambda: log_has(cluster, VICTIM, "raft.wipe_failed"), "the log is removed")
        traffic.goes_on(500)
        until(lambda: traffic.missing().isdisjoint(range(count)), f"not all came: {traffic}")
        assert waits(cluster, VICTIM)
        obstacle.rmdir()
        takes_part_again(cluster, VICTIM, traffic)


class Reader:
    """A consumer of the stream on one node."""

    def __init__(self, cluster: LocalCluster, number: int, start: Any) -> None:
        self.found: list[tuple[int, bytes]] = []
        self.connection = connect(cluster, number)
        channel = self.connection.channel()
        channel.basic_qos(prefetch_count=20)
        channel.basic_consume(STREAM, self.on_message, arguments={"x-stream-offset": start})

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.found.append((properties.headers["x-stream-offset"], body))
        channel.basic_ack(method.delivery_tag)

    def gets(self, last: int) -> None:
        """Waits until it has the message at an offset."""

        def has_it() -> bool:
            self.connection.process_data_events(0)
            return bool(self.found) and self.found[-1][0] >= last

        until(has_it, f"the message at offset {last} does not come")


def whole(first: int, end: int) -> list[tuple[int, bytes]]:
    """What the stream has from one offset to before another."""
    return [(n, padded(n, SIZE)) for n in range(first, end)]


def fetched(client: Client, first: int, end: int) -> list[tuple[int, bytes]]:
    """The same as a columnar client gets it."""
    found: list[tuple[int, bytes]] = []
    while first < end:
        frame = client.fetch(STREAM, first, end=end, columns=OFFSET | VALUE).frame
        ends, data = frame.buffers(VALUE)[-2].cast("i"), frame.buffers(VALUE)[-1]
        bodies = [bytes(data[ends[n] : ends[n + 1]]) for n in range(frame.rows)]
        found += zip(frame.offsets(), bodies, strict=True)
        first = frame.next
    return found


@pytest.mark.parametrize("how", ["same leader", "new leader", "lost copy"])
def test_readers_of_a_stream_get_what_the_replica_of_their_node_lacks(
    cluster: ProxiedCluster, how: str
) -> None:
    declare(cluster, 1, STREAM, {"x-queue-type": "stream"})
    fill(cluster, 1, STREAM, 50, SIZE)
    in_step(cluster)
    leader = cluster.leader_of(STREAM)
    victim, third = leader % 3 + 1, (leader + 1) % 3 + 1
    with ExitStack() as stack:

        def reader(start: Any) -> Reader:
            return stack.enter_context(Reader(cluster, victim, start))

        if how == "lost copy":
            cluster.kill(victim)
            lose_copy(cluster, victim, "everything")
            cluster.proxies.loses = brings_entries(victim)
            cluster.start_node(victim)
            cluster.wait_ready()
            early = reader("first")
        else:
            early = reader("first")
            early.gets(49)
            cluster.proxies.loses = brings_entries(victim)
        fill(cluster, third, STREAM, 50, SIZE, first=50)
        if how == "new leader":
            leader = hand_over(cluster, STREAM, leader, third)
        early.gets(99)
        later = {start: reader(start) for start in ("first", "last", 90, "next")}
        fill(cluster, victim, STREAM, 10, SIZE, first=100)
        for each in (early, *later.values()):
            each.gets(109)
        address = f"127.0.0.1:{cluster.nodes[victim - 1].amqp_port}"
        client = stack.enter_context(Client(ClientConfig((address,))))
        assert client.offsets([(STREAM, "latest", None)]) == [(110, None)]
        assert fetched(client, 95, 110) == whole(95, 110)
        assert fetched(client, 0, 110) == whole(0, 110)
        # The leader still knows of one replica that lacks something.
        assert counter(cluster, leader, "replicas_behind") == 1
        cluster.proxies.loses = nothing
        in_step(cluster)
        fill(cluster, victim, STREAM, 10, SIZE, first=110)
        for each in (early, *later.values()):
            each.gets(119)
            assert each.found == whole(each.found[0][0], 120)
        assert [each.found[0][0] for each in (early, later["first"])] == [0, 0]
        assert [later[start].found[0][0] for start in (90, "next")] == [90, 100]
        assert later["last"].found[0][0] < 100
    # Without the leader, what the replica answers is its own.
    cluster.kill(leader)
    assert read(cluster, victim, 120) == whole(0, 120)
