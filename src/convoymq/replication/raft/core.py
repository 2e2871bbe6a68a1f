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
from typing import Any

from convoymq.logformat.entry import ENTRY_HEADER_SIZE
from convoymq.model.errors import PeerError, check
from convoymq.replication.raft.membership import Learner, Membership, decode_membership
from convoymq.replication.raft.progress import Progress
from convoymq.replication.raft.quorum import has_majority, majority, quorum_index
from convoymq.replication.raft.types import (
    ARM,
    CANDIDATE,
    DISARM,
    FOLLOWER,
    LEAD,
    LEADER,
    LOG_END,
    LOG_END_REQUEST,
    LOST_STATE,
    PRE_CANDIDATE,
    PRE_VOTE,
    PRE_VOTE_REPLY,
    PROBE,
    QUARANTINED,
    REJOIN,
    REJOIN_ACCEPTED,
    REPLICATE,
    ROLE,
    SEND,
    STEPPED_DOWN,
    TIMEOUT_NOW,
    VOTE,
    VOTE_REPLY,
    WITHHELD,
    Effect,
    Log,
    LogEntry,
)

ENTRY_MEMBERSHIP = 2
QUICK_DELAY_SHARE = 0.5
"""A follower whose leader just failed waits up to half of this share of the base, and the whole of
it for each member that should stand before; retries wait longer."""


QUESTIONS_MAX = 10
"""How often a replica that may not stand asks who leads, until a link changes."""


