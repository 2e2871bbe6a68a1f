"""Plan of a micro-batch: its size, and its cut into tasks. Pure: no clock, no broker."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from convoymq.spark.options import Limits

K = TypeVar("K", bound=Hashable)

PARTITIONS_MAX = 100_000
"""Tasks of one batch; more would drown Spark's scheduler."""


def allowed_rows(limits: Limits, rows: int, size_bytes: int) -> int:
    """Returns the number of rows that a batch may take of a backlog of `rows` rows and `size_bytes`
    bytes; at least one.

    A limit in bytes becomes one in rows by the mean size of the backlog's messages.
    """
    allowed = rows
    if limits.rows_max is not None:
        allowed = min(allowed, limits.rows_max)
    if limits.bytes_max is not None and size_bytes > limits.bytes_max:
        allowed = min(allowed, rows * limits.bytes_max // size_bytes)
    return min(rows, max(allowed, 1))


def share(limit: int, backlog: Mapping[K, int]) -> dict[K, int]:
    """Shares `limit` rows among backlogs in proportion to them.

    Returns:
        Rows for each key; they sum to `limit`, or to the whole backlog where that is less.
    """
    total = sum(backlog.values())
    if limit >= total:
        return dict(backlog)
    shares = {key: limit * rows // total for key, rows in backlog.items()}
    # What rounding left goes to the largest remainders; ties by name, so that repeats agree.
    left = limit - sum(shares.values())
    order = sorted(backlog, key=lambda key: (-(limit * backlog[key] % total), str(key)))
    for key in order[:left]:
        shares[key] += 1
    assert sum(shares.values()) == limit
    assert all(shares[key] <= backlog[key] for key in backlog)
    return shares


def split(
    ranges: Iterable[tuple[K, int, int]],
    partitions_min: int | None,
    records_max: int | None,
) -> list[tuple[K, int, int]]:
    """Cuts ranges [start, end) so that there are enough of them, and none is too large.

    Empty ranges go. Of a range that is cut, the parts differ by one row at most.

    Args:
        partitions_min: at least so many parts, if there are so many rows.
        records_max: at most so many rows in a part, up to PARTITIONS_MAX parts.
    """
    kept = [(key, start, end) for key, start, end in ranges if end > start]
    parts = [-(-(end - start) // records_max) if records_max else 1 for _, start, end in kept]
    wanted = min(partitions_min or 0, PARTITIONS_MAX)
    # The range with the largest parts is cut next.
    heap = [(-(end - start) / parts[i], i) for i, (_, start, end) in enumerate(kept)]
    heapq.heapify(heap)
    have = sum(parts)
    while have < wanted and heap:
        size, i = heapq.heappop(heap)
        if -size <= 1:
            break
        parts[i] += 1
        have += 1
        _, start, end = kept[i]
        heapq.heappush(heap, (-(end - start) / parts[i], i))
    made: list[tuple[K, int, int]] = []
    for (key, start, end), count in zip(kept, parts, strict=True):
        count = min(count, PARTITIONS_MAX)
        rows = end - start
        cuts = [start + rows * i // count for i in range(count + 1)]
        made += [(key, lo, hi) for lo, hi in pairwise(cuts) if hi > lo]
    return made


class TriggerDelay:
    """Holds batches back until they are worth it: `minOffsetsPerTrigger`, `maxTriggerDelay`.

    The first batch of a run is never held back, as Kafka's source does it: nobody knows how long
    its rows have waited already.
    """

    def __init__(self, limits: Limits) -> None:
        self._rows_min = limits.rows_min
        self._delay_max_ms = limits.delay_max_ms
        self._last_ms: int | None = None

    def holds(self, rows: int, now_ms: int) -> bool:
        """Returns whether a batch of `rows` rows should wait. Otherwise it counts as made.
        Otherwise it counts as made."""
        waits = (
            self._rows_min is not None
            and rows < self._rows_min
            and self._last_ms is not None
            and now_ms - self._last_ms < self._delay_max_ms
        )
        if not waits:
            self._last_ms = now_ms
        return waits
