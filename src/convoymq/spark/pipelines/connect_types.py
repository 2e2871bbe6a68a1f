"""Values that Kafka Connect's converters write as numbers or base64: Debezium's defaults.

What such a value means stands beside it, in the schema that a converter puts into each message
(`schemas.enable=true`), or in the comment of the column of a table (`price decimal(10,2) COMMENT
'org.apache.kafka.connect.data.Decimal'`). A value that a column can't hold exactly becomes NULL
here, which makes its event a bad one.

| types of Connect | column | in JSON |
|---|---|---|
| Decimal | decimal | base64 of the unscaled number, big-endian; the scale is in the schema |
| VariableScaleDecimal | decimal | {"scale": 2, "value": base64} |
| Date | date | days since 1970 |
| Timestamp, MicroTimestamp, NanoTimestamp | timestamp, timestamp_ntz | ms, µs, ns since 1970 |
| Time, MicroTime, NanoTime | string | ms, µs, ns since midnight: becomes 12:34:56.789000 |
| Bits | tinyint to bigint | base64, little-endian |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from convoymq.spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructField

_CONNECT = "org.apache.kafka.connect.data."
_DEBEZIUM = "io.debezium."
_DECIMAL = f"{_CONNECT}Decimal"
_VARIABLE = f"{_DEBEZIUM}data.VariableScaleDecimal"
_BITS = f"{_DEBEZIUM}data.Bits"
_MILLISECOND, _MICROSECOND, _NANOSECOND = 1_000, 1_000_000, 1_000_000_000
_DATES = (f"{_DEBEZIUM}time.Date", f"{_CONNECT}Date")
_TIMESTAMPS: Mapping[str, int] = {
    f"{_DEBEZIUM}time.Timestamp": _MILLISECOND,
    f"{_CONNECT}Timestamp": _MILLISECOND,
    f"{_DEBEZIUM}time.MicroTimestamp": _MICROSECOND,
    f"{_DEBEZIUM}time.NanoTimestamp": _NANOSECOND,
}
"""Units of a second."""
_TIMES: Mapping[str, int] = {
    f"{_DEBEZIUM}time.Time": _MILLISECOND,
    f"{_CONNECT}Time": _MILLISECOND,
    f"{_DEBEZIUM}time.MicroTime": _MICROSECOND,
    f"{_DEBEZIUM}time.NanoTime": _NANOSECOND,
}
_DAY_US = 86_400 * _MICROSECOND
_US_END = 400_000_000_000_000_000
"""More than lie between 1970 and the year 9999."""
_TIME_US_END = 1000 * 3600 * _MICROSECOND
"""MariaDB's times have up to 838 hours."""
_YEAR_MAX = 9999
_CHUNK_DIGITS = 8
_CHUNKS = 4
"""Of hexadecimal digits: 16 bytes, as a decimal of 38 digits has."""

FIELDS_TYPE = "array<struct<field: string, name: string, parameters: map<string, string>>>"
"""Spark's type of a row's fields in a schema of Connect: what matters of them here."""


def declared_type(field: StructField) -> str | None:
    """Returns the type that the comment of a column declares; None: none.

    Raises:
        OptionError: a type that such a column can't have.
    """
    comment = str((field.metadata or {}).get("comment", "")).strip()
    if not comment.startswith((_CONNECT, _DEBEZIUM)):
        return None
    served = served_types(field.dataType)
    if comment not in served:
        kind = field.dataType.simpleString()
        raise OptionError(
            f"column {field.name}: {comment} in a column of type {kind} is not served; "
            f"there are {', '.join(served) or 'none'}"
        )
    return comment


def served_types(kind: DataType) -> tuple[str, ...]:
    """Returns the types of Connect whose values a column of a type takes, though their JSON is of
    another type."""
    from pyspark.sql import types as t

    match kind:
        case t.DecimalType():
            return (_DECIMAL, _VARIABLE)
        case t.DateType():
            return _DATES
        case t.TimestampType() | t.TimestampNTZType():
            return tuple(_TIMESTAMPS)
        case t.StringType():
            return tuple(_TIMES)
        case t.ByteType() | t.ShortType() | t.IntegerType() | t.LongType():
            return (_BITS,)
    return ()


