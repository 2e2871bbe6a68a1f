"""The simulated metadata group: one log, and who acts on it, the controller and the coordinators.

The log is never lost; who acts on it is. A seat holds one controller or coordinator after the
other: what it had proposed and what was not committed survives in part, and what it has sent is
still on its way when its successor begins. Some predecessors go on for a while with an old copy of
the state: their proposals are refused, their requests are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from convoymq.sim.topics import events
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules import controller as control
from convoymq.topics.rules import coordinator as coordinate
from convoymq.topics.rules.answers import Answer, SealAnswer
from convoymq.topics.rules.changes import Change
from convoymq.topics.rules.commands import Open
from convoymq.topics.rules.commands import Seal as SealCommand
from convoymq.topics.rules.controller import Controller
from convoymq.topics.rules.coordinator import Coordinator, WeakRules
from convoymq.topics.rules.group import (
    Advance,
    GroupCommand,
    GroupState,
    Join,
    Lose,
    Recover,
    Release,
    Seek,
    Skip,
)
from convoymq.topics.rules.heartbeats import Heartbeat, Leases
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.routes import Route
from convoymq.topics.rules.topic import DeclareLost, Delete, Publish, TopicCommand, TopicState

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

RETRY_MS = 30
CREATE_DEADLINE_MS = 120
MERGE_DEADLINE_MS = 120
TTL_MS = 160
MARGIN_MS = 20
STEP_MS = 25
WAIT_MS = 150
"""Time for which a weak topic waits for a source."""
LOST_MS = 75
"""Time for which a member of a weak topic may be silent."""
ZOMBIE_STEPS = 3
LATE = 0.4
"""Share of unheard requests that reach a silent partition much later."""
C = TypeVar("C")


class Log(Generic[C]):
    """Proposals of one seat; they commit a little later, in order."""

    def __init__(self, world: TopicWorld, apply: Callable[[C], None]) -> None:
        self.world = world
        self._apply = apply
        self._pending: list[C] = []
        self._life = 0

    def propose(self, command: C) -> None:
        """Appends a proposal."""
        self._pending.append(command)
        if len(self._pending) == 1:
            self.world.after(self.world.draw(1, 3), self._commit, self._life)

    def _commit(self, life: int) -> None:
        if life != self._life:
            return
        pending, self._pending = self._pending, []
        for command in pending:
            self._apply(command)

    def crash(self) -> None:
        """A prefix of what was proposed survives."""
        self._life += 1
        kept = self.world.draw(0, len(self._pending))
        pending, self._pending = self._pending[:kept], []
        for command in pending:
            self._apply(command)


class ControllerSeat:
    """The controller and its successors."""

    def __init__(self, world: TopicWorld, metadata: SimMetadata) -> None:
        self.world = world
        self.metadata = metadata
        self.term = 0
        self.acting: Controller | None = None
        self.log: Log[TopicCommand] = Log(world, metadata.apply_topic)
        self._life = 0
        self.begin(0)

    def begin(self, life: int) -> None:
        """The next controller begins."""
        if life != self._life:
            return
        self.term += 1
        self.acting = self._controller(self.metadata.topic)

    def _controller(self, state: TopicState) -> Controller:
        return Controller(
            state,
            self.term,
            retry_ms=RETRY_MS,
            create_deadline_ms=CREATE_DEADLINE_MS,
            merge_deadline_ms=MERGE_DEADLINE_MS,
        )

    def crash(self, away_ms: int, *, zombie: bool) -> None:
        """The controller is lost."""
        if self.acting is None:
            return
        world = self.world
        if zombie:
            old = self._controller(copy.deepcopy(self.metadata.topic))
            for number in range(ZOMBIE_STEPS):
                world.after(number * RETRY_MS, self._step, old)
        self._life += 1
        self.acting = None
        self.log.crash()
        world.leases.succeed(set(self.metadata.blocked), world.now)
        world.after(away_ms, self.begin, self._life)

    def step(self) -> None:
        """Has the controller do what is possible."""
        if self.acting is not None:
            self._step(self.acting)

    def _step(self, controller: Controller) -> None:
        now = self.world.now
        expired = [p for p in self.world.partitions if self.world.leases.is_over(p, now)]
        controller.step(now, expired)
        self._perform(controller)

    def _perform(self, controller: Controller) -> None:
        for action in controller.take_actions():
            match action:
                case control.Propose(command):
                    if controller is self.acting:
                        self.log.propose(command)
                case control.Create():
                    self.world.network.send(("k", action.pid), self._create, action)
                case control.AskSeal(pid):
                    self.world.network.send(("k", pid), self._ask_sealed, pid)
                case control.Tell(pid, command):
                    self.world.network.send(("k", pid), self._tell, pid, command)

    def _create(self, create: control.Create) -> None:
        if self.world.create_partition(create.pid, create.lo, create.hi, create.version):
            self.world.network.send((create.pid, "k"), self._created, create)

    def _created(self, create: control.Create) -> None:
        if self.acting is not None:
            self.acting.on_created(create)
            self._perform(self.acting)

    def _tell(self, pid: int, command: SealCommand | Open) -> None:
        partition = self.world.partitions.get(pid)
        if partition is None or partition.cut:
            return
        if isinstance(command, SealCommand) and partition.silent:
            if self.world.scheduler.chance(LATE):
                self.world.after(self.world.draw(50, 300), self._tell, pid, command)
            return
        partition.submit(command, lambda answer: self._send_reply(pid, answer))

    def _ask_sealed(self, pid: int) -> None:
        partition = self.world.partitions.get(pid)
        if partition is not None and not partition.cut:
            partition.ask_sealed(lambda answer: self._send_reply(pid, answer))

    def _send_reply(self, pid: int, answer: Outcome) -> None:
        self.world.network.send((pid, "k"), self._replied, pid, answer)

    def _replied(self, pid: int, answer: Outcome) -> None:
        partition = self.world.partitions.get(pid)
        if self.acting is None or partition is None or partition.cut:
            return
        if isinstance(answer, SealAnswer):
            self.acting.on_sealed(pid, answer)
        elif isinstance(answer, Answer):
            self.acting.on_opened(pid, answer)
        self._perform(self.acting)


class CoordinatorSeat:
    """The coordinator of a group and its successors."""

    def __init__(self, world: TopicWorld, metadata: SimMetadata, state: GroupState) -> None:
        self.world = world
        self.metadata = metadata
        self.state = state
        self.acting: Coordinator | None = None
        self.dead: frozenset[str] = frozenset()
        """Members whose end has been seen."""
        self.log: Log[GroupCommand] = Log(
            world, lambda command: metadata.apply_group(self, command)
        )
        self._life = 0
        self.begin(0)

    def begin(self, life: int) -> None:
        """The next coordinator begins."""
        if life == self._life:
            self.acting = self._coordinator(self.state, self.metadata.topic)
            self.acting.dead = self.dead

    def on_dead(self, member: str) -> None:
        """The end of a member's process is seen."""
        self.dead |= {member}
        if self.acting is not None:
            self.acting.dead = self.dead
            self._step(self.acting)

    def _coordinator(self, state: GroupState, topic: TopicState) -> Coordinator:
        return Coordinator(
            state,
            topic.lineage,
            self.world.now,
            lost=topic.lost,
            ttl_ms=TTL_MS,
            margin_ms=MARGIN_MS,
            retry_ms=RETRY_MS,
            weak=WeakRules(WAIT_MS, LOST_MS) if self.world.plan.weak else None,
        )

    def crash(self, away_ms: int, *, zombie: bool) -> None:
        """The coordinator is lost."""
        if self.acting is None:
            return
        if zombie:
            topic = copy.deepcopy(self.metadata.topic)
            old = self._coordinator(copy.deepcopy(self.state), topic)
            old.known = copy.deepcopy(self.acting.known)
            for number in range(ZOMBIE_STEPS):
                self.world.after(number * RETRY_MS, self._step, old)
        self._life += 1
        self.acting = None
        self.log.crash()
        self.world.after(away_ms, self.begin, self._life)

    def step(self) -> None:
        """Has the coordinator do what is possible."""
        if self.acting is not None:
            self._step(self.acting)

    def _step(self, coordinator: Coordinator) -> None:
        coordinator.step(self.world.now)
        self._perform(coordinator)

    def _perform(self, coordinator: Coordinator) -> None:
        world, name = self.world, self.state.name
        for action in coordinator.take_actions():
            match action:
                case coordinate.Propose(command):
                    if coordinator is self.acting:
                        self.log.propose(command)
                case coordinate.Tell(pid, command):
                    world.network.send((name, pid), self._tell, pid, command)
                case coordinate.AskDrained(pid, group_epoch, whole):
                    partition = world.partitions.get(pid)
                    if partition is not None:
                        world.network.send(
                            (name, pid), partition.ask_drained, name, group_epoch, whole
                        )
                case Leases():
                    world.network.send((name, action.member), self._answer, action)

    def _answer(self, leases: Leases) -> None:
        consumer = self.world.consumers.get(leases.member)
        if consumer is not None:
            consumer.on_leases(leases)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A member's heartbeat arrived."""
        if self.acting is not None:
            self.acting.on_heartbeat(heartbeat, self.world.now)
            self._perform(self.acting)

    def on_drained(self, pid: int, group_epoch: int) -> None:
        """A partition's report arrived."""
        if self.acting is not None:
            self.acting.on_drained(pid, group_epoch, self.world.now)
            self._perform(self.acting)

    def on_asked(self, pid: int, group_epoch: int, drained: bool, whole: bool) -> None:
        """A partition's answer arrived."""
        if self.acting is not None:
            now = self.world.now
            if drained:
                self.acting.on_drained(pid, group_epoch, now, whole=whole)
            else:
                self.acting.on_undrained(pid, group_epoch, now)
            self._perform(self.acting)

    def on_expired(self, pid: int, group_epoch: int, first: int, end: int) -> None:
        """A reader was told that messages are gone."""
        if self.acting is not None:
            self.acting.on_expired(pid, group_epoch, first, end, self.world.now)
            self._perform(self.acting)

    def _tell(self, pid: int, command: coordinate.Told) -> None:
        partition = self.world.partitions.get(pid)
        if partition is not None:
            partition.hand_over_or_ask(
                command,
                lambda answer: self.world.network.send(
                    (pid, self.state.name), self._replied, pid, command, answer
                ),
            )

    def _replied(self, pid: int, command: coordinate.Told, answer: Answer) -> None:
        if self.acting is not None:
            self.acting.on_answer(pid, command, answer, self.world.now)
            self._perform(self.acting)


