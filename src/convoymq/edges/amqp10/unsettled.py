# cython: annotation_typing=False
"""Deliveries of one session that wait for their outcome.

They lie in runs: deliveries of one link, whose ids and message ids follow each other. Runs are in
the order of their ids, numbered without the overflow of 32 bits from the oldest one on, so that a
range which names few of them costs little, however many there are and however wide it is.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead

if TYPE_CHECKING:
    from convoymq.edges.amqp10.sending import Sender


@dataclass(slots=True)
class Run:
    """Neighbouring deliveries of one link."""

    link: Sender
    first: int
    """Number of the first one; its last 32 bits are the delivery id."""
    message_id: int
    """Of the first one."""
    count: int

    @property
    def message_ids(self) -> tuple[int, int]:
        """Returns the first and the last message id."""
        return self.message_id, self.message_id + self.count - 1


class Unsettled:
    """See the module text."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        """By their numbers."""
        self._of: dict[Sender, int] = {}
        """Deliveries by link."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, delivery_id: int, link: Sender, message_id: int, count: int = 1) -> None:
        """Keeps deliveries."""
        runs, number = self._runs, delivery_id
        if runs:
            newest = runs[-1].first
            number = newest + ahead(delivery_id, newest)
        at = len(runs)
        if runs and number < newest:
            # They are back from a transaction.
            at = bisect_left(runs, number, key=lambda each: each.first)
        before = runs[at - 1] if at else None
        if (
            before is not None
            and before.link is link
            and before.first + before.count == number
            and before.message_id + before.count == message_id
        ):
            before.count += count
        else:
            runs.insert(at, Run(link, number, message_id, count))
        self._of[link] = self._of.get(link, 0) + count
        self._count += count

    def take(self, first: int, last: int) -> list[Run]:
        """Forgets the deliveries of a range of ids, and returns them."""
        count = ahead(last, first) + 1
        if count <= 0 or not self._runs:
            return []
        oldest, circle = self._runs[0].first, WINDOW_MAX + 1
        begin = oldest + (first - oldest) % circle
        found = self._take(begin, begin + count)
        # A range that begins before the oldest one reaches it from behind.
        return found + self._take(oldest, begin + count - circle)

    def take_of(self, link: Sender) -> list[tuple[int, int]]:
        """Forgets the deliveries of a link, and returns the ranges of their message ids."""
        count = self._of.pop(link, 0)
        if not count:
            return []
        found = [each.message_ids for each in self._runs if each.link is link]
        self._runs = [each for each in self._runs if each.link is not link]
        self._count -= count
        return found

    def take_before(self, delivery_id: int, link: Sender) -> list[Run]:
        """Forgets the deliveries of a link that were made before one with an id, and returns
        them."""
        runs = self._runs
        if not self._of.get(link):
            return []
        end = self._cut(runs[0].first + ahead(delivery_id, runs[0].first))
        found = [each for each in runs[:end] if each.link is link]
        runs[:end] = [each for each in runs[:end] if each.link is not link]
        count = sum(each.count for each in found)
        self._count -= count
        self._of[link] -= count
        if not self._of[link]:
            del self._of[link]
        return found

    def clear(self) -> None:
        """Forgets all."""
        self._runs.clear()
        self._of.clear()
        self._count = 0

    def _take(self, begin: int, end: int) -> list[Run]:
        if end <= begin:
            return []
        at = self._cut(begin)
        stop = self._cut(end)
        found = self._runs[at:stop]
        del self._runs[at:stop]
        for each in found:
            self._count -= each.count
            left = self._of[each.link] - each.count
            if left:
                self._of[each.link] = left
            else:
                del self._of[each.link]
        return found

    def _cut(self, number: int) -> int:
        """Returns where deliveries from a number on lie, apart from those before them."""
        runs = self._runs
        at = bisect_left(runs, number, key=lambda each: each.first)
        if at and runs[at - 1].first + runs[at - 1].count > number:
            before = runs[at - 1]
            count = number - before.first
            rest = replace(
                before,
                first=number,
                message_id=before.message_id + count,
                count=before.count - count,
            )
            before.count = count
            runs.insert(at, rest)
        return at
