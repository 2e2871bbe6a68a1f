"""Replicas on this node as operators see them: role, log and what it lacks; and the storage below
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.metadata.reads import METADATA_GROUP
from convoymq.replication import versions as supported
from convoymq.replication.raft.membership import NEVER
from convoymq.shells.groups.host import ReplicaHost
from convoymq.shells.groups.replica import Replica


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A queue's replica and its log."""

    is_leader: bool
    term: int
    commit_index: int
    last_applied: int
    written_index: int
    """Last entry that this node's disk has."""
    snapshot_index: int
    segments: int
    commit_latency_ms: float
    """Of a leader: from an entry's append to its commit, lately; 0 for a follower."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Replicas on this node, of queues and of the metadata group."""

    led: int
    followed: int
    behind: int
    """Replicas that cannot take over now."""
    lacking: int
    """Replicas that cannot replace another one yet, as far as this node knows: a leader's followers
    that lack something committed or have no vote, own ones that lost their data and catch up, and
    stopped ones. A restart elsewhere had better wait."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """Storage of this node's logs."""

    memory_bytes: int
    wal_files: int
    """WAL files that were begun, since the beginning."""


class ReplicaViews:
    """See the module text. One per node."""

    def __init__(self, host: ReplicaHost, tree: MetadataMachine) -> None:
        self._host = host
        self._tree = tree

    def of_queues(self) -> Iterator[tuple[QueueRecord, ReplicaView]]:
        """Yields queues with their replica here."""
        records = self._tree.queue_index.by_group
        for group, replica in list(self._host.groups.items()):
            record = records.get(group)
            if record is not None:
                yield record, _view(replica)

    def counts(self) -> ReplicaCounts:
        """Returns how many there are. Cost: O(replicas)."""
        replicas = list(self._host.groups.values())
        led = sum(1 for replica in replicas if replica.is_leader)
        return ReplicaCounts(
            led=led,
            followed=len(replicas) - led,
            behind=sum(1 for replica in replicas if replica.is_behind),
            lacking=sum(map(_lacking, replicas)) + len(self._host.stopped),
        )

    def metadata_voters(self) -> tuple[int, ...]:
        """Returns the nodes that decide changes of the metadata, as far as this node knows."""
        replica = self._host.replica(METADATA_GROUP)
        return replica.members if replica is not None else ()

    def index_bytes(self) -> Iterator[tuple[str, int]]:
        """Yields (kind of machine, bytes of its indexes in memory), where they are counted."""
        for replica in list(self._host.groups.values()):
            memory_bytes = getattr(replica.machine, "memory_bytes", None)
            if memory_bytes is not None:
                yield replica.machine.KIND, memory_bytes()

    def storage(self) -> StorageView:
        """Returns the facts of the storage."""
        storage = self._host.storage
        return StorageView(
            memory_bytes=storage.memory_bytes + storage.cache_bytes,
            wal_files=storage.wal.generation,
        )

    def counters(self) -> dict[str, int | float]:
        """Returns the totals since the node started, by name."""
        counters = getattr(self._host, "counters", None)
        names = getattr(type(counters), "__slots__", ())
        values = {name: getattr(counters, name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}

    def versions(self) -> dict[str, dict[str, int]]:
        """Returns per kind of machine what this build supports, and the lowest and highest version
        that is in force in a group with a replica here."""
        found = {}
        replicas = list(self._host.groups.values())
        for kind, (oldest, newest) in sorted(supported.supports().items()):
            here = [each.machine.version for each in replicas if kind == each.machine.KIND]
            found[kind] = {"oldest": oldest, "newest": newest}
            if here:
                found[kind] |= {"in_force_min": min(here), "in_force_max": max(here)}
        return found

    def floor_of(self, kind: str) -> int:
        """Returns the highest version of a kind of machine that every node supports."""
        return self._host.floor_of(kind)


def _view(replica: Replica) -> ReplicaView:
    core, log = replica.core, replica.log
    return ReplicaView(
        is_leader=replica.is_leader,
        term=core.term,
        commit_index=core.commit_index,
        last_applied=replica.last_applied,
        written_index=log.written_index,
        snapshot_index=log.snapshot_index,
        segments=len(log.segments),
        commit_latency_ms=replica.applying.commit_latency_ms if replica.is_leader else 0.0,
    )


def _lacking(replica: Replica) -> int:
    core = replica.core
    own = int(replica.faulty != "" or core.lost_state or core.quarantined)
    if not replica.is_leader:
        return own
    peers = core.progress.values()
    # A member that gets no vote lacks none.
    learning = {each.node for each in core.members.learners if each.promote_at == NEVER}
    return own + sum(
        1
        for peer in peers
        if peer.match < core.commit_index or not (peer.voter or peer.node in learning)
    )
