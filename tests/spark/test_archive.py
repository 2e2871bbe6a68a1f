"""The archive: every row once, whatever stops a batch, for Spark and for every other reader."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines import archive as pipeline
from convoymq.spark.pipelines import archive_sink, manifest
from convoymq.spark.pipelines import checkpoint as checkpoint_files
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


def archive_batch(archiver: Archiver, batch_id: int, first: int, count: int) -> None:
    """A batch of stream `s` (of group 7), without Spark."""
    sink = archiver.sink
    sink.begin()
    (place := sink.staging / f"{sink.app}-{batch_id}" / "topic=s").mkdir(parents=True)
    numbers = pa.array(range(first, first + count), pa.int64())
    zeros = pa.array([0] * count, pa.int32())
    pq.write_table(pa.table({"partition": zeros, "offset": numbers}), place / "part.parquet")
    staged = archive_sink.staged_files(place.parent)
    files = sink.move(staged, batch_id, "made")
    ranges = {"s/0@7": [first, first + count]}
    plan = ""
    if archiver.write._checkpoint is not None:
        offsets = checkpoint_files.offsets_of(archiver.write._checkpoint, batch_id)
        plan = checkpoint_files.plan_id(offsets)
    sink.commit(batch_id, staged, files, ranges, plan)
    sink.clean()


def plan_batch(checkpoint: Path, batch_id: int, offsets: dict[str, Any]) -> None:
    """What Spark writes before it begins a batch."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{json.dumps(offsets)}\n")


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
@pytest.mark.parametrize("point", ["staged", "moved"])
def test_a_driver_that_was_replaced_changes_nothing(
    spark: SparkSession, tmp_path: Path, format: str, point: str
) -> None:
    """The older driver stops in mid-batch, its replacement archives the batch, and then the older
    one goes on: it ends, and every file that counts is there."""
    Archiver(tmp_path, format).write(messages(spark, 0, 100), 0)
    older, newer = Archiver(tmp_path, format), Archiver(tmp_path, format)

    def replaced(reached: str, batch_id: int) -> None:
        if reached == point:
            newer.write(messages(spark, 100, 50), 1)

    older.write._probe = replaced
    with pytest.raises(archive_sink.SupersededError, match="another run"):
        older.write(messages(spark, 100, 50), 1)
    newer.write(messages(spark, 150, 50), 2)
    assert offsets(pipeline.archived(spark, tmp_path)) == list(range(200))
    assert older.sink.applied() == 2
    if format == "parquet":
        assert Archive(tmp_path).check() == []
        assert list(Archive(tmp_path).orphans()) == []
    assert not list((tmp_path / "_staging").iterdir())


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_driver_that_dies_when_it_was_replaced_leaves_nothing(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    """It has moved its files, and neither commits nor removes them."""
    older = Archiver(tmp_path, format)
    older.write(messages(spark, 0, 10), 0)
    older.stop = ("moved", 1)
    with pytest.raises(Cut):
        older.write(messages(spark, 10, 10), 1)
    newer = Archiver(tmp_path, format)
    newer.write(messages(spark, 10, 10), 1)
    assert ds.dataset(tmp_path / "data", format="parquet").count_rows() == 20
    assert not list((tmp_path / "_staging").iterdir())


def test_what_a_task_has_not_committed_is_not_archived(spark: SparkSession, tmp_path: Path) -> None:
    archiver = Archiver(tmp_path, "parquet")
    stray = "_temporary/0/task_1/topic=x/date=2023-11-14"

    def leave(point: str, batch_id: int) -> None:
        if point == "staged":
            (staging,) = (tmp_path / "_staging").iterdir()
            (place := staging / stray).mkdir(parents=True)
            found = next(each for each in staging.rglob("*.parquet"))
            shutil.copy(found, place / "part-1.parquet")

    archiver.write._probe = leave
    archiver.write(messages(spark, 0, 10), 0)
    assert offsets(pipeline.archived(spark, tmp_path)) == list(range(10))


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_batch_is_not_committed_twice_by_two_runs(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    """The second guard, should the first one fail: what is applied is looked up with the commit."""
    first, second = Archiver(tmp_path, format), Archiver(tmp_path, format)
    first.write(messages(spark, 0, 10, "a"), 0)
    second.sink.begin()
    staged: list[Any] = []
    second.sink.commit(1, staged, [], {})
    with pytest.raises(archive_sink.SupersededError):
        second.sink.commit(1, staged, [], {})


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_stream_that_was_declared_again_is_another_stream(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    """Its offsets begin anew; the checkpoint says which stream a batch is of."""
    archiver = Archiver(tmp_path / "target", format)
    archiver.write._checkpoint = tmp_path / "checkpoint"
    (offsets_of := tmp_path / "checkpoint" / "offsets").mkdir(parents=True)
    for batch_id, group in enumerate((7, 9)):
        known = json.dumps({"v": 1, "p": {NAME: {"0": 10}}, "g": {NAME: group}})
        (offsets_of / str(batch_id)).write_text(f"v1\n{{}}\n{known}\n")
        archiver.write(messages(spark, 0, 10), batch_id)
    assert offsets(pipeline.archived(spark, tmp_path / "target")) == sorted([*range(10)] * 2)
    assert archiver.report.ranges == {f"{NAME}/0": [0, 10]}
    other = Archiver(tmp_path / "target", format, app="b" * 32)
    other.write._checkpoint = tmp_path / "checkpoint"
    with pytest.raises(archive_sink.OverlapError):
        other.write(messages(spark, 5, 10), 0)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_an_older_checkpoint_is_told_and_skips_no_message(tmp_path: Path, format: str) -> None:
    """Its next batches have numbers that count already, and may end behind what is archived."""
    archiver = Archiver(tmp_path / "target", format)
    checkpoint = archiver.write._checkpoint = tmp_path / "checkpoint"
    nothing: Any = None

    def ends(offset: int, group: int = 7) -> dict[str, Any]:
        return {"v": 1, "p": {"s": {"0": offset}}, "g": {"s": group}}

    for batch_id in range(3):
        plan_batch(checkpoint, batch_id, ends(batch_id * 10 + 10))
        archive_batch(archiver, batch_id, batch_id * 10, 10)
    # The same messages, or a part of them: nothing is left out.
    archiver.write(nothing, 2)
    archiver.write(nothing, 1)
    plan_batch(checkpoint, 2, ends(25))
    archiver.write(nothing, 2)
    assert archiver.report.skipped == 3
    for batch_id, other in ((2, ends(31)), (1, ends(31)), (2, ends(5, group=9))):
        plan_batch(checkpoint, batch_id, other)
        with pytest.raises(checkpoint_files.CheckpointError, match="Was an older one put back"):
            archiver.write(nothing, batch_id)
    (checkpoint / "offsets" / "2").unlink()
    with pytest.raises(SourceError, match="can't be read"):
        archiver.write(nothing, 2)
    assert archiver.report.skipped == 3
    assert archiver.sink.totals() == (30, 3)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_an_older_checkpoint_of_a_queue_is_told(tmp_path: Path, format: str) -> None:
    """Skipped, its messages would be settled, and gone."""
    archiver = Archiver(tmp_path / "target", format)
    checkpoint = archiver.write._checkpoint = tmp_path / "checkpoint"
    nothing: Any = None
    for batch_id in range(2):
        plan_batch(checkpoint, batch_id, {"v": 1, "queue": "q", "epoch": 7, "off": 10 * batch_id})
        archive_batch(archiver, batch_id, 10 * batch_id, 10)
    archiver.write(nothing, 1)
    plan_batch(checkpoint, 1, {"v": 1, "queue": "q", "epoch": 8, "off": 10, "from": 0})
    for batch_id in (0, 1):
        with pytest.raises(checkpoint_files.CheckpointError):
            archiver.write(nothing, batch_id)
    assert archiver.report.skipped == 1


def test_two_pipelines_may_join_the_same_files(tmp_path: Path) -> None:
    """The second one finds files gone that it had read of in the manifest."""
    first, second = Archiver(tmp_path, "parquet"), Archiver(tmp_path, "parquet", app="b" * 32)
    for batch_id in range(4):
        archive_batch(first, batch_id, batch_id * 10, 10)
    second.sink.begin()
    archive = Archive(tmp_path)
    files = archive.current().files
    assert first.sink.compact(4, 0.0) == 4
    sink: Any = second.sink
    assert sink._join("data/topic=s", files) == 0
    assert archive.check() == []
    assert list(archive.orphans()) == []
    assert not list((tmp_path / "_staging").rglob("*.p*"))
    archive_batch(first, 4, 40, 10)
    Path(archive.paths()[0]).unlink()
    with pytest.raises(FileNotFoundError):
        first.sink.compact(2, 0.0)


def test_delta_files_that_were_joined_go_when_their_time_is_over(tmp_path: Path) -> None:
    archiver = Archiver(tmp_path, "delta")
    for batch_id in range(4):
        archive_batch(archiver, batch_id, batch_id * 10, 10)
    (moved := tmp_path / "data" / "moved-by-another.parquet").write_bytes(b"")
    assert archiver.sink.compact(4, 3600.0) == 4

    def count() -> int:
        return sum("_delta_log" not in path.parts for path in tmp_path.rglob("*.parquet"))

    assert count() == 4 + 1 + 1
    assert archiver.sink.compact(4, 0.0) == 0
    assert count() == 1 + 1
    assert moved.exists()
    assert ds.dataset(DeltaTable(str(tmp_path)).file_uris()).count_rows() == 40


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_files_with_more_columns_are_read_and_joined(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    """`includeHeaders` may be turned on and off between runs."""
    archiver = Archiver(tmp_path, format, compact=4)
    for batch in range(8):
        part = messages(spark, batch * 10, 10).coalesce(1)
        if batch % 2:
            part = part.withColumn("headers", f.lit("h"))
        archiver.write(part, batch)
    assert archiver.report.compacted > 0
    found = pipeline.archived(spark, tmp_path)
    assert offsets(found) == list(range(80))
    assert found.where("headers = 'h'").count() == 40
    if format == "parquet":
        assert Archive(tmp_path).check() == []
        assert len(Archive(tmp_path).paths()) == 2
    else:
        assert "headers" in {field.name for field in DeltaTable(str(tmp_path)).schema().fields}


def test_reading_parquet_needs_no_deltalake(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Archiver(tmp_path, "parquet").write(messages(spark, 0, 10), 0)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert pipeline.archived(spark, tmp_path).count() == 10


def test_a_commit_does_not_read_the_history(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver = Archiver(tmp_path, "delta")
    limits: list[int | None] = []
    history = DeltaTable.history

    def counted(table: DeltaTable, limit: int | None = None) -> Any:
        limits.append(limit)
        return history(table, limit)

    for batch in range(3):
        archiver.write(messages(spark, batch * 10, 10), batch)
    monkeypatch.setattr(DeltaTable, "history", counted)
    archiver.write(messages(spark, 30, 10), 3)
    assert limits
    assert set(limits) == {4}


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_offsets_that_are_there_are_refused(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    Archiver(tmp_path, format).write(messages(spark, 0, 100), 0)
    other = Archiver(tmp_path, format, app="b" * 32)
    with pytest.raises(archive_sink.OverlapError, match="Was its checkpoint deleted"):
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


@pytest.mark.parametrize("stall", [1, 19, 20, 30, 200])
def test_a_number_that_was_pruned_is_not_given_again(tmp_path: Path, stall: int) -> None:
    """A writer stops between reading a version and making the next, while another goes on."""
    first, second = Archive(tmp_path), Archive(tmp_path)
    calls = []

    def slow(now: Manifest) -> Manifest:
        calls.append(now.version)
        if len(calls) == 1:
            for number in range(stall):
                second.commit(lambda current, n=number: replace(current, applied={"other": n}))
        return replace(now, applied={**now.applied, "slow": 1})

    done = first.commit(slow)
    assert calls == [0, stall]
    assert first.current() == done
    assert done.applied == {"other": stall - 1, "slow": 1}
    assert done.version == stall + 1


def test_a_writer_that_was_away_for_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops behind its link, and nobody can tell any more whether that counted."""
    monkeypatch.setattr(manifest, "ANCESTORS_KEPT", 3)
    first, second = Archive(tmp_path), Archive(tmp_path)
    sync = manifest.sync_directory

    def stall(path: Path) -> None:
        sync(path)
        monkeypatch.setattr(manifest, "sync_directory", sync)
        for number in range(5):
            second.commit(lambda current, n=number: replace(current, applied={"other": n}))

    monkeypatch.setattr(manifest, "sync_directory", stall)
    with pytest.raises(ManifestError, match="start again"):
        first.commit(lambda now: replace(now, applied={"slow": 1}))


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_version_counts_although_others_followed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    first, second = Archive(tmp_path), Archive(tmp_path)
    sync = manifest.sync_directory

    def stall(path: Path) -> None:
        monkeypatch.setattr(manifest, "sync_directory", sync)
        for number in range(others):
            second.commit(lambda now, n=number: replace(now, applied={**now.applied, "n": n}))

    monkeypatch.setattr(manifest, "sync_directory", stall)
    assert first.commit(lambda now: replace(now, applied={"slow": 1})).version == 1
    assert first.current().version == 1 + others
    assert first.current().applied["slow"] == 1


def test_a_commit_writes_few_files_of_a_large_archive(tmp_path: Path) -> None:
    """Goal: what a commit writes does not grow with the archive. Method: count what versions
    name."""
    archive = Archive(tmp_path)
    files = tuple(archived_file(number) for number in range(2000))
    archive.commit(lambda now: replace(now, files=files))
    sizes = []
    for number in range(2000, 2200):
        done = archive.commit(
            lambda now, n=number: replace(now, files=(*now.files, archived_file(n)))
        )
        text = (tmp_path / "_manifest" / f"{done.version:020d}.json").read_text()
        sizes.append(len(json.loads(text)["added"]))
    assert max(sizes) <= manifest.CHANGES_MIN
    assert Archive(tmp_path).current().files == (*files, *map(archived_file, range(2000, 2200)))
    gone = archive.commit(lambda now: replace(now, files=now.files[5:]))
    assert Archive(tmp_path).current().files == gone.files
    lists = list((tmp_path / "_manifest").glob("files-*"))
    assert 1 <= len(lists) <= 2, "lists that no version refers to are removed"


def archived_file(number: int) -> manifest.ArchivedFile:
    return manifest.ArchivedFile(
        path=f"data/{number}", rows=1, bytes=1, app="a", first_batch=number, last_batch=number
    )


def test_files_go_before_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dies between the two leaves no file that no version knows."""
    archive = Archive(tmp_path)
    (tmp_path / "old").touch()
    removed = (manifest.RemovedFile(path="old", at=0.0),)
    archive.commit(lambda now: replace(now, removed=removed))
    monkeypatch.setattr(archive, "commit", lambda change: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        archive.remove_replaced(0.0)
    assert not (tmp_path / "old").exists()
    assert Archive(tmp_path).remove_replaced(0.0) == 1
    assert Archive(tmp_path).current().removed == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "convoymq-archive/2"}',
        '{"format": "convoymq-archive/1"}',
    ],
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
    assert len(list((tmp_path / "_manifest").glob("0*.json"))) == 20
    assert json.loads((tmp_path / "_manifest" / f"{30:020d}.json").read_text())["version"] == 30


def test_bad_requests_are_refused_at_once(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing to archive"):
        pipeline.archive(spark, servers="127.0.0.1:1", target=tmp_path)
    with pytest.raises(OptionError, match="POSIX"):
        pipeline.archive(spark, servers="127.0.0.1:1", target="s3://b/a", streams=["s"])
    with pytest.raises(OptionError, match="there are parquet and delta"):
        pipeline._sink("orc", tmp_path, "a")


class Starting:
    """A query of Spark: it starts, or cannot."""

    def __init__(self, *, can: bool) -> None:
        self._can = can
        self.stopped = False

    def _with(self, *_values: Any, **_options: Any) -> Starting:
        return self

    queryName = foreachBatch = option = trigger = _with  # noqa: N815

    def start(self) -> Starting:
        if not self._can:
            raise OSError("no room for a checkpoint")
        return self

    def awaitTermination(self) -> None:  # noqa: N802
        raise AssertionError("not all queries have begun")

    def stop(self) -> None:
        self.stopped = True


def test_queries_that_have_begun_end_when_another_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Starting(can=True), Starting(can=False)
    sources = [
        ("streams", "topic", SimpleNamespace(writeStream=first)),
        ("queue-q", "queue", SimpleNamespace(writeStream=second)),
    ]
    monkeypatch.setattr(pipeline, "_sources", lambda *_arguments: sources)
    spark: Any = None
    with pytest.raises(OSError, match="no room"):
        pipeline.archive(spark, servers="", target=tmp_path, streams=["s"], queues=["q"])
    assert first.stopped
