"""Decides the next steps of a group, from replicated state and reports of partitions.

A coordinator holds nothing that it could not learn again: its successor asks the partitions, and
waits a whole lease before it takes anything from a member. Actions are repeated until their effect
is seen, so each is safe twice.

A change from version v is taken in these steps, each after the one before is answered:

    all sources drained -> HandOver to each -> OpenCursor in the targets -> Advance -> Grant

A hand-over freezes what the group has in a source; the targets' cursors begin with it. In linear
mode only the change at the group's version is taken; in DAG mode every change whose sources are
drained, and the version follows as far as changes are complete without a gap.

A member counts its leases from when it sent the heartbeat that is answered; the coordinator counts
from when it received it, and adds a margin. A member whose process is known to have ended (`dead`)
is not waited for: it hands out nothing more. One that is only silent may go on (ADR 0092).

All members that own partitions have one filter (ADR 0224): what it does not want is acknowledged.
Members with another one are offered nothing until nobody with that filter is left.

A coordinator of a weak topic prefers going on to waiting, and says what that costs:

    silent member      its partitions are given to others after `lost_ms`, before its leases end
    silent source      Skip is recorded after `wait_ms`, at once where it was sealed from outside,
                       and the change is taken without it, and so the one that leads to it where it
                       fell silent before that; when it answers again it is read late,
                       and Recover is recorded at its end; what it had handed over, unheard, and no
                       target began with, it has again
    expired messages   Lose is recorded, then the partition passes over them

Source: ordered topics, sections 5, 6, 8 and 9.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from convoymq.topics.rules.answers import Answer, CursorAnswer, HandOverAnswer, LossAnswer
from convoymq.topics.rules.assignment import assign
from convoymq.topics.rules.commands import AcceptLoss, HandOver, Lease, OpenCursor
from convoymq.topics.rules.group import (
    Advance,
    Grant,
    GroupCommand,
    GroupState,
    Join,
    Leave,
    Lose,
    Owner,
    Recover,
    Release,
    Skip,
)
from convoymq.topics.rules.heartbeats import MARGIN_MS, TTL_MS, Heartbeat, Leases, filter_of
from convoymq.topics.rules.lineage import Lineage, Mode
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span

RETRY_MS = 200
LOST_MS = 7_000
"""A member of a weak topic that was not heard for so long, two heartbeats, may be dead."""
ASKED_KEPT_MAX = 1024


Told = HandOver | OpenCursor | Lease | AcceptLoss


@dataclass(frozen=True, slots=True)
class Propose:
    """Have a command of the group committed in the metadata log."""

    command: GroupCommand


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a command to the leader of a partition; the answer comes to `on_answer`."""

    pid: int
    command: Told


@dataclass(frozen=True, slots=True)
class AskDrained:
    """Ask the leader of a partition whether the group has drained it; yes comes to `on_drained`,
    no to `on_undrained`. `whole`: and has nothing parked there."""

    pid: int
    group_epoch: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class WeakRules:
    """Times of weak topics, in ms.

    Args:
        wait_ms: how long a source may be silent before the group goes on without it.
        lost_ms: how long a member may be silent before its partitions are given to others.
    """

    wait_ms: int
    lost_ms: int = LOST_MS


Action = Propose | Tell | AskDrained | Leases


@dataclass(slots=True)
class Known:
    """Reports that the coordinator got since it began, or since the latest seek."""

    drained: set[int] = field(default_factory=set)
    handed: dict[int, bytes] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    without: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of partitions whose cursors are open, the skipped parents that they began without."""
    returned: set[int] = field(default_factory=set)
    """Skipped partitions that have again what they had handed over."""
    leased: dict[int, int] = field(default_factory=dict)
    """Lease epochs that the partitions have confirmed."""
    fenced: dict[int, int] = field(default_factory=dict)
    """Lease epochs that they have refused: see `partition.GroupCursor.fenced`."""
    heard_ms: dict[int, int] = field(default_factory=dict)
    """Times at which partitions of changes ahead answered last, or were waited for first."""
    late: set[int] = field(default_factory=set)
    """Skipped partitions that answer again."""
    read_late: set[int] = field(default_factory=set)
    """Skipped partitions that are read to the end."""
    expired: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Messages that expired before they were read: first offset, and end (exclusive)."""


