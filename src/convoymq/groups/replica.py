# cython: annotation_typing=False
"""One member of one Raft group: joins the core, the log and the machine.

The core decides, the log keeps, the machine computes; this class carries entries between them and
the transport. It has no socket, file or clock of its own (`interfaces`).

Steady path, one call each per entry: `seal` (leader: batch → entry → log and followers),
`on_append` (follower), `on_append_reply` and `on_written` (commit), `apply`.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from convoymq.groups import transfer
from convoymq.groups.effect_sink import EffectSink
from convoymq.groups.group_time import GroupTime
from convoymq.groups.transfer import SnapshotReceiving, SnapshotSending
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, frame, make_entry, split_entries
from convoymq.model.errors import (
    InvariantViolated,
    PeerError,
    ReplicaStopped,
    StorageFault,
    UnsupportedVersion,
    check,
)
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_TIMER, FLAG_NODE_GONE, Machine
from convoymq.replication.raft import types
from convoymq.replication.raft.core import RaftCore
from convoymq.replication.raft.membership import Learner, Membership, decode_membership
from convoymq.replication.raft.types import LEADER, REPLICATE, ROLE_NAMES, SNAPSHOT
from convoymq.storage.types import GroupPlan, Snapshot

if TYPE_CHECKING:
    from convoymq.groups.host import ReplicaHost
    from convoymq.storage.log import GroupLog

HEADER = batch.HEADER_SIZE
NOOP = batch.ENTRY_NOOP
COMMANDS = batch.ENTRY_COMMANDS
MEMBERSHIP = batch.ENTRY_MEMBERSHIP
VERSION = batch.ENTRY_VERSION
FLAG_RESET = 1
"""APPEND_REPLY: the follower lost its log; what it acknowledged before does not count."""
FLAG_VOTELESS = 2
"""APPEND_REPLY: the follower may not vote yet."""
LEADER_IS = 32
"""Kind of a RAFT message outside the core: (kind, term, leader or 0). Term 0 asks."""
BEHIND = 33
"""Kind of a RAFT message outside the core: (kind, term, 1 = this replica is so far behind that the
leader should serve its clients, 0 = not any more). From a leader: the same of the replica that it
is sent to."""
LAG_TOLD_EVERY = 4
LAG_BELIEVED_FOR = 10
"""In `lag_ms`: how often a leader says that a replica lags, and for how long that believes it."""


class Replica:
    """A group's member on this node. Made by `ReplicaHost.create_group`."""

    def __init__(
        self,
        host: ReplicaHost,
        group: int,
        log: GroupLog,
        machine: Machine,
        sink: EffectSink,
        builder: CommandBuilder,
        members: Membership,
    ) -> None:
        self.host = host
        self.group = group
        self.log = log
        self.machine = machine
        self.sink = sink
        self.builder = builder
        self.apply_due = False
        self.notice_due = False
        #: Stopped for good.
        self.dead = False
        #: Why it does not take part for now (its log is damaged), or "".
        self.faulty = ""
        #: Why it takes part no more (`stop_for`), or "".
        self.stopped = ""
        #: Command types that other nodes may forward.
        self.allowed: bytes | None = None
        #: Leader: index of the last version that it proposed.
        self._version_index = 0
        #: Who supports which version is to be looked at anew.
        self._version_due = False
        self.receiving: SnapshotReceiving | None = None
        self.sending: dict[int, SnapshotSending] = {}
        #: Nodes with sessions for which this leader sends, their replica being away or behind.
        self.sending_for: set[int] = set()
        self._pristine = machine.snapshot()
        self._wiping = False
        self._known_leader = (0, 0)
        #: (leader, term) that clients here are served by although this replica is behind.
        self._stand_in = (0, 0)
        #: Without a log: whom it asked last for the leader, and whether commands wait for one.
        self._asked = 0
        self._wanted = False
        self._follows_since = -1
        #: Follower: until when it lags, as the leader said last, ms.
        self._lags_until = 0
        #: Leader: nodes whose replica says that it is behind; those whose log has been for long.
        self.behind_nodes: set[int] = set()
        self.lagging_nodes: set[int] = set()
        #: The host holds back entries for deferred followers.
        self.holding = False
        #: Leader: an entry that is to tell how long a commit takes, and when it was appended, ms.
        self._sample = 0
        self._sample_ms = 0
        #: Since when the open batch waits to be coalesced, ms; -1 = it does not.
        self._waits_since = -1
        #: The host will look at the open batch again.
        self.batch_due = False
        self._awaited: frozenset[int] = frozenset()
        #: Commands for the leader that wait for room: (node, term, frame).
        self.late: deque[tuple[int, int, bytes]] = deque()
        self.time = GroupTime(host.clock)
        self._transfer_began = 0
        self._election: Any = None
        #: The next election waits for its turn among groups that nobody uses.
        self._spread = False
        #: It does: the host has it in its line.
        self._deferred = False
        #: Leader: the entry that opens the term is not in the log yet.
        self.opening = False
        self._timers: dict[int, Any] = {}
        config = host.config
        self.core: RaftCore = host.core_class(
            host.node,
            group,
            log,
            members,
            host.reachable,
            host.clock.random,
            config.election_min_ms,
            config.in_flight_bytes_max,
            host.next_number(),
        )
        log.on_written = self.on_written
        log.on_vote_written = self.on_vote_written

    # Life.

    def found(self, founder: int, leads: bool) -> None:
        """Begins the group's first term, which has its leader already. Before `start`.

        Args:
            leads: this replica is that leader, and was never in the group before.
        """
        self.core.found(founder, leads)

    def start(self, *, campaign: bool, new: bool) -> None:
        """Takes up the state that the log holds and begins to take part.

        `new`: when there is nothing, something may have been promised nevertheless.
        """
        log = self.log
        # Who uses the group will say so.
        self._spread = self.group != 0 and log.last_index > 0
        if log.damaged is None:
            try:
                self._recover(campaign)
            except StorageFault:
                check(log.damaged is not None, f"group {self.group}: unreadable, not damaged")
            except InvariantViolated:
                raise
            except Exception as error:
                self._fail(log.snapshot_index, "snapshot", error)
                return
        if log.damaged is not None:
            self._resynchronise(log.damaged)
        elif new and not log.last_index and not log.term:
            self.core.lost_data.quarantine(True)
            self.core.lost_data.on_log_lost()
        self.run_effects()
        self._spread = False
        if self._is_cut_off():
            self.host.active.add(self.group)
        if self.core.role == LEADER:
            # The founder: nothing older than its term has to be applied first.
            self._established()

    def _recover(self, campaign: bool) -> None:
        log = self.log
        core = self.core
        if log.snapshot_index:
            snapshot = log.read_snapshot()
            check(snapshot is not None, f"group {self.group}: the snapshot is gone")
            assert snapshot is not None
            self.machine.restore(snapshot.state)
            core.memberships = [(snapshot.index, decode_membership(snapshot.membership))]
        self._version_changed()
        found = []
        index = log.snapshot_index + 1
        while index <= log.last_index:
            for entry in log.entries(index, 4 << 20):
                if entry.kind == MEMBERSHIP:
                    found.append((entry.index, decode_membership(entry.data[HEADER:])))
                self.time.heard(entry.time_ms)
                index = entry.index + 1
        self.time.heard(self.machine.time_ms)
        core.start(found, campaign)

    def stop_for(self, reason: str, **facts: Any) -> None:
        """Takes part no more, for ever: it applies, leads, votes and acknowledges nothing. What it
        has on disk stays as it is (ADR 0016)."""
        if self.dead:
            return
        self.stopped = reason
        self.machine.effects = []
        self.host.note("raft.replica_stopped", group=self.group, reason=reason, **facts)
        # If it leads, the others must hear that it does not any more.
        self.core.step_down()
        self.run_effects()
        self.stop()
        self.host.on_replica_stopped(self)

    def _fail(self, index: int, what: str, error: BaseException) -> None:
        """Stops for an error in what must come out alike on every replica."""
        facts: dict[str, Any] = {"index": index}
        if not isinstance(error, ReplicaStopped):
            facts["error"] = "".join(traceback.format_exception(error))
        named = "" if isinstance(error, ReplicaStopped) else f"{type(error).__name__}: "
        self.stop_for(f"{what} {index}: {named}{error}", **facts)

    def stop(self) -> None:
        """Ends all that could call back."""
        self.dead = True
        self._cancel_timers()
        self._end_transfers()

    def _cancel_timers(self) -> None:
        if self._election is not None:
            self._election.cancel()
            self._election = None
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def _end_transfers(self) -> None:
        for sending in self.sending.values():
            sending.stop()
        self.sending.clear()
        if self.receiving is not None:
            self.receiving.abort()
            self.receiving = None

    # Views.

    @property
    def is_leader(self) -> bool:
        """True while this replica leads."""
        return self.core.role == LEADER

    @property
    def leader(self) -> int | None:
        """Node that leads, as far as known."""
        return self.core.leader or None

    @property
    def serving_leader(self) -> int | None:
        """Node that leads, as far as known to this replica or, while it has no log, to others."""
        return self.core.leader or self._stand_in[0] or None

    @property
    def can_commit(self) -> bool:
        """Leader: it has committed something in its term, or a majority is linked."""
        core = self.core
        return core.commit_index >= core.term_start or core.reaches_majority()

    @property
    def term(self) -> int:
        """Current term."""
        return self.core.term

    @property
    def commit_index(self) -> int:
        """Highest index known to be committed."""
        return self.core.commit_index

    @property
    def last_applied(self) -> int:
        """Last index that the machine has seen."""
        return self.core.applied_index

    @property
    def members(self) -> tuple[int, ...]:
        """Voters."""
        return tuple(sorted(self.core.members.voters))

    @property
    def learners(self) -> tuple[int, ...]:
        """Non-voters that are being brought up."""
        return tuple(sorted(each.node for each in self.core.members.learners))

    @property
    def established_leader(self) -> int:
        """The leader whose first entry is applied here; 0 = none."""
        core = self.core
        known = core.leader and self._known_leader == (core.leader, core.term)
        return core.leader if known else 0

    @property
    def role(self) -> str:
        """leader, follower, candidate or pre_candidate."""
        return ROLE_NAMES[self.core.role]

    @property
    def takes_entries(self) -> bool:
        """False when the log was found damaged: a leader stays one until the round ends."""
        return self.log.damaged is None

    # Leader: new entries.

    def seal(self) -> None:
        """End of a round: the batch becomes an entry, a frame to the leader, or waits."""
        core = self.core
        builder = self.builder
        if core.role == LEADER:
            if core.transfer_target or not self.takes_entries:
                return
            if builder.deferrable and self._may_wait():
                return
            if self.opening:
                self.open_term()
            self._waits_since = -1
            entry = builder.take_entry(
                self.group, self.log.last_index + 1, core.term, self.time.now_ms()
            )
            self._append(entry)
            return
        leader, term = self._served_by()
        if leader and leader in core.connected:
            data = builder.take_forward(self.group, term)
            self.host.forward(self, leader, term, data)
        else:
            builder.discard_unsent()
            self._wanted = True
            if self._deferred:
                self.campaign()

    def _may_wait(self) -> bool:
        """Settles that free nothing anybody waits for go out with what comes next (ADR 0012)."""
        core = self.core
        deferral_ms = self.host.config.deferral_ms
        at_rest = core.applied_index == core.commit_index == self.log.last_index
        if not deferral_ms or not at_rest or not self.machine.at_rest():
            return False
        if self._waits_since < 0:
            self._waits_since = self.host.now
        elif self.host.now - self._waits_since >= deferral_ms:
            return False
        self.builder.held = True
        self.host.hold_batch(self)
        return True

    def propose(
        self, type: int, flags: int = 0, count: int = 0, arg: int = 0, body: bytes = b""
    ) -> None:
        """Adds a command of the leader itself (session 0) to the open batch."""
        if self.core.role == LEADER:
            self.builder.add(type, flags, 0, 0, count, arg, body)

    def _append(self, entry: Any) -> None:
        """Appends an own entry and sends it at once; the own flush runs beside the followers'."""
        core = self.core
        config = self.host.config
        core.append_own(entry)
        if config.deferral_ms:
            # Who has a session here waits for what is committed, to deliver or to confirm it.
            awaited = self.machine.session_nodes()
            if core.pace_due or (awaited is not self._awaited and awaited != self._awaited):
                self._awaited = awaited
                core.choose_pace(awaited)
        if core.commit_index >= self._sample:
            self._sample = entry.index
            self._sample_ms = self.host.now
        # Something older is not committed yet: the others may be slow.
        slow = self.host.now - self._sample_ms >= config.deferral_commit_ms
        for peer in core.peers:
            if peer.is_deferred:
                peer.held_bytes += entry.size
                if not slow and peer.held_bytes < config.deferral_bytes_max:
                    if not self.holding:
                        self.host.hold(self)
                    continue
            if (
                peer.state == REPLICATE
                and peer.next_index == entry.index
                and peer.may_send()
                and peer.node not in self.host.full
            ):
                self._send_append(peer, [entry.data], entry.index, entry.size)
            else:
                self.replicate(peer)
        counters = self.host.counters
        counters.entries_appended += 1
        counters.bytes_appended += entry.size

    def release(self) -> None:
        """Sends what was held back for deferred followers."""
        self.holding = False
        for peer in self.core.peers:
            peer.held_bytes = 0
            self.replicate(peer)

    def replicate(self, peer: Any) -> None:
        """Sends what a follower lacks, as far as its window and the link allow."""
        log = self.log
        config = self.host.config
        while self.core.role == LEADER and peer.next_index <= log.last_index and peer.may_send():
            if peer.node in self.host.full:
                self.host.await_room(peer.node, self)
                return
            try:
                entries = log.entries(peer.next_index, config.append_bytes_max)
                log.term_at(peer.next_index - 1)
            except LookupError:
                self._send_snapshot(peer)
                return
            except StorageFault:
                self.on_damage()
                return
            bodies = [entry.data for entry in entries]
            last = peer.next_index + len(entries) - 1
            self._send_append(peer, bodies, last, sum(map(len, bodies)))

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        if self.dead:
            return
        if self.late:
            self.host.send_late(self, node, *self._served_by())
        if self.faulty:
            return
        sending = self.sending.get(node)
        if sending is not None:
            sending.on_room()
        peer = self.core.progress.get(node)
        if peer is not None:
            self.replicate(peer)

    def on_lost(self, node: int) -> None:
        """A node for which something waited is away."""
        if self.late and self.late[0][0] == node:
            self.late.clear()

    def probe(self, peer: Any) -> None:
        """Asks a follower how far it is, without entries."""
        if not peer.connected or peer.state == SNAPSHOT:
            return
        if peer.next_index == 1 and self.log.first_index > 1:
            # Everybody agrees on the empty log, but what follows it is not here any more.
            self._send_snapshot(peer)
            return
        try:
            self.log.term_at(peer.next_index - 1)
        except LookupError:
            self._send_snapshot(peer)
            return
        self._send_append(peer, [], peer.next_index - 1, 0)

    def probe_member(self, node: int) -> None:
        """Leader: says something to a member that does not know that this node leads, although
        something may be on its way: it may be lost."""
        peer = self.core.progress.get(node)
        if peer is not None:
            self.probe(peer)

    def _send_append(self, peer: Any, bodies: list[bytes], last: int, size: int) -> None:
        core = self.core
        previous = peer.next_index - 1
        commit = core.commit_index
        head = frame(
            batch.FRAME_APPEND,
            0,
            self.group,
            core.term,
            previous,
            self.log.term_at(previous),
            commit,
            b"",
            size,
        )
        self.host.transport.send(peer.node, head, bodies)
        peer.commit_sent = commit
        peer.sent(last, size)
        self.host.active.add(self.group)

    def send_notices(self) -> None:
        """Tells nodes with a session about the commit index, unless an append just did."""
        self.notice_due = False
        core = self.core
        if core.role != LEADER:
            return
        commit = core.commit_index
        wanted = None
        for peer in core.peers:
            if peer.commit_sent >= commit or not peer.connected:
                continue
            if wanted is None:
                wanted = self.machine.session_nodes()
                if wanted != self._awaited:
                    core.pace_due = True
            if peer.held_bytes and peer.node in wanted:
                # Its first session here was just made.
                peer.held_bytes = 0
                self.replicate(peer)
                if peer.commit_sent >= commit:
                    continue
            if peer.node in wanted and peer.state == REPLICATE:
                self._send_commit(peer)
            else:
                # The others hear it with the next append, or from the tick when all is quiet.
                self.host.active.add(self.group)

    def _send_commit(self, peer: Any) -> None:
        core = self.core
        commit = core.commit_index
        self.host.transport.send(
            peer.node, frame(batch.FRAME_COMMIT, 0, self.group, core.term, 0, 0, commit)
        )
        peer.commit_sent = commit

    # Follower.

    def on_append(
        self, sender: int, data: bytes, term: int, previous: int, previous_term: int, commit: int
    ) -> None:
        """Takes an APPEND frame."""
        core = self.core
        if self.faulty or core.lost_state or not self.takes_entries:
            return
        receiving = self.receiving
        if receiving is not None:
            if term < receiving.term or receiving.finishing:
                return
            # A leader that sends a snapshot sends no entries: it has given this one up, and what
            # began it came late. Was it the other way round, the snapshot begins anew.
            receiving.abort()
            self.receiving = None
        try:
            entries = split_entries(data, HEADER) if len(data) > HEADER else ()
        except UnsupportedVersion as error:
            self._fail(previous + 1, "entry", error)
            return
        except ValueError as error:
            raise PeerError(f"group {self.group}: append of node {sender}: {error}") from None
        was = core.commit_index
        if not core.on_append(sender, term, previous, previous_term, commit, entries):
            flags = FLAG_RESET if core.quarantined else 0
            self._reply(sender, flags, core.reject_hint, max(previous, 1))
        elif core.reply_due:
            self._acknowledge()
        if entries:
            self.time.heard(entries[len(entries) - 1].time_ms)
        if core.commit_index > was:
            self.host.mark_apply(self)
        if core.effects:
            self.run_effects()

    def _acknowledge(self) -> None:
        index = self.core.take_reply()
        if index >= 0:
            flags = FLAG_VOTELESS if self.core.quarantined else 0
            self._reply(self.core.leader, flags, index, 0)

    def _reply(self, to: int, flags: int, index: int, rejected: int) -> None:
        self.host.transport.send(
            to,
            frame(batch.FRAME_APPEND_REPLY, flags, self.group, self.core.term, index, rejected, 0),
        )

    def on_commit(self, sender: int, term: int, commit: int) -> None:
        """Takes a COMMIT notice."""
        core = self.core
        if self.faulty or core.lost_state or self.receiving is not None:
            return
        was = core.commit_index
        if not core.on_commit(sender, term, commit):
            self._reply(sender, 0, 0, 1)
        if core.reply_due:
            self._acknowledge()
        if core.commit_index > was:
            self.host.mark_apply(self)
        if core.effects:
            self.run_effects()

    # Both.

    def on_written(self, group: int, index: int, term: int) -> None:
        """The own disk holds everything up to `index`."""
        if self.dead or self.faulty:
            return
        core = self.core
        was = core.commit_index
        core.on_written(index)
        if core.reply_due:
            self._acknowledge()
        self._after(was)

    def on_append_reply(
        self, sender: int, flags: int, term: int, index: int, rejected: int
    ) -> None:
        """Leader: takes a follower's answer."""
        core = self.core
        was = core.commit_index
        core.on_append_reply(
            sender, term, index, rejected, flags & FLAG_RESET != 0, flags & FLAG_VOTELESS != 0
        )
        if core.role == LEADER:
            peer = core.progress.get(sender)
            if peer is not None:
                held = peer.is_deferred and self.holding
                if not held or peer.held_bytes >= self.host.config.deferral_bytes_max:
                    self.replicate(peer)
                if rejected and peer.next_index > self.log.last_index and peer.may_send():
                    self.probe(peer)
        self._after(was)

    def _after(self, was: int) -> None:
        core = self.core
        if core.commit_index > was:
            self.host.mark_apply(self)
        if core.members_due:
            self._next_members()
        if core.effects:
            self.run_effects()

    def on_vote_written(self, group: int, term: int, voted_for: int) -> None:
        """Term and vote are on disk."""
        if self.dead:
            return
        core = self.core
        core.on_vote_written(term, voted_for)
        if self._wiping and voted_for in (types.QUARANTINED, types.LOST_STATE):
            self._wiping = False
            self.log.wipe(self._wiped)
        if core.reply_due and not self.faulty:
            self._acknowledge()
        self.run_effects()

    def on_message(self, sender: int, message: Sequence[Any]) -> None:
        """Takes a RAFT frame's message. Raises PeerError."""
        if message[0] == LEADER_IS:
            self._on_leader_is(sender, message)
            return
        if self.faulty:
            return
        core = self.core
        was = core.commit_index
        if message[0] >= transfer.BEGIN:
            self._on_snapshot_message(sender, message)
        elif message[0] == BEHIND:
            self._on_behind(sender, message)
        else:
            leads = core.role == LEADER
            core.on_message(sender, message)
            peer = core.progress.get(sender)
            if leads and peer is not None and not peer.waiting:
                # It asked for a vote or to be taken in: it does not know that this node leads.
                self.probe(peer)
        self._after(was)

    def run_effects(self) -> None:
        """Carries out what the core decided."""
        core = self.core
        while core.effects:
            effects = core.effects
            core.effects = []
            for effect in effects:
                kind = effect[0]
                if kind == types.SEND:
                    self.send_raft(effect[1], effect[2])
                elif kind == types.ARM:
                    self._arm(effect[1])
                elif kind == types.DISARM:
                    self._disarm()
                elif kind == types.LEAD:
                    self._became_leader()
                elif kind == types.ROLE:
                    self._role_changed()

    def send_raft(self, node: int, message: Sequence[Any]) -> None:
        """Sends a general message."""
        body = msgspec.msgpack.encode(message)
        self.host.transport.send(
            node, frame(batch.FRAME_RAFT, 0, self.group, self.core.term, 0, 0, 0, body)
        )

    def _arm(self, delay_ms: int) -> None:
        self._disarm()
        if self._spread and not self.dead:
            self._spread = False
            self._deferred = True
            self.host.defer_election(self)
        elif not self.dead:
            self._election = self.host.clock.call_later(delay_ms, self._on_election_timer)

    def campaign(self) -> None:
        """Somebody wants the group to be led: an election that waits for its turn begins soon."""
        if self._deferred:
            # The members that should stand first wait for their turn.
            self._arm(self.core.elections.hasty_delay_ms())

    def begin_election(self) -> bool:
        """It is the turn of the group, if it still needs one."""
        if self.dead or not self._deferred:
            return False
        # Several members have their turn now: one of them stands first.
        wait_ms = self.core.elections.place_in_line() * self.host.config.election_min_ms * 4
        self._arm(wait_ms + self.core.elections.quick_delay_ms())
        return True

    def _disarm(self) -> None:
        self._deferred = False
        if self._election is not None:
            self._election.cancel()
            self._election = None

    def _on_election_timer(self) -> None:
        self._election = None
        if not self.dead and not self.faulty:
            self.core.elections.on_timer()
            self.run_effects()

    def _became_leader(self) -> None:
        core = self.core
        if core.role != LEADER:
            return
        if not core.founded:
            self.host.note("raft.role_changed", group=self.group, term=core.term, role="leader")
            self.host.counters.elections += 1
        # Commands that were collected for another leader stay pending with their sessions.
        if self.builder.used:
            self.builder.discard_unsent()
        self._version_index = 0
        self._sample = 0
        self.opening = True
        if core.founded:
            # The first command opens the term; without one there is time until others do.
            self.host.hold_opening(self)
        else:
            self.open_term()

    def open_term(self) -> None:
        """Leader: appends the entry that opens its term, unless it is there."""
        if not self.opening or not self.takes_entries:
            return
        self.opening = False
        core = self.core
        index = self.log.last_index + 1
        kind, body = NOOP, b""
        if core.members_index == 0 or core.changes.is_forced:
            # From now on the log itself says who belongs to the group.
            kind, body = MEMBERSHIP, core.members.encode()
        self._append(make_entry(self.group, index, core.term, self.time.now_ms(), kind, body))

    def _role_changed(self) -> None:
        core = self.core
        if core.role != LEADER:
            self.opening = False
            for sending in self.sending.values():
                sending.stop()
            self.sending.clear()
            self.sending_for.clear()
            self.behind_nodes.clear()
            self.lagging_nodes.clear()
            for handle in self._timers.values():
                handle.cancel()
            self._timers.clear()
        if self.builder.used:
            self.host.mark_dirty(self)
        if not core.leader or core.role == LEADER:
            self._lags_until = 0
        present = (core.leader, core.term)
        if not core.leader or self._known_leader != present:
            told = self._known_leader[0] or self._stand_in[0]
            self._known_leader = (0, 0)
            if self._stand_in[0] and (self._is_cut_off() or self._stand_in == present):
                # Clients know already who serves them.
                told = 0
            else:
                self._stand_in = (0, 0)
            self._follows_since = -1
            if core.leader and core.role != LEADER:
                # The ticks see whether this replica catches up soon.
                self.host.active.add(self.group)
            if told:
                self.host.counters.leader_changes += 1
                self.sink.on_leader(self.group, None, core.term)
            # A leader that was doubted and is heard again may have nothing new to say. A snapshot
            # that is coming in says it itself (`install`).
            heard = core.leader and self.receiving is None and not self.faulty
            if heard and self.log.term_at(core.applied_index) == core.term:
                self._established()

    # Applying.

    def apply(self) -> None:
        """Applies what is committed and hands the effects on, in one call."""
        self.apply_due = False
        core = self.core
        if self.receiving is not None or self.faulty:
            return
        log = self.log
        machine = self.machine
        commit = core.commit_index
        index = core.applied_index
        room = self.host.config.apply_bytes_max
        term = 0
        try:
            while index < commit and room > 0:
                entry = log.entry(index + 1)
                room -= entry.size
                term = entry.term
                if entry.kind == COMMANDS:
                    machine.apply(index + 1, entry.time_ms, entry.data)
                elif entry.kind != NOOP:
                    self._apply_other(entry)
                index += 1
        except InvariantViolated:
            raise
        except Exception as error:
            if isinstance(error, StorageFault) and log.damaged is not None:
                self.on_damage()
                return
            # What is half applied must not be applied again, and its effects must not leave.
            core.on_applied(index)
            self._fail(index + 1, "entry", error)
            return
        core.on_applied(index)
        if index < commit:
            self.host.mark_apply(self)
        if machine.effects:
            self._execute()
        if term and term == core.term:
            # The first entry of a term is the one that opened it.
            self._established()
        if self._version_due:
            self._version_due = False
            self._raise_version()
        if self.holding and core.commit_index == log.last_index:
            self.host.release_between()
        if core.role == LEADER and not self.notice_due:
            self.notice_due = True
            self.host.mark_notice(self)

    def _apply_other(self, entry: Any) -> None:
        """An entry that is not the machine's. Raises UnsupportedVersion."""
        if entry.kind == MEMBERSHIP:
            self.host.on_membership(self, decode_membership(entry.data[HEADER:]))
            self._version_due = True
        elif entry.kind == VERSION:
            version = batch.decode_version(entry.data)
            # A version never falls; two leaders may have proposed the same.
            if version > self.machine.version:
                self.machine.set_version(version)
                self.host.note(
                    "raft.version_raised", group=self.group, machine=self.kind, version=version
                )
                self._version_changed()
                self._version_due = True
        else:
            raise UnsupportedVersion(f"entry kind {entry.kind} is not known")

    def _execute(self) -> None:
        effects = self.machine.effects
        self.machine.effects = []
        if self.core.role == LEADER:
            for effect in effects:
                if effect[0] == EFFECT_TIMER and effect[1] not in self._timers:
                    due = effect[1]
                    delay = self.time.delay_ms(due)
                    self._timers[due] = self.host.clock.call_later(delay, self._on_due, due)
        self.sink.on_effects(effects, self)

    def _on_due(self, due: int) -> None:
        self._timers.pop(due, None)
        if not self.dead:
            self.propose(batch.CMD_TICK)

    def _established(self) -> None:
        """All that is older than the term is applied: the leader may be told about and served."""
        core = self.core
        if not core.leader or self._known_leader == (core.leader, core.term):
            return
        self._known_leader = (core.leader, core.term)
        if self._stand_in[0]:
            # Clients here know the leader.
            self._stand_in = (0, 0)
            self.send_raft(core.leader, (BEHIND, core.term, 0))
            return
        if core.role == LEADER:
            self._greet()
        if core.leader in core.connected or core.leader == self.host.node:
            self.sink.on_leader(self.group, core.leader, core.term)

    # A replica that is behind.

    @property
    def is_behind(self) -> bool:
        """Follower: the leader serves this node's clients, as this replica catches up."""
        if self._stand_in[0]:
            return True
        return self._lags_until > 0 and self.host.clock.monotonic_ms() < self._lags_until

    def _is_told(self) -> bool:
        """Whether clients here know the present leader."""
        present = (self.core.leader, self.core.term)
        return present in (self._known_leader, self._stand_in)

    def _served_by(self) -> tuple[int, int]:
        """(leader, term) as clients here know them; (0, 0) = they know none."""
        core = self.core
        if not core.leader:
            return self._stand_in
        if self._is_told():
            return (core.leader, core.term)
        return (0, 0)

    def _is_cut_off(self) -> bool:
        """Has it no log, and hears of no leader before it was taken in anew or wiped?"""
        return self.core.lost_state or self.faulty != ""

    def _ask_leader(self, now: int) -> bool:
        """Asks the others in turn who leads, as a node without a replica does; True while it is
        to be looked after."""
        host = self.host
        if self._stand_in[0]:
            return True
        if self._follows_since < 0:
            self._follows_since = now
        if now - self._follows_since >= host.config.lag_ms:
            self._follows_since = now
            near = sorted((self.core.members.nodes - {host.node}) & host.reachable)
            if near:
                self._asked += 1
                node = near[self._asked % len(near)]
                self.send_raft(node, (LEADER_IS, 0, int(self._wanted)))
        return True

    def _on_leader_is(self, sender: int, message: Sequence[Any]) -> None:
        """Hears who leads, from a node that was asked or that does not lead any more."""
        core = self.core
        if core.leader or not self._is_cut_off() or len(message) != 3:
            return
        _, term, leader = message
        if not leader:
            if sender == self._stand_in[0]:
                self._lose_stand_in()
            return
        if term < self._stand_in[1] or (leader, term) == self._stand_in:
            return
        if leader == self.host.node or leader not in self.host.reachable:
            # Whoever said so has not noticed yet.
            return
        self._stand_in = (leader, term)
        self._wanted = False
        self.send_raft(leader, (BEHIND, term, 1))
        self.sink.on_leader(self.group, leader, term)

    def _lose_stand_in(self) -> None:
        self._stand_in = (0, 0)
        self._follows_since = -1
        self.host.active.add(self.group)
        self.sink.on_leader(self.group, None, self.core.term)

    def _watch_own_lag(self, now: int) -> bool:
        """Follower: has the leader serve the clients here when catching up takes long; False when
        there is nothing to watch."""
        core = self.core
        leader = core.leader
        if not leader and self._is_cut_off():
            return self._ask_leader(now)
        if not leader or self._is_told():
            return False
        if self._follows_since < 0:
            self._follows_since = now
        if now - self._follows_since >= self.host.config.lag_ms and leader in core.connected:
            self._stand_in = (leader, core.term)
            self.send_raft(leader, (BEHIND, core.term, 1))
            self.sink.on_leader(self.group, leader, core.term)
            return False
        return True

    def _on_behind(self, sender: int, message: Sequence[Any]) -> None:
        """Leader: takes over for a node whose replica is behind, or leaves it to that again.
        Follower: hears of the leader that it lags, or does not any more."""
        core = self.core
        if sender == core.leader and message[1] == core.term and len(message) == 3:
            for_ms = LAG_BELIEVED_FOR * self.host.config.lag_ms
            self._lags_until = self.host.clock.monotonic_ms() + for_ms if message[2] else 0
            return
        if core.role != LEADER or message[1] != core.term or len(message) != 3:
            return
        if not message[2]:
            self.behind_nodes.discard(sender)
        elif sender in core.members.nodes:
            self.behind_nodes.add(sender)
            if sender in self.machine.session_nodes():
                self._resend_for(sender)

    def _watch_lag_of(self, peer: Any, now: int) -> None:
        """Leader: does the follower have by now what was committed a while ago?"""
        if peer.match >= peer.goal:
            peer.goal = self.core.commit_index
            peer.goal_ms = now
            if peer.node in self.lagging_nodes:
                self.lagging_nodes.discard(peer.node)
                self.send_raft(peer.node, (BEHIND, self.core.term, 0))
        elif now - peer.goal_ms >= self.host.config.lag_ms:
            self.lagging_nodes.add(peer.node)
            if now - peer.lag_told_ms >= LAG_TOLD_EVERY * self.host.config.lag_ms:
                # Its clients know this leader; who reads there should, too.
                peer.lag_told_ms = now
                self.send_raft(peer.node, (BEHIND, self.core.term, 1))

    def _greet(self) -> None:
        """A new leader tells session nodes without a replica, and looks after sessions' nodes."""
        core = self.core
        for node in sorted(self.machine.session_nodes()):
            if node not in core.members.nodes:
                self.send_raft(node, (LEADER_IS, core.term, self.host.node))
            self._propose_state_of(node)
        if self.machine.next_due_ms() is not None:
            # The machine says its due times again.
            self.propose(batch.CMD_TICK)
        self.host.active.add(self.group)
        self._raise_version()

    def _propose_state_of(self, node: int) -> None:
        host = self.host
        if node == host.node or node in host.reachable:
            incarnation = host.incarnation_of(node)
            if incarnation:
                self.propose(batch.CMD_NODE_UP, arg=node, body=incarnation.to_bytes(8, "little"))
        else:
            self.propose(
                batch.CMD_NODE_DOWN, flags=FLAG_NODE_GONE if node in host.gone else 0, arg=node
            )

    # Versions.

    @property
    def kind(self) -> str:
        """Name of the machine's rules."""
        return self.machine.KIND

    @property
    def version(self) -> int:
        """Version of the machine's rules that is in force."""
        return self.machine.version

    def _version_changed(self) -> None:
        machine = self.machine
        self.allowed = machine.command_types(machine.version)
        self.host.on_version_in_force(machine.KIND, machine.version)

    def _raise_version(self) -> None:
        """Leader: proposes the newest version that all members support, all being connected."""
        core = self.core
        machine = self.machine
        if machine.version >= machine.VERSION or core.role != LEADER:
            return
        if self.host.config.hold_versions or core.transfer_target or not self.takes_entries:
            return
        established = self._known_leader == (core.leader, core.term)
        if not established or self._version_index > core.applied_index:
            return
        newest = machine.VERSION
        for node in core.members.nodes:
            if node == self.host.node:
                continue
            if node not in core.connected:
                return
            newest = min(newest, supported.newest_of(self.host.supports.get(node, {}), self.kind))
        if newest <= machine.version:
            return
        self.open_term()
        if self.builder.used:
            self.seal()
        index = self._version_index = self.log.last_index + 1
        self._append(
            make_entry(
                self.group, index, core.term, self.time.now_ms(), VERSION,
                batch.encode_version(newest),
            )
        )  # fmt: skip

    # Members.

    def change_members(self, members: Membership) -> bool:
        """Leader: proposes a single-step change; False when that is not possible now."""
        core = self.core
        if not self.takes_entries or core.changes.refusal_of(members) is not None:
            return False
        if any(self.member_refusal(node) for node in members.nodes - core.members.nodes):
            return False
        if self.builder.used:
            self.seal()
        index = self.log.last_index + 1
        former = list(core.peers)
        self._append(
            make_entry(
                self.group, index, core.term, self.time.now_ms(), MEMBERSHIP, members.encode()
            )
        )
        for peer in former:
            if peer.node not in core.progress:
                sending = self.sending.pop(peer.node, None)
                if sending is not None:
                    sending.stop()
                # So that it may know; nothing depends on it.
                self.replicate(peer)
        return True

    def member_refusal(self, node: int) -> str:
        """Why the group can't take in a node that is not a member: "" = it can."""
        version = self.version
        if node == self.host.node:
            return ""
        known = self.host.supports.get(node, {})
        if supported.is_supported(known, self.kind, version):
            return ""
        found = known.get(self.kind)
        which = f"{found[0]} to {found[1]}" if found else "1 to 1"
        return (
            f"node {node} supports the versions {which} of the {self.kind} machine as far as known;"
            f" version {version} is in force"
        )

    def _next_members(self) -> None:
        members = self.core.changes.proposal()
        if members is not None:
            self.change_members(members)

    def add_member(self, node: int, *, voter: bool = True) -> bool:
        """Leader: adds a learner; with `voter` it is promoted once it has caught up."""
        members = self.core.members
        if node in members.nodes:
            return self.core.role == LEADER
        learner = self.core.changes.new_learner(node) if voter else Learner(node, 1 << 62)
        return self.change_members(members.with_learner(learner))

    def remove_member(self, node: int) -> bool:
        """Leader: removes a voter or learner. The last voter stays."""
        members = self.core.members
        if node not in members.nodes:
            return self.core.role == LEADER
        return self.change_members(members.without(node))

    def replace_member(self, node: int, by: int) -> bool:
        """Leader: removes a member and takes in another one, which gets a vote when it has caught
        up; one entry, so that no new leader can know of one half only. `by` 0: only removes."""
        members = self.core.members.without(node)
        if by:
            members = members.with_learner(self.core.changes.new_learner(by))
        return self.change_members(members)

    def recover_membership(self, members: Membership) -> str | None:
        """Goes on without the majority that is lost: this node as the only voter, others as
        non-voters that get everything anew. Returns why it may not; None = it does.

        The former members must not be heard any more: their disks may hold what this replica does
        not, committed (`MembershipChanges.force`).
        """
        if self.dead or self.faulty or self.receiving is not None:
            return self.stopped or self.faulty or "this replica is being replaced by a snapshot"
        refusal = self.core.changes.force(members)
        if refusal is None:
            self.host.note(
                "raft.membership_forced",
                group=self.group,
                last_index=self.log.last_index,
                members=sorted(members.nodes),
            )
            self.run_effects()
            self.host.wake()
        return refusal

    def transfer(self, to: int) -> bool:
        """Leader: hands the leadership to a voter; new commands wait meanwhile."""
        self.open_term()
        if self.core.transfer(to) is not None:
            return False
        self._transfer_began = self.host.now
        self.host.active.add(self.group)
        self.release()
        self.run_effects()
        return True

    # Reachability and time.

    def concerns(self, node: int) -> bool:
        """Is it of interest here whether that node can be reached?"""
        core = self.core
        # A leader that has proposed its own removal is no member any more, and leads on.
        if node == core.leader or node == self._stand_in[0] or node in core.members.nodes:
            return True
        return self._may_serve(node)

    def _may_serve(self, node: int) -> bool:
        """Has that node a session, or may one begin with what is not applied yet?"""
        if node in self.machine.session_nodes():
            return True
        unapplied = self.core.applied_index < self.log.last_index or self.builder.used
        return self.core.role == LEADER and bool(unapplied)

    def on_reachable(self, node: int) -> None:
        """A node can be reached (again)."""
        core = self.core
        if self.faulty:
            return
        core.on_reachable(node)
        if core.role == LEADER:
            peer = core.progress.get(node)
            sending = self.sending.get(node)
            if sending is not None:
                sending.resume()
            elif peer is not None:
                self.probe(peer)
            if self._may_serve(node):
                self._propose_state_of(node)
            if node in self.machine.session_nodes():
                if node not in core.members.nodes:
                    self.send_raft(node, (LEADER_IS, core.term, self.host.node))
                self._resend_for(node)
            self._raise_version()
        elif core.leader == node and self._is_told():
            if self._stand_in[0]:
                self.send_raft(node, (BEHIND, core.term, 1))
            # What was forwarded to it may have been lost with the link.
            self.sink.on_leader(self.group, node, core.term)
        self.run_effects()

    def on_unreachable(self, node: int) -> None:
        """A node is away or suspected."""
        core = self.core
        if node == self._stand_in[0] and not core.leader:
            self._lose_stand_in()
        if node == core.leader:
            self._lags_until = 0
        if self.faulty:
            return
        self._spread = self.group != 0 and not self.builder.used and not self._is_used()
        core.on_suspected(node)
        self.behind_nodes.discard(node)
        if core.role == LEADER:
            if self.builder.used:
                # Held back for a transfer to that node, which is off now.
                self.host.mark_dirty(self)
            if self._may_serve(node):
                self._propose_state_of(node)
        elif core.leader == node and self._is_told():
            self.sink.on_leader(self.group, None, core.term)
        self.run_effects()
        self._spread = False

    def _is_used(self) -> bool:
        return bool(self.machine.session_nodes())

    def is_live(self, node: int) -> bool:
        """Leader: does that node's own replica serve its sessions?"""
        if node == self.host.node:
            return True
        peer = self.core.progress.get(node)
        return (
            peer is not None
            and peer.connected
            and not peer.silent
            and peer.state == REPLICATE
            and node not in self.behind_nodes
            and node not in self.lagging_nodes
            and self.core.commit_index - peer.match <= self.host.config.lag_entries_max
        )

    def _resend_for(self, node: int) -> None:
        if self.core.role != LEADER or self.is_live(node):
            return
        self.sending_for.add(node)
        self.machine.resend(node)
        if self.machine.effects:
            self._execute()

    def _watch_replicas(self) -> bool:
        """Leader: takes over the sending for nodes whose replica fell away; True while it does."""
        for node in self.machine.session_nodes():
            if self.is_live(node):
                self.sending_for.discard(node)
            elif node in self.host.reachable and node not in self.sending_for:
                self._resend_for(node)
        return bool(self.sending_for)

    def tick(self, now: int) -> bool:
        """Looks after what is outstanding; False when nothing is."""
        core = self.core
        if core.role != LEADER:
            return self._watch_own_lag(now)
        config = self.host.config
        outstanding = False
        if core.transfer_target:
            outstanding = True
            if now - self._transfer_began >= config.retransmit_ms:
                core.abort_transfer()
                self.host.mark_dirty(self)
        last = self.log.last_index
        core.pace_due = True
        for peer in core.peers:
            if not peer.connected:
                continue
            self._watch_lag_of(peer, now)
            if peer.commit_sent < core.commit_index and peer.state == REPLICATE:
                self._send_commit(peer)
            if peer.match >= last and peer.state == REPLICATE:
                peer.stalled_ms = 0
                peer.owes_ms = 0
                if peer.silent:
                    core.on_answer(peer)
                continue
            outstanding = True
            if self.host.is_held_up(peer.node):
                # It is not the peer that makes no progress.
                peer.owes_ms = peer.stalled_ms = now
                continue
            if not peer.owes_ms:
                peer.owes_ms = now
            elif not peer.silent and now - peer.owes_ms >= config.quorum_timeout_ms:
                self.host.note("raft.peer_silent", group=self.group, peer=peer.node)
                core.on_silent(peer.node)
            sending = self.sending.get(peer.node)
            if sending is not None:
                sending.tick()
            elif peer.stalled_match != peer.match or not peer.stalled_ms:
                peer.stalled_match = peer.match
                peer.stalled_ms = now
            elif now - peer.stalled_ms >= config.retransmit_ms:
                peer.stalled_ms = now
                if peer.state == SNAPSHOT:
                    self._send_snapshot(peer)
                else:
                    self.probe(peer)
        if core.members_due:
            self._next_members()
            outstanding = outstanding or core.members_due
        if core.effects:
            self.run_effects()
        return self._watch_replicas() or outstanding

    # Snapshots.

    def make_snapshot(self) -> Snapshot:
        """The machine's state after the last applied entry."""
        core = self.core
        index = core.applied_index
        return Snapshot(
            index=index,
            term=self.log.term_at(index),
            membership=core.members_at(index).encode(),
            state=self.machine.snapshot(),
        )

    def needed_from(self) -> int:
        """The first entry whose body the machine, a follower or a client may ask for soon."""
        return min(self._keep_from(), self.machine.oldest_live())

    def _keep_from(self) -> int:
        """The first entry that is not applied, or that a follower lacks."""
        core = self.core
        keep_from = core.applied_index + 1
        for peer in core.peers:
            if peer.connected and peer.state == REPLICATE:
                keep_from = min(keep_from, peer.match + 1)
        return int(keep_from)

    def plan(self) -> GroupPlan | None:
        """What storage may drop when a WAL file is emptied."""
        core = self.core
        if self.faulty or self.stopped:
            return None
        applied = core.applied_index
        keep_from = self._keep_from()
        core.trim_memberships(self.log.snapshot_index)
        return GroupPlan(
            live_ranges=[r for r in self.machine.live_ranges() if r[0] <= applied],
            applied=applied,
            keep_from=keep_from,
            take_snapshot=self.make_snapshot if applied and self.receiving is None else None,
        )

    def _send_snapshot(self, peer: Any) -> None:
        if not self.core.applied_index:
            return
        sending = self.sending.get(peer.node)
        if sending is None:
            sending = self.sending[peer.node] = SnapshotSending(self, peer.node)
            self.host.counters.snapshots_sent += 1
        peer.snapshot()
        self.host.active.add(self.group)
        sending.resume()

    def snapshot_sent(self, node: int, index: int) -> None:
        """A follower has installed the snapshot, or (index 0) could not."""
        self.sending.pop(node, None)
        peer = self.core.progress.get(node)
        if peer is not None:
            peer.probe(max(index, peer.match) + 1)
            self.probe(peer)

    def _on_snapshot_message(self, sender: int, message: Sequence[Any]) -> None:
        core = self.core
        kind, term = message[0], message[1]
        if kind in (transfer.ACKNOWLEDGE, transfer.DONE):
            sending = self.sending.get(sender)
            if sending is not None and core.role == LEADER and term == core.term:
                peer = core.progress.get(sender)
                if peer is not None:
                    peer.owes_ms = 0
                    if peer.silent:
                        core.on_answer(peer)
                sending.on_message(message)
            return
        if core.lost_state:
            return
        if not core.on_commit(sender, term, 0):
            # A leader that sends a snapshot sends nothing else by which it could learn its term
            # is over: it would go on for ever (thesis, figure 5.3).
            self._reply(sender, 0, 0, 1)
            return
        receiving = self.receiving
        if kind == transfer.BEGIN:
            if receiving is not None and not receiving.is_same(sender, message):
                if receiving.finishing:
                    return
                receiving.abort()
                receiving = self.receiving = None
            if receiving is None:
                _, _, identity, index, index_term, _, _, version = message
                if self._holds(index, index_term):
                    # What was acknowledged above that index must stay: appends go on from there.
                    self.send_raft(sender, (transfer.DONE, term, identity, index))
                    return
                try:
                    supported.check_version(self.machine, version)
                except UnsupportedVersion as error:
                    # Before anything of it is kept, and the own log stays.
                    self._fail(index, "snapshot", error)
                    return
                receiving = self.receiving = SnapshotReceiving(self, sender, message)
        if receiving is not None:
            try:
                receiving.on_message(sender, message)
            except UnsupportedVersion as error:
                self._fail(receiving.index, "snapshot", error)

    def _holds(self, index: int, term: int) -> bool:
        if index <= self.core.commit_index:
            return True
        return index <= self.log.last_index and self.log.term_at(index) == term

    def install(self, index: int, membership: bytes, state: bytes) -> None:
        """A received snapshot is durable: it becomes the state."""
        self.receiving = None
        core = self.core
        try:
            self.machine.restore(state)
        except InvariantViolated:
            raise
        except Exception as error:
            self._fail(index, "snapshot", error)
            return
        self.machine.effects = []
        self._version_changed()
        core.on_installed(index, decode_membership(membership))
        self.time.heard(self.machine.time_ms)
        self.host.counters.snapshots_installed += 1
        self.sink.on_restored()
        self.machine.resend(self.host.node)
        if self.machine.effects:
            self._execute()
        if core.leader and self.log.last_term == core.term:
            self._established()
        self._acknowledge()
        self.host.on_membership(self, core.members)
        self.run_effects()

    def receiving_failed(self) -> None:
        """The snapshot could not be made durable; the former log stands."""
        self.receiving = None

    # Faults.

    def on_damage(self) -> None:
        """A log of this node was found damaged: perhaps this one."""
        if self.log.damaged is not None and not self.faulty:
            self._resynchronise(self.log.damaged)
            self.run_effects()

    def _resynchronise(self, damage: Any) -> None:
        """The log is damaged: nothing of it is served; it is wiped and fetched from the others."""
        self.host.note("raft.replica_damaged", group=self.group, reason=damage.reason)
        self.faulty = damage.reason
        self.host.active.add(self.group)
        self._end_transfers()
        core = self.core
        core.lost_data.quarantine(bool(damage.vote_lost))
        self._cancel_timers()
        if (core.durable_term, core.durable_vote) == (core.term, core.voted_for):
            self.log.wipe(self._wiped)
        else:
            # Not before the mark is on disk: see `LostData.quarantine`.
            self._wiping = True

    def _wiped(self, error: BaseException | None) -> None:
        if self.dead:
            return
        if error is not None:
            self.host.note("raft.wipe_failed", group=self.group, error=str(error))
            return
        self.faulty = ""
        self.machine.restore(self._pristine)
        self.machine.effects = []
        self._version_changed()
        self.core.lost_data.on_log_lost()
        self.run_effects()
