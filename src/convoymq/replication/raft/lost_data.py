"""A replica that lost its log, or its log and its vote: how it takes part again.

    log damaged  ─▶ quarantined: neither leads nor votes ─▶ caught up ─▶ votes in the next term
    nothing left ─▶ lost state: does not acknowledge either ─▶ rejoin accepted ─▶ quarantined

Source: docs/adr/0002-raft.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.errors import check
from convoymq.replication.raft.types import (
    LEADER,
    LOST_STATE,
    PRE_VOTE,
    QUARANTINED,
    REJOIN,
    REJOIN_ACCEPTED,
    WITHHELD,
    RoleChanged,
    Send,
)

if TYPE_CHECKING:
    from convoymq.replication.raft.core import RaftCore


class LostData:
    """Rules of one replica for data that it, or another member, has lost."""

    __slots__ = ("catch_up_to", "core")

    def __init__(self, core: RaftCore) -> None:
        self.core = core
        #: Quarantined: log position that ends it; -1 = not yet known.
        self.catch_up_to = -1

    def quarantine(self, vote_lost: bool) -> None:
        """The log is damaged, or (`vote_lost`) this replica may have been a member before and has
        nothing left of it: neither lead nor vote from now on.

        The log may be wiped when this mark is durable (`on_vote_written`), not before: a crash in
        between would leave an empty log whose owner votes.
        """
        core = self.core
        term = core.term + (core.voted_for not in (0, LOST_STATE if vote_lost else QUARANTINED))
        core.lost_state = core.lost_state or vote_lost
        core.quarantined = not core.lost_state
        core.become_follower(core.term, 0)
        core.elections.disarm()
        mark = LOST_STATE if core.lost_state else QUARANTINED
        if (term, mark) != (core.term, core.voted_for):
            core.set_vote(term, mark)
        core.effects.append(RoleChanged())

    def on_log_lost(self) -> None:
        """The log was wiped (it is empty now): begins to catch up, or to be taken in anew."""
        core = self.core
        check(
            core.quarantined or core.lost_state,
            f"group {core.group}: the log was wiped without quarantine",
        )
        core.memberships = [(0, core.members)]
        core.commit_index = core.applied_index = 0
        core.leader = 0
        core.match_index = 0
        self.catch_up_to = -1
        if core.lost_state:
            self.ask_to_rejoin()
        else:
            core.elections.arm(core.elections.delay_ms())

    def end_quarantine(self) -> None:
        """Once the log is whole: over when that is durable (`on_vote_written`). In this term it
        still does not vote: it cannot know whether it has before."""
        core = self.core
        assert not (core.quarantined and core.lost_state), "a loss is of one kind"
        if (
            core.quarantined
            and core.voted_for == QUARANTINED
            and 0 <= self.catch_up_to <= core.ack_index()
        ):
            core.set_vote(core.term, WITHHELD)

    def ask_to_rejoin(self) -> None:
        """Asks all nodes that can be reached to be taken in anew."""
        core = self.core
        # Everybody: who belongs to the group now, this replica cannot know any more.
        for node in sorted(core.connected):
            if node != core.node:
                core.effects.append(Send(node, (REJOIN, core.term, core.replica_number)))
        core.elections.arm(core.elections.delay_ms())
        core.elections.attempts += 1

    def on_rejoin(self, node: int, replica_number: int) -> None:
        """Leader: a member without a past asks to be taken in."""
        core = self.core
        # Who is no member waits until somebody who may decides that it is one.
        if core.role != LEADER or node not in core.members.nodes:
            return
        learner = core.members.learner(node)
        known = learner.replica_number if learner is not None else 0
        if replica_number < max(1, known, core.changes.rejoining.get(node, 0)):
            return
        core.changes.rejoining[node] = replica_number
        if known == replica_number and core.latest()[0] <= core.commit_index:
            self.accept_rejoin(node, replica_number)
        core.members_due = True

    def accept_rejoin(self, node: int, replica_number: int) -> None:
        """Leader: tells a member that its new place in the group is committed."""
        core = self.core
        assert core.latest()[0] <= core.commit_index, "its place is not committed yet"
        core.changes.rejoining.pop(node, None)
        core.effects.append(Send(node, (REJOIN_ACCEPTED, core.term, replica_number)))
        core.progress[node].match = 0
        core.progress[node].probe(1)

    def on_rejoin_accepted(self, node: int, term: int, replica_number: int) -> None:
        """Goes on as a non-voter without a past, which catches up."""
        core = self.core
        if not core.lost_state or replica_number != core.replica_number:
            return
        # The number exists only since this start, and the configuration that names it is
        # committed: whoever leads from then on holds what this node ever promised to keep. The
        # leader's term may be below the one that marks the loss. To know that a candidate is such a
        # leader, this replica must first have it all.
        core.lost_state = False
        core.quarantined = True
        core.elections.attempts = 0
        core.set_vote(max(term, core.term + 1), 0)
        core.become_follower(core.term, 0)
        # Never granted, but the leader answers it with an append.
        message = (PRE_VOTE, core.term, core.log.last_index, core.log.last_term)
        core.effects.append(Send(node, message))
