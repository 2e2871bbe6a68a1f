"""Changes of a group's members (thesis 4), and the operator's configuration for a lost majority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.replication.raft.membership import Learner, Membership
from convoymq.replication.raft.quorum import has_majority
from convoymq.replication.raft.types import LEADER, REPLICATE, TIMEOUT_NOW, Send

if TYPE_CHECKING:
    from convoymq.replication.raft.core import RaftCore

ATTEMPTS_LOST = 5
"""After so many elections without a winner a majority that is linked counts as lost: it has no
data, or its replicas have stopped."""


class MembershipChanges:
    """Changes that one replica makes."""

    __slots__ = ("core", "forced", "rejoining")

    def __init__(self, core: RaftCore) -> None:
        self.core = core
        #: The configuration of `force`, until it is in the log.
        self.forced: Membership | None = None
        #: Leader: members without a past that wait to be taken in: node -> replica number.
        self.rejoining: dict[int, int] = {}

    def on_committed(self) -> None:
        """The configuration in force was committed."""
        core = self.core
        core.members_due = True
        if core.node not in core.members.voters:
            # Removed: the most advanced of the others should not have to wait (thesis 4.2.2).
            heirs = [peer for peer in core.peers if peer.voter and peer.connected]
            if heirs:
                heir = max(heirs, key=lambda peer: (peer.match, -peer.node))
                core.effects.append(Send(heir.node, (TIMEOUT_NOW, core.term)))
            core.become_follower(core.term, 0)
            return
        for node, replica_number in list(self.rejoining.items()):
            learner = core.members.learner(node)
            if learner is not None and learner.replica_number == replica_number:
                core.lost_data.accept_rejoin(node, replica_number)

    def refusal_of(self, members: Membership) -> str | None:
        """Returns why the leader may not propose this configuration now; None = append it."""
        core = self.core
        if core.role != LEADER:
            return "not leader"
        if not core.may_change_members():
            return "another change of members is under way"
        if not members.voters or not members.is_single_step_from(core.members):
            return "only one voter may change at a time"
        if not has_majority(self._able_without(members), members.voters):
            return "too few of the voters that are left could commit it"
        return None

    def _able_without(self, members: Membership) -> set[int]:
        """Leader: who could commit a new configuration now, this node among them. Entries of a
        change are held to the new one at once: where its majority has lost its logs, no leader can
        commit it and nobody can be elected to undo it."""
        core = self.core
        able = {core.node}
        # Who votes for the next leader, when this one takes its leave?
        needs_votes = core.node not in members.voters
        for peer in core.peers:
            acknowledges = peer.connected and not peer.silent and peer.state == REPLICATE
            whole = peer.node not in self.rejoining and not (needs_votes and peer.voteless)
            if acknowledges and whole:
                able.add(peer.node)
        return able

    def proposal(self) -> Membership | None:
        """Returns the configuration that the leader should propose by itself now: a non-voter that
        has caught up is promoted, a member without a past becomes a non-voter under its number."""
        core = self.core
        if core.role != LEADER or not core.may_change_members():
            return None
        for node, replica_number in self.rejoining.items():
            learner = core.members.learner(node)
            if learner is None or learner.replica_number != replica_number:
                promote_at = learner.promote_at if learner is not None else 0
                return core.members.with_learner(self.new_learner(node, replica_number, promote_at))
        for learner in core.members.learners:
            peer = core.progress.get(learner.node)
            if peer is not None and not peer.voteless and learner.promote_at <= peer.match:
                return core.members.promoted(learner.node)
        core.members_due = False
        return None

    def force(self, members: Membership) -> str | None:
        """Forces another configuration, in which this replica is the only voter; returns why it may
        not, or None.

        This breaks what Raft promises: entries that the lost majority had committed and this
        replica does not hold are gone, and the former members must never be heard again as such. It
        is an operator's decision (`convoy recover`).

        Nothing is changed before this replica is elected, alone, in a higher term: the shell then
        opens the term with the membership entry (`forced`), which makes it last.
        """
        core = self.core
        if members.voters != {core.node}:
            return "the recovering replica must be the only voter"
        if core.quarantined or core.lost_state:
            return "this replica has lost its own data"
        if core.role == LEADER and core.reaches_majority():
            return "this replica leads, with a majority"
        if core.role != LEADER and core.leader and core.leader in core.connected:
            return f"node {core.leader} leads"
        if (
            core.role != LEADER
            and core.reaches_majority()
            and core.elections.attempts < ATTEMPTS_LOST
        ):
            return "a majority can be reached: an election may still succeed"
        core.become_follower(core.term, 0)
        learners = [self.new_learner(each.node) for each in members.learners]
        self.forced = members = Membership(members.voters, tuple(learners))
        # Behind every entry: what it replaces stays in force for snapshots of what is applied.
        core.memberships.append((core.log.last_index + 1, members))
        core.members = members
        core.elections.start()
        return None

    @property
    def is_forced(self) -> bool:
        """The configuration in force is to be appended by the leader that this node becomes."""
        return self.forced is not None

    def drop_forced(self) -> None:
        """Goes back to the configuration before the forced one, which is not in the log."""
        core = self.core
        assert self.forced is not None, "no configuration is forced"
        self.forced = None
        core.memberships.pop()
        assert core.memberships, "a group has a configuration"
        core.members = core.latest()[1]

    def new_learner(self, node: int, replica_number: int = 0, promote_at: int = 0) -> Learner:
        """Returns a non-voter to be proposed now: it becomes a voter when it has what is proposed.

        Nothing that it acknowledged before a former start reaches that far, however late it comes.
        """
        core = self.core
        return Learner(node, max(promote_at, core.log.last_index + 1), replica_number)
