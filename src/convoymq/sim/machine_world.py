"""Clusters whose machines have two nodes each: what a machine's end takes with it.

A cluster as in `cluster_world`, whose processes 1 found it and whose processes 2 join. Faults are
those of nodes, and of machines: all processes lose their power at one moment, with torn files, or
are cut off from the other machines together.

Checked beyond what every cluster checks: a declaration puts no two replicas into one zone while a
majority of the zones runs, and in the end no zone has two replicas of a queue that was declared
when all zones were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import ClassVar

from convoymq.metadata.commands import Command, DeclareQueue
from convoymq.metadata.members import OwnPlace
from convoymq.model.machines import node_number
from convoymq.sim.cluster_node import ClusterNode
from convoymq.sim.cluster_world import ClusterInjector, ClusterLoad, ClusterWorld
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import Plan, Variation

MACHINES = 3
PROCESSES = 2
KINDS = ("machine_crash", "machine_cut")
PLACED_BY_HAND = {"membership", "forget", "newcomer", "foreign_node", "lost_majority"}
"""Faults that change members by other rules, or the set of nodes."""


class MachineInjector(ClusterInjector):
    """Injects faults into a `MachineWorld`."""

    world: MachineWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {
            **super().moments(),
            "machine_crash": self._machine_crash,
            "machine_cut": self._machine_cut,
        }

    def _machine(self) -> list[ClusterNode]:
        machine = self.world.scheduler.between(1, MACHINES)
        return [self.world.nodes[node_number(machine, k)] for k in range(1, PROCESSES + 1)]

    def _machine_crash(self) -> None:
        """A machine loses its power: all its WALs are torn at one moment."""
        nodes = self._machine()
        restart_us = self._outage_us()
        keep = self.world.scheduler.rng.choice((0.0, 0.1, 0.5, 0.9))
        self.world.trace.fault("machine_crash", nodes[0].name)
        for node in nodes:
            if node.alive:
                self.world.crash(node, restart_us=restart_us, keep=keep)

    def _machine_cut(self) -> None:
        here = [node.number for node in self._machine()]
        others = [number for number in sorted(self.world.nodes) if number not in here]
        pairs = [pair for a in here for b in others for pair in ((a, b), (b, a))]
        self._cut("machine_cut", pairs)


class MachineWorld(ClusterWorld):
    """See the module text."""

    injector_class = MachineInjector

    def _make_groups(self) -> None:
        super()._make_groups()
        self._spread: set[int] = set()
        """Groups that were declared when all zones were recorded."""
        for process in range(2, PROCESSES + 1):
            for machine in self.founders:
                number = node_number(machine, process)
                self.nodes[number] = ClusterNode(self, number, self.founders)
        for machine in self.founders:
            for process in range(1, PROCESSES + 1):
                place = OwnPlace(f"machine{machine}", machine, process)
                self.nodes[node_number(machine, process)].place = place

    def _submit(
        self, node: ClusterNode, command: Command, then: Callable[[object], None] | None = None
    ) -> None:
        places = node.tree.places()
        if isinstance(command, DeclareQueue) and all(
            number in places and places[number].zone for number in self.nodes
        ):
            self._check_spread(command.members, node.running_nodes())
            then = self._on_spread
        super()._submit(node, command, then)

    def _on_spread(self, reply: object) -> None:
        assert isinstance(reply, dict)
        if reply["created"]:
            self._spread.add(reply["group"])

    def _check_spread(self, members: Sequence[int], running: Sequence[int]) -> None:
        running_zones = {self.nodes[number].place.zone for number in running}
        if 2 * len(running_zones) > MACHINES and self._crowded(members):
            raise InvariantBroken(f"replicas {members} share a zone, running are {running}")

    def _crowded(self, members: Sequence[int]) -> bool:
        zones = Counter(self.nodes[number].place.zone for number in members)
        return max(zones.values()) > 1

    def _final_checks(self) -> None:
        super()._final_checks()
        voters = self.nodes[1].host.groups[0].core.members.voters
        zones = Counter(self.nodes[number].place.zone for number in voters)
        if 2 * max(zones.values()) > len(voters):
            raise InvariantBroken(f"a zone has a majority of the metadata's voters {voters}")


class MachineLoad(ClusterLoad):
    """Queues of a cluster of machines."""

    text = "three machines of two nodes each, which fail together"
    kinds: ClassVar[tuple[str, ...]] = (
        tuple(k for k in ClusterLoad.kinds if k not in PLACED_BY_HAND) + KINDS
    )
    world: MachineWorld
    world_class = MachineWorld

    def make_plan(self, seed: int, faults: object) -> Plan:
        """See `PlannedLoad`."""
        return replace(super().make_plan(seed, faults), nodes=MACHINES)  # type: ignore[arg-type]

    def vary(self, seed: int, share: float) -> Variation:
        found = super().vary(seed, share)
        more = Random(seed ^ 0x3AC)
        kinds = {kind for kind in KINDS if more.random() < 2 * share}
        return replace(found, kinds=(found.kinds & frozenset(self.kinds)) | kinds)
