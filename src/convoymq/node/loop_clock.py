"""The clock of a real node: the event loop's timers, and the machine's clocks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from convoymq.transport.clocks import lead_ns, wall_and_boot_ms
from convoymq.transport.cluster_clock import ClusterClock


class LoopClock:
    """The event loop's time and timers as `model.clock.Clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._random = random.SystemRandom()
        self.cluster: ClusterClock | None = None
        """Holds the wall clock to those of the other nodes."""
        self._lead_ns = lead_ns(time.time_ns, time.monotonic_ns)
        """Of the wall clock over the monotonic one."""

    def now_us(self) -> int:
        """Wall clock, µs since the epoch, as of the last `settle`: between two of them only time
        passes."""
        return (time.monotonic_ns() + self._lead_ns) // 1000

    def now_ms(self) -> int:
        """As `now_us`, in ms. Asked for every entry."""
        return (time.monotonic_ns() + self._lead_ns) // 1_000_000

    def settle(self) -> None:
        """Compares with the wall clock and with those of the other nodes; called by the tick."""
        self._lead_ns = lead_ns(time.time_ns, time.monotonic_ns)
        if self.cluster is not None:
            own_ms, boot_ms = wall_and_boot_ms()
            self._lead_ns += (self.cluster.now_ms(own_ms, boot_ms) - own_ms) * 1_000_000

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
