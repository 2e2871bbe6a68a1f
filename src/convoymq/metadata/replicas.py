"""Interface to the groups of the node that the metadata needs: `groups.host.ReplicaHost` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from convoymq.replication.raft.core import RaftCore
from convoymq.replication.raft.membership import Membership


class Log(Protocol):
    """The log of a group."""

    @property
    def last_index(self) -> int:
        """Of the newest entry."""

    @property
    def snapshot_term(self) -> int:
        """Of the last entry that the newest snapshot covers."""

    def term_at(self, index: int) -> int:
        """Returns the term of an entry. Raises EntryGone."""


class Replica(Protocol):
    """A replica of this node."""

    core: RaftCore

    @property
    def log(self) -> Log:
        """Returns the replica's log."""

    @property
    def is_leader(self) -> bool:
        """Returns whether this node leads the group."""

    @property
    def leader(self) -> int | None:
        """Returns the leader, as known here."""

    @property
    def members(self) -> tuple[int, ...]:
        """Members with a vote."""

    @property
    def last_applied(self) -> int:
        """Returns the newest entry that the machine has."""


class Replicas(Protocol):
    """The replicas of this node."""

    def replica(self, group: int) -> Replica | None:
        """Returns the local replica of a group."""


class Host(Replicas, Protocol):
    """The groups of a node."""

    on_membership_changed: Callable[[int, Membership], None] | None

    @property
    def groups(self) -> Mapping[int, Replica]:
        """Returns the replicas by group."""

    def add_member(self, group: int, node: int, *, voter: bool = True) -> bool:
        """Takes a node in as a learner, as leader; with `voter` it gets a vote when it has caught
        up."""

    def set_vote(self, group: int, node: int, *, votes: bool) -> bool:
        """Gives a member a vote, as leader, once it has caught up, or takes it away."""

    def replace_member(self, group: int, node: int, by: int = 0) -> bool:
        """Removes a member, as leader, and takes `by` in for it unless that is 0."""

    def member_refusal(self, group: int, node: int) -> str:
        """Returns why a node cannot become a member; empty when it can."""

    def wake(self) -> None:
        """Begins a round."""
