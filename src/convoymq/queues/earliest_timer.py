"""Timer of which the earliest of several due times counts."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.model.clock import Clock, Timer


class EarliestTimer:
    """Calls `work` once for all calls of `soon` until then."""

    __slots__ = ("_clock", "_timer", "_work", "due_ms")

    def __init__(self, clock: Clock, work: Callable[[], None]) -> None:
        self._clock = clock
        self._work = work
        self._timer: Timer | None = None
        #: When `work` is called, monotonic; of the last timer, when none runs.
        self.due_ms = 0

    def soon(self, delay_ms: int) -> None:
        """Has `work` called in `delay_ms`, or earlier."""
        due = self._clock.monotonic_ms() + delay_ms
        if self._timer is not None:
            if self.due_ms <= due:
                return
            self._timer.cancel()
        self.due_ms = due
        self._timer = self._clock.call_later(delay_ms, self._on_timer)

    def cancel(self) -> None:
        """Ends the timer: `work` is not called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._work()
