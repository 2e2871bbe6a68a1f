# cython: annotation_typing=False
"""All Raft groups of one node, and everything that happens to them in a loop round.

Frames, link events, flush completions and new commands only mark groups as dirty; `end_of_round`
then seals batches, starts the flush, applies what is committed and sends commit notices. A group
that nobody marks costs nothing: there is no per-group timer or heartbeat.

`watch_group` is for a node that has clients of a group but no replica of it: it learns the
leader by asking the members, and forwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from convoymq.groups.effect_sink import EffectSink
from convoymq.groups.replica import LEADER_IS, Replica
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, Entry, frame, frame_header
from convoymq.model.clock import Clock
from convoymq.model.errors import Misuse, PeerError
from convoymq.replication.machine import Machine
from convoymq.replication.raft.core import RaftCore
from convoymq.replication.raft.membership import Learner, Membership
from convoymq.replication.raft.types import RaftConfig
from convoymq.replication.versions import Supports
from convoymq.storage.types import Damage, GroupPlan
from convoymq.transport.interfaces import Transport

#: Frames kept for a group that is not created here yet: members learn of it at different times.
EARLY_FRAMES_MAX = 64
EARLY_GROUPS_MAX = 4096
ROUNDS_MAX = 8
ASK_LEADER_MS = 200
IDLE_ELECTIONS_MS = 10
IDLE_ELECTIONS = 10
"""Groups that nobody uses elect a new leader so many at a time, at least so far apart: thousands at
once would keep those waiting that are in use. A node that is late begins fewer."""
OPENING_MS = 10
"""New groups that nobody has used yet open their terms together, so much later."""


class HostCounters:
    """What happened so far on this node, over all groups."""

    __slots__ = (
        "bytes_appended",
        "elections",
        "entries_appended",
        "forwards_stale",
        "leader_changes",
        "replicas_stopped",
        "snapshots_installed",
        "snapshots_sent",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    bytes_appended: int
    elections: int
    entries_appended: int
    forwards_stale: int
    leader_changes: int
    replicas_stopped: int
    snapshots_installed: int
    snapshots_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A look at one group from this node."""

    group: int
    role: str
    leader: int
    term: int
    commit_index: int
    last_applied: int
    last_index: int
    written_index: int
    snapshot_index: int
    voters: tuple[int, ...]
    learners: tuple[int, ...]
    match: dict[int, int]
    """Leader: last index known to be durable on each follower."""
    version: int
    """Machine version in force."""
    stopped: str
    """Why the replica takes part no more, or ""."""


class _Line:
    """Who waits until a node takes bulk again, in order."""

    __slots__ = ("items", "known", "room_at")

    def __init__(self, now: int) -> None:
        self.items: deque[Any] = deque()
        self.known: set[Any] = set()
        self.room_at = now
        """When there was room last, or the wait began."""


class Watched:
    """A group without a replica here."""

    __slots__ = (
        "asked_at", "builder", "group", "host", "late", "leader", "members", "sink", "term", "turn",
        "wanted",
    )  # fmt: skip

    def __init__(
        self, host: ReplicaHost, group: int, members: Sequence[int], sink: EffectSink
    ) -> None:
        self.host = host
        self.group = group
        self.members = tuple(members)
        self.sink = sink
        self.builder: CommandBuilder = CommandBuilder()
        self.leader = 0
        self.term = 0
        self.asked_at = 0
        self.turn = 0
        #: Commands wait for a leader.
        self.wanted = False
        #: Commands for the leader that wait for room: (node, term, frame).
        self.late: deque[tuple[int, int, bytes]] = deque()

    def on_room(self, node: int) -> None:
        """The node takes bulk again."""
        if self.host.watched.get(self.group) is self:
            self.host.send_late(self, node, self.leader, self.term)

    def on_lost(self, _node: int) -> None:
        """The node is away."""
        self.late.clear()


