"""Quorum queues get the members that they should have, while nodes come, go and are killed."""

from __future__ import annotations

import shutil
import signal

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call
from tests.faults.conftest import StartCluster
from tests.faults.test_leadership import convoy, members
from tests.faults.traffic import Traffic, declare, in_step, until

PREFIX = "quorum_queue.continuous_membership_reconciliation."
QUEUES = [f"q{number}" for number in range(12)]
TARGET = {"pattern": "^q", "apply-to": "quorum_queues"}


def set_target(cluster: LocalCluster, kind: str, size: int) -> None:
    body = TARGET | {"definition": {"target-group-size": size}}
    # The version of the tree that has policies is in force a moment after the nodes are linked.
    until(
        lambda: call(cluster, "PUT", f"{kind}/%2F/size", body)[0] in (201, 204), "no policy is set"
    )


def grown(cluster: LocalCluster, *nodes: int) -> None:
    """Waits until all queues have these members."""
    wanted = sorted(nodes)
    for queue in QUEUES:
        until(
            lambda queue=queue: members(cluster, queue) == wanted,  # type: ignore[misc]
            f"{queue} has the members {members(cluster, queue)}",
        )


@pytest.mark.provokes("quorum.members_reconciled")
def test_queues_are_filled_up_while_leaders_and_new_members_die(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(5, {f"{PREFIX}enabled": "true", f"{PREFIX}trigger_interval": "200"})
    for queue in QUEUES:
        declare(cluster, 1, queue)
    first = set(members(cluster, QUEUES[0]))
    assert len(first) == 3
    with Traffic(cluster, QUEUES[0], publish_at=(2, 3), consume_at=[(2, 3, 4)]) as traffic:
        traffic.goes_on()
        set_target(cluster, "operator-policies", 3)
        set_target(cluster, "policies", 5)
        until(
            lambda: any(len(members(cluster, queue, 2)) > 3 for queue in QUEUES),
            "no queue grows",
        )
        # All are led by node 1: the next leaders go on.
        cluster.kill(1)
        traffic.goes_on()
        cluster.start_node(1)
        cluster.wait_ready()
        grown(cluster, 1, 2, 3, 4, 5)
        traffic.goes_on()

        # A node that is forgotten and comes back empty becomes a member again; it dies meanwhile.
        cluster.kill(5, signal.SIGKILL)
        traffic.goes_on()
        convoy(cluster, "cluster", "forget", 5, at=2)
        grown(cluster, 1, 2, 3, 4)
        shutil.rmtree(cluster.data / "node-5" / "data")
        cluster.start_node(5)
        until(lambda: any(5 in members(cluster, q, 2) for q in QUEUES), "no queue takes it in")
        cluster.kill(5)
        cluster.start_node(5)
        cluster.wait_ready()
        grown(cluster, 1, 2, 3, 4, 5)
        in_step(cluster)
        traffic.finish()
