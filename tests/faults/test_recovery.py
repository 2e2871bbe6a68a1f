"""The way back from a lost majority: plan, confirmation, execution, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes
from tests.faults.conftest import StartCluster
from tests.faults.traffic import connect, declare, drain, fill, in_step, log_has, until
from tests.patience import PATIENCE_S

QUEUE = "orders"
SIZE = 200


def recover(
    cluster: LocalCluster, number: int, *options: str, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs `convoy recover` against a node."""
    command = [sys.executable, "-m", "convoymq.cli", "recover", *options]
    command += ["--data-dir", str(data_dir(cluster, number)), "--format", "json"]
    return subprocess.run(
        command, input=typed + "\n", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def plan_of(cluster: LocalCluster, number: int) -> dict[str, Any]:
    """The plan as a node sees it; {} while it has none."""
    done = recover(cluster, number, "--plan")
    return json.loads(done.stdout) if done.stdout else {}


def data_dir(cluster: LocalCluster, number: int) -> Path:
    return cluster.data / f"node-{number}" / "data"


def test_a_majority_that_is_there_is_left_alone(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    done = recover(cluster, 1, "--plan")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert not plan["needed"]
    assert {group["outcome"] for group in plan["groups"]} == {"intact"}
    again = recover(cluster, 1, "--execute", typed="lose what is missing")
    assert again.returncode == 0
    assert (
        json.loads((data_dir(cluster, 1) / "node.json").read_text())["cluster"] == plan["cluster"]
    )


def test_one_of_three_goes_on_and_emptied_nodes_join_again(start_cluster: StartCluster) -> None:
    """Two disks are lost. The third node goes on alone; nothing that it had is missing."""
    cluster = start_cluster()
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 400, SIZE)
    in_step(cluster)
    cut_power(cluster)
    for number in (2, 3):
        shutil.rmtree(data_dir(cluster, number))
    cluster.start_node(1)
    until(lambda: plan_of(cluster, 1).get("needed"), "no plan")
    plan = plan_of(cluster, 1)
    former = plan["cluster"]
    assert (plan["reachable"], plan["missing"]) == ([1], [2, 3])
    assert {group["outcome"] for group in plan["groups"]} == {"recover"}
    assert all(group["survivor"] == 1 and group["loss"] for group in plan["groups"])

    refused = recover(cluster, 1, "--execute", typed="yes")
    assert refused.returncode == 1
    assert "not confirmed" in refused.stderr
    assert plan_of(cluster, 1)["cluster"] == former

    done = recover(cluster, 1, "--execute", typed="lose what is missing")
    assert done.returncode == 0, done.stderr
    cluster.wait_ready()
    history = json.loads(recover(cluster, 1, "--history").stdout)
    assert [row["former_id"] for row in history] == [former]
    assert {row["name"] for row in history[0]["groups"]} == {"metadata", QUEUE}
    assert log_has(cluster, 1, "recovery.done")

    start_nodes(cluster, 2, 3)
    in_step(cluster)
    # The recovered node is not needed any more.
    until(lambda: len(members(cluster)) == 3, "the queue has not three members again")
    cluster.kill(1)
    assert drain(cluster, 3, QUEUE, 400, SIZE) == list(range(400))


def members(cluster: LocalCluster) -> list[str]:
    found = cluster.api(f"queues/%2F/{QUEUE}")
    return list(found["members"])


def test_a_lost_node_that_comes_back_with_its_data_is_refused(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 50, SIZE)
    in_step(cluster)
    cut_power(cluster, 2, 3)
    until(lambda: plan_of(cluster, 1).get("needed"), "no plan")
    done = recover(cluster, 1, "--execute", typed="lose what is missing")
    assert done.returncode == 0, done.stderr
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", QUEUE, b"50".ljust(SIZE))
    cluster.start_node(3)
    until(lambda: log_has(cluster, 3, "link.dial_failed", "cluster"), "node 3 is not refused")
    channel.basic_publish("", QUEUE, b"51".ljust(SIZE))
    connection.close()
    assert drain(cluster, 1, QUEUE, 52, SIZE) == list(range(52))


@pytest.mark.parametrize("survivors", [(4, 5)])
def test_two_of_five_go_on_with_the_newest_copy(
    start_cluster: StartCluster, survivors: tuple[int, ...]
) -> None:
    cluster = start_cluster(5, {"quorum_queue.initial_cluster_size": "5"})
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 200, SIZE)
    in_step(cluster)
    lost = [number for number in (1, 2, 3) if number not in survivors]
    cut_power(cluster, *lost)
    until(lambda: plan_of(cluster, 4).get("missing") == lost, "no plan")
    plan = plan_of(cluster, 4)
    assert plan["reachable"] == list(survivors)
    assert all(len(group["followers"]) == 1 for group in plan["groups"])
    done = recover(cluster, 4, "--execute", typed="lose what is missing")
    assert done.returncode == 0, done.stderr
    until(lambda: len(members(cluster)) == 2, "the queue does not run on two nodes")
    in_step(cluster)
    assert drain(cluster, 5, QUEUE, 200, SIZE) == list(range(200))
