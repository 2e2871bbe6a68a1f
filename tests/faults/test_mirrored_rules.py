"""Rules of mirrored queues about synchronising, stopping and promotion, on real nodes."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call
from tests.faults.conftest import StartCluster
from tests.faults.test_leadership import convoy
from tests.faults.test_mirrored import (
    ALL,
    CLASSIC,
    QUEUE,
    declare,
    fill,
    has_mirrors,
    row,
    set_policy,
)
from tests.faults.traffic import Traffic, connect, log_has, until
from tests.interop.helpers import fetch_all

pytestmark = pytest.mark.cluster

BACKLOG = 2_000
NAMES = {number: f"convoy-{number}@vm" for number in (1, 2, 3)}


def act(cluster: LocalCluster, action: str, node: int = 1) -> None:
    body = {"action": action}
    assert call(cluster, "POST", f"queues/%2F/{QUEUE}/actions", body, node=node)[0] == 204


def limit_sync(cluster: LocalCluster, rate: object) -> None:
    path = "global-parameters/mirroring_sync_max_throughput"
    assert call(cluster, "PUT", path, {"value": rate}, node=2)[0] in (201, 204)


def begin_slow_sync(cluster: LocalCluster, **more: Any) -> None:
    """Synchronises one message at a time, so slowly that it does not end by itself."""
    declare(cluster, 1)
    # Each confirmed alone: a batch has one.
    fill(cluster, 0, BACKLOG)
    limit_sync(cluster, "1kB")
    set_policy(cluster, {**ALL, "ha-sync-batch-size": 1, **more})
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    act(cluster, "sync")
    until(lambda: row(cluster, 1).get("sync_messages", 0) > 10, "nothing is synchronised")


def test_a_synchronisation_is_shown_and_can_be_cancelled(cluster: LocalCluster) -> None:
    begin_slow_sync(cluster)
    assert row(cluster, 1)["state"] == "syncing"
    fill(cluster, BACKLOG, 1)
    act(cluster, "cancel_sync", node=2)
    until(lambda: row(cluster, 1)["state"] == "running", "it is not cancelled")
    found = row(cluster, 1)
    assert "sync_messages" not in found
    assert found["synchronised_slave_nodes"] == []
    # The mirrors have a part; another synchronisation sends what they lack.
    limit_sync(cluster, 0)
    set_policy(cluster, {**ALL, "ha-sync-batch-size": 1_000})
    act(cluster, "sync", node=3)
    until(lambda: has_mirrors(cluster, 2), "mirrors are not synchronised")
    cluster.kill(1, signal.SIGKILL)
    connection = connect(cluster, 3)
    rows = fetch_all(connection.channel(), QUEUE)
    assert [int(body) for body in rows] == list(range(BACKLOG + 1))
    connection.close()


def test_the_rate_of_a_synchronisation_is_changed_while_it_lasts(
    start_cluster: StartCluster,
) -> None:
    settings = {"mirroring_sync_max_throughput": "1", "mirroring_sync_batch_size": "10"}
    cluster = start_cluster(3, settings=settings)
    declare(cluster, 1)
    fill(cluster, 0, 200)
    set_policy(cluster, {**ALL, "ha-sync-mode": "automatic"})
    until(lambda: row(cluster, 1)["state"] == "syncing", "no synchronisation")
    path = "global-parameters/mirroring_sync_max_throughput"
    for wrong in ("fast", -1, True, {}):
        assert call(cluster, "PUT", path, {"value": wrong}, node=2)[0] == 400
    limit_sync(cluster, "40kB")
    until(lambda: has_mirrors(cluster, 2), "mirrors are not synchronised")


def test_a_master_killed_in_a_synchronisation_leaves_no_synchronised_mirror(
    cluster: LocalCluster,
) -> None:
    begin_slow_sync(cluster, **{"ha-promote-on-failure": "when-synced"})
    cluster.kill(1, signal.SIGKILL)
    until(lambda: row(cluster, 2)["state"] == "down", "the queue is not down")
    assert not any(log_has(cluster, node, "queue.mirror_promoted") for node in (2, 3))
    cluster.start_node(1)
    until(lambda: row(cluster, 2)["state"] == "running", "the master does not come back")
    connection = connect(cluster, 3)
    assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(BACKLOG))
    connection.close()


def test_an_unsynchronised_mirror_follows_a_stopped_master_only_where_policies_say_always(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 1)
    fill(cluster, 0, 10)
    set_policy(cluster, {**ALL, "ha-promote-on-shutdown": "when-synced"})
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    fill(cluster, 10, 5)
    cluster.kill(1, signal.SIGTERM)
    until(lambda: row(cluster, 2)["state"] == "down", "the queue is not down")
    assert not any(log_has(cluster, node, "queue.mirror_promoted") for node in (2, 3))
    set_policy(cluster, {**ALL, "ha-promote-on-shutdown": "always"}, node=2)
    until(lambda: row(cluster, 2)["state"] == "running", "no mirror follows")
    connection = connect(cluster, 3)
    found = [int(body) for body in fetch_all(connection.channel(), QUEUE)]
    # A mirror has what came since it took part, which is some time after it is listed.
    assert found == list(range(15))[-len(found) :]
    assert 0 < len(found) <= 5
    connection.close()


@pytest.mark.parametrize("home", [1, 2])
def test_the_master_moves_where_policies_and_drains_want_it_while_clients_stay(
    cluster: LocalCluster, home: int
) -> None:
    """Also the clients of the node that it leaves."""
    declare(cluster, 1)

    def leads(node: int) -> None:
        until(lambda: row(cluster, 2)["node"] == NAMES[node], "the master does not move")

    with Traffic(cluster, QUEUE, publish_at=(home,), consume_at=((1,), (3,))) as traffic:
        for node in (3, 1, 2):
            set_policy(cluster, {"ha-mode": "nodes", "ha-params": [NAMES[node]]})
            leads(node)
            until(lambda: has_mirrors(cluster, 0, node=2), "the former master stays")
            traffic.goes_on()
        set_policy(cluster, {"ha-mode": "exactly", "ha-params": 2, "ha-sync-mode": "automatic"})
        until(lambda: has_mirrors(cluster, 1, node=2), "no mirror")
        traffic.goes_on()
        traffic.finish()
    for client in (traffic.publisher, *traffic.consumers):
        assert client.attempt == 1, "a client had to connect again"
    assert not traffic.publisher.resent, "a publish was refused"


def test_masters_are_spread_over_the_nodes_while_clients_stay(cluster: LocalCluster) -> None:
    """Only to synchronised mirrors; quorum queues count as well."""
    names = [QUEUE, *(f"{QUEUE}{number}" for number in range(5))]
    set_policy(cluster, {**ALL, "ha-sync-mode": "automatic"})
    for name in names:
        declare(cluster, 1, name)
    connection = connect(cluster, 1)
    connection.channel().queue_declare("plain", durable=True, arguments=CLASSIC)
    connection.channel().queue_declare("r", durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()
    for name in names:
        until(lambda name=name: has_mirrors(cluster, 2, queue=name), "no mirrors")  # type: ignore[misc]

    def masters() -> list[str]:
        rows = {each["name"]: each["node"] for each in cluster.api("queues", 2)}
        assert rows["plain"] == NAMES[1], "it has no mirror"
        return sorted(rows[name] for name in names)

    with Traffic(cluster, QUEUE, publish_at=(1,), consume_at=((1,), (3,))) as traffic:
        traffic.goes_on()
        planned = convoy(cluster, "queues", "rebalance", "classic", "--dry-run", "--format", "json")
        assert len(json.loads(planned.stdout)) == 4
        assert masters() == 6 * [NAMES[1]]
        done = convoy(cluster, "queues", "rebalance", "classic", "--queue-pattern", f"^{QUEUE}")
        head, columns, *rows = done.stdout.splitlines()
        assert head == (
            "Re-balancing leaders of replicated (mirrored, non-exclusive) classic queues..."
        )
        assert columns.split("\t") == [
            "Node name", "Number of quorum queues", "Number of replicated classic queues",
            "Number of streams",
        ]  # fmt: skip
        assert rows == [f"{NAMES[number]}\t0\t2\t0" for number in (1, 2, 3)]
        assert masters() == [NAMES[number] for number in (1, 1, 2, 2, 3, 3)]
        traffic.goes_on()
        # To itself, and of a queue without mirrors.
        home = row(cluster, 2)["node"]
        convoy(cluster, "queues", "transfer_leadership", QUEUE, home, code=69)
        convoy(cluster, "queues", "transfer_leadership", "plain", 2, code=69)
        until(lambda: has_mirrors(cluster, 2, node=2), "no mirror")
        other = next(name for name in NAMES.values() if name != home)
        convoy(cluster, "queues", "transfer_leadership", QUEUE, other)
        assert row(cluster, 2)["node"] == other
        convoy(cluster, "queues", "rebalance", "all")
        traffic.goes_on()
        traffic.finish()
    for client in (traffic.publisher, *traffic.consumers):
        assert client.attempt == 1, "a client had to connect again"
    assert not traffic.publisher.resent, "a publish was refused"


def test_a_drained_node_has_no_master_and_no_mirror(cluster: LocalCluster) -> None:
    set_policy(cluster, {"ha-mode": "exactly", "ha-params": 2})
    declare(cluster, 1)
    # Before it is filled: nobody synchronises a mirror that comes later.
    until(lambda: has_mirrors(cluster, 1), "no mirror")
    fill(cluster, 0, 10)
    assert call(cluster, "POST", f"convoy/nodes/{NAMES[1]}/drain", {}, node=2)[0] < 300

    def is_elsewhere() -> bool:
        found = row(cluster, 2)
        return NAMES[1] not in (found["node"], *found["slave_nodes"])

    until(is_elsewhere, "the drained node keeps the queue")
    until(lambda: len(row(cluster, 2)["slave_nodes"]) == 1, "no other mirror")
    connection = connect(cluster, 3)
    assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(10))
    connection.close()
