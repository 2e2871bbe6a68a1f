# cython: annotation_typing=False
"""Snapshots of one replica that are sent and received (`transfer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.errors import UnsupportedVersion
from convoymq.replication import versions as supported
from convoymq.replication.raft.membership import decode_membership
from convoymq.replication.raft.types import LEADER, REPLICATE, Received
from convoymq.shells.groups import transfer
from convoymq.shells.groups.transfer import SnapshotReceiving, SnapshotSending
from convoymq.storage.types import GroupPlan, Snapshot

if TYPE_CHECKING:
    from convoymq.replication.raft.progress import Progress
    from convoymq.shells.groups.replica import Replica


class SnapshotTransfers:
    """Snapshots on their way to and from one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.group = replica.group
        self.receiving: SnapshotReceiving | None = None
        self.sending: dict[int, SnapshotSending] = {}

    def send(self, peer: Progress) -> None:
        """Sends a follower the state instead of entries that are gone."""
        if not self.core.applied_index:
            return
        sending = self.sending.get(peer.node)
        if sending is None:
            sending = self.sending[peer.node] = SnapshotSending(self.replica, peer.node)
            self.host.counters.snapshots_sent += 1
        peer.snapshot()
        self.host.active.add(self.group)
        sending.resume()

    def on_sent(self, node: int, index: int) -> None:
        """A follower has installed the snapshot, or (index 0) could not."""
        replica = self.replica
        self.sending.pop(node, None)
        peer = self.core.progress.get(node)
        if peer is not None:
            peer.probe(max(index, peer.match) + 1)
            replica.sender.probe(peer)

    def on_message(self, sender: int, message: Received) -> None:
        """Takes a message about a snapshot."""
        replica = self.replica
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
            replica.reply(sender, 0, 0, 1)
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
                    replica.send_raft(sender, (transfer.DONE, term, identity, index))
                    return
                try:
                    supported.check_version(replica.machine, version)
                except UnsupportedVersion as error:
                    # Before anything of it is kept, and the own log stays.
                    replica.fail(index, "snapshot", error)
                    return
                receiving = self.receiving = SnapshotReceiving(replica, sender, message)
        if receiving is not None:
            try:
                receiving.on_message(sender, message)
            except UnsupportedVersion as error:
                replica.fail(receiving.index, "snapshot", error)

    def _holds(self, index: int, term: int) -> bool:
        if index <= self.core.commit_index:
            return True
        return index <= self.log.last_index and self.log.term_at(index) == term

    def install(self, index: int, membership: bytes, state: bytes) -> None:
        """A received snapshot is durable: it becomes the state."""
        replica = self.replica
        self.receiving = None
        core = self.core
        try:
            replica.machine.restore(state)
        except Exception as error:
            replica.fail(index, "snapshot", error)
            return
        replica.machine.effects = []
        replica.versions.changed()
        core.on_installed(index, decode_membership(membership))
        replica.time.heard(replica.machine.time_ms)
        self.host.counters.snapshots_installed += 1
        replica.sink.on_restored()
        replica.machine.resend(self.host.node)
        if replica.machine.effects:
            replica.applying.carry_out()
        if core.leader and self.log.last_term == core.term:
            replica.serving.establish()
        replica.acknowledge()
        self.host.on_membership(replica, core.members)
        replica.run_effects()

    def on_failed(self) -> None:
        """The snapshot could not be made durable; the former log stands."""
        self.receiving = None

    def end(self) -> None:
        """Ends all transfers."""
        for sending in self.sending.values():
            sending.stop()
        self.sending.clear()
        if self.receiving is not None:
            self.receiving.abort()
            self.receiving = None

    def make(self) -> Snapshot:
        """Returns the machine's state after the last applied entry."""
        replica = self.replica
        core = self.core
        index = core.applied_index
        return Snapshot(
            index=index,
            term=self.log.term_at(index),
            membership=core.members_at(index).encode(),
            state=replica.machine.snapshot(),
        )

    def needed_from(self) -> int:
        """Returns the first entry whose body the machine, a follower or a client may ask for
        soon."""
        replica = self.replica
        oldest_live: int = replica.machine.oldest_live()
        return min(self._keep_from(), oldest_live)

    def _keep_from(self) -> int:
        """Returns the first entry that is not applied, or that a follower lacks."""
        core = self.core
        keep_from = core.applied_index + 1
        for peer in core.peers:
            if peer.connected and peer.state == REPLICATE:
                keep_from = min(keep_from, peer.match + 1)
        return int(keep_from)

    def plan(self) -> GroupPlan | None:
        """Returns what storage may drop when a WAL file is emptied."""
        replica = self.replica
        core = self.core
        if replica.faulty or replica.stopped:
            return None
        applied = core.applied_index
        keep_from = self._keep_from()
        core.trim_memberships(self.log.snapshot_index)
        return GroupPlan(
            live_ranges=[r for r in replica.machine.live_ranges() if r[0] <= applied],
            applied=applied,
            keep_from=keep_from,
            take_snapshot=self.make if applied and replica.snapshots.receiving is None else None,
        )
