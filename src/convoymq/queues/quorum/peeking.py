"""One ready message of a quorum queue, by its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.errors import Unavailable
from convoymq.queues.quorum.runs import Run
from convoymq.queues.reservation_reads import ReservedRun

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue

TRIES = 3


def find(machine: QuorumMachine, position: int) -> Run | None:
    """Returns a run that begins with the ready message at a position, counted from 1; None = there
    is none. Cost: O(runs before it)."""
    left = position - 1
    for run in machine.backlog.in_order():
        count = run[3]
        if left < count:
            size = run[4] - run[4] * left // count
            return (*run[:2], run[2] + left, count - left, size, *run[5:])
        left -= count
    return None


def peek(queue: QuorumQueue, machine: QuorumMachine, position: int) -> ReservedRun | None:
    """Returns the ready message at a position as a run of one; None = there is none. Raises
    Unavailable."""
    for _ in range(TRIES):
        run = find(machine, position)
        if run is None:
            return None
        index, command, first, _, _, acquired_count, failed, _ = run
        entry = queue.entry(index)
        if entry is not None:
            return (entry.data, command, first, 1, position - 1, entry.time_ms, acquired_count,
                    failed)  # fmt: skip
    raise Unavailable("the message cannot be read here")
