"""Which replica moves between the processes of a machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.broker.replica_moves import ReplicaMove, ReplicaMoves, Step, next_move, next_step
from convoymq.metadata.placement import Place
from convoymq.model.errors import Unavailable
from convoymq.replication.raft.membership import NEVER, Learner, Membership, decode_membership
from convoymq.routing.queue_types import PlacementKind

MACHINE = (1, 33, 65)


def test_equal_shares_stay_where_they_are() -> None:
    assert next_move([(1, (1, 2, 3)), (2, (33, 2, 3))], processes=MACHINE[:2]) is None
    assert next_move([(1, (1, 2, 3))], processes=MACHINE) is None
    assert next_move([(1, (2, 3)), (2, (2, 3))], processes=MACHINE) is None


def test_a_process_alone_keeps_its_replicas() -> None:
    assert next_move([(1, (1, 2)), (2, (1, 2))], processes=[1]) is None


def test_the_fullest_process_gives_to_the_emptiest() -> None:
    groups = [(group, (1, 2, 3)) for group in range(1, 5)] + [(9, (33, 2, 3))]
    found = next_move(groups, processes=MACHINE)
    assert found is not None
    assert (found.source, found.target) == (1, 65)
    assert found.group < 5


def test_a_move_that_was_begun_comes_first() -> None:
    groups = [(1, (1, 2, 3)), (2, (1, 2, 3, 33)), (3, (1, 2, 3))]
    assert next_move(groups, processes=MACHINE) == ReplicaMove(2, 0, 0)
    later = next_move(groups, processes=MACHINE, skip={2})
    assert later is not None
    assert later.group in (1, 3)


@given(homes=st.lists(st.sampled_from(MACHINE), max_size=60), processes=st.integers(1, 3))
def test_moves_end_with_equal_shares(homes: list[int], processes: int) -> None:
    """No queue gets a second member on the machine, and each replica moves once at most."""
    here = MACHINE[:processes]
    groups = {group: (home, 2, 3) for group, home in enumerate(homes, 1)}
    moved = Counter[int]()
    while (move := next_move(groups.items(), processes=here)) is not None:
        members = groups[move.group]
        assert move.source in members
        groups[move.group] = (move.target, *members[1:])
        moved[move.group] += 1
    counts = Counter(members[0] for members in groups.values() if members[0] in here)
    shares = [counts[process] for process in here]
    assert max(shares) - min(shares) <= 1
    assert max(moved.values(), default=0) <= 1


def test_a_learner_names_the_member_whose_place_it_takes() -> None:
    members = Membership(frozenset((1, 2, 3)), (Learner(9, NEVER), Learner(33, NEVER + 1)))
    assert members.stand_in == (33, 1)
    assert members.without(1).stand_in is None
    assert members.without(33).stand_in is None


def test_the_only_member_leaves_behind_the_node_that_takes_its_place() -> None:
    """Whatever leader and process that plans die: the members say how a move goes on."""
    moving = Membership(frozenset((1,)), (Learner(33, NEVER + 1),))
    assert next_step(moving, complete=False) is Step.COPY
    assert next_step(moving, complete=True) is Step.GIVE_VOTE
    voting = replace(moving.with_learner(Learner(33, 7)), leaving=1)
    assert next_step(voting, complete=True) is Step.AWAIT_VOTE
    both = decode_membership(voting.promoted(33).encode())
    assert both.voters == {1, 33}
    assert both.stand_in == (33, 1)
    assert next_step(both, complete=False) is Step.REMOVE
    assert both.without(1) == Membership(frozenset((33,)))
    assert both.without(33) == Membership(frozenset((1,)))
    several = Membership(frozenset((1, 2, 3)), (Learner(33, NEVER + 1),))
    assert next_step(several, complete=True) is Step.REMOVE


class World:
    """Node 1, the first of two processes of a machine; the other one has no replicas."""

    def __init__(self, queues: int) -> None:
        self.node_id = 1
        self.answers: list[Any] = []
        self.asked: list[ReplicaMove] = []
        self.by_group = {group: record(group, (1, 2, 3)) for group in range(1, queues + 1)}
        self.queue_index = SimpleNamespace(by_group=self.by_group)
        self.nodes: Any = self
        self.tree: Any = SimpleNamespace(
            nodes=dict.fromkeys((1, 33, 2, 3)),
            places=lambda: {1: Place("a", 1), 33: Place("a", 1)},
            records=lambda: list(self.by_group.values()),
            queue_index=self.queue_index,
        )
        self.host = None
        self.clock = SimpleNamespace(monotonic_ms=lambda: 0)
        requests: Any = self
        membership: Any = self
        tasks: Any = None
        self.moves = ReplicaMoves(requests, membership, tasks)

    def serve(self, name: str, operation: object) -> None:
        assert name == "move_member"

    def running(self) -> list[int]:
        return [1, 2, 3, 33]

    def is_drained(self, node: int) -> bool:
        return False

    async def ask_leader(
        self, group: int, members: object, name: str, source: int, target: int, timeout_s: float
    ) -> object:
        self.asked.append(ReplicaMove(group, source, target))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer and source:
            self.by_group[group] = record(group, (target, 2, 3))
        return answer

    async def until_recorded(self, record: object, is_done: object) -> None:
        pass


def record(group: int, members: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        group=group, members=members, vhost="/", name=f"q{group}", placement=PlacementKind.RAFT
    )


@pytest.mark.provokes("queue.replica_moved")
async def test_replicas_move_one_after_the_other_until_the_shares_are_equal() -> None:
    world = World(5)
    world.answers = [True, True]
    await world.moves._move_all()
    assert [(move.source, move.target) for move in world.asked] == [(1, 33), (1, 33)]


@pytest.mark.provokes("queue.replica_not_moved")
async def test_a_move_that_fails_ends_the_turn() -> None:
    world = World(5)
    world.answers = [Unavailable("the group has no leader")]
    await world.moves._move_all()
    assert len(world.asked) == 1


async def test_two_members_on_a_machine_that_are_no_move_are_left_alone() -> None:
    world = World(1)
    world.by_group[1] = record(1, (1, 33, 2))
    world.answers = [False]
    await world.moves._move_all()
    await world.moves._move_all()
    assert world.asked == [ReplicaMove(1, 0, 0)]
