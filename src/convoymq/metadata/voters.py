"""Decides which nodes vote in the metadata group: `cluster.metadata_voters` of them, others learn.

Every node has the whole tree, but only voters decide a change, so a change costs the same in a
cluster of five nodes and of sixty. `voter_step` is pure and remembers nothing: the leader of the
group asks it for the next step, one at a time, and a new leader goes on where the last one ended.

    seats missing ─▶ give a vote     seats too many ─▶ take one away
    a voter gone, or the second one of its zone ─▶ take its vote away, then give it to another node

Source: ADR 0222.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from convoymq.metadata.placement import Places, place_of, spread, zone_of
from convoymq.metadata.replicas import Host, Replica
from convoymq.metadata.snapshot import ZONES_VERSION
from convoymq.metadata.tree import Tree
from convoymq.model.clock import Clock
from convoymq.replication.raft.membership import NEVER
from convoymq.replication.raft.types import REPLICATE

log = structlog.get_logger()

AREAS_MIN = 3
"""Of fewer zones one has a majority of any group: then machines are what votes are spread over, or
nodes."""


@dataclass(frozen=True, slots=True)
class VoteStep:
    """One change of the voters; a node that is 0 is not meant."""

    promote: int = 0
    demote: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Electorate:
    """The members of the metadata group, as its leader sees them."""

    leader: int
    seats: frozenset[int]
    """Nodes that have a vote, or get one as soon as they have caught up."""
    able: frozenset[int]
    """Other members that are linked and follow closely."""
    gone: frozenset[int] = frozenset()
    """Seats whose nodes have been away for too long."""


def voters_wanted(count: int, areas: int) -> int:
    """Returns how many voters a cluster has: an odd number, one in an area. Two nodes both vote:
    otherwise one would have the only copy that counts.

    Args:
        count: `cluster.metadata_voters`.
        areas: zones, where there are three or more; otherwise machines, otherwise nodes.
    """
    most = min(count, areas)
    return most - (most % 2 == 0 and most >= AREAS_MIN)


def voter_step(now: Electorate, *, count: int, nodes: Collection[int], places: Places) -> VoteStep:
    """Returns the next change of the voters; an empty one when they are as they should be.

    A vote is taken away before another one is given: what is left needs fewer nodes for a majority,
    and no more have votes than should, whenever a node dies in between. Nothing is taken away while
    no other node could have it.

    Args:
        count: `cluster.metadata_voters`.
        nodes: nodes of the cluster.
    """
    if not now.seats <= set(nodes):
        # A node is joining, or is being removed.
        return VoteStep()
    areas = _areas(nodes, places)
    missing = voters_wanted(count, len(set(areas.values()))) - len(now.seats)
    if missing < 0:
        return VoteStep(demote=_last(now, areas))
    if missing:
        found = _first(now, now.seats, areas, places, missing)
        # An even number of voters bears no more losses than one less: two at a time, but for the
        # first one, without which a single disk has the tree.
        then = len(now.seats) + len(found)
        is_due = found and (then % 2 == 1 or then < AREAS_MIN)
        return VoteStep(promote=found[0]) if is_due else VoteStep()
    if now.gone or max(Counter(areas[node] for node in now.seats).values()) > 1:
        last = _last(now, areas)
        if _first(now, now.seats - {last}, areas, places, 1):
            return VoteStep(demote=last)
    return VoteStep()


def _areas(nodes: Collection[int], places: Places) -> dict[int, str | int]:
    """Returns for each node in which of the areas it is that shall have one voter each."""
    zones = {node: zone_of(node, places) for node in nodes}
    machines: dict[int, str | int] = {node: place_of(node, places).machine for node in nodes}
    for areas in (zones, machines):
        if len(set(areas.values())) >= AREAS_MIN:
            return areas
    return {node: node for node in nodes}


def _first(
    now: Electorate,
    seats: Collection[int],
    areas: dict[int, str | int],
    places: Places,
    count: int,
) -> list[int]:
    """Returns the members that get the next votes, at most `count`."""
    taken, found = list(seats), list[int]()
    while len(found) < count:
        filled = {areas[node] for node in taken}
        free = [node for node in now.able if areas.get(node) not in {None, *filled}]
        chosen = spread(free, places, members=taken, replicas={})
        if not chosen:
            break
        found += chosen
        taken += chosen
    return found


def _last(now: Electorate, areas: dict[int, str | int]) -> int:
    """Returns the voter that loses its vote next: one that is gone, or of the fullest area."""
    crowds = Counter(areas[node] for node in now.seats)
    return max(
        now.seats - {now.leader},
        key=lambda node: (node in now.gone, crowds[areas[node]], node),
    )


class MetadataVoters:
    """Makes the steps of `voter_step` while this node leads the metadata group.

    Args:
        count: `cluster.metadata_voters`.
        away_max_ms: how long a voter may be away before another node votes for it.
    """

    def __init__(self, host: Host, tree: Tree, clock: Clock, *, count: int, away_max_ms: int):
        self._host = host
        self._tree = tree
        self._clock = clock
        self._count = count
        self._away_max_ms = away_max_ms
        self._away_since: dict[int, int] = {}

    def tick(self) -> None:
        """Makes the next step, when one is due; to be called a few times a second."""
        replica = self._host.replica(0)
        if replica is None or not replica.is_leader or not takes_learners(self._tree):
            self._away_since.clear()
            return
        now = self._electorate(replica)
        places, nodes = self._tree.places(), self._tree.nodes
        if not replica.core.may_change_members() or self._is_naming(now, places):
            return
        step = voter_step(now, count=self._count, nodes=nodes.keys(), places=places)
        if step.promote and self._host.set_vote(0, step.promote, votes=True):
            log.info("cluster.voter_added", node=step.promote, voters=sorted(now.seats))
        elif step.demote and self._host.set_vote(0, step.demote, votes=False):
            log.info("cluster.voter_removed", node=step.demote, voters=sorted(now.seats),
                     gone=sorted(now.gone))  # fmt: skip

    def _electorate(self, replica: Replica) -> Electorate:
        core, now_ms = replica.core, self._clock.monotonic_ms()
        members = core.members
        coming = {each.node for each in members.learners if each.promote_at != NEVER}
        up = {
            peer.node
            for peer in core.progress.values()
            if peer.connected and not peer.silent and peer.node not in core.changes.rejoining
        }
        away = members.nodes - up - {replica.core.node}
        self._away_since = {node: self._away_since.get(node, now_ms) for node in away}
        gone = {n for n, since in self._away_since.items() if now_ms - since >= self._away_max_ms}
        able = {
            peer.node
            for peer in core.progress.values()
            if peer.node in up and peer.state == REPLICATE and not peer.voteless
        }
        seats = members.voters | coming
        return Electorate(
            leader=core.node,
            seats=seats,
            able=frozenset(able - seats),
            # One that has not got its vote yet is not waited for.
            gone=frozenset((gone & seats) | (away & coming)),
        )

    @staticmethod
    def _is_naming(now: Electorate, places: Places) -> bool:
        """Returns whether some nodes that run have not recorded their zones yet, and others have:
        they do so at once (`members.MembershipManager`)."""
        named = {bool(places[node].zone) for node in now.able | now.seats if node in places}
        return len(named) > 1


def takes_learners(tree: Tree) -> bool:
    """Returns whether nodes join without a vote: all know zones, and where the others are."""
    return tree.version >= ZONES_VERSION
