"""Leaders and members of queues change under load, also when a node is killed in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import answered
from tests.faults.conftest import StartCluster
from tests.faults.traffic import Traffic, connect, counter, declare, in_step, running, until
from tests.patience import PATIENCE_S

QUEUE = "orders"
GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="
EVERY = [(1, 2, 3), (2, 3, 1)]


def convoy(
    cluster: LocalCluster, *words: object, at: int = 0, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command against a node that runs, and checks its exit code."""
    node = at or running(cluster)[0].number
    url = f"http://127.0.0.1:{cluster.nodes[node - 1].http_port}"
    command = [sys.executable, "-m", "convoymq.cli", *map(str, words), "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert code is None or done.returncode == code, (done.stdout, done.stderr)
    return done


def members(cluster: LocalCluster, queue: str, at: int = 0) -> list[int]:
    names = cluster.api(f"queues/%2F/{queue}", at or None)["members"]
    ids = {row["name"]: row["id"] for row in cluster.api("nodes", at or None)}
    return sorted(ids[name] for name in names)


def begin_rebalancing(cluster: LocalCluster, node: int, rate: int) -> None:
    url = f"http://127.0.0.1:{cluster.nodes[node - 1].http_port}/api/rebalance/queues"
    body = json.dumps({"rate": rate}).encode()
    request = urllib.request.Request(url, body, {"authorization": GUEST}, method="POST")
    with answered(request) as answer:
        assert answer.status == 204


def leads(cluster: LocalCluster, node: int, queue: str = QUEUE) -> None:
    until(lambda: cluster.leader_of(queue) == node, f"node {node} does not lead {queue}")


def led_by(cluster: LocalCluster, queues: Sequence[str]) -> Counter[int]:
    return Counter(cluster.leader_of(queue) for queue in queues)


def test_a_leadership_goes_round_under_load(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        for target in (2, 3, 1):
            traffic.goes_on()
            done = convoy(cluster, "queues", "transfer_leadership", QUEUE, target)
            assert done.stdout == (
                f"Transferring leadership of quorum queue {QUEUE} to node {target}...\n"
            )
            leads(cluster, target)
        traffic.goes_on()
        traffic.finish()
    done = convoy(cluster, "queues", "transfer_leadership", QUEUE, 1, code=69)
    assert "The target node is already the leader of this queue" in done.stderr
    convoy(cluster, "queues", "transfer_leadership", "missing", 1, code=65)


def test_the_target_of_a_transfer_is_killed(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(1, 3), consume_at=EVERY) as traffic:
        traffic.goes_on()
        # Still linked, and no answer comes: the leader goes on before clients are kept waiting.
        cluster.kill(2, signal.SIGSTOP)
        convoy(cluster, "queues", "transfer_leadership", QUEUE, 2, at=1, code=69)
        cluster.kill(2)
        traffic.goes_on()
        cluster.start_node(2)
        cluster.wait_ready()
        in_step(cluster)
        convoy(cluster, "queues", "transfer_leadership", QUEUE, 2)
        leads(cluster, 2)
        traffic.finish()


def test_queues_shrink_and_grow_under_load(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        # The leader is taken out: another member leads first.
        traffic.goes_on()
        done = convoy(cluster, "queues", "shrink", 1)
        assert done.stdout.splitlines() == [
            "Shrinking queues on 1...", "vhost\tname\tsize\tresult", f"/\t{QUEUE}\t2\tok",
        ]  # fmt: skip
        assert members(cluster, QUEUE) == [2, 3]
        traffic.all_consume()
        done = convoy(cluster, "queues", "grow", 1, "even")
        assert done.stdout.splitlines()[-1] == f"/\t{QUEUE}\t3\tok"
        assert members(cluster, QUEUE) == [1, 2, 3]
        traffic.all_consume()
        in_step(cluster)
        # The new member counts: it leads, and goes on with one of the others.
        convoy(cluster, "queues", "transfer_leadership", QUEUE, 1)
        cluster.kill(3)
        traffic.goes_on()
        cluster.start_node(3)
        cluster.wait_ready()
        traffic.finish()


def test_members_come_and_go_one_by_one(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE, {"x-quorum-initial-group-size": 1})
    for _ in range(2):
        convoy(cluster, "queues", "add_member", QUEUE, 3)
        assert members(cluster, QUEUE) == [1, 3]
    done = convoy(cluster, "queues", "grow_to_count", 3, "all")
    assert done.stdout.splitlines()[-1] == f"/\t{QUEUE}\t3\tok"
    in_step(cluster)
    for node in (1, 2, 2):
        convoy(cluster, "queues", "delete_member", QUEUE, node)
    assert members(cluster, QUEUE) == [3]
    leads(cluster, 3)
    done = convoy(cluster, "queues", "delete_member", QUEUE, 3, code=69)
    assert "the last node cannot be removed" in done.stderr
    done = convoy(cluster, "queues", "shrink", 3, code=69)
    assert done.stdout.splitlines()[-1] == f"/\t{QUEUE}\t1\terror: the last node cannot be removed"


def test_a_member_removed_while_it_was_away_keeps_nothing(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(1, 2), consume_at=EVERY) as traffic:
        traffic.goes_on()
        cluster.kill(3)
        convoy(cluster, "queues", "delete_member", QUEUE, 3)
        traffic.goes_on()
        cluster.start_node(3)
        cluster.wait_ready()
        convoy(cluster, "queues", "add_member", QUEUE, 3)
        in_step(cluster)
        cluster.kill(1)
        traffic.goes_on()
        cluster.start_node(1)
        cluster.wait_ready()
        traffic.finish()


@pytest.mark.provokes("queue.rebalance_started")
@pytest.mark.provokes("queue.rebalance_ended")
def test_leaders_are_spread_after_a_node_returned(cluster: LocalCluster) -> None:
    names = [f"q{n}" for n in range(9)]
    connection = connect(cluster, 1)
    for name in names:
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()
    assert led_by(cluster, names) == {1: 9}
    with Traffic(cluster, "q0", publish_at=(2, 3), consume_at=((2, 3), (3, 2))) as traffic:
        traffic.goes_on()
        planned = convoy(cluster, "queues", "rebalance", "all", "--dry-run", "--format", "json")
        assert len(json.loads(planned.stdout)) == 6
        assert led_by(cluster, names) == {1: 9}
        done = convoy(cluster, "queues", "rebalance", "quorum")
        assert done.stdout.splitlines()[:2] == [
            "Re-balancing leaders of quorum queues...",
            "Node name\tNumber of quorum queues\tNumber of replicated classic queues\t"
            "Number of streams",
        ]  # fmt: skip
        assert led_by(cluster, names) == {1: 3, 2: 3, 3: 3}
        cluster.kill(2)
        until(lambda: 2 not in led_by(cluster, names), "a queue has no new leader")
        cluster.start_node(2)
        cluster.wait_ready()
        in_step(cluster)
        # Slowly, so that a node can be killed in the middle, and a second caller is turned away.
        begin_rebalancing(cluster, 3, rate=1)
        with pytest.raises(urllib.error.HTTPError, match="Bad Request") as refused:
            begin_rebalancing(cluster, 3, rate=1)
        assert "rebalance_in_progress" in refused.value.read().decode()
        until(lambda: cluster.api("convoy/rebalance", 3)["moved"] >= 1, "nothing moves")
        cluster.kill(1)
        until(lambda: not cluster.api("convoy/rebalance", 3)["running"], "it does not end")
        traffic.goes_on()
        cluster.start_node(1)
        cluster.wait_ready()
        in_step(cluster)
        convoy(cluster, "queues", "rebalance", "all", at=3)
        assert led_by(cluster, names) == {1: 3, 2: 3, 3: 3}
        traffic.finish()


@pytest.mark.provokes("cluster.node_drained")
@pytest.mark.provokes("cluster.node_revived")
def test_a_node_is_drained_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(1, 2), consume_at=EVERY) as traffic:
        traffic.goes_on()
        convoy(cluster, "upgrade", "drain", 1, at=2)
        until(lambda: counter(cluster, 1, "groups_led") == 0, "node 1 leads still")
        until(lambda: counter(cluster, 1, "connections") == 0, "node 1 has clients still")
        assert next(row for row in cluster.api("nodes", 2) if row["id"] == 1)["being_drained"]
        traffic.goes_on()
        # New queues are led elsewhere, and nobody makes it a leader.
        declare(cluster, 2, "fresh")
        convoy(cluster, "queues", "transfer_leadership", QUEUE, 1, code=69, at=2)
        convoy(cluster, "queues", "rebalance", "all", at=2)
        assert 1 not in led_by(cluster, [QUEUE, "fresh"])
        # It stays so over a restart; what it leads for want of others goes when they are back.
        cluster.kill(1)
        cluster.start_node(1)
        until(lambda: counter(cluster, 1, "uptime_ms") >= 0, "node 1 does not start")
        until(lambda: counter(cluster, 1, "connections") == 0, "node 1 has clients")
        traffic.goes_on()
        convoy(cluster, "upgrade", "revive", 1, at=2)
        connect(cluster, 1).close()
        traffic.finish()
