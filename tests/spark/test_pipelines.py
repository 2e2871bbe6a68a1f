"""The pipelines as commands and functions, on real nodes, with their drivers killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from convoymq.cli.pipeline import pipeline_app
from convoymq.spark.pipelines import apply as applying
from convoymq.spark.pipelines.archive import archive, archived
from convoymq.spark.pipelines.manifest import Archive
from tests.patience import PATIENCE_S
from tests.spark.cluster import Broker
from tests.spark.support import numbered
from tests.spark.test_apply import SCHEMA, changes, table
from tests.spark.test_processes import Programs, kill

CONVOY = (sys.executable, "-m", "convoymq.cli", "pipeline")
KILLED_JOB = """
import json, os, signal, sys
from convoymq.spark import session
from convoymq.spark.pipelines.apply import TableSpec, apply
job = json.loads(sys.argv[1])
def probe(point, table, batch_id):
    if (point, batch_id) == ("merged", 1):
        os.kill(os.getpid(), signal.SIGKILL)
spark = session("apply", master="local[2]")
apply(spark, servers=job["servers"], stream=job["stream"], checkpoint=job["checkpoint"],
      tables=[TableSpec(path=job["path"], schema=job["schema"], keys=("id",))],
      options={"maxOffsetsPerTrigger": "300"}, probe=probe)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


def values(spark: SparkSession, target: Path) -> list[bytes]:
    rows = archived(spark, target).select("value").collect()
    return sorted((bytes(row.value) for row in rows), key=int)


def run(programs: Programs, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CONVOY, *words],
        env=programs.environment,
        cwd=programs.path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_streams_and_queues_are_archived_once(
    spark: SparkSession, nodes: Broker, tmp_path: Path, format: str
) -> None:
    streams = [nodes.declare("stream"), nodes.declare("stream")]
    queue = nodes.declare("quorum")
    nodes.publish(streams[0], numbered(0, 500))
    nodes.publish(streams[1], numbered(500, 700))
    nodes.publish(queue, numbered(700, 900))

    def once(queues: list[str]) -> Any:
        return archive(
            spark,
            servers=nodes.servers,
            target=tmp_path / "streams" if not queues else tmp_path / "queue",
            streams=[] if queues else streams,
            queues=queues,
            format=format,
            options={"maxOffsetsPerTrigger": "300"},
        )

    assert once([]).rows == 700
    nodes.publish(streams[1], numbered(900, 950))
    report = once([])
    assert (report.rows, report.rows_total) == (50, 750)
    assert values(spark, tmp_path / "streams") == numbered(0, 700) + numbered(900, 950)
    assert report.ranges == {f"{streams[1]}/0": [200, 250]}
    assert once([queue]).rows == 200
    assert once([queue]).rows == 0
    assert values(spark, tmp_path / "queue") == numbered(700, 900)
    assert nodes.cluster.messages_in(queue) == 0


@pytest.mark.long
def test_the_command_goes_on_after_a_kill(
    spark: SparkSession, nodes: Broker, programs: Programs
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 3000))
    target = programs.path / "archive"
    words = ["archive", "--servers", nodes.servers, "--stream", stream, "--target", str(target)]
    words += ["--master", "local[2]"]
    slow = [*words, "--option", "maxOffsetsPerTrigger=100", "--every", "0 seconds"]
    first = programs.start(*CONVOY, *slow)
    programs.until(lambda: Archive(target).current().rows >= 200, first)
    kill(first)
    assert Archive(target).current().rows < 3000, "it was killed too late to prove anything"
    done = run(programs, *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows_total"] == 3000
    assert values(spark, target) == numbered(0, 3000)
    assert Archive(target).check() == []
    assert list(Archive(target).orphans()) == []


def test_a_table_equals_its_source_after_a_kill_between_merge_and_commit(
    spark: SparkSession, nodes: Broker, programs: Programs
) -> None:
    stream = nodes.declare("stream")
    events, rows = changes(11, 1000, 80)
    nodes.publish(stream, [json.dumps(event).encode() for event in events])
    path, checkpoint = programs.path / "table", programs.path / "state"
    job = {
        "servers": nodes.servers,
        "stream": stream,
        "checkpoint": str(checkpoint),
        "path": str(path),
        "schema": SCHEMA,
    }
    killed = programs.start(sys.executable, "-c", KILLED_JOB, json.dumps(job))
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL, programs.log
    # Java outlives its Python for a moment; its group goes with it.
    with suppress(ProcessLookupError):
        os.killpg(killed.pid, signal.SIGKILL)
    report = applying.apply(
        spark,
        servers=nodes.servers,
        stream=stream,
        checkpoint=checkpoint,
        tables=[applying.TableSpec(path=str(path), schema=SCHEMA, keys=("id",))],
        options={"maxOffsetsPerTrigger": "300"},
    )
    assert report.tables["table"].skipped == 1
    assert table(spark, path) == rows


def test_the_command_hands_its_options_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = MagicMock()
    applied = MagicMock(return_value=applying.ApplyReport())
    monkeypatch.setattr("convoymq.spark.session", session)
    monkeypatch.setattr(applying, "apply", applied)
    words = ["apply", "--stream", "s", "--table", "t", "--schema", SCHEMA, "--key", "id"]
    words += ["--checkpoint", "state", "--format", "json"]
    done = CliRunner().invoke(pipeline_app, words)
    assert json.loads(done.stdout)["merge"] == "driver", done.output
    assert session.call_args.kwargs["conf"] == {}
    assert (applied.call_args.kwargs["merge"], applied.call_args.kwargs["parallel"]) == ("auto", 4)
    more = ["--merge", "executors", "--parallel", "2", "--conf", "a.b=c=d", "--conf", "e=f"]
    assert CliRunner().invoke(pipeline_app, [*words, *more]).exit_code == 0
    assert session.call_args.kwargs["conf"] == {"a.b": "c=d", "e": "f"}
    given = applied.call_args.kwargs
    assert (given["merge"], given["parallel"]) == ("executors", 2)
    assert given["events"] == applying.Events()
    more = ["--envelope", "upsert", "--connect-schemas"]
    assert CliRunner().invoke(pipeline_app, [*words, *more]).exit_code == 0
    rules = applying.Events(envelope="upsert", connect_schemas=True)
    assert applied.call_args.kwargs["events"] == rules
    for wrong in (["--conf", "nonsense"], ["--parallel", "0"]):
        assert CliRunner().invoke(pipeline_app, [*words, *wrong]).exit_code == 2


def test_mistakes_are_told_in_a_line(
    nodes: Broker, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--servers", nodes.servers, "--master", "local[1]"]
    target = ["--target", str(programs.path / "archive")]
    done = run(programs, "archive", *words, *target, "--stream", "stream-none")
    assert done.returncode == 1
    # Spark's worker logs what it likes; the last line is ours.
    last = done.stderr.strip().splitlines()[-1]
    assert "stream-none" in last
    assert "Traceback" not in last
    # The others are noticed before Spark does anything.
    monkeypatch.setattr("convoymq.spark.session", MagicMock())
    more = ["archive", *words, *target]
    for wrong, code, text in (
        ([], 1, "name streams or queues"),
        (["--stream", "x", "--option", "nonsense"], 2, "NAME=VALUE"),
    ):
        told = CliRunner().invoke(pipeline_app, [*more, *wrong])
        assert (told.exit_code, text in told.output) == (code, True), told.output
