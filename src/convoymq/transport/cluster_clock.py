"""The wall clock that entries are stamped with: this node's own, held to that of the others.

Sans-IO. Every heartbeat carries its sender's wall clock. How far that clock is from this node's
monotonic one is seen too small by the way that the heartbeat took, so the largest difference of a
window counts. The time that is used is the own wall clock, kept within `TOLERANCE_MS` of the median
of the own and all reachable nodes' clocks; of two middle ones the earlier, because time that is too
late expires messages, time that is too early keeps them.

A node that reaches no other follows its own clock, but where that has jumped ahead of the monotonic
clock by more than the tolerance, time goes on at double speed at most until it has caught up.
Backward jumps are followed: `GroupTime` slows down for them.

Bound: while most of the clocks of reachable nodes are right, time is at most the tolerance ahead of
the latest right one; and it is at most the tolerance and the shortest way of a heartbeat in the
window behind the earliest. A clock that was set back is believed when the window has passed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE_MS = 500
WINDOW_MS = 10_000
_FAR = 1 << 62


@dataclass(slots=True)
class _Samples:
    """The largest differences (a peer's wall clock - own monotonic clock) of two windows."""

    since_ms: int
    current: int
    before: int = -_FAR

    @property
    def best(self) -> int:
        return max(self.current, self.before)


class ClusterClock:
    """See the module docstring. All times are whole ms; wall clocks count from the epoch."""

    def __init__(self, tolerance_ms: int = TOLERANCE_MS, window_ms: int = WINDOW_MS) -> None:
        self.tolerance_ms = tolerance_ms
        self._window_ms = window_ms
        self._peers: dict[int, _Samples] = {}
        self._low = -_FAR
        self._high = _FAR
        """The median lies between these, relative to the monotonic clock."""
        self._used: int | None = None
        self._used_at = 0
        """Amount that was added to the monotonic clock last, and when."""
        self.skew_ms = 0
        """Lead of the own wall clock over the median, or over the time in use when alone."""
        self.is_skewed = False

    def heard(self, node: int, sent_wall_ms: int, monotonic_ms: int) -> None:
        """A heartbeat arrived that was sent at this time of its sender's wall clock."""
        sample = sent_wall_ms - monotonic_ms
        known = self._peers.get(node)
        if known is None:
            self._peers[node] = _Samples(monotonic_ms, sample)
        elif monotonic_ms - known.since_ms >= self._window_ms:
            known.since_ms, known.before, known.current = monotonic_ms, known.current, sample
        elif sample > known.current:
            known.current = sample
        else:
            return
        self._order()

    def lost(self, node: int) -> None:
        """A node cannot be reached."""
        if self._peers.pop(node, None) is not None:
            self._order()

    def _order(self) -> None:
        others = sorted(samples.best for samples in self._peers.values())
        # Where the own clock is among them, it is the median itself.
        middle = len(others) // 2
        self._low = others[middle - 1] if middle else -_FAR
        self._high = others[middle] if others else _FAR

    def now_ms(self, wall_ms: int, monotonic_ms: int) -> int:
        """Returns the time that counts now."""
        own = wall_ms - monotonic_ms
        tolerance = self.tolerance_ms
        used = self._used
        if self._peers:
            median = min(max(own, self._low), self._high)
            self.skew_ms = own - median
            used = min(max(own, median - tolerance), median + tolerance)
        elif used is None or own <= used + tolerance:
            used = own
            self.skew_ms = 0
        else:
            used = min(own, used + max(0, monotonic_ms - self._used_at))
            self.skew_ms = own - used
        self._used = used
        self._used_at = monotonic_ms
        return monotonic_ms + used

    def tick(self, wall_ms: int, monotonic_ms: int) -> bool:
        """Call about every second. Returns True when `is_skewed` has changed."""
        self.now_ms(wall_ms, monotonic_ms)
        distance = abs(self.skew_ms)
        # Half the way back before it is over: a clock at the edge is told once.
        now = distance > (self.tolerance_ms // 2 if self.is_skewed else self.tolerance_ms)
        changed = now != self.is_skewed
        self.is_skewed = now
        return changed
