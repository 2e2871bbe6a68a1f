"""Links between the ends of a simulated topic: clients, partitions, and who acts on the log."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

LATENCY_MS_MAX = 6
STALE_MS_MAX = 80


class Network:
    """Links between named ends: first in, first out; what is lost is lost, what is repeated comes
    late and out of order, as over a connection that broke."""

    def __init__(self, world: TopicWorld, *, loss: float, repeat: float) -> None:
        self._world = world
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
        world = self._world
        rng = world.scheduler.rng
        roll = rng.random()
        if roll < self.loss or (self.mute and not self.mute.isdisjoint((link, link[0]))):
            self.lost += 1
            return
        latency = 1 + int(rng.random() ** 2 * LATENCY_MS_MAX)
        arrival = max(world.now + latency, self._last.get(link, 0))
        self._last[link] = arrival
        world.at(arrival, call, *arguments)
        if roll < self.loss + self.repeat:
            self.repeated += 1
            world.at(arrival + world.draw(1, STALE_MS_MAX), call, *arguments)
