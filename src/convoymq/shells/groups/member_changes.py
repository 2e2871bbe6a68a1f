# cython: annotation_typing=False
"""Changes of a group's members, as one replica proposes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from convoymq.kernels.entries import ENTRY_MEMBERSHIP, make_entry
from convoymq.replication import versions as supported
from convoymq.replication.raft.membership import NEVER, Learner, Membership
from convoymq.replication.raft.types import LEADER

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica


class MemberChanges:
    """Changes that one replica proposes; the core decides whether they may be."""

    __slots__ = ("core", "group", "host", "log", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.group = replica.group

    def propose(self, members: Membership) -> bool:
        """Leader: proposes a single-step change; False when that is not possible now."""
        replica = self.replica
        core = self.core
        if not replica.takes_entries or core.changes.refusal_of(members) is not None:
            return False
        if any(self.refusal_of(node) for node in members.nodes - core.members.nodes):
            return False
        if replica.builder.used:
            replica.seal()
        index = self.log.last_index + 1
        former = list(core.peers)
        replica.sender.append(
            make_entry(
                self.group,
                index,
                core.term,
                replica.time.now_ms(),
                ENTRY_MEMBERSHIP,
                members.encode(),
            )
        )
        for peer in former:
            if peer.node not in core.progress:
                sending = replica.snapshots.sending.pop(peer.node, None)
                if sending is not None:
                    sending.stop()
                # So that it may know; nothing depends on it.
                replica.sender.replicate(peer)
        return True

    def refusal_of(self, node: int) -> str:
        """Returns why the group can't take in a node that is not a member; "" = it can."""
        replica = self.replica
        version = replica.version
        if node == self.host.node:
            return ""
        known = self.host.supports.get(node, {})
        if supported.is_supported(known, replica.kind, version):
            return ""
        found = known.get(replica.kind)
        which = f"{found[0]} to {found[1]}" if found else "1 to 1"
        return (
            f"node {node} supports the versions {which} of the {replica.kind} machine as far as "
            f"known; version {version} is in force"
        )

    def go_on(self) -> None:
        """Leader: proposes what is due by itself, such as a vote for who has caught up."""
        members = self.core.changes.proposal()
        if members is not None:
            self.propose(members)

    def add(self, node: int, *, voter: bool = True) -> bool:
        """Leader: adds a learner; with `voter` it is promoted once it has caught up."""
        members = self.core.members
        if node in members.nodes:
            return self.core.role == LEADER
        learner = self.core.changes.new_learner(node) if voter else Learner(node, NEVER)
        return self.propose(members.with_learner(learner))

    def stand_in(self, node: int, source: int) -> bool:
        """Leader: adds a learner that is to take a member's place when it is told to."""
        members = self.core.members
        if node in members.nodes or source not in members.nodes:
            return False
        return self.propose(members.with_learner(Learner(node, NEVER + source)))

    def succeed(self, node: int, source: int) -> bool:
        """Leader: gives a vote to a learner that is to take the place of the only voter, and
        records that that one leaves."""
        members = self.core.members
        learner = members.learner(node)
        known = learner.replica_number if learner is not None else 0
        members = members.with_learner(self.core.changes.new_learner(node, known))
        return self.propose(replace(members, leaving=source))

    def set_vote(self, node: int, *, votes: bool) -> bool:
        """Leader: has a member get a vote once it has caught up, or takes its vote away."""
        members = self.core.members
        learner = members.learner(node)
        known = learner.replica_number if learner is not None else 0
        if node not in members.nodes:
            return False
        at = self.core.changes.new_learner(node, known) if votes else Learner(node, NEVER, known)
        return self.propose(members.with_learner(at))

    def remove(self, node: int) -> bool:
        """Leader: removes a voter or learner. The last voter stays."""
        members = self.core.members
        if node not in members.nodes:
            return self.core.role == LEADER
        return self.propose(members.without(node))

    def replace(self, node: int, by: int) -> bool:
        """Leader: removes a member and takes in another one, which gets a vote when it has caught
        up; one entry, so that no new leader can know of one half only. `by` 0: only removes."""
        members = self.core.members.without(node)
        if by:
            learner = members.learner(by)
            known = learner.replica_number if learner is not None else 0
            members = members.with_learner(self.core.changes.new_learner(by, known))
        return self.propose(members)

    def force(self, members: Membership) -> str | None:
        """Goes on without the majority that is lost: this node as the only voter, others as
        non-voters that get everything anew. Returns why it may not; None = it does.

        The former members must not be heard any more: their disks may hold what this replica does
        not, committed (`MembershipChanges.force`).
        """
        replica = self.replica
        if replica.dead or replica.faulty or replica.snapshots.receiving is not None:
            return (
                replica.stopped or replica.faulty or "this replica is being replaced by a snapshot"
            )
        refusal = self.core.changes.force(members)
        if refusal is None:
            self.host.note(
                "raft.membership_forced",
                group=self.group,
                last_index=self.log.last_index,
                members=sorted(members.nodes),
            )
            replica.run_effects()
            self.host.wake()
        return refusal
