"""Placement of replicas and leaders on nodes, machines and zones: pure functions.

A zone is what fails together: a machine, unless `cluster.zone` says otherwise. A machine has one
node or several (`model.machines`).

Source: RabbitMQ 4.3 behaviour of `x-quorum-initial-group-size` and `queue-leader-locator`;
ADR 0220.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

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


class Place(NamedTuple):
    """Zone and machine of a node."""

    zone: str
    """Empty: the machine is the zone."""
    machine: int


Places = Mapping[int, Place]
"""Node -> its place. A node that is not in it is a machine of its own."""


def place_of(node: int, places: Places) -> Place:
    """Returns where a node is."""
    return places.get(node) or Place("", node)


def zone_of(node: int, places: Places) -> str | int:
    """Returns the zone of a node; a machine without a zone is one of its own."""
    place = place_of(node, places)
    return place.zone or place.machine


def siblings(node: int, nodes: Iterable[int], places: Places) -> list[int]:
    """Returns those of the nodes that are on the machine of `node`, itself included."""
    machine = place_of(node, places).machine
    return [each for each in nodes if place_of(each, places).machine == machine]


def spread(
    candidates: Iterable[int],
    places: Places,
    *,
    members: Iterable[int] = (),
    count: int = 1,
    replicas: Mapping[int, int],
    running: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Returns the nodes that a group gets as its next members, the first one first; fewer than
    `count` when there are no more.

    Each is in the zone with the fewest members, there on the machine with the fewest, there the one
    with the fewest replicas. Nodes that run come first until they are a majority of the group; from
    then on another zone counts more: a node that is down comes back, a zone with two of three
    members stays one.

    Args:
        members: nodes that the group has.
        replicas: replicas per node; a missing node has none.
        running: nodes that are up and not drained; None: all candidates.
    """
    taken = list(members)
    size = len(taken) + count
    free = {node for node in candidates if node not in taken}
    found: list[int] = []
    while free and len(found) < count:
        zones = [zone_of(node, places) for node in taken]
        machines = [place_of(node, places).machine for node in taken]
        needed = running is not None and (sum(node in running for node in taken) < majority(size))

        def rank(node: int) -> tuple[object, ...]:
            is_down = running is not None and node not in running
            zone, machine = zone_of(node, places), place_of(node, places).machine
            crowded = zones.count(zone), machines.count(machine)  # noqa: B023
            last = (replicas.get(node, 0), node)
            return (is_down, *crowded, *last) if needed else (*crowded, is_down, *last)  # noqa: B023

        chosen = min(free, key=rank)
        free.remove(chosen)
        taken.append(chosen)
        found.append(chosen)
    return tuple(found)


def choose_leader(
    locator: str,
    *,
    client_node: int,
    running: Collection[int],
    leaders: Mapping[int, int],
    places: Places,
) -> int:
    """Returns the node that shall lead a new queue.

    Args:
        locator: a value of `LOCATORS`. With `client-local` it is a node of the client's machine.
        client_node: the node that the declaring client is on.
        running: nodes that are up and not drained.
        leaders: leaders (or classic queues) per node; a missing node has none.
    """
    assert locator in (CLIENT_LOCAL, BALANCED)
    near = siblings(client_node, running, places) if locator == CLIENT_LOCAL else []
    return min(
        near or running,
        key=lambda node: (leaders.get(node, 0), node != client_node, node),
        default=client_node,
    )


def choose_members(
    size: int,
    *,
    leader: int,
    nodes: Collection[int],
    running: Collection[int],
    replicas: Mapping[int, int],
    places: Places,
) -> tuple[int, ...]:
    """Returns the members of a new group, leader first; fewer than `size` when the cluster is
    smaller.

    Args:
        size: wanted members, at least 1.
        nodes: all nodes of the cluster.
        running: those that are up and not drained.
        replicas: replicas per node; a missing node has none.
    """
    assert size >= 1
    assert leader in nodes
    others = spread(
        nodes, places, members=(leader,), count=size - 1, replicas=replicas, running=running
    )
    return (leader, *others)


def majority(size: int) -> int:
    """Returns how many of `size` members must agree."""
    return size // 2 + 1
