# cython: annotation_typing=False
"""Raft for one group: who leads, what is in the log, what is committed. Sans-IO.

| role          | becomes        | when                                                            |
| FOLLOWER      | PRE_CANDIDATE  | election timer, member with a vote, nobody known to lead        |
| PRE_CANDIDATE | CANDIDATE      | a majority would vote for it                                    |
| CANDIDATE     | LEADER         | a majority voted for it, its own vote being durable             |
| FOLLOWER      | CANDIDATE      | TIMEOUT_NOW from the leader (transfer)                          |
| LEADER        | FOLLOWER       | no answers of a majority, or its removal is committed           |
| FOLLOWER      | LEADER         | start of the founder of a new group: term 1 is its own          |
| any           | CANDIDATE      | the operator's configuration for a lost majority                |
| any           | FOLLOWER       | a higher term; an append of the same term (not as leader)       |

Inputs are the `on_…` methods. Outputs: `effects` (see `types`) for the general path; on the steady
path the shell asks: which peers may be sent to (`peers`, `Progress.may_send`), what to answer the
leader (`take_reply`), how far entries may be applied (`commit_index`). The log is changed through
the `Log` protocol, in memory at once; that something is durable comes back as `on_written` and
`on_vote_written`.

There are no heartbeats: the shell says which nodes are reachable (`connected`, a set that all
groups of a node share) and calls `on_suspected` or `on_reachable` when that changes.

Invariants (`check` in production too): the term never falls, one vote per term, no committed entry
is truncated, one leader per term. Tests call `check_invariants`.

Source: D. Ongaro, Consensus: Bridging Theory and Practice, chapters 3, 4 and 9.6 (pre-vote). What
differs is in docs/adr/0002-raft.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from convoymq.logformat.entry import ENTRY_HEADER_SIZE
from convoymq.model.errors import InvariantViolated, PeerError, check
from convoymq.replication.raft.changes import MembershipChanges
from convoymq.replication.raft.elections import Elections
from convoymq.replication.raft.lost_data import LostData
from convoymq.replication.raft.membership import Membership, decode_membership
from convoymq.replication.raft.progress import Progress
from convoymq.replication.raft.quorum import has_majority, majority, quorum_index
from convoymq.replication.raft.types import (
    CANDIDATE,
    FOLLOWER,
    LEADER,
    LOG_END,
    LOG_END_REQUEST,
    LOST_STATE,
    PRE_VOTE,
    PRE_VOTE_REPLY,
    PROBE,
    QUARANTINED,
    REJOIN,
    REJOIN_ACCEPTED,
    REPLICATE,
    STEPPED_DOWN,
    TIMEOUT_NOW,
    VOTE,
    VOTE_REPLY,
    WITHHELD,
    Effect,
    Lead,
    Log,
    LogEntry,
    Received,
    RoleChanged,
    Send,
)

ENTRY_MEMBERSHIP = 2


class RaftCore:
    """One replica's part in the consensus of its group.

    Args:
        node: this node's id.
        group: group id, for texts.
        log: the group's log with term and vote as they were saved.
        members: the configuration in force before any that the log holds.
        connected: reachable nodes; shared, kept by the shell.
        random: uniform in [0, 1).
        election_ms: base of the election delays.
        window_bytes: entries under way to one follower.
        replica_number: number of this start of the replica, never used before on this node; by it a
            replica without a past is taken in.
    """

    def __init__(
        self,
        node: int,
        group: int,
        log: Log,
        members: Membership,
        connected: AbstractSet[int],
        random: Callable[[], float],
        election_ms: int = 150,
        window_bytes: int = 16 << 20,
        replica_number: int = 0,
    ) -> None:
        self.node = node
        self.group = group
        self.log = log
        self.connected = connected
        self.random = random
        self.election_ms = election_ms
        self.window_bytes = window_bytes
        self.replica_number = replica_number
        self.effects: list[Effect] = []
        self.role = FOLLOWER
        self.term = log.term
        self.voted_for = log.voted_for
        #: Term and vote that are durable.
        self.durable_term = log.term
        self.durable_vote = log.voted_for
        self.leader = 0
        self.commit_index = log.snapshot_index
        self.applied_index = log.snapshot_index
        #: Follower: the log agrees with the leader's up to here.
        self.match_index = 0
        #: Follower: where to try next, after a rejected append.
        self.reject_hint = 0
        self.reply_due = False
        #: Configurations in force: (index of the entry, configuration), the last one counts.
        self.memberships: list[tuple[int, Membership]] = [(log.snapshot_index, members)]
        self.members = members
        self.peers: list[Progress] = []
        self.progress: dict[int, Progress] = {}
        self.term_start = 0
        self.transfer_target = 0
        self.members_due = False
        #: Leader: who may be deferred is to be chosen anew (`choose_pace`).
        self.pace_due = False
        self.quarantined = log.voted_for == QUARANTINED
        self.lost_state = log.voted_for == LOST_STATE
        self.elections = Elections(self)
        self.changes = MembershipChanges(self)
        self.lost_data = LostData(self)
        #: This replica leads term 1 as the group's founder.
        self.founded = False

    # Rules: small, so that a planted bug is one of them overridden.

    def log_is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """A candidate's log holds at least what this one does (thesis 3.6.1)."""
        own_term = self.log.last_term
        return last_term > own_term or (last_term == own_term and last_index >= self.log.last_index)

    def _may_commit(self, index: int) -> bool:
        """Only entries of the current term are committed by count (thesis 3.6.2)."""
        return self.log.term_at(index) == self.term

    def _own_match(self) -> int:
        """Returns the leader's own part in the count: what its disk has."""
        return self.log.written_index

    def ack_index(self) -> int:
        """Returns what a follower may promise to have: durable, and checked against this leader."""
        written = self.log.written_index
        return written if written < self.match_index else self.match_index

    def may_vote(self, candidate: int) -> bool:
        """One vote per term; none while what was promised may be lost."""
        return self.voted_for in (0, candidate) and not self.quarantined and not self.lost_state

    def may_stand(self) -> bool:
        """Only voters stand for election, with all that they ever acknowledged. A voter whose
        removal may not be committed is one still: the others may need its log (thesis 4.2.2)."""
        if self.quarantined or self.lost_state:
            return False
        if self.node in self.members.voters:
            return True
        before = len(self.memberships) - 2
        return (
            before >= 0
            and self.members_index > self.commit_index
            and self.node in self.memberships[before][1].voters
        )

    def may_change_members(self) -> bool:
        """One change at a time, and none before an entry of this term is committed."""
        return self.latest()[0] <= self.commit_index and self.term_start <= self.commit_index

    @property
    def members_index(self) -> int:
        """Returns the index of the entry that brought the configuration in force; 0 = none."""
        return self.latest()[0]

    def latest(self) -> tuple[int, Membership]:
        """Returns the configuration in force and the index of its entry."""
        # No negative index: compiled modules do not support them.
        return self.memberships[len(self.memberships) - 1]

    # Start and time.

    def found(self, founder: int, leads: bool) -> None:
        """Takes term 1 as begun and the vote in it as given to the founder. Before `start`.

        What decided so (the record of the queue) is durable and the same for all members: nothing
        has to be asked or written for it. A replica that has saved a term is further already, and
        one that has saved a mark has lost its data: what it acknowledged in term 1 as well.

        Args:
            leads: this node is the founder, in the only incarnation in which it may take that
                term: the one before may have led it and lost what it had not yet written.
        """
        if self.term or self.voted_for:
            return
        self.log.assume_vote(1, founder)
        self.term = self.durable_term = 1
        self.voted_for = self.durable_vote = founder
        self.founded = leads and not self.log.last_index

    def start(
        self, memberships: Sequence[tuple[int, Membership]] = (), campaign: bool = False
    ) -> None:
        """Begins as a follower; `memberships` are those found in the log, ascending.

        `campaign`: stand at once, because nobody else is expected to.
        """
        self.memberships.extend(memberships)
        self.members = self.latest()[1]
        if self.founded:
            self.become_leader()
            return
        alone = campaign or self.members.voters == {self.node}
        self.elections.arm(0 if alone else self.elections.delay_ms())
        if self.lost_state:
            self.lost_data.ask_to_rejoin()

    def reaches_majority(self) -> bool:
        """Returns whether so many members are linked, and answer, that something can be
        committed."""
        present = {self.node}
        present.update(self.connected)
        if self.role == LEADER:
            # A link alone commits nothing.
            present.difference_update([peer.node for peer in self.peers if peer.silent])
        return has_majority(present, self.members.voters)

    def on_silent(self, node: int) -> None:
        """Leader: a peer that is linked has made no progress for `quorum_timeout_ms` although it
        lacks something."""
        peer = self.progress.get(node)
        if self.role != LEADER or peer is None or peer.silent:
            return
        peer.silent = True
        self.pace_due = True
        if not self.elections.armed and not self.reaches_majority():
            self.elections.arm(self.elections.delay_ms())

    def on_answer(self, peer: Progress) -> None:
        """Leader: a peer was silent and makes progress again."""
        peer.silent = False
        self.pace_due = True
        if self.elections.armed and self.reaches_majority():
            self.elections.disarm()

    def on_suspected(self, node: int) -> None:
        """A node is not reachable any more (already out of `connected`)."""
        if self.role == LEADER:
            peer = self.progress.get(node)
            if peer is not None:
                peer.connected = False
                peer.forget_sent()
                self.pace_due = True
            if node == self.transfer_target:
                self.transfer_target = 0
            if not self.elections.armed and not self.reaches_majority():
                self.elections.arm(self.elections.delay_ms())
        elif self.leader == node or not self.leader:
            self.elections.in_contact = False
            if not self.elections.armed or self.leader == node:
                self.elections.arm(self.elections.quick_delay_ms())

    def on_reachable(self, node: int) -> None:
        """A node is reachable (again); what was sent to it before may be lost."""
        if self.role == LEADER:
            peer = self.progress.get(node)
            if peer is not None:
                self.reconnect(peer)
            if self.elections.armed and self.reaches_majority():
                self.elections.disarm()
            return
        if node not in self.members.nodes and self.node in self.members.voters:
            return
        self.elections.attempts = 0
        if self.lost_state:
            self.lost_data.ask_to_rejoin()
        elif (self.leader == node or not self.leader) and not self.elections.armed:
            # If it still leads it says so at once.
            self.elections.in_contact = False
            self.elections.arm(self.elections.delay_ms())

    def reconnect(self, peer: Progress) -> None:
        """Leader: a peer is linked (again); what is known of it may be too much."""
        peer.connected = True
        peer.owes_ms = 0
        peer.silent = False
        self.pace_due = True
        peer.commit_sent = 0
        if peer.state == PROBE or peer.match:
            peer.probe(peer.match + 1 if peer.match else self.log.last_index + 1)

    # Elections.

    def set_vote(self, term: int, node: int) -> None:
        """Saves term and vote; durable when `on_vote_written` comes."""
        check(
            term > self.term
            or (term == self.term and self.voted_for in (0, node))
            or (term == self.term and (self.voted_for, node) == (QUARANTINED, WITHHELD)),
            f"group {self.group}: vote ({term}, {node}) after ({self.term}, {self.voted_for})",
        )
        if term > self.term:
            self.elections.vote_waiting = 0
        if self.lost_state:
            node = LOST_STATE
        elif self.quarantined and node == 0:
            node = QUARANTINED
        self.term = term
        self.voted_for = node
        self.log.save_vote(term, node)

    def on_vote_written(self, term: int, voted_for: int) -> None:
        """Records that this term and vote are durable."""
        self.durable_term = term
        self.durable_vote = voted_for
        if term != self.term or voted_for != self.voted_for:
            return
        if self.elections.vote_waiting and voted_for == self.elections.vote_waiting:
            self.effects.append(Send(self.elections.vote_waiting, (VOTE_REPLY, term, True)))
            self.elections.vote_waiting = 0
        elif voted_for == self.node and self.role == CANDIDATE:
            # Not sooner: the others' votes for a start that forgets this term could be counted by
            # the next one, which stands in it again, with a shorter log (ADR 0002, 3).
            self.elections.votes.add(self.node)
            self.elections.arm(self.elections.delay_ms())
            self.elections.ask_voters((VOTE, term, self.log.last_index, self.log.last_term))
            self.elections.count_votes()
        elif voted_for == WITHHELD and self.quarantined:
            self.quarantined = False
            # The leader should know: it gives no vote to who could not use it.
            self.reply_due = self.leader != 0

    def step_down(self) -> None:
        """Leads and stands no more: the replica is about to stop."""
        if self.role != FOLLOWER:
            self.become_follower(self.term, 0)

    def become_follower(self, term: int, leader: int) -> None:
        """Follows a leader, or (0) waits for one. Raises the term."""
        check(term >= self.term, f"group {self.group}: term {term} after {self.term}")
        if self.changes.forced is not None:
            self.changes.drop_forced()
        changed = self.role != FOLLOWER or leader != self.leader or term != self.term
        was_leader = self.role == LEADER
        if term > self.term:
            self.set_vote(term, 0)
        if changed:
            self.match_index = 0
            self.reply_due = False
            self.lost_data.catch_up_to = -1
        self.role = FOLLOWER
        self.leader = leader
        self.elections.votes.clear()
        self.founded = False
        if was_leader:
            if not leader:
                # Its links stay up: without a word the others would wait for it for ever.
                for node in sorted(self.progress):
                    self.effects.append(Send(node, (STEPPED_DOWN, self.term)))
            self.peers.clear()
            self.progress.clear()
            self.transfer_target = 0
            self.changes.rejoining.clear()
            self.members_due = False
        if leader:
            self.elections.in_contact = True
            self.elections.attempts = 0
            self.elections.disarm()
        elif changed or not self.elections.armed:
            self.elections.arm(self.elections.delay_ms())
        if changed:
            self.effects.append(RoleChanged())

    def forget_leader(self) -> None:
        """Follows nobody; the term stays."""
        if self.leader or self.role != FOLLOWER:
            self.role = FOLLOWER
            self.leader = 0
            self.effects.append(RoleChanged())

    def _on_stepped_down(self, node: int, term: int) -> None:
        if term >= self.term and node == self.leader:
            self.elections.in_contact = False
            self.forget_leader()
            self.elections.arm(self.elections.delay_ms())

    def become_leader(self) -> None:
        """Leads from now on; the shell opens the term."""
        assert self.durable_term == self.term, f"group {self.group}: leads a term that may be lost"
        assert self.commit_index <= self.log.last_index, f"group {self.group}: the log is short"
        self.role = LEADER
        self.leader = self.node
        self.elections.attempts = 0
        self.elections.disarm()
        self.term_start = self.log.last_index + 1
        self.transfer_target = 0
        self.changes.rejoining.clear()
        self.progress = {}
        self.set_peers()
        self.effects.append(Lead())
        self.effects.append(RoleChanged())

    def on_message(self, node: int, message: Received) -> None:
        """A general message of another node. Raises PeerError when it is malformed."""
        try:
            kind, term, *rest = message
            if self.lost_state:
                # Whatever it said now might contradict what it said before.
                if kind == REJOIN_ACCEPTED:
                    self.lost_data.on_rejoin_accepted(node, term, *rest)
            elif kind == PRE_VOTE:
                self.elections.on_pre_vote(node, term, *rest)
            elif kind == PRE_VOTE_REPLY:
                self.elections.on_pre_vote_reply(node, term, *rest)
            elif kind == VOTE:
                self.elections.on_vote(node, term, *rest)
            elif kind == VOTE_REPLY:
                self.elections.on_vote_reply(node, term, *rest)
            elif kind == TIMEOUT_NOW:
                self.elections.on_timeout_now(node, term)
            elif kind == STEPPED_DOWN:
                self._on_stepped_down(node, term)
            elif kind == REJOIN:
                self.lost_data.on_rejoin(node, *rest)
            elif kind == REJOIN_ACCEPTED:
                pass
            elif kind == LOG_END_REQUEST:
                if self.role == LEADER and term == self.term:
                    answer = (LOG_END, term, self.log.last_index)
                    self.effects.append(Send(node, answer))
            elif kind == LOG_END:
                if term == self.term and node == self.leader and self.lost_data.catch_up_to < 0:
                    self.lost_data.catch_up_to = int(rest[0])
                    self.lost_data.end_quarantine()
            else:
                raise PeerError(f"Raft message of unknown kind {kind!r}")
        except (TypeError, ValueError, IndexError) as error:
            raise PeerError(f"malformed Raft message {message!r}: {error}") from None

    # Log: the follower's side.

    def on_append(
        self,
        node: int,
        term: int,
        previous: int,
        previous_term: int,
        commit: int,
        entries: Sequence[LogEntry],
    ) -> bool:
        """A leader's append (thesis 3.5). Returns False when it must be rejected: `reject_hint`
        says up to where the logs may agree, unless `term` is higher than the leader's.

        Raises PeerError when the entries do not follow each other.
        """
        log = self.log
        if term < self.term or self.lost_state:
            self.reject_hint = log.last_index
            return False
        if term > self.term or self.role != FOLLOWER or self.leader != node:
            check(
                self.role != LEADER or term > self.term,
                f"group {self.group}: nodes {self.node} and {node} both lead term {term}",
            )
            self.become_follower(term, node)
            if self.quarantined and entries:
                self.effects.append(Send(node, (LOG_END_REQUEST, term)))
        elif not self.elections.in_contact or self.elections.armed:
            self.elections.in_contact = True
            self.elections.disarm()
        if self.quarantined and self.lost_data.catch_up_to < 0 and not entries:
            # A probe begins what a leader sends, and comes again when something was lost.
            self.effects.append(Send(node, (LOG_END_REQUEST, term)))
        last = log.last_index
        if previous > last:
            self.reject_hint = last
            return False
        # Up to the commit index every leader agrees; terms below may be forgotten.
        if previous > self.commit_index and log.term_at(previous) != previous_term:
            self.reject_hint = self._before_term_of(previous)
            return False
        index = previous
        for entry in entries:
            index += 1
            if entry.index != index or entry.term > term:
                raise PeerError(f"entry {entry.index} where {index} is due")
            if index <= last:
                if index <= self.commit_index:
                    check(
                        index < log.first_index or log.term_at(index) == entry.term,
                        f"group {self.group}: committed entry {index} differs on {node}",
                    )
                    continue
                if log.term_at(index) == entry.term:
                    continue
                self._truncate(index)
                last = index - 1
            log.append(entry)
            if entry.kind == ENTRY_MEMBERSHIP:
                self._adopt(index, entry)
        if index > self.match_index:
            self.match_index = index
        if commit > self.match_index:
            commit = self.match_index
        if commit > self.commit_index:
            self.commit_index = commit
        if not entries or log.written_index >= index:
            self.reply_due = True
        if self.quarantined:
            self.lost_data.end_quarantine()
        return True

    def _before_term_of(self, index: int) -> int:
        """Last index before the run of entries of one term: one reject skips a whole term."""
        log = self.log
        term = log.term_at(index)
        index -= 1
        while index > self.commit_index and log.term_at(index) == term:
            index -= 1
        return index

    def _truncate(self, index: int) -> None:
        check(
            index > self.commit_index,
            f"group {self.group}: truncation at {index}, committed {self.commit_index}",
        )
        self.log.truncate_from(index)
        while len(self.memberships) > 1 and self.latest()[0] >= index:
            self.memberships.pop()
        self.members = self.latest()[1]

    def take_reply(self) -> int:
        """Returns the index to acknowledge to the leader now, or -1."""
        if not self.reply_due or self.durable_term != self.term or not self.leader:
            return -1
        self.reply_due = False
        return self.ack_index()

    def on_commit(self, node: int, term: int, commit: int) -> bool:
        """A commit notice. Returns False when the sender must learn of a higher term."""
        if term < self.term:
            return False
        if term > self.term or self.leader != node:
            if self.lost_state:
                return True
            self.on_append(node, term, 0, 0, 0, ())
        if not self.elections.in_contact or self.elections.armed:
            self.elections.in_contact = True
            self.elections.disarm()
        if commit > self.match_index:
            commit = self.match_index
        if commit > self.commit_index:
            self.commit_index = commit
        return True

    def on_written(self, index: int) -> None:
        """The own log is durable up to `index`."""
        if self.role == LEADER:
            self._advance_commit()
        elif self.leader:
            self.reply_due = True
            if self.quarantined:
                self.lost_data.end_quarantine()

    # Log: the leader's side.

    def append_own(self, entry: LogEntry) -> None:
        """Appends an entry that this leader made: index last + 1, current term."""
        # Once a message at low rates: the text is made when it is needed.
        if self.role != LEADER or entry.term != self.term:
            made = f"entry of term {entry.term} made by {self.node} in {self.term}"
            raise InvariantViolated(f"group {self.group}: {made}")
        self.log.append(entry)
        if entry.kind == ENTRY_MEMBERSHIP:
            self._adopt(entry.index, entry)

    def on_append_reply(
        self,
        node: int,
        term: int,
        index: int,
        rejected: int,
        was_reset: bool = False,
        voteless: bool = False,
    ) -> None:
        """A follower has everything up to `index` (`rejected` 0), or did not take the append that
        followed entry `rejected` and names `index` as the place to try next.

        `was_reset`: what it acknowledged before does not count. `voteless`: it may not vote yet.
        """
        if term != self.term or self.role != LEADER:
            if term > self.term:
                self.become_follower(term, 0)
            return
        peer = self.progress.get(node)
        if peer is None:
            return
        if rejected:
            if peer.rejected(rejected, index, was_reset):
                peer.owes_ms = 0
                if peer.silent:
                    self.on_answer(peer)
            self.pace_due = True
        elif index > self.log.last_index:
            raise PeerError(f"node {node} acknowledged {index}, the log ends before")
        else:
            if peer.voteless != voteless and index >= peer.match:
                peer.voteless = voteless
                self.members_due = True
            if peer.state == PROBE:
                self.pace_due = True
            if peer.acknowledged(index):
                peer.owes_ms = 0
                if peer.silent:
                    self.on_answer(peer)
                if peer.voter:
                    before = self.commit_index
                    self._advance_commit()
                    if peer.is_deferred and self.commit_index > before:
                        # It was faster than those that get everything at once.
                        self.pace_due = True
                    if node == self.transfer_target:
                        self._finish_transfer()
                else:
                    self.members_due = True

    def _advance_commit(self) -> None:
        matches = [peer.match for peer in self.peers if peer.voter]
        if self.node in self.members.voters:
            matches.append(self._own_match())
        index = quorum_index(matches)
        assert index <= self.log.last_index, f"group {self.group}: {index} is beyond the log"
        if index > self.commit_index and self._may_commit(index):
            before = self.commit_index
            self.commit_index = index
            if before < self.latest()[0] <= index:
                self.changes.on_committed()
            if before < self.term_start <= index:
                self.members_due = True

    def choose_pace(self, awaited: AbstractSet[int]) -> None:
        """Leader: as many voters as a majority needs get every entry at once, and so does every
        node in `awaited`; the other voters may be deferred. Who is behind what is committed, or
        does not take entries as they come, is not counted on."""
        self.pace_due = False
        size = self.node + 1 + max(self.members.nodes, default=0)
        ready = []
        for peer in self.peers:
            peer.is_deferred = False
            if peer.voter and not peer.voteless and peer.connected and peer.state == REPLICATE:
                behind = peer.match < self.commit_index
                # Among equals the next one in the ring of ids: every leader has another partner.
                turn = (peer.node - self.node) % size
                ready.append((behind, peer.node not in awaited, turn, peer.node))
        ready.sort()
        needed = majority(len(self.members.voters)) - (self.node in self.members.voters)
        for _, idle, _, node in ready[needed:]:
            self.progress[node].is_deferred = idle

    def on_applied(self, index: int) -> None:
        """The shell has applied everything up to `index`."""
        if not self.applied_index <= index <= self.commit_index:
            done = f"applied {index}, committed {self.commit_index}"
            raise InvariantViolated(f"group {self.group}: {done}")
        self.applied_index = index

    # Membership.

    def _adopt(self, index: int, entry: LogEntry) -> None:
        """A configuration counts from when it is in the log (thesis 4.1)."""
        members = decode_membership(entry.data[ENTRY_HEADER_SIZE:])
        if self.changes.forced is not None:
            # Now it is in the log, or another one is.
            self.changes.drop_forced()
        self.memberships.append((index, members))
        self.members = members
        if self.role == LEADER:
            self.set_peers()

    def members_at(self, index: int) -> Membership:
        """Returns the configuration in force at an index not below the snapshot's."""
        found = [members for at, members in self.memberships if at <= index]
        check(found, f"group {self.group}: the members at {index} are not known any more")
        return found.pop()

    def trim_memberships(self, index: int) -> None:
        """Configurations replaced at or before `index` will not be asked for any more."""
        while len(self.memberships) > 1 and self.memberships[1][0] <= index:
            del self.memberships[0]

    def set_peers(self) -> None:
        """Leader: makes the peers be the other members."""
        following = self.log.last_index + 1
        nodes = self.members.nodes
        self.progress = {n: peer for n, peer in self.progress.items() if n in nodes}
        for node in sorted(nodes):
            if node == self.node:
                continue
            peer = self.progress.get(node)
            if peer is None:
                peer = Progress(node, following, True, self.window_bytes)
                peer.connected = node in self.connected
                self.progress[node] = peer
            peer.voter = node in self.members.voters
        self.changes.rejoining = {
            n: number for n, number in self.changes.rejoining.items() if n in nodes
        }
        self.peers = [self.progress[node] for node in sorted(self.progress)]
        self.pace_due = True

    # Transfer of leadership (thesis 3.10).

    def transfer(self, node: int) -> str | None:
        """Hands leadership to a voter once it has the whole log; no proposals meanwhile."""
        peer = self.progress.get(node) if self.role == LEADER else None
        if peer is None:
            return "not leader" if self.role != LEADER else f"node {node} is not a member"
        if not peer.voter or not peer.connected:
            return f"node {node} has no vote or is not reachable"
        self.transfer_target = node
        self._finish_transfer()
        return None

    def abort_transfer(self) -> None:
        """Goes on leading: the target did not take over in time."""
        self.transfer_target = 0

    def _finish_transfer(self) -> None:
        peer = self.progress[self.transfer_target]
        if peer.match == self.log.last_index:
            self.effects.append(Send(peer.node, (TIMEOUT_NOW, self.term)))

    # Snapshots.

    def on_installed(self, index: int, members: Membership) -> None:
        """A leader's snapshot replaced the log and the state."""
        check(index >= self.commit_index, f"group {self.group}: snapshot {index} goes back")
        self.memberships = [(index, members)]
        self.members = members
        assert self.log.last_index >= index, f"group {self.group}: the log ends before {index}"
        self.commit_index = self.applied_index = index
        self.match_index = max(self.match_index, index)
        self.reply_due = True

    def check_invariants(self) -> None:
        """Asserts what the module text promises."""
        log = self.log
        assert self.applied_index <= self.commit_index <= log.last_index
        assert log.term == self.term >= self.durable_term
        assert self.term >= log.last_term
        assert self.role != LEADER or self.leader == self.node
        assert (self.role == LEADER) == bool(self.progress) or len(self.members.nodes) <= 1
        assert self.members is self.latest()[1]
        assert [at for at, _ in self.memberships] == sorted(at for at, _ in self.memberships)
        for peer in self.peers:
            assert peer.match < peer.next_index <= log.last_index + 1
            assert peer.in_flight_bytes >= 0
        assert self.role != CANDIDATE or majority(len(self.members.voters)) > 0


__all__ = ["RaftCore"]
