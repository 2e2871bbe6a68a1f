"""The driver of queues of a primary and copies, and a node's host of them.

`register` stands for a line of `broker/drivers.py`. The tree records views as members of the queue;
the number of a view is the first part of `QueueRecord.config`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from convoymq.kernels.link_frames import HEADER_SIZE, frame_header
from convoymq.metadata.commands import SetMembers
from convoymq.metadata.machine import QueueRecord
from convoymq.model.clock import Timer
from convoymq.model.tables import Table
from convoymq.queues import driver
from convoymq.queues.driver import HostedDriver, HostParts
from convoymq.queues.interface import Row
from convoymq.routing.queue_types import PlacementKind, TypeRules
from convoymq.transport.frame_kinds import FREE, control_kind
from tests.examples.copies.core import Copies, Message
from tests.examples.copies.queue import CopiesQueue, Messages
from tests.examples.queue_type.ring import Ring

KIND_COPIES = FREE
"""Kind of the frames between members. Those of a queue keep their order: they are bulk."""
TICK_MS = 200
"""A proposal that was lost is made again after so long."""


class CopiesDriver(HostedDriver):
    """See the module text."""

    rules = TypeRules(
        name="copies",
        placement=PlacementKind.RING,
        serves=frozenset(("x-queue-leader-locator",)),
    )

    def size(self, arguments: Table, default: int) -> int:
        """See `QueueDriver`."""
        return default

    def make_host(self, parts: HostParts) -> CopiesHost:
        """See `HostedDriver`."""
        return CopiesHost(parts)


def register() -> None:
    """Makes the type and its frames known."""
    driver.register(CopiesDriver())
    control_kind(KIND_COPIES, "copies", "tests.examples.copies", urgent=False, raw=True)


class CopiesHost:
    """The queues of one node; see `QueueHost`."""

    def __init__(self, parts: HostParts) -> None:
        self.crashed: tuple[int, ...] = ()
        self._parts = parts
        self._node = parts.node_id
        self._queues: dict[int, CopiesQueue] = {}
        self._dirty: list[Ring] = []
        self._proposed: dict[int, int] = {}
        """Group -> the view that the tree is asked for."""
        self._stepping: set[int] = set()
        self._timer: Timer | None = None
        parts.control.handle_raw(KIND_COPIES, self._on_frame)

    # --- cores -------------------------------------------------------------------------------

    def step(self, queue: CopiesQueue) -> None:
        """Carries out the effects of a queue's core, in order, and those that they cause."""
        if queue.group in self._stepping:
            return
        self._stepping.add(queue.group)
        try:
            while queue.core.effects:
                self._carry_out(queue, *queue.core.effects.popleft())
        finally:
            self._stepping.discard(queue.group)
        self._propose(queue)

    def _carry_out(self, queue: CopiesQueue, kind: str, *arguments: Any) -> None:
        if kind == "send":
            node, message = arguments
            body = msgspec.msgpack.encode(message)
            self._parts.control.send_raw(node, KIND_COPIES, (body,), a=queue.group)
        elif kind == "confirmed":
            queue.on_confirmed(*arguments)
        else:
            queue.lead() if kind == "lead" else queue.yield_()
            self._parts.on_routes()

    def _propose(self, queue: CopiesQueue, *, waited: bool = False) -> None:
        proposal = queue.core.proposal(waited=waited)
        if proposal is None or self._proposed.get(queue.group) == proposal[0]:
            return
        view, members = proposal
        self._proposed[queue.group] = view
        record = queue.record
        command = SetMembers(
            vhost=record.vhost, name=record.name, group=record.group, members=members,
            config=(view, 0),
        )  # fmt: skip

        def done(_reply: object, _error: object) -> None:
            self._proposed.pop(record.group, None)

        self._parts.record_members(command, done)

    def _on_frame(self, node: int, data: bytes) -> None:
        queue = self._queues.get(frame_header(data)[4])
        if queue is not None:
            message = msgspec.msgpack.decode(data[HEADER_SIZE:], type=Message)
            queue.core.on_message(node, message)
            self.step(queue)

    def _on_tick(self) -> None:
        self._timer = self._parts.clock.call_later(TICK_MS, self._on_tick)
        for queue in list(self._queues.values()):
            self._propose(queue, waited=True)

    def take_view(self, queue: CopiesQueue, view: int, members: tuple[int, ...]) -> None:
        """The tree records the members of a queue."""
        connected = self._parts.control.transport.is_connected
        away = [node for node in members if node != self._node and not connected(node)]
        queue.core.take_view(view, members, away)
        if not queue.core.leads:
            queue.refuse()
        self.step(queue)

    def name_of(self, node: int) -> str:
        """Returns a node's name."""
        return self._parts.node_name_of(node)

    # --- QueueHost ---------------------------------------------------------------------------

    def open(
        self, record: QueueRecord, _arguments: Table, _settings: Mapping[str, object]
    ) -> CopiesQueue:
        """See `QueueHost`."""
        known = self._queues.get(record.group)
        if known is not None:
            return known
        if self._timer is None:
            self._on_tick()
        messages = Messages()
        core = Copies(
            self._node, messages, is_founder=record.founder == (self._node, self._parts.incarnation)
        )
        queue = self._queues[record.group] = CopiesQueue(self, record, core, messages)
        self.take_view(queue, record.config[0], record.members)
        return queue

    def follow(self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]) -> None:
        """See `QueueHost`: handles take views by `Queue.follow_members`."""

    def find(self, record: QueueRecord, arguments: Table) -> CopiesQueue | None:
        """See `QueueHost`: one that lives elsewhere refuses."""
        known = self._queues.get(record.group)
        if known is not None or self._node in record.members:
            return known
        return self.open(record, arguments, {})

    def due(self) -> tuple[int, ...]:
        """None: queues in memory do not fail."""
        return ()

    def mark_dirty(self, queue: Ring) -> None:
        self._dirty.append(queue)
        self._parts.wanted()

    def end_of_round(self) -> None:
        """Carries out what clients appended."""
        dirty, self._dirty = self._dirty, []
        for queue in dirty:
            queue.end_of_round()

    def get(self, group: int) -> CopiesQueue | None:
        """The queue with that group id."""
        return self._queues.get(group)

    def handles(self) -> Iterable[CopiesQueue]:
        """All queues."""
        return self._queues.values()

    def delete(self, group: int) -> None:
        """The queue is gone from the tree."""
        queue = self._queues.pop(group, None)
        if queue is not None:
            queue.delete()

    def rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """What management shows of the queues that this node leads."""
        for group, queue in list(self._queues.items()):
            if queue.core.leads and (groups is None or group in groups):
                yield {**queue.info(), "group": group, "leader": self._node}

    def sessions(self) -> Iterable[int]:
        """Sessions of clients."""
        return [client.session for queue in self._queues.values() for client in queue.clients]

    def backlog_bytes(self) -> int:
        """Nothing waits for a disk."""
        return 0

    def dead_lettered(self) -> Counter[tuple[str, str]]:
        """Nothing is dead-lettered."""
        return Counter()

    def copy_of(self, group: int) -> int:
        return 0

    def remove_orphans(self, known: set[int]) -> None:
        """Nothing is kept on disk."""

    def on_node_up(self, node: int) -> None:
        """A node that was away is taken in no more."""

    def on_suspect(self, node: int) -> None:
        """Another node is silent: nobody waits for it."""
        self.on_node_down(node)

    def on_node_down(self, node: int) -> None:
        """The link to another node broke."""
        for queue in list(self._queues.values()):
            queue.core.on_lost(node)
            self.step(queue)

    def stop(self) -> None:
        """Nothing to write."""
        if self._timer is not None:
            self._timer.cancel()
