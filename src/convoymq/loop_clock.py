"""The clock of a real node: the event loop's timers, and the machine's clocks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from convoymq.transport.clocks import since_boot_ms, wall_ms
from convoymq.transport.cluster_clock import ClusterClock


class LoopClock:
    """The event loop's time and timers as `model.clock.Clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._random = random.SystemRandom()
        self.cluster: ClusterClock | None = None
        """Holds the wall clock to those of the other nodes."""
        self._offset_ms = wall_ms() - self.monotonic_ms()

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch, as of the last `settle`: between two of them only time
        passes. Asked for every entry."""
        return time.monotonic_ns() // 1_000_000 + self._offset_ms

    def settle(self) -> None:
        """Compares with the wall clock and with those of the other nodes; called by the tick."""
        now_ms = wall_ms()
        if self.cluster is not None:
            now_ms = self.cluster.now_ms(now_ms, since_boot_ms())
        self._offset_ms = now_ms - self.monotonic_ms()

    def monotonic_ms(self) -> int:
        """Never falls."""
        return time.monotonic_ns() // 1_000_000

    def call_later(
        self, delay_ms: int, callback: Callable[..., object], *arguments: object
    ) -> asyncio.TimerHandle:
        """Calls back once after the delay."""
        return self._loop.call_later(max(0, delay_ms) / 1000, callback, *arguments)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()
