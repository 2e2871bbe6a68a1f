"""Pages of messages that are read from a queue without being delivered: staged, or browsed.

A page is a list of runs, each records [first, first + count) of the ENQUEUE command at byte
`command` of `block`. On the way between nodes a run's block is an ENQUEUE command with just its
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convoymq.kernels import batch
from convoymq.model.errors import PeerError
from convoymq.queues.stages import MALFORMED, stage_refused

StagedRun = tuple[bytes, int, int, int, int, int, int, int]
"""(block, command, first record, count, offset of the first, time in ms, times handed out before,
failed ones of these)."""

#: Bounds of one page, whatever the reader asks for; the rest comes with the next.
PAGE_RUNS_MAX = 16_384
PAGE_ROWS_MAX = 1_000_000
PAGE_BYTES_MAX = 64 << 20
#: What a node asks another for at a time: other traffic shares the link.
REMOTE_BYTES_MAX = 4 << 20
#: After this many bytes or blocks a reader lets others run.
YIELD_BYTES = 1 << 20
YIELD_BLOCKS = 64


class Page:
    """Runs that were collected, up to a number of rows and bytes; the first message always fits."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.runs: list[StagedRun] = []
        self.rows = 0
        self.bytes = 0
        self._max_rows = max(1, min(max_rows, PAGE_ROWS_MAX))
        self._max_bytes = min(max_bytes, PAGE_BYTES_MAX)

    def room(self, count: int, size: int) -> int:
        """How many of the next run's `count` messages with `size` body bytes fit; 0 = full."""
        left = self._max_bytes - self.bytes
        if len(self.runs) >= PAGE_RUNS_MAX or (self.rows and left <= 0):
            return 0
        fits = min(count, self._max_rows - self.rows)
        if size * fits > left * count:
            fits = max(0, left) * count // size
        return fits if fits or self.rows else 1

    def add(
        self,
        block: bytes,
        command: int,
        first: int,
        count: int,
        offset: int,
        time_ms: int,
        acquired: int,
        delivered: int,
        size: int,
    ) -> None:
        """Appends a run. What is a small part of its block is copied: pages must not hold much more
        than they show."""
        assert count > 0
        if size * 2 < len(block):
            block = batch.slice_records(block, command, first, count)
            command = first = 0
            size = max(size, len(block))
        self.runs.append((block, command, first, count, offset, time_ms, acquired, delivered))
        self.rows += count
        self.bytes += size


def encode_runs(runs: Sequence[StagedRun]) -> list[list[Any]]:
    """Runs as plain values for another node."""
    return [
        [batch.slice_records(block, command, first, count), count, offset, *rest]
        for block, command, first, count, offset, *rest in runs
    ]


def decode_runs(encoded: Any) -> list[StagedRun]:
    """The runs of `encode_runs`. Raises PeerError."""
    try:
        return [
            (block, 0, 0, count, offset, time_ms, acquired, delivered)
            for block, count, offset, time_ms, acquired, delivered in encoded
        ]
    except (TypeError, ValueError) as error:
        raise PeerError(f"malformed runs from another node: {error}") from error


def checked_numbers(*values: Any) -> None:
    """Raises StageRefused unless all are numbers that a log knows."""
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise stage_refused(MALFORMED)


def checked_cursor(cursor: Any, length: int) -> list[int]:
    """The numbers of a browse cursor; zeros for None. Raises StageRefused."""
    if cursor is None:
        return [0] * length
    if not isinstance(cursor, list | tuple) or len(cursor) != length:
        raise stage_refused(MALFORMED)
    checked_numbers(*cursor)
    return list(cursor)
