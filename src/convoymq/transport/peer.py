# cython: annotation_typing=False
"""State of one other node, and of the connections to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.transport.connections import Connection
    from convoymq.transport.handshake import PeerHello
    from convoymq.transport.processes import ProcessWatch


class Peer:
    """State of one other node, as this one knows it."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.address = ""
        self.incarnation = 0
        self.hello: PeerHello | None = None
        """HELLO of the node when it was last linked."""
        self.watch: ProcessWatch | None = None
        self.outward: Connection | None = None
        self.outward_process: tuple[str, int] | None = None
        self.inward: Connection | None = None
        self.up = False
        self.formed = False
        self.leaves = False
        """The peer said goodbye."""
        self.gone = False
        """The peer's process was said to be gone."""
        self.dirty = False
        self.frames_out = 0
        self.told_clock = 0.0
        self.half_since = 0.0
        self.full_since = 0.0
        self.told_full = False
        """A log event said that this node takes no bulk."""
        self.totals = [0, 0]
        """Bytes received and sent on connections that are closed."""
        self.out_id: int = 0
        """The number by which both ends know the dialled connection; `in_id` of the accepted."""
        self.in_id: int = 0
        self.taken = 0
        """Bytes of the dialled connection that the peer says it has taken."""
        self.told = 0
        """Bytes of the accepted connection that the peer was told are taken."""
        self.largest = 0
        """Bytes of the largest frame since nothing was queued."""
        # The same for what is relayed; sessions are its numbers.
        self.relay_out_id: int = 0
        self.relay_in_id: int = 0
        self.relay_sent = 0
        self.relay_taken = 0
        self.relay_in = 0
        self.relay_told = 0

    @property
    def process(self) -> tuple[str, int] | None:
        """Returns the process and incarnation of what was linked last."""
        return None if self.hello is None else (self.hello.instance, self.hello.incarnation)
