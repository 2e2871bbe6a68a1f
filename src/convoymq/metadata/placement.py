"""Placement of the replicas and the leader of a new queue: pure functions.

Source: RabbitMQ 4.3 behaviour of `x-quorum-initial-group-size` and `queue-leader-locator`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

CLIENT_LOCAL = "client-local"
BALANCED = "balanced"

LOCATORS: Mapping[str, str] = {
    CLIENT_LOCAL: CLIENT_LOCAL,
    BALANCED: BALANCED,
    "random": BALANCED,
    "least-leaders": BALANCED,
    "min-masters": BALANCED,
}
"""Accepted names of leader locators; older ones mean `balanced`."""


def choose_leader(
    locator: str,
    *,
    client_node: int,
    running: Collection[int],
    leaders: Mapping[int, int],
) -> int:
    """Returns the node that shall lead a new queue.

    Args:
        locator: a value of `LOCATORS`.
        client_node: the node that the declaring client is on.
        running: nodes that are up and not drained.
        leaders: leaders (or classic queues) per node; a missing node has none.
    """
    assert locator in (CLIENT_LOCAL, BALANCED)
    if not running or (locator == CLIENT_LOCAL and client_node in running):
        return client_node
    return min(running, key=lambda node: (leaders.get(node, 0), node != client_node, node))


def choose_members(
    size: int,
    *,
    leader: int,
    nodes: Collection[int],
    running: Collection[int],
    replicas: Mapping[int, int],
) -> tuple[int, ...]:
    """Returns the members of a new group, leader first.

    The leader's node, then running nodes with the fewest replicas, then nodes that are down;
    fewer than `size` when the cluster is smaller.

    Args:
        size: wanted members, at least 1.
        nodes: all nodes of the cluster.
        running: those that are up and not drained.
        replicas: replicas per node; a missing node has none.
    """
    assert size >= 1
    assert leader in nodes
    others = sorted(
        (node for node in nodes if node != leader),
        key=lambda node: (node not in running, replicas.get(node, 0), node),
    )
    return (leader, *others[: size - 1])


def majority(size: int) -> int:
    """Returns how many of `size` members must agree."""
    return size // 2 + 1
