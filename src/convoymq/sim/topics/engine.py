"""Virtual time and a network: one heap of events, one source of randomness, links in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from random import Random

LATENCY_MS_MAX = 6
STALE_MS_MAX = 80


class Engine:
    """Runs callbacks at their times; equal times in the order in which they were set."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0

    def at(self, time: int, call: Callable[..., None], *arguments: object) -> None:
        """Calls at a time that is not in the past."""
        self._number += 1
        heappush(self._heap, (max(time, self.now), self._number, call, arguments))

    def after(self, delay: int, call: Callable[..., None], *arguments: object) -> None:
        """Calls after a delay."""
        self.at(self.now + delay, call, *arguments)

    def run(self, until: int) -> None:
        """Runs everything up to a time."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = heappop(heap)
            self.events += 1
            call(*arguments)
        self.now = until

    def draw(self, low: int, high: int) -> int:
        """A number of ms from `low` to `high`."""
        return low + int(self.random.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True that often."""
        return probability > 0 and self.random.random() < probability


class Network:
    """Links between named ends: first in, first out; what is lost is lost, what is repeated comes
    late and out of order, as over a connection that broke."""

    def __init__(self, engine: Engine, *, loss: float, repeat: float) -> None:
        self.engine = engine
        self.loss = loss
        self.repeat = repeat
        self.mute: set[Hashable] = set()
        """Links, and ends of links, from which everything is lost."""
        self.lost = 0
        self.repeated = 0
        self._last: dict[Hashable, int] = {}

    def heal(self) -> None:
        """Nothing is lost or repeated any more."""
        self.loss = self.repeat = 0.0
        self.mute.clear()

    def send(
        self, link: tuple[Hashable, Hashable], call: Callable[..., None], *arguments: object
    ) -> None:
        """Delivers after a latency, behind what is on the link already, which goes from its first
        end to its second."""
        engine = self.engine
        roll = engine.random.random()
        if roll < self.loss or (self.mute and not self.mute.isdisjoint((link, link[0]))):
            self.lost += 1
            return
        latency = 1 + int(engine.random.random() ** 2 * LATENCY_MS_MAX)
        arrival = max(engine.now + latency, self._last.get(link, 0))
        self._last[link] = arrival
        engine.at(arrival, call, *arguments)
        if roll < self.loss + self.repeat:
            self.repeated += 1
            engine.at(arrival + engine.draw(1, STALE_MS_MAX), call, *arguments)
