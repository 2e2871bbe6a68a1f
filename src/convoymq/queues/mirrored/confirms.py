# cython: annotation_typing=False
"""Writes of a master that wait for its own disk and for its mirrors. Pure.

A write is done when the master's disk has it and every mirror that takes part has said that it
stored the broadcast with it. Writes are done in their order. A mirror that takes part no more is
not waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Done = Callable[[Exception | None], None]


class Write:
    """One write of the master's log."""

    __slots__ = ("done", "number", "written")

    def __init__(self, number: int, done: Done) -> None:
        self.number = number
        self.done = done
        self.written = False


class Confirms:
    """See the module text."""

    def __init__(self) -> None:
        self.stored: dict[int, int] = {}
        """Mirror that takes part -> number of the last broadcast that it has stored."""
        self._waiting: deque[Write] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, member: int, number: int) -> None:
        """From now on a mirror takes part: in the broadcasts after `number`."""
        self.stored[member] = number

    def forget(self, member: int) -> None:
        """A mirror takes part no more."""
        self.stored.pop(member, None)
        self._release()

    def on_stored(self, member: int, number: int) -> None:
        """A mirror has stored all broadcasts up to a number."""
        known = self.stored.get(member)
        if known is not None and number > known:
            self.stored[member] = number
            self._release()

    def add(self, number: int, done: Done) -> Write:
        """A write begins whose records went out with broadcast `number`, or before."""
        write = Write(number, done)
        self._waiting.append(write)
        return write

    def withdraw(self, write: Write) -> None:
        """Forgets a write of nothing."""
        self._waiting.remove(write)

    def on_written(self, write: Write, error: Exception | None) -> None:
        """The master's own disk has a write, or failed."""
        if error is not None:
            # What follows is refused with it: nobody waits for the mirrors.
            self._waiting.remove(write)
            write.done(error)
            return
        write.written = True
        self._release()

    def has_stored(self, number: int) -> bool:
        """Returns whether every mirror that takes part has stored a broadcast."""
        return all(stored >= number for stored in self.stored.values())

    def _release(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0].written and self.has_stored(waiting[0].number):
            waiting.popleft().done(None)
