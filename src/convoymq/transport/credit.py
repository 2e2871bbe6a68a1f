# cython: annotation_typing=False
"""Flow control of links (ADR 0025): a receiver tells what it has taken, a sender keeps a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.link_frames import FRAME_CREDIT, frame

if TYPE_CHECKING:
    from convoymq.transport.links import Links
    from convoymq.transport.peer import Peer

FULL_S = 1.0
"""A link that takes no bulk for so long is logged."""
WINDOW_SHARE = 8
"""Under way to a node is at most that part of the backlog's bound, and one frame."""
WINDOW_MIN_BYTES = 128 << 10
CREDIT_STEP_BYTES = 256 << 10
"""Credit is told after so many bytes, or a quarter of the window."""
CREDIT_REST_BYTES = 16 << 10
"""Less than that is not told by the tick either: no window is so small."""


class Credit:
    """Flow control of all links of one node.

    Args:
        backlog_max: bound of what may be queued to a node, bytes.
    """

    def __init__(self, links: Links, backlog_max: int) -> None:
        self.links = links
        self.window = max(WINDOW_MIN_BYTES, backlog_max // WINDOW_SHARE)
        self.relay_window = max(WINDOW_MIN_BYTES, self.window // 4)
        self.step = min(CREDIT_STEP_BYTES, self.relay_window // 4)
        self.withheld: set[int] = set()
        """Nodes that are not told what was taken, because this one is congested."""

    def under_way(self, peer: Peer) -> int:
        """Returns the number of bytes that were sent to a node and that it has not told it has
        taken."""
        if peer.up and peer.outward is not None:
            writer = peer.outward.writer
            return int(writer.bytes_out + writer.queued_bytes - peer.taken)
        return int(peer.relay_sent - peer.relay_taken)

    def tell(self, peer: Peer) -> None:
        """Gives a node credit for what it has sent."""
        links = self.links
        if links.is_congested():
            self.withheld.add(peer.node)
            return
        if peer.up and peer.inward is not None:
            taken = peer.told = peer.inward.reader.bytes_in
            link = peer.in_id
        else:
            taken = peer.relay_told = peer.relay_in
            link = peer.relay_in_id
        links.send(peer.node, frame(FRAME_CREDIT, 0, 0, taken, link, 0, 0))

    def tell_withheld(self) -> None:
        """Gives credit to all nodes from which it was withheld."""
        links = self.links
        withheld, self.withheld = self.withheld, set()
        for node in sorted(withheld):
            self.tell(links.peers[node])

    def tell_rest(self, peer: Peer) -> None:
        """Tells what is too little to be told at once."""
        if peer.up and peer.inward is not None:
            rest = peer.inward.reader.bytes_in - peer.told
        else:
            rest = peer.relay_in - peer.relay_told
        if rest >= CREDIT_REST_BYTES:
            self.tell(peer)

    def on_credit(self, peer: Peer, taken: int, link: int) -> None:
        """A node tells how much it has taken. What it says of a former connection is void."""
        links = self.links
        if link == peer.out_id and peer.outward is not None:
            writer = peer.outward.writer
            if taken > writer.bytes_out:
                raise ValueError(f"credit for {taken} bytes, {writer.bytes_out} were sent")
            peer.taken = max(peer.taken, taken)
        elif link == peer.relay_out_id:
            if taken > peer.relay_sent:
                raise ValueError(f"credit for {taken} bytes, {peer.relay_sent} were sent")
            peer.relay_taken = max(peer.relay_taken, taken)
        window = self.window if peer.up else self.relay_window
        if peer.node in links.full and self.under_way(peer) <= window:
            links.full.discard(peer.node)
            links.events.on_room(peer.node)

    def watch(self, peer: Peer, now: float) -> None:
        """A link is full for moments under load; what lasts is worth a line."""
        links = self.links
        full = peer.node in links.full
        if not full:
            peer.full_since = 0.0
        elif not peer.full_since:
            peer.full_since = now
        if full == peer.told_full or (full and now - peer.full_since < FULL_S):
            return
        peer.told_full = full
        if full:
            links.log.warning("link.full", peer=peer.node, under_way=self.under_way(peer))
        elif peer.up or links.relay.is_up(peer.node):
            links.log.info("link.has_room", peer=peer.node)
