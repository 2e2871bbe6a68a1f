"""Passes what the links report of other nodes on to the parts of this one.

Frames go to the owner of their kind (`transport.dispatch`); the control plane and the Raft groups
are owners from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import BrokerError, Misuse
from convoymq.transport.dispatch import FrameDispatch

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.node.cluster_entry import ClusterEntry
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.transport.control import ControlPlane
    from convoymq.transport.links import Links


class Peers:
    """The `LinkEvents` of a node. Links are made first, so `attach` names the other parts.

    Args:
        wake: asks for the end of the round.
        fail: ends the node.
        call_soon: runs a callback when the present one is done.
    """

    broker: Broker | None = None
    """Set when there is one."""

    def __init__(
        self,
        log: structlog.stdlib.BoundLogger,
        wake: Callable[[], None],
        fail: Callable[[BrokerError], None],
        call_soon: Callable[..., object],
    ) -> None:
        self._log = log
        self._wake = wake
        self._fail = fail
        self._call_soon = call_soon
        self.frames = FrameDispatch(self._frame_failed, self._drop_link, holding=True)
        self.on_frame = self.frames.on_frame

    def attach(
        self, links: Links, control: ControlPlane, host: ReplicaHost, entry: ClusterEntry
    ) -> None:
        """Names the parts that there are before a link stands."""
        self._links = links
        self._control = control
        self._host = host
        self._entry = entry
        self.frames.own("control", control.on_frame)
        self.frames.own("shells.groups", host.on_frame, host.intake.on_frame_failed)

    def _frame_failed(self, node: int, data: bytes, error: Exception) -> None:
        if isinstance(error, BrokerError | ValueError):
            self._log.error("link.bad_frame", peer=node, type=data[4], reason=str(error))
        else:
            self._log.error("node.fault", message=f"in a frame of node {node}", exc_info=error)

    def _drop_link(self, node: int, reason: str) -> None:
        self._call_soon(self._links.drop, self._links.peers[node], reason)

    def on_up(self, node: int, incarnation: int) -> None:
        """Another node is linked."""
        hello = self._links.hello_of(node)
        self._entry.poke()
        self._host.on_link_up(node, incarnation, hello.supports if hello is not None else None)
        if self.broker is not None:
            self.broker.on_node_up(node, incarnation)
        self._wake()

    def on_down(self, node: int, definite: bool) -> None:
        """Another node is not linked any more."""
        self._host.on_link_down(node, definite=definite)
        self.frames.on_node_down(node)
        self._control.on_node_down(node)
        if self.broker is not None:
            self.broker.on_node_down(node, definite=definite)
        self._wake()

    def on_room(self, node: int) -> None:
        """The link to another node takes bulk again."""
        self._host.on_room(node)
        self._wake()

    def on_suspect(self, node: int) -> None:
        """Another node is silent."""
        self._host.on_suspect(node)
        if self.broker is not None:
            self.broker.on_suspect(node)
        self._wake()

    def on_unsuspect(self, node: int) -> None:
        """Another node answers again."""
        self._host.on_unsuspect(node)
        if self.broker is not None:
            self.broker.on_unsuspect(node)
        self._wake()

    def on_rejected(self, text: str) -> None:
        """Another process has this node's number."""
        self._fail(Misuse(text))
