"""Weak topics whose partitions lose their majority, or their messages before they are read.

The partitions have two members each, and both are a majority; so with one node dead some have none,
and the cluster goes on. `weak-wait` is two seconds here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_topic_losses import TWO_MEMBERS, group_row, keys_of, members_of, rows
from tests.faults.test_topics import restart
from tests.faults.topic_traffic import changed, create, name_of, open_pids, path
from tests.faults.traffic import connect, until
from tests.interop.test_topic_groups import Client
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
WEAK = {"mode": "weak", "weak-wait": "2s"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("weak"), BASE_PORT, TWO_MEMBERS) as made:
        create(made, "first", 1)
        yield made


def publish(cluster: LocalCluster, node: int, topic: str, key: str, *bodies: str) -> None:
    connection = connect(cluster, node)
    channel = connection.channel()
    channel.confirm_delivery()
    for body in bodies:
        channel.basic_publish(topic, key, body.encode())
    connection.close()


def got(client: Client) -> dict[str, dict[str, Any]]:
    """Headers of what a client has, by body."""
    return {body.decode(): dict(properties.headers) for _, properties, body in client.hand}


def create_group(cluster: LocalCluster, topic: str, group: str) -> None:
    status, answer = call(cluster, "PUT", path(topic, "groups", group), {})
    assert status in (201, 204), answer


def member_of_one(cluster: LocalCluster, topic: str) -> tuple[int, int]:
    """A node that has a single partition of a topic, and this partition."""
    found: dict[int, list[int]] = {}
    for pid, nodes in members_of(cluster, topic).items():
        for node in nodes:
            found.setdefault(node, []).append(pid)
    return next((node, pids[0]) for node, pids in found.items() if len(pids) == 1)


def weak_wait(cluster: LocalCluster, topic: str, wait: str) -> None:
    """Sets it by a policy, so that it can change."""
    body = {"pattern": f"^{topic}$", "definition": {"weak-wait": wait}, "apply-to": "topics"}
    assert call(cluster, "PUT", f"policies/%2F/{topic}", body)[0] in (201, 204)


def test_writes_go_around_a_partition_that_nobody_leads(cluster: LocalCluster) -> None:
    """Without an operator: groups read what is new at once, and what is old when it is back."""
    weak_wait(cluster, "around", "2s")
    create(cluster, "around", 2, mode="weak")
    dead, gone = member_of_one(cluster, "around")
    alive = next(n for n in (1, 2, 3) if n != dead)
    key = keys_of(cluster, "around", gone)[0]
    create_group(cluster, "around", "readers")
    publish(cluster, alive, "around", key, "old-0", "old-1")
    reader = Client(cluster, alive, prefetch=1)
    reader.consume("around/readers")
    reader.wait("old-0")
    cluster.kill(dead)
    until(lambda: gone not in open_pids(cluster, "around"), "its range waits")
    weak_wait(cluster, "around", "1h")
    reader.connection.close()
    publish(cluster, alive, "around", key, "new")
    other = Client(cluster, alive, prefetch=100)
    other.consume("around/readers")
    other.wait("new")
    (skip,) = rows(cluster, "around", "losses")
    assert (skip["pid"], skip["reason"], skip["end"]) == (gone, "skipped", None)
    restart(cluster, dead)
    other.wait("new", "old-0", "old-1")
    assert [got(other)[body].get("x-late", False) for body in other.bodies] == [False, True, True]
    other.channel.basic_ack(0, multiple=True)
    until(
        lambda: other.pump() and rows(cluster, "around", "losses")[0]["reason"] == "read_late",
        "it is not read to its end",
    )
    other.connection.close()


def test_a_partition_that_does_not_come_back_is_declared_lost(cluster: LocalCluster) -> None:
    """Without an operator, with a record; what comes back later is deleted."""
    create(cluster, "lost", 2, **WEAK, **{"lost-after": "2s"})
    dead, gone = member_of_one(cluster, "lost")
    alive = next(n for n in (1, 2, 3) if n != dead)
    key = keys_of(cluster, "lost", gone)[0]
    create_group(cluster, "lost", "readers")
    publish(cluster, alive, "lost", key, "old-0", "old-1")
    cluster.kill(dead)

    def is_lost() -> bool:
        return [loss["reason"] for loss in rows(cluster, "lost", "losses")] == ["declared_lost"]

    until(is_lost, "nothing is declared lost")
    (loss,) = rows(cluster, "lost", "losses")
    assert (loss["group"], loss["pid"]) == ("readers", gone)
    publish(cluster, alive, "lost", key, "new")
    reader = Client(cluster, alive, prefetch=100)
    reader.consume("lost/readers")
    reader.wait("new")
    assert group_row(cluster, "lost", "readers")["skipped"] == []
    reader.connection.close()
    restart(cluster, dead)


def test_a_closed_partition_that_nobody_leads_is_skipped_and_read_late(
    cluster: LocalCluster,
) -> None:
    """The group goes on after `weak-wait`, says so, and gets the old messages when it can."""
    create(cluster, "late", 1, **WEAK)
    create_group(cluster, "late", "readers")
    publish(cluster, 1, "late", "key", "old-0", "old-1")
    source = members_of(cluster, "late")[0]
    to = next(n for n in (1, 2, 3) if n not in source)
    (target,) = changed(cluster, "late", "move", pid=0, node=name_of(cluster, to))
    (dead,) = source - members_of(cluster, "late")[target]
    publish(cluster, to, "late", "key", "new-0")
    cluster.kill(dead)
    reader = Client(cluster, to, prefetch=100)
    reader.consume("late/readers")
    reader.wait("new-0")
    assert "x-late" not in got(reader)["new-0"]
    (skip,) = rows(cluster, "late", "losses")
    assert (skip["group"], skip["pid"], skip["reason"]) == ("readers", 0, "skipped")
    assert (skip["first"], skip["end"]) == (1, 3)
    row = group_row(cluster, "late", "readers")
    assert (row["cv"], row["skipped"]) == (1, [0])
    restart(cluster, dead)
    reader.wait("new-0", "old-0", "old-1")
    assert got(reader)["old-0"]["x-late"] is True
    assert got(reader)["old-0"]["x-pid"] == 0
    publish(cluster, to, "late", "key", "new-1")
    reader.wait("new-0", "old-0", "old-1", "new-1")
    assert "x-late" not in got(reader)["new-1"]
    reader.channel.basic_ack(0, multiple=True)
    until(
        lambda: reader.pump() and not group_row(cluster, "late", "readers")["skipped"],
        "it is not read to its end",
    )
    (read,) = rows(cluster, "late", "losses")
    assert (read["pid"], read["reason"]) == (0, "read_late")
    reader.connection.close()


def test_a_strict_topic_waits_for_the_same(cluster: LocalCluster) -> None:
    create(cluster, "strict", 1)
    create_group(cluster, "strict", "readers")
    publish(cluster, 1, "strict", "key", "old-0")
    source = members_of(cluster, "strict")[0]
    to = next(n for n in (1, 2, 3) if n not in source)
    (target,) = changed(cluster, "strict", "move", pid=0, node=name_of(cluster, to))
    (dead,) = source - members_of(cluster, "strict")[target]
    publish(cluster, to, "strict", "key", "new-0")
    cluster.kill(dead)
    reader = Client(cluster, to, prefetch=1)
    reader.consume("strict/readers")
    restart(cluster, dead)
    # Whatever time that took: the old message comes first, and alone.
    reader.wait("old-0")
    reader.ack()
    reader.wait("new-0")
    assert rows(cluster, "strict", "losses") == []
    reader.connection.close()


def test_messages_that_expire_unread_are_passed_over_with_a_record(cluster: LocalCluster) -> None:
    settings = {"max-length-bytes": 20_000, "stream-max-segment-size-bytes": 5_000}
    create(cluster, "cut", 1, **WEAK, **settings)
    create_group(cluster, "cut", "readers")
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()

    def is_cut() -> bool:
        for number in range(20):
            channel.basic_publish("cut", "key", b"%d " % number + b"x" * 2_000)
        return bool(rows(cluster, "cut", "groups", "readers", "lag")[0]["data_expired"])

    # A cursor is opened with the first member.
    reader = Client(cluster, 2, prefetch=1)
    reader.consume("cut/readers")
    channel.basic_publish("cut", "key", b"first")
    reader.wait("first")
    until(is_cut, "nothing is dropped")
    reader.connection.close()
    reader = Client(cluster, 3, prefetch=1)
    reader.consume("cut/readers")
    until(lambda: reader.pump() and bool(reader.hand), "the group waits")
    (loss,) = rows(cluster, "cut", "losses")
    assert (loss["reason"], loss["first"]) == ("data_expired", 1)
    assert got(reader)[reader.bodies[0]]["x-offset"] == loss["end"]
    reader.connection.close()
    connection.close()
