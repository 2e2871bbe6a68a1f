"""Values of Kafka Connect's converters: what apply makes of them, against plain Python."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from convoymq.spark.errors import OptionError
from convoymq.spark.pipelines import apply as pipeline
from convoymq.spark.pipelines.apply import Events, TableSpec
from tests.spark.support import SCALE
from tests.spark.test_apply import Applier, frame

CONNECT = "org.apache.kafka.connect.data."
DEBEZIUM = "io.debezium."
EPOCH = datetime.datetime(1970, 1, 1)
SCHEMAS = Events(connect_schemas=True)
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "price": ("decimal(12,3)", (f"{CONNECT}Decimal",)),
    "huge": ("decimal(38,0)", (f"{CONNECT}Decimal",)),
    "any": ("decimal(38,10)", (f"{DEBEZIUM}data.VariableScaleDecimal",)),
    "day": ("date", (f"{DEBEZIUM}time.Date", f"{CONNECT}Date")),
    "at": (
        "timestamp",
        (
            f"{DEBEZIUM}time.Timestamp",
            f"{CONNECT}Timestamp",
            f"{DEBEZIUM}time.MicroTimestamp",
            f"{DEBEZIUM}time.NanoTimestamp",
        ),
    ),
    "local": (
        "timestamp_ntz",
        (
            f"{DEBEZIUM}time.Timestamp",
            f"{DEBEZIUM}time.MicroTimestamp",
            f"{DEBEZIUM}time.NanoTimestamp",
        ),
    ),
    "clock": (
        "string",
        (
            f"{DEBEZIUM}time.Time",
            f"{CONNECT}Time",
            f"{DEBEZIUM}time.MicroTime",
            f"{DEBEZIUM}time.NanoTime",
        ),
    ),
    "flags": ("bigint", (f"{DEBEZIUM}data.Bits",)),
}
SCHEMA = ", ".join(["id int", *(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())])
UNITS = {"Nano": 1_000_000_000, "Micro": 1_000_000}


def unit(name: str) -> int:
    """Returns how many of a type's units are a second."""
    last = name.rsplit(".", 1)[1]
    return next((count for word, count in UNITS.items() if last.startswith(word)), 1000)