class Coordinator:
    """Coordinates one group, until it is replaced.

    Args:
        state: the group's replicated state, read only here.
        lineage: the topic's, read only here.
        lost: partitions that are declared lost.
        weak: of a weak topic; None: it is strict.
    """

    def __init__(
        self,
        state: GroupState,
        lineage: Lineage,
        now_ms: int,
        *,
        lost: Iterable[int] = (),
        ttl_ms: int = TTL_MS,
        margin_ms: int = MARGIN_MS,
        retry_ms: int = RETRY_MS,
        weak: WeakRules | None = None,
    ) -> None:
        self.state = state
        self.lineage = lineage
        self.lost = lost
        self.ttl_ms = ttl_ms
        self.margin_ms = margin_ms
        self.retry_ms = retry_ms
        self.weak = weak
        self.group_epoch = state.group_epoch
        self.known = Known()
        #: A predecessor may have answered a heartbeat just now.
        self.heard_ms = dict.fromkeys(state.members, now_ms)
        self.dead: frozenset[str] = frozenset()
        """Members whose process has ended for certain."""
        self.leaving: set[str] = set()
        """Members that leave, or were not heard of for longer than a lease: offered nothing."""
        self._expiring: set[tuple[int, int]] = set()
        """Leases whose end is proposed: they are renewed no more, whoever is heard of meanwhile."""
        self._assigned_for: tuple[list[int], set[str], dict[int, Owner]] | None = None
        self._assigned: dict[int, str] = {}
        self._route = lineage.route(state.cv)
        self._lost_ms: dict[int, int] = {}
        """Times at which partitions with an owner were seen to be lost."""
        self._asked_ms: dict[object, int] = {}
        self._actions: list[Action] = []

    # What it is told

    def on_heartbeat(self, heartbeat: Heartbeat, now_ms: int) -> None:
        """A member is alive; it holds no more what it lists as released."""
        member = heartbeat.member
        if member in self.dead:
            # It was under way when its process ended.
            return
        self.heard_ms[member] = now_ms
        if heartbeat.leaves:
            self.leaving.add(member)
        else:
            self.leaving.discard(member)
        if not heartbeat.leaves and member not in self.state.members:
            self._propose(Join(member, loses=self.weak is not None), now_ms)
        for pid, owner in self.state.owners.items():
            if owner.member != member:
                continue
            # Only who has heard of the seek has ended what it does not hold: an older heartbeat may
            # have been sent before the lease was told.
            ended = heartbeat.group_epoch == self.state.group_epoch and pid not in heartbeat.held
            former = owner.group_epoch != self.state.group_epoch and ended
            if former or heartbeat.released.get(pid) == owner.epoch:
                self._propose(Release(pid, owner.epoch), now_ms)
        self.step(now_ms)
        self._actions.append(self.answer_to(heartbeat))

    def answer_to(self, heartbeat: Heartbeat) -> Leases:
        """Returns what a heartbeat is answered now. A lease is told when the partition knows it:
        fetches that come before are refused."""
        state, known = self.state, self.known
        leases = {
            pid: owner.epoch
            for pid, owner in state.owners.items()
            if owner.member == heartbeat.member
            and pid not in self.lost
            and owner.group_epoch == state.group_epoch
            and self.may_renew(pid, owner.epoch)
            and owner.epoch
            in (known.leased.get(pid), known.fenced.get(pid), heartbeat.held.get(pid))
        }
        wanted = self.wanted_owners(self.readable())
        # What is fenced is told as revoked, also to a member that has not heard of it: its release
        # says that nobody works on it.
        revoked = frozenset(
            pid
            for pid, epoch in leases.items()
            if wanted.get(pid) != heartbeat.member or known.fenced.get(pid) == epoch
        )
        return Leases(heartbeat.member, heartbeat.sent_ms, state.group_epoch, leases, revoked)

    def may_renew(self, pid: int, epoch: int) -> bool:
        """False for a lease that is about to be given to somebody else."""
        return (pid, epoch) not in self._expiring

    def on_drained(self, pid: int, group_epoch: int, now_ms: int, *, whole: bool = False) -> None:
        """A partition reports that the group has drained it. `whole`: see `AskDrained`."""
        if group_epoch == self.state.group_epoch:
            self._renew_knowledge()
            self.known.drained.add(pid)
            self._hear(pid, now_ms)
            if whole:
                self.known.read_late.add(pid)
        self.step(now_ms)

    def on_undrained(self, pid: int, group_epoch: int, now_ms: int) -> None:
        """A partition answers that the group has not drained it."""
        if group_epoch == self.state.group_epoch:
            self._renew_knowledge()
            self._hear(pid, now_ms)
            if pid in self.state.skipped:
                self.known.late.add(pid)
                self.step(now_ms)

    def on_expired(self, pid: int, group_epoch: int, first: int, end: int, now_ms: int) -> None:
        """A partition has dropped messages that the group has not read, `end` exclusive; none,
        when they were acknowledged after all."""
        if self.weak is not None and group_epoch == self.state.group_epoch:
            self._renew_knowledge()
            self.known.expired[pid] = (first, end)
            self.step(now_ms)

    def on_answer(
        self,
        pid: int,
        command: Told,
        answer: Answer | CursorAnswer | HandOverAnswer | LossAnswer,
        now_ms: int,
    ) -> None:
        """A partition answered what it was told."""
        if command.group_epoch != self.state.group_epoch:
            return
        self._renew_knowledge()
        self._hear(pid, now_ms)
        self._asked_ms.pop((type(command), pid), None)
        known = self.known
        match command:
            case HandOver() if isinstance(answer, HandOverAnswer):
                if answer.code is Code.OK:
                    known.handed[pid] = answer.state
                elif answer.code is Code.NOT_DRAINED:
                    known.drained.discard(pid)
            case OpenCursor() if isinstance(answer, CursorAnswer) and answer.code is Code.OK:
                known.opened.add(pid)
                known.without[pid] = answer.without
                # As a source it is waited for anew.
                known.heard_ms.pop(pid, None)
                if command.taken is not None:
                    known.returned.add(pid)
            case Lease() if answer.code is Code.OK:
                known.leased[pid] = command.epoch
            case Lease() if answer.code is Code.LEASE_FENCED:
                known.fenced[pid] = command.epoch
            case AcceptLoss():
                # What has expired since is reported again.
                known.expired.pop(pid, None)
            case Lease() if answer.code is Code.NOT_VISIBLE:
                # Handed over, or its cursor is not open: both are found out by asking again.
                known.opened.discard(pid)
        self.step(now_ms)

    # What it does

    def step(self, now_ms: int) -> None:
        """Does whatever is possible now. Safe at any time, as often as wanted."""
        self._renew_knowledge()
        self._expire_members(now_ms)
        for version in self.changes_ahead():
            self._take_change(version, now_ms)
        for pid in sorted(self.state.skipped):
            self._look_for(pid, now_ms)
        for pid, (first, end) in list(self.known.expired.items()):
            self._pass_expired(pid, first, end, now_ms)
        readable = self.readable()
        for pid in readable:
            if pid not in self.known.opened or self._may_return(pid):
                self._open(pid, now_ms)
        if not self.state.has_former_owners():
            self._place(readable, now_ms)

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due, in order."""
        actions, self._actions = self._actions, []
        return actions

    def _renew_knowledge(self) -> None:
        """After a seek nothing that was drained, opened or leased is so any more."""
        if self.group_epoch != self.state.group_epoch:
            self.group_epoch = self.state.group_epoch
            self.known = Known()
            self._asked_ms.clear()

    def _propose(self, command: GroupCommand, now_ms: int) -> None:
        if self._is_due(command, now_ms):
            self._actions.append(Propose(command))

    def _tell(self, pid: int, command: Told, now_ms: int) -> None:
        if self._is_due((type(command), pid), now_ms):
            self._actions.append(Tell(pid, command))

    def _is_due(self, action: object, now_ms: int) -> bool:
        """False when the same was done a moment ago, and may still be answered."""
        if now_ms < self._asked_ms.get(action, -self.retry_ms) + self.retry_ms:
            return False
        if len(self._asked_ms) >= ASKED_KEPT_MAX:
            self._asked_ms.clear()
        self._asked_ms[action] = now_ms
        return True

    @property
    def silence_ms(self) -> int:
        """Returns how long a member may be silent before its leases are over. In a weak topic they
        may still be in force: two members have the partition then."""
        lease_ms = self.ttl_ms + self.margin_ms
        return lease_ms if self.weak is None else min(self.weak.lost_ms, lease_ms)

    def _expire_members(self, now_ms: int) -> None:
        for member in sorted(self.state.members):
            heard = self.heard_ms.setdefault(member, now_ms)
            gone = member in self.dead or now_ms >= heard + self.silence_ms
            if not gone and member not in self.leaving:
                continue
            owned = [(p, o.epoch) for p, o in self.state.owners.items() if o.member == member]
            self.leaving.add(member)
            if gone:
                self._expiring.update(owned)
                for pid, epoch in owned:
                    self._propose(Release(pid, epoch, expired=True), now_ms)
            if not owned:
                self._propose(Leave(member), now_ms)

    # Changes

    def changes_ahead(self) -> range:
        """The versions whose changes the group may take now."""
        latest = self.lineage.latest.version
        if self.state.mode is Mode.LINEAR:
            return range(self.state.cv, min(self.state.cv + 1, latest))
        return range(self.state.cv, latest)

    def _take_change(self, version: int, now_ms: int) -> None:
        sources = self.lineage.sources(version)
        waits = not self.all_drained(sources)
        for pid in sources:
            if waits and self.is_drained(pid):
                # It is asked nothing before the others are drained: its silence says nothing.
                self._hear(pid, now_ms)
            known = self.is_drained(pid) or (
                self.weak is None and self.lineage.partition(pid).close_offset is None
            )
            if not known and self._is_due((AskDrained, pid), now_ms):
                self._actions.append(AskDrained(pid, self.state.group_epoch))
            self._skip_silent(pid, now_ms)
        if not self.all_drained(sources):
            return
        for pid in sources:
            self._have_handed_over(pid, now_ms)
        if not all(self._is_left(pid) for pid in sources):
            return
        targets = self.lineage.targets(version)
        for pid in targets:
            if pid not in self.known.opened and not self._is_gone(pid):
                self._open(pid, now_ms)
                if self.lineage.partition(pid).is_closed:
                    self._skip_silent(pid, now_ms)
        passable = self.known.opened | self.state.skipped
        opened = all(self._is_gone(pid) or pid in passable for pid in targets)
        if opened and version == self.state.cv:
            self._propose(Advance(self.state.group_epoch, version, version + 1), now_ms)

    def _have_handed_over(self, pid: int, now_ms: int) -> None:
        """Unless the group left the source. What was skipped hands nothing over, whatever its own
        parents do: it is read late, and its targets begin without it."""
        if not (self._is_left(pid) or self._is_gone(pid) or pid in self.state.skipped):
            self._tell(pid, HandOver(self.state.name, self.state.group_epoch), now_ms)

    def _hear(self, pid: int, now_ms: int) -> None:
        """A partition has answered. It counts for those that are waited for."""
        if pid in self.known.heard_ms:
            self.known.heard_ms[pid] = now_ms

    def _skip_silent(self, pid: int, now_ms: int) -> None:
        """A weak topic's group goes on without a source that does not answer, and says so."""
        if self.weak is None or self._is_left(pid) or self._is_gone(pid):
            return
        heard_ms = self.known.heard_ms.setdefault(pid, now_ms)
        end = self.lineage.partition(pid).close_offset
        # One that was sealed from outside was silent before.
        if end is None or now_ms >= heard_ms + self.weak.wait_ms:
            self._propose(Skip(pid, self.state.group_epoch, end), now_ms)

    def _look_for(self, pid: int, now_ms: int) -> None:
        """A skipped partition is read late, when it answers."""
        if self._is_gone(pid):
            return
        if pid in self.known.read_late:
            self._propose(Recover(pid, self.state.group_epoch), now_ms)
        elif self._is_due((AskDrained, pid), now_ms):
            self._actions.append(AskDrained(pid, self.state.group_epoch, whole=True))
        if pid in self.known.late and pid not in self.known.returned:
            for child in self.lineage.partition(pid).children:
                if child not in self.known.without and not self._is_gone(child):
                    self._open(child, now_ms)

    def _may_return(self, pid: int) -> bool:
        skipped = pid in self.state.skipped and pid not in self.known.returned
        return skipped and self._taken(pid) is not None

    def _taken(self, pid: int) -> tuple[tuple[int, int], ...] | None:
        """Returns the ranges of the targets that began with what a skipped partition had handed
        over; None while that is not known of all."""
        found = []
        for child in map(self.lineage.partition, self.lineage.partition(pid).children):
            if self._is_gone(child.pid):
                # What it began with may be lost with it.
                continue
            without = self.known.without.get(child.pid)
            if without is None:
                return None
            if pid not in without:
                found.append((child.lo, child.hi))
        return tuple(found)

    def _pass_expired(self, pid: int, first: int, end: int, now_ms: int) -> None:
        """The loss is recorded before the partition passes over it."""
        name, group_epoch = self.state.name, self.state.group_epoch
        if first >= end or self.has_recorded(pid, first, end):
            self._tell(pid, AcceptLoss(name, end, group_epoch), now_ms)
        else:
            self._propose(Lose(pid, group_epoch, first, end), now_ms)

    def has_recorded(self, pid: int, first: int, end: int) -> bool:
        """True when the group's state says that it goes on without these messages."""
        return self.state.has_lost(pid, first, end)

    def all_drained(self, sources: Iterable[int]) -> bool:
        """True when the group may leave all sources of a change behind."""
        return all(self.is_drained(pid) for pid in sources)

    def is_drained(self, pid: int) -> bool:
        """True for partitions that have said so, and for lost and deleted ones.

        One that was sealed from outside counts when its end is known: only then does it hand over
        what may be stored in its targets again.
        """
        known_end = self.lineage.partition(pid).close_offset is not None
        return (known_end and pid in self.known.drained) or self._is_left(pid)

    def _is_left(self, pid: int) -> bool:
        """True for what the group has handed over, for what it skipped, and for what is gone.

        A lost or skipped partition says nothing of what came before it: its own parents are left
        first.
        """
        if pid in self.known.handed:
            return True
        if pid in self.lost and pid in self.state.owners:
            # It may hand out what it has fetched.
            return False
        partition = self.lineage.partition(pid)
        begins = partition.is_in(self.state.start_version)
        gone = self._is_gone(pid) or pid in self.state.skipped
        if not gone or begins or partition.is_deleted:
            return gone
        return all(self._is_left(each) or self._is_passed(each) for each in partition.parents)

    def _is_gone(self, pid: int) -> bool:
        """True for what cannot be asked any more."""
        return self.lineage.partition(pid).is_deleted or pid in self.lost

    def _open(self, pid: int, now_ms: int) -> None:
        state = self.state
        partition = self.lineage.partition(pid)
        taken = self._taken(pid) if pid in state.skipped else None
        if partition.is_in(state.start_version):
            start = state.starts.get(pid, 0)
            command = OpenCursor(state.name, state.group_epoch, start, taken=taken)
        elif partition.created_version <= state.cv and pid not in state.skipped:
            # Open since before the group came here, whatever has become of its parents.
            command = OpenCursor(state.name, state.group_epoch)
        else:
            for parent in partition.parents:
                self._have_handed_over(parent, now_ms)
            if not self._may_read(pid):
                return
            handed = self.known.handed
            states = tuple(handed[parent] for parent in partition.parents if parent in handed)
            without = tuple(
                parent
                for parent in partition.parents
                if parent in state.skipped and parent not in handed
            )
            command = OpenCursor(state.name, state.group_epoch, 0, states, without, taken)
        self._tell(pid, command, now_ms)

    # Owners

    def readable(self) -> list[int]:
        """The partitions that the group may read now and has not handed over, by age and range."""
        known, state = self.known, self.state
        if self._route.version != state.cv:
            self._route = self.lineage.route(state.cv)
        pids = set(self._route.pids)
        if state.mode is Mode.DAG:
            pids |= {pid for pid in known.opened if self._may_read(pid)}
            # What was granted by a predecessor was readable.
            pids |= {
                p for p, owner in state.owners.items() if owner.group_epoch == self.group_epoch
            }
        left = [pid for pid in pids if pid not in known.handed and not self._is_behind(pid)]
        left += [
            pid
            for pid in state.skipped & known.late
            if pid not in left and pid not in known.read_late and not self._is_gone(pid)
        ]
        partitions = self.lineage.partitions
        return sorted(left, key=lambda pid: (partitions[pid].created_version, partitions[pid].lo))

    def _is_behind(self, pid: int) -> bool:
        """True for what the group has advanced past, and what is lost or deleted."""
        return self._is_gone(pid) or self._is_passed(pid)

    def _is_passed(self, pid: int) -> bool:
        """True for what is in no version from the group's on."""
        sealed = self.lineage.partition(pid).sealed_version
        return sealed is not None and sealed <= self.state.cv

    def _may_read(self, pid: int) -> bool:
        """A cursor of a target is opened when all sources of its change are handed over."""
        return all(self._is_left(parent) for parent in self.lineage.partition(pid).parents)

    def wanted_owners(self, pids: list[int]) -> dict[int, str]:
        """Returns the owner that each readable partition should have."""
        lineage, owners = self.lineage, self.state.owners
        members = self._alike(self.state.members - self.leaving)
        inputs = (pids, members, dict(owners))
        if self._assigned_for != inputs:
            partitions = [lineage.partition(pid) for pid in pids]
            parents = {
                each.pid: [owners[parent].member for parent in each.parents if parent in owners]
                for each in partitions
            }
            self._assigned_for = inputs
            self._assigned = assign(
                [Span(each.lo, each.hi, each.pid) for each in partitions],
                members,
                {pid: owner.member for pid, owner in owners.items()},
                parents,
            )
        return self._assigned

    def _alike(self, members: set[str]) -> set[str]:
        """Returns the members with the filter of those that own partitions; where nobody owns one,
        of the first one by name."""
        filters = {filter_of(owner.member) for owner in self.state.owners.values()}
        if not filters:
            filters = {filter_of(min(members, default=""))}
        return {member for member in members if {filter_of(member)} == filters}

    def _place(self, readable: list[int], now_ms: int) -> None:
        state, known = self.state, self.known
        for pid, member in self.wanted_owners(readable).items():
            owner = state.owners.get(pid)
            if owner is None:
                if pid in known.opened:
                    expect = state.lease_epochs.get(pid, 0)
                    self._propose(Grant(pid, member, state.group_epoch, expect), now_ms)
            elif known.leased.get(pid) != owner.epoch:
                lease = Lease(state.name, state.group_epoch, owner.epoch, owner.member)
                self._tell(pid, lease, now_ms)
        for pid, owner in state.owners.items():
            if pid in self.lost:
                # It is told no more: its owner ends it when it hears so, or in time.
                since_ms = self._lost_ms.setdefault(pid, now_ms)
                if now_ms >= since_ms + self.ttl_ms + self.margin_ms:
                    self._propose(Release(pid, owner.epoch, expired=True), now_ms)
            # What was handed over its owner gives back: it may work on something that expired.
            elif self._is_gone(pid):
                self._propose(Release(pid, owner.epoch), now_ms)
