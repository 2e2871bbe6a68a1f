# cython: annotation_typing=False
"""Flow control of links between nodes (ADR 0025): senders wait until a node takes bulk again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from convoymq.model.clock import Clock
from convoymq.model.rounds import run_each


class Waiting(Protocol):
    """Sender that has bulk frames for a node that takes none."""

    def on_room(self, node: int) -> None:
        """The node takes bulk again."""

    def on_lost(self, node: int) -> None:
        """The node is away."""


class _Line:
    """Senders that wait until a node takes bulk again, in order."""

    __slots__ = ("free_at", "items", "known")

    def __init__(self, now: int) -> None:
        self.items: deque[Waiting] = deque()
        self.known: set[Waiting] = set()
        self.free_at = now
        """Time when the node took bulk last, or the wait began."""


class CapacityQueues:
    """Waiting senders of each node that takes no bulk.

    Args:
        full: nodes whose links take no bulk now.
        on_failed: called with a sender that raised, and its error.
        silence_ms: a link on which nothing moved for so long is not held up, but silent.
    """

    __slots__ = ("_clock", "_full", "_lines", "_on_failed", "_silence_ms")

    def __init__(
        self,
        clock: Clock,
        full: set[int],
        on_failed: Callable[[Waiting, Exception], None],
        silence_ms: int,
    ) -> None:
        self._clock = clock
        self._full = full
        self._on_failed = on_failed
        self._silence_ms = silence_ms
        self._lines: dict[int, _Line] = {}

    def wait(self, node: int, item: Waiting) -> None:
        """Has `item.on_room(node)` called when a node that is full takes bulk again, once;
        `item.on_lost(node)` instead when it is lost."""
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _Line(self._clock.monotonic_ms())
        if item not in line.known:
            line.known.add(item)
            line.items.append(item)

    def on_room(self, node: int) -> None:
        """A node that was full takes bulk: waiting senders send in turn, until it is full."""
        line = self._lines.get(node)
        if line is None:
            return
        line.free_at = self._clock.monotonic_ms()
        run_each(self._in_turn(line, node), lambda item: item.on_room(node), self._on_failed)
        if not line.items and self._lines.get(node) is line:
            del self._lines[node]

    def _in_turn(self, line: _Line, node: int) -> Iterator[Waiting]:
        while line.items and node not in self._full:
            item = line.items.popleft()
            line.known.discard(item)
            yield item

    def is_held_up(self, node: int, now: int) -> bool:
        """Returns whether senders wait for the link to the node: it is full, but goes on."""
        line = self._lines.get(node)
        return line is not None and now - line.free_at < self._silence_ms

    def on_lost(self, node: int) -> None:
        """A node is away: no sender waits for it any more."""
        line = self._lines.pop(node, None)
        if line is not None:
            # Clients send again what was for the leader, when they know one.
            run_each(line.items, lambda item: item.on_lost(node), self._on_failed)
