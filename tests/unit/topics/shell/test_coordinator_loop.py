"""Coordinators of topics' groups on the metadata leader, with a tree and a partition beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.commands import ChangeGroup
from convoymq.metadata.machine import Change, ChangeKind
from convoymq.metadata.topic_codec import unpack_group_command
from convoymq.model.errors import NotFound, PeerError, Unavailable
from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.group import GroupState
from convoymq.topics.rules.heartbeats import MARGIN_MS, TTL_MS, Heartbeat, Leases, filter_of
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import TopicState
from convoymq.topics.shell.coordinator_loop import PAUSE_MS, GroupCoordinators
from convoymq.topics.shell.group_messages import (
    HEARTBEAT,
    GroupName,
    member_name,
    pack_heartbeat,
    process_of,
    unpack_heartbeat,
    unpack_leases,
)
from convoymq.topics.shell.leader_task import TopicNode

NAME = GroupName("/", "orders", "g")
MEMBER = member_name(1, 1, 5, 1)
OTHER = member_name(2, 1, 6, 1)


class World:
    """Everything that a coordinator talks to, answering at once."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.group = GroupState.first("g", 0, {})
        topic = TopicState.first(first_route(8, 1))
        self.record = SimpleNamespace(
            vhost="/",
            name="orders",
            mode="strict",
            settings={},
            state=topic,
            groups={"g": self.group},
        )
        self.machine = PartitionMachine(0, 0, 8, 0)
        self.machine.apply(c.Open("creation", 0, 1))
        vhost = SimpleNamespace(name="/", topics={"orders": self.record})
        self.leader = 1
        self.term = 1
        self.tree = SimpleNamespace(vhosts={"/": vhost})
        self.woken: list[str] = []
        self.notes: list[tuple[int, object]] = []
        self.soon: list[Callable[[], None]] = []
        self.ended: set[tuple[int, int]] = set()
        self.handlers: dict[int, Any] = {}
        self.loop = GroupCoordinators(
            TopicNode(
                node=1,
                store=self,  # type: ignore[arg-type]
                partitions=self,  # type: ignore[arg-type]
                clock=self,  # type: ignore[arg-type]
                call_soon=self.soon.append,
                spawn=asyncio.ensure_future,
            ),
            control=self,  # type: ignore[arg-type]
            wake=self.woken.append,
            has_ended=lambda node, incarnation: (node, incarnation) in self.ended,
        )
        self.loop.tick()

    # the clock, the control plane, the partitions and the store

    def monotonic_ms(self) -> int:
        return self.now_ms

    def handle(self, kind: int, handler: Any) -> None:
        self.handlers[kind] = handler

    def tell(self, *arguments: Any) -> None:
        """A note to a node, or a command to the partition."""
        if isinstance(arguments[0], int):
            self.notes.append((arguments[0], arguments[2]))
            return
        command, done = arguments
        done(self.machine.apply(command), None)

    def find(self, vhost: str, topic: str, pid: int) -> Any:
        return self

    def drained(self, group: str, group_epoch: int, done: Callable[..., None]) -> None:
        done(self.machine.drained(group), None)

    def submit(self, command: ChangeGroup, done: Callable[..., None], timeout_ms: int) -> None:
        changed = self.group.apply(unpack_group_command(command.command), 0)
        done(changed, None)
        self.loop.on_change(Change(ChangeKind.TOPIC, vhost="/", topic="orders"))

    # what tests do

    def settle(self) -> None:
        while self.soon:
            self.soon.pop(0)()

    def beat(self, member: str = MEMBER, **fields: Any) -> tuple[Leases, bool]:
        self.now_ms += 1
        beat = Heartbeat(member, self.now_ms, 1, fields.pop("held", {}), {}, **fields)
        (handler,) = self.handlers.values()
        node = 2 if member == OTHER else 1
        answer = asyncio.run(handler(node, pack_heartbeat(NAME, beat)))
        self.settle()
        return unpack_leases(member, answer)

    def pass_time(self, ms: int, step_ms: int = 250) -> None:
        for _ in range(0, ms, step_ms):
            self.now_ms += step_ms
            self.loop.tick()
            self.settle()


