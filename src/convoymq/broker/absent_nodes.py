"""Ends the exclusive and transient queues of nodes whose processes are gone, or that are away for
too long."""

from __future__ import annotations

from convoymq.kernels.batch import CMD_NODE_DOWN
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.clock import Clock
from convoymq.replication.machine import FLAG_NODE_GONE
from convoymq.shells.groups.host import ReplicaHost


class AbsentNodes:
    """Watches the other nodes; acts as the leader of the tree only."""

    def __init__(
        self,
        nodes: ClusterNodes,
        tree: MetadataMachine,
        host: ReplicaHost,
        clock: Clock,
        disconnect_timeout_ms: int,
    ) -> None:
        self._nodes = nodes
        self._tree = tree
        self._host = host
        self._clock = clock
        self._disconnect_timeout_ms = disconnect_timeout_ms
        self._gone: set[int] = set()
        #: Since when nodes are away by the monotonic clock; None = their queues have been ended.
        self._away: dict[int, int | None] = {}

    def on_node_up(self, node: int) -> None:
        """Another node is linked."""
        self._gone.discard(node)

    def on_node_gone(self, node: int) -> None:
        """The process of another node is known to be gone."""
        self._gone.add(node)
        self._release_queues()

    def tick(self) -> None:
        """Takes nodes that have been away for too long for gone: nobody may ever know more."""
        now = self._clock.monotonic_ms()
        for node in self._tree.nodes:
            if self._nodes.is_up(node):
                self._away.pop(node, None)
                self._gone.discard(node)
                continue
            since = self._away.setdefault(node, now)
            if since is not None and now - since >= self._disconnect_timeout_ms:
                self._away[node] = None
                self._gone.add(node)
        if self._gone:
            self._release_queues()

    def _release_queues(self) -> None:
        # Kept until it is done: the process that is gone may have been the leader.
        held = {node for node in self._gone if self._tree.lost_with(node)}
        metadata = self._host.replica(0)
        if metadata is not None and metadata.is_leader:
            for node in sorted(held):
                metadata.propose(CMD_NODE_DOWN, FLAG_NODE_GONE, 0, node, b"")
        self._gone &= held
