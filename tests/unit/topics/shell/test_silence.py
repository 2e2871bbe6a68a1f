"""Partitions that are silent for longer than their topic bears are sealed from outside."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.machine import Change, ChangeKind
from convoymq.metadata.records import Vhost
from convoymq.model.errors import PreconditionFailed
from convoymq.routing.topology import Topology
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import TopicState
from convoymq.topics.shell.leader_task import TopicNode
from convoymq.topics.shell.silence import LOOK_MS, SilentPartitions


class World:
    """Node 1, with two topics of one partition each; only one has the setting."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.up = {1, 2, 3}
        self.leader: int | None = 2
        self.sealed: list[tuple[str, str, int]] = []
        self.refusal: Exception | None = None
        self.tasks: list[asyncio.Task[None]] = []
        records: Any = {
            name: SimpleNamespace(
                vhost="/", name=name, settings=settings, state=TopicState.first(first_route(8, 1))
            )
            for name, settings in (("orders", {"seal-after": "5s"}), ("logs", {}))
        }
        vhost = Vhost("/", Topology("/"), topics=records)
        self.store: Any = SimpleNamespace(
            leader=1, term=1, tree=SimpleNamespace(vhosts={"/": vhost})
        )
        partitions: Any = SimpleNamespace(
            members=lambda record, pid: (2, 3),
            find=lambda vhost, topic, pid: SimpleNamespace(leader=self.leader),
        )
        nodes: Any = SimpleNamespace(is_up=lambda node: node in self.up)
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.silence = SilentPartitions(
            TopicNode(
                node=1,
                store=self.store,
                partitions=partitions,
                clock=clock,
                call_soon=lambda call: call(),
                spawn=lambda work: self.tasks.append(asyncio.ensure_future(work)),
            ),
            nodes,
            self._seal,
        )

    async def _seal(self, vhost: str, topic: str, pid: int) -> None:
        self.sealed.append((vhost, topic, pid))
        if self.refusal is not None:
            raise self.refusal

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ms += LOOK_MS
            self.silence.tick()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> World:
    return World()


async def test_without_a_majority_of_members_for_long_it_is_sealed(world: World) -> None:
    await world.run(10)
    world.up.discard(3)
    await world.run(5)
    assert not world.sealed
    await world.run(1)
    assert world.sealed == [("/", "orders", 0)]


@pytest.mark.provokes("topics.partition_not_given_up")
async def test_time_counts_anew_when_it_was_there_again(world: World) -> None:
    world.leader = None
    await world.run(5)
    world.leader = 3
    await world.run(1)
    world.leader = None
    await world.run(5)
    assert not world.sealed
    # What is refused is tried again after the same time.
    world.refusal = PreconditionFailed("partition 0 answers: move it")
    await world.run(1)
    assert len(world.sealed) == 1
    await world.run(5)
    assert len(world.sealed) == 1
    await world.run(1)
    assert len(world.sealed) == 2


async def test_only_who_leads_the_metadata_acts(world: World) -> None:
    world.leader, world.store.leader = None, 2
    await world.run(10)
    assert not world.sealed
    world.store.leader = 1
    await world.run(5)
    assert not world.sealed
    world.silence.on_change(Change(ChangeKind.POLICIES, vhost="/"))
    await world.run(1)
    assert len(world.sealed) == 1
