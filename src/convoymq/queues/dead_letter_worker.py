"""Moves dead letters at least once (ADR 0044): which messages go to which queues, when they are
tried again, when they are done. Sans-IO: the shell takes messages, routes and publishes them, and
tells.

A message:

    take --> to be routed --routed--> under way --all confirmed--> settled
                  ^      \\--no route, none confirmed--> waits     ^
                  |       \\--no route, one confirmed--------------+
                  |                        | a queue refuses, or is gone
                  +----- due --------------+---> waits

Neighbouring messages of which the same is known are one run; what becomes of a part of it makes
that part a run of its own.

What waits is due after 1 s, 2 s, 4 s … at most the confirm time-out. A message under way is due
after the time-out: its route is looked at again, and queues that are not in it any more are not
waited for. It is published only to queues that have neither confirmed it nor are about to.

Without a `prefetch` the number of messages that may be here follows the targets: it begins with
`WINDOW_FIRST`, doubles whenever it was used up and confirms came within `FAST_MS`, up to
`WINDOW_MAX`, and begins anew when a queue refuses. `BYTES_MAX` bounds what is under way beyond
`WINDOW_FIRST` messages then.

Invariants: runs do not overlap; at most `window` messages are here, unless it fell meanwhile;
numbers are taken in ascending order, each once.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterator

RETRY_FIRST_MS = 1_000
WINDOW_FIRST = 32
"""RabbitMQ's prefetch."""
WINDOW_MAX = 4_096
FAST_MS = 250
BYTES_MAX = 4 << 20


class _Run:
    """Messages `first` … `first + count - 1`."""

    __slots__ = (
        "asked", "asked_ms", "confirmed", "count", "due_ms", "first", "pause_ms", "refused", "size",
        "waits_for",
    )  # fmt: skip

    def __init__(self, first: int, count: int, now_ms: int) -> None:
        self.first = first
        self.count = count
        self.size = 0
        """Bytes under way."""
        self.asked: set[int] = set()
        """Groups that have not answered yet."""
        self.waits_for: set[int] = set()
        """Groups of them that were in the route when it was looked at last."""
        self.confirmed: set[int] = set()
        self.refused = False
        """A queue of the route did not take it."""
        self.due_ms = now_ms
        """Time when it is to be routed (again)."""
        self.asked_ms = now_ms
        """Time when it was published last."""
        self.pause_ms = RETRY_FIRST_MS

    @property
    def end(self) -> int:
        """Returns the first number above it."""
        return self.first + self.count

    def split(self, count: int) -> _Run:
        """Takes all but the first `count` messages off, and returns them."""
        rest = _Run(self.first + count, self.count - count, self.due_ms)
        rest.size = self.size * rest.count // self.count
        rest.asked = set(self.asked)
        rest.waits_for = set(self.waits_for)
        rest.confirmed = set(self.confirmed)
        rest.refused = self.refused
        rest.asked_ms = self.asked_ms
        rest.pause_ms = self.pause_ms
        self.size -= rest.size
        self.count = count
        return rest


