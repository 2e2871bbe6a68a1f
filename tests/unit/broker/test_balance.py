"""Which leader moves where, and who gets the next member, against what must hold of every plan."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from convoymq.broker.balance import (
    LedGroup,
    Move,
    Strategy,
    choose_successor,
    grows,
    next_member,
    plan_by_count,
    plan_by_load,
)

NODES = (1, 2, 3, 4, 5)


@st.composite
def led_groups(draw: st.DrawFn) -> list[LedGroup]:
    found = []
    for group in range(1, draw(st.integers(0, 40)) + 1):
        members = draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=5, unique=True))
        found.append(
            LedGroup(
                group=group,
                leader=members[0],
                targets=tuple(members[1:]),
                log_entries=draw(st.integers(0, 5)),
                load=draw(st.floats(0, 1000)),
            )
        )
    return found


def group(number: int, leader: int, *targets: int, log: int = 0, load: float = 0.0) -> LedGroup:
    return LedGroup(group=number, leader=leader, targets=targets, log_entries=log, load=load)


def check_moves(groups: list[LedGroup], nodes: set[int], moves: list[Move]) -> None:
    known = {each.group: each for each in groups}
    assert len({move.group for move in moves}) == len(moves), "a leadership moves twice"
    for move in moves:
        assert move.source == known[move.group].leader
        assert move.target in known[move.group].targets
        assert move.target in nodes


@given(led_groups(), st.sets(st.sampled_from(NODES)))
def test_plans_by_count_keep_the_cap_where_members_allow(
    groups: list[LedGroup], nodes: set[int]
) -> None:
    moves = plan_by_count(groups, nodes)
    check_moves(groups, nodes, moves)
    if not nodes:
        assert not moves
        return
    cap = math.ceil(len(groups) / len(nodes))
    target_of = {move.group: move.target for move in moves}
    before = Counter(each.leader for each in groups)
    after = Counter(target_of.get(each.group, each.leader) for each in groups)
    for node in nodes:
        # Nobody gets more than the cap, and nobody who has no more gives any away.
        assert after[node] <= max(cap, before[node])
        assert after[node] >= min(cap, before[node])
    for each in groups:
        leader = target_of.get(each.group, each.leader)
        if leader == each.leader and after[leader] > (cap if leader in nodes else 0):
            assert all(after[node] >= cap for node in each.targets if node in nodes)


def test_the_shortest_log_moves_first_to_who_leads_least() -> None:
    groups = [
        group(1, 1, 2, 3, log=9),
        group(2, 1, 2, 3, log=1),
        group(3, 1, 2, 3, log=5),
        group(4, 2, 1, 3, log=0),
    ]
    assert plan_by_count(groups, (1, 2, 3)) == [Move(2, 1, 3)]


def test_a_node_that_returned_gets_its_share() -> None:
    groups = [group(n, 1 + n % 2, 1, 2, 3) for n in range(1, 10)]
    moves = plan_by_count(groups, (1, 2, 3))
    after = Counter({1: 4, 2: 5}) - Counter(move.source for move in moves)
    after += Counter(move.target for move in moves)
    assert after == {1: 3, 2: 3, 3: 3}


def test_leaders_leave_nodes_that_may_not_lead() -> None:
    groups = [group(n, 3, 1, 2) for n in range(4)]
    assert Counter(move.target for move in plan_by_count(groups, (1, 2))) == {1: 2, 2: 2}


@given(led_groups(), st.sets(st.sampled_from(NODES)))
def test_plans_by_load_never_raise_the_highest_load(
    groups: list[LedGroup], nodes: set[int]
) -> None:
    moves = plan_by_load(groups, nodes)
    check_moves(groups, nodes, moves)
    loads = dict.fromkeys(nodes, 0.0)
    known = {each.group: each for each in groups}
    for each in groups:
        if each.leader in loads:
            loads[each.leader] += each.load
    for move in moves:
        highest = max(loads.values())
        assert loads[move.source] == highest
        loads[move.source] -= known[move.group].load
        loads[move.target] += known[move.group].load
        assert max(loads[move.source], loads[move.target]) < highest


def test_one_busy_queue_stays_and_idle_ones_do_not_matter() -> None:
    busy = [group(1, 1, 2, 3, load=900.0), group(2, 1, 2, 3, load=100.0)]
    idle = [group(n, 2, 1, 3) for n in range(3, 30)]
    moves = plan_by_load([*busy, *idle], (1, 2, 3))
    assert moves == [Move(2, 1, 2)]


def test_a_successor_leads_least_and_is_not_avoided() -> None:
    assert choose_successor((2, 3), {2: 1}) == 3
    assert choose_successor((2, 3), {2: 1}, avoid={3}) == 2
    assert choose_successor((2, 3), {}, avoid={2, 3}) == 0


def test_the_next_member_has_fewest_replicas() -> None:
    assert next_member((1, 2), (1, 2, 3, 4), {3: 5, 4: 2}) == 4
    assert next_member((1, 2), (1, 2), {}) == 0


def test_even_groups_grow_only_when_they_are_even() -> None:
    assert grows((1, 2), Strategy.EVEN)
    assert not grows((1, 2, 3), Strategy.EVEN)
    assert grows((1, 2, 3), Strategy.ALL)