class ReplicaHost:
    """See the module docstring. Single threaded; nothing here blocks but reads of old entries."""

    def __init__(
        self,
        *,
        node: int,
        incarnation: int,
        storage: Any,
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
        self.on_note: Callable[[str, dict[str, Any]], None] | None = None
        self.on_membership_changed: Callable[[int, Membership], None] | None = None
        #: (group, reason): a replica stopped for good.
        self.on_stopped: Callable[[int, str], None] | None = None
        #: (kind, version): a version is in force that was not before on this node.
        self.on_version: Callable[[str, int], None] | None = None
        #: Called after sealing, before applying: lets the shell write to the links at once.
        self.after_seal: Callable[[], None] | None = None
        #: Nodes whose link takes no bulk.
        self.full = transport.full
        self._lines: dict[int, _Line] = {}
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        #: Groups that were here and are no more, the last ones: their late frames are dropped.
        self._removed: dict[int, None] = {}
        #: How many replicas were removed so far.
        self.removals = 0
        self._dirty: list[Replica | Watched] = []
        self._apply: list[Replica] = []
        self._notices: list[Replica] = []
        #: Replicas that hold back entries for deferred followers, since when.
        self._holding: list[Replica] = []
        self._holding_since = 0
        self._holding_timer: Any = None
        self.release_due = False
        #: Replicas of groups that nobody uses whose election waits for its turn.
        self._deferred: deque[Replica] = deque()
        #: Founders whose term is not opened yet.
        self._openings: list[Replica] = []
        #: Replicas whose open batch waits to be coalesced.
        self._batches_due: list[Replica] = []
        self._woken = False
        self._numbers = 0
        self._damaged = False
        #: Something was logged since the last kick.
        self._queued = False
        self._kick: Callable[[], None] = storage.kick
        storage.planner = self.plan
        storage.needed_from = self.needed_from
        storage.on_queued = self._on_queued
        storage.on_damaged = self._on_damaged

    # Groups.

    def create_group(
        self,
        group: int,
        members: Sequence[int],
        machine: Machine,
        sink: EffectSink,
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
        if group in self._removed:
            # What the replica of this life had promised is gone with its data: it may neither lead
            # term 1 again nor vote as if it never had.
            wiped = True
            del self._removed[group]
        watched = self.watched.pop(group, None)
        builder = watched.builder if watched is not None else CommandBuilder()
        log = self.storage.open_group(group)
        fresh = not (log.last_index or log.snapshot_index or log.term or log.voted_for)
        voters = frozenset(n for n in members if not learner or n != self.node)
        membership = Membership(voters, (Learner(self.node, 1 << 62),) if learner else ())
        replica = Replica(self, group, log, machine, sink, builder, membership)
        self.groups[group] = replica
        builder.on_first = lambda: self.mark_dirty(replica)
        builder.on_full = lambda: self._on_full(replica)
        if builder.used:
            self.mark_dirty(replica)
        new = wiped or learner
        campaign = fresh and not new and leader_hint == self.node
        if founder[0] and not new:
            replica.found(founder[0], fresh and founder == (self.node, self.incarnation))
        replica.start(campaign=campaign, new=new)
        for node, data in self._early.pop(group, ()):
            self.on_frame(node, data)
        return replica

    def watch_group(self, group: int, members: Sequence[int], sink: EffectSink) -> None:
        """Makes `builder_of` work for a group without a replica here."""
        if group in self.groups:
            return
        watched = self.watched.get(group)
        if watched is None:
            watched = self._watch(Watched(self, group, members, sink))
        watched.members = tuple(members)
        self._ask_leader(watched)

    def _watch(self, watched: Watched) -> Watched:
        builder = watched.builder
        builder.on_first = lambda: self.mark_dirty(watched)
        builder.on_full = lambda: self._on_full(watched)
        if builder.used:
            self.mark_dirty(watched)
        self.watched[watched.group] = watched
        return watched

    def leave_group(self, group: int, members: Sequence[int]) -> None:
        """This node is no member any more: deletes its data and watches the group.

        Its clients go on: they hold the builder of the replica, which the watched group takes over.
        """
        replica = self.groups.get(group) or self.stopped[group]
        watched = Watched(self, group, members, replica.sink)
        watched.builder = replica.builder
        self.remove_group(group)
        self._ask_leader(self._watch(watched))
        watched.sink.on_replica_gone()

    def unwatch_group(self, group: int) -> None:
        """Ends `watch_group`."""
        self.watched.pop(group, None)

    def remove_group(self, group: int) -> None:
        """Ends the membership and deletes the group's data for ever."""
        replica = self.groups.pop(group, None) or self.stopped.pop(group, None)
        self._early.pop(group, None)
        self.watched.pop(group, None)
        self.active.discard(group)
        if replica is not None:
            replica.stop()
            self.removals += 1
            self._removed[group] = None
            if len(self._removed) > EARLY_GROUPS_MAX:
                del self._removed[next(iter(self._removed))]
        self.storage.remove_group(group)
        self.wake()

    def on_replica_stopped(self, replica: Replica) -> None:
        """A replica has stopped for good: its data stay, its clients are served by the others."""
        group = replica.group
        self.groups.pop(group, None)
        self._early.pop(group, None)
        self.active.discard(group)
        self.stopped[group] = replica
        self.counters.replicas_stopped += 1
        others = sorted(replica.core.members.nodes - {self.node})
        watched = Watched(self, group, others, replica.sink)
        watched.builder = replica.builder
        self._ask_leader(self._watch(watched))
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

    def replica(self, group: int) -> Replica | None:
        """The local replica, if any."""
        return self.groups.get(group)

    # Client side.

    def builder_of(self, group: int) -> CommandBuilder:
        """The open batch of a group on this node. Raises KeyError for an unknown group."""
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
        """An entry of the local log. Raises EntryGone, StorageFault, KeyError."""
        entry: Entry = self._readable(group).log.entry(index)
        return entry

    def read_span(self, group: int, index: int, max_bytes: int) -> list[Entry]:
        """An entry of the local log and some that follow it (`GroupLog.span`)."""
        found: list[Entry] = self._readable(group).log.span(index, max_bytes)
        return found

    def _readable(self, group: int) -> Replica:
        # What was handed out before a replica stopped may still have to be read.
        replica = self.groups.get(group)
        return replica if replica is not None else self.stopped[group]

    def segment_at(self, group: int, index: int) -> Any:
        """Where an entry lies in a file that does not change (`GroupLog.segment_at`)."""
        return self._readable(group).log.segment_at(index)

    # Input.

    def on_frame(self, node: int, data: bytes) -> None:
        """Takes a link frame from another node. Malformed frames are noted and dropped."""
        try:
            self._take(node, data)
        except PeerError as error:
            self.note("raft.frame_malformed", node=node, error=error.text)

    def _take(self, node: int, data: bytes) -> None:
        _, kind, flags, group, a, b, c, d = frame_header(data)
        replica = self.groups.get(group)
        if replica is not None:
            if kind == batch.FRAME_APPEND:
                replica.on_append(node, data, a, b, c, d)
            elif kind == batch.FRAME_APPEND_REPLY:
                replica.on_append_reply(node, flags, a, b, c)
            elif kind == batch.FRAME_FORWARD:
                self._on_forward(replica, node, data, a)
            elif kind == batch.FRAME_COMMIT:
                replica.on_commit(node, a, d)
            elif kind == batch.FRAME_RAFT:
                self._on_raft(replica, node, data)
            else:
                replica.sink.on_link_frame(node, kind, group, a, b, c, d, data[batch.HEADER_SIZE :])
            return
        if kind == batch.FRAME_FORWARD:
            # Without a word the sender would take this node for the leader for ever.
            self.send_raft(node, group, (LEADER_IS, a, 0))
            return
        watched = self.watched.get(group)
        if watched is not None:
            if kind in (batch.FRAME_APPLIED, batch.FRAME_DELIVER):
                watched.sink.on_link_frame(node, kind, group, a, b, c, d, data[batch.HEADER_SIZE :])
            elif kind == batch.FRAME_RAFT:
                self._on_watched(watched, node, data)
            elif kind == batch.FRAME_APPEND:
                self._keep_early(group, node, data)
            return
        if group not in self._removed and kind in (batch.FRAME_APPEND, batch.FRAME_RAFT):
            self._keep_early(group, node, data)

    def _keep_early(self, group: int, node: int, data: bytes) -> None:
        if group in self.stopped:
            return
        kept = self._early.get(group)
        if kept is None:
            if len(self._early) >= EARLY_GROUPS_MAX:
                return
            kept = self._early[group] = []
        if len(kept) < EARLY_FRAMES_MAX:
            kept.append((node, data))

    def _on_forward(self, replica: Replica, node: int, data: bytes, term: int) -> None:
        """Takes commands that were sent to the leader of a term. A leader of another one drops
        them: its sender resends all that is pending once it knows this leader, and a copy may have
        been on its way for long."""
        if replica.is_leader:
            if term != replica.term:
                self.counters.forwards_stale += 1
                self.note(
                    "raft.forward_stale",
                    group=replica.group, node=node, term=replica.term, sent_in=term,
                )  # fmt: skip
                # A watcher learns the leader from this, a replica from the leader's own frames.
                self._tell_leader(replica, node)
                replica.probe_member(node)
                return
            try:
                replica.builder.adopt(data, batch.HEADER_SIZE, len(data), replica.allowed)
            except ValueError as error:
                self.note(
                    "raft.forward_malformed", group=replica.group, node=node, error=str(error)
                )
            return
        self._tell_leader(replica, node)
        replica.campaign()

    def _tell_leader(self, replica: Replica, node: int) -> None:
        leader = replica.established_leader
        self.send_raft(node, replica.group, (LEADER_IS, replica.term, leader))

    def _decode(self, node: int, group: int, data: bytes) -> list[Any] | None:
        try:
            message = msgspec.msgpack.decode(memoryview(data)[batch.HEADER_SIZE :])
        except msgspec.DecodeError as error:
            message = str(error)
        if (
            isinstance(message, list)
            and len(message) >= 2
            and isinstance(message[0], int)
            and isinstance(message[1], int)
        ):
            return message
        self.note("raft.message_malformed", group=group, node=node, error=repr(message)[:200])
        return None

    def _on_raft(self, replica: Replica, node: int, data: bytes) -> None:
        message = self._decode(node, replica.group, data)
        if message is None:
            return
        if message[0] == LEADER_IS and message[1] == 0:
            self._tell_leader(replica, node)
            if len(message) > 2 and message[2]:
                replica.campaign()
            return
        replica.on_message(node, message)

    def _on_watched(self, watched: Watched, node: int, data: bytes) -> None:
        message = self._decode(node, watched.group, data)
        if message is None:
            return
        if message[0] != LEADER_IS or len(message) != 3:
            self._keep_early(watched.group, node, data)
            return
        _, term, leader = message
        if leader == 0:
            if node == watched.leader:
                # It got commands, and does not lead any more.
                self._forget_leader(watched)
            return
        if term < watched.term or (leader, term) == (watched.leader, watched.term):
            return
        watched.term = term
        if leader not in self.reachable:
            # The one that told may not have noticed yet, and later nobody has to tell.
            self._forget_leader(watched)
            return
        watched.leader = leader
        watched.wanted = False
        watched.sink.on_leader(watched.group, leader, term)

    def _forget_leader(self, watched: Watched) -> None:
        """The leader is not known (any more); the ticks ask for it."""
        self.active.add(watched.group)
        if watched.leader:
            watched.leader = 0
            watched.sink.on_leader(watched.group, None, watched.term)

    def _ask_leader(self, watched: Watched) -> None:
        near = [n for n in watched.members if n in self.reachable]
        self.active.add(watched.group)
        watched.asked_at = self.now
        if near:
            watched.turn += 1
            node = near[watched.turn % len(near)]
            self.send_raft(node, watched.group, (LEADER_IS, 0, int(watched.wanted)))

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
        """It does again."""
        self._reach(node)

    def _reach(self, node: int) -> None:
        self.now = self.clock.monotonic_ms()
        self.reachable.add(node)
        self.gone.discard(node)
        for replica in list(self.groups.values()):
            if replica.concerns(node):
                replica.on_reachable(node)
        for watched in self.watched.values():
            if watched.leader == node:
                watched.sink.on_leader(watched.group, node, watched.term)
            elif watched.leader == 0 and node in watched.members:
                self._ask_leader(watched)
        self.wake()

    def _lose(self, node: int) -> None:
        self.now = self.clock.monotonic_ms()
        self.reachable.discard(node)
        line = self._lines.pop(node, None)
        if line is not None:
            # Clients send again what was for the leader, when they know one.
            for item in line.items:
                item.on_lost(node)
        for replica in list(self.groups.values()):
            if replica.concerns(node):
                replica.on_unreachable(node)
        for watched in self.watched.values():
            if watched.leader == node:
                self._forget_leader(watched)
                self._ask_leader(watched)
        self.wake()

    # Flow (ADR 0025).

    def await_room(self, node: int, item: Any) -> None:
        """Has `item.on_room(node)` called when a node that is in `full` takes bulk again, once;
        `item.on_lost(node)` instead when it is lost."""
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _Line(self.clock.monotonic_ms())
        if item not in line.known:
            line.known.add(item)
            line.items.append(item)

    def on_room(self, node: int) -> None:
        """A node that was in `full` takes bulk: whoever waits sends in turn, until it is full."""
        line = self._lines.get(node)
        if line is None:
            return
        line.room_at = self.now = self.clock.monotonic_ms()
        while line.items and node not in self.full:
            item = line.items.popleft()
            line.known.discard(item)
            item.on_room(node)
        if not line.items and self._lines.get(node) is line:
            del self._lines[node]
        self.wake()

    def is_held_up(self, node: int) -> bool:
        """Whether the link to the node is what others wait for: it is full, but goes on."""
        line = self._lines.get(node)
        return line is not None and self.now - line.room_at < self.config.quorum_timeout_ms

    def forward(self, item: Replica | Watched, node: int, term: int, data: bytes) -> None:
        """Sends a FORWARD frame to the leader, behind those that wait."""
        late = item.late
        if late and late[0][:2] != (node, term):
            # For a former leader: clients have sent it all again.
            late.clear()
        if late or node in self.full:
            late.append((node, term, data))
            self.await_room(node, item)
        else:
            self.transport.send(node, data)

    def send_late(self, item: Replica | Watched, node: int, leader: int, term: int) -> None:
        """Sends FORWARD frames that waited for a node, unless another one leads by now."""
        late = item.late
        while late and late[0][0] == node and node not in self.full:
            _, sent_in, data = late.popleft()
            if (leader, term) == (node, sent_in):
                self.transport.send(node, data)
        if late and late[0][0] == node:
            self.await_room(node, item)

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
        if not replica.apply_due:
            replica.apply_due = True
            self._apply.append(replica)
            if not self._woken:
                self.wake()

    def mark_notice(self, replica: Replica) -> None:
        """Nodes with sessions should hear of the commit index."""
        self._notices.append(replica)

    def hold(self, replica: Replica) -> None:
        """The replica holds entries back; all that do are released together."""
        replica.holding = True
        if not self._holding:
            self._holding_since = self.now
            self._holding_timer = self.clock.call_later(
                2 * self.config.deferral_ms, self._held_long
            )
        self._holding.append(replica)

    def hold_batch(self, replica: Replica) -> None:
        """The replica's open batch waits for commands to be coalesced with, but not for long."""
        if not replica.batch_due:
            replica.batch_due = True
            if not self._batches_due:
                self.clock.call_later(self.config.deferral_ms, self._on_batches_due)
            self._batches_due.append(replica)

    def _on_batches_due(self) -> None:
        due = self._batches_due
        self._batches_due = []
        for replica in due:
            replica.batch_due = False
            if replica.builder.held and not replica.dead:
                self.mark_dirty(replica)

    def release_between(self) -> None:
        """All that a replica appended is committed: a good time for what was held back, its flush
        disturbs nobody who waits. The timer is for when there is none."""
        if self.now - self._holding_since >= self.config.deferral_ms:
            self.release_due = True

    def hold_opening(self, replica: Replica) -> None:
        """The founder of a new group opens its term when it is used, or soon."""
        if not self._openings:
            self.clock.call_later(OPENING_MS, self._open_terms)
        self._openings.append(replica)

    def _open_terms(self) -> None:
        self.now = self.clock.monotonic_ms()
        due = self._openings
        self._openings = []
        for replica in due:
            if not replica.dead:
                replica.open_term()

    def defer_election(self, replica: Replica) -> None:
        """Puts the election of a group that nobody uses at the end of the line."""
        if not self._deferred:
            self.clock.call_later(IDLE_ELECTIONS_MS, self._begin_elections)
        self._deferred.append(replica)

    def _begin_elections(self) -> None:
        begun = 0
        while self._deferred and begun < IDLE_ELECTIONS:
            begun += self._deferred.popleft().begin_election()
        if self._deferred:
            self.clock.call_later(IDLE_ELECTIONS_MS, self._begin_elections)

    def _held_long(self) -> None:
        self.now = self.clock.monotonic_ms()
        self.release()
        self.wake()

    def release(self) -> None:
        """Sends what was held back. When `release_due`, the node calls this after it has told its
        clients what is committed: who gets it may take the processor at once."""
        self.release_due = False
        self._holding_timer.cancel()
        holding = self._holding
        self._holding = []
        for replica in holding:
            if not replica.dead:
                replica.release()

    def _on_full(self, item: Replica | Watched) -> None:
        self._seal(item)

    def _seal(self, item: Replica | Watched) -> None:
        if isinstance(item, Replica):
            replica = item
            if not replica.dead:
                replica.seal()
            return
        watched = item
        if watched.leader and watched.leader in self.reachable:
            data = watched.builder.take_forward(watched.group, watched.term)
            self.forward(watched, watched.leader, watched.term, data)
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

    def _has_work(self) -> bool:
        return bool(self._dirty or self._apply or self._damaged or self._queued)

    def _work_through(self) -> None:
        for _ in range(ROUNDS_MAX):
            self._woken = True
            if self._damaged:
                self._damaged = False
                for replica in list(self.groups.values()):
                    replica.on_damage()
            if self._dirty:
                dirty = self._dirty
                self._dirty = []
                for item in dirty:
                    if item.builder.used:
                        self._seal(item)
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
                for replica in due:
                    if not replica.dead:
                        replica.apply()
            if not self._has_work():
                break
        if self._notices:
            notices = self._notices
            self._notices = []
            for replica in notices:
                if not replica.dead:
                    replica.send_notices()

    def tick(self) -> None:
        """About every 100 ms: looks after groups with something outstanding."""
        if not self.active:
            return
        self.now = self.clock.monotonic_ms()
        for group in list(self.active):
            replica = self.groups.get(group)
            if replica is not None:
                if not replica.tick(self.now):
                    self.active.discard(group)
                continue
            watched = self.watched.get(group)
            if watched is None or watched.leader:
                self.active.discard(group)
            elif self.now - watched.asked_at >= ASK_LEADER_MS:
                self._ask_leader(watched)

    # Administration.

    def add_member(self, group: int, node: int, *, voter: bool = True) -> bool:
        """Leader: adds a member; False = not leader, or another change is under way."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.add_member(node, voter=voter)

    def member_refusal(self, group: int, node: int) -> str:
        """Why the group can't take in that node, as far as this node knows; "" = it can."""
        replica = self.groups.get(group)
        return replica.member_refusal(node) if replica is not None else ""

    def remove_member(self, group: int, node: int) -> bool:
        """Leader: removes a member; False = not leader, last voter, or a change is under way."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.remove_member(node)

    def replace_member(self, group: int, node: int, by: int = 0) -> bool:
        """Leader: like `remove_member`, with another node in its place unless `by` is 0."""
        replica = self.groups.get(group)
        return replica is not None and replica.is_leader and replica.replace_member(node, by)

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
        return replica.plan() if replica is not None else None

    def needed_from(self, group: int) -> int:
        """Asked by storage: bodies of the log below that index need not stay in memory."""
        replica = self.groups.get(group)
        return replica.needed_from() if replica is not None else 0

    def send_raft(self, node: int, group: int, message: tuple[int, ...]) -> None:
        """Sends a RAFT frame for a group without a replica that could."""
        body = msgspec.msgpack.encode(message)
        self.transport.send(node, frame(batch.FRAME_RAFT, 0, group, 0, 0, 0, 0, body))

    def _on_queued(self) -> None:
        """Something waits in the log, be it an entry, a vote or a mark: the round's end sends it to
        the disk. Said by the storage, so that nobody who logs has to think of it."""
        self._queued = True
        if not self._woken:
            self.wake()

    def _on_damaged(self, damage: Damage) -> None:
        """A read found damage, perhaps in the middle of an apply: seen to when the round ends."""
        self._damaged = True
        self.wake()

    def next_number(self) -> int:
        """A number for a snapshot transfer or the life of a replica, never used on this node."""
        self._numbers += 1
        return self.incarnation << 24 | self._numbers

    def note(self, event: str, **fields: Any) -> None:
        """Something for the log file."""
        if self.on_note is not None:
            self.on_note(event, fields)
