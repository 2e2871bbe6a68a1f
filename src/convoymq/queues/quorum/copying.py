"""Messages of a quorum queue for a backup, page by page (ADR 0208)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from convoymq.model.clock import Timer
from convoymq.model.errors import Unavailable
from convoymq.queues.copying import CopiedPage, page_of
from convoymq.queues.interface import StoredRun
from convoymq.queues.quorum.runs import Run

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue

KEPT_MS = 60_000
"""Time for which the list of a copy is kept for its next page."""


def stored_places(machine: QuorumMachine) -> list[tuple[bool, Run]]:
    """Returns everything in the queue in the order of its log, dead letters under way too, and
    whether somebody holds it. Cost: O(runs log runs)."""
    made = [(session is not None, run) for session, _, _, run in machine.state_snapshot()]
    made += [(True, run) for _, run in machine.dead_letters.held.held()]
    return sorted(made, key=lambda place: place[1][:3])


class Copying:
    """Copies of one queue, on the node that leads it. The list of a copy's messages is kept from
    one page to the next: otherwise each page would cost a walk over the whole queue."""

    def __init__(self, queue: QuorumQueue) -> None:
        self._queue = queue
        self._upto = -1
        self._runs: list[Run] = []
        self._timer: Timer | None = None

    def stored(self, machine: QuorumMachine) -> Iterator[StoredRun]:
        """See `Queue.stored_runs`."""
        for is_held, run in stored_places(machine):
            block = self._queue.entry_bytes(run[0])
            if block is None:
                raise self._unreadable()
            yield StoredRun(block, run[1], run[2], run[3], run[5] + is_held)

    def page(self, machine: QuorumMachine, after: int, upto: int) -> CopiedPage:
        """See `Queue.copy_page`."""
        if upto > machine.index:
            raise Unavailable("the replica is behind")
        if upto < 0 or upto != self._upto:
            self._runs = [run for _, run in stored_places(machine)]
            self._upto = machine.index if upto < 0 else upto
        found = page_of(self._behind(machine, after), after, self._upto)
        self.forget() if found.is_last else self._keep()
        return found

    def _keep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._queue.clock.call_later(KEPT_MS, self.forget)

    def forget(self) -> None:
        """Ends the copy, or one that does not go on."""
        self._upto, self._runs = -1, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _behind(self, machine: QuorumMachine, after: int) -> Iterator[StoredRun]:
        runs = self._runs
        for run in runs[bisect_right(runs, after, key=lambda run: run[0]) :]:
            block = self._queue.entry_bytes(run[0])
            if block is not None:
                yield StoredRun(block, *run[1:4], run[5], position=run[0])
            elif any(place[1][0] == run[0] for place in stored_places(machine)):
                raise self._unreadable()

    def _unreadable(self) -> Unavailable:
        return Unavailable(f"a message of {self._queue.subject} cannot be read here")
