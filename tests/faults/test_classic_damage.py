"""Damaged files of classic queues on real nodes: plain queues name what they lack and serve the
rest, of mirrored queues a mirror that has all takes over. Every way of damage:
tests/unit/queues/classic/test_log_damage.py and tests/unit/queues/mirrored/test_damage.py."""

from __future__ import annotations

import os
from pathlib import Path

import pika  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes
from tests.faults.test_damage import flip
from tests.faults.test_mirrored import ALL, CLASSIC, QUEUE, has_mirrors, row, set_policy
from tests.faults.traffic import connect, log_has, padded, until
from tests.interop.helpers import fetch_all

COUNT = 60
SIZE = 5_000
PLAIN = ("flipped", "intact", "cut", "foreign")
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def folder_of(cluster: LocalCluster, node: int, queue: str) -> Path:
    """The folder that has the queue's first message."""
    name = queue.encode()
    data = cluster.data / f"node-{node}" / "data"
    return next(path.parent for path in data.rglob("0*.log") if name in path.read_bytes())


def damage(cluster: LocalCluster, how: str) -> str:
    """Spoils the one file of a queue; returns its name in the log."""
    folder = folder_of(cluster, 1, how)
    (path,) = folder.glob("*.log")
    if how == "flipped":
        flip(path, path.stat().st_size // 2)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "foreign":
        (other,) = folder_of(cluster, 1, "intact").glob("*.log")
        path.write_bytes(other.read_bytes())
    return f"{folder.name}/{path.name}"


def fill(cluster: LocalCluster, queue: str) -> None:
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.queue_declare(queue, durable=True, arguments=CLASSIC)
    channel.confirm_delivery()
    for number in range(COUNT):
        channel.basic_publish("", queue, padded(number, SIZE), PERSISTENT)
    connection.close()


def test_damage_is_named_and_a_mirror_that_has_all_takes_over(cluster: LocalCluster) -> None:
    set_policy(cluster, {**ALL, "ha-sync-mode": "automatic"})
    for queue in (QUEUE, *PLAIN):
        fill(cluster, queue)
    until(lambda: has_mirrors(cluster, 2), "no mirrors")
    # All nodes are stopped: the last master of the mirrored queue finds its copy damaged.
    cut_power(cluster)
    names = {how: damage(cluster, how) for how in PLAIN if how != "intact"}
    folder = folder_of(cluster, 1, QUEUE)
    flip(folder / "member", 5)
    start_nodes(cluster, 1, 2, 3)
    until(lambda: row(cluster, 2).get("state") == "running", "the queue does not open")
    until(lambda: log_has(cluster, 1, "queue.mirror_failed", "member"), "the damage is not named")
    connection = connect(cluster, 3)
    channel = connection.channel()
    every = [padded(number, SIZE) for number in range(COUNT)]
    assert fetch_all(channel, QUEUE) == every
    until(lambda: has_mirrors(cluster, 2, node=2), "the damaged copy does not begin anew")
    found = {how: fetch_all(channel, how) for how in PLAIN}
    assert found["intact"] == every
    assert found["foreign"] == []
    assert len(found["flipped"]) == COUNT - 1
    assert [body for body in every if body in found["flipped"]] == found["flipped"]
    assert found["cut"] == every[: len(found["cut"])]
    assert 0 < len(found["cut"]) < COUNT
    for how in ("flipped", "foreign"):
        assert log_has(cluster, 1, "queue.records_dropped", names[how]), how
    assert log_has(cluster, 1, "storage.torn_tail", names["cut"])
    connection.close()
