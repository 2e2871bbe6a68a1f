"""Simulates any replicated machine: one group of it on all nodes, clients that submit, and faults.

The nodes, their storage and their network are those of every world. What is checked besides what
the machine's own test checks: the rules of Raft, equal states and effects at equal indexes, and
that in the end every client has its answers and all replicas are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Protocol

from convoymq.kernels.batch import CommandBuilder
from convoymq.kernels.entries import Entry
from convoymq.replication.machine import Effect, Machine
from convoymq.shells.effect_sink import EffectSink
from convoymq.shells.groups.replica import Replica
from convoymq.sim.faults import KINDS, Plan, draw_plan
from convoymq.sim.group_node import FIRST_INCARNATION, GroupNode
from convoymq.sim.group_world import GroupLoad, GroupPlace, GroupWorld
from convoymq.sim.invariants import GroupChecker

GROUP = 1
LINKS = frozenset({"break", "delay", "isolate", "loss", "oneway", "partition", "suspect"})
PROCESSES = frozenset({"blackout", "crash", "freeze", "kill", "slow", "torn", "transfer"})
FAULTS = LINKS | PROCESSES
"""Faults after which no node has lost what it had promised to keep, and all nodes come back."""
SUBMIT_MAX_US = 20_000


class SimulatedClient(EffectSink[Replica], Protocol):
    """The machine's effect sink on a node, and who submits commands there."""

    def attach(self, builder: CommandBuilder, session: int) -> None:
        """Begins: `builder` is the open batch of the group on this node."""

    def submit(self, rng: Random) -> None:
        """Submits some command."""

    def waits_for(self) -> str:
        """Returns what it has no answer for; "" = nothing."""


class MachineNode(GroupNode):
    """A node with one replica of the machine, and one client of it."""

    world: MachineWorld
    client: SimulatedClient

    def open_group(self, group: int) -> None:
        """Takes part in the group."""
        place = self.world.places[group]
        machine = self._make_reporting()
        self.client = self.world.make_client()
        self.world.clients.append(self.client)
        self.host.create_group(
            group,
            sorted(place.members),
            machine,
            self.client,
            leader_hint=place.hint,
            founder=place.founder,
        )
        self.client.attach(self.host.builder_of(group), self.new_session())

    def _make_reporting(self) -> Machine:
        """Makes a machine that reports what it applies."""
        machine = self.world.make_new()
        apply = machine.apply

        def reported(index: int, time_ms: int, data: bytes) -> None:
            before = len(machine.effects)
            apply(index, time_ms, data)
            self.world.on_entry(self, machine, Entry(data), machine.effects[before:])

        machine.apply = reported  # type: ignore[method-assign]
        return machine


class _Clients:
    """Referee of all clients. Implements `GroupReferee`; the machine's test is the model."""

    index = 0

    def __init__(self, world: MachineWorld) -> None:
        self._world = world

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        pass

    def check_machine(self, machine: Machine) -> None:
        pass

    def waits_for(self) -> str:
        waits = [node.client.waits_for() for node in self._world.nodes.values()]
        return "; ".join(text for text in waits if text)


class MachineLoad(GroupLoad):
    """One group of some machine, which a test brings along."""

    text = "one group of some machine"
    kinds = tuple(kind for kind in KINDS if kind in FAULTS)
    world: MachineWorld

    def make_referee(self, group: int, settings: dict[str, int]) -> _Clients:
        return _Clients(self.world)


class MachineWorld(GroupWorld):
    """A cluster with one group of some machine.

    Args:
        make_new: makes a machine in its first state.
        make_client: makes the client of a node that has just started.
    """

    node_class = MachineNode
    nodes: dict[int, MachineNode]

    def __init__(
        self,
        plan: Plan,
        load: MachineLoad,
        make_new: Callable[[], Machine],
        make_client: Callable[[], SimulatedClient],
    ) -> None:
        self.make_new = make_new
        self.make_client = make_client
        self.clients: list[SimulatedClient] = []
        """Of all nodes, also those of processes that are gone."""
        super().__init__(plan, load)

    @property
    def machines(self) -> list[Machine]:
        """Machines of all nodes that run."""
        return [replica.machine for _, replica in self.replicas_of(GROUP)]

    def _make_groups(self) -> None:
        self.nodes = {n: MachineNode(self, n) for n in range(1, self.plan.nodes + 1)}
        members = set(self.nodes)
        began = dict.fromkeys(sorted(members), (frozenset(members), False))
        founder = (1, FIRST_INCARNATION)
        self.places[GROUP] = GroupPlace(members, began, 1, {}, founder)
        self.referees[GROUP] = self.load.make_referee(GROUP, {})
        checker = GroupChecker(GROUP, self.referees[GROUP], self.plan.hash_every, self.trace)
        checker.founder = founder[0]
        self.checkers = {GROUP: checker}

    def _start_care(self) -> None:
        self.scheduler.after(0, None, self._submit)

    def _submit(self) -> None:
        if self.quiet:
            return
        self.scheduler.after(self.scheduler.between(100, SUBMIT_MAX_US), None, self._submit)
        node = self.scheduler.rng.choice(sorted(self.nodes))
        if self.nodes[node].alive:
            self.nodes[node].client.submit(self.scheduler.rng)

    def on_entry(
        self, node: GroupNode, machine: Machine, entry: Entry, effects: list[Effect]
    ) -> None:
        """A replica has applied an entry of commands."""
        checker = self.checkers[GROUP]
        replica = node.host.replica(GROUP)
        checker.on_apply(node.number, replica, entry.index, entry.term, entry.data)
        checker.on_effects(node.number, entry.index, effects)
        checker.on_state(node.number, machine, entry.index)

    def _left_behind(self, group: int, replica: Replica) -> list[str]:
        return []


def run_machine(
    seed: int,
    make_new: Callable[[], Machine],
    make_client: Callable[[], SimulatedClient],
    faults: Collection[str] | None = None,
) -> MachineWorld:
    """Runs a seed and returns the world as it is in the end. Raises what broke.

    Args:
        make_client: makes a `SimulatedClient`.
        faults: kinds of faults; None = those of `FAULTS` that the seed draws.
    """
    load = MachineLoad()
    chosen = None if faults is None else frozenset(faults)
    world = MachineWorld(draw_plan(seed, chosen, load), load, make_new, make_client)
    world.run()
    return world


__all__ = ["FAULTS", "GROUP", "MachineWorld", "SimulatedClient", "run_machine"]
