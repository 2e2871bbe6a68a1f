"""Trace rows of the quorum queue's machine."""

from __future__ import annotations

from convoymq.kernels import batch
from convoymq.kernels.trace import TraceRows
from convoymq.model import trace as words
from tests.unit.queues.quorum.support import (
    A,
    Queue,
)


def test_a_producers_repeat_is_in_the_trace() -> None:
    queue = Queue()
    rows = queue.machine.trace = TraceRows()
    for _ in range(2):
        queue.log.command(A, batch.CMD_PRODUCER, count=1, body=bytes(8) + b"p")
        queue.log.publish(A, [1, 1])
        queue.step()
    assert queue.machine.totals()["duplicates"] == 2
    count, data = rows.take()
    columns = memoryview(data).cast("q")
    kinds = list(columns[words.ROW_COLUMNS.index("kind") * count :][:count])
    reasons = list(columns[words.ROW_COLUMNS.index("reason") * count :][:count])
    assert (kinds, reasons) == ([words.PUBLISHED] * 2, [0, words.DUPLICATE])
