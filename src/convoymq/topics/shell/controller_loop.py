"""Drives the changes of topics on the node that leads the metadata group.

One `topics.rules.controller.Controller` for each topic with something to do: its actions become
commands of the tree and of partitions, and what partitions answer goes back to it.

A source that is given up (`TopicState.given_up`) is sealed from outside when the leases of nodes
that may not know of it are over, counted from when this loop saw it first (`topics.shell.fence`).

Nothing waits between the seal of the last source and the next version: the record of that seal, the
phase and the version are proposed in one go, in this order. Should one be refused, so are the ones
behind it, and the controller goes on from what the tree says then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import structlog

from convoymq.metadata.commands import ChangeTopic, CreatePartition, NewPartition
from convoymq.metadata.machine import Change, ChangeKind
from convoymq.metadata.topic_codec import pack_command
from convoymq.metadata.topics import partition_arguments
from convoymq.model.errors import BrokerError
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.machine.reads import PartitionDescription
from convoymq.topics.rules.answers import Answer, SealAnswer
from convoymq.topics.rules.changes import Phase, Seal
from convoymq.topics.rules.commands import Command
from convoymq.topics.rules.commands import Seal as SealCommand
from convoymq.topics.rules.controller import AskSeal, Controller, Create, Propose, Tell
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.routes import Span
from convoymq.topics.rules.server_lease import ServerLeases
from convoymq.topics.rules.topic import (
    LearnClose,
    Publish,
    RecordSeal,
    ToPhase,
    TopicCommand,
    TopicState,
)
from convoymq.topics.shell.leader_task import LeaderTask, TopicKey, TopicNode
from convoymq.topics.shell.measures import ChangePhases

log = structlog.get_logger()

OPEN_TIMEOUT_S = 5.0
"""Longest wait for a new partition to serve; the controller replaces one that does not."""
QUESTION = "question"
"""Change of a seal that changes nothing: asked of partitions that are sealed."""


class ControllerLoop(LeaderTask):
    """See the module text.

    Args:
        place: members of a new partition, the leader first; its argument is the node that shall
            lead, 0 = any.
    """

    BEGINS_ANEW = frozenset((ChangeKind.RESTORED,))
    """All states are other objects then."""

    def __init__(self, own: TopicNode, place: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__(own)
        self._place = place
        self._epoch_ms = 0
        """Wall clock when the monotonic one was 0: times of a term do not jump."""
        self._controllers: dict[TopicKey, Controller] = {}
        self._leases: dict[TopicKey, ServerLeases] = {}
        self.external_seals = 0
        """Partitions that this loop had sealed from outside."""
        self._recording: dict[TopicKey, set[int]] = {}
        """Partitions whose seals are proposed."""
        self.phases = ChangePhases()
        """Durations of the changes that this node drives."""

    # --- when ------------------------------------------------------------------------------

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        super().on_change(change)
        if change.kind in (ChangeKind.RESTORED, ChangeKind.TOPIC):
            self._run_soon(self.tick)
        if change.kind is ChangeKind.TOPIC and self.leads:
            key = TopicKey(change.vhost, change.topic)
            record = self._record(key)
            if record is not None:
                self.phases.look(key, record.state.change, self._clock.monotonic_ms())

    def tick(self) -> None:
        """Does what is due again; to be called a few times a second."""
        if self._follow_term():
            for key in {*self._take_due(), *self._controllers}:
                self._work_on(key)

    def _begin_term(self) -> None:
        super()._begin_term()
        self._epoch_ms = self._clock.now_ms() - self._clock.monotonic_ms()
        self._controllers.clear()
        self._recording.clear()
        self._leases.clear()
        self._due.update(self._topics())

    def _end_term(self) -> None:
        super()._end_term()
        self._controllers.clear()
        self._recording.clear()
        self.phases.forget()

    def _now_ms(self) -> int:
        return self._epoch_ms + self._clock.monotonic_ms()

    # --- one topic -------------------------------------------------------------------------

    def _work_on(self, key: TopicKey) -> None:
        record = self._record(key)
        if record is None or not has_work(record.state):
            self._controllers.pop(key, None)
            return
        controller = self._controllers.get(key)
        if controller is None or controller.state is not record.state:
            controller = self._controllers[key] = Controller(record.state, self._term)
        controller.step(self._now_ms(), self._expired(key, record.state))
        self._perform(key, controller)

    def _expired(self, key: TopicKey, state: TopicState) -> list[int]:
        """Returns the sources that are given up, and surely accept nothing any more."""
        now_ms = self._clock.monotonic_ms()
        if not state.given_up:
            self._leases.pop(key, None)
            return []
        leases = self._leases.setdefault(key, ServerLeases())
        for pid in state.given_up:
            if not leases.is_given_up(pid):
                # Whoever knows nothing of it may have read the tree just before.
                leases.answer(pid, now_ms)
                leases.give_up(pid)
        return [pid for pid in state.given_up if leases.is_over(pid, now_ms)]

    def _is_current(self, key: TopicKey, controller: Controller) -> bool:
        """Returns whether an answer is for who acts now. Answers to a former term, or about a topic
        that was made anew, are not heard: the same is asked again."""
        return self._controllers.get(key) is controller

    def _perform(self, key: TopicKey, controller: Controller) -> None:
        for action in controller.take_actions():
            match action:
                case Propose(command):
                    self._propose(key, controller, command)
                case Create():
                    self._create(key, controller, action)
                case AskSeal(pid):
                    self._ask_seal(key, controller, pid)
                case Tell(pid, command):
                    self._tell(key, controller, pid, command)

    # --- commands of the tree --------------------------------------------------------------

    def _propose(self, key: TopicKey, controller: Controller, command: TopicCommand) -> None:
        self._submit(key, command)
        if isinstance(command, RecordSeal) and self._is_last_seal(key, controller, command):
            change = controller.state.running
            assert change is not None
            self._submit(key, ToPhase(change.change_id, change.attempt, Phase.SEALED))
            self._submit(key, Publish(change.change_id, self._now_ms()))

    def _is_last_seal(self, key: TopicKey, controller: Controller, command: RecordSeal) -> bool:
        """Returns whether the change can be published when this seal, which was proposed, is
        recorded. Seals that were proposed before it are recorded before it."""
        change = controller.state.running
        if change is None or change.change_id != command.change_id:
            return False
        missing = set(change.sources) - change.seals.keys() - self._recording.get(key, set())
        return change.phase is Phase.SEALING and change.is_ready and not missing

    def _submit(self, key: TopicKey, command: TopicCommand) -> None:
        # A repeat has another time.
        same = dataclasses.replace(command, time_ms=0) if isinstance(command, Publish) else command
        sealed = command.pid if isinstance(command, RecordSeal) else None
        if sealed is not None:
            self._recording.setdefault(key, set()).add(sealed)

        def done(reply: object, error: BrokerError | None) -> None:
            if sealed is not None:
                self._recorded(key, sealed)
            if error is None and not reply:
                self._note(key, command)
            else:
                log.debug(
                    "topics.step_refused",
                    vhost=key.vhost, topic=key.name, step=type(command).__name__,
                    reason=reply if error is None else error.text,
                )  # fmt: skip

        change = ChangeTopic(vhost=key.vhost, name=key.name, command=pack_command(command))
        self._propose_once((key, pack_command(same)), change, done)

    def _recorded(self, key: TopicKey, pid: int) -> None:
        """A proposed seal has an answer."""
        pids = self._recording.get(key, set())
        pids.discard(pid)
        if not pids:
            self._recording.pop(key, None)

    def _note(self, key: TopicKey, command: TopicCommand) -> None:
        """A command was applied."""
        match command:
            case RecordSeal(_, pid, Seal(None)):
                self.external_seals += 1
                log.warning(
                    "topics.partition_sealed_from_outside",
                    vhost=key.vhost, topic=key.name, pid=pid,
                )  # fmt: skip
            case LearnClose(pid, close_offset):
                log.info(
                    "topics.partition_end_learnt",
                    vhost=key.vhost, topic=key.name, pid=pid, close_offset=close_offset,
                )  # fmt: skip
            case _:
                pass

    # --- targets ---------------------------------------------------------------------------

    def _create(self, key: TopicKey, controller: Controller, create: Create) -> None:
        if self._partitions.exists(*key, create.pid):
            self._await_open(key, controller, create)
            return
        record = self._record(key)
        if record is None:
            return
        span = Span(create.lo, create.hi, create.pid)
        arguments = partition_arguments(key.name, span, create.version, record.settings)
        members = self._place(record.places.get(create.pid, 0))

        def done(reply: object, error: BrokerError | None) -> None:
            if error is None:
                self._await_open(key, controller, create)

        made = NewPartition(members=members, arguments=arguments.encoded)
        command = CreatePartition(vhost=key.vhost, topic=key.name, pid=create.pid, partition=made)
        self._propose_once((key, Create, create.pid), command, done)

    def _await_open(self, key: TopicKey, controller: Controller, create: Create) -> None:
        queue = self._partitions.find(*key, create.pid)
        if queue is None:
            return

        async def wait() -> None:
            try:
                await queue.wait_until_open(OPEN_TIMEOUT_S)
            except BrokerError:
                # The controller asks again, and replaces it in the end.
                return
            if self._is_current(key, controller):
                controller.on_created(create)
                self._perform(key, controller)

        self._spawn_once((key, "open", create.pid, controller), wait)

    # --- commands of partitions ------------------------------------------------------------

    def _tell(self, key: TopicKey, controller: Controller, pid: int, command: Command) -> None:
        queue = self._partitions.find(*key, pid)
        if queue is None:
            return

        def done(outcome: Outcome | None, error: BrokerError | None) -> None:
            if not self._is_current(key, controller):
                return
            if isinstance(outcome, SealAnswer):
                controller.on_sealed(pid, outcome)
            elif isinstance(outcome, Answer):
                controller.on_opened(pid, outcome)
            self._perform(key, controller)

        self._once((key, pid, command), partial(queue.tell, command), done)

    def _ask_seal(self, key: TopicKey, controller: Controller, pid: int) -> None:
        """Asks a partition that may be sealed. One that is says more to a seal by nobody, which
        changes nothing then."""
        queue = self._partitions.find(*key, pid)
        if queue is None:
            return

        def done(found: PartitionDescription | None, error: BrokerError | None) -> None:
            sealed = found is not None and found.state == PartitionState.SEALED.name
            if sealed and self._is_current(key, controller):
                self._tell(key, controller, pid, SealCommand(QUESTION, 0, 0, (), self._term))

        self._once((key, "seal", pid), queue.describe, done)


def has_work(state: TopicState) -> bool:
    """Returns whether a controller has something to do."""
    return bool(
        state.running is not None
        or state.left_out - state.sealed_early.keys()
        or state.sealed_early
        or state.unknown_ends()
    )
