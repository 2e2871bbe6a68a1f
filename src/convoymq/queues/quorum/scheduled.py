"""Delayed messages of a quorum queue, one by one, as management lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.batch import record as record_of
from convoymq.messages.record import head_of
from convoymq.model.errors import Unavailable
from convoymq.queues.interface import ScheduledMessage, ScheduledPlace

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue


def scheduled(
    queue: QuorumQueue, machine: QuorumMachine, after: ScheduledPlace | None, limit: int
) -> list[ScheduledMessage]:
    """At most `limit` messages behind a place, in the order in which they are due. Raises
    Unavailable: one cannot be read here. Cost: O(log runs) + O(messages listed)."""
    made: list[ScheduledMessage] = []
    start = (0, 0, 0) if after is None else (after.due_ms, after.entry, after.offset << 32)
    for due_ms, run in machine.waiting.rows(start):
        index, offset, first, count, size, acquired_count, failed_delivery_count, _mark = run
        for record in range(first, first + count):
            place = ScheduledPlace(due_ms, index, offset, record)
            if after is not None and place <= after:
                continue
            if len(made) == limit:
                return made
            block = queue.entry_bytes(index)
            if block is None:
                raise Unavailable("a message that waits cannot be read here")
            head = head_of(record_of(block, offset, record))
            made.append(
                ScheduledMessage(place, head, size // count, acquired_count, failed_delivery_count)
            )
    return made
