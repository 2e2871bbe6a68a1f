"""Retention of ordered topics on a real cluster: sealed partitions, groups without members, and the
files of what is deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.command import TOPICS
from convoymq.cli.ctl.main import main
from tests.clusters import call, serving_cluster
from tests.faults.test_damage import log_directory
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import changed, create, leader_of, path
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
KEY = "key"
MARK = b"of the topic: gone. "
SMALL_FILES = {"raft.wal_max_size_bytes": "2MiB", "raft.mem_table_max_bytes": "0"}
"""Groups have files of their own when the common log is full."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("retention"), BASE_PORT, SMALL_FILES) as made:
        create(made, "first", 1)
        yield made


@pytest.fixture
def channel(cluster: LocalCluster) -> Iterator[Any]:
    """A channel of node 2 that confirms."""
    parameters = pika.ConnectionParameters("127.0.0.1", cluster.nodes[1].amqp_port)
    connection = pika.BlockingConnection(parameters)
    opened = connection.channel()
    opened.confirm_delivery()
    yield opened
    if connection.is_open:
        connection.close()


def publish(channel: Any, topic: str, numbers: range, size: int = 8) -> None:
    for number in numbers:
        channel.basic_publish(topic, KEY, str(number).zfill(size).encode())


def consume(channel: Any, queue: str, count: int) -> list[int]:
    """Consumes and acknowledges, and cancels the consumer."""
    channel.basic_qos(prefetch_count=10)
    found = []
    for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
        assert body is not None, f"{queue} has {found} and no more"
        found.append(int(body))
        channel.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    channel.cancel()
    return found


def lineage(cluster: LocalCluster, topic: str) -> dict[int, str]:
    """The state of every partition that there ever was."""
    status, rows = call(cluster, "GET", path(topic, "route") + "?lineage=true")
    assert status == 200, rows
    return {row["pid"]: row["state"] for row in rows}


def group(cluster: LocalCluster, topic: str, name: str) -> dict[str, Any]:
    status, rows = call(cluster, "GET", path(topic, "groups"))
    assert status == 200, rows
    return next(row for row in rows if row["group"] == name)


def moved(cluster: LocalCluster, topic: str, pid: int) -> int:
    """Moves a partition and returns its successor."""
    to = 1 + leader_of(cluster, topic, pid) % 3
    (successor,) = changed(cluster, topic, "move", pid=pid, node=str(to))
    return successor


def files_with(cluster: LocalCluster, mark: bytes) -> list[str]:
    """Files of groups, on all nodes, that have these bytes."""
    return [
        str(path)
        for node in cluster.nodes
        for path in (log_directory(cluster, node.number) / "groups").glob("*/*")
        if path.is_file() and mark in path.read_bytes()
    ]


def test_a_sealed_partition_goes_when_its_time_is_over_and_a_group_does_not_need_it(
    cluster: LocalCluster, channel: Any
) -> None:
    create(cluster, "aged", 1, **{"max-age": "2s"})
    publish(channel, "aged", range(3))
    assert consume(channel, "aged/work", 1) == [0]
    successor = moved(cluster, "aged", 0)
    publish(channel, "aged", range(3, 6))
    assert lineage(cluster, "aged")[0] == "sealed", "the group holds it, whatever its age"
    assert consume(channel, "aged/work", 5) == [1, 2, 3, 4, 5]
    until(lambda: lineage(cluster, "aged") == {0: "deleted", successor: "open"}, "kept")
    # Its record of the lineage stays, and those who come later begin behind it.
    assert consume(channel, "aged/late", 3) == [3, 4, 5]
    until(lambda: not group(cluster, "aged", "late")["members"], "a member stays")
    status, answer = call(
        cluster, "POST", path("aged", "groups", "late", "seek"), {"vector": {"0": 1}}
    )
    assert (status, answer["code"]) == (410, "DATA_EXPIRED")


def test_a_group_without_members_expires_and_is_told_so(
    cluster: LocalCluster, channel: Any
) -> None:
    create(cluster, "idle", 1, **{"max-age": "1s", "group-ttl": "1s"})
    publish(channel, "idle", range(3))
    assert consume(channel, "idle/work", 1) == [0]
    successor = moved(cluster, "idle", 0)
    until(lambda: group(cluster, "idle", "work")["state"] == "data_expired", "it lives")
    assert lineage(cluster, "idle") == {0: "deleted", successor: "open"}
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        channel.basic_consume("idle/work", lambda *_: None)
    assert refused.value.reply_code == 406
    assert "DATA_EXPIRED" in refused.value.reply_text
    fresh = channel.connection.channel()
    fresh.confirm_delivery()
    publish(fresh, "idle", range(3, 5))
    status, row = call(
        cluster, "POST", path("idle", "groups", "work", "seek"), {"position": "earliest"}
    )
    assert (status, row["cv"]) == (200, 1), row
    assert consume(fresh, "idle/work", 2) == [3, 4]


