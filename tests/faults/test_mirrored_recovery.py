"""Mirrored queues whose last master is lost for good, on real nodes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, stop_nodes
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
from tests.faults.test_recovery import data_dir, recover
from tests.faults.traffic import connect, log_has, name_of, until
from tests.interop.helpers import fetch_all

pytestmark = pytest.mark.cluster


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
    cut_power(cluster)
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
    on_a_and_b(cluster)
    stop_a_then_b(cluster)
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
    cut_power(cluster)
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
    cut_power(cluster)
    for number in (2, 3):
        cluster.start_node(number)
    assert bodies(cluster, 2) == list(range(20))


# The scenarios of docs/mirrored.md: A is node 1, the first master, and B node 2. A cluster of three
# has node 3 as well, without a copy. In a cluster of two each of them alone is no majority: B does
# not take A's place, and what was published is all that there is.

TYPED = "lose what is missing"
SPARE = "convoy-2@spare"


def on_a_and_b(cluster: LocalCluster) -> None:
    """Twenty messages on A and B."""
    nodes = {"ha-mode": "nodes", "ha-params": [name_of(cluster, number) for number in (1, 2)]}
    set_policy(cluster, {**nodes, "ha-sync-mode": "automatic"})
    declare(cluster, 1)
    until(lambda: has_mirrors(cluster, 1), "no synchronised mirror")
    fill(cluster, 0, 20)


def stop_a_then_b(cluster: LocalCluster) -> int:
    """A stops; where there is a majority, ten more messages come; B stops. Returns how many
    messages B has."""
    cluster.kill(1, signal.SIGTERM)
    count = 20
    if len(cluster.nodes) > 2:
        until(lambda: log_has(cluster, 2, "queue.mirror_promoted"), "no mirror takes over")
        until(lambda: has_mirrors(cluster, 0, node=2), "the former master stays in the ring")
        fill(cluster, 20, 10, node=2)
        count = 30
    until(lambda: not cluster._running(1), "A does not end")
    stop_nodes(cluster)
    return count


def lose(cluster: LocalCluster, *numbers: int) -> None:
    for number in numbers:
        shutil.rmtree(data_dir(cluster, number))


def give_up(cluster: LocalCluster, lost: int, asked: int, *, force: bool = False) -> None:
    """What the operator types when a node is lost for good."""
    if len(cluster.nodes) > 2:
        until(lambda: is_down(cluster, asked), "the queue does not wait")
        assert forget(cluster, lost, asked, force=force)[0] == 204
        return
    until(lambda: recover(cluster, asked, "--plan").returncode == 3, "no plan")
    done = recover(cluster, asked, "--execute", typed=TYPED)
    assert done.returncode == 0, done.stdout + done.stderr


def start(cluster: LocalCluster, *numbers: int) -> None:
    """Starts nodes, and the one without a copy."""
    for number in (*numbers, *(node.number for node in cluster.nodes[2:])):
        cluster.start_node(number)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_scenarios_1_and_2_both_come_back(
    start_cluster: Callable[..., LocalCluster], nodes: int, order: Sequence[int]
) -> None:
    """A stops, then B; later both at once. Nothing is lost, and the operator types nothing."""
    cluster = start_cluster(nodes)
    on_a_and_b(cluster)
    count = stop_a_then_b(cluster)
    start(cluster, *order)
    cluster.wait_ready()
    until(lambda: row(cluster, 1)["state"] == "running", "the queue does not open")
    until(lambda: has_mirrors(cluster, 1, node=2) or has_mirrors(cluster, 1), "no mirror again")
    cut_power(cluster)
    start(cluster, *order)
    cluster.wait_ready()
    assert bodies(cluster, 2) == list(range(count))


@pytest.mark.parametrize("nodes", [2, 3])
def test_scenario_3_the_first_to_stop_is_lost(
    start_cluster: Callable[..., LocalCluster], nodes: int
) -> None:
    """B has all. A new node gets a mirror."""
    cluster = start_cluster(nodes)
    on_a_and_b(cluster)
    count = stop_a_then_b(cluster)
    lose(cluster, 1)
    start(cluster, 2)
    if nodes == 2:
        give_up(cluster, 1, 2)
    else:
        until(lambda: row(cluster, 2)["state"] == "running", "the queue does not open")
        assert forget(cluster, 1, 2)[0] == 204
    cluster.start_node(1)
    cluster.wait_ready()
    until(lambda: has_mirrors(cluster, 1, node=2), "the new node has no mirror")
    assert bodies(cluster, 1) == list(range(count))


@pytest.mark.parametrize("nodes", [2, 3])
def test_scenario_4_the_last_to_stop_is_lost(
    start_cluster: Callable[..., LocalCluster], nodes: int
) -> None:
    """A has what was there when it stopped; that is known to be all in a cluster of two."""
    cluster = start_cluster(nodes)
    on_a_and_b(cluster)
    stop_a_then_b(cluster)
    lose(cluster, 2)
    start(cluster, 1)
    give_up(cluster, 2, 1, force=True)
    assert bodies(cluster, 1) == list(range(20))


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("whose", [1, 2])
def test_scenario_5_one_disk_is_left_and_goes_into_another_machine(
    start_cluster: Callable[..., LocalCluster], nodes: int, whose: int
) -> None:
    """The copied directory of A or B, on a machine of another name. B's has all."""
    cluster = start_cluster(nodes)
    on_a_and_b(cluster)
    count = stop_a_then_b(cluster)
    kept = cluster.data / "disk"
    shutil.copytree(data_dir(cluster, whose), kept)
    lose(cluster, 1, 2)
    kept.rename(data_dir(cluster, whose))
    config = cluster._config(cluster.nodes[whose - 1])
    config.write_text(config.read_text() + f"node.name = {SPARE}\n")
    start(cluster, whose)
    if nodes == 3 and whose == 2:
        until(lambda: row(cluster, 2)["state"] == "running", "the queue does not open")
        assert forget(cluster, 1, 2)[0] == 204
    else:
        give_up(cluster, 3 - whose, whose, force=True)
    assert row(cluster, whose)["node"] == SPARE
    assert bodies(cluster, whose) == list(range(count if whose == 2 else 20))


@pytest.mark.parametrize("nodes", [2, 3])
def test_scenario_6_no_disk_is_left(start_cluster: Callable[..., LocalCluster], nodes: int) -> None:
    """Nothing of the queue is kept. What a third node has goes on, without the queue."""
    cluster = start_cluster(nodes)
    on_a_and_b(cluster)
    stop_a_then_b(cluster)
    lose(cluster, 1, 2)
    if nodes == 3:
        cluster.start_node(3)
        until(lambda: recover(cluster, 3, "--plan").returncode == 3, "no plan")
        done = recover(cluster, 3, "--execute", typed=TYPED)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: call(cluster, "GET", "policies", node=3)[1], "metadata is lost")
        cluster.start_node(1)
        cluster.start_node(2)
    else:
        start(cluster, 1, 2)
    cluster.wait_ready()
    until(lambda: call(cluster, "GET", f"queues/%2F/{QUEUE}", node=1)[0] == 404, "it stays")
    declare(cluster, 1)
    assert bodies(cluster, 2) == []
