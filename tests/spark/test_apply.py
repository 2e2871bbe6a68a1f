"""Change events to tables: the table equals its source, whatever comes late, twice or broken."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from convoymq.spark.errors import OptionError
from convoymq.spark.pipelines import apply as pipeline
from convoymq.spark.pipelines.apply import Events, TableSpec

ROW = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
SCHEMA = "id bigint, name string"


class Cut(Exception):
    """Where a test stops a batch."""


class Applier:
    """A pipeline's batches, one by one, with a point at which one stops."""

    def __init__(
        self,
        spark: SparkSession,
        *specs: TableSpec,
        events: Events | None = None,
        bad_path: str | None = None,
    ) -> None:
        targets = [pipeline._Target(spark, spec) for spec in specs]
        pipeline._check(targets, events or Events())
        self.stop: tuple[str, int] | None = None
        self.report = pipeline.ApplyReport(
            tables={target.label: pipeline.TableReport() for target in targets}
        )
        self.write = pipeline._BatchApplier(
            targets, events or Events(), "app", self.report, bad_path, self._probe
        )

    def _probe(self, point: str, table: str, batch_id: int) -> None:
        if self.stop == (point, batch_id):
            self.stop = None
            raise Cut


def frame(spark: SparkSession, events: list[Any], first: int = 0) -> DataFrame:
    rows = [
        (b"k", bytearray(e if isinstance(e, bytes) else json.dumps(e).encode()), "t", 0, i, NOW)
        for i, e in enumerate(events, first)
    ]
    return spark.createDataFrame(rows, ROW)


def changes(seed: int, count: int, keys: int, table: str = "") -> tuple[list[Any], dict[int, str]]:
    """Random inserts, updates and deletes, and the rows that are left."""
    rng = random.Random(seed)
    rows: dict[int, str] = {}
    events: list[Any] = []
    for i in range(count):
        key = rng.randrange(keys)
        source = {"table": table}
        if key in rows and rng.random() < 0.3:
            del rows[key]
            events.append({"op": "d", "before": {"id": key}, "after": None, "source": source})
        else:
            op = "u" if key in rows else "c"
            rows[key] = f"v{i}"
            after = {"id": key, "name": f"v{i}"}
            events.append({"op": op, "before": None, "after": after, "source": source})
    return events, rows


def table(spark: SparkSession, path: Path) -> dict[int, str]:
    found = pipeline.rows(spark, str(path)).collect()
    assert len({row.id for row in found}) == len(found)
    return {row.id: row.name for row in found}


@pytest.mark.parametrize("point", ["merging", "merged"])
def test_a_cut_between_merge_and_checkpoint(
    spark: SparkSession, tmp_path: Path, point: str
) -> None:
    events, rows = changes(1, 1200, 100)
    applier = Applier(spark, TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)))
    for batch in range(4):
        part = frame(spark, events[batch * 300 : batch * 300 + 300], batch * 300)
        if batch == 2:
            applier.stop = (point, 2)
            with pytest.raises(Cut):
                applier.write(part, batch)
        applier.write(part, batch)
    assert table(spark, tmp_path / "t") == rows
    assert applier.report.tables["t"].skipped == (point == "merged")


def test_late_events_do_not_undo_younger_ones(spark: SparkSession, tmp_path: Path) -> None:
    events, rows = changes(2, 600, 60)
    applier = Applier(spark, TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)))
    for number, first in enumerate((400, 0, 200)):
        applier.write(frame(spark, events[first : first + 200], first), number)
    assert table(spark, tmp_path / "t") == rows


def test_tombstones_go_by_age_and_rows_stay(spark: SparkSession, tmp_path: Path) -> None:
    events, rows = changes(3, 300, 40)
    applier = Applier(spark, TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)))
    applier.write(frame(spark, events), 0)
    path = str(tmp_path / "t")
    assert pipeline.purge(path, datetime.timedelta(days=36500)) == 0
    assert pipeline.purge(path, datetime.timedelta(0)) > 0
    assert table(spark, tmp_path / "t") == rows


