# cython: annotation_typing=False
"""All Raft groups of one node, and everything that happens to them in a loop round.

Frames, link events, flush completions and new commands only mark groups as dirty; `end_of_round`
then seals batches, starts the flush, applies what is committed and sends commit notices. A group
that nobody marks costs nothing: there is no per-group timer or heartbeat.

`watch_group` is for a node that has clients of a group but no replica of it: it learns the
leader by asking the members, and forwards.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from convoymq.kernels.batch import CommandBuilder
from convoymq.kernels.entries import Entry
from convoymq.model.clock import Clock
from convoymq.model.config import RaftConfig
from convoymq.model.errors import Misuse
from convoymq.model.rounds import run_each
from convoymq.replication import versions as supported
from convoymq.replication.machine import Machine
from convoymq.replication.raft.core import RaftCore
from convoymq.replication.raft.membership import NEVER, Learner, Membership
from convoymq.replication.versions import Supports
from convoymq.shells.capacity import CapacityQueues, Waiting
from convoymq.shells.effect_sink import EffectSink
from convoymq.shells.forwarding import Forwarding
from convoymq.shells.groups.deferred import Deferred
from convoymq.shells.groups.intake import FrameIntake
from convoymq.shells.groups.replica import Replica
from convoymq.shells.groups.serving import LEADER_IS
from convoymq.shells.groups.status import GroupStatus, HostCounters
from convoymq.shells.watched import Watched
from convoymq.storage.types import Damage, GroupPlan
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.logformat.segment import FilePlace, Segment
    from convoymq.storage.store import Storage

REMOVED_MAX = 4096
ROUNDS_MAX = 8
ASK_LEADER_MS = 200
Item = TypeVar("Item")


class ReplicaHost:
    """See the module docstring. Single threaded; nothing here blocks but reads of old entries."""

    def __init__(
        self,
        *,
        node: int,
        incarnation: int,
        storage: Storage,
        transport: Transport,
        clock: Clock,
        config: RaftConfig | None = None,
        on_dirty: Callable[[], None] | None = None,
        core_class: type[RaftCore] = RaftCore,
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.storage = storage
        self.transport = transport
        self.clock = clock
        self.config = config or RaftConfig()
        self.on_dirty = on_dirty
        #: The simulator hands in cores with planted bugs.
        self.core_class = core_class
        self.groups: dict[int, Replica] = {}
        #: Replicas that stopped for good; their groups are watched meanwhile.
        self.stopped: dict[int, Replica] = {}
        #: kind -> highest machine version that was ever in force here, as far as known.
        self.versions: dict[str, int] = {}
        self.watched: dict[int, Watched] = {}
        self.counters = HostCounters()
        #: Nodes whose link is up and that are not suspected; nodes known to be gone.
        self.reachable: set[int] = set()
        self.gone: set[int] = set()
        self.incarnations: dict[int, int] = {}
        #: node -> the machine versions that it said it supports when it was linked last.
        self.supports: dict[int, Supports] = {}
        #: Groups with something outstanding: only these are ticked.
        self.active: set[int] = set()
        self.now = clock.monotonic_ms()
        self.lease_until_ms = 0  # Of `AppendFence`, by the monotonic clock.
        self.on_note: Callable[[str, dict[str, object]], None] | None = None
        self.on_membership_changed: Callable[[int, Membership], None] | None = None
        #: (group, reason): a replica stopped for good.
        self.on_stopped: Callable[[int, str], None] | None = None
        #: (kind, version): a version is in force that was not before on this node.
        self.on_version: Callable[[str, int], None] | None = None
        #: Called after sealing, before applying: lets the shell write to the links at once.
        self.after_seal: Callable[[], None] | None = None
        #: Nodes whose link takes no bulk.
        self.full = transport.full
        self.capacity = CapacityQueues(clock, self.full, self._fail, self.config.quorum_timeout_ms)
        self.await_room = self.capacity.wait
        self.forwarding = Forwarding(transport, self.capacity)
        self.intake = FrameIntake(self)
        self.on_frame = self.intake.on_frame
        #: Groups that were here and are no more, the last ones: their late frames are dropped.
        self.removed: dict[int, None] = {}
        #: How many replicas were removed so far.
        self.removals = 0
        self._dirty: list[Replica | Watched] = []
        self._apply: list[Replica] = []
        self._notices: list[Replica] = []
        self.deferred = Deferred(self)
        self._woken = self._damaged = False
        self._numbers = 0
        #: Something was logged since the last kick.
        self._queued = False
        self._kick: Callable[[], None] = storage.kick
        storage.owner = self

    # Groups.

    def create_group(
        self,
        group: int,
        members: Sequence[int],
        machine: Machine,
        sink: EffectSink[Replica],
        *,
        leader_hint: int = 0,
        founder: tuple[int, int] = (0, 0),
        learner: bool = False,
        wiped: bool = False,
    ) -> Replica:
        """Makes this node a member of the group and starts taking part.

        Args:
            members: those that the group began with; the log knows better once it has entries.
            leader_hint: the node that stands for the first election at once.
            founder: the node, in which incarnation, that leads term 1 without an election; the same
                for all members, and durable before the first of them is created (ADR 0026).
            learner: this node joins a group that exists.
            wiped: this node's data was lost after it had become a member.

        A learner may have been a member before, too: without a log either neither votes nor
        acknowledges before the leader has taken it in, and votes only when it has caught up.
        """
        if group in self.groups or group in self.stopped:
            raise Misuse(f"group {group} exists already")
        if group in self.removed:
            # What the replica of this incarnation had promised is gone with its data: it may
            # neither lead term 1 again nor vote as if it never had.
            wiped = True
            del self.removed[group]
        watched = self.watched.pop(group, None)
        builder = watched.builder if watched is not None else CommandBuilder()
        log = self.storage.open_group(group)
        fresh = not (log.last_index or log.snapshot_index or log.term or log.voted_for)
        voters = frozenset(n for n in members if not learner or n != self.node)
        membership = Membership(voters, (Learner(self.node, NEVER),) if learner else ())
        replica = Replica(self, group, log, machine, sink, builder, membership)
        self.groups[group] = replica
        self._follow(replica)
        new = wiped or learner
        campaign = fresh and not new and leader_hint == self.node
        if founder[0] and not new:
            replica.found(founder[0], fresh and founder == (self.node, self.incarnation))
        replica.start(campaign=campaign, new=new)
        self.intake.take_early(group)
        return replica

    def watch_group(self, group: int, members: Sequence[int], sink: EffectSink[Replica]) -> None:
        """Makes `builder_of` work for a group without a replica here."""
        if group in self.groups:
            return
        watched = self.watched.get(group)
        if watched is None:
            watched = self._watch(Watched(self, group, members, sink))
        watched.members = tuple(members)
        watched.ask_leader()

    def _watch(self, watched: Watched) -> Watched:
        self._follow(watched)
        self.watched[watched.group] = watched
        return watched

    def _follow(self, item: Replica | Watched) -> None:
        """Has the open batch of a group say when it has commands, and when it is full."""
        item.builder.on_first = lambda: self.mark_dirty(item)
        item.builder.on_full = lambda: self._on_full(item)
        if item.builder.used:
            self.mark_dirty(item)

    def leave_group(self, group: int, members: Sequence[int]) -> None:
        """Ends this node's membership: deletes its data and watches the group.

        Its clients go on: they hold the builder of the replica, which the watched group takes over.
        """
        replica = self.groups.get(group) or self.stopped[group]
        watched = Watched(self, group, members, replica.sink)
        watched.builder = replica.builder
        self.remove_group(group)
        self._watch(watched).ask_leader()
        watched.sink.on_replica_gone()

    def unwatch_group(self, group: int) -> None:
        """Ends `watch_group`."""
        self.watched.pop(group, None)

    def remove_group(self, group: int) -> None:
        """Ends the membership and deletes the group's data for ever."""
        replica = self.groups.pop(group, None) or self.stopped.pop(group, None)
        self.intake.forget(group)
        self.watched.pop(group, None)
        self.active.discard(group)
        if replica is not None:
            replica.stop()
            self.removals += 1
            self.removed[group] = None
            if len(self.removed) > REMOVED_MAX:
                del self.removed[next(iter(self.removed))]
        self.storage.remove_group(group)
        self.wake()

    def on_replica_stopped(self, replica: Replica) -> None:
        """A replica has stopped for good: its data stay, its clients are served by the others."""
        group = replica.group
        self.groups.pop(group, None)
        self.intake.forget(group)
        self.active.discard(group)
        self.stopped[group] = replica
        self.counters.replicas_stopped += 1
        others = sorted(replica.core.members.nodes - {self.node})
        watched = Watched(self, group, others, replica.sink)
        watched.builder = replica.builder
        self._watch(watched).ask_leader()
        watched.sink.on_replica_gone()
        self.wake()
        if self.on_stopped is not None:
            self.on_stopped(group, replica.stopped)

    def on_version_in_force(self, kind: str, version: int) -> None:
        """A replica applies by that version."""
        if version > self.versions.get(kind, 0):
            self.versions[kind] = version
            if self.on_version is not None:
                self.on_version(kind, version)

    def floor_of(self, kind: str) -> int:
        """Returns the machine version of a kind that every node of the cluster supports."""
        return supported.floor_of(self.versions, kind)

    def newest_of(self, kind: str, nodes: Iterable[int]) -> int:
        """Returns the newest machine version of a kind that all of these nodes support, by what
        they said when they were linked last; a group that has them as members soon applies by it.
        A node that was not linked yet supports what every node does."""
        floor = self.floor_of(kind)
        if self.config.hold_versions:
            return floor
        said = (
            supported.supports() if node == self.node else self.supports.get(node, {})
            for node in nodes
        )
        known = (supported.newest_of(each, kind) for each in said)
        return max(floor, min(known, default=floor))

    def replica(self, group: int) -> Replica | None:
        """Returns the local replica, if any."""
        return self.groups.get(group)

    # Client side.

    def builder_of(self, group: int) -> CommandBuilder:
        """Returns the open batch of a group on this node. Raises KeyError for an unknown group."""
        replica = self.groups.get(group)
        return replica.builder if replica is not None else self.watched[group].builder

    def leader_of(self, group: int) -> int | None:
        """Node that leads the group, as far as known here."""
        replica = self.groups.get(group)
        if replica is not None:
            return replica.serving_leader
        watched = self.watched.get(group)
        return (watched.leader or None) if watched is not None else None

    def is_replica_live(self, group: int, node: int) -> bool:
        """Leader's view: has that node a running replica that serves its own sessions?"""
        replica = self.groups.get(group)
        return replica is not None and replica.is_live(node)

    def read_entry(self, group: int, index: int) -> Entry:
        """Returns an entry of the local log. Raises EntryGone, StorageFault, KeyError."""
        entry: Entry = self._readable(group).log.entry(index)
        return entry

    def read_span(self, group: int, index: int, max_bytes: int) -> list[Entry]:
        """Returns an entry of the local log and some that follow it (`GroupLog.span`)."""
        found: list[Entry] = self._readable(group).log.span(index, max_bytes)
        return found

    def _readable(self, group: int) -> Replica:
        # What was handed out before a replica stopped may still have to be read.
        replica = self.groups.get(group)
        return replica if replica is not None else self.stopped[group]

    def segment_at(self, group: int, index: int) -> tuple[Segment, FilePlace] | None:
        """Returns the place of an entry in a file that does not change (`GroupLog.segment_at`)."""
        return self._readable(group).log.segment_at(index)

    # Links.

    def on_link_up(self, node: int, incarnation: int, supports: Supports | None = None) -> None:
        """The link to a node is up, the node answers.

        Args:
            supports: what it says of the machine versions that it supports.
        """
        self.incarnations[node] = incarnation
        self.supports[node] = supports or {}
        self._reach(node)

    def on_link_down(self, node: int, *, definite: bool) -> None:
        """The link broke. `definite`: the process is known to be gone."""
        if definite:
            self.gone.add(node)
        self._lose(node)

    def on_suspect(self, node: int) -> None:
        """The node does not answer."""
        self._lose(node)

    def on_unsuspect(self, node: int) -> None:
        """The node answers again."""
        self._reach(node)

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        self.now = self.clock.monotonic_ms()
        self.capacity.on_room(node)
        self.wake()

    def _fail(self, item: Waiting, error: Exception) -> None:
        if item not in self.groups.values() and item not in self.watched.values():
            raise error
        self.stop_failed(cast("Replica | Watched", item), error)

    def _reach(self, node: int) -> None:
        self.now = self.clock.monotonic_ms()
        self.reachable.add(node)
        self.gone.discard(node)

        def reach(replica: Replica) -> None:
            if replica.concerns(node):
                replica.on_reachable(node)

        def look(watched: Watched) -> None:
            if watched.leader == node:
                watched.sink.on_leader(watched.group, node, watched.term)
            elif watched.leader == 0 and node in watched.members:
                watched.ask_leader()

        run_each(list(self.groups.values()), reach, self.stop_failed)
        run_each(list(self.watched.values()), look, self.stop_failed)
        self.wake()

    def _lose(self, node: int) -> None:
        self.now = self.clock.monotonic_ms()
        self.reachable.discard(node)
        self.capacity.on_lost(node)

        def lose(replica: Replica) -> None:
            if replica.concerns(node):
                replica.on_unreachable(node)

        def look(watched: Watched) -> None:
            if watched.leader == node:
                watched.forget_leader()
                watched.ask_leader()

        run_each(list(self.groups.values()), lose, self.stop_failed)
        run_each(list(self.watched.values()), look, self.stop_failed)
        self.wake()

    # Flow (ADR 0025).

    def incarnation_of(self, node: int) -> int:
        """Incarnation of a node that was heard of; 0 = never."""
        return self.incarnation if node == self.node else self.incarnations.get(node, 0)

    # Rounds.

    def wake(self) -> None:
        """Asks for an `end_of_round`."""
        if not self._woken:
            self._woken = True
            if self.on_dirty is not None:
                self.on_dirty()

    def mark_dirty(self, item: Replica | Watched) -> None:
        """The item's builder has commands."""
        self._dirty.append(item)
        if not self._woken:
            self.wake()

    def mark_apply(self, replica: Replica) -> None:
        """The replica's commit index is ahead of what it applied."""
        if not replica.applying.due:
            replica.applying.due = True
            self._apply.append(replica)
            if not self._woken:
                self.wake()

    def mark_notice(self, replica: Replica) -> None:
        """Nodes with sessions should hear of the commit index."""
        self._notices.append(replica)

    def _on_full(self, item: Replica | Watched) -> None:
        self.now = self.clock.monotonic_ms()
        run_each((item,), self._seal, self.stop_failed)

    def _seal(self, item: Replica | Watched) -> None:
        if not item.builder.used:
            return
        if isinstance(item, Replica):
            replica = item
            if not replica.dead:
                replica.seal()
            return
        watched = item
        if watched.leader and watched.leader in self.reachable:
            data = watched.builder.take_forward(watched.group, watched.term)
            self.forwarding.forward(watched, watched.leader, watched.term, data)
        else:
            watched.builder.discard_unsent()
            watched.wanted = True

    def end_of_round(self) -> None:
        """Seals, flushes, applies, tells; until nothing is dirty, at most a few times."""
        self.now = self.clock.monotonic_ms()
        try:
            self._work_through()
        finally:
            # Also after an error in one group: the others must be woken again.
            self._woken = False
            if self._has_work():
                self.wake()

    def stop_failed(self, item: Replica | Watched, error: Exception) -> None:
        """An error of our own in one group: its replica stops, the others go on. A group without
        one forgets its leader, and so sends again what is pending."""
        if isinstance(item, Replica):
            item.fail(item.core.applied_index, "after entry", error)
            return
        lines = "".join(traceback.format_exception(error))
        self.note("raft.watch_failed", group=item.group, reason=repr(error), error=lines)
        item.forget_leader()

    def _has_work(self) -> bool:
        return bool(self._dirty or self._apply or self._damaged or self._queued)

    def _work_through(self) -> None:
        for _ in range(ROUNDS_MAX):
            self._woken = True
            if self._damaged:
                self._damaged = False
                run_each(list(self.groups.values()), _on_damage, self.stop_failed)
            if self._dirty:
                dirty = self._dirty
                self._dirty = []
                run_each(dirty, self._seal, self.stop_failed)
            # Followers first: their flush is the longer way to a majority, the own runs beside it.
            if self.after_seal is not None:
                self.after_seal()
            self._queued = False
            self._kick()
            if self.after_seal is not None:
                # A flush that was done at once: the leader waits for the answer, nobody for what
                # is applied.
                self.after_seal()
            if self._apply:
                due = self._apply
                self._apply = []
                run_each(due, _apply, self.stop_failed)
            if not self._has_work():
                break
        if self._notices:
            notices = self._notices
            self._notices = []
            run_each(notices, _send_notices, self.stop_failed)

    def tick(self) -> None:
        """About every 100 ms: looks after groups with something outstanding."""
        if not self.active:
            return
        self.now = self.clock.monotonic_ms()
        run_each([*self._active(self.groups)], self._tick_replica, self.stop_failed)
        run_each([*self._active(self.watched)], self._tick_watched, self.stop_failed)

    def _active(self, items: dict[int, Item]) -> list[Item]:
        return [items[group] for group in self.active if group in items]

    def _tick_replica(self, replica: Replica) -> None:
        if not replica.tick(self.now):
            self.active.discard(replica.group)

    def _tick_watched(self, watched: Watched) -> None:
        if watched.leader:
            self.active.discard(watched.group)
        elif self.now - watched.asked_at >= ASK_LEADER_MS:
            watched.ask_leader()

    # Administration.

    def add_member(self, group: int, node: int, *, voter: bool = True) -> bool:
        """Leader: adds a member; False = not leader, or another change is under way."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.changes.add(node, voter=voter)

    def stand_in(self, group: int, node: int, source: int) -> bool:
        """Leader: adds a learner that will take the place of a member (`replace_member`)."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.changes.stand_in(node, source)

    def set_vote(self, group: int, node: int, *, votes: bool) -> bool:
        """Leader: gives a member a vote, once it has caught up, or takes it away; False = not
        leader, no member, or another change is under way."""
        replica = self.groups.get(group)
        if replica is None or not replica.is_leader:
            return False
        return replica.changes.set_vote(node, votes=votes)

    def member_refusal(self, group: int, node: int) -> str:
        """Returns why the group can't take in that node, as far as this node knows; "" = it can."""
        replica = self.groups.get(group)
        return replica.changes.refusal_of(node) if replica is not None else ""

    def remove_member(self, group: int, node: int) -> bool:
        """Leader: removes a member; False = not leader, last voter, or a change is under way."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.changes.remove(node)

    def replace_member(self, group: int, node: int, by: int = 0) -> bool:
        """Leader: like `remove_member`, with another node in its place unless `by` is 0."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.changes.replace(node, by)

    def transfer_leadership(self, group: int, to: int = 0) -> bool:
        """Leader: hands over to `to`, or (0) to the reachable voter that is furthest."""
        replica = self.groups.get(group)
        if replica is None or not replica.is_leader:
            return False
        if to == 0:
            near = [
                (p.match, p.node)
                for p in replica.core.progress.values()
                if p.connected and p.voter and not p.silent
            ]
            if not near:
                return False
            to = max(near)[1]
        return replica.transfer(to)

    def transfer_all(self) -> None:
        """Graceful stop: hands every leadership away."""
        for group, replica in list(self.groups.items()):
            if replica.is_leader:
                self.transfer_leadership(group)
        self.wake()

    def status(self, group: int) -> GroupStatus:
        """Raises KeyError when there is no replica here."""
        replica = self._readable(group)
        core = replica.core
        log = replica.log
        return GroupStatus(
            group=group,
            role="stopped" if replica.stopped else replica.role,
            leader=core.leader,
            term=core.term,
            commit_index=core.commit_index,
            last_applied=replica.last_applied,
            last_index=log.last_index,
            written_index=log.written_index,
            snapshot_index=log.snapshot_index,
            voters=replica.members,
            learners=replica.learners,
            match={node: progress.match for node, progress in core.progress.items()},
            version=replica.version,
            stopped=replica.stopped,
        )

    def on_membership(self, replica: Replica, membership: Membership) -> None:
        """A membership entry was applied."""
        if self.on_membership_changed is not None:
            self.on_membership_changed(replica.group, membership)

    # Services for replicas.

    def plan(self, group: int) -> GroupPlan | None:
        """Asked by storage when it empties a WAL file."""
        replica = self.groups.get(group)
        return replica.snapshots.plan() if replica is not None else None

    def needed_from(self, group: int) -> int:
        """Asked by storage: bodies of the log below that index need not stay in memory."""
        replica = self.groups.get(group)
        return replica.snapshots.needed_from() if replica is not None else 0

    def ask_leader(self, node: int, group: int, *, wanted: bool) -> None:
        """Asks a member which node leads a group; `wanted`: commands wait for it."""
        self.intake.send_raft(node, group, (LEADER_IS, 0, int(wanted)))

    def on_queued(self) -> None:
        """Something waits in the log, be it an entry, a vote or a mark: the round's end sends it to
        the disk. Said by the storage, so that nobody who logs has to think of it."""
        self._queued = True
        if not self._woken:
            self.wake()

    def on_damaged(self, damage: Damage) -> None:
        """A read found damage, perhaps in the middle of an apply: seen to when the round ends."""
        self._damaged = True
        self.wake()

    def on_log_failed(self, group: int, error: Exception) -> None:
        """A replica failed when it was told that something is on disk."""
        replica = self.groups.get(group)
        if replica is None:
            raise error
        self.stop_failed(replica, error)

    def next_number(self) -> int:
        """Returns a number for a snapshot transfer or a start of a replica, never used on this
        node."""
        self._numbers += 1
        return self.incarnation << 24 | self._numbers

    def note(self, event: str, **fields: object) -> None:
        """Something for the log file."""
        if self.on_note is not None:
            self.on_note(event, fields)


def _on_damage(replica: Replica) -> None:
    replica.damage.on_damage()


def _apply(replica: Replica) -> None:
    if not replica.dead:
        replica.applying.apply()


def _send_notices(replica: Replica) -> None:
    if not replica.dead:
        replica.sender.send_notices()
