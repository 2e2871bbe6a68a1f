# cython: annotation_typing=False
"""The time that a group's entries carry.

It follows the leader's wall clock, but it never falls and never stands still. When the wall clock
is behind what the log knows (it was set back, or the leader before had one that was ahead), time
goes on at half its speed until the wall clock has caught up: what waits for time (a suspected
node's messages, a reservation, the age of a stream) waits at most twice as long, not until then.
"""

from __future__ import annotations

from convoymq.model.clock import Clock


class GroupTime:
    """See the module docstring. Times are ms since the epoch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_ms = 0
        self._since_ms = 0
        """Time of `_last_ms`, by the monotonic clock."""

    def heard(self, time_ms: int) -> None:
        """An entry carries this time."""
        if time_ms > self._last_ms:
            self._last_ms = time_ms
            self._since_ms = self._clock.monotonic_ms()

    def now_ms(self) -> int:
        """Returns the time of an entry that is made now."""
        passed = self._clock.monotonic_ms() - self._since_ms
        # Only what is later counts from now: half milliseconds are not lost.
        self.heard(max(self._clock.now_ms(), self._last_ms + passed // 2))
        return self._last_ms

    def delay_ms(self, due_ms: int) -> int:
        """Returns the longest time until entries carry that time; 0 when they do."""
        now = self.now_ms()
        left = max(0, due_ms - now)
        return left * 2 if now > self._clock.now_ms() else left
