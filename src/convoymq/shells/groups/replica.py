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

from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import CommandBuilder
from convoymq.kernels.entries import (
    ENTRY_COMMANDS,
    ENTRY_MEMBERSHIP,
    ENTRY_NOOP,
    ENTRY_VERSION,
    make_entry,
    split_entries,
)
from convoymq.kernels.link_frames import frame
from convoymq.model.errors import (
    PeerError,
    ReplicaStopped,
    StorageFault,
    UnsupportedVersion,
    check,
)
from convoymq.replication.machine import FLAG_NODE_GONE, Machine
from convoymq.replication.raft import types
from convoymq.replication.raft.core import RaftCore
from convoymq.replication.raft.membership import Membership, decode_membership
from convoymq.replication.raft.types import LEADER, REPLICATE, ROLE_NAMES, Received
from convoymq.shells.effect_sink import EffectSink
from convoymq.shells.groups import transfer
from convoymq.shells.groups.applying import Applying
from convoymq.shells.groups.damage import DamagedLog
from convoymq.shells.groups.election_timer import ElectionTimer
from convoymq.shells.groups.group_time import GroupTime
from convoymq.shells.groups.lagging import LaggingReplicas
from convoymq.shells.groups.member_changes import MemberChanges
from convoymq.shells.groups.sender import EntrySender
from convoymq.shells.groups.serving import BEHIND, LEADER_IS, Serving
from convoymq.shells.groups.snapshots import SnapshotTransfers
from convoymq.shells.groups.version_raising import VersionRaising

if TYPE_CHECKING:
    from convoymq.shells.groups.append_fence import AppendFence
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.storage.log import GroupLog

HEADER = link_frames.HEADER_SIZE
NOOP = ENTRY_NOOP
COMMANDS = ENTRY_COMMANDS
MEMBERSHIP = ENTRY_MEMBERSHIP
VERSION = ENTRY_VERSION
FLAG_RESET = 1
"""APPEND_REPLY: the follower lost its log; what it acknowledged before does not count."""
FLAG_VOTELESS = 2
"""APPEND_REPLY: the follower may not vote yet."""


