"""Decides the next steps of a change, by the record, the answers and the time.

| phase         | what is done until the next phase                                            |
|---------------|------------------------------------------------------------------------------|
| PREPARED      | create the targets; a target that does not answer is replaced                |
| TARGETS_READY | nothing: from the next phase on the change only goes forward                 |
| SEALING       | seal all sources at once, and create targets that an amendment brought       |
| SEALED        | publish: the next version and the phase in one entry                         |
| PUBLISHED     | open the targets with the seed from the record                               |

A merge whose deadline passes with some sources sealed is amended: it goes on with those. A source
that stays silent is sealed from outside when that was allowed and its server's lease is over for
certain. A partition of the newest version that turns out to be sealed is moved as soon as no change
runs: its CLOSE stands. A partition that was sealed from outside is asked for its end until it
answers, or is declared lost.

Actions are repeated until the record shows their effect; requests are idempotent by (change,
attempt, partition), and carry the controller's term.

Source: ordered topics, sections 4, 5 and 10.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from convoymq.topics.rules.answers import Answer, SealAnswer
from convoymq.topics.rules.changes import Change, Kind, Phase, Seal, plan_reconcile
from convoymq.topics.rules.commands import Open
from convoymq.topics.rules.commands import Seal as SealCommand
from convoymq.topics.rules.dedup import SourceSeal, seed_of
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span
from convoymq.topics.rules.topic import (
    Amend,
    Begin,
    LearnClose,
    Publish,
    RecordSeal,
    ReplaceTarget,
    TargetOpened,
    TargetReady,
    ToPhase,
    TopicCommand,
    TopicState,
)

RETRY_MS = 200
CREATE_DEADLINE_MS = 5_000
MERGE_DEADLINE_MS = 3_000


@dataclass(frozen=True, slots=True)
class Create:
    """Have a partition created in CREATING, on a server that lives."""

    pid: int
    lo: int
    hi: int
    version: int
    change_id: str
    attempt: int
    term: int


@dataclass(frozen=True, slots=True)
class AskSeal:
    """Ask the leader of a partition whether it is sealed; yes comes to `on_sealed`."""

    pid: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a command to the leader of a partition."""

    pid: int
    command: SealCommand | Open


@dataclass(frozen=True, slots=True)
class Propose:
    """Have a command of the topic committed in the metadata log."""

    command: TopicCommand


Action = Create | AskSeal | Tell | Propose


