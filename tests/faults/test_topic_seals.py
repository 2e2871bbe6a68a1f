"""Partitions of ordered topics that are sealed from outside, because their majority is gone.

The partitions have two members each, and both are a majority. Writes go on in a new partition;
groups wait for the old one, until it is back or declared lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.client.topic_producer import TopicProducer
from tests.clusters import call, serving_cluster
from tests.faults.test_topic_losses import (
    TWO_MEMBERS,
    Reader,
    group_row,
    keys_of,
    lag_row,
    members_of,
    publish,
    rows,
)
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import (
    begin,
    changed,
    create,
    finished,
    leader_of,
    name_of,
    open_pids,
    path,
)
from tests.faults.traffic import connect, until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("seals"), BASE_PORT, TWO_MEMBERS) as made:
        create(made, "first", 1)
        yield made


class Waiting(threading.Thread):
    """A publish that waits for its outcome."""

    def __init__(self, cluster: LocalCluster, node: int, topic: str, key: str, body: str) -> None:
        super().__init__()
        self._connection = connect(cluster, node)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._message = (topic, key, body.encode())
        self.outcome = ""
        self.start()

    def run(self) -> None:
        try:
            self._channel.basic_publish(*self._message)
        except pika.exceptions.NackError:
            self.outcome = "nack"
        else:
            self.outcome = "ack"
        self._connection.close()


def test_writes_go_on_and_groups_wait_for_the_old_partition(cluster: LocalCluster) -> None:
    topic = "sealed"
    create(cluster, topic, 2)
    dead, gone = next(
        (node, pid) for pid, nodes in members_of(cluster, topic).items() for node in nodes
    )
    alive = next(n for n in (1, 2, 3) if n != dead)
    key = keys_of(cluster, topic, gone)[0]
    publish(cluster, alive, topic, *((key, f"old-{n}") for n in range(3)))
    status, answer = call(cluster, "POST", path(topic, "seal"), {"pid": gone})
    assert status == 400
    assert f"partition {gone} answers: move it" in answer["reason"]
    with Reader(cluster, f"{topic}/readers", alive) as reader:
        reader.waits_for("old-0", "old-1", "old-2")
        reader.acknowledge("old-0")
        until(lambda: lag_row(cluster, topic, gone)["watermark"] == 2, "it is not acknowledged")
    cluster.kill(dead)
    waiting = Waiting(cluster, alive, topic, key, "unknown")
    change = finished(cluster, topic, begin(cluster, topic, "seal", pid=gone))
    assert (change["kind"], change["sources"]) == ("move", [gone])
    waiting.join(20.0)
    assert waiting.outcome == "nack"
    publish(cluster, alive, topic, (key, "new-0"), (key, "new-1"))
    assert gone not in open_pids(cluster, topic)
    assert group_row(cluster, topic, "readers")["waits_for"] == [gone]
    assert lag_row(cluster, topic, gone)["state"] == "sealed_outside"
    target = change["targets"][0]["pid"]
    assert lag_row(cluster, topic, target)["waits_for"] == [gone]
    with Reader(cluster, f"{topic}/readers", alive) as reader:
        restart(cluster, dead)
        reader.comes("old-2")
        found = reader.bodies()
        assert found[:2] == ["old-1", "old-2"]
        # What was under way may have been stored, and comes before the target's messages.
        for body in found:
            reader.acknowledge(body)
        reader.comes("new-1")
        tail = reader.bodies()[2:]
        assert tail in (["new-0", "new-1"], ["unknown", "new-0", "new-1"])
    until(lambda: group_row(cluster, topic, "readers")["cv"] == 1, "the version stands still")
    lineage = rows(cluster, topic, "route?lineage=true")
    assert next(row["close_offset"] for row in lineage if row["pid"] == gone) in (4, 5)


def with_dead_member(cluster: LocalCluster, topic: str, *spared: int) -> tuple[int, int, int]:
    """Kills a node; returns it, a partition that has no majority then, and a node that lives."""
    dead, gone = next(
        (node, pid)
        for pid, nodes in members_of(cluster, topic).items()
        for node in nodes
        if node not in spared
    )
    cluster.kill(dead)
    return dead, gone, next(n for n in (1, 2, 3) if n not in (dead, *spared))


def test_a_producer_with_sequences_goes_on_and_nothing_comes_twice(cluster: LocalCluster) -> None:
    """What had no answer is sent again, to the target, and perhaps stored twice; a group gets it
    once, and the messages of each key in order."""
    topic = "numbered"
    create(cluster, topic, 1)
    leader = leader_of(cluster, topic, 0)
    dead = next(node for node in members_of(cluster, topic)[0] if node != leader)
    keys = [f"k{n}" for n in range(8)]
    servers = [f"127.0.0.1:{cluster.nodes[n - 1].amqp_port}" for n in (1, 2, 3) if n != dead]
    with Client(ClientConfig(tuple(servers))) as client:
        producer = TopicProducer(client, topic, producer_id="importer")
        futures = [producer.send(keys[n % 8], b"%d" % n) for n in range(200)]
        for future in futures:
            future.result(PATIENCE_S)
        cluster.kill(dead)
        futures += [producer.send(keys[n % 8], b"%d" % n) for n in range(200, 300)]
        finished(cluster, topic, begin(cluster, topic, "seal", pid=0))
        for future in futures:
            future.result(60)
        # A session that begins now numbers its messages anew.
        later = TopicProducer(client, topic, producer_id="importer")
        futures = [later.send(keys[n % 8], b"%d" % n) for n in range(300, 400)]
        for future in futures:
            future.result(PATIENCE_S)
        later.close()
        restart(cluster, dead)
        alive = next(n for n in (1, 2, 3) if n != dead)
        with Reader(cluster, f"{topic}/readers", alive) as reader:
            got = reader.take(400)
    assert sorted(map(int, got)) == list(range(400))
    for key in range(8):
        mine = [int(body) for body in got if int(body) % 8 == key]
        assert mine == sorted(mine)


@pytest.mark.parametrize("moment", ["given_up", "sealed"])
def test_the_metadata_leader_is_killed_during_the_seal(cluster: LocalCluster, moment: str) -> None:
    topic = f"leaderless-{moment}"
    create(cluster, topic, 3)
    leads = metadata_leader(cluster)
    dead, gone, alive = with_dead_member(cluster, topic, leads)
    key = keys_of(cluster, topic, gone)[0]
    id = begin(cluster, topic, "seal", pid=gone)
    if moment == "sealed":
        finished(cluster, topic, id)
    cluster.kill(leads)
    restart(cluster, leads)
    finished(cluster, topic, id)
    publish(cluster, alive, topic, (key, "new"))
    restart(cluster, dead)
    with Reader(cluster, f"{topic}/readers", alive) as reader:
        reader.comes("new")


def test_a_leader_that_stood_still_appends_nothing_after_the_seal(cluster: LocalCluster) -> None:
    """It is in its old term when it goes on, with a majority, and publishers wait for it."""
    topic = "late"
    create(cluster, topic, 1)
    leads = metadata_leader(cluster)
    # Node 1 is the one that the test asks.
    old = next(n for n in (2, 3) if n != leads)
    gone = 0
    if leader_of(cluster, topic, 0) != old:
        (gone,) = changed(cluster, topic, "move", pid=0, node=name_of(cluster, old))
    alive = next(n for n in (1, 2, 3) if n not in (old, leads))
    key = keys_of(cluster, topic, gone)[0]
    publish(cluster, old, topic, (key, "before"))
    connection = connect(cluster, old)
    channel = connection.channel()
    cluster.kill(old, signal.SIGSTOP)
    try:
        change = finished(cluster, topic, begin(cluster, topic, "seal", pid=gone))
        publish(cluster, alive, topic, (key, "new"))
        # The node reads it before anything else when it goes on.
        channel.basic_publish(topic, key, b"stale")
    finally:
        cluster.kill(old, signal.SIGCONT)
    target = change["targets"][0]["pid"]
    with Reader(cluster, f"{topic}/readers", alive) as reader:
        reader.comes("before")
        reader.acknowledge("before")
        reader.comes("new")
        in_source = [body for body, pid, _ in reader.got if pid == gone]
        assert in_source == ["before"]
        assert next(pid for body, pid, _ in reader.got if body == "new") == target
    connection.close()


def test_a_silent_partition_is_sealed_by_itself_and_declared_lost(cluster: LocalCluster) -> None:
    topic = "automatic"
    create(cluster, topic, 2, **{"seal-after": "1s"})
    dead, gone, alive = with_dead_member(cluster, topic)
    until(lambda: gone not in open_pids(cluster, topic), "it is not sealed")
    key = keys_of(cluster, topic, open_pids(cluster, topic)[0])[0]
    with Reader(cluster, f"{topic}/readers", alive) as reader:
        publish(cluster, alive, topic, (key, "new"))
        status, answer = call(cluster, "POST", path(topic, "declare-lost"), {"pid": gone})
        assert status == 204, answer
        reader.comes("new")
    (loss,) = rows(cluster, topic, "losses")
    assert (loss["group"], loss["pid"]) == ("readers", gone)
    restart(cluster, dead)
