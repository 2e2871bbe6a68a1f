"""Queries whose source's process is late for Spark begin again; others fail as they do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader

from convoymq.spark.errors import SourceError
from convoymq.spark.query_runs import RETRIES_MAX, run_queries

LATE = "[STREAM_FAILED] Query q terminated with exception: Python worker failed to connect back."


class Query:
    """A query, its writer in one: fails as often as it is told to, before it ends."""

    def __init__(self, *failures: str, waits: int = 0) -> None:
        self.name = "archive streams"
        self.begun = 0
        self.running = False
        self._failures = list(failures)
        self._waits = waits

    def start(self) -> Query:
        self.begun += 1
        self.running = True
        return self

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        if timeout is not None and self._waits:
            self._waits -= 1
            return False
        if self._failures:
            raise StreamingQueryException(self._failures.pop(0))
        self.running = False
        return None if timeout is None else True

    def stop(self) -> None:
        self.running = False


def run(*queries: Any) -> list[float]:
    """Runs them; returns the pauses that were made."""
    pauses: list[float] = []
    run_queries(queries, pause=pauses.append)
    return pauses


def test_a_late_source_is_said_and_its_query_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    late = Query(LATE, LATE)
    assert run(late) == [2.0, 4.0]
    assert late.begun == 3
    assert not late.running
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "archive streams has not begun: the Python process of its source took longer than the 10 s "
        f"that Spark waits, as on a busy machine; retry {retry} of 4 in {pause} s"
        for retry, pause in ((1, 2), (2, 4))
    ]


def test_a_source_that_never_starts_ends_the_query_in_plain_words() -> None:
    never, other = Query(*[LATE] * 10), Query(waits=1_000)
    with pytest.raises(SourceError, match=r"^archive streams: .* in 5 tries: the machine"):
        run(never, other)
    assert never.begun == RETRIES_MAX + 1
    assert not other.running


def test_other_failures_are_not_tried_again() -> None:
    bad = Query("[STREAM_FAILED] a bad event")
    with pytest.raises(StreamingQueryException, match="bad event"):
        run(bad)
    assert bad.begun == 1


def test_a_failure_is_noticed_while_an_earlier_query_goes_on() -> None:
    endless, bad = Query(waits=1_000), Query("[STREAM_FAILED] a bad event")
    with pytest.raises(StreamingQueryException, match="bad event"):
        run(endless, bad)
    assert not endless.running


class Numbers(SimpleDataSourceStreamReader):
    """One row."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"end": 0}

    def read(self, start: dict[str, int]) -> Any:
        return iter([(start["end"],)] if start["end"] == 0 else []), {"end": 1}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Any:  # noqa: N802
        return iter([(number,) for number in range(start["end"], end["end"])])


class NumberSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "number int"

    def simpleStreamReader(self, schema: Any) -> Numbers:  # noqa: N802
        return Numbers()


def test_spark_gives_up_a_late_process_and_the_query_goes_on_from_its_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first process of a source never reports; all others are Python.
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f'#!/bin/sh\ncase "$*" in *source_runner*) mkdir {tmp_path}/late && exec sleep 60 ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", os.fspath(interpreter))
    spark.dataSource.register(NumberSource)
    rows: list[int] = []

    def batch(found: DataFrame, _batch_id: int) -> None:
        rows.extend(row.number for row in found.collect())

    query = spark.readStream.format("numbers").load().writeStream.foreachBatch(batch)
    query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
    pauses: list[float] = []
    run_queries([query.trigger(availableNow=True)], pause=pauses.append)
    assert (tmp_path / "late").is_dir()
    assert pauses
    assert rows == [0]
