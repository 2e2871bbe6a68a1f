"""Lists of a cluster that loses a node while they are asked for."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.conftest import StartCluster
from tests.faults.traffic import connect, until

QUEUES = 12
PAGE = "queues?page=1&page_size=100&sort=messages&sort_reverse=true"


def test_lists_answer_while_a_node_is_dead(start_cluster: StartCluster) -> None:
    """With what is known: numbers of the dead node's queues, marked with their age; its connections
    and its part of the totals are gone; its replicated queues have another leader."""
    cluster = start_cluster(3)
    clients = [connect(cluster, node) for node in (1, 2, 3)]
    for number in range(QUEUES):
        channel = clients[number % 3].channel()
        kind = "classic" if number < QUEUES // 2 else "quorum"
        arguments = {"x-queue-type": kind, "x-queue-leader-locator": "client-local"}
        channel.queue_declare(f"q{number:02}", durable=True, arguments=arguments)
        channel.confirm_delivery()
        for _ in range(number + 1):
            channel.basic_publish("", f"q{number:02}", b"m")

    def rows() -> list[dict[str, Any]]:
        found = cluster.api(PAGE, 1)
        assert found["total_count"] == QUEUES
        return list(found["items"])

    def lengths() -> list[int]:
        return [row["messages"] for row in rows()]

    until(lambda: lengths() == list(range(QUEUES, 0, -1)), "lengths of other nodes")
    until(lambda: len(cluster.api("connections", 1)) == 3, "connections of other nodes")
    until(lambda: cluster.api("overview", 1)["object_totals"]["channels"] == QUEUES, "channels")
    homes = {row["name"]: row["node"] for row in rows()}
    dead = cluster.api("queues/%2F/q02", 1)["node"]
    cluster.kill(3, signal.SIGKILL)

    def marked() -> set[str]:
        return {row["name"] for row in rows() if "stale_ms" in row}

    lost = {f"q{n:02}" for n in range(QUEUES // 2) if homes[f"q{n:02}"] == dead}
    assert len(lost) == 2
    until(lambda: marked() == lost, "classic queues of the dead node are not marked")
    assert lengths() == list(range(QUEUES, 0, -1))
    assert {row["name"]: row["state"] for row in rows() if row["name"] in lost} == (
        dict.fromkeys(lost, "down")
    )
    until(lambda: len(cluster.api("connections", 1)) == 2, "connections of the dead node")
    left = sum(range(1, QUEUES + 1)) - sum(int(name[1:]) + 1 for name in lost)
    until(lambda: cluster.api("overview", 1)["queue_totals"]["messages"] == left, "totals")
