"""Rings in the simulator: members on nodes that crash, freeze, leave and join in mid-broadcast.

What is real: the shell, the core and the views of rings, the frames between nodes, and the rule of
the tree that records views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from convoymq.replication.ring.views import RingView
from convoymq.sim.engine import Result
from convoymq.sim.faults import NETWORK, Injector, Plan, PlannedLoad, Variation
from convoymq.sim.hosted.tree import TreeWorld
from convoymq.sim.nodes import SimNode
from convoymq.sim.ring.node import RingNode
from convoymq.sim.ring.referee import RingReferee
from convoymq.sim.world import ChannelessWorld

PAYLOAD_MAX = 2_000
WINDOWS_BYTES = (500, 20_000, 4 << 20)
NODES = (3, 5, 5)
"""Most of what can go wrong between neighbours needs more than three members."""
DELAYS = (1, 20, 100)
"""Longest delay of a frame, as a multiple of the plan's."""
FAULT_RATE = 3
"""Rate of faults, as a multiple of the plan's: a ring has little else to do."""


class RingInjector(Injector):
    """Injects faults into a `RingWorld`."""

    world: RingWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        return {**super().moments(), "leave": self._leave}

    def _leave(self) -> None:
        node = self._node()
        if isinstance(node, RingNode):
            group = self.world.scheduler.rng.choice(sorted(self.world.referees))
            self.world.trace.fault("leave", node.name)
            node.leave(group)


class RingWorld(ChannelessWorld, TreeWorld):
    """A cluster with rings."""

    injector_class = RingInjector
    nodes: dict[int, RingNode]  # type: ignore[assignment]

    def _make_world(self) -> None:
        draw = self.own_rng(0x2126)
        self.plan.nodes = draw.choice(NODES)
        self.nodes = {n: RingNode(self, n) for n in range(1, self.plan.nodes + 1)}
        self.size = self.plan.nodes - draw.choice((0, 0, 1))
        self.window_bytes = draw.choice(WINDOWS_BYTES)
        self.plan.network.delay_max_us *= draw.choice(DELAYS)
        self.turn_us_max = draw.choice((20_000, 100_000, 400_000))
        self._make_tree(draw)
        self.referees: dict[int, RingReferee] = {}
        for number in range(1, self.plan.groups + 1):
            home = draw.randint(1, self.plan.nodes)
            record = self._declare(f"q{number}", home)
            limit = self.window_bytes + PAYLOAD_MAX
            self.referees[record.group] = RingReferee(record.name, limit, self.workload)
            self.trace.add("world", f"{record.name} of {self.size} members, founded on {home}")

    def make_payload(self) -> bytes:
        """Draws what a member broadcasts."""
        size = self.scheduler.skewed(0, PAYLOAD_MAX - 8)
        return self.scheduler.events.to_bytes(8, "little") + bytes(size)

    # The tree.

    def on_recorded(self, group: int, view: RingView) -> None:
        """See `TreeWorld`."""
        self.referees[group].on_recorded(view)

    # Faults.

    def leads(self, node: SimNode) -> list[int]:
        """See `World`: the rings in which a newcomer takes over the node's state. Half of the
        faults come where they matter most."""
        found = []
        for group, referee in self.referees.items():
            view = referee.tree
            own = view.live_at(node.number) if view is not None else None
            if view is not None and own is not None and view.right_of(own.number) in view.newcomers:
                found.append(group)
        return found

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = [referee.waits_for(self.size) for referee in self.referees.values()]
        return super()._unfinished() + [text for text in waiting if text]

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload = {
            "broadcast": self.workload.published,
            "complete": self.workload.confirmed,
            "received": self.workload.delivered,
            "views": sum(each.tree.version for each in self.referees.values() if each.tree),
        }

    def _final_checks(self) -> None:
        for referee in self.referees.values():
            referee.check_at_rest()


class RingLoad(PlannedLoad):
    """Rings of mirrored queues."""

    text = "rings of mirrored queues: guaranteed multicast, and nothing else"
    kinds = (*NETWORK, "crash", "kill", "freeze", "blackout", "leave")

    world_class = RingWorld

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`."""
        plan = super().make_plan(seed, faults)
        plan.rate *= FAULT_RATE
        return plan

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether members leave."""
        return Variation(kinds=frozenset({"leave"}) if seed % 3 else frozenset())
