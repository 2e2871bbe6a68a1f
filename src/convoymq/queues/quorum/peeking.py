"""One ready message of a quorum queue, by its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.errors import Unavailable
from convoymq.queues.quorum.reservation_client import ready_runs
from convoymq.queues.reservation_reads import PAGE_ROWS_MAX, ReservedRun

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue

TRIES = 3


def find(machine: QuorumMachine, position: int) -> tuple[int, ...] | None:
    """A run that begins with the ready message at a position, counted from 1; None = there is none.
    Cost: O(runs before it)."""
    place = (0, 0, 0)
    left = position - 1
    while True:
        ready = ready_runs(machine, place, 0, PAGE_ROWS_MAX)
        if not ready:
            return None
        for _, run in ready:
            index, command, first, count, size, acquired_count, failed = run
            if left < count:
                rest = count - left
                size -= size * left // count
                return (index, command, first + left, rest, size, acquired_count, failed)
            left -= count
        place = (index, command, first + count)


def peek(queue: QuorumQueue, machine: QuorumMachine, position: int) -> ReservedRun | None:
    """The ready message at a position as a run of one; None = there is none. Raises Unavailable."""
    for _ in range(TRIES):
        run = find(machine, position)
        if run is None:
            return None
        index, command, first, _, _, acquired_count, failed = run
        entry = queue.entry(index)
        if entry is not None:
            return (entry.data, command, first, 1, position - 1, entry.time_ms, acquired_count,
                    failed)  # fmt: skip
    raise Unavailable("the message cannot be read here")