def signed(number: int) -> str:
    size = number.bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def some(rng: random.Random, column: str, name: str) -> tuple[Any, Any, dict[str, str] | None]:
    """Returns a value in JSON, what the column has then, and the parameters of its schema."""
    if column in ("price", "huge"):
        scale, digits = (rng.randrange(4), 12) if column == "price" else (0, 38)
        most = 10 ** (digits - (3 - scale if column == "price" else 0)) - 1
        number = rng.choice([0, -1, 1, 127, 128, -128, -129, most, -most, rng.randint(-most, most)])
        with decimal.localcontext(prec=60):
            value = decimal.Decimal(number).scaleb(-scale)
        return signed(number), value, {"scale": str(scale)}
    if column == "any":
        scale, number = rng.randrange(-3, 11), rng.randint(-(10**15), 10**15)
        with decimal.localcontext(prec=60):
            value = decimal.Decimal(number).scaleb(-scale)
        return {"scale": scale, "value": signed(number)}, value, None
    if column == "day":
        days = rng.randint(-719_162, 2_932_896)
        return days, EPOCH.date() + datetime.timedelta(days=days), None
    if column in ("at", "local"):
        ticks = rng.choice(
            [-1, 0, 1, -86_400_000_000, rng.randint(-62_135_500_000, 253_402_200_000) * 1_000_000]
        ) + rng.randrange(1_000_000)
        if unit(name) == 1000:
            ticks -= ticks % 1000
        if unit(name) == UNITS["Nano"]:
            # 64 bits of nanoseconds are 292 years.
            ticks %= 9_000_000_000_000_000
        moment = EPOCH + datetime.timedelta(microseconds=ticks)
        return ticks * unit(name) // 1_000_000, moment, None
    if column == "clock":
        micros = rng.choice([0, 1000, -1000, rng.randint(-3_020_399_000, 3_020_399_000) * 1000])
        left, below = divmod(abs(micros), 1_000_000)
        sign = "-" if micros < 0 else ""
        text = f"{sign}{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02}"
        return micros * unit(name) // 1_000_000, text + (f".{below:06}" if below else ""), None
    number = rng.choice([0, 1, 255, 256, rng.getrandbits(63)])
    size = max(1, (number.bit_length() + 7) // 8)
    return base64.b64encode(number.to_bytes(size, "little")).decode(), number, {"length": "63"}


def event(id: int, values: dict[str, tuple[str, Any, dict[str, str] | None]]) -> dict[str, Any]:
    """Returns an event with its schema, as a converter with schemas.enable makes it."""
    fields: list[dict[str, Any]] = [{"field": "id", "type": "int32", "optional": False}]
    for column, (name, _, parameters) in values.items():
        more = {} if parameters is None else {"parameters": parameters}
        fields.append({"field": column, "type": "bytes", "name": name, "version": 1, **more})
    row = {"id": id, **{column: value for column, (_, value, _) in values.items()}}
    sides = [{"field": side, "type": "struct", "fields": fields} for side in ("before", "after")]
    return {
        "schema": {"type": "struct", "fields": [*sides, {"field": "op", "type": "string"}]},
        "payload": {"op": "c", "before": None, "after": row, "source": {"table": "t"}},
    }


def held(spark: SparkSession, path: Path) -> dict[int, dict[str, Any]]:
    """Returns the table's rows; times as they are in UTC."""
    rows = pipeline.rows(spark, str(path)).withColumn("at", f.unix_micros("at"))
    return {row.id: row.asDict() for row in rows.collect()}


def shown(column: str, value: Any) -> Any:
    if column == "at" and value is not None:
        return (value - EPOCH) // datetime.timedelta(microseconds=1)
    return value


@pytest.mark.parametrize("seed", [1] if SCALE == 1 else [1, 2, 3])
def test_values_of_a_schema_are_those_of_their_columns(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    events, expected = [], {}
    for id in range(300):
        values, row = {}, {"id": id}
        for column, (_, names) in COLUMNS.items():
            name = rng.choice(names)
            if rng.random() < 0.1:
                values[column], row[column] = (name, None, None), None
                continue
            raw, value, parameters = some(rng, column, name)
            values[column], row[column] = (name, raw, parameters), shown(column, value)
        events.append(event(id, values))
        expected[id] = row
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=SCHEMAS)
    applier.write(frame(spark, events), 0)
    assert held(spark, tmp_path / "t") == expected


@pytest.mark.parametrize("envelope", ["debezium", "flat", "upsert"])
def test_a_declared_type_stands_for_a_schema_that_is_not_there(
    spark: SparkSession, tmp_path: Path, envelope: str
) -> None:
    rng = random.Random(7)
    chosen = {column: names[-1] for column, (_, names) in COLUMNS.items()}
    ddl = ", ".join(
        ["id int", *(f"{c} {COLUMNS[c][0]} COMMENT '{name}'" for c, name in chosen.items())]
    )
    events, expected = [], {}
    for id in range(40):
        row, found = {"id": id}, {"id": id}
        for column, name in chosen.items():
            raw, value, parameters = some(rng, column, name)
            while parameters is not None and parameters.get("scale", "3") not in ("0", "3"):
                raw, value, parameters = some(rng, column, name)
            if column == "price" and parameters == {"scale": "0"}:
                raw, value = signed(7), decimal.Decimal("0.007")
            row[column], found[column] = raw, shown(column, value)
        message = {"op": "c", "after": row} if envelope == "debezium" else {"op": "c", **row}
        events.append(message)
        expected[id] = found
    spec = TableSpec(path=str(tmp_path / "t"), schema=ddl, keys=("id",))
    applier = Applier(spark, spec, events=Events(envelope=envelope))
    applier.write(frame(spark, events), 0)
    assert held(spark, tmp_path / "t") == expected


MISFITS: list[tuple[str, str, Any, dict[str, str] | None]] = [
    ("price", f"{CONNECT}Decimal", signed(10**12), {"scale": "3"}),
    ("price", f"{CONNECT}Decimal", signed(12345), {"scale": "4"}),
    ("price", f"{CONNECT}Decimal", signed(5), {"scale": "99"}),
    ("price", f"{CONNECT}Decimal", signed(5), None),
    ("price", f"{CONNECT}Decimal", "!!", {"scale": "3"}),
    ("price", f"{CONNECT}Decimal", "", {"scale": "3"}),
    ("huge", f"{CONNECT}Decimal", signed(10**38), {"scale": "0"}),
    ("huge", f"{CONNECT}Decimal", signed(1 << 200), {"scale": "0"}),
    ("any", f"{DEBEZIUM}data.VariableScaleDecimal", {"scale": 11, "value": signed(1)}, None),
    ("any", f"{DEBEZIUM}data.VariableScaleDecimal", 5, None),
    ("day", f"{DEBEZIUM}time.Date", 1 << 40, None),
    ("day", f"{DEBEZIUM}time.Date", 3_000_000, None),
    ("day", f"{DEBEZIUM}time.Date", 1.5, None),
    ("at", f"{DEBEZIUM}time.Timestamp", (1 << 63) - 1, None),
    ("at", f"{DEBEZIUM}time.NanoTimestamp", 1_000_000_001, None),
    ("local", f"{DEBEZIUM}time.MicroTimestamp", -(1 << 63), None),
    ("clock", f"{DEBEZIUM}time.MicroTime", 1 << 62, None),
    ("clock", f"{DEBEZIUM}time.NanoTime", 1, None),
    ("flags", f"{DEBEZIUM}data.Bits", base64.b64encode(b"\xff" * 8).decode(), None),
    ("flags", f"{DEBEZIUM}data.Bits", base64.b64encode(b"\x01" * 9).decode(), None),
]


def test_a_value_that_a_column_cannot_hold_makes_a_bad_event(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Each is diverted with its column's name; nothing else fails, and good rows are applied."""
    events = [
        event(id, {column: (name, value, parameters)})
        for id, (column, name, value, parameters) in enumerate(MISFITS)
    ]
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    bad = str(tmp_path / "bad")
    applier = Applier(spark, spec, events=SCHEMAS, bad_path=bad)
    applier.write(frame(spark, [*events, event(1000, {})]), 0)
    assert list(held(spark, tmp_path / "t")) == [1000]
    reasons = {row["offset"]: row["reason"] for row in spark.read.parquet(bad).collect()}
    assert {offset: reason.split(":")[0] for offset, reason in reasons.items()} == {
        offset: column for offset, (column, _, _, _) in enumerate(MISFITS)
    }


def test_hostile_schemas_fail_no_batch(spark: SparkSession, tmp_path: Path) -> None:
    good = event(0, {})
    hostile: list[Any] = []
    for schema in (
        {"fields": [{"field": "after", "fields": [{"field": "id"}, {"field": "id"}]}]},
        {"fields": []},
        {"fields": [{"field": "after", "fields": [{"field": "day", "name": "x" * 5000}]}]},
        {},
        None,
    ):
        hostile.append({**good, "schema": schema})
        hostile[-1]["payload"] = {"op": "c", "after": {"id": len(hostile)}}
    spec = TableSpec(path=str(tmp_path / "t"), schema=SCHEMA, keys=("id",))
    applier = Applier(spark, spec, events=SCHEMAS, bad_path=str(tmp_path / "bad"))
    odd = {**good, "schema": {"fields": [{"field": 5, "fields": "none"}]}}
    applier.write(frame(spark, [*hostile, odd]), 0)
    assert set(held(spark, tmp_path / "t")) >= set(range(1, 6))


def test_a_declared_type_that_a_column_cannot_have_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    for ddl, text in (
        (f"id int, a date COMMENT '{CONNECT}Decimal'", "a: .*Decimal in a column of type date"),
        (f"id int, a double COMMENT '{DEBEZIUM}time.Date'", "not served; there are none"),
    ):
        with pytest.raises(OptionError, match=text):
            Applier(spark, TableSpec(path=str(tmp_path), schema=ddl, keys=("id",)))
    ordinary = "id int COMMENT 'the number', name string COMMENT 'org.apache'"
    Applier(spark, TableSpec(path=str(tmp_path), schema=ordinary, keys=("id",)))


def test_a_key_of_a_type_of_connect_may_change(spark: SparkSession, tmp_path: Path) -> None:
    """Both sides of an update are decoded: the row of the former key is gone."""
    name = f"{DEBEZIUM}time.Date"
    made, moved = (event(1, {"day": (name, day, None)}) for day in (10, 20))
    moved["payload"] |= {"op": "u", "before": made["payload"]["after"]}
    spec = TableSpec(path=str(tmp_path / "t"), schema="day date, id int", keys=("day",))
    applier = Applier(spark, spec, events=SCHEMAS)
    applier.write(frame(spark, [made]), 0)
    applier.write(frame(spark, [moved], first=1), 1)
    rows = pipeline.rows(spark, str(tmp_path / "t")).collect()
    assert [tuple(row) for row in rows] == [(datetime.date(1970, 1, 21), 1)]


def test_rules_that_no_message_could_follow_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    plain = TableSpec(path=str(tmp_path), schema="id int, name string", keys=("id",))
    taken = TableSpec(path=str(tmp_path), schema="id int, payload string", keys=("id",))
    named = TableSpec(path=str(tmp_path), schema="id int", keys=("id",), name="t")
    for spec, rules, text in (
        (plain, Events(envelope="flat", connect_schemas=True), "envelope flat .* has none"),
        (taken, Events(envelope="upsert", connect_schemas=True), "envelope upsert .* has none"),
        (named, Events(envelope="upsert"), "one table without a name"),
        (plain, Events(envelope="upsert", position_field="id"), "no position"),
    ):
        with pytest.raises(OptionError, match=text):
            Applier(spark, spec, events=rules)
    Applier(spark, taken, events=Events(envelope="upsert"))


def test_a_tombstone_deletes_in_an_upsert_stream_only(spark: SparkSession, tmp_path: Path) -> None:
    """Debezium's tombstone behind a delete, and a delete of a stream without operations."""
    with_value = {"op": "c", "after": {"id": 1, "name": "x"}}
    gone = {"op": "d", "before": {"id": 1, "name": "x"}}
    row = (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
    )

    def batch(messages: list[tuple[bytes | None, Any]]) -> Any:
        return spark.createDataFrame(
            [
                (
                    None if key is None else bytearray(key),
                    value if value is None else bytearray(json.dumps(value).encode()),
                    "t", 0, at, EPOCH,
                )
                for at, (key, value) in enumerate(messages)
            ],
            row,
        )  # fmt: skip

    def applied(name: str, envelope: str, messages: list[tuple[bytes | None, Any]]) -> Any:
        path = tmp_path / name
        spec = TableSpec(path=str(path), schema="id int, name string", keys=("id",))
        bad = str(tmp_path / f"bad-{name}")
        applier = Applier(spark, spec, events=Events(envelope=envelope), bad_path=bad)
        applier.write(batch(messages), 0)
        rows = pipeline.rows(spark, str(path)).collect()
        return {each.id: each.name for each in rows}, applier.report

    for envelope, change in (("debezium", with_value), ("flat", {"op": "c", "id": 1, "name": "x"})):
        kept, report = applied(envelope, envelope, [(b'{"id": 1}', change), (b'{"id": 1}', None)])
        assert (kept, report.diverted, report.events) == ({1: "x"}, 0, 1)
    kept, report = applied("d", "debezium", [(b"1", with_value), (b"1", gone), (b"1", None)])
    assert (kept, report.diverted, report.events) == ({}, 0, 2)
    messages: list[tuple[bytes | None, Any]] = [
        (str(id).encode(), {"id": id, "name": "x"}) for id in range(6)
    ]
    messages += [
        (b"1", None),
        (b'{"id": 2}', None),
        (b'{"schema": {}, "payload": {"id": 3}}', None),
    ]
    messages += [(None, None), (b"no", None), (b'{"other": 1}', None), (b'5, "x": 5', None)]
    messages += [(b"4", None), (b"4", {"payload": {"id": 4, "name": "again"}, "schema": {}})]
    kept, report = applied("u", "upsert", messages)
    assert kept == {0: "x", 4: "again", 5: "x"}
    assert report.diverted == 4


def test_a_tombstone_by_a_text(spark: SparkSession, tmp_path: Path) -> None:
    spec = TableSpec(path=str(tmp_path / "t"), schema="name string, n int", keys=("name",))
    applier = Applier(spark, spec, events=Events(envelope="upsert"))
    rows = [
        (bytearray(b'say "a"'), bytearray(b'{"name": "say \\"a\\"", "n": 1}'), "t", 0, 0, EPOCH),
        (bytearray(b"b"), bytearray(b'{"name": "b", "n": 1}'), "t", 0, 1, EPOCH),
        (bytearray(b'say "a"'), None, "t", 0, 2, EPOCH),
    ]
    kind = (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
    )
    applier.write(spark.createDataFrame(rows, kind), 0)
    assert [row.name for row in pipeline.rows(spark, str(tmp_path / "t")).collect()] == ["b"]


def test_a_message_of_the_log_is_of_no_table(spark: SparkSession, tmp_path: Path) -> None:
    """PostgreSQL's logical messages have no table: pipelines of named tables pass over them."""
    note = {"op": "m", "source": {"table": ""}, "message": {"prefix": "p", "content": "AA=="}}
    made = {"op": "r", "after": {"id": 1, "name": "x"}, "source": {"table": "a"}}
    specs = [
        TableSpec(name=name, path=str(tmp_path / name), schema="id int, name string", keys=("id",))
        for name in ("a", "b")
    ]
    for count in (1, 2):
        applier = Applier(spark, *specs[:count])
        applier.write(frame(spark, [note, made, {"payload": note}, {**note, "source": {}}]), 0)
        assert applier.report.diverted == 0
