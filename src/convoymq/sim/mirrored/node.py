"""A simulated node with classic queues that have mirrors: host, ring and files of production."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convoymq.metadata.commands import ChangeView, SetMembers
from convoymq.metadata.records import QueueRecord
from convoymq.model.tables import Table
from convoymq.queues.driver import Answer, HostParts
from convoymq.queues.interface import Queue
from convoymq.queues.mirrored.host import MirroredHost
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.shells.capacity import CapacityQueues, Waiting
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimWorker
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import SimNode
from convoymq.storage.types import Directory
from convoymq.transport.control import ControlPlane

if TYPE_CHECKING:
    from convoymq.sim.mirrored.world import MirroredWorld

TICK_US = 500_000
SILENCE_MS = 5_000


class WatchedMaster(MasterQueue):
    """A master that its referee follows from its opening on."""

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
        view = self.record.view
        self.host.node.world.referees[self.group].watch(self, view.master if view else 0)


class WatchedHost(MirroredHost):
    """A host of such masters."""

    master_class = WatchedMaster
    node: MirroredNode


class MirroredNode(SimNode):
    """One node of a `MirroredWorld`. Implements `Reports`."""

    world: MirroredWorld
    host: WatchedHost

    @property
    def queues(self) -> Mapping[int, Queue]:  # type: ignore[override]
        """Returns the handles that are open here."""
        return {queue.group: queue for queue in self.host.handles()}

    def _open(self) -> Receiver:
        world, scheduler = self.world, self.world.scheduler
        transport = self._make_transport()
        self._control = ControlPlane(self.number, transport)
        self._capacity = CapacityQueues(self.clock, transport.full, _raise, SILENCE_MS)
        self._records: dict[int, QueueRecord] = {}
        worker = SimWorker(scheduler, self.process, world.plan.disk, self.slow, self.wake)
        self.host = WatchedHost(
            HostParts(
                node_id=self.number,
                incarnation=self.incarnation,
                open_directory=lambda _name: self.disk,
                clock=self.clock,
                control=self._control,
                reports=self,
                new_session=self.new_session,
                node_name_of=lambda node: f"node{node}",
                on_routes=lambda: None,
                call_soon=self._soon,
                wanted=self.wake,
                await_room=self._capacity.wait,
                record_members=self._record_members,
                has_majority=lambda: world.has_majority(self.number),
                running_nodes=self._running_nodes,
                incarnation_of=lambda node: world.incarnations.get(node, 0),
                load=dict,
                note=self.on_note,
            ),
            worker,
        )
        self.host.node = self
        self.host.file_bytes_max = world.file_bytes_max
        self.host.restart_wait_ms = world.restart_wait_ms
        for group in world.referees:
            scheduler.after(0, self.process, world.tell, self, group)
        scheduler.after(scheduler.between(0, TICK_US), self.process, self._tick)
        world.on_started(self)
        return self

    def _record_members(self, command: SetMembers | ChangeView, answer: Answer) -> None:
        assert isinstance(command, ChangeView)
        self.world.propose(self, command, answer)

    def _running_nodes(self) -> list[int]:
        return [n for n in self.world.nodes if n == self.number or self.is_up(n)]

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""
        return self.world.network.is_connected(self.number, node)

    def _soon(self, call: Callable[[], None]) -> None:
        self.world.scheduler.after(0, self.process, call)

    # Queues, as `broker.local_queues` has them.

    def take_record(self, record: QueueRecord) -> None:
        """The node's copy of the tree has a record."""
        self._records[record.group] = record
        if self.number in record.members and self.host.get(record.group) is None:
            self.host.open(record, Table.of({}), self.world.settings)
        self.host.follow(record, Table.of({}), self.world.settings)
        self.wake()

    def handle(self, group: int) -> Queue | None:
        """Returns the handle of a queue that can be used."""
        record = self._records.get(group)
        if record is None:
            return None
        found = self.host.find(record, Table.of({}))
        return found if found is not None and found.ended is None else None

    def stop(self) -> None:
        """Stops in order, as `convoy stop` does."""
        self.host.stop()

    # Rounds.

    def end_of_round(self) -> None:
        """See `SimNode`."""
        self.host.end_of_round()

    def _tick(self) -> None:
        self.world.scheduler.after(TICK_US, self.process, self._tick)
        for group in list(self.host.due()):
            record = self._records.get(group)
            if record is not None and self.number in record.members:
                self.host.open(record, Table.of({}), self.world.settings)

    # What queues report.

    def on_note(self, event: str, **fields: object) -> None:
        """Something for the log file."""
        self.world.trace.add(self.name, f"{event} {fields.get('queue')} {fields.get('reason', '')}")
        if event in ("queue.crashed", "queue.mirror_failed"):
            self.world.on_failed(self, event, fields)

    def on_unused(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_expired(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """See `Reports`."""
        raise InvariantBroken(f"{self.name}: the disk works, and {error}")

    # What the network says.

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self._control.on_frame(peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self.host.on_node_up(peer)
        self.wake()

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self._capacity.on_lost(peer)
        self.host.on_node_down(peer)
        self.wake()

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self._capacity.on_room(peer)
        self.wake()

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a linked peer."""
        if suspected:
            self._capacity.on_lost(peer)
            self.host.on_suspect(peer)
        else:
            self.host.on_node_up(peer)
        self.wake()


def _raise(_item: Waiting, error: Exception) -> None:
    """A fault that a real node contains is a bug here."""
    raise error