class ConnectValues:
    """Values of a row's columns that a converter may have written in a form of its own.

    One expression makes plain texts of all of them, so that its size does not grow with the row.

    Args:
        columns: of the row.
        in_schema: whether messages may have a schema. Without one only declared types count.
    """

    def __init__(self, columns: Iterable[StructField], *, in_schema: bool) -> None:
        self._declared = {each.name: declared_type(each) for each in columns}
        self.columns = [
            each
            for each in columns
            if self._declared[each.name] or (in_schema and served_types(each.dataType))
        ]
        self._places = {each.name: place for place, each in enumerate(self.columns)}

    def plain(self, texts: Column, fields: Column) -> Column:
        """Returns the texts of the columns as an array of types and plain texts.

        Args:
            texts: the row with the text of each value.
            fields: part of the message's schema for the row; NULL: it has none.
        """
        from pyspark.sql import functions as f
        from pyspark.sql.types import DecimalType

        rows = [
            f.struct(
                f.lit(each.name).alias("column"),
                texts.getField(each.name).alias("text"),
                f.lit(self._declared[each.name]).cast("string").alias("type"),
                f.lit(each.dataType.scale if isinstance(each.dataType, DecimalType) else 0).alias(
                    "scale"
                ),
            )
            for each in self.columns
        ]

        def of_row(row: Column) -> Column:
            found = f.get(f.filter(fields, lambda each: each["field"] == row["column"]), 0)
            return _named(found, lambda type: _typed(row, type))

        made = f.transform(f.array(*rows), of_row)
        return made if any(self._declared.values()) else f.when(fields.isNotNull(), made)

    def encoded(self, field: StructField, plain: Column) -> Column | None:
        """Returns whether a column's value has a form of its own; None: never."""
        from pyspark.sql import functions as f

        place = self._places.get(field.name)
        if place is None:
            return None
        type = f.get(plain, place).getField("type")
        return f.coalesce(type.isin(*served_types(field.dataType)), f.lit(False))

    def value(self, field: StructField, plain: Column) -> Column:
        """Returns a column's value from its plain text; NULL for one that does not fit."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import TimestampType

        text = f.get(plain, self._places[field.name]).getField("text")
        if isinstance(field.dataType, TimestampType):
            text = f.concat(text, f.lit("Z"))
        return text.try_cast(field.dataType)


def _named(value: Column, body: Callable[[Column], Column]) -> Column:
    """Returns an expression of a value that is computed once, however often it stands there."""
    from pyspark.sql import functions as f

    return f.get(f.transform(f.array(value), body), 0)


def _typed(row: Column, found: Column) -> Column:
    """Returns type and plain text of a column's value. `found`: its field in the schema."""
    from pyspark.sql import functions as f

    type = f.coalesce(row["type"], found["name"])
    scale = f.try_element_at(found["parameters"], f.lit("scale")).try_cast("int")
    scale = f.when(row["type"].isNotNull(), row["scale"]).otherwise(scale)
    return f.struct(type.alias("type"), _plain(row, type, scale).alias("text"))


def _plain(row: Column, type: Column, scale: Column) -> Column:
    from pyspark.sql import functions as f

    text, room = row["text"], row["scale"]
    value = f.get_json_object(text, "$.value")
    own_scale = f.get_json_object(text, "$.scale").try_cast("int")
    moments = _micros(text, type, _TIMESTAMPS)
    times = _micros(text, type, _TIMES)
    return (
        f.when(type == _DECIMAL, _decimal(text, scale, room))
        .when(type == _VARIABLE, _decimal(value, own_scale, room))
        .when(type.isin(*_DATES), _named(_whole(text), _date_text))
        .when(type.isin(*_TIMESTAMPS), _named(moments, _moment_text))
        .when(type.isin(*_TIMES), _named(times, _time_text))
        .when(type == _BITS, _named(_hexadecimal(text), _number_of_bits))
    )


def _hexadecimal(text: Column) -> Column:
    from pyspark.sql import functions as f

    return f.hex(f.try_to_binary(text, f.lit("base64")))


def _whole(text: Column) -> Column:
    from pyspark.sql import functions as f

    return f.when(text.rlike(r"^-?\d{1,19}$"), text.try_cast("bigint"))


def _micros(text: Column, type: Column, units: Mapping[str, int]) -> Column:
    """Returns a number of µs; NULL for one that has parts of a µs."""
    from pyspark.sql import functions as f

    def of(unit: int) -> list[str]:
        return [name for name, each in units.items() if each == unit]

    thousand = f.lit(1000).cast("bigint")

    def scaled(number: Column) -> Column:
        return (
            f.when(type.isin(*of(_MICROSECOND)), number)
            .when(type.isin(*of(_MILLISECOND)), f.try_multiply(number, thousand))
            .when(number % thousand == 0, _quotient(number, 1000))
        )

    made = _named(_whole(text), scaled)
    return _named(made, lambda us: f.when(us.between(-_US_END, _US_END), us))


def _quotient(number: Column, divisor: int) -> Column:
    """Returns the exact quotient of a multiple."""
    from pyspark.sql import functions as f

    return (number.cast("decimal(20,0)") / f.lit(divisor).cast("decimal(11,0)")).try_cast("bigint")


