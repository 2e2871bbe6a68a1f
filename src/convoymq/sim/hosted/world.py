"""Clusters with queues that hosts keep: classic queues, which policies may mirror.

What is real: `queues.mirrored` and `queues.classic` whole, with the worker of their files handed
in, the ring's shell, core and views, and the frames between nodes. A node may lose its power, and
what its disk had not synced; it does not lose its disk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from random import Random

from convoymq.model.tables import Table
from convoymq.queues.driver import MEMORY_TARGET_BYTES
from convoymq.queues.interface import Queue
from convoymq.queues.mirrored.partitions import AUTOHEAL, PAUSE_MINORITY
from convoymq.replication.ring.views import RingView
from convoymq.sim.clients import ClientConfig
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import Injector, PlannedLoad, Variation
from convoymq.sim.hosted.book import QueueReferee
from convoymq.sim.hosted.channel import QueueChannel
from convoymq.sim.hosted.node import HostedNode, QueueNode
from convoymq.sim.hosted.tree import TreeWorld
from convoymq.sim.nodes import SimNode
from convoymq.sim.world import ChannelKind

FILE_BYTES_MAX = (4_096, 65_536, 64 << 20)
BATCH_BYTES = (1_024, 8_192, 1 << 20)
RESTART_WAIT_MS = 4_000
STOP_MS_MAX = 500
HANDLINGS = (PAUSE_MINORITY, PAUSE_MINORITY, "ignore", AUTOHEAL)


class QueueInjector(Injector):
    """Injects faults into a `QueueWorld`."""

    world: QueueWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        return {**super().moments(), "stop": self._stop, "policy": self._policy}

    def _stop(self) -> None:
        node = self._node()
        if isinstance(node, QueueNode):
            self.world.trace.fault("stop", node.name)
            self.world.stop(node)

    def _policy(self) -> None:
        """The queues have another policy."""
        changes = self.world.draw_policy()
        self.world.trace.fault("policy", str(changes))
        self.world.set_policy(changes)

    def stop(self) -> None:
        """See `Injector`: the policy is as it was at first."""
        super().stop()
        if "policy" in self.world.plan.faults:
            self.world.set_policy({})


class QueueWorld(TreeWorld):
    """See the module text. A subclass makes the queues and their referees."""

    injector_class = QueueInjector
    nodes: dict[int, QueueNode]  # type: ignore[assignment]
    referees: Mapping[int, QueueReferee]
    file_bytes_max: int
    memory_target_bytes = MEMORY_TARGET_BYTES
    restart_wait_ms = RESTART_WAIT_MS

    def _make_nodes(self, draw: Random) -> None:
        self.nodes = {n: QueueNode(self, n) for n in range(1, self.plan.nodes + 1)}
        self.incarnations: dict[int, int] = {}
        self.rules: dict[int, tuple[Table, Mapping[str, object]]] = {}
        """Group -> arguments and settings of its queue."""
        self.batch_bytes = self.own_rng(0xBA7).choice(BATCH_BYTES)
        self.partition_handling = self.own_rng(0x133).choice(HANDLINGS)
        self._losers: set[tuple[int, int]] = set()
        """(group, member) that is to give way to the side with the majority."""
        self.trace.add("world", self.partition_handling)
        self._make_tree(draw)

    @abstractmethod
    def draw_policy(self) -> Mapping[str, object]:
        """Returns settings that queues are to have, beside those that they had at first."""

    def set_policy(self, changes: Mapping[str, object]) -> None:
        """Changes the first settings of the queues, which nodes hear of some time later."""
        for group, (arguments, _) in self.rules.items():
            self.rules[group] = arguments, {**self.settings_of(group), **changes}
        for node in self.nodes.values():
            if node.alive:
                self._later(node.process, node.configure)

    @abstractmethod
    def settings_of(self, group: int) -> Mapping[str, object]:
        """Returns the settings that a queue had at first."""

    def on_opened(self, node: HostedNode) -> None:
        """See `TreeWorld`: the tree gets the node's incarnation as well, some time later."""
        super().on_opened(node)
        self._later(None, self._register, node.number, node.incarnation)

    def _register(self, node: int, incarnation: int) -> None:
        self.incarnations[node] = max(incarnation, self.incarnations.get(node, 0))

    def on_recorded(self, group: int, view: RingView) -> None:
        """See `TreeWorld`."""
        self._losers = {
            loser for loser in self._losers if loser[0] != group or _can_give_way(view, loser[1])
        }

    # What nodes report.

    def _on_majority(self, node: QueueNode) -> None:
        """A node has a majority again: its masters are those that the tree has, and with autoheal
        its copies begin anew where others have all."""
        for group, ring in node.host._rings.items():
            view = self.tree.queue_index.by_group[group].view
            assert view is not None
            is_paused = self.partition_handling == PAUSE_MINORITY and node.host.master_of(group)
            if is_paused and view.master != ring.member:
                raise InvariantBroken(f"{node.name} goes on with a master that was replaced")
            if self.partition_handling == AUTOHEAL and _can_give_way(view, ring.member):
                self._losers.add((group, ring.member))

    def stop(self, node: QueueNode) -> None:
        """Stops a node in order, as `convoy stop` does; it is started again."""
        node.host.stop()
        self._on_stopped(node)
        restart_us = self.scheduler.between(1, STOP_MS_MAX) * 1000
        self.crash(node, restart_us=restart_us, keep=1.0, refuses=True)

    def _on_stopped(self, node: QueueNode) -> None:
        """A node has stopped in order."""

    def on_note(self, node: QueueNode, event: str, **fields: object) -> None:
        """Something for the log file of a node."""
        self.trace.add(node.name, f"{event} {fields.get('queue')} {fields.get('reason', '')}")
        if event in ("queue.crashed", "queue.mirror_failed", "queue.records_dropped"):
            group = fields["group"]
            assert isinstance(group, int)
            if not self.is_excused(group, event, str(fields.get("reason", ""))):
                raise InvariantBroken(f"{node.name}: {event} {fields}")
        elif event == "classic.majority":
            self._on_majority(node)

    @abstractmethod
    def is_excused(self, group: int, event: str, reason: str) -> bool:
        """Returns whether a disk that refuses something explains what a host gave up."""

    @abstractmethod
    def on_disk_error(self, node: QueueNode, group: int, error: Exception) -> None:
        """A disk refused something."""

    # Channels.

    def groups_of(self, node: SimNode) -> Iterable[int]:
        """See `World`."""
        assert isinstance(node, QueueNode)
        return [group for group in self.referees if node.handle(group) is not None]

    def queue_at(self, node: SimNode, group: int) -> Queue:
        """See `World`."""
        assert isinstance(node, QueueNode)
        found = node.handle(group)
        assert found is not None
        return found

    def channel_kind(self, group: int) -> ChannelKind:
        """See `World`."""
        return QueueChannel

    def referee_of(self, group: int) -> QueueReferee:
        """See `World`."""
        return self.referees[group]

    def leads(self, node: SimNode) -> list[int]:
        """See `World`: those that are at home there."""
        records = self.tree.queue_index.by_group
        return [group for group in self.referees if records[group].home == node.number]

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = [referee.waits_for() for referee in self.referees.values()]
        waiting += [f"member {member} of q{group} to give way" for group, member in self._losers]
        waiting += [self._left_to_ticks(referee) for referee in self.referees.values()]
        return super()._unfinished() + [text for text in waiting if text]

    @staticmethod
    def _left_to_ticks(referee: QueueReferee) -> str:
        """Returns what a queue does in a while without a command; "" = nothing."""
        queue = referee.queue
        if queue is None or queue.ended is not None:
            return ""
        due_ms = queue.machine.next_due_ms()
        if due_ms and due_ms <= queue.host.now_ms():
            return f"{referee.name} to drop what has expired"
        return "" if queue.log.is_settled else f"{referee.name} to be flushed"

    def _final_checks(self) -> None:
        for referee in self.referees.values():
            assert referee.queue is not None
            referee.queue.machine.check_invariants()


def _can_give_way(view: RingView, member: int) -> bool:
    return view.is_live(member) and bool(set(view.synchronised) - {member})


class QueueLoad(PlannedLoad):
    """A load of such queues."""

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether nodes are stopped in order."""
        return Variation(kinds=frozenset({"stop"}) if seed % 3 else frozenset())

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Leaves out what only quorum queues have."""
        return replace(
            clients,
            late_chance=0.0,
            lose_chance=0.0,
            delay_chance=0.0,
            repeat_chance=0.0,
        )
