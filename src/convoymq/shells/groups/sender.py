# cython: annotation_typing=False
"""A leader's entries and commit indexes on their way to the followers.

At low rates entries for followers that nobody waits for are held back and sent together (ADR 0011).
That the entry which opens the term is committed every follower hears at once: its node serves no
client of the group before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels import link_frames
from convoymq.kernels.entries import Entry
from convoymq.kernels.link_frames import frame
from convoymq.model.errors import StorageFault
from convoymq.replication.raft.types import LEADER, REPLICATE, SNAPSHOT

if TYPE_CHECKING:
    from convoymq.replication.raft.progress import Progress
    from convoymq.shells.groups.replica import Replica


class EntrySender:
    """Sending of entries by one replica while it leads."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.machine = replica.machine
        self.group = replica.group
        #: The host holds back entries for deferred followers.
        self.holding = False
        #: The host will call `send_notices`.
        self.notice_due = False
        #: Index of the entry that opened the term.
        self.opening = 0
        #: An entry that is to tell how long a commit takes, and when it was appended, ms.
        self.sample = 0
        self._sample_ms = 0
        self._awaited: frozenset[int] = frozenset()

    def append(self, entry: Entry) -> None:
        """Appends an own entry and sends it at once; the own flush runs beside the followers'."""
        core = self.core
        config = self.host.config
        assert core.role == LEADER, "only a leader appends entries of its own"
        core.append_own(entry)
        if config.deferral_ms:
            # Who has a session here waits for what is committed, to deliver or to confirm it.
            awaited = self.machine.session_nodes()
            if core.pace_due or (awaited is not self._awaited and awaited != self._awaited):
                self._awaited = awaited
                core.choose_pace(awaited)
        if core.commit_index >= self.sample:
            self.sample = entry.index
            self._sample_ms = self.host.now
        # Something older is not committed yet: the others may be slow.
        slow = self.host.now - self._sample_ms >= config.deferral_commit_ms
        for peer in core.peers:
            if peer.is_deferred:
                peer.held_bytes += entry.size
                if not slow and peer.held_bytes < config.deferral_bytes_max:
                    if not self.holding:
                        self.host.deferred.hold(self.replica)
                    continue
            if (
                peer.state == REPLICATE
                and peer.next_index == int(entry.index)
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

    def on_answer(self, peer: Progress, rejected: bool) -> None:
        """A follower has answered to an append: sends what it is to know next."""
        core = self.core
        held = peer.is_deferred and self.holding
        if not held or peer.held_bytes >= self.host.config.deferral_bytes_max:
            self.replicate(peer)
        if rejected and peer.next_index > self.log.last_index and peer.may_send():
            self.probe(peer)
        if peer.commit_sent < self.opening <= core.commit_index and peer.state == REPLICATE:
            self.send_commit(peer)

    def replicate(self, peer: Progress) -> None:
        """Sends what a follower lacks, as far as its window and the link allow."""
        replica = self.replica
        log = self.log
        config = self.host.config
        while self.core.role == LEADER and peer.next_index <= log.last_index and peer.may_send():
            if peer.node in self.host.full:
                self.host.capacity.wait(peer.node, replica)
                return
            try:
                entries = log.entries(peer.next_index, config.append_bytes_max)
                log.term_at(peer.next_index - 1)
            except LookupError:
                replica.snapshots.send(peer)
                return
            except StorageFault:
                replica.damage.on_damage()
                return
            bodies = [entry.data for entry in entries]
            last = peer.next_index + len(entries) - 1
            self._send_append(peer, bodies, last, sum(map(len, bodies)))

    def probe(self, peer: Progress) -> None:
        """Asks a follower how far it is, without entries."""
        replica = self.replica
        if not peer.connected or peer.state == SNAPSHOT:
            return
        if peer.next_index == 1 and self.log.first_index > 1:
            # Everybody agrees on the empty log, but what follows it is not here any more.
            replica.snapshots.send(peer)
            return
        try:
            self.log.term_at(peer.next_index - 1)
        except LookupError:
            replica.snapshots.send(peer)
            return
        self._send_append(peer, [], peer.next_index - 1, 0)

    def probe_member(self, node: int) -> None:
        """Leader: says something to a member that does not know that this node leads, although
        something may be on its way: it may be lost."""
        peer = self.core.progress.get(node)
        if peer is not None:
            self.probe(peer)

    def _send_append(self, peer: Progress, bodies: list[bytes], last: int, size: int) -> None:
        core = self.core
        previous = peer.next_index - 1
        assert core.role == LEADER, "only a leader sends entries"
        assert peer.match <= previous, "the follower has them"
        assert last - previous == len(bodies), "entries without a gap"
        commit = core.commit_index
        head = frame(
            link_frames.FRAME_APPEND,
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
            if peer.state == REPLICATE and (peer.node in wanted or peer.commit_sent < self.opening):
                self.send_commit(peer)
            else:
                # The others hear it with the next append, or from the tick when all is quiet.
                self.host.active.add(self.group)

    def send_commit(self, peer: Progress) -> None:
        """Tells a follower the commit index."""
        core = self.core
        commit = core.commit_index
        self.host.transport.send(
            peer.node, frame(link_frames.FRAME_COMMIT, 0, self.group, core.term, 0, 0, commit)
        )
        peer.commit_sent = commit

    def watch(self, now: int) -> bool:
        """Looks after followers that lack something; False when none does."""
        replica = self.replica
        core = self.core
        config = self.host.config
        outstanding = False
        last = self.log.last_index
        core.pace_due = True
        for peer in core.peers:
            if not peer.connected:
                continue
            replica.lagging.watch_log_of(peer, now)
            if peer.commit_sent < core.commit_index and peer.state == REPLICATE:
                self.send_commit(peer)
            if peer.match >= last and peer.state == REPLICATE:
                peer.stalled_ms = 0
                peer.owes_ms = 0
                if peer.silent:
                    core.on_answer(peer)
                continue
            outstanding = True
            if self.host.capacity.is_held_up(peer.node, self.host.now):
                # It is not the peer that makes no progress.
                peer.owes_ms = peer.stalled_ms = now
                continue
            if not peer.owes_ms:
                peer.owes_ms = now
            elif not peer.silent and now - peer.owes_ms >= config.quorum_timeout_ms:
                self.host.note("raft.peer_silent", group=self.group, peer=peer.node)
                core.on_silent(peer.node)
            sending = replica.snapshots.sending.get(peer.node)
            if sending is not None:
                sending.tick()
            elif peer.stalled_match != peer.match or not peer.stalled_ms:
                peer.stalled_match = peer.match
                peer.stalled_ms = now
            elif now - peer.stalled_ms >= config.retransmit_ms:
                peer.stalled_ms = now
                if peer.state == SNAPSHOT:
                    replica.snapshots.send(peer)
                else:
                    self.probe(peer)
        return outstanding
