"""The archive: every row once, whatever stops a batch, for Spark and for every other reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from convoymq.spark.errors import OptionError
from convoymq.spark.pipelines import archive as pipeline
from convoymq.spark.pipelines.manifest import Archive, Manifest, ManifestError

COLUMNS = ("topic", "date")
NAME = "fl/ig ht=é"


class Cut(Exception):
    """Where a test stops a batch."""


Run = Callable[[DataFrame, int], None]


class Archiver:
    """A pipeline's batches, one by one, with a point at which the next one stops."""

    def __init__(self, root: Path, format: str, app: str = "a" * 32, compact: int = 0) -> None:
        self.stop: tuple[str, int] | None = None
        self.sink = pipeline._sink(format, root, app)
        self.report = pipeline.ArchiveReport(target=str(root), format=format)
        self.write = pipeline._BatchWriter(
            self.sink, COLUMNS, self.report, compact, 0.0, self._probe
        )

    def _probe(self, point: str, batch_id: int) -> None:
        if self.stop == (point, batch_id):
            self.stop = None
            raise Cut


def messages(spark: SparkSession, first: int, count: int, topic: str = NAME) -> DataFrame:
    return spark.range(first, first + count).select(
        f.lit(b"key").alias("key"),
        f.col("id").cast("string").cast("binary").alias("value"),
        f.lit(topic).alias("topic"),
        f.lit(0).alias("partition"),
        f.col("id").alias("offset"),
        (f.lit(1_700_000_000) + f.col("id") * 60).cast("timestamp").alias("timestamp"),
        f.lit(1).alias("timestampType"),
    )


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


@pytest.mark.parametrize("format", ["parquet", "delta"])
@pytest.mark.parametrize("point", ["staged", "moved", "committed"])
def test_a_batch_cut_anywhere_counts_once(
    spark: SparkSession, tmp_path: Path, format: str, point: str
) -> None:
    archiver = Archiver(tmp_path, format)
    archiver.write(messages(spark, 0, 100), 0)
    archiver.stop = (point, 1)
    with pytest.raises(Cut):
        archiver.write(messages(spark, 100, 200), 1)
    again = Archiver(tmp_path, format)
    again.write(messages(spark, 100, 200), 1)
    again.write(messages(spark, 300, 10), 2)
    assert again.report.skipped == (point == "committed")
    found = pipeline.archived(spark, tmp_path)
    assert offsets(found) == list(range(310))
    assert {row.topic for row in found.select("topic").collect()} == {NAME}
    assert again.sink.totals()[0] == 310
    # A reader that knows nothing of us sees no row twice either.
    if format == "parquet":
        archive = Archive(tmp_path)
        assert archive.check() == []
        assert list(archive.orphans()) == []
        assert ds.dataset(archive.paths()).count_rows() == 310
        assert ds.dataset(tmp_path / "data", format="parquet").count_rows() == 310
    else:
        assert DeltaTable(str(tmp_path)).count() == 310


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_offsets_that_are_there_are_refused(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    Archiver(tmp_path, format).write(messages(spark, 0, 100), 0)
    other = Archiver(tmp_path, format, app="b" * 32)
    with pytest.raises(pipeline.OverlapError, match="Was its checkpoint deleted"):
        other.write(messages(spark, 50, 100), 0)
    other.write(messages(spark, 50, 100, "another"), 0)
    assert offsets(pipeline.archived(spark, tmp_path).where(f.col("topic") == NAME)) == list(
        range(100)
    )
    assert list(Archive(tmp_path).orphans()) == [] or format == "delta"


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_compaction_keeps_every_row(spark: SparkSession, tmp_path: Path, format: str) -> None:
    archiver = Archiver(tmp_path, format, compact=3)
    for batch in range(6):
        archiver.write(messages(spark, batch * 20, 20).coalesce(1), batch)
    assert archiver.report.compacted > 0
    assert offsets(pipeline.archived(spark, tmp_path)) == list(range(120))
    assert archiver.sink.totals() == (120, archiver.sink.totals()[1])
    assert archiver.sink.totals()[1] < 6
    if format == "parquet":
        assert Archive(tmp_path).check() == []
        assert list(Archive(tmp_path).orphans()) == []


def test_an_empty_batch_counts(spark: SparkSession, tmp_path: Path) -> None:
    archiver = Archiver(tmp_path, "parquet")
    archiver.write(messages(spark, 0, 0), 0)
    assert archiver.sink.applied() == 0
    assert archiver.sink.totals() == (0, 0)


def test_the_date_is_utc_whatever_the_sessions_zone(spark: SparkSession, tmp_path: Path) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        Archiver(tmp_path, "parquet").write(messages(spark, 0, 1), 0)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    (path,) = Archive(tmp_path).paths()
    assert "/date=2023-11-14/" in path


def test_damage_is_named(spark: SparkSession, tmp_path: Path) -> None:
    Archiver(tmp_path, "parquet").write(messages(spark, 0, 100).coalesce(1), 0)
    archive = Archive(tmp_path)
    Path(archive.paths()[0]).write_bytes(b"PAR1 nothing PAR1")
    assert len(archive.check()) == 1
    Path(archive.paths()[0]).unlink()
    assert archive.check()[0].endswith("missing")


def test_two_writers_never_make_the_same_version(tmp_path: Path) -> None:
    first, second = Archive(tmp_path), Archive(tmp_path)
    calls = []

    def slow(now: Manifest) -> Manifest:
        calls.append(now.version)
        if len(calls) == 1:
            second.commit(lambda current: Manifest(applied={"other": 1}))
        return Manifest(applied={**now.applied, "slow": 1})

    done = first.commit(slow)
    assert calls == [0, 1]
    assert done.version == 2
    assert done.applied == {"other": 1, "slow": 1}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "convoymq-archive/1"}']
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    archive = Archive(tmp_path)
    archive.commit(lambda now: Manifest())
    (tmp_path / "_manifest" / f"{2:020d}.json").write_text(text)
    with pytest.raises(ManifestError, match=r"00002\.json"):
        archive.current()


def test_old_versions_go(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for _ in range(30):
        archive.commit(lambda now: Manifest())
    assert archive.current().version == 30
    assert len(list((tmp_path / "_manifest").iterdir())) == 20
    assert json.loads((tmp_path / "_manifest" / f"{30:020d}.json").read_text())["version"] == 30


def test_bad_requests_are_refused_at_once(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing to archive"):
        pipeline.archive(spark, servers="127.0.0.1:1", target=tmp_path)
    with pytest.raises(OptionError, match="POSIX"):
        pipeline.archive(spark, servers="127.0.0.1:1", target="s3://b/a", streams=["s"])
    with pytest.raises(OptionError, match="there are parquet and delta"):
        pipeline._sink("orc", tmp_path, "a")
