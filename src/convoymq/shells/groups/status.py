"""Status of a node's groups."""

from __future__ import annotations

from dataclasses import dataclass


class HostCounters:
    """Counters of this node, over all groups, since its start."""

    __slots__ = (
        "bytes_appended",
        "elections",
        "entries_appended",
        "forwards_stale",
        "leader_changes",
        "replicas_stopped",
        "snapshots_installed",
        "snapshots_sent",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    bytes_appended: int
    elections: int
    entries_appended: int
    forwards_stale: int
    leader_changes: int
    replicas_stopped: int
    snapshots_installed: int
    snapshots_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A look at one group from this node."""

    group: int
    role: str
    leader: int
    term: int
    commit_index: int
    last_applied: int
    last_index: int
    written_index: int
    snapshot_index: int
    voters: tuple[int, ...]
    learners: tuple[int, ...]
    match: dict[int, int]
    """Leader: last index known to be durable on each follower."""
    version: int
    """Machine version in force."""
    stopped: str
    """Reason why the replica takes part no more, or ""."""
