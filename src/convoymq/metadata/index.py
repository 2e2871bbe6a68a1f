"""Queues of the replicated tree by what is asked of all of them at once.

Each declaration asks how many replicas the nodes have, each end of a connection which queues it
owned: with thousands of queues neither may look at all of them. The index follows from the records
and is in no snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from convoymq.metadata.records import QueueRecord


class QueueIndex:
    """Kept by `MetadataMachine` with every change of a record."""

    def __init__(self) -> None:
        self.by_group: dict[int, QueueRecord] = {}
        self.successors: dict[int, QueueRecord] = {}
        """Group of a queue that is being migrated -> the one that shall take its place."""
        self.replicas: Counter[int] = Counter()
        """Members of queues per node."""
        self._owned: dict[str, dict[int, QueueRecord]] = {}
        self._fleeting: dict[int, dict[int, QueueRecord]] = {}
        """Node -> exclusive and transient queues that it is the home of, by group."""

    def put(self, record: QueueRecord) -> None:
        """Adds a record, in place of the one that the group had."""
        known = self.by_group.get(record.group)
        successor = self.successors.get(record.group)
        if known is not None:
            self.drop(known)
        self.by_group[record.group] = record
        if successor is not None:
            self.successors[record.group] = successor
        if record.predecessor in self.by_group:
            self.successors[record.predecessor] = record
        self.replicas.update(record.members)
        if record.owner is not None:
            self._owned.setdefault(record.owner, {})[record.group] = record
        if record.is_fleeting:
            self._fleeting.setdefault(record.home, {})[record.group] = record

    def drop(self, record: QueueRecord) -> None:
        """Removes a record."""
        del self.by_group[record.group]
        self.successors.pop(record.group, None)
        self.successors.pop(record.predecessor, None)
        for node in record.members:
            self.replicas[node] -= 1
            if not self.replicas[node]:
                del self.replicas[node]
        if record.owner is not None:
            owned = self._owned[record.owner]
            del owned[record.group]
            if not owned:
                del self._owned[record.owner]
        if record.is_fleeting:
            fleeting = self._fleeting[record.home]
            del fleeting[record.group]
            if not fleeting:
                del self._fleeting[record.home]

    def owned_by(self, owner: str) -> list[QueueRecord]:
        """Exclusive queues of a connection."""
        return list(self._owned.get(owner, {}).values())

    def fleeting_at(self, node: int) -> list[QueueRecord]:
        """Exclusive and transient queues whose home is a node: they go with it."""
        return list(self._fleeting.get(node, {}).values())

    def check_invariants(self, records: Collection[QueueRecord]) -> None:
        """Asserts that the index says what the records say. Cost: O(everything); for tests."""
        assert self.by_group == {record.group: record for record in records}
        assert self.replicas == Counter(node for record in records for node in record.members)
        assert self.successors == {
            record.predecessor: record for record in records if record.predecessor in self.by_group
        }
        owned = {record.group for record in records if record.owner is not None}
        assert set().union(*self._owned.values()) == owned
        fleeting = {record.group for record in records if record.is_fleeting}
        assert set().union(*self._fleeting.values()) == fleeting
        assert all(r.home == node for node in self._fleeting for r in self.fleeting_at(node))
        assert all(record.owner == name for name in self._owned for record in self.owned_by(name))
