"""Change events to tables: the table equals its source, whatever comes late, twice or broken."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from convoymq.capture.messages import Source, body_of, log_place, snapshot_place
from convoymq.spark.errors import OptionError
from convoymq.spark.pipelines import apply as pipeline
from convoymq.spark.pipelines import change_events, merging
from convoymq.spark.pipelines.apply import Events, TableSpec
from convoymq.spark.pipelines.merging import MergePath, chosen_path

ROW = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
SCHEMA = "id bigint, name string"


class Cut(Exception):
    """Where a test stops a batch."""


class Applier:
    """A pipeline's batches, one by one, with a point at which one stops (of one table, or of
    all)."""

    def __init__(
        self,
        spark: SparkSession,
        *specs: TableSpec,
        events: Events | None = None,
        bad_path: str | None = None,
        checkpoint: Path | None = None,
        followed: pipeline.FollowedTopic | None = None,
        of_topic: bool = False,
        merge: str = MergePath.AUTO,
        parallel: int = 4,
    ) -> None:
        targets = [pipeline._Target(spark, spec) for spec in specs]
        pipeline._check(targets, events or Events())
        self.stop: tuple[str, int] | None = None
        self.stop_table = ""
        self.probe: Callable[[str], object] | None = None
        self.report = pipeline.ApplyReport(
            tables={target.label: pipeline.TableReport() for target in targets}
        )
        self.write = pipeline._BatchApplier(
            targets,
            events or Events(),
            pipeline._mergers(spark, chosen_path(spark, merge), "app", targets, parallel),
            self.report,
            bad_path,
            self._probe,
            parallel=parallel,
            checkpoint=checkpoint,
            followed=followed,
            of_topic=of_topic,
        )

    def _probe(self, point: str, table: str, batch_id: int) -> None:
        if self.probe is not None:
            self.probe(point)
        if self.stop == (point, batch_id) and self.stop_table in ("", table):
            self.stop = None
            raise Cut


def frame(spark: SparkSession, events: list[Any], first: int = 0) -> DataFrame:
    return frame_at(spark, list(enumerate(events, first)))


def frame_at(spark: SparkSession, events: list[tuple[int, Any]]) -> DataFrame:
    """Events with their offsets."""
    rows = [
        (b"k", bytearray(e if isinstance(e, bytes) else json.dumps(e).encode()), "t", 0, i, NOW)
        for i, e in events
    ]
    return spark.createDataFrame(rows, ROW)


def write_side_by_side(
    applier: Applier,
    spark: SparkSession,
    cases: list[tuple[list[tuple[int, Any]], list[int]]],
    batches: Iterator[int],
) -> None:
    """Each case has rows of its own, and is cut into batches of its own: batch n has the n-th part
    of every case. Spark plans a batch once for all of them."""
    parts = []
    for events, cuts in cases:
        left = iter(events)
        parts.append([list(itertools.islice(left, count)) for count in cuts])
    for together in itertools.zip_longest(*parts, fillvalue=[]):
        applier.write(frame_at(spark, list(itertools.chain(*together))), next(batches))


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


@pytest.mark.parametrize("point", [pytest.param("merging", marks=pytest.mark.long), "merged"])
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


def test_an_older_checkpoint_leaves_no_event_out(spark: SparkSession, tmp_path: Path) -> None:
    """Its next batches have numbers that the table knows, and other events."""
    events, rows = changes(5, 400, 40)
    place = tmp_path / "state"
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, checkpoint=place)
    (place / "offsets").mkdir(parents=True)

    def write(batch_id: int, first: int, end: int) -> None:
        ends = json.dumps({"v": 1, "p": {"t": {"0": end}}})
        (place / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{ends}\n")
        applier.write(frame(spark, events[first:end], first), batch_id)

    for batch_id in range(3):
        write(batch_id, batch_id * 100, batch_id * 100 + 100)
    write(2, 200, 300)
    counts = applier.report.tables["t"]
    assert counts.skipped == 1
    write(1, 100, 350)
    write(2, 350, 400)
    assert counts.skipped == 1
    assert table(spark, tmp_path / "t") == rows


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
    monkeypatch.setattr(merging, "MERGE_ROWS_MAX", 20)
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
        event["source"]["lsn"] = number
    mixed = [{"payload": event} for event in [*first, *second]]
    random.Random(7).shuffle(mixed)
    applier = Applier(spark, *specs, events=Events(position_field="source.lsn"))
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


def test_equal_positions_are_decided_by_the_offset(spark: SparkSession, tmp_path: Path) -> None:
    """The rows of one transaction may share a position. However batches are cut, the later event
    wins, and an event that comes again changes nothing."""
    cuts = [[6], [3, 3], [6, 5], [1] * 6]

    def events(case: int) -> list[tuple[int, Any]]:
        made = [
            (10 * case + at, {"op": "u", "source": {"lsn": 5}, "after": {
                "id": 2 * case + at % 2, "name": f"{at % 2}-{at // 2}"}})
            for at in range(6)
        ]  # fmt: skip
        # In the third case all but the first come again.
        return made + made[1:]

    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=Events(position_field="source.lsn"))
    cases = [(events(case), counts) for case, counts in enumerate(cuts)]
    write_side_by_side(applier, spark, cases, itertools.count())
    assert table(spark, tmp_path / "t") == {n: f"{n % 2}-2" for n in range(2 * len(cuts))}


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        (t.TimeType(), "type time(6) is not served"),
        (t.CharType(3), "type char(3) is not served; take string"),
        (t.VarcharType(3), "type varchar(3) is not served; take string"),
        (t.VariantType(), "type variant is not served"),
        (t.DayTimeIntervalType(0, 0), "type interval day is not served"),
        (t.NullType(), "type void is not served"),
        (
            t.MapType(t.IntegerType(), t.StringType()),
            "the keys of a map are strings in JSON, not int",
        ),
    ],
)
def test_types_that_are_not_served_are_named(ddl: t.DataType, reason: str) -> None:
    assert change_events.unserved(ddl) == reason
    for inside in (
        t.ArrayType(ddl),
        t.MapType(t.StringType(), ddl),
        t.StructType([t.StructField("a", t.LongType()), t.StructField("b", ddl)]),
    ):
        assert change_events.unserved(inside) == reason


WIDE = (
    "id bigint, name string, words map<string,string>, small tinyint, price decimal(5,2), "
    "huge decimal(38,0), ratio double, flag boolean, "
    "day date, at timestamp, place struct<street:string, number:int>, tags array<int>, "
    "counts map<string,decimal(5,2)>, raw binary"
)
MISFITS = [
    ("small", '"abc"'),
    ("small", "1.9"),
    ("small", '"7"'),
    ("small", "200"),
    ("id", "12345678901234567890"),
    ("price", "12345.6"),
    ("price", "1.239"),
    ("price", '"1,5"'),
    ("huge", "1.9"),
    ("ratio", "1e400"),
    ("name", "1e400"),
    ("name", "-1e400"),
    ("words", '{"a": 1e400}'),
    ("place", '{"street": 1e400}'),
    ("ratio", '"much"'),
    ("flag", "1"),
    ("flag", '"true"'),
    ("day", '"2020-13-45"'),
    ("day", "18000"),
    ("day", '"1700000000"'),
    ("at", '"noon"'),
    ("at", "1700000000"),
    ("at", "1700000000000"),
    ("place", "5"),
    ("place", '{"street": "x", "number": "y"}'),
    ("tags", '[1, "x"]'),
    ("tags", "[1, 3000000000]"),
    ("counts", '{"a": 1.005}'),
    ("counts", "[]"),
    ("raw", '"!!"'),
]
FITS = {
    "id": "-9223372036854775808",
    "name": '"Infinity"',
    "words": '{"a": "NaN", "b": 1.5}',
    "small": "-128",
    "price": "-123.45",
    "huge": "12345678901234567890123456789012345678",
    "ratio": "0.1",
    "flag": "true",
    "day": '"2020-01-02"',
    "at": '"2020-01-02T03:04:05Z"',
    "place": '{"street": "x", "number": 1, "more": [1]}',
    "tags": "[1, null]",
    "counts": '{"a": 1.5, "b": "2.50"}',
    "raw": '"aGk="',
}


@pytest.mark.parametrize("envelope", ["debezium", "flat"])
def test_a_value_that_does_not_fit_is_never_written_as_null(
    spark: SparkSession, tmp_path: Path, envelope: str
) -> None:
    """A good row is followed by events with one value of another kind each: all are diverted with
    the column's name, and the row stays as it was."""

    def event(row: dict[str, str], *, inside: bool = False) -> bytes:
        text = ", ".join(f'"{name}": {value}' for name, value in row.items())
        if envelope == "flat":
            return f'{{"op": "update", {text}}}'.encode()
        text = f'{{"op": "u", "before": null, "after": {{{text}}}}}'
        return (f'{{"payload": {text}}}' if inside else text).encode()

    spec = TableSpec(path=str(tmp_path / "t"), schema=WIDE, keys=("id",))
    rules = Events(envelope=envelope)
    bad = str(tmp_path / "bad")
    applier = Applier(spark, spec, events=rules, bad_path=bad)
    good = {**FITS, "id": "7"}
    applier.write(frame(spark, [event(FITS), event(good), event({"id": "8", "day": "null"})]), 0)
    before = sorted(map(str, pipeline.rows(spark, spec.path).collect()))
    assert len(before) == 3, spark.read.parquet(bad).select("reason").collect()
    # A change stands for itself or inside a payload.
    forms = [False] if envelope == "flat" else [False, True]
    misfits = [(each, inside) for inside in forms for each in MISFITS]
    wrong = [event({**good, n: v}, inside=inside) for (n, v), inside in misfits]
    applier.write(frame(spark, wrong, 10), 1)
    assert sorted(map(str, pipeline.rows(spark, spec.path).collect())) == before
    reasons = spark.read.parquet(bad).orderBy("offset").collect()
    assert [row.offset for row in reasons] == list(range(10, 10 + len(misfits)))
    for row, ((name, value), _) in zip(reasons, misfits, strict=True):
        assert row.reason.startswith(f"{name}: ") or "does not fit" in row.reason, (name, value)
    strict = Applier(spark, spec, events=rules)
    with pytest.raises(pipeline.BadEvent, match="t/0@41: small: abc does not fit tinyint"):
        strict.write(frame(spark, [event({**good, "small": '"abc"'})], 41), 2)


