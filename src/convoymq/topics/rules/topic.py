"""The replicated state of a topic: its lineage, and the change that runs.

A command that comes too late, or twice, is refused and changes nothing, so a controller may propose
whatever follows from what it sees.

Source: ordered topics, sections 1.4, 4, 10.3 and 12.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from convoymq.topics.rules import changes
from convoymq.topics.rules.changes import Change, Phase, Seal
from convoymq.topics.rules.group import Kept
from convoymq.topics.rules.lineage import Lineage, PartitionState
from convoymq.topics.rules.refusals import ChangePhase, Code, TopicRefused, UnknownPartition
from convoymq.topics.rules.routes import Route


@dataclass(frozen=True, slots=True)
class Begin:
    """Records a planned change."""

    change: Change


@dataclass(frozen=True, slots=True)
class TargetReady:
    """A target exists and refuses messages."""

    change_id: str
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class ReplaceTarget:
    """A target's server is dead: another partition takes its place."""

    change_id: str
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class ToPhase:
    """The next phase, but for PUBLISHED and ABORTED."""

    change_id: str
    attempt: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Begins the external seal of a source: whoever has applied this accepts no messages for it. It
    is sealed when the leases of those who have not are over (`server_lease`)."""

    change_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class RecordSeal:
    """A source is sealed."""

    change_id: str
    pid: int
    seal: Seal


@dataclass(frozen=True, slots=True)
class Amend:
    """The deadline of a merge passed: it goes on with the sources that are sealed."""

    change_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The next version, in one entry with the phase."""

    change_id: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Gives a change up that has sealed nothing."""

    change_id: str


@dataclass(frozen=True, slots=True)
class TargetOpened:
    """A target has its OPEN entry."""

    pid: int


@dataclass(frozen=True, slots=True)
class LearnClose:
    """The end of a partition that was sealed from outside."""

    pid: int
    close_offset: int


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """State of a group in a partition that is declared lost, by a replica that is left."""

    group_epoch: int
    first: int
    """The first offset that was not acknowledged."""
    parked_keys: int


@dataclass(frozen=True, slots=True)
class DeclareLost:
    """An operator gives up a partition that was sealed from outside: groups go on without it.

    `end`: the offset behind its last message, and `groups`: what groups had done, as far as a
    replica that is left knows.
    """

    pid: int
    time_ms: int = 0
    end: int | None = None
    groups: Mapping[str, LeftBehind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retire:
    """Looks for partitions that all groups have left behind when this is applied."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes retired partitions that no group holds when this is applied; `expired`: those whose
    time is over. Versions that nobody needs any more are forgotten."""

    expired: frozenset[int]


TopicCommand = (
    Begin
    | TargetReady
    | ReplaceTarget
    | ToPhase
    | GiveUp
    | RecordSeal
    | Amend
    | Publish
    | Abort
    | TargetOpened
    | LearnClose
    | DeclareLost
    | Retire
    | Delete
)


@dataclass(slots=True)
class TopicState:
    """One topic, as the metadata group has it."""

    lineage: Lineage
    next_pid: int
    change: Change | None = None
    left_out: set[int] = field(default_factory=set)
    """Partitions of the newest version that an amended change may have sealed."""
    sealed_early: dict[int, Seal] = field(default_factory=dict)
    """Sealed ones among them: each is the source of a next change."""
    lost: dict[int, DeclareLost] = field(default_factory=dict)
    """Partitions that an operator has given up; groups have losses for them
    (`topics.rules.losses`)."""
    given_up: set[int] = field(default_factory=set)
    """Sources of the running change that are being sealed from outside."""

    @classmethod
    def first(cls, route: Route) -> TopicState:
        """A new topic."""
        return cls(Lineage.first(route), len(route.spans))

    @property
    def route(self) -> Route:
        """The newest version."""
        return self.lineage.latest

    @property
    def running(self) -> Change | None:
        """The change that is not finished."""
        change = self.change
        return None if change is None or change.is_finished else change

    def apply(
        self,
        command: TopicCommand,
        group_versions: Collection[int] = (),
        expired_versions: Collection[int] = (),
    ) -> Code | None:
        """Applies a committed command; returns why it was refused, or None.

        Args:
            group_versions: of all groups that are registered and not expired, at this point of the
                log: a seek may have come just before.
            expired_versions: of those that have expired: their versions are not forgotten.
        """
        try:
            match command:
                case Retire():
                    self.retire(group_versions)
                case Delete(expired):
                    self._delete(expired, group_versions)
                    self._trim((*group_versions, *expired_versions))
                case _:
                    self._apply(command)
        except TopicRefused as refused:
            return refused.code
        return None

    def _apply(self, command: TopicCommand) -> None:
        match command:
            case Begin(planned):
                self._begin(planned)
            case TargetReady(change_id, attempt, pid):
                self.change = changes.target_ready(self._current(change_id, attempt), pid)
            case ReplaceTarget(change_id, attempt, pid):
                change = self._current(change_id, attempt)
                self.change = changes.replace_target(change, pid, self.next_pid)
                self.next_pid += 1
            case ToPhase(change_id, attempt, phase):
                self.change = changes.advance(self._current(change_id, attempt), phase)
            case GiveUp(change_id, pid):
                self._give_up(self._current(change_id), pid)
            case RecordSeal(change_id, pid, seal):
                self._record_seal(change_id, pid, seal)
            case Amend(change_id, attempt):
                self._amend(self._current(change_id, attempt))
            case Publish(change_id, time_ms):
                self._publish(self._current(change_id), time_ms)
            case Abort(change_id):
                self.change = changes.abort(self._current(change_id))
                self.given_up.clear()
            case TargetOpened(pid):
                self.lineage.opened(pid)
            case LearnClose(pid, close_offset):
                self.lineage.learn_close(pid, close_offset)
            case DeclareLost():
                self._declare_lost(command)
            case Retire() | Delete():
                raise AssertionError("they are applied with the versions of groups")

    def _current(self, change_id: str, attempt: int = 0) -> Change:
        """The running change, if the command belongs to it. Raises ChangePhase."""
        change = self.running
        if change is None or change.change_id != change_id or attempt not in (0, change.attempt):
            raise ChangePhase(change_id, "unknown", "another change or attempt is running")
        return change

    def _begin(self, planned: Change) -> None:
        change = changes.start(self.change, self.route, planned)
        if change is self.change:
            return
        self.change = change
        self.next_pid = max(self.next_pid, *(span.pid + 1 for span in change.targets))

    def _give_up(self, change: Change, pid: int) -> None:
        if pid not in change.sources or pid in change.seals:
            raise UnknownPartition(pid, change.base_version)
        self.given_up.add(pid)

    def _record_seal(self, change_id: str, pid: int, seal: Seal) -> None:
        change = self.running
        if seal.close_offset is None and pid not in self.given_up:
            raise ChangePhase(change_id, "unknown", f"partition {pid} is not given up")
        if change is not None and change.change_id == change_id and pid in change.sources:
            self.change = changes.record_seal(change, pid, seal)
        elif pid in self.left_out:
            self.sealed_early[pid] = seal
        else:
            raise UnknownPartition(pid, self.route.version)

    def _amend(self, change: Change) -> None:
        amended = changes.amend(change, self.route, self.next_pid)
        self.next_pid += 1
        self.left_out |= amended.left_out.keys()
        self.given_up -= amended.left_out.keys()
        for pid, seal in amended.left_out.items():
            if seal is not None:
                self.sealed_early[pid] = seal
        self.change = amended

    def _publish(self, change: Change, time_ms: int) -> None:
        if change.phase is not Phase.SEALED:
            raise ChangePhase(change.change_id, change.phase.value, "it is published when sealed")
        published = changes.advance(change, Phase.PUBLISHED)
        self.lineage.apply(published, published_at=time_ms)
        self.change = published
        self.left_out -= set(change.sources)
        self.given_up.clear()
        for pid in change.sources:
            self.sealed_early.pop(pid, None)

    def unknown_ends(self) -> list[int]:
        """Partitions that were sealed from outside, and have not said where they end."""
        return [pid for pid in self.lineage.partitions if self.is_end_unknown(pid)]

    def is_end_unknown(self, pid: int) -> bool:
        """Returns whether a partition is one of `unknown_ends`."""
        partition = self.lineage.partitions.get(pid)
        return (
            partition is not None
            and partition.state is PartitionState.SEALED
            and partition.close_offset is None
            and pid not in self.lost
        )

    def retire(self, group_versions: Collection[int]) -> None:
        """Partitions that no group needs wait for their deletion."""
        self.lineage.retire(group_versions, self.lost)

    def _delete(self, expired: Collection[int], group_versions: Collection[int]) -> None:
        self.lineage.delete(expired.__contains__, group_versions)

    def _trim(self, group_versions: Collection[int]) -> None:
        """Forgets versions that nobody needs."""
        change = self.running
        running = () if change is None else (change.base_version,)
        self.lineage.trim((*group_versions, *running))

    @property
    def kept(self) -> Kept:
        """Returns what groups may still read."""
        deleted = {
            pid: each.sealed_version or 0
            for pid, each in self.lineage.partitions.items()
            if each.is_deleted
        }
        return Kept(self.lineage.min_version, max(deleted.values(), default=0), deleted)

    def _declare_lost(self, command: DeclareLost) -> None:
        if command.pid not in self.unknown_ends():
            raise UnknownPartition(command.pid)
        self.lost[command.pid] = command
