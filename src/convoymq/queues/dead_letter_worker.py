"""Moves dead letters at least once (ADR 0044): which message goes to which queues, when it is tried
again, when it is done. Sans-IO: the shell takes messages, routes and publishes them, and tells.

A message:

    take --> to be routed --routed--> under way --all confirmed--> settled
                  ^      \\--no route, none confirmed--> waits     ^
                  |       \\--no route, one confirmed--------------+
                  |                        | a queue refuses, or is gone
                  +----- due --------------+---> waits

What waits is due after 1 s, 2 s, 4 s … at most the confirm time-out. A message under way is due
after the time-out: its route is looked at again, and queues that are not in it any more are not
waited for. It is published only to queues that have neither confirmed it nor are about to.

Invariants: at most `prefetch` messages are here; numbers are taken in ascending order, each once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

RETRY_FIRST_MS = 1_000


class _Moving:
    """One message."""

    __slots__ = ("asked", "confirmed", "due_ms", "pause_ms", "refused", "waits_for")

    def __init__(self, now_ms: int) -> None:
        self.asked: set[int] = set()
        """Groups that have not answered yet."""
        self.waits_for: set[int] = set()
        """Groups of them that were in the route when it was looked at last."""
        self.confirmed: set[int] = set()
        self.refused = False
        """A queue of the route did not take it."""
        self.due_ms = now_ms
        """Time when it is to be routed (again)."""
        self.pause_ms = RETRY_FIRST_MS


class DeadLetterWorker:
    """See the module text. Targets are numbers of groups, times are monotonic ms.

    Args:
        prefetch: how many messages may be here.
        timeout_ms: after this time without all confirms a message is routed again.
    """

    def __init__(self, prefetch: int, timeout_ms: int) -> None:
        assert prefetch > 0, "nothing could be moved"
        self.prefetch = prefetch
        self.timeout_ms = timeout_ms
        self.next_number = 0
        """The first number that was not taken yet."""
        self._moving: dict[int, _Moving] = {}
        self._settled: list[int] = []

    def __len__(self) -> int:
        return len(self._moving)

    @property
    def room(self) -> int:
        """Returns how many more messages may be taken."""
        return self.prefetch - len(self._moving)

    def take(self, number: int, now_ms: int) -> None:
        """A message is to be moved."""
        assert number >= self.next_number, "a dead letter is taken twice"
        assert self.room > 0, "more is taken than there is room for"
        self.next_number = number + 1
        self._moving[number] = _Moving(now_ms)

    def skip_to(self, number: int) -> None:
        """Nothing that waits has a number below this one."""
        self.next_number = max(self.next_number, number)

    def due(self, now_ms: int) -> list[int]:
        """Returns the messages that are to be routed now, ascending."""
        return sorted(n for n, moving in self._moving.items() if moving.due_ms <= now_ms)

    def next_due_ms(self) -> int | None:
        """Returns when the next message is due; None: nothing is here."""
        return min((moving.due_ms for moving in self._moving.values()), default=None)

    def routed(self, number: int, route: Collection[int], now_ms: int) -> list[int]:
        """Returns the groups to which a message is to be published now."""
        moving = self._moving[number]
        moving.refused = False
        moving.waits_for = moving.asked.intersection(route)
        if not route and not moving.confirmed:
            self._wait(moving, now_ms)
            return []
        fresh = [g for g in route if g not in moving.confirmed and g not in moving.asked]
        moving.asked.update(fresh)
        moving.waits_for.update(fresh)
        if not moving.waits_for:
            self._settle(number)
        else:
            moving.due_ms = now_ms + self.timeout_ms
        return fresh

    def failed(self, number: int, now_ms: int) -> None:
        """A message cannot be routed or read now."""
        self._wait(self._moving[number], now_ms)

    def dropped(self, number: int) -> None:
        """A message goes nowhere, by rule."""
        self._settle(number)

    def answered(self, number: int, group: int, ok: bool, now_ms: int) -> None:
        """A queue has confirmed a message, or refused it, or it is not known what became of it."""
        moving = self._moving.get(number)
        if moving is None:
            return
        moving.asked.discard(group)
        moving.waits_for.discard(group)
        if ok:
            moving.confirmed.add(group)
        else:
            moving.refused = True
        if moving.waits_for:
            return
        if moving.refused:
            self._wait(moving, now_ms)
        else:
            self._settle(number)

    def _wait(self, moving: _Moving, now_ms: int) -> None:
        moving.due_ms = now_ms + min(moving.pause_ms, self.timeout_ms)
        moving.pause_ms = min(moving.pause_ms * 2, self.timeout_ms)

    def _settle(self, number: int) -> None:
        del self._moving[number]
        self._settled.append(number)

    def forget_below(self, number: int) -> None:
        """The queue has dropped what is below this number."""
        for gone in [n for n in self._moving if n < number]:
            del self._moving[gone]
        self.next_number = max(self.next_number, number)

    def take_settled(self) -> list[int]:
        """Ranges (first, last, …) of the numbers that are done since the last call."""
        made = ranges_of(self._settled)
        self._settled.clear()
        return made


def ranges_of(numbers: Iterable[int]) -> list[int]:
    """Numbers as ranges: first, last, first, last, …, ascending."""
    made: list[int] = []
    for number in sorted(numbers):
        if made and made[-1] + 1 == number:
            made[-1] = number
        else:
            made += (number, number)
    return made
