"""Who votes in the metadata group: the rule, and the leader that carries it out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.metadata.placement import Place, Places, zone_of
from convoymq.metadata.snapshot import ZONES_VERSION
from convoymq.metadata.voters import (
    Electorate,
    MetadataVoters,
    VoteStep,
    voter_step,
    voters_wanted,
)
from convoymq.model.machines import node_number
from convoymq.replication.raft.membership import NEVER, Learner, Membership
from convoymq.replication.raft.types import PROBE, REPLICATE

AWAY_MS = 1000


def machines(count: int, processes: int) -> Places:
    """Machines of so many processes, each a zone."""
    return {
        node_number(machine, process): Place(f"z{machine}", machine)
        for machine in range(1, count + 1)
        for process in range(1, processes + 1)
    }


def step(
    places: Places, seats: set[int], *, gone: set[int] | None = None, down: set[int] | None = None
) -> VoteStep:
    now = Electorate(
        leader=min(seats - (gone or set())),
        seats=frozenset(seats),
        able=frozenset(places.keys() - seats - (down or set())),
        gone=frozenset(gone or ()),
    )
    return voter_step(now, count=5, nodes=places.keys(), places=places)


@pytest.mark.parametrize(
    ("areas", "wanted"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (6, 5), (9, 5)]
)
def test_voters_are_an_odd_number(areas: int, wanted: int) -> None:
    assert voters_wanted(5, areas) == wanted


def test_machines_of_one_zone_have_a_voter_each() -> None:
    places = {node: Place("hall", place.machine) for node, place in machines(3, 2).items()}
    assert step(places, {1, 2, 34}) == VoteStep(demote=34)
    assert step(places, {1, 2}) == VoteStep(promote=3)


def test_two_machines_have_three_voters() -> None:
    places = machines(2, 2)
    assert step(places, {1, 2}, down={34}) == VoteStep(promote=33)
    assert step(places, {1, 2, 33}) == VoteStep()


def test_processes_that_join_get_no_vote() -> None:
    places = machines(3, 4)
    assert step(places, {1, 2, 3}) == VoteStep()


def test_machines_that_join_get_votes_two_at_a_time() -> None:
    places = machines(5, 2)
    assert step(places, {1, 2, 3}, down={5, 37}) == VoteStep()
    assert step(places, {1, 2, 3}) == VoteStep(promote=4)
    assert step(places, {1, 2, 3, 4}) == VoteStep(promote=5)
    assert step(places, {1, 2, 3, 4, 5}) == VoteStep()


def test_a_voter_that_is_gone_loses_its_vote_before_its_sibling_gets_one() -> None:
    places = machines(3, 2)
    assert step(places, {1, 2, 3}, gone={2}) == VoteStep(demote=2)
    assert step(places, {1, 3}, down={2}) == VoteStep(promote=34)


def test_a_machine_that_is_gone_keeps_its_vote_while_no_zone_is_free() -> None:
    """Otherwise one of the other two machines would have a majority."""
    places = machines(3, 2)
    assert step(places, {1, 2, 3}, gone={2}, down={34}) == VoteStep()


def test_the_second_voter_of_a_zone_gives_way_to_a_free_zone() -> None:
    places = machines(3, 2)
    assert step(places, {1, 2, 34}, down={3, 35}) == VoteStep()
    assert step(places, {1, 2, 34}) == VoteStep(demote=34)
    assert step(places, {1, 2}) == VoteStep(promote=3)


def test_voters_of_an_older_release_become_fewer_and_the_leader_stays_one() -> None:
    places = machines(3, 2)
    seats = set(places)
    left = []
    while (found := step(places, seats)) != VoteStep():
        assert not found.promote
        seats.remove(found.demote)
        left.append(found.demote)
    assert seats == {1, 2, 3}
    assert left == [35, 34, 33]


def test_nothing_changes_while_a_node_joins_or_is_removed() -> None:
    places = machines(3, 1)
    assert step({1: places[1]}, {1, 2, 3}) == VoteStep()


@given(
    zones=st.integers(1, 6),
    processes=st.integers(1, 3),
    data=st.data(),
)
def test_steps_end_and_never_break_a_rule(zones: int, processes: int, data: st.DataObject) -> None:
    """From any voters, with any nodes away: no more voters than should be, no second one in a zone
    where three zones are there, and an end."""
    places = machines(zones, processes)
    nodes = sorted(places)
    wanted = voters_wanted(5, zones if zones >= 3 else len(nodes))
    seats = set(data.draw(st.sets(st.sampled_from(nodes), min_size=1)))
    down = set(data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) - 1)))
    down -= {min(seats)}
    for _ in range(4 * len(nodes)):
        found = step(places, seats, gone=seats & down, down=down)
        if found == VoteStep():
            break
        if found.demote:
            assert found.demote != min(seats - down)
            seats.remove(found.demote)
        else:
            seats.add(found.promote)
            assert len(seats) <= wanted
            crowds = Counter(zone_of(node, places) for node in seats)
            assert zones < 3 or crowds[zone_of(found.promote, places)] == 1
    else:
        raise AssertionError("the steps have no end")
    if not down:
        assert len(seats) == wanted
        assert zones < 3 or len({zone_of(node, places) for node in seats}) == wanted


class Group:
    """The metadata group, as its leader, node 1, sees it. It is the host, too."""

    def __init__(self, places: Places, voters: set[int]) -> None:
        learners = tuple(Learner(node, NEVER) for node in sorted(places.keys() - voters))
        self.peers = {
            node: SimpleNamespace(
                node=node, connected=True, silent=False, state=REPLICATE, voteless=False
            )
            for node in places
            if node != 1
        }
        self.core: Any = SimpleNamespace(
            node=1,
            members=Membership(frozenset(voters), learners),
            progress=self.peers,
            changes=SimpleNamespace(rejoining={}),
            may_change_members=lambda: True,
        )
        self.is_leader = True
        self.now_ms = 0
        self.asked: list[tuple[int, bool]] = []
        self.tree: Any = SimpleNamespace(
            version=ZONES_VERSION, nodes=dict.fromkeys(places), places=lambda: places
        )
        host: Any = self
        tree: Any = self.tree
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.voters = MetadataVoters(host, tree, clock, count=5, away_max_ms=AWAY_MS)

    def replica(self, group: int) -> Any:
        assert group == 0
        return self

    def set_vote(self, group: int, node: int, *, votes: bool) -> bool:
        assert group == 0
        self.asked.append((node, votes))
        members = self.core.members
        at = len(self.asked) if votes else NEVER
        self.core.members = members.with_learner(Learner(node, at))
        return True

    def tick(self, ms: int) -> list[tuple[int, bool]]:
        self.now_ms += ms
        self.asked.clear()
        self.voters.tick()
        return self.asked


@pytest.mark.provokes("cluster.voter_added", "cluster.voter_removed")
def test_a_voter_is_replaced_when_it_was_away_for_the_time() -> None:
    group = Group(machines(3, 2), {1, 2, 3})
    assert group.tick(AWAY_MS) == []
    group.peers[2].connected = False
    assert group.tick(0) == []
    assert group.tick(AWAY_MS - 1) == []
    group.peers[2].connected = True
    assert group.tick(1) == []
    group.peers[2].silent = True
    assert group.tick(0) == []
    assert group.tick(AWAY_MS) == [(2, False)]
    assert group.tick(1) == [(34, True)]
    # It gets its vote when it has caught up; until then it is waited for,
    assert group.tick(AWAY_MS) == []
    # unless it goes as well.
    group.peers[34].connected = False
    group.peers[2].silent = False
    assert group.tick(1) == [(34, False)]


@pytest.mark.parametrize("why", ["follower", "old", "changing", "unnamed", "behind"])
def test_nobody_gets_a_vote(why: str) -> None:
    places = dict(machines(3, 1))
    group = Group(places, {1, 2})
    if why == "follower":
        group.is_leader = False
    if why == "old":
        group.tree.version = ZONES_VERSION - 1
    if why == "changing":
        group.core.may_change_members = lambda: False
    if why == "unnamed":
        places[3] = Place("", 3)
    if why == "behind":
        group.peers[3].state = PROBE
    assert group.tick(1) == []


def test_the_last_of_an_odd_number_gets_a_vote() -> None:
    assert Group(machines(3, 1), {1, 2}).tick(1) == [(3, True)]
