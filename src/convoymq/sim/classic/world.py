"""Classic queues in the simulator: each has one copy, on its home; channels are on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from convoymq.model.tables import Table
from convoymq.sim.classic.referee import ClassicReferee
from convoymq.sim.faults import DISKS, NETWORK, NODES, Variation
from convoymq.sim.hosted.node import QueueNode
from convoymq.sim.hosted.world import FILE_BYTES_MAX, QueueLoad, QueueWorld
from convoymq.sim.nodes import SimNode
from convoymq.storage.files import CAPACITY_MAX

QUEUES_MAX = 3
DURABLE_SHARE = 0.75
LIMITED = 0.3
TTLS_MS = (None, None, None, 50, 1_000)
POLICY_TTLS_MS = (20, 500, 5_000)
POLICY_LENGTHS = 0.2
MEMORY_TARGETS = (4_096, 4_096, 20_000, 100_000, 256 << 20)
"""Most are so small that messages are paged out; flow control begins at a quarter."""
LEVELS_MAX = (0, 0, 1, 3, 10)


class ClassicWorld(QueueWorld):
    """A cluster with classic queues."""

    def _make_world(self) -> None:
        plan = self.plan
        draw = self.own_rng(0xC1A55)
        self.file_bytes_max = draw.choice(FILE_BYTES_MAX)
        self.memory_target_bytes = draw.choice(MEMORY_TARGETS)
        self._make_nodes(draw)
        self.referees: dict[int, ClassicReferee] = {}
        self.first_settings: dict[int, Mapping[str, object]] = {}
        self._draw_queues(draw)
        self.trace.add("world", f"nodes {plan.nodes} faults {' '.join(sorted(plan.faults))}")

    def _draw_queues(self, draw: Random) -> None:
        for number in range(1, draw.randint(1, QUEUES_MAX) + 1):
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
            referee = ClassicReferee(
                f"q{number}",
                durable=durable,
                has_limit=settings.get("overflow") == "drop-head",
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
        record = self._declare(referee.name, home, durable=referee.durable)
        self.rules[record.group] = Table.of(arguments), settings
        self.first_settings[record.group] = settings
        self.referees[record.group] = referee
        facts = f"{referee.durable} {settings} {arguments}"
        self.trace.add("world", f"{record.name} at {home}, {facts}")

    def draw_policy(self) -> Mapping[str, object]:
        """See `QueueWorld`: messages live for another time, or another number of them."""
        draw = self.scheduler.rng
        if draw.random() < POLICY_LENGTHS:
            return {"max-length": draw.choice((1, 5, 40)), "overflow": "reject-publish"}
        return {"message-ttl": draw.choice(POLICY_TTLS_MS)}

    def settings_of(self, group: int) -> Mapping[str, object]:
        """See `QueueWorld`."""
        return self.first_settings[group]

    def has_majority(self, node: int) -> bool:
        """See `TreeWorld`: records do not change, so every node has them on its disk."""
        return True

    def _on_stopped(self, node: QueueNode) -> None:
        disk = node.disk
        self._tell_down(node, stopped=not disk.refused and disk.capacity == CAPACITY_MAX)

    def _on_down(self, node: SimNode) -> None:
        self._tell_down(node, stopped=False)

    def _tell_down(self, node: SimNode, *, stopped: bool) -> None:
        for group in self.leads(node):
            self.referees[group].on_down(stopped=stopped)

    def is_excused(self, group: int, event: str, reason: str) -> bool:
        """See `QueueWorld`."""
        referee = self.referees[group]
        if event == "queue.records_dropped":
            return referee.failed_once
        is_excused = event == "queue.crashed" and reason.startswith(("OSError", "[Errno"))
        if is_excused:
            referee.on_disk_error()
            referee.on_down(stopped=False)
        return is_excused

    def on_disk_error(self, node: QueueNode, group: int, error: Exception) -> None:
        """See `QueueWorld`."""
        self.trace.add(node.name, f"disk: {error}")
        self.referees[group].on_disk_error()


class ClassicLoad(QueueLoad):
    """Classic queues."""

    text = "classic queues: one copy at its home, channels on every node"
    world_class = ClassicWorld
    kinds = (
        *NETWORK,
        *(kind for kind in NODES if kind != "wipe"),
        *(kind for kind in DISKS if kind != "rot"),
        "clock",
        "stop",
        "policy",
    )

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether policies change as well."""
        found = super().vary(seed, share)
        return found if seed % 5 else replace(found, kinds=found.kinds | {"policy"})
