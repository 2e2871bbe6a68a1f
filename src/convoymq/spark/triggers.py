"""Limits of micro-batches, and how often an idle query asks: for streams and topics alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from convoymq.spark import planning

if TYPE_CHECKING:
    from convoymq.spark.options import StreamReadOptions


class Triggers:
    """The triggers of one query."""

    def __init__(self, options: StreamReadOptions) -> None:
        self._limits = options.limits
        self._poll_interval_s = options.poll_interval_ms / 1000
        self._delay = planning.TriggerDelay(options.limits)
        self._idle_since: float | None = None

    def default_limit(self) -> ReadLimit:
        """Returns the limit that Spark hands to `latestOffset`, unless a trigger overrides it."""
        limits = self._limits
        if limits.rows_max is not None:
            return ReadMaxRows(limits.rows_max)
        if limits.bytes_max is not None:
            return ReadMaxBytes(limits.bytes_max)
        if limits.rows_min is not None:
            return ReadMinRows(limits.rows_min)
        return ReadAllAvailable()

    def pace(self, *, bounded: bool) -> None:
        """Spark asks an idle source a hundred times a second; the broker need not hear of each.

        Args:
            bounded: the end of the query is fixed (AvailableNow): it is not waited for.
        """
        if self._idle_since is not None and not bounded:
            due = self._idle_since + self._poll_interval_s
            time.sleep(max(0.0, due - time.monotonic()))

    def note(self, *, idle: bool) -> None:
        """Notes whether a trigger found nothing to do."""
        self._idle_since = time.monotonic() if idle else None

    def allowed(
        self, rows: int, size_of: Callable[[], int], limit: ReadLimit, *, bounded: bool
    ) -> int:
        """Returns how many of `rows` messages the batch may take; 0 = it waits for more.

        Args:
            size_of: the size of all of them; asked for where it matters.
        """
        if not rows or isinstance(limit, ReadAllAvailable):
            return rows
        if not bounded and self._delay.holds(rows, int(time.monotonic() * 1000)):
            return 0
        size = size_of() if self._limits.bytes_max is not None else 0
        return planning.allowed_rows(self._limits, rows, size)
