"""Change events as columns of Spark: their parts, what is wrong with them, and the latest of a row.

Every expression is built once and used for all batches: building it takes longer than a batch of a
few events. Nothing here reads or writes.

An event is applied whole or not at all: JSON that Spark would read as NULL, or as another number,
because it does not fit the schema, is a bad event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoymq.spark.pipelines.connect_types import FIELDS_TYPE, ConnectValues
from convoymq.spark.pipelines.merging import CHANGED_AT, DELETED, OFFSET, POSITION

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

CORRUPT = "_corrupt_record"
EVENT = ("topic", "partition", "offset", "timestamp", "key", "value")
"""Columns of the source that are kept of a bad event."""
ENVELOPES = ("debezium", "flat", "upsert")
UPSERTS = {"debezium": ("c", "r", "u"), "flat": ("c", "create", "i", "insert", "r", "read", "u",
                                                 "update", "upsert"), "upsert": ("u",)}  # fmt: skip
DELETES = {"debezium": ("d",), "flat": ("d", "delete"), "upsert": ("d",)}
TRUNCATES: dict[str, tuple[str, ...]] = {
    "debezium": ("t",),
    "flat": ("t", "truncate"),
    "upsert": (),
}
NOTES: dict[str, tuple[str, ...]] = {"debezium": ("m",), "flat": (), "upsert": ()}
"""Operations that concern no row of a table: a message in the log."""
INTEGERS = ("tinyint", "smallint", "int", "bigint")
YEAR_MAX = 9999
MADE_INFINITE = ('"Infinity"', '"-Infinity"', '"NaN"')
"""Texts that Spark makes, quotes included, of a number beyond a double where a text is wanted."""
INFINITIES = ("Infinity", "+Infinity", "-Infinity", "INF", "+INF", "-INF")
NUMBER_DIGITS = 20
"""Digits of a number in a position: 64 bits."""
_NUMBER = rf"^\d{{1,{NUMBER_DIGITS}}}$"
_LOG_FILE = rf"^(.*[A-Za-z].*\.)(\d{{1,{NUMBER_DIGITS}}})$"
_MARIADB_GTID = rf"^(\d{{1,10}})-\d{{1,10}}-(\d{{1,{NUMBER_DIGITS}}})$"
_HEXADECIMAL = r"^[0-9a-f]{24,}$"
_UNORDERED = "an order token says nothing of other keys; give a position of the source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Form of events: JSON, and the places of their parts in it.

    `debezium`: {"op": "c" | "r" | "u" | "d" | "t" | "m", "before": row, "after": row, "source":
    {"table": …}}, also inside {"payload": …}. `flat`: the row itself with a field (default `op`)
    that says what happened (c, create, i, insert, r, read, u, update, upsert; d, delete; t,
    truncate; in any case of letters), and a field (default `table`) that names the table. In both a
    row is whole: a column that it lacks is NULL. A tombstone (a message whose value is NULL) and an
    empty message say nothing new there.

    `upsert`: the row itself, also inside {"payload": …}, and nothing else; a tombstone deletes the
    row that the message's key names, as JSON ({"id": 1}, also inside {"payload": …}) or, of one
    column, as its text.
    """

    envelope: str = "debezium"
    op_field: str = "op"
    table_field: str = "table"
    position_field: str = ""
    """Order of the events in the source: paths in the JSON, comma between, compared in this order:
    `source.file,source.pos`. Empty: the message's offset, or its order token. Use it where a
    snapshot and the log are interleaved. Of events with equal positions the one with the higher
    offset is the later.

    A part is a number, the name of a log file (`mysql-bin.000012`: its number counts), a GTID of
    MariaDB (domain and number count), or hexadecimal of one length, 24 digits at least. An event
    with anything else has no position, and is a bad one."""

    connect_schemas: bool = False
    """Values are read as the schema beside them says (`connect_types`). It takes Spark longer to
    plan and to run a batch."""

    @property
    def positions(self) -> tuple[str, ...]:
        """Returns the paths of a position's parts."""
        return tuple(name.strip() for name in self.position_field.split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order of two events of a row."""

    fields: tuple[str, ...] = ()
    """Parts of a position of the source; none: the offset or the order token."""
    of_topic: bool = False
    as_number: bool = False
    """A position is one number, as in tables of release 0.3."""

    @property
    def is_total(self) -> bool:
        """Returns whether events of different rows compare, too."""
        return bool(self.fields) or not self.of_topic


class EventColumns:
    """The events of one table.

    Args:
        row: type of a row.
        keys: columns that name it.
    """

    def __init__(self, row: StructType, keys: Sequence[str], rules: Events, order: Order) -> None:
        from pyspark.sql import functions as f

        self._row = row
        self._keys = tuple(keys)
        self._rules = rules
        self._order = order
        kinds = rules.envelope
        text, op = _text(), f.col("_op")
        self._steps: list[dict[str, Column]] = []
        """Columns that are added one step after the other, each from those of the steps before."""
        if kinds == "upsert":
            self._steps.append({"_event": self._row_or_key()})
            text = f.col("_event")
        self._steps.append(
            {
                "_op": self._operation(),
                "_good": f.from_json(text, _message(rules, row)),
                "_wide": f.from_json(text, _message(rules, _row_as_text(row), *_notes(rules))),
            }
        )
        deleted = f.coalesce(op.isin(*DELETES[kinds]), f.lit(False))
        upserted = op.isin(*UPSERTS[kinds])
        sides = {
            "_row": self._whole("_good", deleted),
            "_row_text": self._whole("_wide", deleted),
        }
        self._values = {"_row": ConnectValues(row, in_schema=rules.connect_schemas)}
        parts = {
            # Of JSON that is none: a value that does not fit is found column by column.
            "_misread": f.col(f"_wide.{CORRUPT}").isNotNull(),
            DELETED: deleted,
            POSITION: self._position(),
            "_truncates": f.coalesce(op.isin(*TRUNCATES[kinds]), f.lit(False)),
            "_concerns": ~f.coalesce(op.isin(*TRUNCATES[kinds], *NOTES[kinds]), f.lit(False)),
        }
        if kinds == "debezium":
            # The key of a row may change: then the row of the key before is gone.
            sides["_before"] = f.when(upserted, self._side("_good", "before"))
            sides["_before_text"] = f.when(upserted, self._side("_wide", "before"))
            named = [each for each in row if each.name in self._keys]
            self._values["_before"] = ConnectValues(named, in_schema=rules.connect_schemas)
        encoded = {side: values for side, values in self._values.items() if values.columns}
        if encoded:
            plains = {
                f"{side}_plain": values.plain(f.col(f"{side}_text"), f.col("_fields"))
                for side, values in encoded.items()
            }
            self._steps += [{**sides, "_fields": self._fields()}, plains]
            sides = {side: self._decoded(side) for side in encoded}
        changed = self._key_changed()
        self._steps += [
            {**sides, **parts},
            {"reason": self._reason(text, changed), "_gone": changed},
        ]

    def judged(self, batch: DataFrame) -> DataFrame:
        """Returns the events with `reason` (NULL = it can be applied), `_row` (the row, or what
        named it before it was deleted), `_gone` (the row whose key it had before), `_deleted`,
        `_position`, `_truncates`, and `_concerns` (it is about one row)."""
        for columns in self._steps:
            batch = batch.withColumns(columns)
        return batch.select(
            *EVENT, "reason", "_row", "_gone", POSITION, DELETED, "_truncates", "_concerns"
        )

    def latest(self, judged: DataFrame) -> DataFrame:
        """Returns each row as its latest event has it, with the columns of ours."""
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        good = judged.where(f.col("reason").isNull() & f.col("_concerns"))
        if self._rules.envelope == "debezium":
            place = (POSITION, "offset", "timestamp")
            gone = f.when(
                f.col("_gone").isNotNull(),
                f.struct(f.col("_gone").alias("_row"), f.lit(True).alias(DELETED)),
            )
            sides = f.array(f.struct("_row", DELETED), gone)
            good = good.select(f.explode(sides).alias("_side"), *place).where("_side IS NOT NULL")
            good = good.select("_side.*", *place)
        latest = Window.partitionBy(*[f.col(f"_row.`{key}`") for key in self._keys]).orderBy(
            f.col(POSITION).desc(), f.col("offset").desc()
        )
        return (
            good.withColumn("_rank", f.row_number().over(latest))
            .where("_rank = 1")
            .select(
                "_row.*",
                POSITION,
                f.col("offset").alias(OFFSET),
                DELETED,
                f.col("timestamp").alias(CHANGED_AT),
            )
        )

    # --- parts of an event -------------------------------------------------------------------

    def _side(self, parsed: str, side: str) -> Column:
        from pyspark.sql import functions as f

        return f.coalesce(f.col(f"{parsed}.payload.{side}"), f.col(f"{parsed}.{side}"))

    def _whole(self, parsed: str, deleted: Column) -> Column:
        """Returns the row that an event is about."""
        from pyspark.sql import functions as f

        if self._rules.envelope != "debezium":
            names = [f.col(f"{parsed}.`{name}`") for name in self._row.fieldNames()]
            row = f.when(f.col(parsed).isNotNull(), f.struct(*names))
            if not has_payload(self._rules, self._row):
                return row
            return f.coalesce(f.col(f"{parsed}.payload"), row)
        before, after = self._side(parsed, "before"), self._side(parsed, "after")
        return f.when(deleted, before).otherwise(after)

    def _position(self) -> Column:
        from pyspark.sql import functions as f

        order = self._order
        if not order.fields:
            return f.col("route_version" if order.of_topic else "offset")
        parts = [_json_path(self._rules, path) for path in order.fields]
        if order.as_number:
            return parts[0].try_cast("long")
        texts = [_ordered_text(part) for part in parts]
        if order.of_topic:
            # Offsets begin anew in a later partition of the key.
            texts.append(_padded(f.col("route_version").cast("string")))
        return _joined(texts)

    def _key_changed(self) -> Column:
        """Returns the row before an event that gave it another key; NULL for other events."""
        from pyspark.sql import functions as f

        nothing = f.lit(None).cast(self._row)
        if self._rules.envelope != "debezium":
            return nothing
        whole, other = f.col("_before").isNotNull() & f.col("_row").isNotNull(), f.lit(False)
        for key in self._keys:
            old, new = f.col("_before").getField(key), f.col("_row").getField(key)
            whole = whole & old.isNotNull()
            other = other | ~old.eqNullSafe(new)
        return f.when(whole & other, f.col("_before")).otherwise(nothing)

    def _reason(self, text: Column, changed: Column) -> Column:
        from pyspark.sql import functions as f

        kinds = self._rules.envelope
        row = (*UPSERTS[kinds], *DELETES[kinds])
        op = f.col("_op")
        reason = (
            f.when(~f.is_valid_utf8(text), f.lit("not UTF-8"))
            .when(op.isNull(), f.lit("not JSON, or without an operation"))
            .when(
                ~op.isin(*row, *TRUNCATES[kinds], *NOTES[kinds]),
                f.concat(f.lit("unknown operation "), op),
            )
        )
        if not self._order.is_total:
            gone = f"all rows of the table are gone: {_UNORDERED}"
            reason = reason.when(f.col("_truncates"), f.lit(gone))
        for each in self._row:
            reason = self._misfit_reason(reason, "_row", each)
        if kinds == "debezium":
            for each in self._row:
                if each.name in self._keys:
                    reason = self._misfit_reason(reason, "_before", each)
            if not self._order.is_total:
                moved = f"the row has another key now: {_UNORDERED}"
                reason = reason.when(changed.isNotNull(), f.lit(moved))
        missing = f.lit(False)
        for key in self._keys:
            missing = missing | f.col("_row").getField(key).isNull()
        concerns = f.col("_concerns")
        return (
            reason.when(f.col("_misread"), f.lit("a value that does not fit the schema"))
            .when(concerns & (f.col("_row").isNull() | missing), f.lit("without its key"))
            .when(
                (concerns | f.col("_truncates")) & f.col(POSITION).isNull(),
                f.lit("without its position"),
            )
        )

    def _misfit_reason(self, reason: Column, side: str, field: StructField) -> Column:
        from pyspark.sql import functions as f

        value, text = f.col(side).getField(field.name), f.col(f"{side}_text").getField(field.name)
        kind = field.dataType.simpleString()
        misfit = _misfit(value, text, field.dataType)
        encoded = self._values[side].encoded(field, f.col(f"{side}_plain"))
        if encoded is not None:
            misfit = f.when(encoded, text.isNotNull() & value.isNull()).otherwise(misfit)
        shown = f.substring(text if "<" not in kind else f.to_json(text), 1, 60)
        return reason.when(
            misfit, f.concat(f.lit(f"{field.name}: "), shown, f.lit(f" does not fit {kind}"))
        )

    # --- values of Connect -------------------------------------------------------------------

    def _fields(self) -> Column:
        """Returns what a message's schema says of a row's fields; NULL without one."""
        from pyspark.sql import functions as f

        if not self._rules.connect_schemas:
            return f.lit(None).cast(FIELDS_TYPE)
        fields = f.col("_wide.schema.fields")
        if self._rules.envelope == "upsert":
            return fields
        # Both sides have the same.
        after = f.get(f.filter(fields, lambda each: each.getField("field") == "after"), 0)
        return after.getField("fields")

    def _decoded(self, side: str) -> Column:
        """Returns a row whose values of Connect are those of its columns."""
        from pyspark.sql import functions as f

        row, text, plain = f.col(side), f.col(f"{side}_text"), f.col(f"{side}_plain")
        values = self._values[side]
        columns = []
        for each in self._row:
            value, encoded = row.getField(each.name), values.encoded(each, plain)
            if encoded is not None:
                value = f.when(encoded, values.value(each, plain)).otherwise(value)
            columns.append(value.alias(each.name))
        # A row in which nothing fits the schema is still one.
        return f.when(row.isNotNull() | text.isNotNull(), f.struct(*columns))

    # --- messages with a key and no value ----------------------------------------------------

    def _operation(self) -> Column:
        from pyspark.sql import functions as f

        rules = self._rules
        if rules.envelope == "upsert":
            return f.when(f.col("value").isNull(), "d").otherwise("u")
        return f.lower(_json_path(rules, "op" if rules.envelope == "debezium" else rules.op_field))

    def _row_or_key(self) -> Column:
        """Returns the JSON of a row, or of the key of one that is deleted."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import NumericType

        key = f.col("key").cast("string")
        if len(self._keys) == 1:
            (name,) = self._keys
            alone = f.to_json(f.struct(key.alias(name)))
            if isinstance(self._row[name].dataType, NumericType):
                # Spark reads no number from a text of JSON.
                number = f.concat(f.lit(f"{json.dumps({name: None})[:-5]}"), key, f.lit("}"))
                alone = f.when(key.rlike(r"^-?[\d.]+$"), number).otherwise(alone)
            key = f.when(key.rlike(r"^\s*\{"), key).otherwise(alone)
        return f.when(f.col("value").isNull(), key).otherwise(_text())


def table_name(rules: Events) -> Column:
    """Returns the name of an event's table."""
    path = "source.table" if rules.envelope == "debezium" else rules.table_field
    return _json_path(rules, path)


def is_note(rules: Events) -> Column:
    """Returns whether an event concerns no table."""
    from pyspark.sql import functions as f

    notes = NOTES[rules.envelope]
    if not notes:
        return f.lit(False)
    return f.coalesce(f.lower(_json_path(rules, "op")).isin(*notes), f.lit(False))


def _text() -> Column:
    from pyspark.sql import functions as f

    return f.col("value").cast("string")


def _json_path(rules: Events, path: str) -> Column:
    from pyspark.sql import functions as f

    if rules.envelope == "flat":
        return f.get_json_object(_text(), f"$.{path}")
    return f.coalesce(
        f.get_json_object(_text(), f"$.payload.{path}"), f.get_json_object(_text(), f"$.{path}")
    )


def _padded(digits: Column) -> Column:
    from pyspark.sql import functions as f

    return f.lpad(digits, NUMBER_DIGITS, "0")


def _ordered_text(part: Column) -> Column:
    """Returns text that compares as a part of a position does; NULL for one without an order."""
    from pyspark.sql import functions as f

    def group(pattern: str, number: int) -> Column:
        return f.regexp_extract(part, pattern, number)

    gtid = [_padded(group(_MARIADB_GTID, number)) for number in (1, 2)]
    return (
        f.when(part.rlike(_NUMBER), _padded(part))
        .when(part.rlike(_MARIADB_GTID), _joined(gtid))
        .when(part.rlike(_HEXADECIMAL), part)
        .when(part.rlike(_LOG_FILE), f.concat(group(_LOG_FILE, 1), _padded(group(_LOG_FILE, 2))))
    )


def _joined(texts: Sequence[Column]) -> Column:
    """Returns texts with a space between; NULL when one of them is NULL."""
    from pyspark.sql import functions as f

    parts: list[Column] = []
    for text in texts:
        parts += [f.lit(" "), text] if parts else [text]
    return f.concat(*parts)


def _message(rules: Events, row: StructType, *more: StructField) -> StructType:
    """Returns the type of an event whose rows are of this type. Read at once, because a part that
    is cut out as text first has lost digits of its numbers."""
    from pyspark.sql.types import StructField, StructType

    if not has_payload(rules, row):
        return StructType([*row.fields, *more])
    if rules.envelope == "upsert":
        return StructType([*row.fields, StructField("payload", row), *more])
    sides = [StructField("before", row), StructField("after", row)]
    return StructType([*sides, StructField("payload", StructType(sides)), *more])


def _notes(rules: Events) -> list[StructField]:
    """Returns the fields of an event that say how to read its rows."""
    from pyspark.sql.types import StringType, StructField, StructType

    found = [StructField(CORRUPT, StringType())]
    if rules.connect_schemas:
        fields = f"fields {FIELDS_TYPE}"
        if rules.envelope == "debezium":
            fields = f"fields array<struct<field: string, fields: {FIELDS_TYPE}>>"
        found.append(StructField("schema", StructType.fromDDL(fields)))
    return found


def has_payload(rules: Events, row: StructType) -> bool:
    """Returns whether a converter may have put a message beside its schema."""
    if rules.envelope == "upsert":
        return not {"schema", "payload"} & set(row.fieldNames())
    return rules.envelope == "debezium"


def _row_as_text(row: StructType) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(each.name, _as_text(each.dataType)) for each in row])


