"""Classic queues in the simulator: each has one copy, on its home; channels are on every node.

What is real: `queues.classic` whole, with the worker of its files handed in, and the control frames
between nodes. The world says where queues are, as the metadata would. A node may lose its power,
and what its disk had not synced; it does not lose its disk, for there is no other copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from random import Random

from convoymq.metadata.machine import QueueRecord
from convoymq.model.tables import Table
from convoymq.queues.interface import Queue
from convoymq.routing.types import QueueType
from convoymq.sim.classic.channel import ClassicChannel
from convoymq.sim.classic.node import ClassicNode
from convoymq.sim.classic.referee import ClassicReferee
from convoymq.sim.clients import ClientConfig
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import DISKS, NETWORK, NODES, Injector, Variation, draw_plan
from convoymq.sim.loads import Load
from convoymq.sim.nodes import SimNode
from convoymq.sim.world import ChannelKind, World
from convoymq.storage.files import CAPACITY_MAX

QUEUES_MAX = 3
DURABLE_SHARE = 0.75
LIMITED = 0.3
TTLS_MS = (None, None, None, 50, 1_000)
FILE_BYTES_MAX = (4_096, 65_536, 64 << 20)
MEMORY_TARGETS = (4_096, 4_096, 20_000, 100_000, 256 << 20)
"""Most are so small that messages are paged out; flow control begins at a quarter."""
LEVELS_MAX = (0, 0, 1, 3, 10)
STOP_MS_MAX = 500


class ClassicInjector(Injector):
    """Injects faults into a `ClassicWorld`."""

    world: ClassicWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {**super().moments(), "stop": self._stop}

    def _stop(self) -> None:
        node = self._node()
        if node is not None:
            self.world.trace.fault("stop", node.name)
            self.world.stop(node)


class ClassicWorld(World):
    """A cluster with classic queues."""

    injector_class = ClassicInjector
    nodes: dict[int, ClassicNode]

    def _make_world(self) -> None:
        plan = self.plan
        draw = self.own_rng(0xC1A55)
        self.file_bytes_max = draw.choice(FILE_BYTES_MAX)
        self.memory_target_bytes = draw.choice(MEMORY_TARGETS)
        self.nodes = {n: ClassicNode(self, n) for n in range(1, plan.nodes + 1)}
        self.records: dict[int, QueueRecord] = {}
        self.arguments: dict[int, Table] = {}
        self.settings: dict[int, dict[str, object]] = {}
        self.referees: dict[int, ClassicReferee] = {}
        self._draw_queues(draw)
        self.trace.add("world", f"nodes {plan.nodes} faults {' '.join(sorted(plan.faults))}")

    def _draw_queues(self, draw: Random) -> None:
        for group in range(1, draw.randint(1, QUEUES_MAX) + 1):
            durable = draw.random() < DURABLE_SHARE
            home = draw.choice(sorted(self.nodes))
            settings: dict[str, object] = {}
            ttl_ms = draw.choice(TTLS_MS)
            if ttl_ms is not None:
                settings["message-ttl"] = ttl_ms
            if draw.random() < LIMITED:
                settings["max-length"] = draw.choice((1, 5, 40))
                settings["overflow"] = draw.choice(("drop-head", "reject-publish"))
            arguments: dict[str, object] = {}
            if draw.random() < LIMITED:
                arguments["x-single-active-consumer"] = True
            level_max = draw.choice(LEVELS_MAX)
            if level_max:
                arguments["x-max-priority"] = level_max
            has_limit = settings.get("overflow") == "drop-head"
            referee = ClassicReferee(
                group,
                durable=durable,
                ttl_ms=ttl_ms,
                has_limit=has_limit,
                level_max=level_max,
            )
            self._add_queue(referee, home, settings, arguments)

    def _add_queue(
        self,
        referee: ClassicReferee,
        home: int,
        settings: dict[str, object],
        arguments: dict[str, object],
    ) -> None:
        group, durable = referee.group, referee.durable
        self.records[group] = QueueRecord(
            vhost="/",
            name=f"q{group}",
            group=group,
            type=QueueType.CLASSIC,
            durable=durable,
            members=(home,),
            owner=None,
            created_ms=0,
        )
        self.arguments[group] = Table.of(arguments)
        self.settings[group] = settings
        self.referees[group] = referee
        facts = f"{durable} {settings} {arguments}"
        self.trace.add("world", f"{self.records[group].name} at {home}, {facts}")

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        self._tell_down(node)
        super().crash(node, restart_us=restart_us, keep=keep, refuses=refuses, wipe=wipe)

    def stop(self, node: SimNode) -> None:
        """Stops a node in order; it is started again."""
        assert isinstance(node, ClassicNode)
        node.stop()
        disk = node.disk
        self._tell_down(node, stopped=not disk.failing and disk.capacity == CAPACITY_MAX)
        restart_us = self.scheduler.between(1, STOP_MS_MAX) * 1000
        super().crash(node, restart_us=restart_us, keep=1.0, refuses=True)

    def _tell_down(self, node: SimNode, *, stopped: bool = False) -> None:
        for group, record in self.records.items():
            if record.home == node.number:
                self.referees[group].on_down(stopped=stopped)

    def on_queue_crashed(self, node: ClassicNode, fields: dict[str, object]) -> None:
        """A queue was stopped by an error, or could not be opened."""
        if not str(fields["reason"]).startswith(("OSError", "[Errno")):
            raise InvariantBroken(f"{node.name}: queue.crashed {fields}")
        referee = self._referee_in(fields)
        referee.on_disk_error()
        referee.on_down()

    def may_have_holes(self, fields: dict[str, object]) -> bool:
        """Returns whether the log of a queue may lack what its disk refused."""
        return self._referee_in(fields).failed_once

    def _referee_in(self, fields: dict[str, object]) -> ClassicReferee:
        group = fields["group"]
        assert isinstance(group, int)
        return self.referees[group]

    # Channels.

    def groups_of(self, node: SimNode) -> Iterable[int]:
        assert isinstance(node, ClassicNode)
        return [group for group in self.records if node.handle(group) is not None]

    def queue_at(self, node: SimNode, group: int) -> Queue:
        assert isinstance(node, ClassicNode)
        found = node.handle(group)
        assert found is not None
        return found

    def channel_kind(self, group: int) -> ChannelKind:
        return ClassicChannel

    def referee_of(self, group: int) -> ClassicReferee:
        return self.referees[group]

    def leads(self, node: SimNode) -> list[int]:
        """See `World`: those that are at home there."""
        return [group for group, record in self.records.items() if record.home == node.number]

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = [referee.waits_for() for referee in self.referees.values()]
        return super()._unfinished() + [text for text in waiting if text]

    def _final_checks(self) -> None:
        for referee in self.referees.values():
            assert referee.queue is not None
            referee.queue.machine.check_invariants()


class ClassicLoad(Load):
    """Classic queues."""

    text = "classic queues: one copy at its home, channels on every node"
    kinds = (
        *NETWORK,
        *(kind for kind in NODES if kind != "wipe"),
        *(kind for kind in DISKS if kind != "rot"),
        "clock",
        "stop",
    )

    def make_world(
        self, seed: int, faults: Collection[str] | None, sink: Callable[[str], None] | None
    ) -> ClassicWorld:
        return ClassicWorld(draw_plan(seed, faults, self), self.kinds, sink)

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether nodes are stopped in order."""
        return Variation(kinds=frozenset({"stop"}) if seed % 3 else frozenset())

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Leaves out what only quorum queues have."""
        return replace(
            clients, late_chance=0.0, lose_chance=0.0, delay_chance=0.0, repeat_chance=0.0
        )

    def draw_settings(self, rng: object, settings: dict[str, int]) -> dict[str, int]:
        """Nothing: the world draws those of each queue."""
        return settings
