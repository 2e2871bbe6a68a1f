"""Ordered topics while nodes are killed: nothing is lost, and no key is out of order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import (
    TopicTraffic,
    begin,
    changed,
    create,
    finished,
    leader_of,
    name_of,
    open_pids,
    path,
)
from tests.faults.traffic import until
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
LEASE_S = 10.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("topics"), BASE_PORT) as made:
        create(made, "first", 1)
        yield made


def metadata_leader(cluster: LocalCluster) -> int:
    """The node that leads the metadata group, and so carries changes out."""
    found: list[int] = []

    def known() -> bool:
        status, rows = call(cluster, "GET", "convoy/metadata-store/status")
        names = [row["Node Name"] for row in rows if row["Raft State"] == "leader"]
        if status == 200 and names:
            found[:] = [n.number for n in cluster.nodes if name_of(cluster, n.number) == names[0]]
        return bool(found)

    until(known, "nobody leads the metadata")
    return found[0]


def owners_at(cluster: LocalCluster, topic: str) -> set[int]:
    """The nodes whose members have partitions of a topic; 0 for a partition without an owner."""
    status, rows = call(cluster, "GET", path(topic, "groups"))
    owners = {owner["pid"]: owner["member"] for row in rows for owner in row["owners"]}
    nodes = {int(member.partition("-")[0]) for member in owners.values()}
    return nodes if status == 200 and len(owners) == len(open_pids(cluster, topic)) else {0}


def restart(cluster: LocalCluster, number: int) -> None:
    cluster.start_node(number)
    cluster.wait_ready()


@pytest.mark.parametrize("change", ["split", "merge", "move"])
def test_the_metadata_leader_is_killed_during_a_change(cluster: LocalCluster, change: str) -> None:
    """The next leader finishes the change that the former one began."""
    topic = f"metadata-{change}"
    create(cluster, topic, 2)
    with TopicTraffic(cluster, topic) as traffic:
        traffic.goes_on()
        killed = metadata_leader(cluster)
        other = next(n for n in (1, 2, 3) if n not in (killed, leader_of(cluster, topic, 0)))
        bodies: dict[str, dict[str, object]] = {
            "split": {"pid": 0},
            "merge": {"pids": [0, 1]},
            "move": {"pid": 0, "node": str(other)},
        }
        id = begin(cluster, topic, change, **bodies[change])
        cluster.kill(killed)
        finished(cluster, topic, id)
        traffic.goes_on()
        restart(cluster, killed)
        traffic.goes_on()
        traffic.finish()


def test_the_leader_of_a_partition_is_killed_before_during_and_after_a_split(
    cluster: LocalCluster,
) -> None:
    create(cluster, "leader", 2)
    with TopicTraffic(cluster, "leader") as traffic:
        traffic.goes_on()
        killed = leader_of(cluster, "leader", 0)
        cluster.kill(killed)
        traffic.goes_on()
        restart(cluster, killed)
        killed = leader_of(cluster, "leader", 1)
        id = begin(cluster, "leader", "split", pid=1)
        cluster.kill(killed)
        (left, _) = [each["pid"] for each in finished(cluster, "leader", id)["targets"]]
        restart(cluster, killed)
        traffic.goes_on()
        killed = leader_of(cluster, "leader", left)
        cluster.kill(killed)
        traffic.goes_on()
        restart(cluster, killed)
        traffic.finish()


def test_the_node_of_a_member_is_killed(cluster: LocalCluster) -> None:
    """Its partitions go to the other member, from the first message that it had not done."""
    create(cluster, "member", 4)
    with TopicTraffic(cluster, "member", publish_at=(2,), consume_at=((1,), (3,))) as traffic:
        traffic.goes_on()
        until(lambda: all(member.pids for member in traffic.members), "a member has nothing")
        cluster.kill(1)
        # Its process is known to have ended: nobody waits for the end of its leases.
        until(lambda: owners_at(cluster, "member") == {3}, "it is waited for", LEASE_S)
        traffic.goes_on(300)
        until(lambda: traffic.members[1].pids == {0, 1, 2, 3}, "partitions have no member")
        restart(cluster, 1)
        changed(cluster, "member", "merge", pids=open_pids(cluster, "member")[:2])
        traffic.goes_on()
        traffic.finish()


def test_the_node_of_the_publisher_is_killed_during_a_split(cluster: LocalCluster) -> None:
    create(cluster, "publisher", 2)
    with TopicTraffic(cluster, "publisher", consume_at=((1, 2), (2, 1))) as traffic:
        traffic.publisher.ports = [cluster.nodes[n - 1].amqp_port for n in (3, 1)]
        traffic.goes_on()
        id = begin(cluster, "publisher", "split", pid=0)
        cluster.kill(3)
        finished(cluster, "publisher", id)
        traffic.goes_on()
        restart(cluster, 3)
        traffic.finish()
