"""Simulated nodes with queues that a host keeps: the real host, ring and files on a simulated disk,
clock and network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from convoymq.metadata.commands import ChangeView, SetMembers
from convoymq.metadata.records import QueueRecord
from convoymq.model.config import DefaultsConfig
from convoymq.model.tables import Table
from convoymq.queues.classic.machine import DELIVER, GOT, Effect
from convoymq.queues.classic.queue import ClassicQueue
from convoymq.queues.driver import Answer, HostParts
from convoymq.queues.interface import Queue
from convoymq.queues.mirrored.host import MirroredHost
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.queues.mirrored.partitions import PAUSE_MINORITY
from convoymq.shells.capacity import CapacityQueues, Waiting
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimWorker
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import SimNode
from convoymq.storage.types import Directory
from convoymq.transport.control import ControlPlane

if TYPE_CHECKING:
    from convoymq.sim.hosted.tree import TreeWorld
    from convoymq.sim.hosted.world import QueueWorld

TICK_US = 500_000
SILENCE_MS = 5_000
PAUSED_TICKS = 4
"""A node without a majority is paused after so many ticks: the host looks once a second."""


class Hosted(Protocol):
    """Host of queues, or shell of rings, of a node."""

    def on_node_up(self, node: int) -> None:
        """A node is linked, or speaks again."""

    def on_node_down(self, node: int) -> None:
        """The link to a node broke."""

    def on_suspect(self, node: int) -> None:
        """A node is linked, and does not speak."""

    def end_of_round(self) -> None:
        """Does what gathered in a round."""


class HostedNode(SimNode):
    """One node of a `TreeWorld`. A subclass makes what it hosts."""

    world: TreeWorld

    def _open(self) -> Receiver:
        transport = self._make_transport()
        self.control = ControlPlane(self.number, transport)
        self.capacity = CapacityQueues(self.clock, transport.full, _raise, SILENCE_MS)
        self.records: dict[int, QueueRecord] = {}
        """The node's copy of the tree."""
        self._hosted = self._make_hosted()
        self.world.on_opened(self)
        return self

    @abstractmethod
    def _make_hosted(self) -> Hosted:
        """Makes what this run of the node hosts."""

    @abstractmethod
    def take_record(self, record: QueueRecord) -> None:
        """The node's copy of the tree has a record."""

    def end_of_round(self) -> None:
        """See `SimNode`."""
        self._hosted.end_of_round()

    # What the network says.

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self.control.on_frame(peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self._hosted.on_node_up(peer)
        self.wake()

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self.capacity.on_lost(peer)
        self._hosted.on_node_down(peer)
        self.wake()

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self.capacity.on_room(peer)
        self.wake()

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a linked peer."""
        if suspected:
            self.capacity.on_lost(peer)
            self._hosted.on_suspect(peer)
        else:
            self._hosted.on_node_up(peer)
        self.wake()


class WatchedMaster(MasterQueue):
    """A queue that its referee follows from its opening on."""

    host: WatchedHost

    def __init__(
        self,
        host: MirroredHost,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
        directory: Directory,
        *,
        sessions: Mapping[int, tuple[int, int, int]] | None = None,
    ) -> None:
        super().__init__(host, record, arguments, settings, directory, sessions=sessions)
        self.host.node.world.referees[self.group].watch(self)


class WatchedHost(MirroredHost):
    """A host of such queues."""

    master_class = WatchedMaster
    node: QueueNode

    def dispatch(self, queue: ClassicQueue, effect: Effect) -> None:
        """See `ClassicHost`."""
        if effect[0] in (DELIVER, GOT) and not self.is_paused and self.node.must_be_paused:
            raise InvariantBroken(f"{self.node.name} serves clients without a majority")
        super().dispatch(queue, effect)

    def on_node_up(self, node: int) -> None:
        """See `QueueHost`."""
        self.node.lonely_ticks = 0
        super().on_node_up(node)


class QueueNode(HostedNode):
    """A node with classic queues, which policies may mirror. Implements `Reports`."""

    world: QueueWorld
    host: WatchedHost
    lost_groups = 0

    @property
    def queues(self) -> Mapping[int, Queue]:  # type: ignore[override]
        """Returns the handles that are open here."""
        return {queue.group: queue for queue in self.host.handles()}

    def _make_hosted(self) -> Hosted:
        world, scheduler = self.world, self.world.scheduler
        self.lonely_ticks = 0
        worker = SimWorker(scheduler, self.process, world.plan.disk, self.slow, self.wake)
        self.host = WatchedHost(
            HostParts(
                node_id=self.number,
                incarnation=self.incarnation,
                open_directory=lambda _name: self.disk,
                clock=self.clock,
                control=self.control,
                reports=self,
                new_session=self.new_session,
                node_name_of=lambda node: f"node{node}",
                on_routes=lambda: None,
                call_soon=self._soon,
                wanted=self.wake,
                await_room=self.capacity.wait,
                record_members=self._record_members,
                has_majority=partial(world.has_majority, self.number),
                running_nodes=self._running_nodes,
                incarnation_of=lambda node: world.incarnations.get(node, 0),
                load=dict,
                note=partial(world.on_note, self),
                memory_target_bytes=world.memory_target_bytes,
                read_tree=partial(world.read_tree, self),
                lost_groups=lambda: self.lost_groups,
                settings=DefaultsConfig(
                    mirror_restart_wait_ms=world.restart_wait_ms,
                    partition_handling=world.partition_handling,
                ),
            ),
            worker,
        )
        self.host.node = self
        self.host.file_bytes_max = world.file_bytes_max
        self.host.batch_bytes = world.batch_bytes
        scheduler.after(scheduler.between(0, TICK_US), self.process, self._tick)
        return self.host

    def _record_members(self, command: SetMembers | ChangeView, answer: Answer) -> None:
        assert isinstance(command, ChangeView)
        self.world.propose(self, command, answer)

    def _running_nodes(self) -> list[int]:
        network = self.world.network
        return [
            n for n in self.world.nodes if n == self.number or network.is_connected(self.number, n)
        ]

    def _soon(self, call: Callable[[], None]) -> None:
        self.world.scheduler.after(0, self.process, call)

    # Queues, as `broker.local_queues` has them.

    def take_record(self, record: QueueRecord) -> None:
        """See `HostedNode`."""
        self.records[record.group] = record
        if self.number in record.members and self.host.get(record.group) is None:
            self._open_queue(record)
        arguments, settings = self.world.rules[record.group]
        self.host.follow(record, arguments, settings)
        self.wake()

    def _open_queue(self, record: QueueRecord) -> None:
        arguments, settings = self.world.rules[record.group]
        self.host.open(record, arguments, settings)

    def configure(self) -> None:
        """Queues have another policy."""
        for group, record in self.records.items():
            arguments, settings = self.world.rules[group]
            self.host.follow(record, arguments, settings)
            queue = self.host.get(group)
            if queue is not None:
                queue.configure(settings)
        self.wake()

    def handle(self, group: int) -> Queue | None:
        """Returns the handle of a queue that can be used."""
        record = self.records.get(group)
        if record is None:
            return None
        found = self.host.find(record, self.world.rules[group][0])
        return found if found is not None and found.ended is None else None

    @property
    def must_be_paused(self) -> bool:
        """Returns whether the node has been without a majority for so long that it is paused."""
        handling = self.world.partition_handling
        return self.lonely_ticks >= PAUSED_TICKS and handling == PAUSE_MINORITY

    def _tick(self) -> None:
        self.world.scheduler.after(TICK_US, self.process, self._tick)
        self.lonely_ticks = 0 if self.world.has_majority(self.number) else self.lonely_ticks + 1
        for group in list(self.host.due()):
            record = self.records.get(group)
            if record is not None and self.number in record.members:
                self._open_queue(record)

    # What queues report.

    def on_unused(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_expired(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """See `Reports`."""
        self.world.on_disk_error(self, record.group, error)


def _raise(_item: Waiting, error: Exception) -> None:
    """A fault that a real node contains is a bug here."""
    raise error
