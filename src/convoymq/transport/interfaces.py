"""What others use of the links between nodes."""

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
        """True while the link to the node is up and the node is not suspected."""

    def backlog_bytes(self, node: int) -> int:
        """Bytes queued to that node and not yet written."""

    full: set[int]
    """Nodes that take no bulk for now: entries, forwarded commands, deliveries and snapshots wait
    for `ReplicaHost.on_room`. What is sent nevertheless is sent."""
