"""Time, handed in: by the event loop, or by the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None:
        """Prevents the call."""


class Clock(Protocol):
    """Wall clock, monotonic clock, timers and randomness of a node."""

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch. May jump."""

    def monotonic_ms(self) -> int:
        """Never falls."""

    def call_later(
        self, delay_ms: int, callback: Callable[[*Arguments], object], *arguments: *Arguments
    ) -> Timer:
        """Calls back once after the delay."""

    def random(self) -> float:
        """Uniform in [0, 1): seeded in the simulator."""
