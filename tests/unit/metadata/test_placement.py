"""Where replicas and leaders go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.metadata.placement import (
    BALANCED,
    CLIENT_LOCAL,
    Place,
    choose_leader,
    choose_members,
    majority,
    siblings,
    spread,
)
from convoymq.model.machines import node_number, processes_max

MACHINES = {
    node_number(machine, process): Place("", machine)
    for machine in (1, 2, 3)
    for process in (1, 2, 3)
}


def test_client_local_takes_the_client_node() -> None:
    running = {1, 2, 3}
    assert (
        choose_leader(CLIENT_LOCAL, client_node=2, running=running, leaders={2: 9}, places={}) == 2
    )


def test_client_local_takes_the_process_of_the_machine_that_leads_least() -> None:
    leaders = {1: 5, 33: 4, 65: 4, 2: 0}
    running = {1, 2, 33, 65}
    for client, chosen in ((1, 33), (65, 65), (2, 2)):
        found = choose_leader(
            CLIENT_LOCAL, client_node=client, running=running, leaders=leaders, places=MACHINES
        )
        assert found == chosen


def test_a_drained_machine_gives_its_leaders_to_others() -> None:
    found = choose_leader(
        CLIENT_LOCAL, client_node=1, running={2, 34}, leaders={2: 1}, places=MACHINES
    )
    assert found == 34


def test_balanced_takes_the_running_node_with_fewest_leaders() -> None:
    leaders = {1: 4, 2: 3, 3: 1}
    assert choose_leader(BALANCED, client_node=1, running={1, 2}, leaders=leaders, places={}) == 2


def test_balanced_prefers_the_client_node_among_equals() -> None:
    assert choose_leader(BALANCED, client_node=3, running={1, 2, 3}, leaders={}, places={}) == 3


def test_members_are_the_leader_then_running_nodes_with_fewest_replicas() -> None:
    members = choose_members(
        3,
        leader=2,
        nodes={1, 2, 3, 4, 5},
        running={1, 2, 3, 4},
        replicas={1: 5, 3: 2, 4: 1},
        places={},
    )
    assert members == (2, 4, 3)


def test_nodes_that_are_down_come_last() -> None:
    members = choose_members(
        3, leader=1, nodes={1, 2, 3}, running={1, 3}, replicas={3: 100}, places={}
    )
    assert members == (1, 3, 2)


@given(st.integers(1, 9), st.sets(st.integers(1, 9), min_size=1), st.data())
def test_members_are_distinct_and_as_many_as_there_can_be(
    size: int, nodes: set[int], data: st.DataObject
) -> None:
    leader = data.draw(st.sampled_from(sorted(nodes)))
    members = choose_members(
        size, leader=leader, nodes=nodes, running=nodes, replicas={}, places={}
    )
    assert members[0] == leader
    assert len(set(members)) == len(members) == min(size, len(nodes))
    assert majority(len(members)) * 2 > len(members)


def test_replicas_go_to_other_machines_before_siblings() -> None:
    # Nodes of machine 1 have nothing yet, and still get no second replica.
    busy = {node: 9 for node in MACHINES if MACHINES[node].machine != 1}
    members = choose_members(
        3, leader=1, nodes=MACHINES, running=MACHINES, replicas=busy, places=MACHINES
    )
    assert members == (1, 2, 3)


def test_within_a_zone_replicas_go_to_other_machines() -> None:
    places = {node: Place("hall", place.machine) for node, place in MACHINES.items()}
    members = choose_members(3, leader=1, nodes=places, running=places, replicas={}, places=places)
    assert {MACHINES[node].machine for node in members} == {1, 2, 3}


def test_a_zone_that_is_down_keeps_its_replica_where_a_majority_runs() -> None:
    running = {node for node in MACHINES if MACHINES[node].machine != 3}
    members = choose_members(
        3, leader=1, nodes=MACHINES, running=running, replicas={}, places=MACHINES
    )
    assert members == (1, 2, 3)


def test_a_majority_runs_where_only_one_machine_does() -> None:
    running = siblings(2, MACHINES, MACHINES)
    members = choose_members(
        3, leader=2, nodes=MACHINES, running=running, replicas={}, places=MACHINES
    )
    assert members == (2, 34, 1)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, Place], dict[int, int]]:
    zones = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    places = {
        node_number(machine, process): Place(f"zone{zone}", machine)
        for machine, zone in enumerate(zones, 1)
        for process in range(1, draw(st.integers(1, 3)) + 1)
    }
    return places, {node: draw(st.integers(0, 9)) for node in places}


@given(clusters(), st.integers(1, 7), st.data())
def test_replicas_are_spread_over_zones_and_machines(
    cluster: tuple[dict[int, Place], dict[int, int]], size: int, data: st.DataObject
) -> None:
    places, replicas = cluster
    leader = data.draw(st.sampled_from(sorted(places)))
    members = choose_members(
        size, leader=leader, nodes=places, running=places, replicas=replicas, places=places
    )
    assert len(set(members)) == len(members) == min(size, len(places))
    for node in set(places) - set(members):
        # No node that is left over would have been in an emptier zone, or on an emptier machine of
        # the zone, than any that was taken.
        for taken in members[1:]:
            zone, other = places[taken].zone, places[node].zone
            assert _count(members, places, zone) <= _count(members, places, other) + 1
            if zone == other:
                machine, another = places[taken].machine, places[node].machine
                assert _on(members, places, machine) <= _on(members, places, another) + 1


def _count(members: tuple[int, ...], places: dict[int, Place], zone: str) -> int:
    return sum(places[node].zone == zone for node in members)


def _on(members: tuple[int, ...], places: dict[int, Place], machine: int) -> int:
    return sum(places[node].machine == machine for node in members)


@given(clusters(), st.integers(1, 7), st.data())
def test_a_majority_of_a_new_group_runs_where_it_can(
    cluster: tuple[dict[int, Place], dict[int, int]], size: int, data: st.DataObject
) -> None:
    places, replicas = cluster
    running = data.draw(st.sets(st.sampled_from(sorted(places)), min_size=1))
    leader = data.draw(st.sampled_from(sorted(running)))
    members = choose_members(
        size, leader=leader, nodes=places, running=running, replicas=replicas, places=places
    )
    up = sum(node in running for node in members)
    assert up >= min(majority(len(members)), len(running))


@given(st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9)), st.integers(1, 5))
def test_where_each_node_is_a_machine_the_fewest_replicas_count(
    candidates: set[int], members: set[int], count: int
) -> None:
    replicas = {node: node % 4 for node in candidates}
    found = spread(candidates, {}, members=members, count=count, replicas=replicas)
    free = sorted(candidates - members, key=lambda node: (replicas[node], node))
    assert list(found) == free[:count]


def test_numbers_of_processes() -> None:
    assert [node_number(7, process) for process in (1, 2, 8)] == [7, 39, 231]
    assert (processes_max(1), processes_max(31), processes_max(32), processes_max(33)) == (
        8,
        8,
        7,
        1,
    )
    assert (processes_max(15, step=16), node_number(15, 16, step=16)) == (16, 255)
