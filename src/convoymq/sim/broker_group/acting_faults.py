"""Faults of groups whose slaves act for their master.

| kind | what happens for 4 to 8 s |
|---|---|
| `unlisted` | no name server hears the master; its slaves do |
| `exile` | only clients hear the master |
| `camps` | the master is away, and each slave is out of reach of one name server |
| `shut` | the master is away, and for a part of that time targets are |
| `crossed` | the master is away, and when it comes back targets are |
| `deaf` | the master is away, and targets' answers are lost for a part of that time |
| `hush` | the master is away, and a name server that hears a slave does not reach it |
| `together` | all replicas are away, and come back at once |
| `brim` | the master is away, and for a part of that time disks of targets and slaves are full |
| `twin` | another broker with the id of a replica runs |
| `alone` | the master is away, and when it comes back its slaves are |

`jump`: a wall clock jumps by some seconds, forth or back. `back`: a slave restarts.
`pops`, `ahead`: clients pop, and pull behind the end, during the whole run (`acting_pops.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from convoymq.sim.broker_group.acting_node import NameServerNode
from convoymq.sim.broker_group.world import BrokerGroupInjector

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_world import ActingWorld

OUTAGES = ("unlisted", "exile", "camps", "shut", "together", "crossed", "deaf", "hush", "brim",
           "twin", "alone")  # fmt: skip
ACTING_KINDS = ("away", "mute", "jump", "back", *OUTAGES, "pops", "ahead")
"""Kinds of faults that only this load has."""
JUMP_MS = 3_000


class ActingInjector(BrokerGroupInjector):
    """Injects faults into an `ActingWorld`."""

    world: ActingWorld
    _whole_us = 0
    """Time at which the last long outage is over."""

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        outages = {kind: partial(self._outage, kind) for kind in OUTAGES}
        own = {
            "away": self._away, "mute": self._mute, "jump": self._jump, "back": self._back,
        }  # fmt: skip
        return {**super().moments(), **own, **outages}

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
        elif kind == "crossed":
            self._master_away(duration_us)
            draw.after(duration_us - draw.between(200_000, 1_000_000), None, self._gone, kind)
        elif kind == "alone":
            self._master_away(duration_us)
            draw.after(duration_us - draw.between(200_000, 600_000), None, self._slaves_gone, kind)
        elif kind == "deaf":
            self._master_away(duration_us)
            draw.after(draw.between(2_000_000, 3_000_000), None, self._deaf, kind)
        elif kind == "hush":
            server = draw.rng.choice(world.name_servers)
            world.crash(server, restart_us=100_000, keep=1.0, refuses=True)
            draw.after(1_500_000, None, self._hush, server.number, slaves, duration_us - 1_500_000)
        elif kind == "brim":
            self._master_away(duration_us)
            draw.after(draw.between(0, 2_500_000), None, self._brim, kind)
        elif kind == "twin":
            world.start_twin(draw.rng.choice(list(world.replicas.values())), duration_us)
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
        self._kill_all(kind, gone, duration_us)

    def _gone(self, kind: str) -> None:
        """Targets are away."""
        world = self.world
        if not self.stopped:
            self._kill_all(kind, list(world.targets), world.scheduler.between(1_500_000, 3_000_000))

    def _slaves_gone(self, kind: str) -> None:
        """Slaves are away."""
        world = self.world
        if not self.stopped:
            slaves = [number for number in world.replicas if number != 1]
            self._kill_all(kind, slaves, world.scheduler.between(1_500_000, 3_000_000))

    def _brim(self, kind: str) -> None:
        """Disks of targets and slaves are full."""
        world, draw = self.world, self.world.scheduler
        slaves = [node for number, node in world.replicas.items() if number != 1]
        nodes = [node for node in (*world.targets.values(), *slaves) if draw.chance(0.6)]
        if self.stopped:
            return
        world.trace.fault(kind, " ".join(node.name for node in nodes))
        for node in nodes:
            node.disk.fill(draw.skewed(0, 20_000))
            draw.after(draw.between(500_000, 4_000_000), None, node.disk.empty)

    def _deaf(self, kind: str) -> None:
        """Replicas do not hear targets, which hear them."""
        world = self.world
        if not self.stopped:
            pairs = [(target, replica) for target in world.targets for replica in world.replicas]
            self._cut(kind, pairs, world.scheduler.between(500_000, 4_000_000))

    def _back(self) -> None:
        """A slave restarts beside its master."""
        world, draw = self.world, self.world.scheduler
        node = draw.rng.choice([node for node in world.replicas.values() if not node.is_master])
        if node.alive:
            world.trace.fault("back", node.name)
            world.crash(node, restart_us=draw.between(100_000, 2_000_000), keep=1.0, refuses=True)

    def _hush(self, server: int, slaves: list[int], duration_us: int) -> None:
        """A name server that has no connections yet does not reach slaves, which reach it."""
        world = self.world
        if self.stopped:
            return
        self._master_away(duration_us)
        for slave in slaves:
            world.network.cut(server, slave, breaks=False)
            world.scheduler.after(duration_us, None, world.network.heal, server, slave)

    def _jump(self) -> None:
        node = self._node()
        if node is not None:
            jump_ms = self.world.scheduler.between(-JUMP_MS, JUMP_MS)
            self.world.on_jump(node, jump_ms)

    def _kill_all(self, kind: str, numbers: list[int], restart_us: int) -> None:
        self.world.trace.fault(kind, f"nodes {numbers}")
        for number in numbers:
            if self.world.nodes[number].alive:
                self.world.crash(
                    self.world.nodes[number], restart_us=restart_us, keep=1.0, refuses=True
                )

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
