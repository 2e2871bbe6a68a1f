"""Both ways of a MERGE: what they share, how a table passes from one to the other, and several
tables at a time. With Delta Lake's jars (`make test-spark-delta`) rows stay on the executors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, TableFeatures
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines import apply as pipeline
from convoymq.spark.pipelines import merging
from convoymq.spark.pipelines.apply import TableSpec
from tests.patience import PATIENCE_S
from tests.spark import delta
from tests.spark.test_apply import SCHEMA, Applier, Cut, changes, frame, table

FAST_TEST = "test_a_table_passes_from_one_way_to_the_other"


def spec_of(path: Path, name: str = "") -> TableSpec:
    return TableSpec(name=name, path=str(path), schema=SCHEMA, keys=("id",))


def batch_names(path: Path) -> list[str]:
    """Names of the batches that a table's commits are of, the newest first."""
    history = DeltaTable(str(path)).history()
    return [name for each in history if (name := merging.batch_name(each)) is not None]


def test_a_table_passes_from_one_way_to_the_other(spark: SparkSession, tmp_path: Path) -> None:
    """Goal: a batch that was merged one way is known the other way, and old numbers with other
    events are merged by both. Method: the ways take turns; each batch is cut behind its MERGE and
    repeated by the other one; then an older checkpoint is put back, twice."""
    if not delta.is_used():
        pytest.skip(delta.MISSING)
    events, rows = changes(21, 600, 50)
    place, path = tmp_path / "state", tmp_path / "t"
    (place / "offsets").mkdir(parents=True)
    ways = [
        Applier(spark, spec_of(path), checkpoint=place, merge=merge)
        for merge in ("driver", "executors")
    ]

    def write(applier: Applier, batch_id: int, first: int, end: int) -> None:
        ends = json.dumps({"v": 1, "p": {"t": {"0": end}}})
        (place / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{ends}\n")
        applier.write(frame(spark, events[first:end], first), batch_id)

    for batch_id in range(4):
        begins, repeats = ways[batch_id % 2], ways[1 - batch_id % 2]
        begins.stop = ("merged", batch_id)
        with pytest.raises(Cut):
            write(begins, batch_id, batch_id * 100, batch_id * 100 + 100)
        write(repeats, batch_id, batch_id * 100, batch_id * 100 + 100)
    assert [each.report.tables["t"].skipped for each in ways] == [2, 2]
    for number, applier in enumerate(ways):
        # The last one is repeated; then the number is the same, and the events are others.
        for _ in range(2):
            write(applier, 2, 200, 450 + 100 * number)
    assert [each.report.tables["t"].skipped for each in ways] == [3, 3]
    write(ways[1], 4, 550, 600)
    assert table(spark, path) == rows
    names = batch_names(path)
    assert len(names) == len(set(names)) == 7
    assert DeltaTable(str(path)).transaction_version("app") == 4


def test_tables_are_merged_side_by_side(spark: SparkSession, tmp_path: Path) -> None:
    """Each waits in its MERGE until all of them are there."""
    made = {name: changes(30 + number, 60, 20, name) for number, name in enumerate("abc")}
    specs = [spec_of(tmp_path / name, name) for name in made]
    together = threading.Barrier(len(made))
    applier = Applier(spark, *specs, parallel=len(made))
    applier.probe = lambda point: together.wait(PATIENCE_S) if point == "merging" else None
    applier.write(frame(spark, [event for events, _ in made.values() for event in events]), 0)
    for name, (_, rows) in made.items():
        assert table(spark, tmp_path / name) == rows
    assert applier.report.events == 180
    assert sum(each.events for each in applier.report.tables.values()) == 180


def test_a_table_that_fails_stops_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    """The batch is repeated, and the tables that have it pass over it."""
    made = {name: changes(40 + number, 60, 20, name) for number, name in enumerate("abc")}
    specs = [spec_of(tmp_path / name, name) for name in made]
    applier = Applier(spark, *specs, parallel=2)
    events = [event for events, _ in made.values() for event in events]
    applier.stop, applier.stop_table = ("merging", 0), "b"
    with pytest.raises(Cut):
        applier.write(frame(spark, events), 0)
    assert not batch_names(tmp_path / "b")
    applier.write(frame(spark, events), 0)
    for name, (_, rows) in made.items():
        assert table(spark, tmp_path / name) == rows
        assert len(batch_names(tmp_path / name)) == 1
    skipped = {name: counts.skipped for name, counts in applier.report.tables.items()}
    assert skipped["a"] == 1
    assert skipped["b"] == 0


def test_works_that_run_together(spark: SparkSession) -> None:
    """All that run come to their ends, those behind a failure are left out, and every error is
    told."""
    assert merging.run_together(spark, [lambda: 1, lambda: 2, lambda: 3], 2) == [1, 2, 3]
    begun = threading.Barrier(2)
    ended: list[str] = []

    def failing(name: str) -> int:
        begun.wait(PATIENCE_S)
        ended.append(name)
        raise SourceError(f"{name} failed")

    def waiting() -> int:
        raise AssertionError("it was left out")

    works = [lambda: failing("one"), lambda: failing("two"), *[waiting] * 40]
    with pytest.raises((SourceError, AssertionError)) as caught:
        merging.run_together(spark, works, 2)
    assert sorted(ended) == ["one", "two"]
    assert str(caught.value) == "one failed"
    assert any("two failed" in note for note in caught.value.__notes__)


def test_a_way_that_the_session_lacks_is_refused(spark: SparkSession) -> None:
    with pytest.raises(OptionError, match="there are auto, driver, executors"):
        merging.chosen_path(spark, "magic")
    assert merging.chosen_path(spark, "driver") is merging.MergePath.DRIVER
    given: dict[str, Any] = {"servers": "127.0.0.1:1", "stream": "s", "checkpoint": "state"}
    given["tables"] = [spec_of(Path("t"))]
    with pytest.raises(OptionError, match="at least one table"):
        pipeline.apply(spark, parallel=0, **given)
    if delta.is_used():
        assert merging.chosen_path(spark, "auto") is merging.MergePath.EXECUTORS
        return
    assert merging.chosen_path(spark, "auto") is merging.MergePath.DRIVER
    with pytest.raises(OptionError, match=r"merge executors: .*spark\.sql\.extensions"):
        pipeline.apply(spark, merge="executors", **given)


def test_tables_in_parallel_share_the_rows_of_the_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    targets = [pipeline._Target(spark, spec_of(tmp_path / name, name)) for name in "abc"]
    way = merging.MergePath.DRIVER
    for parallel, share in ((1, 1_000_000), (2, 500_000), (9, 333_333)):
        mergers = pipeline._mergers(spark, way, "app", targets, parallel)
        assert [each.rows_max for each in mergers] == [share] * 3


def test_jars_of_another_spark_are_named(spark: SparkSession, tmp_path: Path) -> None:
    class Session:
        """A session whose Java lacks a method."""

        version = "4.3.0"
        catalog = spark.catalog
        conf = spark.newSession().conf

        def sql(self, statement: str) -> None:
            assert statement.startswith(f"MERGE INTO delta.`file://{tmp_path}/t` AS t")
            raise Py4JError("java.lang.NoSuchMethodError: LogicalRDD.<init>")

    merger = merging.ExecutorMerger(spark, "app", str(tmp_path / "t"), ("id",))
    merger._session = Session()  # type: ignore[assignment]
    with pytest.raises(SourceError, match=r"do not fit Spark 4\.3\.0"):
        merger._execute(spark.range(1), merging.MergeCommit("app", 0, "app/0/"))


def test_names_of_batches_in_commits() -> None:
    assert merging.batch_name({merging.BATCH_KEY: "app/1/x"}) == "app/1/x"
    commit = merging.MergeCommit("app", 1, "app/1/x")
    assert merging.batch_name({merging.USER_METADATA: commit.metadata}) == "app/1/x"
    for other in ({}, {merging.USER_METADATA: "by hand"}, {merging.USER_METADATA: "[1]"}):
        assert merging.batch_name(other) is None


def test_rows_that_need_the_extension_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A reader of files alone would show rows that were deleted."""
    if delta.is_used():
        pytest.skip("the session has the extension")
    events, _ = changes(3, 20, 5)
    Applier(spark, spec_of(tmp_path / "t")).write(frame(spark, events), 0)
    DeltaTable(str(tmp_path / "t")).alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    with pytest.raises(SourceError, match="deletion vectors"):
        pipeline.rows(spark, str(tmp_path / "t"))


def test_the_executors_merge_where_the_jars_are(tmp_path: Path) -> None:
    """One test of the executors in every run of the suite: `make test-spark-delta` has all."""
    if delta.is_used() or not delta.is_installed():
        pytest.skip("the session has the extension" if delta.is_used() else delta.MISSING)
    test = (f"{__file__}::{FAST_TEST}", f"--basetemp={tmp_path / 'inner'}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *test],
        env={**os.environ, **delta.environment(os.environ.get("PYTHONPATH", ""))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
