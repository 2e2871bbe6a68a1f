"""Leaders append under a lease of their node, and close what was sealed from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.machine import Change, ChangeKind
from convoymq.model.errors import Unavailable
from convoymq.shells.groups.append_fence import ANY_TERM, NO_TERM, AppendFence
from convoymq.topics.machine.codec import CMD_PARTITION, decode_command
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.rules.changes import Phase, Seal, plan_move
from convoymq.topics.rules.commands import Seal as SealCommand
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.server_lease import TTL_MS
from convoymq.topics.rules.topic import (
    Begin,
    GiveUp,
    LearnClose,
    Publish,
    RecordSeal,
    TargetReady,
    ToPhase,
    TopicCommand,
    TopicState,
)
from convoymq.topics.shell.fence import RENEW_MS, PartitionFence

NODE = 2
GROUP = 7
STATE = {"pid": 0, "lo": 0, "hi": 8, "created_version": 0}
SETTINGS = {**STATE, "max_bytes": -1, "max_age_ms": -1, "segment_bytes": 1 << 20}


class World:
    """A node with one replica, whose clock and tree the test moves."""

    def __init__(self) -> None:
        self.now_ms = 10_000
        self.state = TopicState.first(first_route(8, 1))
        record = SimpleNamespace(state=self.state)
        self.tree: Any = SimpleNamespace(
            vhosts={"/": SimpleNamespace(topics={"orders": record})},
        )
        self.appended: list[tuple[int, bytes]] = []
        self.reconsidered: list[int] = []
        self.replica = SimpleNamespace(
            fence=None,
            established_leader=NODE,
            term=5,
            machine=PartitionGroupMachine(SETTINGS),
        )
        self.host: Any = SimpleNamespace(lease_until_ms=0, replica=lambda group: self.replica)
        self.answers: list[asyncio.Future[None]] = []
        self.queue: Any = SimpleNamespace(vhost="/", name="amq.partition.orders.0", group=GROUP)
        self.tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.fences = PartitionFence(
            node=NODE,
            tree=self.tree,
            host=self.host,
            catch_up=self._catch_up,
            clock=clock,
            call_soon=loop.call_soon,
            spawn=lambda work: self.tasks.append(loop.create_task(work)),
        )

    @property
    def fence(self) -> AppendFence:
        assert self.replica.fence is not None
        return self.replica.fence

    def _catch_up(self) -> Awaitable[None]:
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers.append(asked)
        return asked

    async def answer(self, error: Exception | None = None) -> None:
        """The oldest question is answered."""
        await self.settle()
        asked = self.answers.pop(0)
        if error is None:
            asked.set_result(None)
        else:
            asked.set_exception(error)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def change(self, *commands: TopicCommand) -> None:
        """The tree has applied commands."""
        for command in commands:
            assert self.state.apply(command) is None, command
        self.fences.on_change(Change(ChangeKind.TOPIC, vhost="/", topic="orders"))
        await self.settle()

    async def give_up(self) -> None:
        planned = plan_move(self.state.route, 0, 1, "c")
        await self.change(
            Begin(planned),
            TargetReady("c", 1, 1),
            ToPhase("c", 1, Phase.TARGETS_READY),
            ToPhase("c", 1, Phase.SEALING),
            GiveUp("c", 0),
        )

    async def publish(self) -> None:
        await self.change(
            RecordSeal("c", 0, Seal(None)), ToPhase("c", 1, Phase.SEALED), Publish("c", 1)
        )


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(
        AppendFence, "append_first", lambda _, kind, body: made.appended.append((kind, body))
    )
    monkeypatch.setattr(AppendFence, "reconsider", lambda _: made.reconsidered.append(1))
    return made


async def leased(world: World) -> None:
    world.fences.follow(world.queue)
    assert world.fence.term == NO_TERM
    await world.answer()


@pytest.mark.provokes("topics.lease_taken", "topics.lease_lost")
async def test_a_lease_counts_from_when_it_was_asked_for(world: World) -> None:
    world.fences.follow(world.queue)
    asked_ms = world.now_ms
    await world.settle()
    assert world.host.lease_until_ms == 0
    world.now_ms += 400
    await world.answer()
    assert world.host.lease_until_ms == asked_ms + TTL_MS
    assert world.fence.term == ANY_TERM
    world.now_ms = asked_ms + RENEW_MS
    world.fences.tick()
    await world.answer(Unavailable("no majority"))
    assert world.host.lease_until_ms == asked_ms + TTL_MS
    world.reconsidered.clear()
    world.now_ms = asked_ms + TTL_MS
    world.fences.tick()
    await world.answer()
    # What waited for it goes on.
    assert world.host.lease_until_ms == world.now_ms + TTL_MS
    assert len(world.reconsidered) == 1


async def test_a_node_without_partitions_asks_for_nothing(world: World) -> None:
    world.fences.tick()
    await world.settle()
    assert not world.answers
    await leased(world)
    world.fences.forget(world.queue)
    world.now_ms += RENEW_MS
    world.fences.tick()
    await world.settle()
    assert not world.answers


async def test_a_tree_that_is_built_anew_ends_the_lease(world: World) -> None:
    await leased(world)
    world.now_ms += RENEW_MS
    world.fences.tick()
    await world.settle()
    world.fences.on_change(Change(ChangeKind.RESTORED))
    assert world.host.lease_until_ms == 0
    # What was asked before was confirmed for another tree.
    await world.answer()
    assert world.host.lease_until_ms == 0
    world.now_ms += RENEW_MS
    world.fences.tick()
    await world.answer()
    assert world.host.lease_until_ms == world.now_ms + TTL_MS


@pytest.mark.provokes("topics.partition_returned")
async def test_close_comes_first_in_a_partition_that_was_sealed_from_outside(world: World) -> None:
    await leased(world)
    await world.give_up()
    assert world.fence.term == NO_TERM
    world.replica.established_leader = 0
    await world.publish()
    assert (world.fence.term, world.appended) == (NO_TERM, [])
    # It leads again.
    world.replica.established_leader, world.replica.term = NODE, 6
    world.fences.follow(world.queue)
    await world.settle()
    ((kind, body),) = world.appended
    command = decode_command(body)
    assert kind == CMD_PARTITION
    assert isinstance(command, SealCommand)
    assert command.external
    assert [span.pid for span in command.targets] == [1]
    # In this term only: the entry may be lost with it.
    assert world.fence.term == 6
    world.fences.follow(world.queue)
    await world.settle()
    assert len(world.appended) == 1
    await world.change(LearnClose(0, 1))
    assert world.fence.term == ANY_TERM


async def test_a_partition_whose_queue_the_tree_does_not_have_is_fenced(world: World) -> None:
    world.tree.vhosts.clear()
    await leased(world)
    assert world.fence.term == NO_TERM
