"""Sharing: of the event loop between large frames and everything else, and of memory.

`Turns` hands out one turn per round of the loop, to whoever has waited longest: between two turns
every other socket and timer is served once, and while other clients are active the process rests as
well. `Slice` tells its user when a turn is over. `Budget` bounds bytes over all connections, first
come, first served. ADR 0010 has the reasons.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

ACTIVE_S = 0.1
"""Others count as active for so long after a byte of theirs."""
QUIET_FACTOR = 4
"""A turn lasts so much longer while nobody else is active: each one costs a round of the loop."""


class Turns:
    """One turn of the loop at a time, in the order of the calls.

    Args:
        slice_s: how long a turn lasts while others are active.
        rest_s: pause between the end of a turn and the next one then.
        activity: a number that changes when others send or receive.
    """

    def __init__(
        self, slice_s: float, rest_s: float = 0.0, activity: Callable[[], int] = int
    ) -> None:
        self.slice_s = slice_s
        self.turn_s = slice_s
        """Length of the next turn."""
        self.rest_s = rest_s
        self.given = 0
        self._activity = activity
        self._seen = activity()
        self._active_until = 0.0
        self._next_at = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def others_active(self) -> bool:
        """Returns whether others sent or received anything a moment ago."""
        now = time.perf_counter()
        count = self._activity()
        if count != self._seen:
            self._seen = count
            self._active_until = now + ACTIVE_S
        return now < self._active_until

    async def turn(self) -> None:
        """Waits for the next turn."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._schedule(loop)
        await waiter

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """A process that never sleeps is the one that the system makes wait when a byte comes for
        it: beside others' work turns leave gaps."""
        active = self.others_active()
        self.turn_s = self.slice_s if active else self.slice_s * QUIET_FACTOR
        pause = self._next_at - time.perf_counter() if active else 0.0
        if pause > 0:
            loop.call_later(pause, self._give, loop)
        else:
            loop.call_soon(self._give, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.given += 1
                self._next_at = time.perf_counter() + self.turn_s + self.rest_s
                waiter.set_result(None)
                break
        if self._waiting:
            self._schedule(loop)
        else:
            self._scheduled = False


class Slice:
    """The time of one user: `await slice.check()` between steps gives the loop back in time."""

    __slots__ = ("_turns", "_until")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._until = 0.0

    async def check(self) -> None:
        """Goes on at once while there is time left in the turn."""
        if time.perf_counter() >= self._until:
            await self._turns.turn()
            self._until = time.perf_counter() + self._turns.turn_s


class Budget:
    """Bytes that are shared by all; a want beyond the whole counts as the whole."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """Returns whether somebody waits."""
        return bool(self._waiting)

    async def take(self, wanted: int) -> int:
        """Waits until there is room and returns what was taken, to be given back."""
        size = min(wanted, self.limit)
        if not self._waiting and self.used + size <= self.limit:
            self.used += size
            return size
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(size)
            else:
                self._serve()
            raise
        return size

    def give_back(self, size: int) -> None:
        """Makes room for those that wait."""
        self.used -= size
        assert self.used >= 0
        self._serve()

    def _serve(self) -> None:
        waiting = self._waiting
        while waiting:
            size, waiter = waiting[0]
            if waiter.done():
                waiting.popleft()
                continue
            if self.used + size > self.limit:
                return
            waiting.popleft()
            self.used += size
            waiter.set_result(None)
