"""Looks at one ready message of a queue without taking it: asked for on any node, read by the node
that leads the queue."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.broker.group_requests import AGAIN, DONE, NOT_LEADER, Answer, GroupRequests
from convoymq.broker.local_queues import LocalQueues
from convoymq.kernels.batch import record
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PeerError, PreconditionFailed
from convoymq.routing.queue_types import PlacementKind

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message as it stands in a queue."""

    record: bytes
    """As the log has it (docs/formats/entries-and-frames.md)."""
    acquired_count: int
    """Number of earlier deliveries."""
    failed_delivery_count: int


class Peeking:
    """See the module text. One per node."""

    def __init__(self, local: LocalQueues, requests: GroupRequests) -> None:
        self._local = local
        self._requests = requests
        requests.serve("peek", self._on_peek)

    async def peek(self, queue: QueueRecord, position: int) -> Peeked | None:
        """Returns the ready message at a position, counted from 1 in the order of delivery; None =
        there is none.

        Raises:
            PreconditionFailed: the queue is no quorum queue.
            Unavailable: nobody leads it, or it did not answer in time.
        """
        if queue.placement is not PlacementKind.RAFT:
            raise PreconditionFailed(f"Cannot peek into a {queue.type.value} queue")
        found = await self._requests.ask_leader(
            queue.group, queue.members, "peek", position, timeout_s=TIMEOUT_S
        )
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != 3:
            raise PeerError("malformed answer about a message")
        return Peeked(*found)

    async def _on_peek(self, group: int, arguments: list[object]) -> Answer:
        (position,) = arguments
        assert isinstance(position, int)
        queue = self._local.led(group)
        if queue is None:
            return AGAIN, NOT_LEADER
        run = await queue.peek(position)
        if run is None:
            return DONE, None
        block, command, first, _, _, _, acquired_count, failed_delivery_count = run
        return DONE, [record(block, command, first), acquired_count, failed_delivery_count]
