"""A cluster of an earlier release becomes one of the next release, node by node, under load."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.admin_socket import ask
from convoymq.cli.cluster import LocalCluster, LocalNode
from tests.faults.conftest import TEST_TIME_LIMIT_S as TEST_TIME_LIMIT_S
from tests.faults.traffic import Traffic, declare, in_step, log_has, until
from tests.ports import cluster_ports
from tests.upgrade import releases
from tests.upgrade.next_release import NEXT, RELEASE

pytestmark = pytest.mark.cluster
BASE_PORT = cluster_ports()
QUEUE = "orders"


class MixedCluster(LocalCluster):
    """A local cluster whose nodes can be of different releases."""

    def __init__(self, data: Path, base_port: int, old: Path) -> None:
        super().__init__(data, 3, base_port, {"raft.wal_max_size_bytes": "1MiB"})
        self.old = old
        self.upgraded: set[int] = set()

    def _command(self, node: LocalNode) -> list[str]:
        program = "convoymq.cli.serve"
        if node.number in self.upgraded:
            program = "tests.upgrade.next_release"
        return [sys.executable, "-m", program]

    def _environment(self, node: LocalNode) -> dict[str, str]:
        new = f"{releases.ROOT / 'src'}:{releases.ROOT}"
        path = new if node.number in self.upgraded else str(self.old / "src")
        return {**super()._environment(node), "PYTHONPATH": path}

    def groups(self, number: int) -> dict[int, dict[str, Any]]:
        """The replicas on a node, by group."""
        directory = self.data / f"node-{number}" / "data"
        return {row["group"]: row for row in ask(directory, {"op": "groups"}, print)}

    def restart(self, number: int) -> None:
        """Stops a node in an orderly way and starts it again."""
        self.kill(number, signal.SIGTERM)
        until(lambda: self.poll() or not self._running(number), f"node {number} does not end")
        self.start_node(number)
        self.wait_ready()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MixedCluster]:
    old = releases.source_of(releases.PREVIOUS)
    with MixedCluster(tmp_path / "cluster", BASE_PORT, old) as made:
        made.wait_ready()
        yield made


def equal_states(cluster: MixedCluster) -> bool:
    """Whether all replicas that applied the same index have the same state."""
    states: dict[tuple[int, int], set[int]] = {}
    applied: dict[int, set[int]] = {}
    for number in (1, 2, 3):
        for group, row in cluster.groups(number).items():
            states.setdefault((group, row["applied"]), set()).add(row["hash"])
            applied.setdefault(group, set()).add(row["applied"])
    assert all(len(found) == 1 for found in states.values()), states
    return all(len(found) == 1 for found in applied.values())


def versions(cluster: MixedCluster, kind: str) -> set[int]:
    return {
        row["version"]
        for number in (1, 2, 3)
        for row in cluster.groups(number).values()
        if row["kind"] == kind
    }


def test_node_by_node_under_load_and_not_back(cluster: MixedCluster) -> None:
    """Nothing is lost or reordered, the version rises when the last node is new, states are equal,
    and a node that goes back to the earlier release is refused by name."""
    declare(cluster, 1, QUEUE, {"x-delivery-limit": 1000})
    every = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3), consume_at=every) as traffic:
        traffic.goes_on(300)
        for number in (1, 2, 3):
            assert versions(cluster, "quorum") == {1}
            cluster.upgraded.add(number)
            cluster.restart(number)
            traffic.goes_on(300)
        until(lambda: versions(cluster, "quorum") == {NEXT}, "the version was not raised")
        until(lambda: versions(cluster, "metadata") == {2}, "the version was not raised")
        traffic.goes_on(300)
        traffic.finish()
    in_step(cluster)
    until(lambda: equal_states(cluster), "the replicas do not come to rest")

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


def test_before_the_last_node_is_new_there_is_a_way_back(cluster: MixedCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3)) as traffic:
        cluster.upgraded.add(3)
        cluster.restart(3)
        traffic.goes_on(200)
        cluster.upgraded.discard(3)
        cluster.restart(3)
        traffic.goes_on(200)
        assert versions(cluster, "quorum") == {1}
        traffic.finish()
