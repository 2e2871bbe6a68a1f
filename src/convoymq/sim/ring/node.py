"""A simulated node with members of rings: the shell of production, and an owner that decides who
is in."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from convoymq.metadata.commands import ChangeView
from convoymq.metadata.records import QueueRecord
from convoymq.model.errors import BrokerError
from convoymq.replication.ring.views import RingView, founded
from convoymq.shells.ring.shell import (
    Answer,
    RingMember,
    RingParts,
    RingRecord,
    RingShell,
)
from convoymq.sim.hosted.node import HostedNode
from convoymq.sim.ring.referee import RingReferee

if TYPE_CHECKING:
    from convoymq.sim.ring.world import RingWorld

CARE_US_MAX = 400_000
BURST_MAX = 4


class Copy:
    """A copy of a queue: it counts broadcasts. Implements `RingSink`."""

    def __init__(self, node: RingNode, group: int, member: int) -> None:
        self._node = node
        self._group = group
        self._referee: RingReferee = node.world.referees[group]
        self._member = member

    def on_broadcast(self, sender: int, number: int, payload: bytes) -> None:
        """See `RingSink`."""
        self._referee.on_broadcast(self._member, sender, number, payload)

    def on_complete(self, number: int) -> None:
        """See `RingSink`."""
        self._referee.on_complete(self._member, number)

    def on_view(self, view: RingView) -> None:
        """See `RingSink`."""
        self._node.world.trace.add(self._node.name, f"member {self._member} view {view.version}")

    def on_expelled(self) -> None:
        """See `RingSink`."""
        self._node.world.trace.add(self._node.name, f"member {self._member} is expelled")
        self._referee.on_expelled(self._member)
        self._node.members.pop(self._group, None)


class RingNode(HostedNode):
    """One node of a `RingWorld`."""

    world: RingWorld

    def _make_hosted(self) -> RingShell:
        world, scheduler = self.world, self.world.scheduler
        self._asking: set[int] = set()
        self.members: dict[int, RingMember] = {}
        self.shell = RingShell(
            RingParts(
                node=self.number,
                incarnation=self.incarnation,
                clock=self.clock,
                control=self.control,
                propose=self._propose,
                has_majority=partial(world.has_majority, self.number),
                wanted=self.wake,
                await_room=self.capacity.wait,
                window_bytes=world.window_bytes,
            )
        )
        scheduler.after(scheduler.between(0, CARE_US_MAX), self.process, self._care)
        scheduler.after(scheduler.between(0, 10_000), self.process, self._broadcast)
        return self.shell

    def _propose(self, record: RingRecord, view: RingView, answer: Answer) -> None:
        command = ChangeView(vhost=record.vhost, name=record.name, group=record.group, view=view)
        self.world.propose(self, command, answer)

    # The owner.

    def take_record(self, record: QueueRecord) -> None:
        """See `HostedNode`."""
        self.records[record.group] = record
        self.shell.take_record(record)
        view = record.view
        own = view.live_at(self.number) if view is not None else None
        if own is None or own.incarnation != self.incarnation or record.group in self.members:
            return
        opened = self.shell.open(record, own.number, Copy(self, record.group, own.number))
        self.members[record.group] = opened
        process = self.process
        self.world.referees[record.group].watch(opened, lambda: process.alive)

    def leave(self, group: int) -> None:
        """Has this node's member leave a ring that has another full one."""
        member = self.members.get(group)
        if member is not None and len(member.view.full()) > 1:
            member.propose(member.view.with_failed(member.member))

    def _care(self) -> None:
        scheduler = self.world.scheduler
        scheduler.after(scheduler.between(1_000, CARE_US_MAX), self.process, self._care)
        for record in self.records.values():
            view = self._change(record)
            if view is not None and record.group not in self._asking:
                self._asking.add(record.group)
                self.shell.propose(record, view, partial(self._answered, record.group))

    def _change(self, record: QueueRecord) -> RingView | None:
        """Returns the view that this node wants as an owner of copies."""
        view = record.view
        if view is None:
            return founded(self.number, self.incarnation) if record.home == self.number else None
        own = view.live_at(self.number)
        if own is None:
            if len(view.live) >= self.world.size:
                return None
            left = self.world.scheduler.rng.choice(view.full())
            return view.joined(self.number, self.incarnation, left)
        if own.incarnation != self.incarnation and view.full() == [own.number]:
            return view.refounded(self.number, self.incarnation)
        return None

    def _answered(self, group: int, _recorded: object, _error: BrokerError | None) -> None:
        self._asking.discard(group)

    # The load.

    def _broadcast(self) -> None:
        world = self.world
        draw = world.scheduler
        draw.after(draw.between(1_000, world.turn_us_max), self.process, self._broadcast)
        for group, member in self.members.items():
            for _ in range(draw.between(1, BURST_MAX)):
                if not world.quiet and member.may_broadcast():
                    payload = world.make_payload()
                    number = member.broadcast(payload)
                    world.referees[group].on_sent(member.member, number, payload)

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        super().on_frame(peer, data)
        for group, member in self.members.items():
            self.world.referees[group].look(member.core)
