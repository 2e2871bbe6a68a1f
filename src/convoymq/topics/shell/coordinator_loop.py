"""Coordinators of the topics' groups, on the node that leads the metadata group.

Each group with members has a `topics.rules.coordinator.Coordinator`; what it proposes goes through
the tree, what it tells partitions through their handles on this node. It is told of heartbeats and
answers as they come, of the tree when that has changed, and of the time at every tick.

A node that leads no more, or that stood still, forgets its coordinators: the next one waits a whole
lease before it takes anything from a member, as it did not hear their heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from convoymq.metadata.commands import ChangeGroup
from convoymq.metadata.machine import Change, ChangeKind, TopicRecord
from convoymq.metadata.topic_codec import pack_command
from convoymq.metadata.topic_settings import WEAK, weak_wait_of
from convoymq.model.errors import BrokerError, NotFound, Unavailable
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.machine.reads import PartitionDescription
from convoymq.topics.rules.answers import Answer, CursorAnswer, HandOverAnswer, LossAnswer
from convoymq.topics.rules.commands import Lease
from convoymq.topics.rules.coordinator import (
    AskDrained,
    Coordinator,
    Propose,
    Tell,
    WeakRules,
)
from convoymq.topics.rules.group import Advance, GroupCommand
from convoymq.topics.rules.heartbeats import Heartbeat, Leases
from convoymq.topics.rules.refusals import Code
from convoymq.topics.shell.group_messages import (
    DRAINED,
    EXPIRED,
    HEARTBEAT,
    WAKE,
    GroupName,
    pack_leases,
    process_of,
    unpack_heartbeat,
)
from convoymq.topics.shell.leader_task import LeaderTask, TopicKey, TopicNode
from convoymq.topics.shell.measures import GroupStalls
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_TOPIC_GROUP

PAUSE_MS = 2_000
"""A gap between ticks above this: the node stood still."""


@dataclass(slots=True, eq=False)
class _Seat:
    """The coordinator of one group, and what it waits for."""

    name: GroupName
    core: Coordinator
    beats: dict[str, tuple[Heartbeat, Leases, int]] = field(default_factory=dict)
    """The latest heartbeat of each member, its answer, and the node that it came from."""
    woken: set[str] = field(default_factory=set)
    """Members that were asked for a heartbeat, until it comes."""
    drained_ms: dict[int, int] = field(default_factory=dict)
    """By version to which the group advances, when all sources were known to be drained; until a
    partition of that version has a lease."""

    def forget_former_members(self) -> None:
        """Drops the times and departures of clients that are not members any more."""
        core = self.core
        known = core.state.members | self.beats.keys()
        for member in core.heard_ms.keys() - known:
            del core.heard_ms[member]
        core.leaving &= known


class GroupCoordinators(LeaderTask):
    """See the module text.

    Args:
        wake: tells a member of this node to send its heartbeat now.
        has_ended: returns whether a node's process of an incarnation is known to have ended.
    """

    def __init__(
        self,
        own: TopicNode,
        *,
        control: ControlPlane,
        wake: Callable[[str], None],
        has_ended: Callable[[int, int], bool],
    ) -> None:
        super().__init__(own)
        self._control = control
        self._wake = wake
        self._has_ended = has_ended
        self._seats: dict[GroupName, _Seat] = {}
        self._ticked_ms = 0
        self.stalls = GroupStalls()
        """Of the groups that this node coordinates."""
        control.handle(KIND_TOPIC_GROUP, self._on_message)

    # --- what it hears ---------------------------------------------------------------------

    async def _on_message(self, node: int, message: object) -> object:
        match message:
            case [str(kind), *_] if kind == HEARTBEAT:
                return self._on_heartbeat(*unpack_heartbeat(message), node)
            case [str(kind), str(vhost), str(topic), str(group), int(pid), int(epoch)] if (
                kind == DRAINED
            ):
                seat = self._seat(GroupName(vhost, topic, group))
                seat.core.on_drained(pid, epoch, self._clock.monotonic_ms())
                self._perform(seat)
            case [str(kind), str(vhost), str(topic), str(group), int(pid), int(epoch)] if (
                kind == EXPIRED
            ):
                self._ask_expired(self._seat(GroupName(vhost, topic, group)), pid, epoch)
            case [str(kind), str(member)] if kind == WAKE:
                self._wake(member)
        return None

    def _on_heartbeat(self, name: GroupName, beat: Heartbeat, node: int) -> list[object]:
        """Returns the answer. Raises Unavailable, NotFound."""
        seat = self._seat(name)
        core = seat.core
        seat.woken.discard(beat.member)
        core.on_heartbeat(beat, self._clock.monotonic_ms())
        self._perform(seat)
        # What was done about it may have changed the answer.
        leases = core.answer_to(beat)
        is_member = beat.member in core.state.members
        if beat.leaves and not is_member:
            seat.beats.pop(beat.member, None)
        else:
            seat.beats[beat.member] = (beat, leases, node)
        return pack_leases(leases, is_member=is_member)

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        super().on_change(change)
        if change.kind is ChangeKind.RESTORED:
            self._due.update(TopicKey(*name[:2]) for name in self._seats)
        if self._due:
            self._run_soon(self._follow)

    def _follow(self) -> None:
        due = self._take_due()
        for seat in [seat for seat in self._seats.values() if seat.name[:2] in due]:
            self._step(seat)

    def tick(self) -> None:
        """Looks at the time; to be called a few times a second."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._ticked_ms > PAUSE_MS:
            # Others may have acted meanwhile, and heartbeats were not heard.
            self._term = -1
        self._ticked_ms = now_ms
        if not self._follow_term():
            return
        for seat in list(self._seats.values()):
            seat.woken.clear()
            seat.forget_former_members()
            self._step(seat)
            if not seat.core.state.members and not seat.beats:
                self._seats.pop(seat.name, None)

    # --- seats -----------------------------------------------------------------------------

    def _begin_term(self) -> None:
        """A new leader looks after all groups that have members."""
        super()._begin_term()
        self._seats.clear()
        for topic in self._records():
            for group, state in topic.groups.items():
                if state.members:
                    self._open(GroupName(topic.vhost, topic.name, group), topic)

    def _end_term(self) -> None:
        super()._end_term()
        self._seats.clear()

    def _seat(self, name: GroupName) -> _Seat:
        """Returns the coordinator of a group. Raises Unavailable, NotFound."""
        if not self._follow_term():
            raise Unavailable("this node does not lead the metadata group")
        seat = self._seats.get(name)
        record = self._topic_of(name)
        if record is None:
            self._seats.pop(name, None)
            raise NotFound(f"no group '{name.group}' of topic '{name.topic}'")
        if seat is None or not self._is_current(seat, record):
            seat = self._open(name, record)
        return seat

    def _topic_of(self, name: GroupName) -> TopicRecord | None:
        record = self._record(TopicKey(name.vhost, name.topic))
        return record if record is not None and name.group in record.groups else None

    def _open(self, name: GroupName, record: TopicRecord) -> _Seat:
        state = record.state
        core = Coordinator(
            record.groups[name.group],
            state.lineage,
            self._clock.monotonic_ms(),
            lost=state.lost,
            weak=self._weak_rules(record),
        )
        seat = self._seats[name] = _Seat(name, core)
        return seat

    @staticmethod
    def _is_current(seat: _Seat, record: TopicRecord) -> bool:
        """Returns whether the coordinator looks at the state that the tree has."""
        core = seat.core
        return (
            core.state is record.groups.get(seat.name.group)
            and core.lineage is record.state.lineage
        )

    def _step(self, seat: _Seat) -> None:
        if not self._follow_term() or self._seats.get(seat.name) is not seat:
            return
        record = self._topic_of(seat.name)
        if record is None:
            del self._seats[seat.name]
            return
        if not self._is_current(seat, record):
            seat = self._open(seat.name, record)
        seat.core.weak = self._weak_rules(record)
        seat.core.dead = self._dead_of(seat.core)
        seat.core.step(self._clock.monotonic_ms())
        self._perform(seat)

    def _dead_of(self, core: Coordinator) -> frozenset[str]:
        """Returns the members whose process has ended: nobody hands out anything in their names."""
        places = ((member, process_of(member)) for member in core.state.members)
        return frozenset(
            member for member, place in places if place is not None and self._has_ended(*place)
        )

    def look_for_dead(self) -> None:
        """The process of a node has ended."""
        for seat in list(self._seats.values()):
            self._step(seat)

    def _weak_rules(self, record: TopicRecord) -> WeakRules | None:
        """Returns the times of a weak topic, by its policies as they are now."""
        if record.mode != WEAK:
            return None
        return WeakRules(weak_wait_of(self._settings_of(record)))

    # --- what it does ----------------------------------------------------------------------

    def _perform(self, seat: _Seat) -> None:
        while actions := seat.core.take_actions():
            for action in actions:
                match action:
                    case Propose(command):
                        self._propose(seat, command)
                    case Tell():
                        self._tell(seat, action)
                    case AskDrained():
                        self._ask_drained(seat, action)
                    case Leases():
                        # The heartbeat is answered by who hears it.
                        pass
        self._wake_members(seat)

    def _wake_members(self, seat: _Seat) -> None:
        """Asks members for a heartbeat that would be answered otherwise than their last one."""
        core = seat.core
        for member, (beat, answered, node) in list(seat.beats.items()):
            if member not in core.state.members and member in core.leaving:
                del seat.beats[member]
            elif member not in seat.woken and core.answer_to(beat) != answered:
                seat.woken.add(member)
                if node == self._node:
                    self._wake(member)
                else:
                    self._control.tell(node, KIND_TOPIC_GROUP, [WAKE, member])

    def _propose(self, seat: _Seat, command: GroupCommand) -> None:
        if isinstance(command, Advance) and seat.core.state.members:
            seat.drained_ms.setdefault(command.to, self._clock.monotonic_ms())
        name = seat.name
        change = ChangeGroup(
            vhost=name.vhost, name=name.topic, group=name.group, command=pack_command(command)
        )
        # Refused or too late: it is proposed again when it is still to be done.
        self._propose_once((seat, command), change, lambda reply, error: None)

    def _tell(self, seat: _Seat, tell: Tell) -> None:
        queue = self._partitions.find(seat.name.vhost, seat.name.topic, tell.pid)
        if queue is not None:
            begin = partial(queue.tell, tell.command)
            self._once((seat, tell), begin, partial(self._told, seat, tell))

    def _told(
        self, seat: _Seat, tell: Tell, outcome: Outcome | None, error: BrokerError | None
    ) -> None:
        if isinstance(outcome, Answer) and isinstance(tell.command, Lease):
            self._leased(seat, tell.pid, outcome)
        if self._seats.get(seat.name) is seat and isinstance(
            outcome, Answer | CursorAnswer | HandOverAnswer | LossAnswer
        ):
            seat.core.on_answer(tell.pid, tell.command, outcome, self._clock.monotonic_ms())
            self._perform(seat)

    def _leased(self, seat: _Seat, pid: int, outcome: Answer) -> None:
        """A partition has a lease: that ends the stall of the change which brought it."""
        partition = seat.core.lineage.partitions.get(pid)
        if outcome.code is not Code.OK or partition is None:
            return
        since_ms = seat.drained_ms.pop(partition.created_version, None)
        if since_ms is not None:
            self.stalls.add(seat.name, self._clock.monotonic_ms() - since_ms)

    def _ask_drained(self, seat: _Seat, ask: AskDrained) -> None:
        pid, group_epoch, whole = ask.pid, ask.group_epoch, ask.whole
        queue = self._partitions.find(seat.name.vhost, seat.name.topic, pid)
        if queue is None:
            return

        def answered(drained: bool | None, error: BrokerError | None) -> None:
            if drained is None or self._seats.get(seat.name) is not seat:
                return
            now_ms = self._clock.monotonic_ms()
            if drained:
                seat.core.on_drained(pid, group_epoch, now_ms, whole=whole)
            else:
                seat.core.on_undrained(pid, group_epoch, now_ms)
            self._perform(seat)

        begin = partial(queue.drained, seat.name.group, group_epoch, whole=whole)
        self._once((seat, pid), begin, answered)

    def _ask_expired(self, seat: _Seat, pid: int, group_epoch: int) -> None:
        """Asks a partition what it has dropped before the group had read it."""
        queue = self._partitions.find(seat.name.vhost, seat.name.topic, pid)
        if queue is None:
            return

        def answered(found: PartitionDescription | None, error: BrokerError | None) -> None:
            own = None if found is None else found.groups.get(seat.name.group)
            if own is None or found is None or not own.expired:
                return
            if own.group_epoch == group_epoch and self._seats.get(seat.name) is seat:
                now_ms = self._clock.monotonic_ms()
                first, end = own.watermark, found.log_start
                seat.core.on_expired(pid, group_epoch, first, end, now_ms)
                self._perform(seat)

        queue.describe(answered)
