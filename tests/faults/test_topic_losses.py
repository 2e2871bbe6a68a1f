"""Partitions of ordered topics whose majority is gone, and groups that do not wait for each other.

The partitions have two members each, and both are a majority: with one node dead some partitions
have none, one replica of each of them is left, and the cluster goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.topics.rules.hashing import logical_partition
from tests.clusters import call, serving_cluster
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import (
    TopicTraffic,
    begin,
    changed,
    create,
    finished,
    name_of,
    open_pids,
    path,
)
from tests.faults.traffic import connect, until
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
TWO_MEMBERS = {"quorum_queue.initial_cluster_size": "2"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("losses"), BASE_PORT, TWO_MEMBERS) as made:
        create(made, "first", 1)
        yield made


def rows(cluster: LocalCluster, topic: str, *rest: object) -> list[dict[str, Any]]:
    status, found = call(cluster, "GET", path(topic, *rest))
    assert status == 200, found
    return list(found)


def members_of(cluster: LocalCluster, topic: str) -> dict[int, set[int]]:
    """Numbers of the nodes that have a partition."""
    names = {name_of(cluster, node.number): node.number for node in cluster.nodes}
    status, found = call(cluster, "GET", path(topic))
    assert status == 200, found
    return {row["pid"]: {names[name] for name in row["members"]} for row in found["partition_rows"]}


def lag_row(cluster: LocalCluster, topic: str, pid: int) -> dict[str, Any]:
    found = rows(cluster, topic, "groups", "readers", "lag")
    return next(row for row in found if row["pid"] == pid)


def group_row(cluster: LocalCluster, topic: str, group: str) -> dict[str, Any]:
    return next(row for row in rows(cluster, topic, "groups") if row["group"] == group)


def keys_of(cluster: LocalCluster, topic: str, pid: int, count: int = 1) -> list[str]:
    """Order keys that belong to a partition."""
    row = next(row for row in rows(cluster, topic, "route") if row["pid"] == pid)
    _, about = call(cluster, "GET", path(topic))
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"k{number}"
        lp = logical_partition(key.encode(), about["logical"], about["hash_seed"])
        if row["lo"] <= lp < row["hi"]:
            found.append(key)
        number += 1
    return found


class Reader:
    """One member of a group that acknowledges only when told to."""

    def __init__(self, cluster: LocalCluster, queue: str, node: int, **more: object) -> None:
        self.got: list[tuple[str, int, int]] = []
        """(Body, partition, delivery tag)."""
        self._connection = connect(cluster, node)
        self._channel = self._connection.channel()
        self._channel.basic_qos(prefetch_count=100)
        # It has several messages of a key in its hands.
        arguments = {"x-key-in-flight": 0, **more}
        self._channel.basic_consume(queue, self._on_message, arguments=arguments)

    def _on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.got.append((body.decode(), properties.headers["x-pid"], method.delivery_tag))

    def bodies(self) -> list[str]:
        return [body for body, _, _ in self.got]

    def waits_for(self, *bodies: str) -> None:
        """Waits until it has exactly these."""

        def there() -> bool:
            self._connection.process_data_events(0.02)
            return len(self.got) >= len(bodies)

        until(there, f"{bodies} do not come: {self.got}")
        assert sorted(self.bodies()) == sorted(bodies)

    def comes(self, body: str) -> None:
        """Waits until it has a message."""

        def there() -> bool:
            self._connection.process_data_events(0.02)
            return body in self.bodies()

        until(there, f"{body} does not come: {self.got}")

    def take(self, count: int) -> list[str]:
        """Acknowledges what comes until it had so many; returns the bodies."""
        done = 0

        def there() -> bool:
            nonlocal done
            self._connection.process_data_events(0.02)
            for _, _, tag in self.got[done:]:
                self._channel.basic_ack(tag)
            done = len(self.got)
            return done >= count

        until(there, f"{count} messages do not come, {done} have")
        self._connection.process_data_events(0.5)
        return self.bodies()

    def acknowledge(self, body: str) -> None:
        tag = next(tag for known, _, tag in self.got if known == body)
        self._channel.basic_ack(tag)
        self._connection.process_data_events(0)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def publish(cluster: LocalCluster, node: int, topic: str, *messages: tuple[str, str]) -> None:
    """Publishes (key, body), confirmed."""
    connection = connect(cluster, node)
    channel = connection.channel()
    channel.confirm_delivery()
    for key, body in messages:
        channel.basic_publish(topic, key, body.encode())
    connection.close()


def test_a_slow_source_does_not_hold_up_the_children_of_another_change(
    cluster: LocalCluster,
) -> None:
    """A group in DAG mode reads a partition when all of its ancestors are drained."""
    create(cluster, "dag", 2)
    slow, quick = keys_of(cluster, "dag", 0)[0], keys_of(cluster, "dag", 1)[0]
    with Reader(cluster, "dag/readers", 1, **{"x-group-advance": "dag"}) as reader:
        publish(cluster, 2, "dag", (slow, "slow-0"), (quick, "quick-0"))
        reader.waits_for("slow-0", "quick-0")
        reader.acknowledge("quick-0")
        changed(cluster, "dag", "split", pid=0)
        children = changed(cluster, "dag", "split", pid=1)
        publish(cluster, 2, "dag", (slow, "slow-1"), (quick, "quick-1"))
        # The other source is not drained: nothing of its children comes.
        reader.waits_for("slow-0", "quick-0", "quick-1")
        assert reader.got[-1][1] in children
        row = group_row(cluster, "dag", "readers")
        assert (row["mode"], row["cv"], row["waits_for"]) == ("dag", 0, [0])
        # A grandchild behind it is read as well, the version still waits.
        reader.acknowledge("quick-1")
        changed(cluster, "dag", "merge", pids=children)
        publish(cluster, 2, "dag", (quick, "quick-2"))
        reader.waits_for("slow-0", "quick-0", "quick-1", "quick-2")
        assert group_row(cluster, "dag", "readers")["cv"] == 0
        reader.acknowledge("slow-0")
        reader.waits_for("slow-0", "quick-0", "quick-1", "quick-2", "slow-1")
        assert reader.bodies()[-1] == "slow-1"
        until(lambda: group_row(cluster, "dag", "readers")["cv"] == 3, "the version stands still")


def test_a_merge_goes_on_without_a_source_that_is_gone(cluster: LocalCluster) -> None:
    """After its deadline a merge becomes a move of what is sealed; the other source comes later."""
    create(cluster, "amended", 3)
    members = members_of(cluster, "amended")
    dead, gone, kept = next(
        (node, a, b)
        for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
        for node in members[a] - members[b]
    )
    cluster.kill(dead)
    id = begin(cluster, "amended", "merge", pids=[gone, kept])
    change = finished(cluster, "amended", id)
    assert (change["kind"], change["attempt"], change["sources"]) == ("move", 2, [kept])
    assert gone in open_pids(cluster, "amended")
    target = change["targets"][0]["pid"]
    alive = next(n for n in (1, 2, 3) if n != dead)
    before, behind = (keys_of(cluster, "amended", pid)[0] for pid in (target, gone))
    publish(cluster, alive, "amended", (before, "after"))
    restart(cluster, dead)
    # What was asked to seal before may do so now: then its range moves on as well.
    publish(cluster, alive, "amended", (behind, "back"))
    with Reader(cluster, "amended/readers", alive) as reader:
        reader.waits_for("after", "back")


def test_groups_go_on_without_a_partition_that_is_declared_lost(cluster: LocalCluster) -> None:
    create(cluster, "lost", 2)
    dead, gone = next(
        (node, pid) for pid, nodes in members_of(cluster, "lost").items() for node in nodes
    )
    alive = next(n for n in (1, 2, 3) if n != dead)
    key = keys_of(cluster, "lost", gone)[0]
    with Reader(cluster, "lost/readers", alive) as reader:
        publish(cluster, alive, "lost", *((key, f"old-{n}") for n in range(3)))
        reader.waits_for("old-0", "old-1", "old-2")
        reader.acknowledge("old-0")
        until(lambda: lag_row(cluster, "lost", gone)["watermark"] == 2, "it is not acknowledged")
        status, answer = call(cluster, "POST", path("lost", "declare-lost"), {"pid": gone})
        assert status == 400
        assert f"partition {gone} answers: nothing of it is lost" in answer["reason"]
        cluster.kill(dead)
        status, answer = call(cluster, "POST", path("lost", "declare-lost"), {"pid": gone})
        assert status == 204, answer
        (loss,) = rows(cluster, "lost", "losses")
        assert (loss["group"], loss["pid"], loss["reason"]) == ("readers", gone, "declared_lost")
        # One replica is left: it has seen the messages, and may not have seen all that was settled.
        assert (loss["first"] in (1, 2), loss["end"]) == (True, 4)
        publish(cluster, alive, "lost", (key, "new"))
        reader.waits_for("old-0", "old-1", "old-2", "new")
        until(lambda: group_row(cluster, "lost", "readers")["cv"] == 1, "the version stands still")
        restart(cluster, dead)
        publish(cluster, alive, "lost", (key, "newer"))
        reader.waits_for("old-0", "old-1", "old-2", "new", "newer")
    lineage = rows(cluster, "lost", "route?lineage=true")
    assert next(row["state"] for row in lineage if row["pid"] == gone) == "lost"


def drain_state(cluster: LocalCluster, node: int) -> dict[str, Any]:
    status, found = call(cluster, "GET", "convoy/topics/drains", node=node)
    assert status == 200, found
    return next(iter(found), {})


def test_a_drain_goes_on_when_who_carries_it_out_is_killed(cluster: LocalCluster) -> None:
    """All open partitions leave the node; the topics of the tests above are moved as well."""
    create(cluster, "drained", 3)
    killed = metadata_leader(cluster)
    drained, asked = (n for n in (1, 2, 3) if n != killed)
    name = name_of(cluster, drained)
    before = members_of(cluster, "drained")
    with TopicTraffic(
        cluster, "drained", publish_at=(asked,), consume_at=((asked,), (drained, asked))
    ) as traffic:
        traffic.goes_on()
        request = threading.Thread(
            target=call, args=(cluster, "POST", "topics/drain", {"node": name}, asked)
        )
        request.start()
        until(lambda: drain_state(cluster, asked), "the drain does not begin")
        cluster.kill(killed)
        restart(cluster, killed)
        # The next leader of the metadata goes on with what the tree says.
        until(
            lambda: drain_state(cluster, asked)["state"] == "read_only",
            f"it does not end: {drain_state(cluster, asked)}",
            60.0,
        )
        moved = members_of(cluster, "drained")
        opened = open_pids(cluster, "drained")
        assert not [pid for pid in opened if drained in moved[pid]]
        assert {pid for pid in before if drained in before[pid]}.isdisjoint(opened)
        traffic.goes_on()
        request.join(60.0)
        traffic.finish()
    state = drain_state(cluster, asked)
    assert (state["node"], state["open"]) == (name, 0)
    assert state["sealed"] > 0
    # Deleting the topics stands for retention: then nothing is left.
    status, topics = call(cluster, "GET", "topics")
    assert status == 200
    for row in topics:
        assert call(cluster, "DELETE", path(row["name"]))[0] == 204
    until(lambda: drain_state(cluster, asked)["state"] == "removable", "something is left")
    assert call(cluster, "DELETE", f"convoy/topics/drains/{name}")[0] == 204
    assert drain_state(cluster, asked) == {}
