"""Where replicas and leaders go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.metadata.placement import (
    BALANCED,
    CLIENT_LOCAL,
    choose_leader,
    choose_members,
    majority,
)


def test_client_local_takes_the_client_node() -> None:
    assert choose_leader(CLIENT_LOCAL, client_node=2, running={1, 2, 3}, leaders={2: 99}) == 2


def test_balanced_takes_the_running_node_with_fewest_leaders() -> None:
    leaders = {1: 4, 2: 3, 3: 1}
    assert choose_leader(BALANCED, client_node=1, running={1, 2}, leaders=leaders) == 2


def test_balanced_prefers_the_client_node_among_equals() -> None:
    assert choose_leader(BALANCED, client_node=3, running={1, 2, 3}, leaders={}) == 3


def test_members_are_the_leader_then_running_nodes_with_fewest_replicas() -> None:
    members = choose_members(
        3, leader=2, nodes={1, 2, 3, 4, 5}, running={1, 2, 3, 4}, replicas={1: 5, 3: 2, 4: 1}
    )
    assert members == (2, 4, 3)


def test_nodes_that_are_down_come_last() -> None:
    members = choose_members(3, leader=1, nodes={1, 2, 3}, running={1, 3}, replicas={3: 100})
    assert members == (1, 3, 2)


@given(st.integers(1, 9), st.sets(st.integers(1, 9), min_size=1), st.data())
def test_members_are_distinct_and_as_many_as_there_can_be(
    size: int, nodes: set[int], data: st.DataObject
) -> None:
    leader = data.draw(st.sampled_from(sorted(nodes)))
    members = choose_members(size, leader=leader, nodes=nodes, running=nodes, replicas={})
    assert members[0] == leader
    assert len(set(members)) == len(members) == min(size, len(nodes))
    assert majority(len(members)) * 2 > len(members)
