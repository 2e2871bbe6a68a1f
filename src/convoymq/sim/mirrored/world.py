"""Mirrored queues in the simulator: a master and its mirrors on a ring, channels on every node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from random import Random
from typing import ClassVar

from convoymq.model.tables import Table
from convoymq.replication.ring.views import RingView
from convoymq.sim.clients import ClientConfig
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.engine import Result
from convoymq.sim.faults import NETWORK, Plan, Variation
from convoymq.sim.hosted.node import QueueNode
from convoymq.sim.hosted.world import FILE_BYTES_MAX, QueueLoad, QueueWorld
from convoymq.sim.mirrored.referee import MirroredReferee

DELAYS = (1, 1, 10)
"""Longest delay of a frame, as a multiple of the plan's."""
FAILING = frozenset({"full", "errors"})
FAILING_SEEDS = (1, 3)
"""Last digits of the seeds in which disks refuse to write."""


class MirroredWorld(QueueWorld):
    """A cluster with mirrored queues."""

    def _make_world(self) -> None:
        self.referees: dict[int, MirroredReferee] = {}
        self._draw_queues(self.own_rng(0x3122))

    def _draw_queues(self, draw: Random) -> None:
        nodes = self.plan.nodes
        self.size = draw.randint(2, nodes)
        self.plan.network.delay_max_us *= draw.choice(DELAYS)
        self.file_bytes_max = draw.choice(FILE_BYTES_MAX)
        self.settings: dict[str, object] = {"ha-mode": "exactly", "ha-params": self.size}
        if draw.random() < 0.5:
            self.settings["ha-promote-on-failure"] = "when-synced"
        if draw.random() < 0.3:
            self.settings["ha-promote-on-shutdown"] = "always"
        apart = self.own_rng(0x57C)
        if apart.random() < 0.5:
            self.settings["ha-sync-mode"] = "automatic"
            self.settings["ha-sync-batch-size"] = apart.choice((1, 3, 4096))
        self._make_nodes(draw)
        for number in range(1, self.plan.groups + 1):
            self._add_queue(number, draw.randint(1, nodes))

    def _add_queue(self, number: int, home: int) -> None:
        record = self._declare(f"q{number}", home)
        self.rules[record.group] = Table.of({}), self.settings
        self.referees[record.group] = MirroredReferee(record.name, self.size)
        self.trace.add("world", f"{record.name} at {home}, {self.settings}")

    def draw_policy(self) -> Mapping[str, object]:
        """See `QueueWorld`: queues shall be on other nodes."""
        names = [f"node{n}" for n in sorted(self.nodes)]
        listed = self.scheduler.rng.sample(names, self.scheduler.between(1, 2))
        return {"ha-mode": "nodes", "ha-params": listed}

    def settings_of(self, group: int) -> Mapping[str, object]:
        """See `QueueWorld`."""
        return self.settings

    def on_recorded(self, group: int, view: RingView) -> None:
        """See `TreeWorld`."""
        super().on_recorded(group, view)
        self.referees[group].on_recorded(view)

    def is_excused(self, group: int, event: str, reason: str) -> bool:
        """See `QueueWorld`."""
        if not FAILING & self.plan.faults:
            return False
        if event == "queue.crashed":
            self.referees[group].on_crashed()
        return True

    def on_disk_error(self, node: QueueNode, group: int, error: Exception) -> None:
        """See `QueueWorld`."""
        if not FAILING & self.plan.faults:
            raise InvariantBroken(f"{node.name}: the disk works, and {error}")
        self.trace.add(node.name, f"disk: {error}")
        self.referees[group].on_disk_error()

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload["masters"] = sum(each.masters for each in self.referees.values())


class MirroredLoad(QueueLoad):
    """Mirrored queues."""

    text = "mirrored queues: a master and its mirrors on a ring, channels on every node"
    world_class = MirroredWorld
    kinds: ClassVar[tuple[str, ...]] = (
        *NETWORK,
        "crash",
        "torn",
        "kill",
        "freeze",
        "blackout",
        "slow",
        "spike",
        "stop",
        "policy",
        *sorted(FAILING),
    )

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`."""
        plan = super().make_plan(seed, faults)
        if faults is None and seed % 10 not in FAILING_SEEDS:
            return replace(plan, faults=plan.faults - FAILING)
        return plan

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether policies change as well."""
        found = super().vary(seed, share)
        return found if seed % 5 else replace(found, kinds=found.kinds | {"policy"})

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Leaves out times of messages as well."""
        return replace(super().adapt_clients(clients), attribute_chance=0.0)
