"""Partitions of ordered topics that are sealed from outside, because their majority is gone.

The partitions have two members each, and both are a majority. Writes go on in a new partition;
groups wait for the old one, until it is back or declared lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
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
from tests.faults.test_topics import restart
from tests.faults.topic_traffic import begin, create, finished, open_pids, path
from tests.faults.traffic import connect, until
from tests.ports import cluster_ports

BASE_PORT = cluster_ports()


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
