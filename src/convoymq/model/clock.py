"""Time, handed in: by the event loop, or by the simulator."""

from __future__ import annotations

from typing import Any, Protocol


class Clock(Protocol):
    """Wall clock, monotonic clock, timers and randomness of a node."""

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch. May jump."""

    def monotonic_ms(self) -> int:
        """Never falls."""

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        """Calls back once after the delay; the handle has `cancel()`."""

    def random(self) -> float:
        """Uniform in [0, 1): seeded in the simulator."""