def test_a_number_keeps_its_digits(spark: SparkSession, tmp_path: Path) -> None:
    """What passes through a double on its way loses the last ones."""
    price = "1234567890123456789.0123456789"
    text = f'{{"op": "c", "after": {{"id": 1, "price": {price}}}}}'
    spec = TableSpec(path=str(tmp_path / "t"), schema="id int, price decimal(38,10)", keys=("id",))
    Applier(spark, spec).write(frame(spark, [text.encode()]), 0)
    (row,) = pipeline.rows(spark, spec.path).collect()
    assert str(row.price) == price


def test_a_table_gets_the_columns_that_its_schema_has_gained(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "t")
    first = TableSpec(path=path, schema=SCHEMA, keys=("id",))
    wider = TableSpec(path=path, schema=f"{SCHEMA}, city string", keys=("id",))
    rows = [{"op": "c", "after": {"id": n, "name": f"v{n}", "city": f"c{n}"}} for n in range(2)]
    Applier(spark, first).write(frame(spark, rows), 0)
    pipeline._fit_table(pipeline._Target(spark, wider))
    Applier(spark, wider).write(frame(spark, rows[:1], 2), 1)
    found = {row.id: row.city for row in pipeline.rows(spark, path).collect()}
    assert found == {0: "c0", 1: None}
    for spec, text in (
        (first, r"columns \['city'\]"),
        (
            TableSpec(path=path, schema="id string, name string, city string", keys=("id",)),
            "bigint",
        ),
        (TableSpec(path=path, schema=wider.schema, keys=("name",)), "named by id"),
    ):
        with pytest.raises(OptionError, match=text):
            pipeline.apply(
                spark,
                servers="127.0.0.1:1",
                stream="s",
                tables=[spec],
                checkpoint=tmp_path / "state",
            )


