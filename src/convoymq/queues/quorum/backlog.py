# cython: annotation_typing=False
"""The messages of a quorum queue: those that are ready, and how many are elsewhere.

What is `fresh` was never handed out. What came back is in `returned`, which is served first; or in
`requeued`, when a client gave it back unfailed to a queue without a delivery limit: then its turn
comes behind all that was in the queue by then.

Invariants: published = ready + unacked + acked + purged + dropped; `fresh` is in the order of the
log.
"""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.queues.quorum import runs
from convoymq.replication.machine import NEVER

OVER_DELIVERY_LIMIT = "delivery_limit"
REJECTED = "rejected"


class Backlog:
    """Ready messages and the counters of all messages."""

    __slots__ = (
        "acked",
        "delivered",
        "delivery_limit",
        "dropped",
        "fresh",
        "published",
        "purged",
        "redelivered",
        "requeued",
        "returned",
        "returns",
        "unacked",
        "unacked_bytes",
    )

    def __init__(self, delivery_limit: int) -> None:
        self.delivery_limit = delivery_limit
        self.fresh = runs.Fifo(False)
        self.returned = runs.Fifo(True)
        #: What came back to the tail: each group of it behind the messages that were fresh then.
        self.requeued = runs.Tail()
        self.unacked = 0
        self.unacked_bytes = 0
        self.published = 0
        self.delivered = 0
        self.acked = 0
        self.returns = 0
        self.redelivered = 0
        self.purged = 0
        self.dropped: dict[str, int] = {OVER_DELIVERY_LIMIT: 0, REJECTED: 0}

    # ---------------------------------------------------------------- ready messages

    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.fresh.messages + self.returned.messages + self.requeued.messages

    def ready_bytes(self) -> int:
        """Body bytes of the messages that wait."""
        return int(self.fresh.size + self.returned.size + self.requeued.size)

    def ready_runs(self) -> list[runs.Run]:
        """All that is ready, FIFO by FIFO. Cost: O(runs)."""
        return [*self.returned.runs(), *self.requeued.runs(), *self.fresh.runs()]

    def take(self, limit: int) -> runs.Run:
        """Removes at most `limit` messages of the next run. There must be one."""
        source = self.returned
        if not source.messages:
            source = self.fresh
            if self.requeued.messages:
                ahead = self.requeued.ahead(self.published - self.fresh.messages)
                if ahead:
                    limit = min(limit, ahead)
                else:
                    source = self.requeued
        assert source.messages, "nothing is ready"
        run = source.take(limit)
        count = run[3]
        self.delivered += count
        if run[5]:
            self.redelivered += count
        return run

    def take_into(self, held: runs.CheckedOut, first_id: int, limit: int, runs_max: int) -> int:
        """Moves at most `limit` messages, in at most `runs_max` runs, to `held`, under ids from
        `first_id` on; returns how many."""
        taken = again = pieces = 0
        while taken < limit and pieces < runs_max and self.ready():
            source, room = self._next_source()
            moved, parts = held.take_from(
                source, first_id + taken, min(limit - taken, room), runs_max - pieces
            )
            assert moved > 0, "a message is ready and was not taken"
            taken += moved
            pieces += parts
            if source is not self.fresh:
                again += moved
        assert taken <= limit, "more was taken than was asked for"
        self.delivered += taken
        self.redelivered += again
        return int(taken)

    def _next_source(self) -> tuple[runs.Fifo, int]:
        """Where the next message is, and how many of them may be taken there in a row. There must
        be one."""
        if self.returned.messages:
            return self.returned, self.returned.messages
        if self.requeued.messages:
            ahead = self.requeued.ahead(self.published - self.fresh.messages)
            return (self.fresh, ahead) if ahead else (self.requeued, self.requeued.together())
        return self.fresh, self.fresh.messages

    def purge(self) -> int:
        """Drops what is ready; returns how many messages."""
        count = self.ready()
        self.purged += count
        self.fresh.clear()
        self.returned.clear()
        self.requeued.clear()
        assert self.purged <= self.published, "more was purged than published"
        assert not self.ready(), "messages were left by a purge"
        return count

    # ---------------------------------------------------------------- checked-out messages

    def hold(self, messages: int, size: int) -> None:
        """Messages that were taken are held by a consumer or a reservation."""
        assert messages >= 0 and size >= 0, "less than nothing is held"  # noqa: PT018
        self.unacked += messages
        self.unacked_bytes += size

    def settle(self, messages: int, size: int) -> None:
        """Messages that were held are acknowledged."""
        self.acked += messages
        self.unacked -= messages
        self.unacked_bytes -= size
        assert self.unacked >= 0, "more was settled than is checked out"
        assert self.unacked_bytes >= 0, "more bytes were settled than are checked out"
        assert self.acked <= self.published, "more was settled than published"

    def give_back(self, run: runs.Run, failed: int) -> runs.Run | None:
        """Takes a run back, behind all that came back before. Returns it as it is now when it has
        failed too often: then it is dropped instead."""
        index, offset, first, count, size, acquired_count, failed_delivery_count = run
        self._came_back(count, size)
        acquired_count += 1
        failed_delivery_count += failed
        if 0 <= self.delivery_limit < failed_delivery_count:
            self._drop(count, OVER_DELIVERY_LIMIT)
            return (index, offset, first, count, size, acquired_count, failed_delivery_count)
        self.returned.push(index, offset, first, count, size, acquired_count, failed_delivery_count)
        return None

    def requeue(self, run: runs.Run) -> None:
        """Takes a run back, behind all that is in the queue."""
        index, offset, first, count, size, acquired_count, failed_delivery_count = run
        self._came_back(count, size)
        self.requeued.requeue(
            self.published,
            index,
            offset,
            first,
            count,
            size,
            acquired_count + 1,
            failed_delivery_count,
        )

    def _came_back(self, count: int, size: int) -> None:
        self.unacked -= count
        self.unacked_bytes -= size
        self.returns += count
        assert self.unacked >= 0, "more came back than is checked out"
        assert self.unacked_bytes >= 0, "more bytes came back than are checked out"

    def reject(self, run: runs.Run) -> None:
        """Drops a run that was held."""
        self.unacked -= run[3]
        self.unacked_bytes -= run[4]
        assert self.unacked >= 0, "more was rejected than is checked out"
        assert self.unacked_bytes >= 0, "more bytes were rejected than are checked out"
        self._drop(run[3], REJECTED)

    def _drop(self, count: int, reason: str) -> None:
        """Where messages leave other than by settling; dead-lettering takes them from here."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    # ---------------------------------------------------------------- the log

    def live_ranges(self, held: Iterable[runs.CheckedOut]) -> list[tuple[int, int]]:
        """See `Machine.live_ranges`; `held`: what consumers and reservations hold.

        What is fresh was published in one range of the log, so it is one range, with the few small
        entries that lie between; everything else is named entry by entry.
        """
        needed = set(self.returned.indexes())
        needed.update(self.requeued.indexes())
        for part in held:
            needed.update(part.indexes())
        spans = [(index, index) for index in needed]
        if self.fresh.messages:
            spans.append((self.fresh.first_index(), self.fresh.last_index()))
        spans.sort()
        made: list[tuple[int, int]] = []
        low = 0
        high = -1
        for start, end in spans:
            if high < 0:
                low, high = start, end
            elif start <= high + 1:
                high = max(high, end)
            else:
                made.append((low, high))
                low, high = start, end
        if high >= 0:
            made.append((low, high))
        return made

    def oldest_live(self, held: Iterable[runs.CheckedOut]) -> int:
        """See `Machine.oldest_live`: messages that came back may lie before it."""
        oldest = NEVER
        for waiting in (self.fresh, self.returned, self.requeued):
            if waiting.messages:
                oldest = min(oldest, waiting.first_index())
        for part in held:
            if part.messages:
                oldest = min(oldest, part.first_index())
        return oldest

    # ---------------------------------------------------------------- looking at it

    def run_count(self) -> int:
        """Runs that are ready."""
        return int(self.fresh.run_count() + self.returned.run_count() + self.requeued.run_count())

    def memory_bytes(self) -> int:
        """Bytes of the packed index of what is ready."""
        ready = self.fresh.memory_bytes() + self.returned.memory_bytes()
        return int(ready + self.requeued.memory_bytes())
