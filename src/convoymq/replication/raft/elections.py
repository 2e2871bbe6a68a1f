# cython: annotation_typing=False
"""A replica's part in elections: the timer, votes asked for and given (thesis 3.4, 9.6).

Roles and terms are the core's (`RaftCore`), and so is what may be voted for; an election ends in
`RaftCore.become_leader` or `become_follower`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.replication.raft.quorum import has_majority
from convoymq.replication.raft.types import (
    CANDIDATE,
    FOLLOWER,
    LEADER,
    PRE_CANDIDATE,
    PRE_VOTE,
    PRE_VOTE_REPLY,
    VOTE_REPLY,
    Arm,
    Disarm,
    Message,
    RoleChanged,
    Send,
)

if TYPE_CHECKING:
    from convoymq.replication.raft.core import RaftCore

QUICK_DELAY_SHARE = 0.5
"""A follower whose leader just failed waits up to half of this share of the base, and the whole of
it for each member that should stand before; retries wait longer."""

QUESTIONS_MAX = 10
"""Most questions of a replica that may not stand about who leads, until a link changes."""


class Elections:
    """Elections of one replica."""

    def __init__(self, core: RaftCore) -> None:
        self.core = core
        #: Who voted, or would vote, for this node.
        self.votes: set[int] = set()
        #: A candidate that gets this node's vote when that is durable; 0 = none.
        self.vote_waiting = 0
        #: Elections, or questions who leads, since a leader was known.
        self.attempts = 0
        #: Follower: it has heard the leader since that was doubted.
        self.in_contact = False
        #: The timer runs.
        self.armed = False

    def is_elected(self) -> bool:
        """A majority of the voters voted for this node."""
        core = self.core
        return has_majority(self.votes, core.members.voters)

    def arm(self, delay_ms: int) -> None:
        """Starts the election timer, or starts it anew."""
        core = self.core
        assert delay_ms >= 0, f"group {core.group}: a timer of {delay_ms} ms"
        self.armed = True
        core.effects.append(Arm(delay_ms))

    def delay_ms(self) -> int:
        """Returns a random wait between half and double of the base; longer with each attempt."""
        core = self.core
        base = core.election_ms * (0.5 + 1.5 * core.random())
        return int(base * min(max(self.attempts, 1), 4))

    def quick_delay_ms(self) -> int:
        """Returns a random wait that is short, and longer for each member that should stand
        before."""
        core = self.core
        return self.hasty_delay_ms() + int(
            core.election_ms * QUICK_DELAY_SHARE * self.place_in_line()
        )

    def hasty_delay_ms(self) -> int:
        """Returns a random wait for who need not let others go first."""
        core = self.core
        return int(core.election_ms * (0.02 + 0.5 * QUICK_DELAY_SHARE * core.random()))

    def place_in_line(self) -> int:
        """Returns how many reachable voters should stand for an election before this one: another
        one goes first in each group, and two that stand at once would split the votes."""
        core = self.core
        voters = [n for n in core.members.voters if n == core.node or n in core.connected]
        if core.node not in voters:
            return len(voters)
        return (sorted(voters).index(core.node) + core.group) % len(voters)

    def disarm(self) -> None:
        """Stops the election timer."""
        core = self.core
        if self.armed:
            self.armed = False
            core.effects.append(Disarm())

    def on_timer(self) -> None:
        """The timer that `Arm` asked for has run out."""
        core = self.core
        self.armed = False
        if core.role == LEADER:
            if not core.reaches_majority():
                core.become_follower(core.term, 0)
            return
        if core.lost_state:
            core.lost_data.ask_to_rejoin()
            return
        if core.leader and self.in_contact and core.leader in core.connected:
            return
        if not core.may_stand() or not core.reaches_majority():
            core.forget_leader()
            if core.node in core.members.nodes and self.attempts < QUESTIONS_MAX:
                # Never granted, but the leader answers it with an append.
                self.attempts += 1
                message = (PRE_VOTE, core.term, core.log.last_index, core.log.last_term)
                self.ask_voters(message)
                self.arm(self.delay_ms())
            # Else it comes again with the next node that becomes reachable.
            return
        self.start_pre_vote()

    def start_pre_vote(self) -> None:
        """Asks whether a majority would vote for this node."""
        core = self.core
        self.attempts += 1
        core.role = PRE_CANDIDATE
        core.leader = 0
        self.votes = {core.node}
        core.effects.append(RoleChanged())
        if self.is_elected():
            self.start()
            return
        self.arm(self.delay_ms())
        message = (PRE_VOTE, core.term + 1, core.log.last_index, core.log.last_term)
        self.ask_voters(message)

    def start(self) -> None:
        """Stands in the next term; the others are asked when the own vote is durable."""
        core = self.core
        assert not core.quarantined, f"group {core.group}: a quarantined replica stands"
        assert not core.lost_state, f"group {core.group}: a replica without a past stands"
        core.role = CANDIDATE
        core.leader = 0
        self.votes = set()
        core.set_vote(core.term + 1, core.node)
        core.effects.append(RoleChanged())
        self.arm(self.delay_ms())

    def ask_voters(self, message: Message) -> None:
        """Sends a message to the other voters."""
        core = self.core
        for node in sorted(core.members.voters):
            if node != core.node:
                core.effects.append(Send(node, message))

    def count_votes(self) -> None:
        """Leads once this node's own vote is durable and a majority has voted for it."""
        core = self.core
        if core.role == CANDIDATE and core.node in self.votes and self.is_elected():
            core.become_leader()

    def on_pre_vote(self, node: int, term: int, last_index: int, last_term: int) -> None:
        """Answers whether this node would vote for another one in a term."""
        core = self.core
        alive = (
            core.leader != 0
            and core.leader != node
            and (core.role == LEADER or (self.in_contact and core.leader in core.connected))
        )
        granted = (
            not alive
            and not core.quarantined
            and not core.lost_state
            and term > core.term
            and core.log_is_up_to_date(last_index, last_term)
        )
        if not granted and core.role == LEADER:
            # It does not know that this node leads: the next append tells.
            peer = core.progress.get(node)
            if peer is not None:
                core.reconnect(peer)
        leader = core.leader if alive else 0
        reply = (PRE_VOTE_REPLY, core.term, granted, term, leader)
        core.effects.append(Send(node, reply))
        if alive and core.role != LEADER and term > core.term + 1:
            # A later term has begun, perhaps without this leader: it is asked whether it leads.
            self.in_contact = False
            alive = False
        if not granted and not alive and not self.armed:
            self.arm(self.quick_delay_ms())

    def on_pre_vote_reply(
        self, node: int, term: int, granted: bool, asked: int, leader: int
    ) -> None:
        """Counts who would vote for this node."""
        core = self.core
        if term > core.term:
            core.become_follower(term, 0)
            return
        if core.role != PRE_CANDIDATE or asked != core.term + 1:
            return
        if granted:
            self.votes.add(node)
            if self.is_elected():
                self.start()

    def on_vote(self, node: int, term: int, last_index: int, last_term: int) -> None:
        """Votes, or refuses. The vote is sent when it is durable."""
        core = self.core
        if term > core.term:
            core.become_follower(term, 0)
        granted = (
            term == core.term
            and core.role in (FOLLOWER, PRE_CANDIDATE)
            and core.may_vote(node)
            and core.log_is_up_to_date(last_index, last_term)
        )
        if not granted:
            core.effects.append(Send(node, (VOTE_REPLY, core.term, False)))
            return
        if core.role != FOLLOWER:
            core.become_follower(term, 0)
        if core.voted_for != node:
            core.set_vote(term, node)
        self.arm(self.delay_ms())
        if core.durable_term == term and core.durable_vote == node:
            core.effects.append(Send(node, (VOTE_REPLY, term, True)))
        else:
            self.vote_waiting = node

    def on_vote_reply(self, node: int, term: int, granted: bool) -> None:
        """Counts a vote."""
        core = self.core
        if term > core.term:
            core.become_follower(term, 0)
        elif term == core.term and core.role == CANDIDATE and granted:
            self.votes.add(node)
            self.count_votes()

    def on_timeout_now(self, node: int, term: int) -> None:
        """Stands for election at once: the leader hands over (thesis 3.10)."""
        core = self.core
        if term == core.term and core.role != LEADER and core.may_stand():
            self.start()
