"""Partitions of weak topics that nobody answers for are sealed from outside, then declared lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.records import Vhost
from convoymq.metadata.topic_settings import WEAK
from convoymq.model.errors import PreconditionFailed
from convoymq.routing.topology import Topology
from convoymq.topics.rules.changes import Phase, Seal, plan_move
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import TopicState
from convoymq.topics.shell.leader_task import TopicNode
from convoymq.topics.shell.weak_loop import ASK_MS, WeakLoop

Answered = Callable[[bool | None, Exception | None], None]
SETTINGS = {"weak-wait": "5s", "lost-after": "20s"}


class World:
    """Node 1, which leads the metadata, with a weak and a strict topic of one partition each."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.silent: set[int] = set()
        self.asked: list[tuple[str, int]] = []
        self.unanswered: list[Answered] = []
        self.sealed: list[tuple[str, str, int]] = []
        self.lost: list[tuple[str, str, int]] = []
        self.refusal: Exception | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.state = TopicState.first(first_route(8, 1))
        records: Any = {
            name: SimpleNamespace(vhost="/", name=name, mode=mode, settings=SETTINGS, state=state)
            for name, mode, state in (
                ("logs", WEAK, self.state),
                ("orders", "strict", TopicState.first(first_route(8, 1))),
            )
        }
        vhost = Vhost("/", Topology("/"), topics=records)
        tree = SimpleNamespace(vhosts={"/": vhost})
        self.store: Any = SimpleNamespace(leader=1, term=4, tree=tree)
        partitions: Any = SimpleNamespace(find=self._find)
        admin: Any = SimpleNamespace(seal=self._seal, declare_lost=self._declare_lost)
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.loop = WeakLoop(
            TopicNode(
                node=1,
                store=self.store,
                partitions=partitions,
                clock=clock,
                call_soon=lambda call: call(),
                spawn=lambda work: self.tasks.append(asyncio.ensure_future(work)),
            ),
            admin,
        )

    def _find(self, vhost: str, topic: str, pid: int) -> Any:
        def drained(group: str, group_epoch: int, answered: Answered) -> None:
            self.asked.append((topic, pid))
            if pid in self.silent:
                self.unanswered.append(answered)
            else:
                answered(False, None)

        return SimpleNamespace(drained=drained)

    async def _seal(self, vhost: str, topic: str, pid: int) -> None:
        self.sealed.append((vhost, topic, pid))
        if self.refusal is not None:
            raise self.refusal

    async def _declare_lost(self, vhost: str, topic: str, pid: int) -> None:
        self.lost.append((vhost, topic, pid))

    def seal_from_outside(self, pid: int) -> None:
        """The route goes on without a partition of which nobody knows the end."""
        change = plan_move(self.state.route, pid, pid + 1, "c")
        published = replace(change, phase=Phase.PUBLISHED, seals={pid: Seal(None, b"")})
        self.state.lineage.apply(published, published_at=0)

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ms += ASK_MS
            self.loop.tick()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> World:
    made = World()
    await made.run(10)
    return made


async def test_a_partition_that_answers_is_left_alone(world: World) -> None:
    await world.run(30)
    assert not world.sealed
    # Those of strict topics are asked nothing.
    assert set(world.asked) == {("logs", 0)}


async def test_a_silent_one_is_sealed_after_weak_wait_and_lost_after_lost_after(
    world: World,
) -> None:
    world.silent.add(0)
    await world.run(4)
    assert not world.sealed
    await world.run(1)
    assert world.sealed == [("/", "logs", 0)]
    world.seal_from_outside(0)
    # Its time begins anew, and its successor answers.
    world.sealed.clear()
    await world.run(20)
    assert not world.lost
    await world.run(1)
    assert world.lost == [("/", "logs", 0)]
    assert not world.sealed


async def test_one_question_is_asked_at_a_time_and_its_answer_counts_when_it_comes(
    world: World,
) -> None:
    world.silent.add(0)
    world.asked.clear()
    await world.run(4)
    assert world.asked == [("logs", 0)]
    (answered,) = world.unanswered
    answered(False, None)
    await world.run(4)
    assert len(world.asked) == 2
    # No answer after all says nothing.
    world.unanswered[1](None, PreconditionFailed("nobody leads"))
    await world.run(1)
    assert world.sealed == [("/", "logs", 0)]


@pytest.mark.provokes("topics.partition_not_given_up")
async def test_what_is_refused_is_tried_again(world: World) -> None:
    world.silent.add(0)
    world.refusal = PreconditionFailed("another change runs")
    await world.run(7)
    assert len(world.sealed) == 3


async def test_a_node_that_stood_still_waits_anew(world: World) -> None:
    world.silent.add(0)
    await world.run(4)
    world.now_ms += 4 * ASK_MS
    await world.run(5)
    assert not world.sealed
    await world.run(1)
    assert len(world.sealed) == 1


@pytest.mark.parametrize("term", [4, 5])
async def test_only_who_leads_the_metadata_acts_and_a_new_leader_waits_anew(
    world: World, term: int
) -> None:
    world.silent.add(0)
    world.store.leader = 2
    await world.run(10)
    assert not world.sealed
    world.store.leader, world.store.term = 1, term
    await world.run(6)
    assert not world.sealed
    await world.run(1)
    assert len(world.sealed) == 1
