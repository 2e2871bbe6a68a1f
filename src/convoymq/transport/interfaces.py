"""Interfaces of the links between nodes, for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """Frames to other nodes. FIFO per peer while connected; anything may be lost when a link
    breaks."""

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        """Queues a 48-byte-header frame; `body` parts follow it on the wire without being copied
        (the header's length covers them)."""

    def is_connected(self, node: int) -> bool:
        """Returns whether the link to the node is up and the node is not suspected."""

    def backlog_bytes(self, node: int) -> int:
        """Returns the number of bytes queued to that node and not yet written."""

    full: set[int]
    """Nodes that take no bulk for now: entries, forwarded commands, deliveries and snapshots wait
    for `ReplicaHost.on_room`. What is sent nevertheless is sent."""


class LinkEvents(Protocol):
    """Events that links report. Calls come from the event loop, outside of any call into
    `Links`."""

    def on_frame(self, node: int, data: bytes) -> None:
        """A whole frame of an authenticated peer that is linked both ways."""

    def on_up(self, node: int, incarnation: int) -> None:
        """The peer is linked. What was sent before may have been lost."""

    def on_down(self, node: int, definite: bool) -> None:
        """The peer is unlinked; `definite` when its process is known to be gone: it said goodbye,
        or it ran on this machine and does not any more.

        May come twice for one failure: first not definite, then definite."""

    def on_room(self, node: int) -> None:
        """A node that was in `full` takes bulk again. Comes without `on_up` only."""

    def on_suspect(self, node: int) -> None:
        """The linked peer has been silent for too long."""

    def on_unsuspect(self, node: int) -> None:
        """The suspected peer was heard; nothing was lost."""

    def on_rejected(self, text: str) -> None:
        """Nobody takes this node, because another process has its number."""