@pytest.mark.parametrize("envelope", ["debezium", "flat"])
def test_only_a_known_operation_changes_a_row(
    spark: SparkSession, tmp_path: Path, envelope: str
) -> None:
    ops = ["drop", "delay", "D", "deleted", "Update", "insert-ignore", ""]
    rows = [{"id": number, "name": "x"} for number in range(len(ops))]
    made = [{"op": "c", "after": row, **row} for row in rows]
    changed = [
        {"op": op, "before": row, "after": row} if envelope == "debezium" else {"op": op, **row}
        for op, row in zip(ops, rows, strict=True)
    ]
    spec, bad = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)), tmp_path / "bad"
    applier = Applier(spark, spec, events=Events(envelope=envelope), bad_path=str(bad))
    applier.write(frame(spark, [*made, *changed]), 0)
    deleted = ops.index("D")
    assert table(spark, tmp_path / "t") == {n: "x" for n in range(len(ops)) if n != deleted}
    diverted = {row.offset - len(ops) for row in spark.read.parquet(str(bad)).collect()}
    known = {deleted} | ({ops.index("Update")} if envelope == "flat" else set())
    assert diverted == {*range(len(ops))} - known


BAD: list[tuple[Any, str]] = [
    (b"{nope", "not JSON"),
    (b'{"op": "c", "after": {"id": 1', "not JSON"),
    (b'{"op": "c", "after": {"id": 1, "name": "\xff"}}', "not UTF-8"),
    ({"after": {"id": 1}}, "without an operation"),
    ({"op": "x", "after": {"id": 1}}, "unknown operation"),
    ({"op": "c", "after": {"name": "x"}}, "without its key"),
    ({"op": "d", "before": None}, "without its key"),
]


