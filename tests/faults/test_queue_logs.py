"""What operators ask of the logs and members of queues: states, checks, snapshots, messages."""

from __future__ import annotations

import json
import threading
from typing import Any

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes
from tests.faults.conftest import StartCluster
from tests.faults.test_leadership import convoy
from tests.faults.traffic import Traffic, connect, declare, drain, fill, in_step, name_of, until

QUEUE = "orders"
COLUMNS = [
    "Node Name", "Raft State", "Membership", "Last Log Index", "Last Written", "Last Applied",
    "Commit Index", "Snapshot Index", "Term", "Machine Version",
]  # fmt: skip


def status(cluster: LocalCluster, at: int = 0) -> list[dict[str, Any]]:
    done = convoy(cluster, "queues", "quorum_status", QUEUE, "--format", "json", at=at)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def snapshots(cluster: LocalCluster) -> list[int]:
    return [int(row["Snapshot Index"] or 0) for row in status(cluster)]


def wal_files(cluster: LocalCluster, node: int) -> set[str]:
    directory = cluster.data / f"node-{node}" / "data" / "log" / "wal"
    return {path.name for path in directory.glob("*") if path.suffix != ".part"}


def test_the_state_of_each_member_is_shown(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 50, 100)
    in_step(cluster)
    done = convoy(cluster, "queues", "quorum_status", QUEUE, "--formatter", "table", at=2)
    banner, heading, *rows = done.stdout.splitlines()
    assert banner == f"Status of queue {QUEUE} on node {name_of(cluster, 2)} ..."
    assert heading.split("\t") == COLUMNS
    assert len(rows) == 3
    found = {row["Node Name"]: row for row in status(cluster)}
    assert sorted(row["Raft State"] for row in found.values()) == ["follower", "follower", "leader"]
    assert found[name_of(cluster, 1)]["Raft State"] == "leader"
    assert {row["Membership"] for row in found.values()} == {"voter"}
    (last,) = {row["Last Log Index"] for row in found.values()}
    assert last > 0
    for row in found.values():
        assert list(row) == COLUMNS
        assert row["Last Written"] == row["Commit Index"] == row["Last Applied"] == last
        assert row["Term"] >= 1
        assert row["Machine Version"] >= 1
    gone = name_of(cluster, 3)
    cluster.kill(3)
    until(
        lambda: {r["Node Name"]: r["Raft State"] for r in status(cluster)}[gone] == "nodedown",
        "the node is still shown as running",
    )
    convoy(cluster, "queues", "quorum_status", "missing", code=69)


