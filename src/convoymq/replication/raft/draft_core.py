"""The Raft core: who leads, what is committed, which entries go to whom. Sans IO.

Roles and moves (nothing else changes `role`):

    FOLLOWER      --election timeout, leader's node away--> PRE_CANDIDATE
    PRE_CANDIDATE --majority would vote------------------> CANDIDATE (term + 1, votes for itself)
    CANDIDATE     --majority voted-----------------------> LEADER
    any           --higher term, or a leader of this term-> FOLLOWER
    LEADER        --no majority reachable, removed-------> FOLLOWER

The shell (`cluster.replica`) carries entries; the core sees indexes and terms. Results come two ways:
`effects` (general path: tuples (kind, …), carried out in order) and plain attributes (steady path:
`commit_index`, progress of the followers).

Idle groups send nothing: there is no heartbeat per group. The shell tells the core which nodes
are reachable; a leader's node that is away is what an election timeout is elsewhere.

Invariants: the term never falls; one vote per term, durable before it leaves; only entries of the
leader's own term are committed by counting; a committed entry is never truncated.

Source: Ongaro, "Consensus: Bridging Theory and Practice" (2014), chapters 3, 4, 9.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from convoymq.model.errors import check
from convoymq.replication.raft.draft_quorum import committed, has_majority, majority
from convoymq.replication.raft.draft_types import (
    CANDIDATE,
    FOLLOWER,
    LEADER,
    PRE_CANDIDATE,
    VOTE_WITHHELD,
    LogView,
    Membership,
    Message,
    PreVote,
    PreVoteReply,
    RaftConfig,
    TimeoutNow,
    Vote,
    VoteReply,
)

EFFECT_SEND = 1
"""(kind, node, message)"""
EFFECT_SAVE_VOTE = 2
"""(kind, term, voted for): must be durable before the effects that `on_vote_written` gives."""
EFFECT_BECAME_LEADER = 3
"""(kind,): append the no-op of the term."""
EFFECT_LEADER_CHANGED = 4
"""(kind, leader or 0)"""
EFFECT_TIMER = 5
"""(kind, delay ms): call `on_timer(token)` later; (kind, delay, token)."""
EFFECT_NOTE = 6
"""(kind, event, fields)"""

PROBE = 0
REPLICATE = 1
SNAPSHOT = 2


class Progress:
    """What the leader knows about one follower."""

    __slots__ = (
        "commit_sent",
        "in_flight",
        "match",
        "next",
        "node",
        "probe_out",
        "reachable",
        "sent",
        "sent_at",
        "state",
        "target",
    )

    def on_sent(self, last_index: int, size: int, now_ms: int) -> None:
        """Entries up to `last_index` went out."""
        self.next = last_index + 1
        self.sent.append((last_index, size))
        self.in_flight += size
        self.sent_at = now_ms

    def forget_sent(self) -> None:
        """Whatever was in flight may be lost."""
        self.sent.clear()
        self.in_flight = 0
        self.probe_out = False

    def __init__(self, node: int, next_index: int, reachable: bool) -> None:
        self.node = node
        self.match = 0
        self.next = next_index
        self.state = PROBE
        #: (last index, bytes) of every append that is not answered yet, and their bytes in all.
        self.sent: deque[tuple[int, int]] = deque()
        self.in_flight = 0
        self.probe_out = False
        self.reachable = reachable
        self.sent_at = 0
        self.commit_sent = 0
        #: A learner is promoted when its match reaches this index.
        self.target = 0


class RaftCore:
    """One member of one group. All methods are synchronous; times are monotonic ms."""

    def __init__(
        self,
        *,
        node: int,
        log: LogView,
        membership: Membership,
        term: int,
        voted_for: int,
        config: RaftConfig,
        random: Callable[[], float],
    ) -> None:
        self.node = node
        self.log = log
        self.config = config
        self.random = random
        self.membership = membership
        #: Index of the entry that brought the membership in force.
        self.membership_index = 0
        self.term = term
        self.voted_for = voted_for
        #: Term and vote that are on disk.
        self.saved_term = term
        self.saved_vote = voted_for
        self.role = FOLLOWER
        self.leader = 0
        self.commit_index = 0
        #: Follower: highest index known to match the leader's log in this term.
        self.matched = 0
        self.progress: dict[int, Progress] = {}
        self.term_start = 0
        self.effects: list[tuple[Any, ...]] = []
        self.reachable: set[int] = set()
        self.votes: set[int] = set()
        self.transfer_to = 0
        self._transfer_election = False
        self._transfer_sent = False
        self._timer = 0
        self._timer_set = False
        self._after_vote: list[tuple[int, Message]] = []
        self._withheld = voted_for == VOTE_WITHHELD

    # -- rules (small, so that a test can break one of them) -----------------------------------------

    def _is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Is a candidate's log at least as complete as ours? (5.4.1 of the paper)"""
        if last_term != self.log.last_term:
            return last_term > self.log.last_term
        return last_index >= self.log.last_index

    def _may_vote_for(self, candidate: int, term: int) -> bool:
        """One vote per term."""
        return self.voted_for in (0, candidate) and term == self.term and not self._withheld

    def _may_commit(self, index: int) -> bool:
        """Only entries of the own term are committed by counting (5.4.2 of the paper)."""
        return self.log.term_at(index) == self.term

    def _own_match(self) -> int:
        """The leader counts itself only up to what its own disk holds."""
        return self.log.written_index

    def ack_index(self) -> int:
        """Follower: what may be acknowledged: durable, and known to match the leader's log."""
        return min(self.matched, self.log.written_index)

    # -- role changes --------------------------------------------------------------------------------

    @property
    def voted_for_withheld(self) -> bool:
        """True while this replica must not vote because it lost data."""
        return self._withheld

    @property
    def is_voter(self) -> bool:
        """True when this node's vote counts."""
        return self.node in self.membership.voters

    def _set_term(self, term: int, voted_for: int) -> None:
        check(term >= self.term, f"term fell from {self.term} to {term}")
        check(
            term > self.term or self.voted_for in (0, voted_for),
            f"second vote in term {term}: {self.voted_for}, then {voted_for}",
        )
        self.term = term
        self.voted_for = voted_for
        saved = VOTE_WITHHELD if self._withheld else voted_for
        self.effects.append((EFFECT_SAVE_VOTE, term, saved))

    def become_follower(self, term: int, leader: int) -> None:
        """Follows `leader` (0 = nobody known) in `term`."""
        newer = term > self.term
        if newer:
            self._after_vote.clear()
            self._set_term(term, 0)
        was = self.leader
        self.role = FOLLOWER
        self.votes = set()
        self.transfer_to = 0
        self._transfer_election = False
        if self.progress:
            self.progress = {}
        if newer or was != leader:
            # What matched an earlier leader need not match this one.
            self.matched = 0
            self.leader = leader
            self.effects.append((EFFECT_LEADER_CHANGED, leader))
        if leader == 0:
            self._arm(self._election_delay())
        else:
            self._disarm()

    def _election_delay(self) -> int:
        config = self.config
        return config.election_min_ms + int(self.random() * config.election_spread_ms)

    def _arm(self, delay: int) -> None:
        self._timer += 1
        self._timer_set = True
        self.effects.append((EFFECT_TIMER, delay, self._timer))

    def _disarm(self) -> None:
        self._timer += 1
        self._timer_set = False

    def start(self, *, campaign: bool) -> None:
        """Begins life: at once as a candidate, or waiting for a leader to speak."""
        if campaign and self.is_voter:
            self._pre_campaign()
        else:
            self._arm(self._election_delay())

    def on_timer(self, token: int) -> None:
        """The delay asked for has passed."""
        if token != self._timer or not self._timer_set:
            return
        self._timer_set = False
        if self.role == LEADER:
            return
        if self.leader and self.leader in self.reachable:
            return
        self._pre_campaign()

    def _pre_campaign(self) -> None:
        if not self.is_voter or self._withheld:
            if self.leader:
                self.leader = 0
                self.effects.append((EFFECT_LEADER_CHANGED, 0))
            return
        self.role = PRE_CANDIDATE
        self.votes = {self.node}
        if self.leader:
            self.leader = 0
            self.effects.append((EFFECT_LEADER_CHANGED, 0))
        self._arm(self._election_delay())
        if len(self.membership.voters) == 1:
            self._campaign()
            return
        ask = PreVote(self.term + 1, self.log.last_index, self.log.last_term)
        for node in self.membership.voters:
            if node != self.node:
                self.effects.append((EFFECT_SEND, node, ask))

    def _campaign(self) -> None:
        self.role = CANDIDATE
        self.leader = 0
        self.votes = set()
        self._after_vote.clear()
        self._set_term(self.term + 1, self.node)
        self._arm(self._election_delay())
        ask = Vote(self.term, self.log.last_index, self.log.last_term, self._transfer_election)
        for node in self.membership.voters:
            if node != self.node:
                self._after_vote.append((node, ask))

    def _become_leader(self) -> None:
        check(self.role == CANDIDATE, "only a candidate becomes leader")
        self.role = LEADER
        self.leader = self.node
        self._transfer_election = False
        self.transfer_to = 0
        self._disarm()
        self.term_start = self.log.last_index + 1
        self.progress = {}
        for node in (*self.membership.voters, *self.membership.learners):
            if node != self.node:
                self.progress[node] = Progress(
                    node, self.log.last_index + 1, node in self.reachable
                )
        self.effects.append((EFFECT_BECAME_LEADER,))
        self.effects.append((EFFECT_LEADER_CHANGED, self.node))

    def step_down(self) -> None:
        """Stops leading without a successor."""
        if self.role == LEADER:
            self.become_follower(self.term, 0)

    # -- durable votes -------------------------------------------------------------------------------

    def on_vote_written(self, term: int, voted_for: int) -> None:
        """Term and vote are on disk: what had to wait for that may go."""
        self.saved_term = term
        self.saved_vote = voted_for
        if term != self.term or (voted_for != self.voted_for and voted_for != VOTE_WITHHELD):
            return
        for node, message in self._after_vote:
            self.effects.append((EFFECT_SEND, node, message))
        self._after_vote.clear()
        if self.role == CANDIDATE and voted_for == self.node:
            self.votes.add(self.node)
            self._count_votes()

    # -- general messages ----------------------------------------------------------------------------

    def step(self, sender: int, message: Message) -> None:
        """Takes a vote message or a TimeoutNow from another node."""
        if isinstance(message, PreVote):
            self._on_pre_vote(sender, message)
        elif isinstance(message, PreVoteReply):
            self._on_pre_vote_reply(sender, message)
        elif isinstance(message, Vote):
            self._on_vote(sender, message)
        elif isinstance(message, VoteReply):
            self._on_vote_reply(sender, message)
        elif isinstance(message, TimeoutNow):
            if message.term == self.term and self.role == FOLLOWER and self.is_voter:
                self._transfer_election = True
                self._campaign()

    def _hears_leader(self) -> bool:
        if self.role == LEADER:
            return True
        return self.leader != 0 and self.leader in self.reachable

    def _on_pre_vote(self, sender: int, message: PreVote) -> None:
        granted = (
            message.term > self.term
            and not self._withheld
            and self._is_up_to_date(message.last_index, message.last_term)
            and (not self._hears_leader() or self.leader == sender)
        )
        term = message.term if granted else self.term
        self.effects.append((EFFECT_SEND, sender, PreVoteReply(term, granted)))

    def _on_pre_vote_reply(self, sender: int, message: PreVoteReply) -> None:
        if not message.granted:
            if message.term > self.term:
                self.become_follower(message.term, 0)
            return
        if self.role != PRE_CANDIDATE or message.term != self.term + 1:
            return
        self.votes.add(sender)
        if has_majority(self.membership.voters, self.votes):
            self._campaign()

    def _on_vote(self, sender: int, message: Vote) -> None:
        if message.term > self.term:
            if self._hears_leader() and self.leader != sender and not message.transfer:
                # A member that was removed or cut off must not disturb a working leader (4.2.3).
                return
            self.become_follower(message.term, 0)
        granted = (
            message.term == self.term
            and self._may_vote_for(sender, message.term)
            and self.role in (FOLLOWER, PRE_CANDIDATE)
            and self._is_up_to_date(message.last_index, message.last_term)
        )
        reply = VoteReply(self.term, granted)
        if not granted:
            self.effects.append((EFFECT_SEND, sender, reply))
            return
        self.role = FOLLOWER
        self._arm(self._election_delay())
        if self.voted_for == sender:
            if self.saved_term == self.term and self.saved_vote == sender:
                self.effects.append((EFFECT_SEND, sender, reply))
            else:
                self._after_vote.append((sender, reply))
            return
        self._after_vote = [(sender, reply)]
        self._set_term(self.term, sender)

    def _on_vote_reply(self, sender: int, message: VoteReply) -> None:
        if message.term > self.term:
            self.become_follower(message.term, 0)
            return
        if self.role != CANDIDATE or message.term != self.term or not message.granted:
            return
        self.votes.add(sender)
        self._count_votes()

    def _count_votes(self) -> None:
        if self.node in self.votes and has_majority(self.membership.voters, self.votes):
            self._become_leader()

    # -- steady path: follower -----------------------------------------------------------------------

    def on_append(self, sender: int, term: int, prev_index: int, prev_term: int) -> bool:
        """Judges the head of an APPEND: True when the entries behind it may be taken.

        False: stale (the caller answers with `term`) or a gap (answers with `hint()`)."""
        if term < self.term:
            return False
        if term > self.term or self.role != FOLLOWER or self.leader != sender:
            check(
                not (term == self.term and self.role == LEADER),
                f"two leaders in term {term}: {self.node} and {sender}",
            )
            self.become_follower(term, sender)
        if prev_index > self.log.last_index:
            return False
        if prev_index < self.log.first_index - 1:
            # Below the start of the log everything is committed, hence equal.
            return True
        return self.log.term_at(prev_index) == prev_term

    def hint(self, prev_index: int) -> int:
        """Where the leader should look next after a rejected append: the last index that may match."""
        index = min(prev_index - 1, self.log.last_index)
        floor = max(self.commit_index, self.log.first_index - 1)
        if index <= floor:
            return floor
        term = self.log.term_at(index)
        while index > floor and self.log.term_at(index) == term:
            index -= 1
        return index

    def may_truncate(self, index: int) -> None:
        """Checked before entries from `index` on are dropped."""
        check(
            index > self.commit_index,
            f"truncation at {index} below commit index {self.commit_index} in term {self.term}",
        )

    def on_matched(self, index: int, leader_commit: int) -> None:
        """The log equals the leader's up to `index`; the leader has committed `leader_commit`."""
        self.matched = max(self.matched, index)
        self.on_commit_notice(leader_commit)

    def on_commit_notice(self, leader_commit: int) -> None:
        """Follower: commits what the leader has committed, as far as it is known to match."""
        commit = min(leader_commit, self.matched)
        if commit > self.commit_index:
            self.commit_index = commit

    # -- steady path: leader -------------------------------------------------------------------------

    def on_append_reply(self, sender: int, term: int, match: int, rejected: int) -> bool:
        """Takes a follower's answer; True when the commit index moved."""
        if term > self.term:
            self.become_follower(term, 0)
            return False
        if self.role != LEADER or term != self.term:
            return False
        progress = self.progress.get(sender)
        if progress is None:
            return False
        if rejected:
            if rejected == progress.next - 1 or progress.state == REPLICATE:
                progress.state = PROBE
                progress.forget_sent()
                progress.next = max(progress.match, min(match, self.log.last_index)) + 1
            return False
        check(
            match <= self.log.last_index,
            f"node {sender} acknowledges {match}, the log ends at {self.log.last_index}",
        )
        progress.probe_out = False
        if match < progress.match:
            return False
        if progress.state != REPLICATE:
            progress.state = REPLICATE
            progress.forget_sent()
            progress.next = match + 1
        progress.match = match
        if progress.next <= match:
            progress.next = match + 1
        sent = progress.sent
        while sent and sent[0][0] <= match:
            progress.in_flight -= sent.popleft()[1]
        return self.maybe_commit()

    def maybe_commit(self) -> bool:
        """Leader: moves the commit index to what a majority has on disk."""
        voters = self.membership.voters
        own = self._own_match()
        progress = self.progress
        if len(voters) == 3 and self.node in voters:
            # The middle of three without building a list: the case of nearly every call.
            a = own
            b = -1
            c = -1
            for node in voters:
                if node != self.node:
                    if b < 0:
                        b = progress[node].match
                    else:
                        c = progress[node].match
            index = max(min(a, b), min(max(a, b), c))
        else:
            index = committed(own if node == self.node else progress[node].match for node in voters)
        if index <= self.commit_index or not self._may_commit(index):
            return False
        self.commit_index = index
        return True

    # -- reachability --------------------------------------------------------------------------------

    def on_reachable(self, node: int) -> None:
        """The link to the node is up and it answers."""
        self.reachable.add(node)
        progress = self.progress.get(node)
        if progress is not None:
            progress.reachable = True
            progress.state = PROBE
            progress.forget_sent()
            progress.next = max(progress.match + 1, min(progress.next, self.log.last_index + 1))

    def on_unreachable(self, node: int) -> None:
        """The node is away or suspected."""
        self.reachable.discard(node)
        progress = self.progress.get(node)
        if progress is not None:
            progress.reachable = False
            progress.state = PROBE
            progress.forget_sent()
        if self.role != LEADER and self.leader == node:
            self._arm(int(self.random() * self.config.suspect_spread_ms))

    def reaches_majority(self) -> bool:
        """Leader: can it still get anything committed?"""
        near = sum(1 for node in self.membership.voters if node in self.reachable)
        return near + (1 if self.is_voter else 0) >= majority(len(self.membership.voters))

    # -- membership ----------------------------------------------------------------------------------

    def may_change_membership(self) -> bool:
        """One change at a time, and only after an entry of this term is committed (4.1, and the
        correction published for it)."""
        return (
            self.role == LEADER
            and self.membership_index <= self.commit_index
            and self.commit_index >= self.term_start
        )

    def set_membership(self, membership: Membership, index: int) -> None:
        """A membership entry was appended (in force at once), or taken back by a truncation."""
        self.membership = membership
        self.membership_index = index
        if self.role != LEADER:
            return
        wanted = {*membership.voters, *membership.learners} - {self.node}
        for node in wanted - self.progress.keys():
            self.progress[node] = Progress(node, self.log.last_index + 1, node in self.reachable)
            self.progress[node].target = self.log.last_index
        for node in self.progress.keys() - wanted:
            del self.progress[node]

    def transfer(self, to: int) -> bool:
        """Starts handing the leadership over; the election follows once `to` has caught up."""
        if self.role != LEADER or to not in self.membership.voters or to == self.node:
            return False
        self.transfer_to = to
        self._transfer_sent = False
        self.maybe_finish_transfer()
        return True

    def maybe_finish_transfer(self) -> None:
        """Sends TimeoutNow once the chosen follower has everything."""
        progress = self.progress.get(self.transfer_to)
        if (
            progress is not None
            and not self._transfer_sent
            and progress.match == self.log.last_index
        ):
            self._transfer_sent = True
            self.effects.append((EFFECT_SEND, self.transfer_to, TimeoutNow(self.term)))

    # -- lost data -----------------------------------------------------------------------------------

    def withhold_votes(self) -> None:
        """This replica lost entries that it may have acknowledged: no vote until it caught up."""
        self._withheld = True
        self.effects.append((EFFECT_SAVE_VOTE, self.term, VOTE_WITHHELD))

    def release_votes(self) -> None:
        """It has everything that was committed when it began to catch up."""
        if self._withheld:
            self._withheld = False
            if self.voted_for == VOTE_WITHHELD:
                # Which vote it gave in this term is lost: no second one in it.
                self.voted_for = self.leader or VOTE_WITHHELD
            self.effects.append((EFFECT_SAVE_VOTE, self.term, self.voted_for))

    def check_invariants(self) -> None:
        """Relations that always hold."""
        assert self.commit_index <= self.log.last_index
        assert (self.role == LEADER) == (self.leader == self.node and self.leader != 0)
        for progress in self.progress.values():
            assert progress.match < progress.next
