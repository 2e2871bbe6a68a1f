"""Runs streaming queries to their end, and has those begin again whose source was late to start.

When a query begins, Spark starts a process of Python for its source and waits 10 s for it, a
constant of Spark's. On a busy machine that may not be enough, and the query ends before it has read
anything. It can begin again: it goes on from its checkpoint, as after a restart of the driver. Only
this error is answered so; every other one is the caller's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from convoymq.spark.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = logging.getLogger(__name__)

RETRIES_MAX = 4
FIRST_PAUSE_S = 2.0
"""Before the first retry; doubled before each further one."""
POLL_S = 0.5
"""Longest wait for one of several queries, before the next one is looked at."""

_LATE = "Python worker failed to connect back"
"""Spark's words about a process that was late."""


def run_queries(
    writers: Sequence[DataStreamWriter], *, pause: Callable[[float], None] = time.sleep
) -> None:
    """Starts queries and waits for the end of all; when one fails, all end.

    Raises:
        StreamingQueryException: a query failed.
        SourceError: the source of one did not start, however often it was tried.
    """
    runs: list[_Run] = []
    try:
        for writer in writers:
            runs.append(_Run(writer, pause))
        left = list(runs)
        while left:
            limit_s = POLL_S if len(left) > 1 else None
            left = [run for run in left if not run.has_ended(limit_s)]
    finally:
        for run in runs:
            run.stop()


def triggered(writer: DataStreamWriter, every: str | None) -> DataStreamWriter:
    """Sets the trigger: an interval such as "10 seconds", or None: until the present end."""
    return writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)


class _Run:
    """A query that is under way."""

    def __init__(self, writer: DataStreamWriter, pause: Callable[[float], None]) -> None:
        self._writer = writer
        self._pause = pause
        self._retries = 0
        self._query: StreamingQuery = writer.start()

    def has_ended(self, limit_s: float | None) -> bool:
        """Waits for its end, for at most so long; has it begin again if its source was late."""
        from pyspark.errors import StreamingQueryException

        try:
            if limit_s is None:
                self._query.awaitTermination()
                return True
            # Spark's annotation says int, and takes a fraction.
            return bool(self._query.awaitTermination(limit_s))  # type: ignore[arg-type]
        except StreamingQueryException as error:
            if _LATE not in str(error):
                raise
            self._begin_again(error)
            return False

    def stop(self) -> None:
        """Ends it, if it has not ended."""
        self._query.stop()

    def _begin_again(self, error: Exception) -> None:
        name = self._query.name or self._query.id
        if self._retries == RETRIES_MAX:
            raise SourceError(
                f"{name}: Spark waits 10 s for the Python process of a source, and none was ready "
                f"in {RETRIES_MAX + 1} tries: the machine is too busy, or its Python does not start"
            ) from error
        pause_s = FIRST_PAUSE_S * 2**self._retries
        self._retries += 1
        log.warning(
            "%s has not begun: the Python process of its source took longer than the 10 s that "
            "Spark waits, as on a busy machine; retry %d of %d in %.0f s",
            name,
            self._retries,
            RETRIES_MAX,
            pause_s,
        )
        self._pause(pause_s)
        self._query = self._writer.start()
