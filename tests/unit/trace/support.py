"""Queues whose trace is written to real files, without a cluster: logs that a machine applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.trace import segments
from convoymq.trace.recorder import QueueTrace
from convoymq.trace.segments import Origin
from convoymq.trace.writer import Writer

GROUP = 7


class Recording:
    """One node's replica of a queue, and its trace below `root`."""

    def __init__(
        self,
        root: Path,
        node: int = 1,
        incarnation: int = 1,
        *,
        queue: str = "orders",
        group: int = GROUP,
        backlog_max_bytes: int = 64 << 20,
        **settings: Any,
    ) -> None:
        self.root = root
        self.now_us = 1_000_000_000
        self.writer = Writer(root, retention_bytes=1 << 40, backlog_max_bytes=backlog_max_bytes)
        self.origin = Origin(
            vhost="/",
            queue=queue,
            type="quorum",
            group=group,
            node=node,
            incarnation=incarnation,
        )
        self.directory = self.origin.directory(root)
        self.trace = QueueTrace(
            self.origin,
            self.writer,
            self.directory,
            through=segments.covered_through(self.directory, self.origin),
            now_us=self.clock,
        )
        self.machine = QuorumMachine(settings)
        self.trace.attach(self.machine)

    def clock(self) -> int:
        self.now_us += 1
        return self.now_us

    def apply(self, entries: list[Any]) -> None:
        """Applies entries as a replica does."""
        for entry in entries:
            self.now_us = max(self.now_us, entry.time_ms * 1000)
            self.machine.apply(entry.index, entry.time_ms, entry.data)
            self.machine.effects = []

    def close(self) -> None:
        """An orderly end."""
        self.trace.close()
        assert self.writer.close(30)

    def kill(self) -> None:
        """The process dies: what was handed over is in the journal, the rest is gone."""
        assert self.writer.close(30)
        self.machine.trace = None
        segment = self.trace._feed.segment
        if segment is not None and segment._file is not None:
            segment._file.close()


def rows_of(root: Path) -> list[dict[str, Any]]:
    """All rows of all segments, as plain dicts, file by file."""
    found: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*.parquet")):
        found += pq.read_table(path, partitioning=None).to_pylist()
    return found