class DeadLetterWorker:
    """See the module text. Targets are numbers of groups, times are monotonic ms.

    Args:
        prefetch: how many messages may be here; 0 = as many as the targets take quickly.
        timeout_ms: after this time without all confirms a message is routed again.
    """

    def __init__(self, prefetch: int, timeout_ms: int) -> None:
        assert prefetch >= 0, "nothing could be moved"
        self.window = prefetch or WINDOW_FIRST
        """Number of messages that may be here."""
        self.timeout_ms = timeout_ms
        self.next_number = 0
        """The first number that was not taken yet."""
        self.bytes = 0
        """Under way."""
        self._adapts = not prefetch
        self._used_up = False
        """The window was, since it has grown."""
        self._grows_from = 0
        """Number from which on a message was taken since: its confirm lets the window grow."""
        self._count = 0
        self._firsts: list[int] = []
        """Of the runs, ascending."""
        self._runs: dict[int, _Run] = {}
        """By their first number."""
        self._settled: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        """Returns how many more messages may be taken."""
        return max(0, self.window - self._count)

    @property
    def is_full(self) -> bool:
        """Returns whether so much is under way that nothing else may be published."""
        return self._adapts and self.bytes >= BYTES_MAX and self._count > WINDOW_FIRST

    def take(self, first: int, count: int, now_ms: int) -> None:
        """Neighbouring messages are to be moved."""
        assert first >= self.next_number, "a dead letter is taken twice"
        assert 0 < count <= self.room, "more is taken than there is room for"
        self.next_number = first + count
        self._count += count
        self._used_up = self._used_up or not self.room
        self._add(_Run(first, count, now_ms))

    def skip_to(self, number: int) -> None:
        """Nothing that waits has a number below this one."""
        self.next_number = max(self.next_number, number)

    def due(self, now_ms: int) -> list[tuple[int, int]]:
        """Returns the messages that are to be routed now, as (first, count), ascending."""
        runs, full = self._runs, self.is_full
        return [
            (n, runs[n].count)
            for n in self._firsts
            if runs[n].due_ms <= now_ms and (runs[n].asked or not full)
        ]

    def next_due_ms(self) -> int | None:
        """Returns when the next message is due; None: nothing is to be done before an answer."""
        full = self.is_full
        return min(
            (run.due_ms for run in self._runs.values() if run.asked or not full), default=None
        )

    def missing(self, first: int, count: int) -> Iterator[int]:
        """Yields ranges (first, last, …) of those of `count` numbers that are not here."""
        end = first + count
        for run in list(self._between(first, end)):
            if run.first > first:
                yield from (first, run.first - 1)
            first = run.end
        if first < end:
            yield from (first, end - 1)

    # --- what becomes of them --------------------------------------------------------------

    def routed(
        self, first: int, count: int, route: Collection[int], size: int, now_ms: int
    ) -> list[int]:
        """Returns the groups to which messages of one run, of `size` bytes, are to be published
        now."""
        run = self._part(first, count)
        run.refused = False
        run.waits_for = run.asked.intersection(route)
        if not route and not run.confirmed:
            self._wait(run, now_ms)
            return []
        fresh = [g for g in route if g not in run.confirmed and g not in run.asked]
        run.asked.update(fresh)
        run.waits_for.update(fresh)
        if not run.waits_for:
            self._settle(run)
        else:
            run.due_ms = now_ms + self.timeout_ms
            run.asked_ms = now_ms
            self.bytes += size - run.size
            run.size = size
        return fresh

    def failed(self, first: int, count: int, now_ms: int) -> None:
        """Messages of one run cannot be routed or read now."""
        self._wait(self._part(first, count), now_ms)

    def dropped(self, first: int, count: int) -> None:
        """Messages of one run go nowhere, by rule."""
        self._settle(self._part(first, count))

    def gone(self, first: int, count: int) -> None:
        """The queue has none of these messages any more."""
        for run in self._cut(first, first + count):
            self._remove(run)

    def answered(self, first: int, last: int, group: int, ok: bool, now_ms: int) -> int:
        """A queue has confirmed messages, or refused them, or it is not known what became of them.
        Returns of how many it was asked."""
        count = 0
        for run in self._cut(first, last + 1):
            if group not in run.asked:
                continue
            count += run.count
            run.asked.discard(group)
            run.waits_for.discard(group)
            if ok:
                run.confirmed.add(group)
            else:
                run.refused = True
            if run.waits_for:
                continue
            if run.refused:
                self._wait(run, now_ms)
            else:
                self._grow(run, now_ms)
                self._settle(run)
        if self._adapts and count and not ok:
            self.window = WINDOW_FIRST
            self._used_up = False
        return count

    def _grow(self, run: _Run, now_ms: int) -> None:
        """Lets the window grow, once for all that was taken since the last time."""
        if not self._adapts or not self._used_up or run.first < self._grows_from:
            return
        if now_ms - run.asked_ms <= FAST_MS:
            self.window = min(2 * self.window, WINDOW_MAX)
            self._used_up = False
            self._grows_from = self.next_number

    def _wait(self, run: _Run, now_ms: int) -> None:
        run.due_ms = now_ms + min(run.pause_ms, self.timeout_ms)
        run.pause_ms = min(run.pause_ms * 2, self.timeout_ms)
        self.bytes -= run.size
        run.size = 0

    def _settle(self, run: _Run) -> None:
        self._remove(run)
        self._settled.append((run.first, run.end - 1))

    def forget_below(self, number: int) -> None:
        """The queue has dropped what is below this number."""
        if self._firsts and self._firsts[0] < number:
            self.gone(0, number)
        self.next_number = max(self.next_number, number)

    def take_settled(self) -> list[int]:
        """Returns ranges (first, last, …) of the numbers that are done since the last call."""
        made: list[int] = []
        for first, last in sorted(self._settled):
            if made and made[-1] + 1 == first:
                made[-1] = last
            else:
                made += (first, last)
        self._settled.clear()
        return made

    # --- runs ------------------------------------------------------------------------------

    def _add(self, run: _Run) -> None:
        self._runs[run.first] = run
        insort(self._firsts, run.first)

    def _remove(self, run: _Run) -> None:
        del self._runs[run.first]
        del self._firsts[bisect_right(self._firsts, run.first) - 1]
        self._count -= run.count
        self.bytes -= run.size

    def _between(self, first: int, end: int) -> Iterator[_Run]:
        """Yields runs with numbers in first … end - 1, ascending."""
        firsts = self._firsts
        at = max(0, bisect_right(firsts, first) - 1)
        while at < len(firsts) and firsts[at] < end:
            run = self._runs[firsts[at]]
            if run.end > first:
                yield run
            at += 1

    def _cut(self, first: int, end: int) -> list[_Run]:
        """Returns the runs of `_between` that lie wholly inside; those that reach out are split."""
        found = list(self._between(first, end))
        if found and found[0].first < first:
            rest = found[0].split(first - found[0].first)
            self._add(rest)
            found[0] = rest
        if found and found[-1].end > end:
            self._add(found[-1].split(end - found[-1].first))
        return found

    def _part(self, first: int, count: int) -> _Run:
        """Returns messages of a run as one."""
        (run,) = self._cut(first, first + count)
        assert (run.first, run.count) == (first, count), "messages of one run are expected"
        return run