def test_large_batches_are_merged_in_slices(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MERGE_ROWS_MAX", 20)
    events, rows = changes(4, 400, 90)
    applier = Applier(spark, TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)))
    applier.stop = ("merged", 0)
    with pytest.raises(Cut):
        applier.write(frame(spark, events), 0)
    applier.write(frame(spark, events), 0)
    assert table(spark, tmp_path / "t") == rows


def test_several_tables_and_a_position_of_the_source(spark: SparkSession, tmp_path: Path) -> None:
    specs = [
        TableSpec(name=name, path=str(tmp_path / name), schema=SCHEMA, keys=("id",))
        for name in ("a", "b")
    ]
    first, rows_a = changes(5, 200, 20, "a")
    second, rows_b = changes(6, 200, 20, "b")
    for number, event in enumerate([*first, *second]):
        event["source"]["pos"] = number
    mixed = [{"payload": event} for event in [*first, *second]]
    random.Random(7).shuffle(mixed)
    applier = Applier(spark, *specs, events=Events(position_field="source.pos"))
    applier.write(frame(spark, mixed), 0)
    assert table(spark, tmp_path / "a") == rows_a
    assert table(spark, tmp_path / "b") == rows_b


def test_flat_events(spark: SparkSession, tmp_path: Path) -> None:
    events = [
        {"op": "insert", "id": 1, "name": "one"},
        {"op": "INSERT", "id": 2, "name": "two"},
        {"op": "update", "id": 1, "name": "uno"},
        {"op": "delete", "id": 2},
        b"",
    ]
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=Events(envelope="flat"))
    applier.write(frame(spark, events), 0)
    assert table(spark, tmp_path / "t") == {1: "uno"}


BAD: list[tuple[Any, str]] = [
    (b"{nope", "not JSON"),
    ({"after": {"id": 1}}, "without an operation"),
    ({"op": "x", "after": {"id": 1}}, "unknown operation"),
    ({"op": "c", "after": {"name": "x"}}, "without its key"),
    ({"op": "d", "before": None}, "without its key"),
]


@pytest.mark.parametrize(("event", "reason"), BAD)
def test_bad_events_stop_the_pipeline(
    spark: SparkSession, tmp_path: Path, event: Any, reason: str
) -> None:
    applier = Applier(spark, TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)))
    with pytest.raises(pipeline.BadEvent, match=f"t/0@41: .*{reason}"):
        applier.write(frame(spark, [event], 41), 0)


def test_bad_events_go_where_they_are_told(spark: SparkSession, tmp_path: Path) -> None:
    good = {"op": "c", "after": {"id": 7, "name": "x"}, "source": {"table": "a"}}
    lost = {"op": "c", "after": {"id": 8, "name": "x"}, "source": {"table": "z"}}
    named = [
        {**event, "source": {"table": "a"}} if isinstance(event, dict) else event
        for event, _ in BAD
    ]
    spec = TableSpec(name="a", path=str(tmp_path / "a"), schema=SCHEMA, keys=("id",))
    bad = str(tmp_path / "bad")
    applier = Applier(spark, spec, bad_path=bad)
    for _ in range(2):
        applier.write(frame(spark, [*named, good, lost]), 0)
    assert table(spark, tmp_path / "a") == {7: "x"}
    found = spark.read.parquet(bad)
    assert found.count() == len(BAD) + 1
    assert found.where(f.col("reason").contains("no such table: z")).count() == 1


def test_specs_that_do_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path)
    for spec, text in (
        (TableSpec(path=path, schema="id bigin", keys=("id",)), "schema"),
        (TableSpec(path=path, schema=SCHEMA, keys=("nr",)), "keys"),
        (TableSpec(path=path, schema=SCHEMA, keys=()), "keys"),
        (TableSpec(path=path, schema="id int, _deleted int", keys=("id",)), "own"),
    ):
        with pytest.raises(OptionError, match=text):
            Applier(spark, spec)
    good = TableSpec(path=path, schema=SCHEMA, keys=("id",))
    with pytest.raises(OptionError, match="name of its own"):
        Applier(spark, good, good)
    with pytest.raises(OptionError, match="envelope"):
        Applier(spark, good, events=Events(envelope="xml"))
