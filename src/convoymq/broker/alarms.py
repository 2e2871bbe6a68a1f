"""Alarms: which nodes are short of memory or disk. Publishers everywhere wait until none is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.model.errors import PeerError, Unavailable
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_ALARM


@dataclass(slots=True)
class Watermarks:
    """Thresholds of this node's alarms, in bytes. An operator may change them while the node runs;
    the configuration is back in force with the next start."""

    memory: int
    """More memory than this in use."""
    disk: int
    """Less than this free where the data lie."""
    machine_memory: int
    """Memory of the machine; shares of memory refer to it."""


class Alarms:
    """Names of what is short: `memory`, `disk`. Nodes tell each other of changes."""

    def __init__(self, nodes: ClusterNodes, control: ControlPlane) -> None:
        self.effective: frozenset[str] = frozenset()
        """Of all nodes together."""
        self.listeners: list[Callable[[frozenset[str]], None]] = []
        """Hear `effective` when it changes."""
        self._nodes = nodes
        self._control = control
        self._by_node: dict[int, frozenset[str]] = {}
        control.handle(KIND_ALARM, self._on_told)

    def check(self) -> None:
        """Raises Unavailable while publishers wait."""
        if self.effective:
            names = " and ".join(sorted(self.effective))
            raise Unavailable(f"publishers are blocked by an alarm: {names}")

    def set(self, name: str, on: bool) -> None:
        """Sets or ends the alarm for `memory` or `disk` of this node."""
        mine = self.of(self._nodes.node_id)
        changed = mine | {name} if on else mine - {name}
        if changed == mine:
            return
        self._put(self._nodes.node_id, changed)
        for node in self._nodes.running():
            if node != self._nodes.node_id:
                self._control.tell(node, KIND_ALARM, sorted(changed))

    def of(self, node: int) -> frozenset[str]:
        """Returns the resources that a node is short of."""
        return self._by_node.get(node, frozenset())

    def learn(self, node: int, names: Iterable[str]) -> None:
        """Takes what a node said when it was asked. One that has announced a change meanwhile, and
        this node itself, know something newer."""
        if node not in self._by_node and node != self._nodes.node_id:
            self._put(node, frozenset(names))

    def on_node_up(self, node: int) -> None:
        """Another node is linked: nobody else tells it what this one is short of."""
        mine = self.of(self._nodes.node_id)
        if mine:
            self._control.tell(node, KIND_ALARM, sorted(mine))

    def on_node_down(self, node: int) -> None:
        """Another node is not linked any more: its alarms hold nobody up."""
        self._put(node, frozenset())

    def _put(self, node: int, alarms: frozenset[str]) -> None:
        self._by_node[node] = alarms
        effective = frozenset[str]().union(*self._by_node.values())
        if effective != self.effective:
            self.effective = effective
            for listener in list(self.listeners):
                listener(effective)

    async def _on_told(self, node: int, body: object) -> None:
        if not isinstance(body, list):
            raise PeerError(f"malformed alarms from node {node}")
        self._put(node, frozenset(str(name) for name in body))
