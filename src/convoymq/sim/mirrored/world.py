"""Mirrored queues in the simulator: a master and its mirrors on a ring, channels on every node.

What is real: `queues.mirrored` and `queues.classic` whole, with the worker of their files handed
in, the ring's shell, core and views, and the frames between nodes. Nodes lose their power, and what
their disks had not synced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from random import Random

from convoymq.metadata.records import QueueRecord
from convoymq.queues.interface import Queue
from convoymq.replication.ring.views import RingView
from convoymq.sim.classic.world import FILE_BYTES_MAX, STOP_MS_MAX
from convoymq.sim.clients import ClientConfig
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.engine import Result
from convoymq.sim.faults import NETWORK, Injector, Variation, draw_plan
from convoymq.sim.loads import Load
from convoymq.sim.mirrored.channel import MirroredChannel
from convoymq.sim.mirrored.node import MirroredNode
from convoymq.sim.mirrored.referee import MirroredReferee
from convoymq.sim.nodes import SimNode
from convoymq.sim.ring.tree import TreeWorld
from convoymq.sim.world import ChannelKind

RESTART_WAIT_MS = 4_000
DELAYS = (1, 1, 10)
"""Longest delay of a frame, as a multiple of the plan's."""


class MirroredInjector(Injector):
    """Injects faults into a `MirroredWorld`."""

    world: MirroredWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        return {**super().moments(), "stop": self._stop}

    def _stop(self) -> None:
        node = self._node()
        if isinstance(node, MirroredNode):
            self.world.trace.fault("stop", node.name)
            self.world.stop(node)


class MirroredWorld(TreeWorld):
    """A cluster with mirrored queues."""

    injector_class = MirroredInjector
    nodes: dict[int, MirroredNode]

    def _make_world(self) -> None:
        self.nodes = {n: MirroredNode(self, n) for n in range(1, self.plan.nodes + 1)}
        self.incarnations: dict[int, int] = {}
        self.restart_wait_ms = RESTART_WAIT_MS
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
        self._make_tree(draw)
        for number in range(1, self.plan.groups + 1):
            self._add_queue(number, draw.randint(1, nodes))

    def _add_queue(self, number: int, home: int) -> None:
        record = self._declare(f"q{number}", home)
        self.referees[record.group] = MirroredReferee(record.name)
        self.trace.add("world", f"{record.name} at {home}, {self.settings}")

    # The tree.

    def on_recorded(self, group: int, view: RingView) -> None:
        """See `TreeWorld`."""
        self.referees[group].on_recorded(view)

    def take_record(self, node: SimNode, record: QueueRecord) -> None:
        """See `TreeWorld`."""
        assert isinstance(node, MirroredNode)
        node.take_record(record)
        self.poll(node)

    def on_started(self, node: MirroredNode) -> None:
        """A node runs: the tree gets its incarnation some time later."""
        self._later(None, self._register, node.number, node.incarnation)

    def _register(self, node: int, incarnation: int) -> None:
        self.incarnations[node] = max(incarnation, self.incarnations.get(node, 0))

    # Nodes.

    def stop(self, node: MirroredNode) -> None:
        """Stops a node in order; it is started again."""
        node.stop()
        restart_us = self.scheduler.between(1, STOP_MS_MAX) * 1000
        self.crash(node, restart_us=restart_us, keep=1.0, refuses=True)

    def on_failed(self, node: MirroredNode, event: str, fields: dict[str, object]) -> None:
        """A queue or a mirror was given up: disks work, so that is a bug."""
        raise InvariantBroken(f"{node.name}: {event} {fields}")

    # Channels.

    def groups_of(self, node: SimNode) -> Iterable[int]:
        """See `World`."""
        assert isinstance(node, MirroredNode)
        return [group for group in self.referees if node.handle(group) is not None]

    def queue_at(self, node: SimNode, group: int) -> Queue:
        """See `World`."""
        assert isinstance(node, MirroredNode)
        found = node.handle(group)
        assert found is not None
        return found

    def channel_kind(self, group: int) -> ChannelKind:
        """See `World`."""
        return MirroredChannel

    def referee_of(self, group: int) -> MirroredReferee:
        """See `World`."""
        return self.referees[group]

    def leads(self, node: SimNode) -> list[int]:
        """See `World`: those whose master is there."""
        records = self.tree.queue_index.by_group
        return [group for group in self.referees if records[group].home == node.number]

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = [referee.waits_for(self.size) for referee in self.referees.values()]
        return super()._unfinished() + [text for text in waiting if text]

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload["masters"] = sum(each.masters for each in self.referees.values())

    def _final_checks(self) -> None:
        for referee in self.referees.values():
            assert referee.queue is not None
            referee.queue.machine.check_invariants()


class MirroredLoad(Load):
    """Mirrored queues."""

    text = "mirrored queues: a master and its mirrors on a ring, channels on every node"
    kinds = (*NETWORK, "crash", "torn", "kill", "freeze", "blackout", "slow", "spike", "stop")

    def make_world(
        self, seed: int, faults: Collection[str] | None, sink: Callable[[str], None] | None
    ) -> MirroredWorld:
        """See `Load`."""
        return MirroredWorld(draw_plan(seed, faults, self), self.kinds, sink)

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether nodes are stopped in order."""
        return Variation(kinds=frozenset({"stop"}) if seed % 3 else frozenset())

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Leaves out what only quorum queues have, and times of messages."""
        return replace(
            clients,
            late_chance=0.0,
            lose_chance=0.0,
            delay_chance=0.0,
            repeat_chance=0.0,
            attribute_chance=0.0,
        )

    def draw_settings(self, rng: Random, settings: dict[str, int]) -> dict[str, int]:
        """Nothing: the world draws those of its queues."""
        return settings
