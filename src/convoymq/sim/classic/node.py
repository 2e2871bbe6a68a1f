"""A simulated node with classic queues: the real host, logs and handles on a simulated disk, clock
and network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convoymq.metadata.machine import QueueRecord
from convoymq.queues.classic.host import ClassicHost
from convoymq.queues.classic.queue import ClassicQueue, LocalQueue
from convoymq.queues.interface import Queue
from convoymq.shells.capacity import CapacityQueues, Waiting
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimWorker
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import SimNode
from convoymq.transport.control import ControlPlane

if TYPE_CHECKING:
    from convoymq.sim.classic.world import ClassicWorld

TICK_US = 500_000
SILENCE_MS = 5_000


class ClassicNode(SimNode):
    """One node of a `ClassicWorld`. Implements `Reports`."""

    world: ClassicWorld
    host: ClassicHost

    @property
    def queues(self) -> Mapping[int, Queue]:  # type: ignore[override]
        """Returns the handles that are open here."""
        return self.host.queues

    def _open(self) -> Receiver:
        scheduler = self.world.scheduler
        transport = self._make_transport()
        self.control = ControlPlane(self.number, transport)
        self.capacity = CapacityQueues(self.clock, transport.full, _raise, SILENCE_MS)
        self.host = ClassicHost(
            node_id=self.number,
            directory=self.disk,
            worker=SimWorker(scheduler, self.process, self.world.plan.disk, self.slow, self.wake),
            clock=self.clock,
            control=self.control,
            reports=self,
            new_session=self.new_session,
            node_name=lambda node: f"node{node}",
            call_soon=self._soon,
            on_routes=lambda: None,
            wanted=self.wake,
            await_room=self.capacity.wait,
            note=self.on_note,
            file_bytes_max=self.world.file_bytes_max,
            memory_target_bytes=self.world.memory_target_bytes,
        )
        for record in self.world.records.values():
            if record.home == self.number:
                self._open_queue(record)
        scheduler.after(scheduler.between(0, TICK_US), self.process, self._tick)
        return self

    def _soon(self, call: Callable[[], None]) -> None:
        self.world.scheduler.after(0, self.process, call)

    def _open_queue(self, record: QueueRecord) -> None:
        group = record.group
        queue = self.host.open(record, self.world.arguments[group], self.world.settings[group])
        if isinstance(queue, LocalQueue) and queue.ended is None:
            self.world.referees[group].watch(queue)

    def handle(self, group: int) -> ClassicQueue | None:
        """Returns the handle of a queue that can be used; None = its home is away."""
        record = self.world.records[group]
        found = self.host.find(record, self.world.arguments[group])
        return found if found is not None and found.ended is None else None

    def stop(self) -> None:
        """Stops in order, as `convoy stop` does."""
        self.host.stop()

    # Rounds.

    def end_of_round(self) -> None:
        self.host.end_of_round()

    def _tick(self) -> None:
        self.world.scheduler.after(TICK_US, self.process, self._tick)
        for group in list(self.host.due()):
            self._open_queue(self.world.records[group])

    # What queues report.

    def on_note(self, event: str, **fields: object) -> None:
        """Something for the log file: a queue that crashed without a failing disk is a bug."""
        self.world.trace.add(self.name, f"{event} {fields.get('queue')} {fields.get('reason', '')}")
        if event == "queue.crashed":
            self.world.on_queue_crashed(self, fields)
        elif event == "queue.records_dropped" and not self.world.may_have_holes(fields):
            raise InvariantBroken(f"{self.name}: {event} {fields}")

    def on_unused(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_expired(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """See `Reports`."""
        self.world.trace.add(self.name, f"disk: {error}")
        self.world.referees[record.group].on_disk_error()

    # What the network says.

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self.control.on_frame(peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self.host.on_node_up(peer)

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self.capacity.on_lost(peer)
        self.host.on_node_down(peer)
        self.wake()

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self.capacity.on_room(peer)
        self.wake()

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a linked peer."""
        if suspected:
            self.capacity.on_lost(peer)
        else:
            self.host.on_node_up(peer)
        self.wake()


def _raise(_item: Waiting, error: Exception) -> None:
    """A fault that a real node contains is a bug here."""
    raise error