def _date_text(days: Column) -> Column:
    from pyspark.sql import functions as f

    day = f.date_add(f.lit("1970-01-01").cast("date"), days.try_cast("int"))
    return f.when(f.year(day).between(1, _YEAR_MAX), day.cast("string"))


def _moment_text(micros: Column) -> Column:
    """Returns date and time in UTC: through days, as the text of a timestamp depends on a zone."""
    from pyspark.sql import functions as f

    rest = f.pmod(micros, f.lit(_DAY_US).cast("bigint"))
    days = _quotient(micros - rest, _DAY_US)
    date = _named(days, _date_text)
    return f.concat(date, f.lit(" "), _named(rest, _time_text))


def _decimal(text: Column, scale: Column, room: Column) -> Column:
    from pyspark.sql import functions as f

    number = _named(_hexadecimal(text), _unscaled)
    places = f.when(scale.between(-38, 38), scale)

    def scaled(unscaled: Column) -> Column:
        # Without a scale the number says nothing: `greatest` passes over a null.
        return _named(places, lambda p: f.when(p.isNotNull(), _scaled(unscaled, p, room)))

    return _named(number, scaled)


def _unscaled(digits: Column) -> Column:
    """Returns the number of hexadecimal digits of a two's complement, as text."""
    from pyspark.sql import functions as f

    width = _CHUNKS * _CHUNK_DIGITS
    is_negative = f.substring(digits, 1, 1).between("8", "F")
    # Of a negative number its complement: the magnitude less one.
    turned = f.translate(digits, "0123456789ABCDEF", "FEDCBA9876543210")
    magnitude = f.lpad(f.when(is_negative, turned).otherwise(digits), width, "0")
    fits = f.length(digits).between(2, width)

    def joined(padded: Column) -> Column:
        number: Column | None = None
        for at in range(0, width, _CHUNK_DIGITS):
            chunk = f.conv(f.substring(padded, at + 1, _CHUNK_DIGITS), 16, 10)
            chunk = chunk.cast("decimal(38,0)")
            if number is not None:
                high = f.try_multiply(number, f.lit(1 << 4 * _CHUNK_DIGITS).cast("decimal(10,0)"))
                chunk = f.try_add(high, chunk)
            number = chunk
        assert number is not None
        return number

    def signed(number: Column) -> Column:
        # As text from here on: what has more than 38 digits fits no column, and is none's error.
        more = f.try_add(number, f.lit(1).cast("decimal(1,0)")).cast("string")
        return f.when(is_negative, f.concat(f.lit("-"), more)).otherwise(number.cast("string"))

    return _named(_named(f.when(fits, magnitude), joined), signed)


def _scaled(unscaled: Column, scale: Column, room: Column) -> Column:
    """Returns unscaled * 10^-scale; NULL when it has more digits behind the point than `room`."""
    from pyspark.sql import functions as f

    zero = f.lit("0")
    places = f.greatest(scale, f.lit(0))
    number = f.ltrim(unscaled, f.lit("-"))
    digits = f.concat(number, f.repeat(zero, f.greatest(-scale, f.lit(0))))
    padded = _named(digits, lambda d: f.lpad(d, f.greatest(f.length(d), places + 1), zero))

    def pointed(text: Column) -> Column:
        cut = f.length(text) - places
        fraction = f.rtrim(f.substring(text, cut + 1, places), zero)
        sign = f.when(unscaled.startswith("-"), "-").otherwise("")
        number = f.concat(sign, f.substring(text, f.lit(1), cut), f.lit("."), fraction, zero)
        return f.when(f.length(fraction) <= room, number)

    return _named(padded, pointed)


def _time_text(micros: Column) -> Column:
    """Returns hours:minutes:seconds, with µs where there are any."""
    from pyspark.sql import functions as f

    size = f.abs(micros)
    seconds = f.floor(size / _MICROSECOND)
    below = size % _MICROSECOND
    text = f.format_string(
        "%s%02d:%02d:%02d",
        f.when(micros < 0, "-").otherwise(""),
        f.floor(seconds / 3600),
        f.floor(seconds / 60) % 60,
        seconds % 60,
    )
    more = f.when(below == 0, "").otherwise(f.format_string(".%06d", below))
    return f.when(size < _TIME_US_END, f.concat(text, more))


def _number_of_bits(digits: Column) -> Column:
    """Returns the number of hexadecimal digits of bytes, the lowest first."""
    from pyspark.sql import functions as f

    turned = f.regexp_replace(f.reverse(digits), "(.)(.)", "$2$1")
    known = f.when(f.length(digits) > 0, f.ltrim(turned, f.lit("0")))
    number = f.conv(f.concat(f.lit("0"), known), 16, 10).cast("string")
    return f.when(f.length(known) <= 16, number)