class Controller:
    """Controls one topic in one term.

    Args:
        state: the topic's replicated state, read only here.
    """

    def __init__(
        self,
        state: TopicState,
        term: int,
        *,
        retry_ms: int = RETRY_MS,
        create_deadline_ms: int = CREATE_DEADLINE_MS,
        merge_deadline_ms: int = MERGE_DEADLINE_MS,
    ) -> None:
        self.state = state
        self.term = term
        self.retry_ms = retry_ms
        self.create_deadline_ms = create_deadline_ms
        self.merge_deadline_ms = merge_deadline_ms
        self._since_ms: dict[object, int] = {}
        """First times at which something was waited for."""
        self._asked_ms: dict[object, int] = {}
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due, in order."""
        actions, self._actions = self._actions, []
        return actions

    # What it is told

    def on_created(self, create: Create) -> None:
        """A target exists."""
        change = self.state.running
        if change is not None and change.change_id == create.change_id:
            self._propose(TargetReady(create.change_id, create.attempt, create.pid))

    def on_sealed(self, pid: int, answer: SealAnswer) -> None:
        """A partition is sealed; by the running change, or by another one: its CLOSE stands."""
        if answer.code not in (Code.OK, Code.SEALED_BY):
            return
        seal = Seal(answer.close_offset, answer.dedup)
        if pid in self.state.unknown_ends():
            # An ordinary seal may be heard as late. Groups take the end to mean that the partition
            # hands over what may be stored twice: it has to know first.
            if answer.external:
                self._propose(LearnClose(pid, answer.close_offset))
            return
        change = self.state.running
        by = change.change_id if change is not None and pid in change.sources else answer.by
        self._propose(RecordSeal(by, pid, seal))

    def on_opened(self, pid: int, answer: Answer) -> None:
        """A target answered to OPEN."""
        if answer.code is Code.OK:
            self._propose(TargetOpened(pid))

    # What it does

    def step(self, now_ms: int, expired: Collection[int] = ()) -> None:
        """Does whatever is possible now. Safe at any time, as often as wanted.

        Args:
            expired: partitions to seal from outside, whose servers' leases are over for certain.
        """
        change = self.state.running
        for pid in self.state.unknown_ends():
            self._tell(pid, late_seal(self.state, pid, self.term), now_ms)
        for pid in self.state.left_out - self.state.sealed_early.keys():
            if self._is_due((AskSeal, pid), now_ms):
                self._actions.append(AskSeal(pid))
        if change is None:
            self._reconcile(now_ms)
            return
        match change.phase:
            case Phase.PREPARED:
                self._create_targets(change, now_ms)
                if change.is_ready:
                    self._to_phase(change, Phase.TARGETS_READY, now_ms)
            case Phase.TARGETS_READY:
                self._to_phase(change, Phase.SEALING, now_ms)
            case Phase.SEALING:
                self._seal_sources(change, now_ms, expired)
            case Phase.SEALED:
                self._propose_at(Publish(change.change_id, now_ms), Phase.PUBLISHED, now_ms)
            case Phase.PUBLISHED:
                self._open_targets(change, now_ms)

    def _propose(self, command: TopicCommand) -> None:
        self._actions.append(Propose(command))

    def _propose_at(self, command: TopicCommand, what: object, now_ms: int) -> None:
        if self._is_due((what, self._version()), now_ms):
            self._propose(command)

    def _version(self) -> tuple[str, int]:
        change = self.state.change
        return ("", 0) if change is None else (change.change_id, change.attempt)

    def _to_phase(self, change: Change, phase: Phase, now_ms: int) -> None:
        self._propose_at(ToPhase(change.change_id, change.attempt, phase), phase, now_ms)

    def _tell(self, pid: int, command: SealCommand | Open, now_ms: int) -> None:
        if self._is_due((type(command), pid, command.change_id), now_ms):
            self._actions.append(Tell(pid, command))

    def _is_due(self, action: object, now_ms: int) -> bool:
        """False when the same was done a moment ago, and may still be answered."""
        if now_ms < self._asked_ms.get(action, -self.retry_ms) + self.retry_ms:
            return False
        self._asked_ms[action] = now_ms
        return True

    def _waited_ms(self, what: object, now_ms: int) -> int:
        return now_ms - self._since_ms.setdefault(what, now_ms)

    def _create_targets(self, change: Change, now_ms: int) -> None:
        for span in change.targets:
            if span.pid in change.ready:
                continue
            if self._waited_ms((Create, span.pid), now_ms) >= self.create_deadline_ms:
                replace = ReplaceTarget(change.change_id, change.attempt, span.pid)
                self._propose_at(replace, (ReplaceTarget, span.pid), now_ms)
            elif self._is_due((Create, span.pid), now_ms):
                version, attempt = change.next_version, change.attempt
                self._actions.append(
                    Create(
                        span.pid, span.lo, span.hi, version, change.change_id, attempt, self.term
                    )
                )

    def _seal_sources(self, change: Change, now_ms: int, expired: Collection[int]) -> None:
        self._create_targets(change, now_ms)
        for pid in change.sources:
            if pid in change.seals:
                continue
            if pid in self.state.sealed_early:
                seal = self.state.sealed_early[pid]
                self._propose_at(RecordSeal(change.change_id, pid, seal), pid, now_ms)
            elif pid in expired:
                record = RecordSeal(change.change_id, pid, Seal(None))
                self._propose_at(record, (Seal, pid), now_ms)
            else:
                self._tell(pid, self._seal_of(change), now_ms)
        if change.is_sealed and change.is_ready:
            self._to_phase(change, Phase.SEALED, now_ms)
        elif self._is_overdue(change, now_ms):
            self._propose_at(Amend(change.change_id, change.attempt), Amend, now_ms)

    def _is_overdue(self, change: Change, now_ms: int) -> bool:
        """True for a merge that has waited long enough for the rest of its sources."""
        waited = self._waited_ms((Phase.SEALING, change.change_id, change.attempt), now_ms)
        partly = bool(change.seals) and not change.is_sealed
        return change.kind is Kind.MERGE and partly and waited >= self.merge_deadline_ms

    def _seal_of(self, change: Change) -> SealCommand:
        return SealCommand(
            change.change_id, change.attempt, change.next_version, change.targets, self.term
        )

    def _open_targets(self, change: Change, now_ms: int) -> None:
        lineage = self.state.lineage
        sources = []
        for pid in change.sources:
            seal, source = change.seals[pid], lineage.partition(pid)
            dedup = None if seal.close_offset is None else seal.dedup
            sources.append(SourceSeal(source.lo, source.hi, dedup))
        waiting = [
            span
            for span in change.targets
            if lineage.partition(span.pid).state is PartitionState.CREATING
        ]
        for span in waiting:
            seed = seed_of(span.lo, span.hi, sources)
            command = Open(change.change_id, change.next_version, self.term, seed)
            self._tell(span.pid, command, now_ms)
        if not waiting:
            self._to_phase(change, Phase.DONE, now_ms)

    def _reconcile(self, now_ms: int) -> None:
        state = self.state
        for pid, seal in sorted(state.sealed_early.items()):
            # One that was aborted is not begun again: the next one has another name.
            change_id = f"reconcile-{pid}-{state.next_pid}"
            planned = plan_reconcile(state.route, pid, seal, state.next_pid, change_id)
            self._propose_at(Begin(planned), (Begin, change_id), now_ms)
            return


def late_seal(state: TopicState, pid: int, term: int) -> SealCommand:
    """Returns CLOSE for a partition that was sealed from outside: where its keys are now."""
    lineage = state.lineage
    partition = lineage.partition(pid)
    version = partition.sealed_version
    assert version is not None
    children = (lineage.partition(child) for child in partition.children)
    targets = tuple(Span(child.lo, child.hi, child.pid) for child in children)
    change_id = lineage.published[version].change_id
    return SealCommand(change_id, 0, version, targets, term, external=True)