def _as_text(type: DataType) -> DataType:
    """Returns the type with text in the place of every value."""
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    match type:
        case StructType():
            return _row_as_text(type)
        case ArrayType():
            return ArrayType(_as_text(type.elementType))
        case MapType():
            return MapType(type.keyType, _as_text(type.valueType))
    return StringType()


def unserved(type: DataType) -> str | None:
    """Returns why a column can't have this type; None = it can."""
    from pyspark.sql import types as t

    match type:
        case t.StructType():
            return next(filter(None, (unserved(each.dataType) for each in type)), None)
        case t.ArrayType():
            return unserved(type.elementType)
        case t.MapType():
            if not isinstance(type.keyType, t.StringType):
                name = type.keyType.simpleString()
                return f"the keys of a map are strings in JSON, not {name}"
            return unserved(type.valueType)
        # A CharType may count as a StringType, and Spark reads none from JSON.
        case t.CharType() | t.VarcharType():
            return f"type {type.simpleString()} is not served; take string"
        case (
            t.StringType()
            | t.BinaryType()
            | t.BooleanType()
            | t.ByteType()
            | t.ShortType()
            | t.IntegerType()
            | t.LongType()
            | t.FloatType()
            | t.DoubleType()
            | t.DecimalType()
            | t.DateType()
            | t.TimestampType()
            | t.TimestampNTZType()
        ):
            return None
    return f"type {type.simpleString()} is not served"