def test_a_member_that_joins_is_woken_when_its_partition_is_leased() -> None:
    world = World()
    leases, _ = world.beat()
    assert not leases.leases
    assert world.woken == [MEMBER]
    leases, is_member = world.beat()
    assert leases.leases == {0: 1}
    assert is_member
    assert world.machine.groups["g"].member == MEMBER


def test_a_member_elsewhere_is_woken_by_a_note_when_its_lease_is_revoked() -> None:
    world = World()
    world.beat(OTHER)
    assert world.notes == [(2, ["wake", OTHER])]
    leases, _ = world.beat(OTHER)
    assert leases.leases == {0: 1}
    world.beat(OTHER, held={0: 1}, leaves=True)
    leases, _ = world.beat(OTHER, held={0: 1}, leaves=True)
    assert leases.revoked == {0}


def test_a_silent_member_loses_its_lease_after_its_time_and_not_before() -> None:
    world = World()
    world.beat()
    world.beat()
    world.pass_time(TTL_MS)
    assert world.group.owners
    world.pass_time(MARGIN_MS + 500)
    assert not world.group.owners
    assert not world.group.members


def test_a_member_whose_process_has_ended_is_not_waited_for() -> None:
    world = World()
    member = member_name(1, 7, 3, 1)
    client = "1-00112233445566aa"
    for name in (member, client):
        world.beat(name)
    leases, _ = world.beat(member)
    assert leases.leases == {0: 1}
    world.ended = {(1, 6), (2, 7)}
    world.loop.look_for_dead()
    world.settle()
    assert world.group.owners, "another process has ended"
    world.ended = {(1, 7)}
    world.loop.look_for_dead()
    world.settle()
    assert world.group.members == {client}, "a client outlives its node"
    assert [owner.member for owner in world.group.owners.values()] == [client]
    world.term += 1
    world.beat(member)
    world.pass_time(500)
    assert world.group.members == {client}, "a new coordinator knows as well"


def test_names_of_members_say_in_which_process_they_live() -> None:
    for filter_name in ("", "0123abcd-7"):
        name = member_name(3, 12, 5, 1, filter_name)
        assert (process_of(name), filter_of(name)) == ((3, 12), filter_name)
    for name in ("3-00aa11bb22cc33dd", "3-1-2", "3-1-2-x", "3-1--2", ""):
        assert process_of(name) is None


def test_who_stood_still_waits_a_whole_lease_again() -> None:
    world = World()
    world.beat()
    world.beat()
    world.now_ms += TTL_MS + MARGIN_MS + PAUSE_MS
    world.loop.tick()
    world.settle()
    assert world.group.owners, "its member may have been heard elsewhere"
    world.pass_time(TTL_MS - 500)
    assert world.group.owners


def test_a_node_that_does_not_lead_refuses_and_forgets() -> None:
    world = World()
    world.beat()
    world.beat()
    world.leader = 2
    with pytest.raises(Unavailable):
        world.beat()
    world.pass_time(TTL_MS + MARGIN_MS + 1_000)
    assert world.group.owners
    world.leader, world.term = 1, 3
    world.pass_time(TTL_MS)
    assert world.group.owners, "a new leader waits a whole lease"


def test_a_group_that_is_gone_is_refused() -> None:
    world = World()
    world.beat()
    world.record.groups.clear()
    with pytest.raises(NotFound):
        world.beat()


def test_messages_survive_packing_and_bad_ones_are_refused() -> None:
    beat = Heartbeat(MEMBER, 5, 2, {3: 1, 4: 7}, {9: 2}, leaves=True)
    assert unpack_heartbeat(pack_heartbeat(NAME, beat)) == (NAME, beat)
    with pytest.raises(PeerError):
        unpack_heartbeat([HEARTBEAT, "/", "orders"])
    with pytest.raises(PeerError):
        unpack_leases(MEMBER, [1, 2])
