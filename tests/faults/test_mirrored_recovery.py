"""Mirrored queues whose last master is lost for good, on real nodes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call
from tests.faults.test_mirrored import (
    ALL,
    QUEUE,
    declare,
    declare_mirrored,
    fill,
    has_mirrors,
    row,
    set_policy,
)
from tests.faults.test_recovery import recover
from tests.faults.traffic import connect, log_has, name_of, until
from tests.interop.helpers import fetch_all

pytestmark = pytest.mark.cluster


def stop_all(cluster: LocalCluster, how: signal.Signals = signal.SIGKILL) -> None:
    for number in (1, 2, 3):
        if cluster._running(number):
            cluster.kill(number, how)
    until(lambda: not any(map(cluster._running, (1, 2, 3))), "nodes do not end")


def is_down(cluster: LocalCluster, node: int) -> bool:
    status, found = call(cluster, "GET", f"queues/%2F/{QUEUE}", node=node)
    return status == 200 and found["state"] == "down"


def bodies(cluster: LocalCluster, node: int) -> list[int]:
    until(lambda: row(cluster, node)["state"] == "running", "the queue does not open")
    connection = connect(cluster, node)
    found = [int(body) for body in fetch_all(connection.channel(), QUEUE)]
    connection.close()
    return found


def forget(cluster: LocalCluster, lost: int, asked: int, *, force: bool = False) -> tuple[int, str]:
    path = f"convoy/nodes/{lost}?force={str(force).lower()}"
    status, found = call(cluster, "DELETE", path, node=asked)
    return status, str(found)


def without_master(cluster: LocalCluster, lost: int, *nodes: int) -> None:
    """The node with the last master is lost; others start, and the queue waits."""
    stop_all(cluster)
    for number in nodes:
        cluster.start_node(number)
    until(lambda: is_down(cluster, nodes[0]), "the queue does not wait")


@pytest.mark.provokes("queue.ring_refounded")
def test_forgetting_the_node_of_the_last_master_opens_a_synchronised_mirror(
    cluster: LocalCluster,
) -> None:
    declare_mirrored(cluster, 1)
    fill(cluster, 0, 20)
    without_master(cluster, 1, 2, 3)
    assert forget(cluster, 1, 2)[0] == 204
    assert log_has(cluster, 2, "queue.ring_refounded", '"complete": true')
    assert bodies(cluster, 3) == list(range(20))
    until(lambda: has_mirrors(cluster, 1, node=2), "the other node has no mirror")


def test_a_former_master_opens_the_queue_only_by_force(cluster: LocalCluster) -> None:
    """Scenario 4: A stops, B goes on and is lost. A's copy lacks what came later."""
    names = [name_of(cluster, number) for number in (1, 2)]
    set_policy(cluster, {"ha-mode": "nodes", "ha-params": names})
    declare(cluster, 1)
    until(lambda: has_mirrors(cluster, 1), "no synchronised mirror")
    fill(cluster, 0, 20)
    cluster.kill(1, signal.SIGTERM)
    until(lambda: log_has(cluster, 2, "queue.mirror_promoted"), "no mirror takes over")
    until(lambda: has_mirrors(cluster, 0, node=2), "the former master stays in the ring")
    without_master(cluster, 2, 1, 3)
    status, text = forget(cluster, 2, 3)
    assert status == 409
    assert "has a copy, which may lack messages" in text
    assert is_down(cluster, 3)
    assert forget(cluster, 2, 3, force=True)[0] == 204
    assert log_has(cluster, 3, "queue.ring_refounded", '"complete": false')
    assert bodies(cluster, 3) == list(range(20))


def test_a_queue_without_any_copy_goes_with_its_node_only_by_force(cluster: LocalCluster) -> None:
    declare_mirrored(cluster, 1)
    set_policy(cluster, {"ha-mode": "exactly", "ha-params": 1})
    until(lambda: has_mirrors(cluster, 0), "mirrors stay")
    without_master(cluster, 1, 2, 3)
    status, text = forget(cluster, 1, 2)
    assert (status, "no node that runs has a copy" in text) == (409, True)
    assert forget(cluster, 1, 2, force=True)[0] == 204
    until(lambda: call(cluster, "GET", f"queues/%2F/{QUEUE}", node=2)[0] == 404, "it stays")


def test_force_boot_opens_an_unsynchronised_mirror(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    fill(cluster, 0, 10)
    set_policy(cluster, ALL)
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    # Mirrors take part: they confirm.
    fill(cluster, 10, 5)
    without_master(cluster, 1, 2, 3)
    status, found = call(cluster, "POST", "convoy/queues/force_boot", node=3)
    assert (status, [each["result"] for each in found]) == (200, ["ok"])
    assert bodies(cluster, 3) == list(range(10, 15))
    # The queue is served: nothing is left to do.
    assert call(cluster, "POST", "convoy/queues/force_boot", node=3) == (200, [])


def test_recovery_of_a_lost_majority_opens_mirrored_queues(cluster: LocalCluster) -> None:
    declare_mirrored(cluster, 1)
    fill(cluster, 0, 20)
    stop_all(cluster)
    cluster.start_node(2)
    until(lambda: recover(cluster, 2, "--plan").returncode == 3, "no plan")
    done = recover(cluster, 2, "--execute", typed="lose what is missing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert bodies(cluster, 2) == list(range(20))


def test_a_synchronised_mirror_waits_for_the_last_master_as_long_as_configured(
    start_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = start_cluster(settings={"mirrored_queue.restart_wait": "0"})
    declare_mirrored(cluster, 1)
    fill(cluster, 0, 20)
    stop_all(cluster)
    for number in (2, 3):
        cluster.start_node(number)
    assert bodies(cluster, 2) == list(range(20))