def test_bad_events_are_diverted_with_a_reason_or_stop_the_pipeline(
    spark: SparkSession, tmp_path: Path
) -> None:
    spec, bad = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",)), tmp_path / "bad"
    events = [event for event, _ in BAD]
    Applier(spark, spec, bad_path=str(bad)).write(frame(spark, events, 41), 0)
    found = spark.read.parquet(str(bad)).orderBy("offset").collect()
    for row, (_, reason) in zip(found, BAD, strict=True):
        assert reason in row.reason
    for event in (events[0], events[-1]):
        with pytest.raises(pipeline.BadEvent, match="t/0@41: "):
            Applier(spark, spec).write(frame(spark, [event], 41), 1)


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
    reasons = [row.reason for row in spark.read.parquet(bad).collect()]
    assert len(reasons) == len(BAD) + 1
    assert sum("no such table: z" in reason for reason in reasons) == 1


def test_specs_that_do_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path)
    for spec, text in (
        (TableSpec(path=path, schema="id bigin", keys=("id",)), "schema"),
        (TableSpec(path=path, schema="id int, at time", keys=("id",)), "at: type time"),
        (TableSpec(path=path, schema="id int, m map<int,int>", keys=("id",)), "m: the keys"),
        (TableSpec(path=path, schema="id int, c char(3)", keys=("id",)), "c: type char"),
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


@pytest.mark.parametrize("envelope", ["debezium", "flat", "upsert"])
def test_a_table_has_no_column_that_is_not_null(
    spark: SparkSession, tmp_path: Path, envelope: str
) -> None:
    """Delta Lake's extension merges into no table that has one beside a timestamp without zone."""
    path, row = tmp_path / "t", {"id": 1, "at": "2026-01-01T00:00:00"}
    event = {"debezium": {"op": "c", "after": row}, "flat": {"op": "c", **row}, "upsert": row}
    spec = TableSpec(path=str(path), schema="id int, at timestamp_ntz", keys=("id",))
    applier = Applier(spark, spec, events=Events(envelope=envelope))
    applier.write(frame(spark, [event[envelope]]), 0)
    assert all(each.nullable for each in DeltaTable(str(path)).schema().fields)
    assert [each.id for each in pipeline.rows(spark, str(path)).collect()] == [1]


def test_a_row_with_another_key_takes_the_former_one_with_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    cuts = [[6], [2, 1, 3], [1] * 6]

    def events(base: int) -> list[Any]:
        def row(key: int, name: str) -> dict[str, Any]:
            return {"id": base + key, "name": name}

        return [
            {"op": "c", "after": row(1, "one")},
            {"op": "c", "after": row(2, "two")},
            {"op": "u", "before": row(1, "one"), "after": row(3, "one")},
            # It comes back under the former key, and changes without telling of it.
            {"op": "c", "after": row(1, "again")},
            {"op": "u", "before": None, "after": row(2, "zwei")},
            {"payload": {"op": "u", "before": {"id": base + 2}, "after": row(4, "four")}},
        ]

    bases = [10 * case for case in range(len(cuts))]
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier, batches = Applier(spark, spec), itertools.count()
    cases = [
        (list(enumerate(events(base), base)), counts)
        for base, counts in zip(bases, cuts, strict=True)
    ]
    write_side_by_side(applier, spark, cases, batches)
    rows = {base + key: name for base in bases for key, name in
            ((1, "again"), (3, "one"), (4, "four"))}  # fmt: skip
    assert table(spark, tmp_path / "t") == rows
    # The tombstone of a former key is as old as its event.
    late = [
        (base + 4, {"op": "u", "before": None, "after": {"id": base + 2, "name": "late"}})
        for base in bases
    ]
    applier.write(frame_at(spark, late), next(batches))
    assert table(spark, tmp_path / "t") == rows


def test_keys_of_several_columns_change_in_one_of_them(spark: SparkSession, tmp_path: Path) -> None:
    row = {"shop": 1, "id": 1, "name": "a"}
    events = [
        {"op": "c", "after": row},
        {"op": "u", "before": row, "after": {**row, "shop": 2}},
        {"op": "u", "before": {**row, "shop": 2}, "after": {**row, "shop": 2, "name": "b"}},
    ]
    schema = "shop int, id bigint, name string"
    spec = TableSpec(path=str(tmp_path / "t"), schema=schema, keys=("shop", "id"))
    Applier(spark, spec).write(frame(spark, events), 0)
    assert [tuple(row) for row in pipeline.rows(spark, spec.path).collect()] == [(2, 1, "b")]


@pytest.mark.parametrize(
    ("rows_max", "cuts"),
    [
        (1, ([7], [4, 3])),
        pytest.param(1_000_000, ([7], [2, 1, 4], [1] * 7), marks=pytest.mark.long),
    ],
)
def test_a_truncate_removes_the_rows_before_it(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_max: int,
    cuts: tuple[list[int], ...],
) -> None:
    """Each way to cut the events into batches has a table of its own."""
    monkeypatch.setattr(merging, "MERGE_ROWS_MAX", rows_max)
    names = [f"t{number}" for number in range(len(cuts))]

    def of_table(name: str, *events: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**event, "source": {"table": name}} for event in events]

    def of_all(*events: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for name in names for each in of_table(name, *events)]

    events = [
        {"op": "c", "after": {"id": 1, "name": "one"}},
        {"op": "c", "after": {"id": 2, "name": "two"}},
        {"op": "t", "before": None, "after": None},
        {"op": "m", "message": {"prefix": "p", "content": "YQ=="}},
        {"op": "c", "after": {"id": 2, "name": "new"}},
        {"op": "t"},
        {"op": "c", "after": {"id": 3, "name": "three"}},
    ]
    specs = [
        TableSpec(name=name, path=str(tmp_path / name), schema=SCHEMA, keys=("id",))
        for name in names
    ]
    applier = Applier(spark, *specs)

    def assert_all_hold(rows: dict[int, str]) -> None:
        assert [table(spark, Path(spec.path)) for spec in specs] == [rows] * len(specs)

    batches = itertools.count()
    cases = [
        (list(enumerate(of_table(name, *events))), counts)
        for name, counts in zip(names, cuts, strict=True)
    ]
    write_side_by_side(applier, spark, cases, batches)
    assert_all_hold({3: "three"})
    # What is older than it comes late: rows of before, and rows that the table has never had.
    late = of_all(*({"op": "u", "after": {"id": key, "name": "late"}} for key in (1, 2, 9)))
    before = [(2 + at % 3, event) for at, event in enumerate(late)]
    applier.write(frame_at(spark, before), next(batches))
    assert_all_hold({3: "three"})
    for spec in specs:
        pipeline.purge(spec.path, datetime.timedelta(0))
    applier.write(frame_at(spark, before), next(batches))
    made = of_all({"op": "c", "after": {"id": 9, "name": "nine"}})
    applier.write(frame_at(spark, [(7, event) for event in made]), next(batches))
    assert_all_hold({3: "three", 9: "nine"})