class SimMetadata:
    """Topic and groups, and the seats."""

    def __init__(self, world: TopicWorld, route: Route) -> None:
        self.world = world
        self.topic = TopicState.first(route)
        self.blocked: set[int] = set()
        """Partitions that the log says were sealed from outside, and whose end it does not know, or
        that were declared lost."""
        self.controller = ControllerSeat(world, self)
        self.groups: dict[str, CoordinatorSeat] = {}
        self._deleted: set[int] = set()

    def add_group(self, name: str, mode: Mode) -> None:
        """A group that reads everything from the beginning."""
        version = self.topic.route.version
        now = self.world.now
        state = GroupState.first(name, version, {}, mode, now)
        self.groups[name] = CoordinatorSeat(self.world, self, state)
        self.world.trace.append(events.Seek(now, name, 1, version, mode.value))

    def tick(self) -> None:
        """Everybody looks at what has become possible."""
        self.step_all()
        self.world.after(STEP_MS, self.tick)

    def step_all(self) -> None:
        """The controller and all coordinators look at the state."""
        self.controller.step()
        for seat in self.groups.values():
            seat.step()

    def report_drained(self, pid: int, group: str, group_epoch: int) -> None:
        """A partition reports to a coordinator."""
        seat = self.groups[group]
        self.world.network.send((pid, group), seat.on_drained, pid, group_epoch)

    def report_asked(
        self, pid: int, group: str, group_epoch: int, drained: bool, whole: bool
    ) -> None:
        """A partition answers a coordinator."""
        seat = self.groups[group]
        self.world.network.send((pid, group), seat.on_asked, pid, group_epoch, drained, whole)

    def apply_topic(self, command: TopicCommand) -> None:
        """A command of the topic is committed."""
        running = self.topic.running
        states = [seat.state for seat in self.groups.values()]
        lineage = self.topic.lineage
        held = [state.held_version(lineage) for state in states if not state.expired]
        expired = [state.cv for state in states if state.expired]
        refused = self.topic.apply(command, held, expired)
        if refused is None:
            self._trace_topic(command, running)
            self._note_blocked()
            self.step_all()

    def _note_blocked(self) -> None:
        # What comes back after it was declared lost is deleted.
        self.blocked = {*self.topic.given_up, *self.topic.unknown_ends(), *self.topic.lost}
        change = self.topic.running
        if change is not None:
            self.blocked |= {p for p, seal in change.seals.items() if seal.close_offset is None}
        for pid in self.topic.given_up:
            self.world.leases.give_up(pid)
        self.world.leases.take_back(self.blocked)

    def _trace_topic(self, command: TopicCommand, running: Change | None) -> None:
        now, trace, topic = self.world.now, self.world.trace.append, self.topic
        if isinstance(command, Publish):
            assert running is not None
            external = [p for p, seal in running.seals.items() if seal.close_offset is None]
            trace(
                events.Published(
                    now,
                    topic.route.version,
                    tuple((span.lo, span.hi, span.pid) for span in topic.route.spans),
                    running.kind.value,
                    running.sources,
                    tuple(span.pid for span in running.targets),
                    tuple(external),
                )
            )
        elif isinstance(command, DeclareLost):
            for name, seat in self.groups.items():
                gen = seat.state.group_epoch
                seat.state.forget_skipped(command.pid)
                trace(events.Loss(now, name, gen, command.pid, 0, -1, "declared"))
        elif isinstance(command, Delete):
            for pid, partition in topic.lineage.partitions.items():
                if partition.is_deleted and pid not in self._deleted:
                    self._deleted.add(pid)
                    trace(events.Deleted(now, pid))
                    self.world.partitions.pop(pid, None)

    def apply_group(self, seat: CoordinatorSeat, command: GroupCommand) -> None:
        """A command of a group is committed."""
        state, now, trace = seat.state, self.world.now, self.world.trace.append
        owner = state.owners.get(command.pid) if isinstance(command, Release) else None
        losses = list(state.losses)
        if isinstance(command, Skip) and command.pid in self.topic.lost:
            return
        if not state.apply(command, self.topic.route.version, self.topic.kept, now):
            return
        match command:
            case Advance(group_epoch, expect, to):
                trace(events.Advance(now, state.name, group_epoch, expect, to))
            case Join():
                for loss in state.losses:
                    if loss in losses:
                        continue
                    end = self.topic.lineage.partition(loss.pid).close_offset or 1
                    trace(events.Loss(now, state.name, loss.group_epoch, loss.pid, 0, end, "gone"))
            case Release(pid, epoch, expired) if owner is not None:
                trace(events.Release(now, state.name, pid, owner.member, epoch, expired))
            case Lose(pid, gen, first, end):
                trace(events.Loss(now, state.name, gen, pid, first, end, "expired"))
            case Skip(pid, gen):
                trace(events.Skipped(now, state.name, gen, pid))
            case Recover(pid, gen):
                trace(events.Recovered(now, state.name, gen, pid))
            case Seek(_, version):
                gen, mode = state.group_epoch, state.mode.value
                trace(events.Seek(now, state.name, gen, version, mode))
            case _:
                pass
        state.check_invariants()
        seat.step()
