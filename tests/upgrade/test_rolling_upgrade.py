"""Clusters of earlier releases become clusters of later ones, node by node, under load."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.metadata.machine import MetadataMachine
from convoymq.queues.quorum.machine import QuorumMachine
from tests.faults.traffic import Traffic, declare, in_step, log_has, until
from tests.ports import cluster_ports
from tests.upgrade import releases
from tests.upgrade.mixed import MixedCluster, equal_states
from tests.upgrade.next_release import NEXT, RELEASE

pytestmark = pytest.mark.cluster
BASE_PORT = cluster_ports(__name__)
QUEUE = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MixedCluster]:
    old = releases.source_of(releases.PREVIOUS)
    program = "tests.upgrade.next_release"
    with MixedCluster(tmp_path / "cluster", BASE_PORT, old, program) as made:
        made.wait_ready()
        yield made


def upgrade_under_load(cluster: MixedCluster, before: int, after: int) -> None:
    """Node by node; asserts that queues keep the version before until the last node is upgraded,
    that nothing is lost or reordered, and that all replicas end in equal states."""
    declare(cluster, 1, QUEUE, {"x-delivery-limit": 1000})
    every = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3), consume_at=every) as traffic:
        until(lambda: cluster.versions("quorum") == {before}, "the version was not raised")
        traffic.goes_on(300)
        for number in (1, 2, 3):
            assert cluster.versions("quorum") == {before}
            cluster.upgrade(number)
            traffic.goes_on(300)
        until(lambda: cluster.versions("quorum") == {after}, "the version was not raised")
        until(
            lambda: cluster.versions("metadata") == {MetadataMachine.VERSION},
            "the version was not raised",
        )
        traffic.goes_on(300)
        traffic.finish()
    in_step(cluster)
    until(lambda: equal_states(cluster), "the replicas do not come to rest")


def test_node_by_node_under_load_and_not_back(cluster: MixedCluster) -> None:
    """Nothing is lost or reordered, the version rises when the last node is new, states are equal,
    and a node that goes back to the earlier release is refused by name."""
    assert NEXT == QuorumMachine.VERSION + 1
    upgrade_under_load(cluster, before=1, after=NEXT)

    cluster.kill(2, signal.SIGTERM)
    until(lambda: not cluster._running(2), "node 2 does not end")
    cluster.upgraded.discard(2)
    cluster.start_node(2)
    until(lambda: 2 in cluster.poll() or not cluster._running(2), "node 2 is not refused")
    assert log_has(cluster, 2, "node.failed", RELEASE, "downgrade")
    cluster.upgraded.add(2)
    cluster.start_node(2)
    cluster.wait_ready()
    until(lambda: equal_states(cluster), "the replicas do not come to rest")


def test_from_the_newest_release_to_this_one(tmp_path: Path) -> None:
    """Queues whose machines have a version between the first and the newest."""
    old = releases.source_of(releases.NEWEST)
    with MixedCluster(tmp_path / "cluster", BASE_PORT, old) as cluster:
        cluster.wait_ready()
        upgrade_under_load(cluster, before=2, after=QuorumMachine.VERSION)
