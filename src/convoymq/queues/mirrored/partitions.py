# cython: annotation_typing=False
"""Classic queues of a node that reaches no majority of its cluster (ADR 0133).

| handling | without a majority | after it |
|---|---|---|
| `pause_minority` | queues stand still, clients wait | queues go on |
| `ignore` | queues go on | queues go on |
| `autoheal` | queues go on | copies on this node give way to those of the majority |

A node has a majority again once its tree has what was recorded before: which of its masters were
replaced meanwhile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from convoymq.metadata.records import QueueRecord
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table
from convoymq.queues.classic.host import ClassicHost
from convoymq.queues.classic.machine import Effect
from convoymq.queues.classic.queue import ClassicQueue, LocalQueue
from convoymq.queues.classic.remote_queue import RemoteQueue
from convoymq.queues.driver import HostParts
from convoymq.queues.mirrored.handle import WAIT_MS_MAX, MirroredHandle
from convoymq.replication.ring.views import RingView
from convoymq.shells.ring.shell import RingMember
from convoymq.storage.types import Worker

PAUSE_MINORITY, AUTOHEAL = "pause_minority", "autoheal"
READ_AGAIN_MS = 10_000
"""The tree is read again after so long without an answer."""


class PartitionedHost(ClassicHost):
    """Part of `MirroredHost`; see the module text."""

    def __init__(self, parts: HostParts, worker: Worker | None = None) -> None:
        self._parts = parts
        self._handling = parts.settings.partition_handling
        self._lost_ms: int | None = None
        """Time since when there is no majority, by the monotonic clock."""
        self._losses = 0
        self._reading_ms: int | None = None
        """Time since when the tree is being read."""
        self._giving_way: dict[int, int] = {}
        """Group -> number of the member of this node that is to leave the ring."""
        self._kept: list[tuple[ClassicQueue, Effect]] = []
        """Effects of a paused node's queues."""
        self._fronts: dict[int, MirroredHandle] = {}
        """Handles that clients have of queues whose master came to this node later."""
        self._rings: dict[int, RingMember] = {}
        self._records: dict[int, tuple[QueueRecord, Table, Mapping[str, object]]] = {}
        """Queues with a ring: the newest record, arguments and settings."""
        super().__init__(parts, worker)

    @abstractmethod
    def _propose(self, group: int, view: RingView) -> None:
        """Has a view recorded, unless another one of this host is under way."""

    @property
    def is_paused(self) -> bool:  # type: ignore[override]
        """See `ClassicHost`."""
        return self._lost_ms is not None and self._handling == PAUSE_MINORITY

    def has_room(self, queue: RemoteQueue) -> bool:
        """See `ClassicHost`: a paused node sends nothing."""
        return not self.is_paused and super().has_room(queue)

    def dispatch(self, queue: ClassicQueue, effect: Effect) -> None:
        """See `ClassicHost`: a paused node tells clients nothing."""
        if self.is_paused:
            self._kept.append((queue, effect))
        else:
            super().dispatch(queue, effect)

    # --- the majority --------------------------------------------------------------------

    def on_node_up(self, node: int) -> None:
        """See `QueueHost`."""
        self._look()
        super().on_node_up(node)

    def on_node_down(self, node: int) -> None:
        """See `QueueHost`."""
        # First: what the node's clients held would be handed out again.
        self._look()
        super().on_node_down(node)

    def on_suspect(self, node: int) -> None:
        """See `QueueHost`."""
        self._look()

    def _on_tick(self) -> None:
        self._look()
        super()._on_tick()
        since = self._lost_ms
        if self.is_paused and since is not None:
            if self.clock.monotonic_ms() - since > WAIT_MS_MAX:
                self._refuse_waiting()
        elif self._giving_way:
            self._give_way()

    def _look(self) -> None:
        now = self.clock.monotonic_ms()
        if not self._parts.has_majority():
            self._losses += 1
            self._reading_ms = None
            if self._lost_ms is None:
                self._lost_ms = now
                self._giving_way.clear()
                self.note("classic.minority", handling=self._handling)
                self._tell_clients()
        elif self._lost_ms is not None and (
            self._reading_ms is None or now - self._reading_ms > READ_AGAIN_MS
        ):
            self._reading_ms = now
            losses = self._losses
            self._parts.read_tree(lambda _reply, error: self._on_read(losses, error))

    def _on_read(self, losses: int, error: BrokerError | None) -> None:
        if losses != self._losses or self._lost_ms is None:
            return
        self._reading_ms = None
        if error is not None or not self._parts.has_majority():
            return
        self._lost_ms = None
        self.note("classic.majority", handling=self._handling)
        self._tell_clients()
        if self._handling == AUTOHEAL:
            self._giving_way = {group: ring.member for group, ring in self._rings.items()}
            self._give_way()

    def _tell_clients(self) -> None:
        """Queues stand still, or go on."""
        now_ms = self.now_ms()
        kept, self._kept = self._kept, []
        for owner, effect in kept:
            if owner.ended is None:
                self.dispatch(owner, effect)
        for queue in self._running():
            self._tell_flow(queue)
            if not queue.stands_still:
                self.contain(queue, lambda queue=queue: queue.settle_round(now_ms))  # type: ignore[misc]
        for handle in list(self.queues.values()):
            is_waiting = isinstance(handle, MirroredHandle) and handle.waits_since_ms is not None
            if isinstance(handle, RemoteQueue) and handle.ended is None and not is_waiting:
                handle.on_room(handle.record.home)

    # --- pause_minority ------------------------------------------------------------------

    def _refuse_waiting(self) -> None:
        """Answers clients of queues that have stood still for too long."""
        for queue in self._running():
            handle = self._fronts.get(queue.group, queue)
            self.contain(queue, lambda q=queue, h=handle: _refuse(q, h))  # type: ignore[misc]

    # --- autoheal ------------------------------------------------------------------------

    def _give_way(self) -> None:
        """Has copies of this node leave their rings where another member has all: they begin anew.
        Proposed again until the tree has it: another change may come first."""
        for group, number in list(self._giving_way.items()):
            ring, known = self._rings.get(group), self._records.get(group)
            view = known[0].view if known is not None else None
            is_member = ring is not None and ring.member == number
            if is_member and view is not None and set(view.synchronised) - {number}:
                self._propose(group, view.with_failed(number))
            else:
                del self._giving_way[group]


def _refuse(queue: LocalQueue, handle: ClassicQueue) -> None:
    """Answers what clients wait for as if the queue were on another node: publishes are refused,
    consumers end. What is in the queue stays."""
    for each in (queue, handle):
        if each.builder.used:
            each.builder.discard_unsent()
    error = queue.host.home_down(queue.record)
    now_ms = queue.host.now_ms()
    for client in [each for each in handle.clients.values() if each.is_waiting]:
        session = client.session
        handle.tell(client, lambda told: told.begin_again(error))
        queue.machine.session_down(session, now_ms)
    queue._carry_out()
