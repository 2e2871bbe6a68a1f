"""One member of one Raft group: joins the core, the log and the machine.

Who does what: the core decides, the log keeps, the machine computes; this class carries entries
between them and the transport. It has no socket, file or clock of its own (`interfaces`).

Steady path, one call each per entry: `seal` (leader: batch -> entry -> log and followers),
`on_append` (follower), `on_append_reply` and `on_written` (commit), `apply`.

Durability: a follower acknowledges `core.ack_index()`, which never passes what its own disk holds;
the leader counts itself by the same rule; votes leave after they are on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from convoymq.cluster.interfaces import EFFECT_TIMER as MACHINE_TIMER
from convoymq.cluster.interfaces import EffectSink, Machine
from convoymq.cluster.draft_snapshotting import SnapshotReceiver, SnapshotSender
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, Entry, frame, split_entries
from convoymq.model.errors import StorageFault, check
from convoymq.replication.raft import draft_core as raft
from convoymq.replication.raft.draft_core import PROBE, REPLICATE, SNAPSHOT, Progress, RaftCore
from convoymq.replication.raft.draft_types import (
    LEADER,
    ROLE_NAMES,
    LeaderIs,
    Membership,
    Message,
    SnapshotAck,
    SnapshotBegin,
    SnapshotChunk,
    encode,
)
from convoymq.storage.types import EntryGone, GroupPlan, Snapshot

if TYPE_CHECKING:
    from convoymq.cluster.draft_host import ReplicaHost
    from convoymq.storage.log import GroupLog

HEADER = batch.HEADER_SIZE
NOOP = batch.ENTRY_NOOP
COMMANDS = batch.ENTRY_COMMANDS
MEMBERSHIP = batch.ENTRY_MEMBERSHIP


class Replica:
    """A group's member on this node. Made by `ReplicaHost.create_group`."""

    __slots__ = (
        "_announced_term",
        "_initial",
        "_known_leader",
        "_last_time_ms",
        "_memberships",
        "_promote_pending",
        "_timers",
        "apply_due",
        "builder",
        "catch_up_to",
        "core",
        "dead",
        "group",
        "host",
        "last_applied",
        "log",
        "machine",
        "notice_due",
        "quorum_lost_at",
        "receiver",
        "senders",
        "sending_for",
        "sink",
        "transfer_began",
    )

    def __init__(
        self,
        host: ReplicaHost,
        group: int,
        log: GroupLog,
        machine: Machine,
        sink: EffectSink,
        builder: CommandBuilder,
        membership: Membership,
    ) -> None:
        self.host = host
        self.group = group
        self.log = log
        self.machine = machine
        self.sink = sink
        self.builder = builder
        self.last_applied = 0
        self.apply_due = False
        self.notice_due = False
        self.dead = False
        self.quorum_lost_at = 0
        self.receiver: SnapshotReceiver | None = None
        self.senders: dict[int, SnapshotSender] = {}
        self.catch_up_to = 0
        self.transfer_began = 0
        #: Nodes with sessions for which this leader sends, their replica being away or behind.
        self.sending_for: set[int] = set()
        self._initial = membership
        #: (index, membership) of every membership entry that is still in the log, ascending.
        self._memberships: list[tuple[int, Membership]] = []
        self._last_time_ms = 0
        self._announced_term = 0
        self._known_leader = (0, 0)
        self._promote_pending = False
        self._timers: dict[int, Any] = {}
        log.on_written = self.on_written
        log.on_vote_written = self.on_vote_written
        damaged = log.damaged is not None
        vote = log.voted_for
        base = membership
        if not damaged:
            base = self._recover(membership)
        self.core = RaftCore(
            node=host.node,
            log=log,
            membership=base,
            term=log.term,
            voted_for=vote,
            config=host.config,
            random=host.clock.random,
        )
        self.core.commit_index = self.last_applied
        self.core.reachable = set(host.reachable)
        if self._memberships:
            index, member = self._memberships[-1]
            self.core.set_membership(member, index)
        if damaged:
            host.note("raft.replica_damaged", group=group, reason=str(log.damaged))
            log.wipe(self._wiped)
            self.core.withhold_votes()

    # -- life ----------------------------------------------------------------------------------------

    def _recover(self, membership: Membership) -> Membership:
        """Restores the machine from the snapshot and finds the membership in force."""
        log = self.log
        if log.snapshot_index:
            snapshot = log.read_snapshot()
            check(snapshot is not None, f"group {self.group}: the snapshot is gone")
            assert snapshot is not None
            self.machine.restore(snapshot.state)
            if snapshot.membership:
                membership = decode_membership(snapshot.membership)
                self._initial = membership
            self.last_applied = snapshot.index
        index = max(log.first_index, self.last_applied + 1)
        while index <= log.last_index:
            for entry in log.entries(index, 4 << 20):
                if entry.kind == MEMBERSHIP:
                    self._memberships.append((entry.index, entry_membership(entry)))
                self._last_time_ms = max(self._last_time_ms, entry.time_ms)
                index = entry.index + 1
        return membership

    def _wiped(self, error: BaseException | None) -> None:
        if error is not None:
            self.host.note("raft.wipe_failed", group=self.group, error=str(error))

    def start(self, *, campaign: bool) -> None:
        """Begins to take part."""
        self.core.start(campaign=campaign)
        self.run_effects()

    def stop(self) -> None:
        """Ends all that could call back."""
        self.dead = True
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        if self.receiver is not None:
            self.receiver.abort()
            self.receiver = None
        self.senders.clear()

    # -- views ---------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """True while this replica leads."""
        return self.core.role == LEADER

    @property
    def leader(self) -> int | None:
        """Node that leads, as far as known."""
        return self.core.leader or None

    @property
    def term(self) -> int:
        """Current term."""
        return self.core.term

    @property
    def commit_index(self) -> int:
        """Highest index known to be committed."""
        return self.core.commit_index

    @property
    def members(self) -> tuple[int, ...]:
        """Voters."""
        return self.core.membership.voters

    @property
    def learners(self) -> tuple[int, ...]:
        """Non-voters that are being brought up."""
        return self.core.membership.learners

    @property
    def established_leader(self) -> int:
        """The leader whose no-op is applied here; 0 = none."""
        core = self.core
        if core.leader and self._known_leader == (core.leader, core.term):
            return core.leader
        return 0

    @property
    def snapshot_membership(self) -> Membership:
        """The membership that is in force at `last_applied`."""
        return self._initial

    @property
    def role(self) -> str:
        """leader, follower, candidate or pre_vote."""
        return ROLE_NAMES[self.core.role]

    # -- leader: new entries -------------------------------------------------------------------------

    def _now(self) -> int:
        """The leader's wall clock, never falling within the group."""
        now = self.host.clock.now_ms()
        if now < self._last_time_ms:
            now = self._last_time_ms
        self._last_time_ms = now
        return now

    def seal(self) -> None:
        """End of a round: the batch becomes an entry, a frame to the leader, or waits."""
        core = self.core
        builder = self.builder
        if core.role == LEADER:
            if core.transfer_to:
                return
            entry = builder.take_entry(self.group, self.log.last_index + 1, core.term, self._now())
            self.append_own(entry)
            return
        leader = core.leader
        if leader and leader in core.reachable and self._known_leader == (leader, core.term):
            self.host.transport.send(leader, builder.take_forward(self.group, core.term))
        else:
            builder.take_loose()

    def propose(
        self, type: int, flags: int = 0, count: int = 0, arg: int = 0, body: bytes = b""
    ) -> None:
        """Adds a command of the leader itself (session 0) to the open batch."""
        if self.core.role == LEADER:
            self.builder.add(type, flags, 0, 0, count, arg, body)

    def append_own(self, entry: Entry) -> None:
        """Leader: appends and sends at once; the own flush runs beside the followers'."""
        self.log.append(entry)
        core = self.core
        for progress in core.progress.values():
            if (
                progress.state == REPLICATE
                and progress.next == entry.index
                and progress.in_flight < self.host.config.in_flight_bytes_max
            ):
                self._send_entry(progress, entry)
            else:
                self.replicate(progress)
        if self.host.counters is not None:
            self.host.counters.entries_appended += 1
            self.host.counters.bytes_appended += entry.size

    def _send_entry(self, progress: Progress, entry: Entry) -> None:
        core = self.core
        commit = core.commit_index
        prev = entry.index - 1
        head = frame(
            batch.FRAME_APPEND,
            0,
            self.group,
            core.term,
            prev,
            self.log.term_at(prev),
            commit,
            b"",
            entry.size,
        )
        self.host.transport.send(progress.node, head, (entry.data,))
        progress.commit_sent = commit
        progress.on_sent(entry.index, entry.size, self.host.now)
        self.host.active.add(self.group)

    def replicate(self, progress: Progress) -> None:
        """Sends what a follower lacks, as far as its window allows."""
        core = self.core
        log = self.log
        config = self.host.config
        while progress.reachable and core.role == LEADER:
            if progress.state == SNAPSHOT:
                return
            if progress.next < log.first_index:
                self._send_snapshot(progress)
                return
            if progress.state == PROBE:
                if not progress.probe_out:
                    self._send_entries(progress, [])
                    progress.probe_out = True
                return
            if progress.next > log.last_index:
                return
            if progress.in_flight >= config.in_flight_bytes_max:
                return
            try:
                entries = log.entries(progress.next, config.append_bytes_max)
            except EntryGone:
                self._send_snapshot(progress)
                return
            except StorageFault as fault:
                self.on_storage_fault(fault)
                return
            self._send_entries(progress, entries)

    def _send_entries(self, progress: Progress, entries: list[Entry]) -> None:
        core = self.core
        prev = progress.next - 1
        size = sum(entry.size for entry in entries)
        head = frame(
            batch.FRAME_APPEND,
            0,
            self.group,
            core.term,
            prev,
            self.log.term_at(prev),
            core.commit_index,
            b"",
            size,
        )
        self.host.transport.send(progress.node, head, [entry.data for entry in entries])
        progress.commit_sent = core.commit_index
        progress.sent_at = self.host.now
        if entries:
            progress.on_sent(entries[-1].index, size, self.host.now)
        self.host.active.add(self.group)

    def send_notices(self) -> None:
        """Tells nodes with a session about the commit index, unless an append just did."""
        self.notice_due = False
        core = self.core
        if core.role != LEADER:
            return
        commit = core.commit_index
        wanted = self.machine.session_nodes()
        head = None
        behind = False
        for progress in core.progress.values():
            if progress.commit_sent >= commit or not progress.reachable:
                continue
            if progress.node in wanted and progress.state == REPLICATE:
                if head is None:
                    head = frame(batch.FRAME_COMMIT, 0, self.group, core.term, 0, 0, commit)
                self.host.transport.send(progress.node, head)
                progress.commit_sent = commit
            else:
                behind = True
        if behind:
            # The others hear it with the next append, or from the tick once the group is quiet.
            self.host.active.add(self.group)

    # -- follower ------------------------------------------------------------------------------------

    def on_append(
        self, sender: int, data: bytes, term: int, prev_index: int, prev_term: int, commit: int
    ) -> None:
        """Takes an APPEND frame."""
        core = self.core
        log = self.log
        if self.receiver is not None and term >= core.term:
            # Entries come again after the snapshot.
            core.on_append(sender, term, 0, 0)
            self.run_effects()
            return
        if not core.on_append(sender, term, prev_index, prev_term):
            if core.effects:
                self.run_effects()
            hint = 0 if term < core.term else core.hint(prev_index)
            self._reply(sender, hint, max(prev_index, 1))
            return
        if core.effects:
            self.run_effects()
        matched = prev_index
        if len(data) > HEADER:
            try:
                entries = split_entries(data, HEADER)
            except ValueError as error:
                self.host.note("raft.append_damaged", group=self.group, error=str(error))
                return
            for entry in entries:
                if entry.index != matched + 1 or entry.group != self.group:
                    self.host.note("raft.append_malformed", group=self.group, node=sender)
                    return
                matched = entry.index
                if entry.index <= log.last_index:
                    if (
                        entry.index <= core.commit_index
                        or entry.index < log.first_index
                        or log.term_at(entry.index) == entry.term
                    ):
                        continue
                    self._truncate(entry.index)
                log.append(entry)
                if entry.kind == MEMBERSHIP:
                    self._take_membership(entry)
                if entry.time_ms > self._last_time_ms:
                    self._last_time_ms = entry.time_ms
        was = core.commit_index
        core.on_matched(matched, commit)
        if core.commit_index > was:
            self.host.mark_apply(self)
        if self.catch_up_to == 0 and core.voted_for_withheld:
            self.catch_up_to = max(commit, 1)
        if log.written_index >= matched:
            self._reply(sender, core.ack_index(), 0)

    def _truncate(self, index: int) -> None:
        self.core.may_truncate(index)
        self.log.truncate_from(index)
        changed = False
        while self._memberships and self._memberships[-1][0] >= index:
            self._memberships.pop()
            changed = True
        if changed:
            at, membership = self._memberships[-1] if self._memberships else (0, self._initial)
            self.core.set_membership(membership, at)

    def _reply(self, to: int, match: int, rejected: int) -> None:
        self.host.transport.send(
            to,
            frame(batch.FRAME_APPEND_REPLY, 0, self.group, self.core.term, match, rejected, 0),
        )

    def on_commit(self, sender: int, term: int, commit: int) -> None:
        """Takes a COMMIT notice."""
        core = self.core
        if term != core.term or sender != core.leader:
            return
        was = core.commit_index
        core.on_commit_notice(commit)
        if core.commit_index > was:
            self.host.mark_apply(self)

    # -- both ----------------------------------------------------------------------------------------

    def on_written(self, group: int, index: int, term: int) -> None:
        """The own disk holds everything up to `index`."""
        core = self.core
        if self.dead:
            return
        if core.role == LEADER:
            if core.maybe_commit():
                self.host.mark_apply(self)
            return
        if core.leader and core.matched and self.receiver is None:
            self._reply(core.leader, core.ack_index(), 0)
            if self.catch_up_to and core.ack_index() >= self.catch_up_to:
                self.catch_up_to = 0
                core.release_votes()
                self.run_effects()

    def on_append_reply(self, sender: int, term: int, match: int, rejected: int) -> None:
        """Leader: takes a follower's answer."""
        core = self.core
        moved = core.on_append_reply(sender, term, match, rejected)
        if core.effects:
            self.run_effects()
        if moved:
            self.host.mark_apply(self)
        if core.role != LEADER:
            return
        progress = core.progress.get(sender)
        if progress is None:
            return
        if progress.next <= self.log.last_index or progress.state == PROBE:
            self.replicate(progress)
        if progress.target and progress.match >= progress.target:
            self._promote(progress)
        if core.transfer_to == sender:
            core.maybe_finish_transfer()
            self.run_effects()

    def on_vote_written(self, group: int, term: int, voted_for: int) -> None:
        """Term and vote are on disk."""
        if self.dead:
            return
        self.core.on_vote_written(term, voted_for)
        self.run_effects()

    def on_message(self, sender: int, message: Message) -> None:
        """Takes a RAFT frame's message."""
        if isinstance(message, SnapshotBegin):
            self._on_snapshot_begin(sender, message)
        elif isinstance(message, SnapshotChunk):
            if self.receiver is not None and message.term == self.core.term:
                self.receiver.on_chunk(sender, message)
        elif isinstance(message, SnapshotAck):
            self._on_snapshot_ack(sender, message)
        elif isinstance(message, LeaderIs):
            if message.term > self.core.term:
                self.core.become_follower(message.term, 0)
        else:
            self.core.step(sender, message)
        self.run_effects()

    def run_effects(self) -> None:
        """Carries out what the core decided."""
        core = self.core
        while core.effects:
            effects = core.effects
            core.effects = []
            for effect in effects:
                kind = effect[0]
                if kind == raft.EFFECT_SEND:
                    self.host.send_message(effect[1], self.group, core.term, effect[2])
                elif kind == raft.EFFECT_SAVE_VOTE:
                    self.log.save_vote(effect[1], effect[2])
                    self.host.wake()
                elif kind == raft.EFFECT_TIMER:
                    self.host.clock.call_later(effect[1], self._on_timer, effect[2])
                elif kind == raft.EFFECT_BECAME_LEADER:
                    self._became_leader()
                elif kind == raft.EFFECT_LEADER_CHANGED:
                    self._leader_changed(effect[1])
                elif kind == raft.EFFECT_NOTE:
                    self.host.note(effect[1], group=self.group, **effect[2])

    def _on_timer(self, token: int) -> None:
        if not self.dead:
            self.core.on_timer(token)
            self.run_effects()

    def _became_leader(self) -> None:
        core = self.core
        self.host.note("raft.role_changed", group=self.group, term=core.term, role="leader")
        if self.host.counters is not None:
            self.host.counters.elections += 1
        self.senders.clear()
        # Commands that were collected for another leader stay pending with their sessions.
        if self.builder.used:
            self.builder.take_loose()
        entry = batch.noop_entry(self.group, self.log.last_index + 1, core.term, self._now())
        self.append_own(entry)
        self.host.wake()

    def _leader_changed(self, leader: int) -> None:
        self._known_leader = (0, 0)
        self.sending_for.clear()
        if self.builder.used:
            self.host.mark_dirty(self)
        if self.host.counters is not None:
            self.host.counters.leader_changes += 1
        if leader == 0:
            self.sink.on_leader(self.group, None, self.core.term)
        if leader != self.host.node and self.senders:
            self.senders.clear()
        if leader and self.last_applied and self.log.term_at(self.last_applied) == self.core.term:
            # The same leader is back: its no-op will not be applied a second time.
            self._noop_applied()

    # -- applying ------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Applies what is committed and hands the effects on, in one call."""
        self.apply_due = False
        core = self.core
        log = self.log
        machine = self.machine
        commit = core.commit_index
        if self.receiver is not None:
            return
        index = self.last_applied
        announced = False
        while index < commit:
            try:
                entry = log.entry(index + 1)
            except StorageFault as fault:
                self.on_storage_fault(fault)
                return
            index += 1
            if entry.kind == COMMANDS:
                machine.apply(index, entry.time_ms, entry.data)
            elif entry.kind == NOOP:
                announced = announced or entry.term == core.term
            elif entry.kind == MEMBERSHIP:
                self._membership_committed(entry)
            self.last_applied = index
        if machine.effects:
            effects = machine.effects
            machine.effects = []
            self._timers_of(effects)
            self.sink.on_effects(effects, self)
        if announced:
            self._noop_applied()
        if core.role == LEADER and not self.notice_due:
            self.notice_due = True
            self.host.mark_notice(self)

    def _noop_applied(self) -> None:
        """The leader of this term is established: everything older is applied."""
        core = self.core
        if core.leader == 0 or self._known_leader == (core.leader, core.term):
            return
        self._known_leader = (core.leader, core.term)
        if core.role == LEADER:
            self._greet()
        self.sink.on_leader(self.group, core.leader, core.term)

    def _greet(self) -> None:
        """A new leader tells session nodes without a replica, and looks after sessions' nodes."""
        core = self.core
        host = self.host
        for node in sorted(self.machine.session_nodes()):
            if node != host.node and not core.membership.has(node):
                host.send_message(node, self.group, core.term, LeaderIs(core.term, host.node))
            self.on_session_node(node)

    def on_session_node(self, node: int) -> None:
        """Leader: records whether a node with sessions is there, and since when."""
        host = self.host
        if node == host.node or node in host.reachable:
            incarnation = host.incarnation_of(node)
            if incarnation:
                self.propose(batch.CMD_NODE_UP, arg=node, body=incarnation.to_bytes(8, "little"))
        else:
            self.propose(batch.CMD_NODE_DOWN, flags=1 if node in host.gone else 0, arg=node)

    def _timers_of(self, effects: list[tuple[Any, ...]]) -> None:
        if self.core.role != LEADER:
            return
        for effect in effects:
            if effect[0] == MACHINE_TIMER and effect[1] not in self._timers:
                due = effect[1]
                delay = max(0, due - self.host.clock.now_ms())
                self._timers[due] = self.host.clock.call_later(delay, self._machine_timer, due)

    def _machine_timer(self, due: int) -> None:
        self._timers.pop(due, None)
        if not self.dead:
            self.propose(batch.CMD_TICK)

    # -- membership ----------------------------------------------------------------------------------

    def _take_membership(self, entry: Entry) -> None:
        membership = entry_membership(entry)
        self._memberships.append((entry.index, membership))
        self.core.set_membership(membership, entry.index)

    def change_membership(self, membership: Membership) -> bool:
        """Leader: proposes a single-step change; False when one is under way."""
        if not self.core.may_change_membership():
            return False
        current = self.core.membership
        check(
            len(set(current.voters) ^ set(membership.voters)) <= 1,
            "membership changes one voter at a time",
        )
        if self.builder.used:
            self.seal()
        entry = batch.make_entry(
            self.group,
            self.log.last_index + 1,
            self.core.term,
            self._now(),
            MEMBERSHIP,
            encode_membership(membership),
        )
        # In force from the moment it is in the log (4.1).
        self._memberships.append((entry.index, membership))
        self.core.set_membership(membership, entry.index)
        self.append_own(entry)
        self.host.wake()
        return True

    def add_member(self, node: int, *, voter: bool = True) -> bool:
        """Leader: adds a learner; with `voter` it is promoted once it has caught up."""
        current = self.core.membership
        if current.has(node):
            return True
        changed = self.change_membership(Membership(current.voters, (*current.learners, node)))
        if changed:
            progress = self.core.progress.get(node)
            if progress is not None:
                progress.target = max(1, self.log.last_index) if voter else 0
                self.replicate(progress)
        return changed

    def transfer(self, to: int) -> bool:
        """Leader: hands the leadership to a voter; new commands wait meanwhile."""
        if not self.core.transfer(to):
            return False
        self.transfer_began = self.host.now
        self.host.active.add(self.group)
        self.run_effects()
        return True

    def remove_member(self, node: int) -> bool:
        """Leader: removes a voter or learner. The last voter stays."""
        current = self.core.membership
        if not current.has(node):
            return True
        if current.voters == (node,):
            return False
        return self.change_membership(
            Membership(
                tuple(n for n in current.voters if n != node),
                tuple(n for n in current.learners if n != node),
            )
        )

    def _promote(self, progress: Progress) -> None:
        current = self.core.membership
        if progress.node not in current.learners:
            progress.target = 0
            return
        voters = tuple(sorted((*current.voters, progress.node)))
        learners = tuple(n for n in current.learners if n != progress.node)
        if self.change_membership(Membership(voters, learners)):
            progress.target = 0
        else:
            self.host.active.add(self.group)

    def _membership_committed(self, entry: Entry) -> None:
        membership = entry_membership(entry)
        self._initial = membership
        self._memberships = [m for m in self._memberships if m[0] > entry.index]
        if entry.index == self.core.membership_index and not self._memberships:
            self._memberships = [(entry.index, membership)]
        if self.core.role == LEADER and self.host.node not in membership.voters:
            self.host.note("raft.removed_leader_steps_down", group=self.group)
            self.core.step_down()
            self.run_effects()
        self.host.on_membership(self, membership)

    # -- reachability and time -----------------------------------------------------------------------

    def on_reachable(self, node: int) -> None:
        """A node can be reached (again)."""
        core = self.core
        core.on_reachable(node)
        if core.role == LEADER:
            progress = core.progress.get(node)
            if progress is not None:
                self.senders.pop(node, None)
                self.replicate(progress)
            if node in self.machine.session_nodes():
                if not core.membership.has(node):
                    self.host.send_message(
                        node, self.group, core.term, LeaderIs(core.term, self.host.node)
                    )
                self.on_session_node(node)
                self.resend_for(node)
        elif core.leader == node and self._known_leader == (node, core.term):
            # What was forwarded to it may have been lost with the link.
            self.sink.on_leader(self.group, node, core.term)
        self.run_effects()

    def is_live(self, node: int) -> bool:
        """Leader: does that node's own replica serve its sessions?"""
        core = self.core
        if node == core.node:
            return True
        progress = core.progress.get(node)
        return (
            progress is not None
            and progress.reachable
            and progress.state == REPLICATE
            and core.commit_index - progress.match <= self.host.config.lag_entries_max
        )

    def resend_for(self, node: int) -> None:
        """Leader: repeats all effects for a node whose replica does not serve it."""
        if self.core.role != LEADER or self.is_live(node):
            return
        self.sending_for.add(node)
        self.machine.resend(node)
        if self.machine.effects:
            effects = self.machine.effects
            self.machine.effects = []
            self.sink.on_effects(effects, self)

    def watch_replicas(self) -> bool:
        """Leader: takes over the sending for nodes whose replica fell away; True while it does."""
        for node in self.machine.session_nodes():
            if self.is_live(node):
                self.sending_for.discard(node)
            elif node in self.host.reachable and node not in self.sending_for:
                self.resend_for(node)
        return bool(self.sending_for)

    def on_unreachable(self, node: int) -> None:
        """A node is away or suspected."""
        core = self.core
        core.on_unreachable(node)
        self.senders.pop(node, None)
        if self.receiver is not None and self.receiver.sender == node:
            self.receiver.abort()
            self.receiver = None
        if core.role == LEADER:
            if node in self.machine.session_nodes():
                self.on_session_node(node)
            if not core.reaches_majority():
                self.quorum_lost_at = self.quorum_lost_at or self.host.now
                self.host.active.add(self.group)
        self.run_effects()

    def tick(self, now: int) -> bool:
        """Retransmits, tells commits to quiet followers; False when nothing is outstanding."""
        core = self.core
        config = self.host.config
        if core.role != LEADER:
            return False
        outstanding = False
        if core.transfer_to:
            outstanding = True
            if now - self.transfer_began >= config.retransmit_ms:
                core.transfer_to = 0
                self.host.mark_dirty(self)
        if core.reaches_majority():
            self.quorum_lost_at = 0
        elif self.quorum_lost_at:
            if now - self.quorum_lost_at >= config.quorum_grace_ms:
                self.quorum_lost_at = 0
                self.host.note("raft.quorum_lost", group=self.group)
                core.step_down()
                self.run_effects()
                return False
            outstanding = True
        for progress in list(core.progress.values()):
            if not progress.reachable:
                continue
            if progress.state == SNAPSHOT:
                outstanding = True
                continue
            if progress.match < self.log.last_index or progress.state == PROBE:
                outstanding = True
                if now - progress.sent_at >= config.retransmit_ms:
                    progress.state = PROBE
                    progress.forget_sent()
                    progress.next = min(progress.next, progress.match + 1)
                self.replicate(progress)
            elif progress.commit_sent < core.commit_index:
                self.host.transport.send(
                    progress.node,
                    frame(batch.FRAME_COMMIT, 0, self.group, core.term, 0, 0, core.commit_index),
                )
                progress.commit_sent = core.commit_index
            if progress.target and progress.match >= progress.target:
                self._promote(progress)
                outstanding = outstanding or bool(progress.target)
        return self.watch_replicas() or outstanding

    # -- snapshots -----------------------------------------------------------------------------------

    def make_snapshot(self) -> Snapshot:
        """The machine's state at `last_applied`."""
        index = self.last_applied
        membership = self._initial
        return Snapshot(
            index=index,
            term=self.log.term_at(index) if index else 0,
            membership=encode_membership(membership),
            state=self.machine.snapshot(),
        )

    def plan(self) -> GroupPlan:
        """What storage may drop when a WAL file is emptied."""
        keep_from = self.last_applied + 1
        if self.core.role == LEADER:
            for progress in self.core.progress.values():
                if progress.reachable and progress.state == REPLICATE:
                    keep_from = min(keep_from, progress.match + 1)
        return GroupPlan(
            live_ranges=[r for r in self.machine.live_ranges() if r[0] <= self.last_applied],
            applied=self.last_applied,
            keep_from=keep_from,
            take_snapshot=self.make_snapshot if self.receiver is None else None,
        )

    def _send_snapshot(self, progress: Progress) -> None:
        progress.state = SNAPSHOT
        progress.forget_sent()
        sender = SnapshotSender(self, progress.node, self.host.next_transfer())
        self.senders[progress.node] = sender
        if self.host.counters is not None:
            self.host.counters.snapshots_sent += 1
        sender.begin()

    def _on_snapshot_begin(self, sender: int, message: SnapshotBegin) -> None:
        core = self.core
        if message.term < core.term:
            return
        core.on_append(sender, message.term, 0, 0)
        if message.index <= core.commit_index:
            self._reply(sender, core.ack_index(), 0)
            self.host.send_message(
                sender,
                self.group,
                core.term,
                SnapshotAck(core.term, message.transfer, 0, True, False, core.commit_index),
            )
            return
        if self.receiver is not None:
            self.receiver.abort()
        self.receiver = SnapshotReceiver(self, sender, message)

    def _on_snapshot_ack(self, sender: int, message: SnapshotAck) -> None:
        transfer = self.senders.get(sender)
        if transfer is None or transfer.transfer != message.transfer:
            return
        if message.term != self.core.term or self.core.role != LEADER:
            return
        progress = self.core.progress.get(sender)
        if message.failed:
            del self.senders[sender]
            if progress is not None:
                progress.state = PROBE
                progress.probe_out = False
                progress.sent_at = self.host.now
            return
        if message.done:
            del self.senders[sender]
            if progress is not None:
                progress.state = PROBE
                progress.probe_out = False
                progress.next = message.index + 1
                self.replicate(progress)
            return
        transfer.on_ack(message.number)

    def on_snapshot_installed(self, message: SnapshotBegin, state: bytes) -> None:
        """Follower: the snapshot is durable; the machine takes its place."""
        self.receiver = None
        core = self.core
        self.machine.restore(state)
        self.machine.effects = []
        self.last_applied = message.index
        core.commit_index = max(core.commit_index, message.index)
        self._initial = message.membership
        self._memberships = []
        core.set_membership(message.membership, 0)
        core.matched = max(core.matched, message.index)
        if core.voted_for_withheld:
            self.catch_up_to = max(self.catch_up_to, message.index)
        if self.host.counters is not None:
            self.host.counters.snapshots_installed += 1
        self.machine.resend(self.host.node)
        if self.machine.effects:
            effects = self.machine.effects
            self.machine.effects = []
            self.sink.on_effects(effects, self)
        if core.leader:
            self._known_leader = (core.leader, core.term)
            self.sink.on_leader(self.group, core.leader, core.term)
        if self.catch_up_to and core.ack_index() >= self.catch_up_to:
            self.catch_up_to = 0
            core.release_votes()
        self.run_effects()

    # -- faults --------------------------------------------------------------------------------------

    def on_storage_fault(self, fault: StorageFault) -> None:
        """A read found damage: the replica is wiped and copied from the others; never served."""
        self.host.note("raft.storage_fault", group=self.group, error=str(fault))
        self.core.step_down()
        self.core.withhold_votes()
        self.run_effects()
        if self.log.damaged is not None:
            self.log.wipe(self._wiped)
        self.host.restart_replica(self)


def encode_membership(membership: Membership) -> bytes:
    """Body of a membership entry: msgpack, padded by the entry."""
    packed = msgspec.msgpack.encode(membership)
    return len(packed).to_bytes(4, "little") + packed


def decode_membership(data: bytes) -> Membership:
    """Raises ValueError."""
    size = int.from_bytes(data[:4], "little")
    return msgspec.msgpack.decode(data[4 : 4 + size], type=Membership)


def entry_membership(entry: Entry) -> Membership:
    """The membership that a membership entry brings."""
    return decode_membership(entry.data[HEADER:])


def encoded(message: Message) -> bytes:
    """Body of a RAFT frame."""
    return encode(message)
