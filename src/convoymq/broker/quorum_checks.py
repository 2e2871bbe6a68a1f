"""Checks before a node is stopped: which groups would lose their majority, and who is behind."""

from __future__ import annotations

from collections.abc import Collection

from convoymq.broker.cluster_queries import ClusterQueries
from convoymq.broker.group_requests import GroupOperations, GroupRequests
from convoymq.broker.queue_logs import membership_of
from convoymq.metadata.machine import QueueRecord
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices
from convoymq.routing.queue_types import PlacementKind

METADATA_NAME = "rabbitmq_metadata"


class QuorumChecks(GroupOperations):
    """See the module text. One per node."""

    def __init__(self, requests: GroupRequests, cluster: ClusterQueries) -> None:
        super().__init__(requests)
        self._cluster = cluster

    @property
    def is_single_node(self) -> bool:
        """Returns whether this node is the whole cluster; being critical for all is then no
        obstacle."""
        return len(self._tree.nodes) <= 1

    async def critical(self) -> list[JsonObject]:
        """Returns what would be unavailable without this node: queues and streams, and the metadata
        store.

        That is all of which a majority of the voters, and no more, could go on now, this node among
        them.
        """
        behind = await self._cluster.replicas_behind()
        found: list[JsonObject] = []
        metadata = self._host.replica(0)
        if metadata is not None and self._is_critical(0, metadata.core.members.nodes, behind):
            found.append(
                {
                    "readable_name": "metadata store",
                    "name": METADATA_NAME,
                    "virtual_host": "(not applicable)",
                    "type": "process",
                }
            )
        async for record in in_slices(list(self._tree.records())):
            if record.placement is PlacementKind.RAFT and self._is_critical(
                record.group, record.members, behind
            ):
                found.append(_row(record))
        return found

    def _is_critical(
        self, group: int, members: Collection[int], behind: dict[tuple[int, int], bool]
    ) -> bool:
        voters = [node for node in members if behind.get((group, node), True)]
        own = self._nodes.node_id
        # A replica that runs and lacks something can't stand in for this one.
        others = [
            node
            for node in voters
            if node != own and self._nodes.is_up(node) and (group, node) not in behind
        ]
        return own in voters and len(others) < len(voters) // 2 + 1

    async def unmirrored(self) -> list[JsonObject]:
        """Returns the mirrored queues with their master on this node that have no synchronised
        mirror on another node which can be reached."""
        return [
            _row(record)
            async for record in in_slices(list(self._tree.records()))
            if self._has_only_copy(record)
        ]

    def _has_only_copy(self, record: QueueRecord) -> bool:
        view, own = record.view, self._nodes.node_id
        if view is None or record.home != own or len(view.members) < 2:
            return False
        others = (view.node_of(number) for number in view.synchronised)
        return not any(node != own and self._nodes.is_up(node) for node in others)

    async def joining(self) -> list[JsonObject]:
        """Queues and streams whose replica on this node has no vote yet and shall get one."""
        return [
            _row(record)
            async for record in in_slices(list(self._tree.records()))
            if (replica := self._host.replica(record.group)) is not None
            and membership_of(replica, self._nodes.node_id) == "promotable"
        ]


def _row(record: QueueRecord) -> JsonObject:
    return {
        "readable_name": f"queue '{record.name}' in vhost '{record.vhost}'",
        "name": record.name,
        "virtual_host": record.vhost,
        "type": record.type.value,
    }
