"""Faults of groups whose slaves act for their master.

| kind | what happens for 4 to 8 s |
|---|---|
| `unlisted` | no name server hears the master; its slaves do |
| `exile` | only clients hear the master |
| `camps` | the master is away, and each slave is out of reach of one name server |
| `shut` | the master is away, and for a part of that time targets are |
| `together` | all replicas are away, and come back at once |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from convoymq.sim.broker_group.acting_node import NameServerNode
from convoymq.sim.broker_group.world import BrokerGroupInjector

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_world import ActingWorld

OUTAGES = ("unlisted", "exile", "camps", "shut", "together")
ACTING_KINDS = ("away", "mute", *OUTAGES)
"""Kinds of faults that only this load has."""


class ActingInjector(BrokerGroupInjector):
    """Injects faults into an `ActingWorld`."""

    world: ActingWorld
    _whole_us = 0
    """Time at which the last long outage is over."""

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        outages = {kind: partial(self._outage, kind) for kind in OUTAGES}
        return {**super().moments(), "away": self._away, "mute": self._mute, **outages}

    def _outage(self, kind: str) -> None:
        """Takes so long that a slave acts. One at a time: after each the group is whole again."""
        world, draw = self.world, self.world.scheduler
        if draw.now_us < self._whole_us:
            return
        duration_us = draw.between(4_000_000, 8_000_000)
        self._whole_us = draw.now_us + duration_us + 1_500_000
        servers = [node.number for node in world.name_servers]
        slaves = [number for number in world.replicas if number != 1]
        if kind == "unlisted":
            self._part(kind, [(1, number) for number in servers], duration_us)
        elif kind == "exile":
            others = [*servers, *slaves, *world.targets]
            self._part(kind, [(1, number) for number in others], duration_us)
        elif kind == "camps":
            self._master_away(duration_us)
            pairs = zip(slaves, servers, strict=False)
            self._part(kind, list(pairs), duration_us)
        elif kind == "shut":
            self._master_away(duration_us)
            # Messages are on their way then.
            draw.after(draw.between(0, 2_500_000), None, self._shut, kind)
        else:
            world.trace.fault(kind, "all")
            for node in world.replicas.values():
                if node.alive:
                    world.crash(node, restart_us=duration_us // 2, keep=1.0, refuses=True)

    def _part(self, kind: str, pairs: list[tuple[int, int]], duration_us: int) -> None:
        self._cut(kind, [*pairs, *((b, a) for a, b in pairs)], duration_us)

    def _shut(self, kind: str) -> None:
        """Targets are away, or out of reach of replicas."""
        world, draw = self.world, self.world.scheduler
        if self.stopped:
            return
        gone = [n for n in world.targets if draw.chance(0.7)]
        duration_us = draw.between(500_000, 4_000_000)
        if draw.chance(0.5):
            self._part(kind, [(n, number) for n in world.replicas for number in gone], duration_us)
            return
        world.trace.fault(kind, f"targets {gone}")
        for number in gone:
            if world.nodes[number].alive:
                world.crash(world.nodes[number], restart_us=duration_us, keep=1.0, refuses=True)

    def _away(self) -> None:
        self._master_away(self.world.scheduler.between(2_000_000, 6_000_000))

    def _master_away(self, restart_us: int) -> None:
        node = self.world.replicas[1]
        if node.alive:
            self.world.trace.fault("away", node.name)
            self.world.crash(node, restart_us=restart_us, keep=1.0, refuses=True)

    def _mute(self) -> None:
        node = self.world.scheduler.rng.choice(self.world.name_servers)
        if node.alive:
            self.world.trace.fault("mute", node.name)
            node.is_mute = True
            self.world.scheduler.after(self._outage_us(), node.process, self._unmute, node)

    @staticmethod
    def _unmute(node: NameServerNode) -> None:
        node.is_mute = False
