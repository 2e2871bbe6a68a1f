"""Queues of the replicated tree by what is asked of all of them at once.

Each declaration asks how many replicas the nodes have, each end of a connection which queues it
owned: with thousands of queues neither may look at all of them. The index follows from the records
and is in no snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from convoymq.metadata.records import QueueRecord


class QueueIndex:
    """Kept by `MetadataMachine` with every change of a record."""

    def __init__(self) -> None:
        self.by_group: dict[int, QueueRecord] = {}
        self.replicas: Counter[int] = Counter()
        """Members of queues per node."""
        self._owned: dict[str, dict[int, QueueRecord]] = {}

    def put(self, record: QueueRecord) -> None:
        """Adds a record, in place of the one that the group had."""
        known = self.by_group.get(record.group)
        if known is not None:
            self.drop(known)
        self.by_group[record.group] = record
        self.replicas.update(record.members)
        if record.owner is not None:
            self._owned.setdefault(record.owner, {})[record.group] = record

    def drop(self, record: QueueRecord) -> None:
        """Removes a record."""
        del self.by_group[record.group]
        for node in record.members:
            self.replicas[node] -= 1
            if not self.replicas[node]:
                del self.replicas[node]
        if record.owner is not None:
            owned = self._owned[record.owner]
            del owned[record.group]
            if not owned:
                del self._owned[record.owner]

    def owned_by(self, owner: str) -> list[QueueRecord]:
        """Exclusive queues of a connection."""
        return list(self._owned.get(owner, {}).values())

    def owned(self) -> Iterator[QueueRecord]:
        """Yields all exclusive queues."""
        for owned in self._owned.values():
            yield from owned.values()

    def check_invariants(self, records: Collection[QueueRecord]) -> None:
        """Asserts that the index says what the records say. Cost: O(everything); for tests."""
        assert self.by_group == {record.group: record for record in records}
        assert self.replicas == Counter(node for record in records for node in record.members)
        owned = {record.group for record in records if record.owner is not None}
        assert {record.group for record in self.owned()} == owned
        assert all(record.owner == name for name in self._owned for record in self.owned_by(name))
