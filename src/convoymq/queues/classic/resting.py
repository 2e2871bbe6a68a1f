# cython: annotation_typing=False
"""The classic queues of a node that are ticked: those that may have work (ADR 0211)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from convoymq.queues.classic.queue import ClassicQueue, LocalQueue

NEVER = 1 << 62
"""A queue that rests until this time needs no tick before its next command."""


class Ticked:
    """See the module text. A queue joins with whatever it carries out (`wake`), and leaves with a
    tick that has left nothing to do (`let_rest`), maybe until a time.

    Args:
        queues: the queues of the node, by group.
    """

    def __init__(self, queues: Mapping[int, ClassicQueue]) -> None:
        self._queues = queues
        self._awake: dict[LocalQueue, None] = {}
        self._due: list[tuple[int, int]] = []
        """Heap of (time, group) of queues that rest until a time."""
        self._first_due: dict[int, int] = {}
        """Group -> earliest time in the heap."""
        self.last_ms = 0
        """Time of the last tick."""

    def wake(self, queue: LocalQueue) -> None:
        """A queue may have work from now on."""
        if queue not in self._awake:
            self._awake[queue] = None
            # Until the last tick nothing came or left.
            queue.rates = queue.rates.after(self.last_ms)

    def is_awake(self, queue: LocalQueue) -> bool:
        """Returns whether a queue is ticked."""
        return queue in self._awake

    def begin(self, now_ms: int) -> list[LocalQueue]:
        """Begins a tick; returns the queues that take part."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, group = heappop(self._due)
            if self._first_due.get(group) == due_ms:
                del self._first_due[group]
            queue = self._queues.get(group)
            if queue is not None and queue.ended is None:
                queue.wake()
        self.last_ms = now_ms
        ended = [queue for queue in self._awake if queue.ended is not None]
        for queue in ended:
            del self._awake[queue]
        return [queue for queue in self._awake if not queue.stands_still]

    def let_rest(self, queue: LocalQueue, now_ms: int) -> None:
        """Has a queue be ticked no more that needs no tick."""
        until_ms = queue.rests_until(now_ms)
        if until_ms <= now_ms:
            return
        self._awake.pop(queue, None)
        group = queue.group
        if until_ms < self._first_due.get(group, NEVER):
            self._first_due[group] = until_ms
            heappush(self._due, (until_ms, group))