def test_a_truncate_that_is_cut_off_is_carried_out_by_the_repeat(
    spark: SparkSession, tmp_path: Path
) -> None:
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=Events(envelope="flat"))
    applier.write(frame(spark, [{"op": "c", "id": 1, "name": "one"}]), 0)
    emptying = frame(spark, [{"op": "truncate"}], 1)
    applier.stop = ("merging", 1)
    with pytest.raises(Cut):
        applier.write(emptying, 1)
    applier.write(emptying, 1)
    assert table(spark, tmp_path / "t") == {}


def test_tokens_of_a_topic_order_one_key_only(spark: SparkSession, tmp_path: Path) -> None:
    """What concerns other keys as well is a bad event, unless the source has a position for it."""
    schema = f"{ROW}, route_version bigint"
    events = [
        {"op": "c", "after": {"id": 1, "name": "one"}, "source": {"file": "b.9", "pos": 900}},
        {"op": "u", "before": {"id": 1}, "after": {"id": 2, "name": "one"},
         "source": {"file": "b.10", "pos": 4}},
        {"op": "c", "after": {"id": 1, "name": "new"}, "source": {"file": "b.10", "pos": 40}},
        {"op": "t", "source": {"file": "b.10", "pos": 50}},
        {"op": "c", "after": {"id": 5, "name": "five"}, "source": {"file": "b.10", "pos": 60}},
    ]  # fmt: skip
    # Partitions of their own: the later an event is, the lower is its offset.
    rows = [
        (b"k", json.dumps(event).encode(), "t", 9 - at, 9 - at, NOW, 0)
        for at, event in enumerate(events)
    ]
    bad = str(tmp_path / "bad")
    followed = pipeline.FollowedTopic("t", 1)
    spec = TableSpec(path=str(tmp_path / "tokens"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, followed=followed, bad_path=bad)
    applier.write(spark.createDataFrame(rows, schema), 0)
    assert applier.report.diverted == 2
    reasons = {row.reason for row in spark.read.parquet(bad).select("reason").collect()}
    assert {reason.split(":")[0] for reason in reasons} == {
        "the row has another key now",
        "all rows of the table are gone",
    }
    spec = TableSpec(path=str(tmp_path / "positions"), schema=SCHEMA, keys=("id",))
    rules = Events(position_field="source.file,source.pos")
    for cut in range(1, 5):
        spec = TableSpec(path=str(tmp_path / f"positions{cut}"), schema=SCHEMA, keys=("id",))
        applier = Applier(spark, spec, events=rules, of_topic=True)
        applier.write(spark.createDataFrame(rows[cut:], schema), 0)
        applier.write(spark.createDataFrame(rows[:cut], schema), 1)
        assert table(spark, Path(spec.path)) == {5: "five"}


def test_events_of_a_capture_are_taken_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """A snapshot, its log, a change of a key as two events, and a truncate under a key of its own,
    in whatever order the partitions of the topic are read."""

    def event(op: str, place: bytes, before: Any, after: Any, table: str = "orders") -> bytes:
        source = Source(
            database="shop", table=table, gtid="0-1-7", place=place, is_snapshot=op == "r",
            time_ms=1,
        )  # fmt: skip
        return body_of(op, before, after, source)

    def row(key: int, name: str) -> dict[str, Any]:
        return {"id": key, "name": name}

    events = [
        event("r", snapshot_place(0, 1, 1), None, row(1, "one")),
        event("r", snapshot_place(0, 1, 2), None, row(2, "two")),
        event("u", log_place(0, 9, 1), row(2, "two"), row(2, "zwei")),
        event("t", log_place(0, 10, 1), None, None),
        event("c", log_place(0, 99, 1), None, row(1, "again")),
        event("d", log_place(0, 100, 1), row(1, "again"), None),
        event("c", log_place(0, 100, 2), None, row(5, "again")),
        event("c", log_place(0, 101, 1), None, row(7, "x"), "other"),
    ]
    schema = f"{ROW}, route_version bigint"
    rules = Events(position_field="source.place")
    for seed in range(3):
        shuffled = random.Random(seed).sample(list(enumerate(events)), len(events))
        rows = [(b"k", body, "t", at, 9 - at, NOW, at % 2) for at, body in shuffled]
        specs = [
            TableSpec(name=name, path=str(tmp_path / f"{name}{seed}"), schema=SCHEMA, keys=("id",))
            for name in ("orders", "other")
        ]
        applier = Applier(spark, *specs, events=rules, of_topic=True)
        applier.write(spark.createDataFrame(rows[:4], schema), 0)
        applier.write(spark.createDataFrame(rows[4:], schema), 1)
        assert table(spark, Path(specs[0].path)) == {5: "again"}
        assert table(spark, Path(specs[1].path)) == {7: "x"}


POSITIONS = [
    ("source.file,source.pos", [("b.000999", 4), ("b.000999", 70), ("b.001000", 4), ("b.001000", 9),
                                ("b.1000000", 1)]),
    ("source.gtid", [("0-9-8",), ("0-9-9",), ("0-1-10",), ("0-1-100",), ("0-1-1000",)]),
    ("source.lsn", [(8,), (9,), (10,), (1 << 62,), ((1 << 64) - 1,)]),
    ("source.place", [(f"{number:034x}",) for number in (1, 9, 10, 171, 1 << 130)]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "places"), POSITIONS)
def test_positions_of_the_source_order_events(
    spark: SparkSession, tmp_path: Path, field: str, places: list[tuple[Any, ...]]
) -> None:
    """Whatever order they come in, and however batches are cut."""
    names = [name.removeprefix("source.") for name in field.split(",")]
    cases = []
    for key, order in enumerate(([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 3, 4, 0, 1])):
        events = [
            {"op": "u", "after": {"id": key, "name": f"v{at}"},
             "source": dict(zip(names, places[at], strict=True))}
            for at in order
        ]  # fmt: skip
        cases.append((list(enumerate(events)), [2, 3]))
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=Events(position_field=field))
    write_side_by_side(applier, spark, cases, itertools.count())
    assert table(spark, tmp_path / "t") == dict.fromkeys(range(3), "v4")