def _misfit(value: Column, text: Column, type: DataType) -> Column:
    """Returns whether a value is not what its JSON says: NULL, or another number."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StringType, StructType

    lost = text.isNotNull() & value.isNull()
    name = type.simpleString()
    match type:
        case StructType():
            for each in type:
                inner = value.getField(each.name), text.getField(each.name)
                lost = lost | _misfit(*inner, each.dataType)
        case ArrayType():
            lost = lost | _any_misfit(value, text, type.elementType)
        case MapType():
            inner = f.map_values(value), f.map_values(text)
            lost = lost | _any_misfit(*inner, type.valueType)
        case StringType():
            lost = lost | value.isin(*MADE_INFINITE)
        case DecimalType():
            # As doubles: Spark's text of a long fraction is that of the nearest double.
            same = text.try_cast("double") == value.cast("double")
            lost = lost | (text.isNotNull() & ~f.coalesce(same, f.lit(False)))
        case _ if name in INTEGERS:
            # A byte of 200 is read as -56.
            lost = lost | (text.try_cast("decimal(38,0)") != value)
        case _ if name in ("date", "timestamp", "timestamp_ntz"):
            lost = lost | ~f.year(value).between(1, YEAR_MAX)
            if name != "date":
                # A number has no unit: Spark would take milliseconds for seconds.
                lost = lost | text.try_cast("decimal(38,0)").isNotNull()
        case _ if name in ("float", "double"):
            lost = lost | ((f.abs(value) == float("inf")) & ~text.isin(*INFINITIES))
    return f.coalesce(lost, f.lit(False))


def _any_misfit(values: Column, texts: Column, type: DataType) -> Column:
    from pyspark.sql import functions as f

    return f.exists(
        f.zip_with(values, texts, lambda a, b: _misfit(a, b, type)), lambda wrong: wrong
    )
