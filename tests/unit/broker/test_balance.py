"""Which leader moves where, and who gets the next member, against what must hold of every plan."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoymq.broker.balance import (
    LedGroup,
    MemberStep,
    Move,
    Strategy,
    choose_successor,
    grows,
    plan_by_count,
    plan_by_load,
    reconciling_step,
)
from convoymq.metadata.placement import Place

NODES = (1, 2, 3, 4, 5)
patient = settings(suppress_health_check=[HealthCheck.too_slow])


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


@patient
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


@patient
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


def test_even_groups_grow_only_when_they_are_even() -> None:
    assert grows((1, 2), Strategy.EVEN)
    assert not grows((1, 2, 3), Strategy.EVEN)
    assert grows((1, 2, 3), Strategy.ALL)


# --- continuous membership reconciliation ---------------------------------------------------


def step(
    members: tuple[int, ...],
    target: int,
    candidates: tuple[int, ...] = NODES,
    *,
    cluster: tuple[int, ...] = NODES,
    replicas: dict[int, int] | None = None,
    places: dict[int, Place] | None = None,
    auto_remove: bool = False,
) -> MemberStep | None:
    return reconciling_step(
        members,
        target=target,
        cluster=cluster,
        candidates=candidates,
        replicas=replicas or {},
        places=places or {},
        auto_remove=auto_remove,
    )


def test_a_group_gets_the_node_with_fewest_replicas() -> None:
    assert step((1, 2), 3, replicas={3: 5, 4: 2, 5: 9}) == MemberStep(add=4)
    assert step((1, 2, 3), 3) is None
    assert step((1, 2, 3, 4), 3) is None
    assert step((1, 2), 0) is None


def test_a_group_gets_a_node_of_another_zone_first() -> None:
    places = {node: Place("b" if node in (4, 5) else "a", node) for node in NODES}
    assert step((1, 2), 3, replicas={4: 7, 5: 9}, places=places) == MemberStep(add=4)


def test_an_odd_group_grows_only_when_two_can_follow() -> None:
    assert step((1, 2, 3), 5, (1, 2, 3, 4)) is None
    assert step((1, 2, 3), 5, (1, 2, 3, 4, 5)) == MemberStep(add=4)
    assert step((1, 2), 5, (1, 2, 4)) == MemberStep(add=4)
    assert step((1,), 3, (1, 2)) is None


def test_only_nodes_outside_of_the_cluster_are_removed() -> None:
    # Node 3 is down: no candidate, and still a node of the cluster.
    assert step((1, 2, 3), 3, (1, 2), auto_remove=True) is None
    assert step((1, 2, 9), 3, (1, 2), cluster=(1, 2)) is None
    assert step((1, 2, 9), 3, (1, 2), cluster=(1, 2), auto_remove=True) == MemberStep(remove=9)
    assert step((9,), 3, (1, 2), cluster=(1, 2), auto_remove=True) == MemberStep(add=1)


@patient
@given(
    members=st.sets(st.integers(1, 9), min_size=1),
    target=st.integers(1, 9),
    cluster=st.sets(st.integers(1, 9)),
    drained=st.sets(st.integers(1, 9)),
    auto_remove=st.booleans(),
)
def test_steps_end_with_an_odd_number_at_an_odd_target(
    members: set[int], target: int, cluster: set[int], drained: set[int], auto_remove: bool
) -> None:
    before, candidates = set(members), cluster - drained
    began_odd = len(before) % 2 == 1
    removed = 0
    for _ in range(20):
        found = reconciling_step(
            members,
            target=target,
            cluster=cluster,
            candidates=candidates,
            replicas={},
            places={},
            auto_remove=auto_remove,
        )
        if found is None:
            break
        if found.remove:
            assert auto_remove
            assert found.remove in members - cluster
            removed += 1
            members = members - {found.remove}
        else:
            assert found.add in candidates - members
            assert len(members) < target
            members = members | {found.add}
    else:
        raise AssertionError("the steps do not end")
    assert members
    if auto_remove and members & cluster:
        assert members <= cluster
    if began_odd and not removed and target % 2:
        assert len(members) % 2 == 1
    free = candidates - members
    assert len(members) >= target or not free or (len(members) % 2 == 1 and len(free) == 1)
