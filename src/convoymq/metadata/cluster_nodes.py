"""The nodes of the cluster, as one of them knows them: names, and who can be reached."""

from __future__ import annotations

from convoymq.metadata.machine import MetadataMachine, owner_text
from convoymq.metadata.maintenance import drained_nodes
from convoymq.transport.interfaces import Transport

ANSWERS_OPERATORS = 2
"""The version of the metadata machine that came with requests of operators between nodes."""


class ClusterNodes:
    """See the module text."""

    def __init__(
        self, node_id: int, incarnation: int, tree: MetadataMachine, transport: Transport
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self._tree = tree
        self._transport = transport

    def name_of(self, node: int) -> str:
        """Returns a node's name, for texts and lists."""
        record = self._tree.nodes.get(node)
        return record.name if record is not None else f"convoy@{node}"

    @property
    def own_name(self) -> str:
        """Returns the name of this node."""
        return self.name_of(self.node_id)

    def running(self) -> list[int]:
        """Nodes of the cluster that can be reached, this one included."""
        nodes = set(self._tree.nodes) | {self.node_id}
        return sorted(n for n in nodes if n == self.node_id or self.is_up(n))

    def for_placement(self) -> list[int]:
        """Nodes that may get leaders and replicas: those that run and are not drained; all that run
        when no other is left."""
        running = self.running()
        drained = drained_nodes(self._tree.settings)
        return [node for node in running if node not in drained] or running

    def has_majority(self) -> bool:
        """Returns whether more than half of the cluster's nodes can be reached."""
        return 2 * len(self.running()) > len(self._tree.nodes)

    def partitions(self) -> list[str]:
        """Returns the names of nodes that cannot be reached, while there is no majority: this node
        may be cut off from them. Otherwise they are taken to be down."""
        if self.has_majority():
            return []
        return [self.name_of(node) for node in sorted(self._tree.nodes) if not self.is_up(node)]

    def is_drained(self, node: int) -> bool:
        """Returns whether a node is drained."""
        return node in drained_nodes(self._tree.settings)

    def is_older(self, node: int) -> bool:
        """Returns whether a node had, when it started last, a release before 0.3.0: it does not
        know what operators ask for through another node, nor that it may be drained."""
        record = self._tree.nodes.get(node)
        supported = None if record is None else record.supports.get(MetadataMachine.KIND)
        return supported is not None and supported[1] < ANSWERS_OPERATORS

    def is_known(self, node: int) -> bool:
        """Returns whether a node belongs to the cluster."""
        return node == self.node_id or node in self._tree.nodes

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""
        return node == self.node_id or self._transport.is_connected(node)

    def owner_name(self, owner: int | None) -> str | None:
        """Returns the name that the tree has for a connection of this node; None for none."""
        return None if owner is None else owner_text(self.node_id, self.incarnation, owner)
