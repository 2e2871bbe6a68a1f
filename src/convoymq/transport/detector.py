"""Failure detection: which peers are alive, from nothing but the times at which they were heard.

Sans-IO: the caller says when bytes arrived and calls `tick` about every heartbeat interval. A peer
is suspected after a silence that no silence of its recent past comes near (mean + 4 deviations,
between a floor and a cap). A silence in which this node itself did not run proves nothing: a late
tick gives every peer as much grace as it was late.
"""

from __future__ import annotations

from dataclasses import dataclass

STALL_TOLERANCE_MS = 40
"""A tick later than this was held up by our own loop."""
GRACE_MAX_MS = 10_000
MEAN_SHARE = 1 / 16
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4.0


@dataclass(slots=True)
class PeerHealth:
    """Health of one linked peer. Times in ms of the monotonic clock."""

    heard_ms: int
    timeout_ms: float
    mean_ms: float
    deviation_ms: float = 0.0
    suspected: bool = False


class Detector:
    """Judges the peers of one node.

    Args:
        heartbeat_ms: interval of heartbeats when nothing else is sent.
        min_ms: a shorter silence is never suspicious.
        max_ms: a longer silence always is.
    """

    def __init__(self, heartbeat_ms: int, min_ms: int, max_ms: int) -> None:
        assert 0 < heartbeat_ms <= min_ms <= max_ms
        self.heartbeat_ms = heartbeat_ms
        self.min_ms = min_ms
        self.max_ms = max_ms
        self.peers: dict[int, PeerHealth] = {}
        self.stalls = 0
        """Ticks that came late."""
        self._ticked_ms: int | None = None

    def linked(self, node: int, now_ms: int) -> None:
        """The peer has a working link: it is alive now."""
        self.peers[node] = PeerHealth(now_ms, float(self.min_ms), float(self.heartbeat_ms))

    def unlinked(self, node: int) -> None:
        """The link is gone: the peer is no longer judged here."""
        self.peers.pop(node, None)

    def heard(self, node: int, now_ms: int) -> bool:
        """Bytes of the peer arrived. Returns True when this ends a suspicion."""
        peer = self.peers.get(node)
        if peer is None:
            return False
        gap = now_ms - peer.heard_ms
        peer.heard_ms = now_ms
        if 2 * gap < self.heartbeat_ms:
            # Traffic says little about how long a silence may be; only quiet gaps are learned.
            return False
        self._learn(peer, gap)
        if not peer.suspected:
            return False
        peer.suspected = False
        return True

    def _learn(self, peer: PeerHealth, gap: int) -> None:
        sample = float(min(gap, self.max_ms))
        distance = sample - peer.mean_ms
        peer.mean_ms += distance * MEAN_SHARE
        # Faster up than down: one long pause is a warning, one short gap is no all-clear.
        share = DEVIATION_SHARE if abs(distance) > peer.deviation_ms else MEAN_SHARE
        peer.deviation_ms += (abs(distance) - peer.deviation_ms) * share
        wanted = peer.mean_ms + DEVIATIONS * peer.deviation_ms
        peer.timeout_ms = min(max(wanted, float(self.min_ms)), float(self.max_ms))

    def tick(self, now_ms: int) -> list[int]:
        """Returns the peers that became suspected since the last tick."""
        last = self._ticked_ms
        self._ticked_ms = now_ms
        late = 0 if last is None else now_ms - last - self.heartbeat_ms
        if late > STALL_TOLERANCE_MS:
            self.stalls += 1
            grace = min(late, GRACE_MAX_MS)
            for peer in self.peers.values():
                peer.heard_ms = min(now_ms, peer.heard_ms + grace)
            # What the peers sent meanwhile is still unread.
            return []
        found = []
        for node, peer in self.peers.items():
            if not peer.suspected and now_ms - peer.heard_ms > peer.timeout_ms:
                peer.suspected = True
                found.append(node)
        return found

    def is_suspected(self, node: int) -> bool:
        """Returns whether a linked peer is silent for too long."""
        peer = self.peers.get(node)
        return peer is not None and peer.suspected