def test_a_range_keeps_so_many_bytes_over_its_partitions(
    cluster: LocalCluster, channel: Any
) -> None:
    settings = {"max-length-bytes": 4000, "stream-max-segment-size-bytes": 1000}
    create(cluster, "sized", 1, **settings)
    publish(channel, "sized", range(10), 100)
    successor = moved(cluster, "sized", 0)
    until(lambda: lineage(cluster, "sized")[0] == "retired", "not retired")
    publish(channel, "sized", range(10, 100), 100)
    until(lambda: lineage(cluster, "sized") == {0: "deleted", successor: "open"}, "kept")
    _, row = call(cluster, "GET", path("sized"))
    (kept,) = row["partition_rows"]
    assert 1 < kept["log_start"] <= 80, kept
    assert row["settings"] == settings
    assert consume(channel, "sized/work", 1)[0] >= 10


def test_a_group_that_waits_for_its_first_member_is_told_what_expires_meanwhile(
    cluster: LocalCluster, channel: Any
) -> None:
    settings = {"max-length-bytes": 4000, "stream-max-segment-size-bytes": 1000}
    create(cluster, "owed", 1, **settings)
    publish(channel, "owed", range(5), 100)
    for name, position in (("all", "earliest"), ("new", "latest")):
        body = {"position": position}
        status, answer = call(cluster, "PUT", path("owed", "groups", name), body)
        assert status == 201, answer
    publish(channel, "owed", range(5, 10), 100)
    # A group that begins at the end has what comes before its first member, too.
    assert consume(channel, "owed/new", 1) == [5]
    publish(channel, "owed", range(10, 200), 100)

    def is_cut() -> bool:
        _, row = call(cluster, "GET", path("owed"))
        (kept,) = row["partition_rows"]
        return bool(kept["log_start"] > 10)

    until(is_cut, "nothing is dropped")
    channel.basic_consume("owed/all", lambda *_: None)

    def is_told() -> bool:
        channel.connection.process_data_events(0.05)
        _, rows = call(cluster, "GET", path("owed", "groups", "all", "lag"))
        return [row["data_expired"] for row in rows] == [True]

    until(is_told, "the group passes over what has expired")


def test_a_policy_acts_in_a_topic_that_exists(
    cluster: LocalCluster, channel: Any, tmp_path: Path
) -> None:
    """The topic has no settings of its own. First the policy bounds what a partition keeps, then
    one with a greater priority has the sealed one deleted. The page shows both partitions."""
    create(cluster, "ruled", 1)

    def rule(name: str, priority: int, **definition: object) -> None:
        body = {"pattern": "^ruled$", "apply-to": "topics", "definition": definition}
        body["priority"] = priority
        status, answer = call(cluster, "PUT", f"policies/%2F/{name}", body)
        assert status in (201, 204), answer

    def log_start() -> int:
        _, row = call(cluster, "GET", path("ruled"))
        return int(row["partition_rows"][0]["log_start"])

    rule("small", 1, **{"max-length-bytes": 4000, "stream-max-segment-size-bytes": 1000})
    numbers = iter(range(100_000))

    def is_cut() -> bool:
        publish(channel, "ruled", range(next(numbers), next(numbers) + 20), 100)
        return log_start() > 1

    until(is_cut, "the policy does not act in the partition")
    successor = moved(cluster, "ruled", 0)
    rule("young", 2, **{"max-age": "1s"})
    until(lambda: lineage(cluster, "ruled") == {0: "deleted", successor: "open"}, "kept")
    publish(channel, "ruled", range(3))
    consume(channel, "ruled/work", 1)
    file = tmp_path / "page.html"
    at = f"http://127.0.0.1:{cluster.nodes[0].http_port}"
    assert main(TOPICS, ["show", "ruled", "--html", str(file), "--seconds", "0", "--url", at]) == 0
    text = file.read_text()
    assert "partition 0: 0 to 1023, deleted, versions 0 to 0" in text
    assert f"partition {successor}: 0 to 1023, open, versions 1 to 1" in text
    assert "<td>work</td><td>1 of 1</td>" in text


def test_a_deleted_topic_leaves_no_files_though_the_metadata_leader_is_killed(
    cluster: LocalCluster, channel: Any
) -> None:
    create(cluster, "gone", 3)
    moved(cluster, "gone", 0)
    for _ in range(150):
        channel.basic_publish("gone", KEY, MARK * 1000)
    until(lambda: files_with(cluster, MARK), "nothing is in files of groups")
    channel.connection.close()
    killed = metadata_leader(cluster)
    asked = next(n for n in (1, 2, 3) if n != killed)
    asking = threading.Thread(target=call, args=(cluster, "DELETE", path("gone"), None, asked))
    asking.start()
    cluster.kill(killed)
    asking.join()

    def is_gone() -> bool:
        # When the leader died too early nobody has heard of it.
        status, _ = call(cluster, "DELETE", path("gone"), None, asked)
        return status == 404

    until(is_gone, "it is there")
    restart(cluster, killed)
    status, rows = call(cluster, "GET", "queues/%2F")
    assert status == 200
    assert not [row["name"] for row in rows if row["name"].startswith("amq.partition.gone")]
    until(lambda: not files_with(cluster, MARK), "files are left")
