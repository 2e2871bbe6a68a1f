# cython: annotation_typing=False
"""Runs the members of rings that are on one node, each with a core of `replication.ring`.

The owner of a ring (a host of mirrored queues) opens its member and tells the shell of every newer
record of the queue. The shell carries frames to the right neighbour, one for each ring and round,
and proposes the views that keep a ring going: newcomers that have caught up, failed members whose
broadcasts are complete, and members that have failed. Whatever decides about copies (joining,
synchronised, promoted) is for the owner to propose.

A member has failed when its node is unlinked or silent for `FAIL_AFTER_MS`. The nearest full member
to its right whose node is there proposes that; others do so later, in case that one cannot. A node
that starts again proposes that its former member has failed, unless that was the last full one. A
node without a majority of the cluster proposes nothing.

Proposals follow from what is: one that is lost or came too late is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from convoymq.kernels.link_frames import frame_header
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import BrokerError, PeerError, check
from convoymq.replication.ring.core import MEMBER, RingCore
from convoymq.replication.ring.types import (
    AskCatchUp,
    CaughtUp,
    Complete,
    Deliver,
    Effect,
    Erase,
    Expelled,
    Frame,
)
from convoymq.replication.ring.views import RingView
from convoymq.shells.capacity import Waiting
from convoymq.shells.ring.frames import QUESTION_BODY, decode, encode
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_RING

FAIL_AFTER_MS = 1_000
OTHERS_AFTER_MS = 3_000
RETRY_MS = 250
WINDOW_BYTES = 4 << 20
"""Bytes of a member's broadcasts that may be incomplete before it waits. One more may be under way
then, of any size."""

Answer = Callable[[object, BrokerError | None], None]
"""Called once with True when the view was recorded, with False when another one came first, or with
an error."""


class RingRecord(Protocol):
    """Record of a queue in the replicated tree."""

    @property
    def vhost(self) -> str:
        """Returns the queue's virtual host."""

    @property
    def name(self) -> str:
        """Returns the queue's name."""

    @property
    def group(self) -> int:
        """Returns the number that no other queue ever has."""

    @property
    def view(self) -> RingView | None:
        """Returns the queue's ring; None: it has none."""


class RingSink(Protocol):
    """Receiver of what a ring does: a queue's replica."""

    def on_broadcast(self, sender: int, number: int, payload: bytes) -> None:
        """A broadcast of another member, in that sender's order, without gaps."""

    def on_complete(self, number: int) -> None:
        """Every live member of the view has received this member's broadcasts up to `number`, or
        there is room for more."""

    def on_view(self, view: RingView) -> None:
        """A newer view is in force here. Not called for one without this member."""

    def on_expelled(self) -> None:
        """The newest view does not have this member: the copy is void. Nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingParts:
    """Parts that a `RingShell` is made with."""

    node: int
    incarnation: int
    clock: Clock
    control: ControlPlane
    propose: Callable[[RingRecord, RingView, Answer], object]
    """Has the next view of a queue recorded in the tree (`ChangeView`)."""
    has_majority: Callable[[], bool]
    """Returns whether more than half of the cluster's nodes can be reached."""
    wanted: Callable[[], None]
    """To be called when there is work for `end_of_round`."""
    await_room: Callable[[int, Waiting], None]
    """`ReplicaHost.await_room`."""
    keeps: Callable[[RingRecord], bool] = lambda _record: False
    """Returns whether the member of an earlier run of this node has a copy to go on with."""
    window_bytes: int = WINDOW_BYTES


class RingMember:
    """A ring's member on this node. Implements `Waiting`."""

    def __init__(
        self,
        shell: RingShell,
        record: RingRecord,
        core: RingCore,
        sink: RingSink,
        window_bytes: int,
    ) -> None:
        self.record = record
        self.core = core
        self.sink = sink
        self.erasable: set[int] = set()
        """Failed members whose broadcasts are complete."""
        self.is_stepping = False
        self._shell = shell
        self._window_bytes = window_bytes

    @property
    def member(self) -> int:
        """Returns the member's number."""
        return self.core.member

    @property
    def view(self) -> RingView:
        """Returns the view that is in force here."""
        return self.core.view

    def may_broadcast(self) -> bool:
        """Returns whether the member is a full one and has room. When that changes, `on_complete`
        or `on_view` of the sink is called."""
        return self.core.may_broadcast() and self.core.pending_bytes() < self._window_bytes

    def broadcast(self, payload: bytes) -> int:
        """Sends to all members at the end of the round; returns the broadcast's number."""
        number = self.core.broadcast(payload)
        self._shell.mark_dirty(self)
        return number

    def propose(self, view: RingView, done: Answer | None = None) -> None:
        """Proposes a change of the view that is in force here."""
        self._shell.propose(self.record, view, done)

    def on_room(self, node: int) -> None:
        """See `Waiting`."""
        self._shell.mark_dirty(self)

    def on_lost(self, node: int) -> None:
        """See `Waiting`: the frame is sent when the node is linked, to the neighbour of then."""


