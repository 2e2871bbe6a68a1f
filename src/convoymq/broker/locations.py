"""Locations of queues: members, leader, and the state that follows, whatever their placement."""

from __future__ import annotations

from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.queues.driver import QueueLocation, driver_of
from convoymq.routing.queue_types import PlacementKind


class QueueLocations:
    """See the module text. One per node."""

    def __init__(self, nodes: ClusterNodes, tree: MetadataMachine, local: LocalQueues) -> None:
        self._nodes = nodes
        self._tree = tree
        self._local = local

    def leader_of(self, record: QueueRecord) -> int | None:
        """Returns the leader, master or home of a queue, as far as this node knows."""
        return self._local.leader_of(record)

    def locate(self, record: QueueRecord, leader: int | None) -> QueueLocation | None:
        """Returns the location of a queue with that leader; None where a queue has a home alone, or
        its type is not served."""
        driver = driver_of(record.type.value)
        if driver is None or record.placement is PlacementKind.HOME:
            return None
        return driver.locate(record, leader, self._nodes.is_up)

    def leaderless(self) -> int:
        """Returns the number of queues of which this node is a member and that have no leader."""
        return sum(
            1
            for record in self._tree.queue_index.by_group.values()
            # First, as there are very many of these: a home is always known.
            if record.placement is not PlacementKind.HOME
            and self._nodes.node_id in record.members
            and self.leader_of(record) is None
        )
