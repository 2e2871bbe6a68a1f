"""How tests make readers and drive them as Spark does."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from convoymq.spark.sources import QueueSource, StreamSource

SCALE = int(os.environ.get("CONVOY_SPARK_FAULT_SCALE", "1"))
"""How many times the usual rows the fault tests move (`make test-spark-full`)."""
SERVERS = {"servers": "fake:1"}


def stream_source(**options: Any) -> StreamSource:
    """Format convoymq; names as Spark hands them over, in lower case."""
    given = {name.lower(): str(value) for name, value in options.items()}
    return StreamSource({**SERVERS, **given})


def queue_source(**options: Any) -> QueueSource:
    """Format convoymq_queue."""
    given = {name.lower(): str(value) for name, value in options.items()}
    return QueueSource({**SERVERS, **given})


def batch_rows(data_source: Any, schema: StructType | None = None) -> list[dict[str, Any]]:
    """A batch read, each task on an instance of its own."""
    reader = data_source.reader(schema or data_source.schema())
    return tasks_rows(reader, reader.partitions())


def tasks_rows(reader: Any, partitions: list[InputPartition]) -> list[dict[str, Any]]:
    """The rows of partitions, read as tasks do: from what was pickled."""
    made = []
    for partition in partitions:
        there, part = pickle.loads(pickle.dumps((reader, partition)))
        for batch in there.read(part):
            made += batch.to_pylist()
    return made


class Query:
    """Spark's engine, as far as a source sees it: the order of calls and what survives a crash.

    `wal` and `commits` are the checkpoint. `run` makes batches until the source has no more.
    """

    def __init__(self, make_reader: Callable[[], Any]) -> None:
        self._make = make_reader
        self.wal: list[str] = []
        self.commits = 0
        self.sink: dict[int, list[dict[str, Any]]] = {}
        self.reader: Any = None
        self._tasks: Any = None

    def start(self, *, available_now: bool = False) -> None:
        """A driver starts: with a checkpoint, or for the first time."""
        self.die()
        self.reader = self._make()
        self._tasks = self._make()
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        if len(self.wal) > self.commits:
            self._run_batch()

    def die(self) -> None:
        """The driver dies, and the source's threads with it."""
        held = getattr(self.reader, "_held", None)
        if held is not None:
            held._ended.set()

    def initial(self) -> str:
        """Asked for whenever there is no batch before: more than once."""
        return json.dumps(self.reader.initialOffset())

    def step(self, *, crash: str = "") -> bool:
        """One trigger. Returns whether there was a batch.

        Args:
            crash: `planned`: the driver dies when the batch is in the log of offsets; `sunk`: when
                the sink has it, but the commit is not written.
        """
        before = self.wal[-1] if self.wal else self.initial()
        limit = self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(json.loads(before), limit))
        if end == before:
            return False
        self.wal.append(end)
        if len(self.wal) > 1:
            # Late by a batch, and never for the last one.
            self.reader.commit(json.loads(self.wal[-2]))
        if crash == "planned":
            return True
        self._run_batch(commit=crash != "sunk")
        return True

    def run(self) -> None:
        """Triggers until there is nothing to do."""
        while self.step():
            pass

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that the sink has: a repeated batch replaces itself there."""
        return [row for batch in sorted(self.sink) for row in self.sink[batch]]

    @property
    def values(self) -> list[bytes]:
        """The value of every row."""
        return [row["value"] for row in self.rows]

    def _run_batch(self, *, commit: bool = True) -> None:
        batch = self.commits
        before = self.wal[batch - 1] if batch else self.initial()
        parts = self.reader.partitions(json.loads(before), json.loads(self.wal[batch]))
        rows = tasks_rows(self._tasks, parts)
        if batch in self.sink:
            assert self.sink[batch] == rows, "a repeated batch has other rows"
        self.sink[batch] = rows
        if commit:
            self.commits += 1


def numbered(first: int, last: int) -> list[bytes]:
    """Values for first … last - 1."""
    return [b"%d" % i for i in range(first, last)]
