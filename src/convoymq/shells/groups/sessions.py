"""Numbers of sessions: node (8 bits), incarnation (32 bits), counter (24 bits).

The counter starts at 1 and rises. A node that lives long enough comes to its end; then it starts
over and leaves out what was still in use at that moment. Everything given out since the start over
is smaller than what comes next, so one look per round is enough. Ended sessions may be numbered
again: what opens a session once is its opening number (`queues.sessions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from convoymq.model.errors import ResourceExhausted

COUNTER_MAX = (1 << 24) - 1


class SessionNumbers:
    """Gives out session numbers; call it.

    Args:
        live: all sessions of this node that are in use.
    """

    def __init__(
        self,
        node: int,
        incarnation: int,
        live: Callable[[], Iterable[int]],
        counter_max: int = COUNTER_MAX,
    ) -> None:
        self.live = live
        self._base = node << 56 | incarnation << 24
        self._counter_max = counter_max
        self._last = 0
        self._taken: frozenset[int] = frozenset()

    def __call__(self) -> int:
        """Returns a number that no live session has. Raises ResourceExhausted."""
        for _ in range(2):
            while self._last < self._counter_max:
                self._last += 1
                if self._base | self._last not in self._taken:
                    return self._base | self._last
            self._last = 0
            self._taken = frozenset(self.live())
        raise ResourceExhausted("all session numbers of this node are in use")