def test_positions_without_an_order_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    with pytest.raises(OptionError, match=r"take source\.file,source\.pos"):
        Applier(spark, spec, events=Events(position_field="source.pos"))
    places: list[Any] = ["0/16B3748", "3E11FA47-71CA-11E1-9E33-C80AA9429562:23", -1, 1.5, None, {}]
    events = [{"op": "c", "after": {"id": 1}, "source": {"at": place}} for place in places]
    bad = str(tmp_path / "bad")
    applier = Applier(spark, spec, events=Events(position_field="source.at"), bad_path=bad)
    applier.write(frame(spark, events), 0)
    found = spark.read.parquet(bad).select("reason").collect()
    assert [row.reason for row in found] == ["without its position"] * len(places)


def test_a_table_keeps_its_kind_of_positions(spark: SparkSession, tmp_path: Path) -> None:
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    rules = Events(position_field="source.lsn")
    event = {"op": "c", "after": {"id": 1, "name": "x"}, "source": {"lsn": 5}}
    Applier(spark, spec, events=rules).write(frame(spark, [event]), 0)
    target = pipeline._Target(spark, spec)
    pipeline._fit_table(target, None, rules)
    assert not target.as_number
    for other in (Events(), Events(position_field="source.file,source.pos")):
        with pytest.raises(OptionError, match=r"ordered by source\.lsn, which do not compare"):
            pipeline._fit_table(target, None, other)
    # One that release 0.3 has made has numbers, and goes on with them.
    old = TableSpec(path=str(tmp_path / "old"), schema=SCHEMA, keys=("id",))
    Applier(spark, old).write(frame(spark, [event]), 0)
    target = pipeline._Target(spark, old)
    pipeline._fit_table(target, None, rules)
    assert target.as_number
    with pytest.raises(OptionError, match="do not compare"):
        pipeline._fit_table(target, None, Events(position_field="source.file,source.pos"))


