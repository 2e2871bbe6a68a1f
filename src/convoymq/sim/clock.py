"""Simulated time: one heap of events, one source of randomness.

Everything that happens in a simulation is an event in this heap, and everything that is drawn comes
from `Scheduler.random`; so a seed decides the whole run. Times are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import TypeVarTuple

from convoymq.transport.cluster_clock import ClusterClock

Arguments = TypeVarTuple("Arguments")

EPOCH_MS = 1_767_225_600_000
"""Wall clock at the start of a simulation: 2026-01-01 UTC."""


class Process:
    """One process of a node, from start to crash: what belongs to it ends with it."""

    __slots__ = ("alive", "cluster", "frozen_until_us", "name", "wall_offset_ms")

    def __init__(self, name: str, wall_offset_ms: int = 0) -> None:
        self.name = name
        self.alive = True
        self.frozen_until_us = 0
        self.wall_offset_ms = wall_offset_ms
        self.cluster = ClusterClock()
        """Other nodes' wall clocks, as this node knows them."""


class Timer:
    """A scheduled call."""

    __slots__ = ("arguments", "callback", "process")

    def __init__(
        self,
        process: Process | None,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
    ) -> None:
        self.process = process
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        """Keeps the callback from being called."""
        self.callback = None
        self.arguments = ()


class Scheduler:
    """The event heap. Ties are broken by the order of scheduling."""

    def __init__(self, seed: int) -> None:
        self.now_us = 0
        self.rng = Random(seed)
        self.events = 0
        """Events carried out."""
        self._heap: list[tuple[int, int, Timer]] = []
        self._counter = 0

    def after(
        self,
        delay_us: int,
        process: Process | None,
        callback: Callable[[*Arguments], object],
        *arguments: *Arguments,
    ) -> Timer:
        """Calls back after the delay, unless `process` has ended by then."""
        timer = Timer(process, callback, arguments)
        self._counter += 1
        due_us = self.now_us + delay_us if delay_us > 0 else self.now_us
        heappush(self._heap, (due_us, self._counter, timer))
        return timer

    def run(self, until_us: int, events_max: int) -> bool:
        """Carries out all events due by `until_us`; False when `events_max` came before."""
        heap = self._heap
        while heap and heap[0][0] <= until_us:
            due_us, number, timer = heappop(heap)
            callback = timer.callback
            if callback is None:
                continue
            process = timer.process
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen_until_us > due_us:
                    # The process is stopped: everything waits, in its order.
                    heappush(heap, (process.frozen_until_us, number, timer))
                    continue
            if due_us > self.now_us:
                self.now_us = due_us
            self.events += 1
            timer.callback = None
            callback(*timer.arguments)
            if self.events >= events_max:
                return False
        self.now_us = max(self.now_us, until_us)
        return True

    def wall_ms(self, process: Process) -> int:
        """Returns a node's own wall clock."""
        return EPOCH_MS + self.now_us // 1000 + process.wall_offset_ms

    # Draws.

    def chance(self, probability: float) -> bool:
        """Returns True with that probability; draws nothing when it is zero."""
        return probability > 0 and self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        """Returns a whole number in [low, high]."""
        return low if high <= low else low + int(self.rng.random() * (high - low + 1))

    def skewed(self, low: int, high: int) -> int:
        """In [low, high], most often small: the cube of a uniform draw."""
        return low + int((high - low) * self.rng.random() ** 3)


class NodeClock:
    """The `Clock` that one run of a node sees."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process

    def now_ms(self) -> int:
        """Wall clock, with this node's error, held to those of the others."""
        process = self._process
        return process.cluster.now_ms(self._scheduler.wall_ms(process), self.monotonic_ms())

    def monotonic_ms(self) -> int:
        """Simulated time."""
        return self._scheduler.now_us // 1000

    def call_later(
        self, delay_ms: int, callback: Callable[[*Arguments], object], *arguments: *Arguments
    ) -> Timer:
        """Calls back in this process, or never."""
        return self._scheduler.after(int(delay_ms * 1000), self._process, callback, *arguments)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self._scheduler.rng.random()