def test_checks_before_a_node_is_stopped(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    in_step(cluster)
    node = name_of(cluster, 1)
    check = ("queues", "check_if_node_is_quorum_critical")
    done = convoy(cluster, *check, at=1)
    assert done.stdout.splitlines() == [
        f"Checking if node {node} is critical for quorum of any queues/streams ...",
        f"Node {node} reported no queues/streams with minimum quorum",
    ]
    assert json.loads(convoy(cluster, *check, "--format", "json", at=1).stdout) == {"result": "ok"}
    sync = ("queues", "check_if_new_quorum_queue_replicas_have_finished_initial_sync")
    done = convoy(cluster, *sync, "-q", at=1)
    assert done.stdout == f"Node {node} reported no queues with promotable replicas\n"
    leaders = ("queues", "check_for_quorum_queues_without_an_elected_leader")
    done = convoy(cluster, *leaders, ".*", "-q", at=1)
    assert done.stdout == "There are no quorum queues without an elected leader\n"

    cluster.kill(3)
    until(lambda: convoy(cluster, *check, at=1, code=None).returncode == 69, "nothing is critical")
    done = convoy(cluster, *check, at=1, code=69)
    line = f"queue '{QUEUE}' in vhost '/' will become unavailable if node {node} stops"
    assert line in done.stderr.splitlines()
    found = json.loads(convoy(cluster, *check, "--format", "json", at=1, code=69).stderr)
    assert found["result"] == "error"
    assert found["message"] == f"Node {node} reported local queues with minimum online quorum"
    assert {
        "readable_name": f"queue '{QUEUE}' in vhost '/'", "name": QUEUE,
        "virtual_host": "/", "type": "quorum",
    } in found["queues"]  # fmt: skip

    cluster.kill(2)
    until(
        lambda: convoy(cluster, *leaders, "ord", at=1, code=None).returncode == 69,
        "the queue still has a leader",
    )
    done = convoy(cluster, *leaders, ".*", "--across-all-vhosts", at=1, code=69)
    assert f"queue '{QUEUE}' in vhost '/'" in done.stderr.splitlines()
    convoy(cluster, *leaders, "^other", at=1)


def test_a_message_is_looked_at_and_stays(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 30, 20)
    for node in (1, 3):
        done = convoy(cluster, "queues", "peek", QUEUE, 30, "--format", "json", at=node)
        found = {row["keys"]: row["values"] for row in json.loads(done.stdout)}
        assert found["payload"] == "29".ljust(20)
        assert (found["redelivered"], found["routing_key"]) == (False, QUEUE)
    heading = convoy(cluster, "queues", "peek", QUEUE, 1, "-q").stdout.splitlines()[0]
    assert heading == "keys\tvalues"
    done = convoy(cluster, "queues", "peek", QUEUE, 31, code=65)
    assert "Target queue does not have a message at that position" in done.stderr
    done = convoy(cluster, "queues", "peek", "missing", 1, code=65)
    assert "Target queue was not found in virtual host '/'" in done.stderr
    connection = connect(cluster, 1)
    connection.channel().queue_declare("plain", arguments={"x-queue-type": "classic"})
    done = convoy(cluster, "queues", "peek", "plain", 1, code=69)
    assert "Cannot peek into a classic queue" in done.stderr
    connection.close()
    assert drain(cluster, 2, QUEUE, 30, 20) == list(range(30))


def test_snapshots_are_saved_when_asked_for(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2, 1), consume_at=[(1, 2), (2, 1)]) as traffic:
        traffic.goes_on()
        before = snapshots(cluster)
        done = convoy(cluster, "queues", "force_checkpoint", "--queue-pattern", "^orders$")
        assert done.stdout.splitlines() == [
            "Forcing checkpoint for all matching quorum queues...",
            "vhost\tname\tresult",
            f"/\t{QUEUE}\tok",
        ]
        after = snapshots(cluster)
        assert all(new > old for new, old in zip(after, before, strict=True)), (before, after)
        done = convoy(cluster, "queues", "force_checkpoint", "--queue-pattern", "^none$")
        assert done.stdout.splitlines()[1:] == []

        # A member dies in the middle: the row says so, and the others have theirs.
        traffic.goes_on()
        asked = threading.Thread(
            target=convoy,
            args=(cluster, "queues", "force_checkpoint"),
            kwargs={"at": 1, "code": None},
        )
        asked.start()
        cluster.kill(3)
        asked.join(60)
        until(
            lambda: convoy(cluster, "queues", "force_checkpoint", at=1, code=None).returncode == 69,
            "nobody misses the node",
        )
        done = convoy(cluster, "queues", "force_checkpoint", at=1, code=69)
        assert "nodedown" in done.stdout
        traffic.goes_on()
        cluster.start_node(3)
        cluster.wait_ready()
        in_step(cluster)
        convoy(cluster, "queues", "force_checkpoint")
        traffic.finish()


def test_the_write_ahead_log_is_emptied_when_asked_for(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 400, 1000)
    in_step(cluster)
    before = {node: wal_files(cluster, node) for node in (1, 2, 3)}
    done = convoy(cluster, "queues", "reclaim_quorum_memory", QUEUE)
    assert done.stdout == f"Will flush Raft WAL of quorum queue {QUEUE} ...\n"
    for node, names in before.items():
        assert wal_files(cluster, node) != names
        groups = cluster.data / f"node-{node}" / "data" / "log" / "groups"
        # What is still in the queue lies in segments now.
        sizes = [path.stat().st_size for path in groups.rglob("*") if path.is_file()]
        assert sum(sizes) > 400 * 1000
    # Twice does no harm, also when a node dies meanwhile; nothing is lost.
    asked = threading.Thread(
        target=convoy,
        args=(cluster, "queues", "reclaim_quorum_memory", QUEUE),
        kwargs={"at": 2, "code": None},
    )
    asked.start()
    cut_power(cluster)
    asked.join(60)
    start_nodes(cluster, 1, 2, 3)
    assert drain(cluster, 2, QUEUE, 400, 1000) == list(range(400))