class RingShell:
    """See the module text. One per node; single threaded."""

    def __init__(self, parts: RingParts) -> None:
        self._parts = parts
        self._transport = parts.control.transport
        self._members: dict[int, RingMember] = {}
        """By group."""
        self._former: dict[int, RingRecord] = {}
        """Queues in whose view an earlier run of this node is live, by group."""
        self._dirty: dict[RingMember, None] = {}
        self._away_ms: dict[int, int] = {}
        """Node -> since when it is unlinked or silent."""
        self._tried: dict[int, int] = {}
        """Group -> version that was proposed last."""
        self._timer: Timer | None = None
        parts.control.handle_raw(KIND_RING, self._on_frame)

    def open(self, record: RingRecord, member: int, sink: RingSink) -> RingMember:
        """Opens a member of this run of the node, which the record's view has as live."""
        check(record.view is not None and record.group not in self._members, "a ring, opened once")
        assert record.view is not None
        core = RingCore(member, record.view)
        opened = RingMember(self, record, core, sink, self._parts.window_bytes)
        self._members[record.group] = opened
        self._former.pop(record.group, None)
        self.mark_dirty(opened)
        self._tend(record.group)
        return opened

    def close(self, group: int) -> None:
        """Forgets a ring: the queue is gone, or its copy is void."""
        self._members.pop(group, None)
        self._former.pop(group, None)
        self._tried.pop(group, None)

    def stop(self) -> None:
        """The node stops."""
        self._members.clear()
        self._former.clear()
        if self._timer is not None:
            self._timer.cancel()

    def take_record(self, record: RingRecord) -> None:
        """Follows the tree's record of a queue, which may have a ring that is not open here."""
        view = record.view
        if view is None:
            return
        member = self._members.get(record.group)
        if member is not None:
            if view.version > member.view.version:
                # What was received in the view before is delivered in it.
                self._step(member)
                member.record = record
                member.core.on_view(view)
                if member.view.is_live(member.member):
                    member.sink.on_view(view)
                self._step(member)
                self._tend(record.group)
            return
        own = view.live_at(self._parts.node)
        if own is not None and own.incarnation < self._parts.incarnation:
            self._former[record.group] = record
        else:
            self._former.pop(record.group, None)
        self._tend(record.group)

    def propose(self, record: RingRecord, view: RingView, done: Answer | None = None) -> None:
        """Proposes the next view of a queue's ring; also of one that is not open here, or has none
        yet."""
        self._parts.propose(record, view, done if done is not None else _ignore)

    def mark_dirty(self, member: RingMember) -> None:
        """Has a member looked at at the end of the round."""
        self._dirty[member] = None
        self._parts.wanted()

    def end_of_round(self) -> None:
        """Sends what is due."""
        dirty, self._dirty = self._dirty, {}
        for member in dirty:
            self._step(member)

    # --- other nodes ---------------------------------------------------------------------------

    def on_node_up(self, node: int) -> None:
        """A node is linked, or speaks again."""
        self._away_ms.pop(node, None)
        for member in list(self._members.values()):
            for each in member.view.members:
                if each.node == node and member.view.is_live(each.number):
                    member.core.on_reachable(each.number)
                    self.mark_dirty(member)

    def on_node_down(self, node: int) -> None:
        """A node is unlinked."""
        self._away_ms.setdefault(node, self._parts.clock.monotonic_ms())
        self._start_timer()

    def on_suspect(self, node: int) -> None:
        """A linked node is silent."""
        self.on_node_down(node)

    def _on_frame(self, node: int, data: bytes) -> None:
        _, _, _, _, group, _, ends, version = frame_header(data)
        frame = decode(data, version)
        member = self._members.get(group)
        sender, receiver = ends >> 32, ends & 0xFFFFFFFF
        if member is None or receiver != member.member:
            # The sender asks, or introduces itself, when the ring is opened here.
            return
        view = member.view
        if sender in view.ring and view.node_of(sender) != node:
            raise PeerError(f"node {node} sends as member {sender} of a ring")
        if frame is None:
            member.core.on_ask(sender, version)
        else:
            member.core.on_frame(sender, frame)
        # Frames of several neighbours and broadcasts of this node go on together.
        self.mark_dirty(member)

    # --- effects -------------------------------------------------------------------------------

    def _step(self, member: RingMember) -> None:
        """Carries out the effects of a core and those that they cause, and sends what is due."""
        if member.is_stepping:
            return
        group, effects = member.record.group, member.core.effects
        member.is_stepping = True
        try:
            while self._members.get(group) is member and (effects or self._send(member)):
                if effects:
                    self._carry_out(member, effects.popleft())
        finally:
            member.is_stepping = False
        if member.view.failed or member.view.newcomers or self._away_ms:
            self._tend(group)

    def _carry_out(self, member: RingMember, effect: Effect) -> None:
        match effect:
            case Deliver(sender, number, payload):
                member.sink.on_broadcast(sender, number, payload)
            case Complete(number):
                member.sink.on_complete(number)
            case AskCatchUp(left, version):
                self._send_to(member, left, [QUESTION_BODY], version)
            case Erase(failed):
                member.erasable.add(failed)
            case Expelled():
                self.close(member.record.group)
                member.sink.on_expelled()
            case CaughtUp():
                # `_wish` proposes it until it is so.
                pass

    def _send(self, member: RingMember) -> bool:
        """Sends the next frame to the right neighbour; returns False when there is none now."""
        if not member.view.is_live(member.member):
            return False
        node = member.view.node_of(member.core.right())
        if node == self._parts.node or not self._transport.is_connected(node):
            # The core introduces itself when the link stands again.
            return False
        if node in self._transport.full:
            self._parts.await_room(node, member)
            return False
        taken = member.core.take_frame()
        if taken is None:
            return False
        self._send_frame(member, *taken)
        return True

    def _send_frame(self, member: RingMember, right: int, frame: Frame) -> None:
        self._send_to(member, right, encode(frame), frame.version)

    def _send_to(self, member: RingMember, neighbour: int, body: list[bytes], version: int) -> None:
        if neighbour not in member.view.ring:
            # A view came in between.
            return
        self._parts.control.send_raw(
            member.view.node_of(neighbour),
            KIND_RING,
            body,
            a=member.record.group,
            c=member.member << 32 | neighbour,
            d=version,
        )

    # --- views ---------------------------------------------------------------------------------

    def _tend(self, group: int) -> None:
        """Proposes what a ring needs."""
        wish = self._wish(group)
        if wish is None:
            return
        self._start_timer()
        record, view, due_ms = wish
        is_due = self._parts.clock.monotonic_ms() >= due_ms
        if is_due and self._tried.get(group, 0) < view.version and self._parts.has_majority():
            self._tried[group] = view.version
            self.propose(record, view, partial(self._on_answer, group, view.version))

    def _on_answer(
        self, group: int, version: int, recorded: object, _error: BrokerError | None
    ) -> None:
        if not recorded and self._tried.get(group) == version:
            # Made again by the timer, if it is needed still.
            del self._tried[group]

    def _wish(self, group: int) -> tuple[RingRecord, RingView, int] | None:
        """Returns the next view that a ring needs, and the time to propose it."""
        former = self._former.get(group)
        if former is not None and former.view is not None:
            own = former.view.live_at(self._parts.node)
            if own is None or former.view.full() == [own.number] or self._parts.keeps(former):
                # Its owner decides what the last copy, or the last whole one, is good for.
                return None
            return former, former.view.with_failed(own.number), 0
        member = self._members.get(group)
        if member is None:
            return None
        view = member.view
        if member.member in view.newcomers:
            is_caught_up = member.core.state == MEMBER
            return (member.record, view.caught_up(member.member), 0) if is_caught_up else None
        for failed in view.failed:
            if failed in member.erasable:
                return member.record, view.erased(failed), 0
        return self._failure(member)

    def _failure(self, member: RingMember) -> tuple[RingRecord, RingView, int] | None:
        """Returns the view without a member whose node is away."""
        view = member.view
        away = [each for each in view.live if self._is_away(view.node_of(each))]
        if not away:
            return None
        found: list[tuple[int, int]] = []
        for failed in away:
            order = view.ring[view.ring.index(failed) :] + view.ring
            first = next(n for n in order if view.is_full(n) and n not in away)
            after_ms = FAIL_AFTER_MS if first == member.member else OTHERS_AFTER_MS
            found.append((self._away_ms[view.node_of(failed)] + after_ms, failed))
        due_ms, failed = min(found)
        return member.record, view.with_failed(failed), due_ms

    def _is_away(self, node: int) -> bool:
        if node == self._parts.node or self._transport.is_connected(node):
            return False
        self._away_ms.setdefault(node, self._parts.clock.monotonic_ms())
        return True

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._parts.clock.call_later(RETRY_MS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for group in [*self._members, *self._former]:
            self._tend(group)


def _ignore(_recorded: object, _error: BrokerError | None) -> None:
    """Takes the answer of a proposal that is made again as long as it is needed."""