ATTEMPTS_LOST = 5
"""After so many elections without a winner a majority that is linked counts as lost: it has no
data, or its replicas have stopped."""


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
        incarnation: number of this life of the replica, never used before on this node; by it a
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
        incarnation: int = 0,
    ) -> None:
        self.node = node
        self.group = group
        self.log = log
        self.connected = connected
        self.random = random
        self.election_ms = election_ms
        self.window_bytes = window_bytes
        self.incarnation = incarnation
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
        #: Members without a past that wait to be taken in: node -> incarnation.
        self.rejoining: dict[int, int] = {}
        self.members_due = False
        #: Leader: who may be deferred is to be chosen anew (`choose_pace`).
        self.pace_due = False
        self.quarantined = log.voted_for == QUARANTINED
        self.lost_state = log.voted_for == LOST_STATE
        #: Quarantined: log position that ends it; -1 = not yet known.
        self.catch_up_to = -1
        self._votes: set[int] = set()
        self._vote_waiting = 0
        self._attempts = 0
        self._in_contact = False
        self._armed = False
        #: The configuration of `force_membership`, until it is in the log.
        self._forced: Membership | None = None
        #: This replica leads term 1 as the group's founder.
        self.founded = False

    # Rules: small, so that a planted bug is one of them overridden.

    def _log_is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """A candidate's log holds at least what this one does (thesis 3.6.1)."""
        own_term = self.log.last_term
        return last_term > own_term or (last_term == own_term and last_index >= self.log.last_index)

    def _may_commit(self, index: int) -> bool:
        """Only entries of the current term are committed by count (thesis 3.6.2)."""
        return self.log.term_at(index) == self.term

    def _own_match(self) -> int:
        """What the leader contributes to the count: what its own disk has."""
        return self.log.written_index

    def _ack_index(self) -> int:
        """What a follower may promise to have: durable, and checked against this leader."""
        written = self.log.written_index
        return written if written < self.match_index else self.match_index

    def _may_vote(self, candidate: int) -> bool:
        """One vote per term; none while what was promised may be lost."""
        return self.voted_for in (0, candidate) and not self.quarantined and not self.lost_state

    def _may_stand(self) -> bool:
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

    def _may_change_members(self) -> bool:
        """One change at a time, and none before an entry of this term is committed."""
        return self._latest()[0] <= self.commit_index and self.term_start <= self.commit_index

    def _elected(self) -> bool:
        """A majority of the voters voted for this node."""
        return has_majority(self._votes, self.members.voters)

    @property
    def members_index(self) -> int:
        """Index of the entry that brought the configuration in force; 0 = none."""
        return self._latest()[0]

    def _latest(self) -> tuple[int, Membership]:
        # No negative index: compiled modules do not support them.
        return self.memberships[len(self.memberships) - 1]

    # Start and time.

    def found(self, founder: int, leads: bool) -> None:
        """Takes term 1 as begun and the vote in it as given to the founder. Before `start`.

        What decided so (the record of the queue) is durable and the same for all members: nothing
        has to be asked or written for it. A replica that has saved a term is further already, and
        one that has saved a mark has lost its data: what it acknowledged in term 1 as well.

        Args:
            leads: this node is the founder, in the only life in which it may take that term: the
                one before may have led it and lost what it had not yet written.
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
        self.members = self._latest()[1]
        if self.founded:
            self._become_leader()
            return
        alone = campaign or self.members.voters == {self.node}
        self._arm(0 if alone else self.election_delay_ms())
        if self.lost_state:
            self._ask_to_rejoin()

    def _arm(self, delay_ms: int) -> None:
        self._armed = True
        self.effects.append((ARM, delay_ms))

    def election_delay_ms(self) -> int:
        """A random wait between half and double of the base; longer with each attempt."""
        base = self.election_ms * (0.5 + 1.5 * self.random())
        return int(base * min(max(self._attempts, 1), 4))

    def quick_delay_ms(self) -> int:
        """A random wait that is short, and longer for each member that should stand before."""
        return self.hasty_delay_ms() + int(
            self.election_ms * QUICK_DELAY_SHARE * self.place_in_line()
        )

    def hasty_delay_ms(self) -> int:
        """A random wait for who need not let others go first."""
        return int(self.election_ms * (0.02 + 0.5 * QUICK_DELAY_SHARE * self.random()))

    def place_in_line(self) -> int:
        """How many reachable voters should stand for an election before this one: another one goes
        first in each group, and two that stand at once would split the votes."""
        voters = [n for n in self.members.voters if n == self.node or n in self.connected]
        if self.node not in voters:
            return len(voters)
        return (sorted(voters).index(self.node) + self.group) % len(voters)

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self.effects.append((DISARM,))

    def on_election_timer(self) -> None:
        """The timer that ARM asked for has run out."""
        self._armed = False
        if self.role == LEADER:
            if not self.reaches_majority():
                self._become_follower(self.term, 0)
            return
        if self.lost_state:
            self._ask_to_rejoin()
            return
        if self.leader and self._in_contact and self.leader in self.connected:
            return
        if not self._may_stand() or not self.reaches_majority():
            self._forget_leader()
            if self.node in self.members.nodes and self._attempts < QUESTIONS_MAX:
                # Never granted, but the leader answers it with an append.
                self._attempts += 1
                message = (PRE_VOTE, self.term, self.log.last_index, self.log.last_term)
                self._ask_voters(message)
                self._arm(self.election_delay_ms())
            # Else it comes again with the next node that becomes reachable.
            return
        self._start_pre_vote()

    def reaches_majority(self) -> bool:
        """Whether so many members are linked, and answer, that something can be committed."""
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
        if not self._armed and not self.reaches_majority():
            self._arm(self.election_delay_ms())

    def on_answer(self, peer: Progress) -> None:
        """Leader: a peer was silent and makes progress again."""
        peer.silent = False
        self.pace_due = True
        if self._armed and self.reaches_majority():
            self._disarm()

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
            if not self._armed and not self.reaches_majority():
                self._arm(self.election_delay_ms())
        elif self.leader == node or not self.leader:
            self._in_contact = False
            if not self._armed or self.leader == node:
                self._arm(self.quick_delay_ms())

    def on_reachable(self, node: int) -> None:
        """A node is reachable (again); what was sent to it before may be lost."""
        if self.role == LEADER:
            peer = self.progress.get(node)
            if peer is not None:
                self._reconnect(peer)
            if self._armed and self.reaches_majority():
                self._disarm()
            return
        if node not in self.members.nodes and self.node in self.members.voters:
            return
        self._attempts = 0
        if self.lost_state:
            self._ask_to_rejoin()
        elif (self.leader == node or not self.leader) and not self._armed:
            # If it still leads it says so at once.
            self._in_contact = False
            self._arm(self.election_delay_ms())

    def _reconnect(self, peer: Progress) -> None:
        peer.connected = True
        peer.owes_ms = 0
        peer.silent = False
        self.pace_due = True
        peer.commit_sent = 0
        if peer.state == PROBE or peer.match:
            peer.probe(peer.match + 1 if peer.match else self.log.last_index + 1)

    # Elections.

    def _set_vote(self, term: int, node: int) -> None:
        check(
            term > self.term
            or (term == self.term and self.voted_for in (0, node))
            or (term == self.term and (self.voted_for, node) == (QUARANTINED, WITHHELD)),
            f"group {self.group}: vote ({term}, {node}) after ({self.term}, {self.voted_for})",
        )
        if term > self.term:
            self._vote_waiting = 0
        if self.lost_state:
            node = LOST_STATE
        elif self.quarantined and node == 0:
            node = QUARANTINED
        self.term = term
        self.voted_for = node
        self.log.save_vote(term, node)

    def on_vote_written(self, term: int, voted_for: int) -> None:
        """That term and vote are durable."""
        self.durable_term = term
        self.durable_vote = voted_for
        if term != self.term or voted_for != self.voted_for:
            return
        if self._vote_waiting and voted_for == self._vote_waiting:
            self.effects.append((SEND, self._vote_waiting, (VOTE_REPLY, term, True)))
            self._vote_waiting = 0
        elif voted_for == self.node and self.role == CANDIDATE:
            # Not sooner: the others' votes for a life that forgets this term could be counted by
            # the next one, which stands in it again, with a shorter log (ADR 0002, 3).
            self._votes.add(self.node)
            self._arm(self.election_delay_ms())
            self._ask_voters((VOTE, term, self.log.last_index, self.log.last_term))
            self._count_votes()
        elif voted_for == WITHHELD and self.quarantined:
            self.quarantined = False
            # The leader should know: it gives no vote to who could not use it.
            self.reply_due = self.leader != 0

    def step_down(self) -> None:
        """Leads and stands no more: the replica is about to stop."""
        if self.role != FOLLOWER:
            self._become_follower(self.term, 0)

    def _become_follower(self, term: int, leader: int) -> None:
        check(term >= self.term, f"group {self.group}: term {term} after {self.term}")
        if self._forced is not None:
            self._drop_forced()
        changed = self.role != FOLLOWER or leader != self.leader or term != self.term
        was_leader = self.role == LEADER
        if term > self.term:
            self._set_vote(term, 0)
        if changed:
            self.match_index = 0
            self.reply_due = False
            self.catch_up_to = -1
        self.role = FOLLOWER
        self.leader = leader
        self._votes.clear()
        self.founded = False
        if was_leader:
            if not leader:
                # Its links stay up: without a word the others would wait for it for ever.
                for node in sorted(self.progress):
                    self.effects.append((SEND, node, (STEPPED_DOWN, self.term)))
            self.peers.clear()
            self.progress.clear()
            self.transfer_target = 0
            self.rejoining.clear()
            self.members_due = False
        if leader:
            self._in_contact = True
            self._attempts = 0
            self._disarm()
        elif changed or not self._armed:
            self._arm(self.election_delay_ms())
        if changed:
            self.effects.append((ROLE,))

    def _forget_leader(self) -> None:
        if self.leader or self.role != FOLLOWER:
            self.role = FOLLOWER
            self.leader = 0
            self.effects.append((ROLE,))

    def _on_stepped_down(self, node: int, term: int) -> None:
        if term >= self.term and node == self.leader:
            self._in_contact = False
            self._forget_leader()
            self._arm(self.election_delay_ms())

    def _start_pre_vote(self) -> None:
        self._attempts += 1
        self.role = PRE_CANDIDATE
        self.leader = 0
        self._votes = {self.node}
        self.effects.append((ROLE,))
        if self._elected():
            self._start_election()
            return
        self._arm(self.election_delay_ms())
        message = (PRE_VOTE, self.term + 1, self.log.last_index, self.log.last_term)
        self._ask_voters(message)

    def _start_election(self) -> None:
        self.role = CANDIDATE
        self.leader = 0
        self._votes = set()
        self._set_vote(self.term + 1, self.node)
        self.effects.append((ROLE,))
        # The others are asked when the own vote is durable.
        self._arm(self.election_delay_ms())

    def _ask_voters(self, message: tuple[Any, ...]) -> None:
        for node in sorted(self.members.voters):
            if node != self.node:
                self.effects.append((SEND, node, message))

    def _count_votes(self) -> None:
        if self.role == CANDIDATE and self.node in self._votes and self._elected():
            self._become_leader()

    def _become_leader(self) -> None:
        self.role = LEADER
        self.leader = self.node
        self._attempts = 0
        self._disarm()
        self.term_start = self.log.last_index + 1
        self.transfer_target = 0
        self.rejoining.clear()
        self.progress = {}
        self._set_peers()
        self.effects.append((LEAD,))
        self.effects.append((ROLE,))

    def on_message(self, node: int, message: Sequence[Any]) -> None:
        """A general message of another node. Raises PeerError when it is malformed."""
        try:
            kind, term, *rest = message
            if self.lost_state:
                # Whatever it said now might contradict what it said before.
                if kind == REJOIN_ACCEPTED:
                    self._on_welcome(node, term, *rest)
            elif kind == PRE_VOTE:
                self._on_pre_vote(node, term, *rest)
            elif kind == PRE_VOTE_REPLY:
                self._on_pre_vote_reply(node, term, *rest)
            elif kind == VOTE:
                self._on_vote(node, term, *rest)
            elif kind == VOTE_REPLY:
                self._on_vote_reply(node, term, *rest)
            elif kind == TIMEOUT_NOW:
                self._on_timeout_now(node, term)
            elif kind == STEPPED_DOWN:
                self._on_stepped_down(node, term)
            elif kind == REJOIN:
                self._on_rejoin(node, *rest)
            elif kind == REJOIN_ACCEPTED:
                pass
            elif kind == LOG_END_REQUEST:
                if self.role == LEADER and term == self.term:
                    answer = (LOG_END, term, self.log.last_index)
                    self.effects.append((SEND, node, answer))
            elif kind == LOG_END:
                if term == self.term and node == self.leader and self.catch_up_to < 0:
                    self.catch_up_to = int(rest[0])
                    self._end_quarantine()
            else:
                raise PeerError(f"Raft message of unknown kind {kind!r}")
        except (TypeError, ValueError, IndexError) as error:
            raise PeerError(f"malformed Raft message {message!r}: {error}") from None

    def _on_pre_vote(self, node: int, term: int, last_index: int, last_term: int) -> None:
        alive = (
            self.leader != 0
            and self.leader != node
            and (self.role == LEADER or (self._in_contact and self.leader in self.connected))
        )
        granted = (
            not alive
            and not self.quarantined
            and not self.lost_state
            and term > self.term
            and self._log_is_up_to_date(last_index, last_term)
        )
        if not granted and self.role == LEADER:
            # It does not know that this node leads: the next append tells.
            peer = self.progress.get(node)
            if peer is not None:
                self._reconnect(peer)
        leader = self.leader if alive else 0
        reply = (PRE_VOTE_REPLY, self.term, granted, term, leader)
        self.effects.append((SEND, node, reply))
        if alive and self.role != LEADER and term > self.term + 1:
            # A later term has begun, perhaps without this leader: it is asked whether it leads.
            self._in_contact = False
            alive = False
        if not granted and not alive and not self._armed:
            self._arm(self.quick_delay_ms())

    def _on_pre_vote_reply(
        self, node: int, term: int, granted: bool, asked: int, leader: int
    ) -> None:
        if term > self.term:
            self._become_follower(term, 0)
            return
        if self.role != PRE_CANDIDATE or asked != self.term + 1:
            return
        if granted:
            self._votes.add(node)
            if self._elected():
                self._start_election()

    def _on_vote(self, node: int, term: int, last_index: int, last_term: int) -> None:
        if term > self.term:
            self._become_follower(term, 0)
        granted = (
            term == self.term
            and self.role in (FOLLOWER, PRE_CANDIDATE)
            and self._may_vote(node)
            and self._log_is_up_to_date(last_index, last_term)
        )
        if not granted:
            self.effects.append((SEND, node, (VOTE_REPLY, self.term, False)))
            return
        if self.role != FOLLOWER:
            self._become_follower(term, 0)
        if self.voted_for != node:
            self._set_vote(term, node)
        self._arm(self.election_delay_ms())
        if self.durable_term == term and self.durable_vote == node:
            self.effects.append((SEND, node, (VOTE_REPLY, term, True)))
        else:
            self._vote_waiting = node

    def _on_vote_reply(self, node: int, term: int, granted: bool) -> None:
        if term > self.term:
            self._become_follower(term, 0)
        elif term == self.term and self.role == CANDIDATE and granted:
            self._votes.add(node)
            self._count_votes()

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
            self._become_follower(term, node)
            if self.quarantined and entries:
                self.effects.append((SEND, node, (LOG_END_REQUEST, term)))
        elif not self._in_contact or self._armed:
            self._in_contact = True
            self._disarm()
        if self.quarantined and self.catch_up_to < 0 and not entries:
            # A probe begins what a leader sends, and comes again when something was lost.
            self.effects.append((SEND, node, (LOG_END_REQUEST, term)))
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
            self._end_quarantine()
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
        while len(self.memberships) > 1 and self._latest()[0] >= index:
            self.memberships.pop()
        self.members = self._latest()[1]

    def take_reply(self) -> int:
        """The index to acknowledge to the leader now, or -1."""
        if not self.reply_due or self.durable_term != self.term or not self.leader:
            return -1
        self.reply_due = False
        return self._ack_index()

    def on_commit(self, node: int, term: int, commit: int) -> bool:
        """A commit notice. Returns False when the sender must learn of a higher term."""
        if term < self.term:
            return False
        if term > self.term or self.leader != node:
            if self.lost_state:
                return True
            self.on_append(node, term, 0, 0, 0, ())
        if not self._in_contact or self._armed:
            self._in_contact = True
            self._disarm()
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
                self._end_quarantine()

    # Log: the leader's side.

    def append_own(self, entry: LogEntry) -> None:
        """Appends an entry that this leader made: index last + 1, current term."""
        check(
            self.role == LEADER and entry.term == self.term,
            f"group {self.group}: entry of term {entry.term} made by {self.node} in {self.term}",
        )
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
                self._become_follower(term, 0)
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
        if index > self.commit_index and self._may_commit(index):
            before = self.commit_index
            self.commit_index = index
            if before < self._latest()[0] <= index:
                self._members_committed()
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
        check(
            self.applied_index <= index <= self.commit_index,
            f"group {self.group}: applied {index}, committed {self.commit_index}",
        )
        self.applied_index = index

    # Membership.

    def _adopt(self, index: int, entry: LogEntry) -> None:
        """A configuration counts from when it is in the log (thesis 4.1)."""
        members = decode_membership(entry.data[ENTRY_HEADER_SIZE:])
        if self._forced is not None:
            # Now it is in the log, or another one is.
            self._drop_forced()
        self.memberships.append((index, members))
        self.members = members
        if self.role == LEADER:
            self._set_peers()

    def members_at(self, index: int) -> Membership:
        """The configuration in force at an index not below the snapshot's."""
        found = [members for at, members in self.memberships if at <= index]
        check(found, f"group {self.group}: the members at {index} are not known any more")
        return found.pop()

    def trim_memberships(self, index: int) -> None:
        """Configurations replaced at or before `index` will not be asked for any more."""
        while len(self.memberships) > 1 and self.memberships[1][0] <= index:
            del self.memberships[0]

    def _set_peers(self) -> None:
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
        self.rejoining = {n: number for n, number in self.rejoining.items() if n in nodes}
        self.peers = [self.progress[node] for node in sorted(self.progress)]
        self.pace_due = True

    def _members_committed(self) -> None:
        self.members_due = True
        if self.node not in self.members.voters:
            # Removed: the most advanced of the others should not have to wait (thesis 4.2.2).
            heirs = [peer for peer in self.peers if peer.voter and peer.connected]
            if heirs:
                heir = max(heirs, key=lambda peer: (peer.match, -peer.node))
                self.effects.append((SEND, heir.node, (TIMEOUT_NOW, self.term)))
            self._become_follower(self.term, 0)
            return
        for node, incarnation in list(self.rejoining.items()):
            learner = self.members.learner(node)
            if learner is not None and learner.incarnation == incarnation:
                self._welcome(node, incarnation)

    def change_members(self, members: Membership) -> str | None:
        """Why the leader may not propose this configuration now; None = append it."""
        if self.role != LEADER:
            return "not leader"
        if not self._may_change_members():
            return "another change of members is under way"
        if not members.voters or not members.is_single_step_from(self.members):
            return "only one voter may change at a time"
        if not has_majority(self._able_without(members), members.voters):
            return "too few of the voters that are left could commit it"
        return None

    def _able_without(self, members: Membership) -> set[int]:
        """Leader: who could commit a new configuration now, this node among them. Entries of a
        change are held to the new one at once: where its majority has lost its logs, no leader can
        commit it and nobody can be elected to undo it."""
        able = {self.node}
        # Who votes for the next leader, when this one takes its leave?
        needs_votes = self.node not in members.voters
        for peer in self.peers:
            acknowledges = peer.connected and not peer.silent and peer.state == REPLICATE
            whole = peer.node not in self.rejoining and not (needs_votes and peer.voteless)
            if acknowledges and whole:
                able.add(peer.node)
        return able

    def next_members(self) -> Membership | None:
        """The configuration that the leader should propose by itself now: a non-voter that has
        caught up is promoted, a member without a past becomes a non-voter under its number."""
        if self.role != LEADER or not self._may_change_members():
            return None
        for node, incarnation in self.rejoining.items():
            learner = self.members.learner(node)
            if learner is None or learner.incarnation != incarnation:
                promote_at = learner.promote_at if learner is not None else 0
                return self.members.with_learner(self.new_learner(node, incarnation, promote_at))
        for learner in self.members.learners:
            peer = self.progress.get(learner.node)
            if peer is not None and not peer.voteless and learner.promote_at <= peer.match:
                return self.members.promoted(learner.node)
        self.members_due = False
        return None

    # A lost majority.

    def force_membership(self, members: Membership) -> str | None:
        """Why this replica may not go on with another configuration, in which it is the only voter;
        None = it does.

        This breaks what Raft promises: entries that the lost majority had committed and this
        replica does not hold are gone, and the former members must never be heard again as such. It
        is an operator's decision (`convoy recover`).

        Nothing is changed before this replica is elected, alone, in a higher term: the shell then
        opens the term with the membership entry (`forced`), which makes it last.
        """
        if members.voters != {self.node}:
            return "the recovering replica must be the only voter"
        if self.quarantined or self.lost_state:
            return "this replica has lost its own data"
        if self.role == LEADER and self.reaches_majority():
            return "this replica leads, with a majority"
        if self.role != LEADER and self.leader and self.leader in self.connected:
            return f"node {self.leader} leads"
        if self.role != LEADER and self.reaches_majority() and self._attempts < ATTEMPTS_LOST:
            return "a majority can be reached: an election may still succeed"
        self._become_follower(self.term, 0)
        learners = [self.new_learner(each.node) for each in members.learners]
        self._forced = members = Membership(members.voters, tuple(learners))
        # Behind every entry: what it replaces stays in force for snapshots of what is applied.
        self.memberships.append((self.log.last_index + 1, members))
        self.members = members
        self._start_election()
        return None

    @property
    def forced(self) -> bool:
        """The configuration in force is to be appended by the leader that this node becomes."""
        return self._forced is not None

    def _drop_forced(self) -> None:
        self._forced = None
        self.memberships.pop()
        self.members = self._latest()[1]

    # A replica that lost its data.

    def new_learner(self, node: int, incarnation: int = 0, promote_at: int = 0) -> Learner:
        """A non-voter to be proposed now: it becomes a voter when it has what is proposed.

        Nothing that it acknowledged in a former life reaches that far, however late it comes.
        """
        return Learner(node, max(promote_at, self.log.last_index + 1), incarnation)

    def quarantine(self, vote_lost: bool) -> None:
        """The log is damaged, or (`vote_lost`) this replica may have been a member before and has
        nothing left of it: neither lead nor vote from now on.

        The log may be wiped when this mark is durable (`on_vote_written`), not before: a crash in
        between would leave an empty log whose owner votes.
        """
        term = self.term + (self.voted_for not in (0, LOST_STATE if vote_lost else QUARANTINED))
        self.lost_state = self.lost_state or vote_lost
        self.quarantined = not self.lost_state
        self._become_follower(self.term, 0)
        self._disarm()
        mark = LOST_STATE if self.lost_state else QUARANTINED
        if (term, mark) != (self.term, self.voted_for):
            self._set_vote(term, mark)
        self.effects.append((ROLE,))

    def on_log_lost(self) -> None:
        """The log was wiped (it is empty now): begins to catch up, or to be taken in anew."""
        check(
            self.quarantined or self.lost_state,
            f"group {self.group}: the log was wiped without quarantine",
        )
        self.memberships = [(0, self.members)]
        self.commit_index = self.applied_index = 0
        self.leader = 0
        self.match_index = 0
        self.catch_up_to = -1
        if self.lost_state:
            self._ask_to_rejoin()
        else:
            self._arm(self.election_delay_ms())

    def _end_quarantine(self) -> None:
        """Once the log is whole: over when that is durable (`on_vote_written`). In this term it
        still does not vote: it cannot know whether it has before."""
        if (
            self.quarantined
            and self.voted_for == QUARANTINED
            and 0 <= self.catch_up_to <= self._ack_index()
        ):
            self._set_vote(self.term, WITHHELD)

    def _ask_to_rejoin(self) -> None:
        # Everybody: who belongs to the group now, this replica cannot know any more.
        for node in sorted(self.connected):
            if node != self.node:
                self.effects.append((SEND, node, (REJOIN, self.term, self.incarnation)))
        self._arm(self.election_delay_ms())
        self._attempts += 1

    def _on_rejoin(self, node: int, incarnation: int) -> None:
        # Who is no member waits until somebody who may decides that it is one.
        if self.role != LEADER or node not in self.members.nodes:
            return
        learner = self.members.learner(node)
        known = learner.incarnation if learner is not None else 0
        if incarnation < max(1, known, self.rejoining.get(node, 0)):
            return
        self.rejoining[node] = incarnation
        if known == incarnation and self._latest()[0] <= self.commit_index:
            self._welcome(node, incarnation)
        self.members_due = True

    def _welcome(self, node: int, incarnation: int) -> None:
        self.rejoining.pop(node, None)
        self.effects.append((SEND, node, (REJOIN_ACCEPTED, self.term, incarnation)))
        self.progress[node].match = 0
        self.progress[node].probe(1)

    def _on_welcome(self, node: int, term: int, incarnation: int) -> None:
        if not self.lost_state or incarnation != self.incarnation:
            return
        # The number exists only since this life began, and the configuration that names it is
        # committed: whoever leads from then on holds what this node ever promised to keep. The
        # leader's term may be below the one that marks the loss. To know that a candidate is such a
        # leader, this replica must first have it all.
        self.lost_state = False
        self.quarantined = True
        self._attempts = 0
        self._set_vote(max(term, self.term + 1), 0)
        self._become_follower(self.term, 0)
        # Never granted, but the leader answers it with an append.
        message = (PRE_VOTE, self.term, self.log.last_index, self.log.last_term)
        self.effects.append((SEND, node, message))

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
            self.effects.append((SEND, peer.node, (TIMEOUT_NOW, self.term)))

    def _on_timeout_now(self, node: int, term: int) -> None:
        if term == self.term and self.role != LEADER and self._may_stand():
            self._start_election()

    # Snapshots.

    def on_installed(self, index: int, members: Membership) -> None:
        """A leader's snapshot replaced the log and the state."""
        check(index >= self.commit_index, f"group {self.group}: snapshot {index} goes back")
        self.memberships = [(index, members)]
        self.members = members
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
        assert self.members is self._latest()[1]
        assert [at for at, _ in self.memberships] == sorted(at for at, _ in self.memberships)
        for peer in self.peers:
            assert peer.match < peer.next_index <= log.last_index + 1
            assert peer.in_flight_bytes >= 0
        assert self.role != CANDIDATE or majority(len(self.members.voters)) > 0


__all__ = ["RaftCore"]