HOSTILE: list[bytes] = [
    b"[" * 5000 + b"]" * 5000,
    b'{"op": "c", "after": {"id": ' + b"9" * 5000 + b"}}",
    b'{"op": "c", "after": {"id": 1, "amount": 1e999999999}}',
    b'{"op": "c", "after": {"id": 1, "amount": 1e-999999999}}',
    b'{"op": "c", "after": {"id": NaN}}',
    b'{"op": "c", "after": {"id": {"id": 1}}}',
    b'{"op": ["c"], "after": {"id": 1}}',
    b'{"op": "c", "after": []}',
    b"\x00\xff\xfe",
    b"null",
    b'"c"',
]


def test_no_body_fails_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    good = b'{"op": "c", "after": {"id": 7, "amount": 1.5}}'
    odd = b'{"op": "c", "after": {"id": 8, "amount": 2}, "after": {"id": 8, "amount": 2}}'
    schema = "id bigint, amount decimal(10,2)"
    spec = TableSpec(path=str(tmp_path / "t"), schema=schema, keys=("id",))
    applier = Applier(spark, spec, bad_path=str(tmp_path / "bad"))
    applier.write(frame(spark, [*HOSTILE, good, odd]), 0)
    assert {row.id for row in pipeline.rows(spark, spec.path).collect()} == {7, 8}
    assert applier.report.diverted == len(HOSTILE)


def test_a_weak_topic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order tokens do not say which change of a row is the newer one."""

    class Topic:
        def __init__(self, options: object) -> None:
            self.name = "logs"
            self.client = self

        def topic_route(self, topic: str, *, lineage: bool) -> Any:
            return SimpleNamespace(mode="weak")

    monkeypatch.setattr("convoymq.spark.topic_broker.Topic", Topic)
    with pytest.raises(OptionError, match="topic logs is weak"):
        pipeline._followed({"servers": "127.0.0.1:5672", "topic": "logs"})
