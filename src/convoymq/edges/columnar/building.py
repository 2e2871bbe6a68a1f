"""Builds a columnar frame from runs of records in steps: the loop is never kept for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from convoymq.edges.columnar.streams import Run
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.stream_spans import Records
from convoymq.messages.columns import ColumnWriter

Taken: TypeAlias = "Callable[[int, Records], None]"

FIRST_STEP_ROWS = 16
STEP_ROWS_MAX = 512


class Rows:
    """Rows of one answer.

    Args:
        step_bytes: about so much is copied between two looks at the clock.
        taken: gets the rows that are appended: number of the first, and where they lie.
    """

    def __init__(
        self,
        time: Slice,
        columns: int,
        max_rows: int,
        max_bytes: int,
        step_bytes: int,
        taken: Taken | None = None,
    ) -> None:
        self._time = time
        self._writer: ColumnWriter | None = ColumnWriter(columns, max_rows, max_bytes)
        self._count = 0
        self._max_bytes = max_bytes
        self._step_bytes = step_bytes
        self._taken = taken

    @property
    def count(self) -> int:
        """Returns the number of rows so far."""
        return self._count

    @property
    def full(self) -> bool:
        """Returns whether no more rows are taken."""
        return self._writer is None or bool(self._writer.full)

    @property
    def room(self) -> int:
        """Returns the number of bytes that the answer may still grow by, at least one."""
        return 1 if self._writer is None else max(1, self._max_bytes - self._writer.bytes)

    async def add(self, runs: Iterable[Run]) -> int:
        """Appends rows until there is no more room; returns how many were taken.

        Raises:
            ValueError: a record is damaged.
        """
        taken = 0
        writer = self._writer
        assert writer is not None
        for block, command, first, count, base, time_ms, *tries in runs:
            done = 0
            while done < count:
                if writer.full:
                    return taken
                await self._time.check()
                step = min(count - done, self._step(writer))
                got = writer.append(
                    block, command, first + done, step, base + done, time_ms, *tries
                )
                if got and self._taken is not None:
                    self._taken(base + done, (block, command, first + done, got))
                done += got
                taken += got
                self._count += got
                if got < step:
                    return taken
        return taken

    def _step(self, writer: ColumnWriter) -> int:
        """Returns how many rows to append at a time, by the size of those before."""
        rows = writer.rows
        if not rows:
            return FIRST_STEP_ROWS
        return max(1, min(STEP_ROWS_MAX, self._step_bytes * rows // max(1, writer.bytes)))

    async def finish(self, next_: int, compression: str) -> bytes:
        """Returns the whole columnar frame, and lets go of the blocks that the rows lie in."""
        await self._time.check()
        writer, self._writer = self._writer, None
        assert writer is not None
        if not compression:
            return bytes(writer.finish(next_))
        # Compressing takes many slices, and does not need the interpreter.
        loop = asyncio.get_running_loop()
        return bytes(await loop.run_in_executor(None, writer.finish, next_, compression))
