"""Decides which member a group gets next and which leader moves where: pure functions.

Source: RabbitMQ 4.3 `rabbitmq-queues rebalance`, `grow` and `grow_to_count` (ADR 0041), and
continuous membership reconciliation (ADR 0048).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from convoymq.metadata.placement import Places, spread

LOAD_TOLERANCE = 0.05
"""Leaders are not moved for less than this share of the mean load of a node."""


class Strategy(StrEnum):
    """Selection of groups that grow."""

    ALL = "all"
    EVEN = "even"
    """Only those with an even number of members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedGroup:
    """A group as rebalancing sees it."""

    group: int
    leader: int
    targets: tuple[int, ...]
    """Other voters that could lead it now: linked, and with all that is committed."""
    log_entries: int = 0
    """Entries in its log: the shortest one moves first."""
    load: float = 0.0
    """Cost of leading it: messages per second."""


@dataclass(frozen=True, slots=True)
class Move:
    """A leadership that is to move."""

    group: int
    source: int
    target: int


def choose_successor(
    targets: Collection[int], leaders: Mapping[int, int], avoid: Collection[int] = ()
) -> int:
    """Returns the voter that takes over from a leader: the one that leads least; 0 = there is none.

    Args:
        targets: voters that could lead now, without the leader.
        leaders: groups led per node; a missing node leads none.
        avoid: nodes that must not get it.
    """
    able = [node for node in targets if node not in avoid]
    return min(able, key=lambda node: (leaders.get(node, 0), node), default=0)


def plan_by_count(groups: Sequence[LedGroup], nodes: Collection[int]) -> list[Move]:
    """Moves after which no node leads more than ceil(groups / nodes), as far as the members allow.

    From the node that leads most, the group with the shortest log goes to the member that leads
    least.

    Args:
        nodes: those that run and are not drained: all that may get a leadership.
    """
    if not nodes:
        return []
    cap = math.ceil(len(groups) / len(nodes))
    led: dict[int, list[LedGroup]] = {node: [] for node in nodes}
    for group in sorted(groups, key=lambda group: (group.log_entries, group.group), reverse=True):
        led.setdefault(group.leader, []).append(group)
    counts = {node: len(held) for node, held in led.items()}
    moves: list[Move] = []

    def bound(node: int) -> int:
        return cap if node in nodes else 0

    while True:
        over = [node for node, held in led.items() if counts[node] > bound(node) and held]
        if not over:
            return moves
        source = max(over, key=lambda node: (counts[node] - bound(node), -node))
        # Each group is looked at once: what cannot go now cannot go later, as nodes only fill up.
        group = led[source].pop()
        able = [node for node in group.targets if node in nodes and counts[node] < cap]
        if able:
            target = choose_successor(able, counts)
            moves.append(Move(group.group, source, target))
            counts[source] -= 1
            counts[target] += 1


def plan_by_load(groups: Sequence[LedGroup], nodes: Collection[int]) -> list[Move]:
    """Moves that even out the load per node: each one lowers that of the most loaded node.

    Args:
        nodes: those that run and are not drained.
    """
    if len(nodes) < 2:
        return []
    loads = dict.fromkeys(nodes, 0.0)
    led: dict[int, list[tuple[float, int]]] = {node: [] for node in nodes}
    targets = {group.group: group.targets for group in groups}
    for group in groups:
        if group.leader in loads and group.load > 0:
            loads[group.leader] += group.load
            insort(led[group.leader], (group.load, group.group))
    least_gain = LOAD_TOLERANCE * sum(loads.values()) / len(nodes)
    moves: list[Move] = []
    while len(moves) < len(groups):
        source = max(loads, key=lambda node: (loads[node], -node))
        best: tuple[float, float, int, int] | None = None
        for target in sorted(loads, key=lambda node: (loads[node], node)):
            gap = loads[source] - loads[target]
            found = _nearest(led[source], gap / 2, target, targets)
            if found is not None and target != source:
                load, number = found
                gain = min(load, gap - load)
                if best is None or gain > best[0]:
                    best = (gain, load, number, target)
        if best is None or best[0] <= least_gain:
            return moves
        _, load, number, target = best
        led[source].remove((load, number))
        # It moves once: where it goes it stays.
        loads[source] -= load
        loads[target] += load
        moves.append(Move(number, source, target))
    return moves


def _nearest(
    held: Sequence[tuple[float, int]],
    wanted: float,
    target: int,
    targets: Mapping[int, Collection[int]],
) -> tuple[float, int] | None:
    """Of groups by load, the one nearest to a load that could be led by `target`."""
    at = bisect_left(held, (wanted, 0))
    below = next((held[i] for i in range(at - 1, -1, -1) if target in targets[held[i][1]]), None)
    above = next((held[i] for i in range(at, len(held)) if target in targets[held[i][1]]), None)
    if below is None or above is None:
        return below or above
    return below if wanted - below[0] <= above[0] - wanted else above


@dataclass(frozen=True, slots=True)
class MemberStep:
    """One change of a group's members; a node that is 0 is not meant."""

    add: int = 0
    remove: int = 0


def reconciling_step(
    members: Collection[int],
    *,
    target: int,
    cluster: Collection[int],
    candidates: Collection[int],
    replicas: Mapping[int, int],
    places: Places,
    auto_remove: bool = False,
) -> MemberStep | None:
    """Returns the next change of a group that should have `target` members; None = there is none.

    A group with an odd number of members grows only when two nodes can follow: the second one makes
    the number odd again. An even target is reached all the same, as in RabbitMQ.

    Args:
        members: all of them; none is on its way to get a vote.
        cluster: nodes that were not removed from the cluster.
        candidates: nodes of it that run, are not drained, and could become a member.
        replicas: replicas per node; a missing node has none.
        auto_remove: whether a member that is no node of the cluster has to go. The last one stays.
    """
    gone = sorted(node for node in members if node not in cluster)
    if auto_remove and gone and len(members) > 1:
        return MemberStep(remove=gone[0])
    free = [node for node in candidates if node not in members]
    if len(members) >= target or (len(members) % 2 == 1 and len(free) < 2):
        return None
    found = spread(free, places, members=members, replicas=replicas)
    return MemberStep(add=found[0]) if found else None


def grows(members: Collection[int], strategy: Strategy) -> bool:
    """Returns whether a group of these members is among those that grow."""
    return strategy is Strategy.ALL or len(members) % 2 == 0