class Replica:
    """A group's member on this node. Made by `ReplicaHost.create_group`."""

    def __init__(
        self,
        host: ReplicaHost,
        group: int,
        log: GroupLog,
        machine: Machine,
        sink: EffectSink[Replica],
        builder: CommandBuilder,
        members: Membership,
    ) -> None:
        self.host = host
        self.group = group
        self.log = log
        self.machine: Any = machine
        """A `Machine`; its sink knows which."""
        self.sink = sink
        self.builder = builder
        #: Stopped for good.
        self.dead = False
        #: Why it does not take part for now (its log is damaged), or "".
        self.faulty = ""
        #: Why it takes part no more (`stop_for`), or "".
        self.stopped = ""
        #: Since when the open batch waits to be coalesced, ms; -1 = it does not.
        self._waits_since = -1
        #: When the last entry was made, ms.
        self._sealed_ms = 0
        #: The open batch has commands of another node: they were gathered there.
        self.has_forwarded = False
        #: The host will look at the open batch again.
        self.batch_due = False
        self.fence: AppendFence | None = None
        #: Commands for the leader that wait for room: (node, term, frame).
        self.late: deque[tuple[int, int, bytes]] = deque()
        self.time = GroupTime(host.clock)
        self._transfer_began = 0
        #: Leader: the entry that opens the term is not in the log yet.
        self.opening = False
        config = host.config
        self.core: RaftCore = host.core_class(
            host.node,
            group,
            log,
            members,
            host.reachable,
            host.clock.random,
            config.election_timeout_ms,
            config.link_window_bytes,
            host.next_number(),
        )
        self.snapshots = SnapshotTransfers(self)
        self.sender = EntrySender(self)
        self.serving = Serving(self)
        self.lagging = LaggingReplicas(self)
        self.election_timer = ElectionTimer(self)
        self.versions = VersionRaising(self)
        self.changes = MemberChanges(self)
        self.applying = Applying(self)
        self.damage = DamagedLog(self)
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
        self.election_timer.spread = self.group != 0 and log.last_index > 0
        if log.damaged is None:
            try:
                self._recover(campaign)
            except StorageFault:
                check(log.damaged is not None, f"group {self.group}: unreadable, not damaged")
            except Exception as error:
                self.fail(log.snapshot_index, "snapshot", error)
                return
        if log.damaged is not None:
            self.damage.resynchronise(log.damaged)
        elif new and not log.last_index and not log.term:
            self.core.lost_data.quarantine(True)
            self.core.lost_data.on_log_lost()
        self.run_effects()
        self.election_timer.spread = False
        if self.serving.is_cut_off():
            self.host.active.add(self.group)
        if self.core.role == LEADER:
            # The founder: nothing older than its term has to be applied first.
            self.serving.establish()

    def _recover(self, campaign: bool) -> None:
        log = self.log
        core = self.core
        if log.snapshot_index:
            snapshot = log.read_snapshot()
            check(snapshot is not None, f"group {self.group}: the snapshot is gone")
            assert snapshot is not None
            self.machine.restore(snapshot.state)
            core.memberships = [(snapshot.index, decode_membership(snapshot.membership))]
        self.versions.changed()
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

    def stop_for(self, reason: str, **facts: object) -> None:
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

    def fail(self, index: int, what: str, error: BaseException) -> None:
        """Stops for an error in what must come out alike on every replica."""
        facts: dict[str, object] = {"index": index}
        if not isinstance(error, ReplicaStopped):
            facts["error"] = "".join(traceback.format_exception(error))
        named = "" if isinstance(error, ReplicaStopped) else f"{type(error).__name__}: "
        self.stop_for(f"{what} {index}: {named}{error}", **facts)

    def stop(self) -> None:
        """Ends all that could call back."""
        self.dead = True
        self.cancel_timers()
        self.snapshots.end()

    def cancel_timers(self) -> None:
        """Ends what would call back later."""
        if self.election_timer._timer is not None:
            self.election_timer._timer.cancel()
            self.election_timer._timer = None

    # Views.

    @property
    def is_leader(self) -> bool:
        """Returns whether this replica leads."""
        return self.core.role == LEADER

    @property
    def leader(self) -> int | None:
        """Node that leads, as far as known."""
        return self.core.leader or None

    @property
    def serving_leader(self) -> int | None:
        """Node that leads, as far as known to this replica or, while it has no log, to others."""
        return self.core.leader or self.serving.serving[0] or None

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
        """Returns the leader whose first entry is applied here; 0 = none."""
        core = self.core
        known = core.leader and self.serving.established == (core.leader, core.term)
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
            held = self.fence is not None and self.fence.holds_back()
            if held or core.transfer_target or not self.takes_entries:
                return
            if builder.deferrable and self._may_wait():
                return
            if self._may_gather():
                return
            if self.opening:
                self.open_term()
            self._waits_since = -1
            self._sealed_ms = self.host.now
            self.has_forwarded = False
            entry = builder.take_entry(
                self.group, self.log.last_index + 1, core.term, self.time.now_ms()
            )
            self.sender.append(entry)
            return
        leader, term = self.serving.leader_of_clients()
        if leader and leader in core.connected:
            data = builder.take_forward(self.group, term)
            self.host.forwarding.forward(self, leader, term, data)
        else:
            builder.discard_unsent()
            self.serving.wanted = True
            if self.election_timer.is_deferred:
                self.election_timer.campaign()

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
        self.host.deferred.coalesce(self)
        return True

    def _may_gather(self) -> bool:
        """Commands gather for a moment while an entry is under way (ADR 0056)."""
        core = self.core
        config = self.host.config
        if (
            core.commit_index == self.log.last_index
            or self.has_forwarded
            or self.host.now - self._sealed_ms >= config.gather_ms
            or self.builder.used >= config.gather_bytes_max
        ):
            return False
        self.builder.held = True
        self.host.deferred.coalesce(self)
        return True

    def propose(
        self, type: int, flags: int = 0, count: int = 0, arg: int = 0, body: bytes = b""
    ) -> None:
        """Adds a command of the leader itself (session 0) to the open batch."""
        if self.core.role == LEADER:
            self.builder.add(type, flags, 0, 0, count, arg, body)

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        if self.dead:
            return
        if self.late:
            self.host.forwarding.send_late(self, node, *self.serving.leader_of_clients())
        if self.faulty:
            return
        sending = self.snapshots.sending.get(node)
        if sending is not None:
            sending.on_room()
        peer = self.core.progress.get(node)
        if peer is not None:
            self.sender.replicate(peer)

    def on_lost(self, node: int) -> None:
        """A node for which something waited is away."""
        if self.late and self.late[0][0] == node:
            self.late.clear()

    # Follower.

    def on_append(
        self, sender: int, data: bytes, term: int, previous: int, previous_term: int, commit: int
    ) -> None:
        """Takes an APPEND frame."""
        core = self.core
        if self.faulty or core.lost_state or not self.takes_entries:
            return
        receiving = self.snapshots.receiving
        if receiving is not None:
            if term < receiving.term or receiving.finishing:
                return
            # A leader that sends a snapshot sends no entries: it has given this one up, and what
            # began it came late. Was it the other way round, the snapshot begins anew.
            receiving.abort()
            self.snapshots.receiving = None
        try:
            entries = split_entries(data, HEADER) if len(data) > HEADER else ()
        except UnsupportedVersion as error:
            self.fail(previous + 1, "entry", error)
            return
        except ValueError as error:
            raise PeerError(f"group {self.group}: append of node {sender}: {error}") from None
        was = core.commit_index
        if not core.on_append(sender, term, previous, previous_term, commit, entries):
            flags = FLAG_RESET if core.quarantined else 0
            self.reply(sender, flags, core.reject_hint, max(previous, 1))
        elif core.reply_due:
            self.acknowledge()
        if entries:
            self.time.heard(entries[len(entries) - 1].time_ms)
        if core.commit_index > was:
            self.host.mark_apply(self)
        if core.effects:
            self.run_effects()

    def acknowledge(self) -> None:
        """Tells the leader what is on disk here, if it is to be told."""
        index = self.core.take_reply()
        if index >= 0:
            flags = FLAG_VOTELESS if self.core.quarantined else 0
            self.reply(self.core.leader, flags, index, 0)

    def reply(self, to: int, flags: int, index: int, rejected: int) -> None:
        """Answers an append."""
        self.host.transport.send(
            to,
            frame(
                link_frames.FRAME_APPEND_REPLY,
                flags,
                self.group,
                self.core.term,
                index,
                rejected,
                0,
            ),
        )

    def on_commit(self, sender: int, term: int, commit: int) -> None:
        """Takes a COMMIT notice."""
        core = self.core
        if self.faulty or core.lost_state or self.snapshots.receiving is not None:
            return
        was = core.commit_index
        if not core.on_commit(sender, term, commit):
            self.reply(sender, 0, 0, 1)
        if core.reply_due:
            self.acknowledge()
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
            self.acknowledge()
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
                self.sender.on_answer(peer, rejected != 0)
        self._after(was)

    def _after(self, was: int) -> None:
        core = self.core
        if core.commit_index > was:
            self.host.mark_apply(self)
        if core.members_due:
            self.changes.go_on()
        if core.effects:
            self.run_effects()

    def on_vote_written(self, group: int, term: int, voted_for: int) -> None:
        """Term and vote are on disk."""
        if self.dead:
            return
        core = self.core
        core.on_vote_written(term, voted_for)
        if self.damage.is_marking and voted_for in (types.QUARANTINED, types.LOST_STATE):
            self.damage.is_marking = False
            self.log.wipe(self.damage.on_wiped)
        if core.reply_due and not self.faulty:
            self.acknowledge()
        self.run_effects()

    def on_message(self, sender: int, message: Received) -> None:
        """Takes a RAFT frame's message. Raises PeerError."""
        if message[0] == LEADER_IS:
            self.serving.on_leader_is(sender, message)
            return
        if self.faulty:
            return
        core = self.core
        was = core.commit_index
        if message[0] >= transfer.BEGIN:
            self.snapshots.on_message(sender, message)
        elif message[0] == BEHIND:
            self.lagging.on_behind(sender, message)
        else:
            leads = core.role == LEADER
            core.on_message(sender, message)
            peer = core.progress.get(sender)
            if leads and peer is not None and not peer.waiting:
                # It asked for a vote or to be taken in: it does not know that this node leads.
                self.sender.probe(peer)
        self._after(was)

    def run_effects(self) -> None:
        """Carries out what the core decided."""
        core = self.core
        while core.effects:
            effects = core.effects
            core.effects = []
            for effect in effects:
                if isinstance(effect, types.Send):
                    self.send_raft(effect.node, effect.message)
                elif isinstance(effect, types.Arm):
                    self.election_timer.arm(effect.delay_ms)
                elif isinstance(effect, types.Disarm):
                    self.election_timer.disarm()
                elif isinstance(effect, types.Lead):
                    self._became_leader()
                else:
                    self._role_changed()

    def send_raft(self, node: int, message: Sequence[object]) -> None:
        """Sends a general message."""
        body = msgspec.msgpack.encode(message)
        self.host.transport.send(
            node, frame(link_frames.FRAME_RAFT, 0, self.group, self.core.term, 0, 0, 0, body)
        )

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
        self.versions.proposed_index = 0
        self.sender.sample = 0
        self.opening = True
        if core.founded:
            # The first command opens the term; without one there is time until others do.
            self.host.deferred.hold_opening(self)
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
        self.sender.opening = index
        self.sender.append(make_entry(self.group, index, core.term, self.time.now_ms(), kind, body))

    def _role_changed(self) -> None:
        core = self.core
        if core.role != LEADER:
            self.opening = False
            for sending in self.snapshots.sending.values():
                sending.stop()
            self.snapshots.sending.clear()
            self.lagging.sending_for.clear()
            self.lagging.behind_nodes.clear()
            self.lagging.lagging_nodes.clear()
        if self.builder.used:
            self.host.mark_dirty(self)
        if not core.leader or core.role == LEADER:
            self.serving.lags_until = 0
        present = (core.leader, core.term)
        if not core.leader or self.serving.established != present:
            told = self.serving.established[0] or self.serving.serving[0]
            self.serving.established = (0, 0)
            if self.serving.serving[0] and (
                self.serving.is_cut_off() or self.serving.serving == present
            ):
                # Clients know already who serves them.
                told = 0
            else:
                self.serving.serving = (0, 0)
            self.serving.follows_since = -1
            if core.leader and core.role != LEADER:
                # The ticks see whether this replica catches up soon.
                self.host.active.add(self.group)
            if told:
                self.host.counters.leader_changes += 1
                self.sink.on_leader(self.group, None, core.term)
            # A leader that was doubted and is heard again may have nothing new to say. A snapshot
            # that is coming in says it itself (`install`).
            heard = core.leader and self.snapshots.receiving is None and not self.faulty
            if heard and self.log.term_at(core.applied_index) == core.term:
                self.serving.establish()

    # A replica that is behind.

    @property
    def is_behind(self) -> bool:
        """Follower: the leader serves this node's clients, as this replica catches up."""
        if self.serving.serving[0]:
            return True
        return (
            self.serving.lags_until > 0 and self.host.clock.monotonic_ms() < self.serving.lags_until
        )

    def propose_state_of(self, node: int) -> None:
        """Leader: has the machine know whether a node is up."""
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
        """Returns the name of the machine's rules."""
        kind: str = self.machine.KIND
        return kind

    @property
    def version(self) -> int:
        """Version of the machine's rules that is in force."""
        version: int = self.machine.version
        return version

    # Members.

    def transfer(self, to: int) -> bool:
        """Leader: hands the leadership to a voter; new commands wait meanwhile."""
        self.open_term()
        if self.core.transfer(to) is not None:
            return False
        self._transfer_began = self.host.now
        self.host.active.add(self.group)
        self.sender.release()
        self.run_effects()
        return True

    # Reachability and time.

    def concerns(self, node: int) -> bool:
        """Is it of interest here whether that node can be reached?"""
        core = self.core
        # A leader that has proposed its own removal is no member any more, and leads on.
        if node == core.leader or node == self.serving.serving[0] or node in core.members.nodes:
            return True
        return self.may_serve(node)

    def may_serve(self, node: int) -> bool:
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
            sending = self.snapshots.sending.get(node)
            if sending is not None:
                sending.resume()
            elif peer is not None:
                self.sender.probe(peer)
            if self.may_serve(node):
                self.propose_state_of(node)
            if node in self.machine.session_nodes():
                if node not in core.members.nodes:
                    self.send_raft(node, (LEADER_IS, core.term, self.host.node))
                self.lagging.resend_for(node)
            self.versions.propose()
        elif core.leader == node and self.serving.is_told():
            if self.serving.serving[0]:
                self.send_raft(node, (BEHIND, core.term, 1))
            # What was forwarded to it may have been lost with the link.
            self.sink.on_leader(self.group, node, core.term)
        self.run_effects()

    def on_unreachable(self, node: int) -> None:
        """A node is away or suspected."""
        core = self.core
        if node == self.serving.serving[0] and not core.leader:
            self.serving.lose_leader()
        if node == core.leader:
            self.serving.lags_until = 0
        if self.faulty:
            return
        self.election_timer.spread = (
            self.group != 0 and not self.builder.used and not self.is_used()
        )
        core.on_suspected(node)
        self.lagging.behind_nodes.discard(node)
        if core.role == LEADER:
            if self.builder.used:
                # Held back for a transfer to that node, which is off now.
                self.host.mark_dirty(self)
            if self.may_serve(node):
                self.propose_state_of(node)
        elif core.leader == node and self.serving.is_told():
            self.sink.on_leader(self.group, None, core.term)
        self.run_effects()
        self.election_timer.spread = False

    def is_used(self) -> bool:
        """Returns whether somebody has a session here."""
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
            and node not in self.lagging.behind_nodes
            and node not in self.lagging.lagging_nodes
            and self.core.commit_index - peer.match <= self.host.config.lag_entries_max
        )

    def tick(self, now: int) -> bool:
        """Looks after what is outstanding; False when nothing is."""
        core = self.core
        if core.role != LEADER:
            return self.serving.watch(now)
        config = self.host.config
        outstanding = False
        if core.transfer_target:
            outstanding = True
            if now - self._transfer_began >= config.retransmit_ms:
                core.abort_transfer()
                self.host.mark_dirty(self)
        self.versions.propose_if_due()
        outstanding = self.sender.watch(now) or self.versions.due or outstanding
        if core.members_due:
            self.changes.go_on()
            outstanding = outstanding or core.members_due
        if core.effects:
            self.run_effects()
        return self.lagging.watch() or outstanding
