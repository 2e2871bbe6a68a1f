"""Values of AMQP 1.0 as fields of AMQP 0-9-1's tables, and the way back: total in both directions.

| AMQP 1.0                    | field    | field     | AMQP 1.0                              |
|-----------------------------|----------|-----------|---------------------------------------|
| utf8, symbol, binary, char  | S        | S         | utf8; binary when it is none, or long |
| uuid                        | S, a URN | x         | binary                                |
| boolean                     | t        | t         | boolean                               |
| byte, short, int, long      | b s I l  | b s I l L | byte, short, int, long, long          |
| ubyte, ushort, uint         | B u i    | B u i     | ubyte, ushort, uint                   |
| ulong                       | l, or S  | f d       | float, double                         |
| float, double               | f d      | T         | timestamp, ms                         |
| timestamp                   | T, s     | V         | null                                  |
| null                        | V        | A         | list                                  |
| list, array                 | A        | F         | map; its keys are symbols             |
| map                         | F        | D         | decimal64                             |
| described                   | as value |           |                                       |
| decimal64 that fits         | D        |           |                                       |
| other decimals, time < 1970 | left out |           |                                       |
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from convoymq.messages.amqp10.values import (
    Array,
    Byte,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    Value,
)
from convoymq.model.tables import SHORT_STRING_BYTES_MAX, Decimal, Field, Table

TEXT_BYTES_MAX = 4_096
"""A longer `S` becomes binary: whether it is text is not looked at."""

_LONG_MAX = (1 << 63) - 1
_INTEGERS: dict[type, str] = {
    UByte: "B",
    UShort: "u",
    UInt: "i",
    Byte: "b",
    Short: "s",
    Int: "I",
    Long: "l",
}
_NUMBERS: dict[str, type[Value]] = {
    **{code: kind for kind, code in _INTEGERS.items()},
    "L": Long,
    "f": Float,
    "d": float,
}
# A decimal64 in binary integer form: sign, exponent, coefficient.
_EXPONENT_AT = 53
_EXPONENT_BIAS = 398
_COEFFICIENT_MAX = 0xFFFFFFFF
_SCALE_MAX = 0xFF


def field_of(value: Value) -> Field | None:
    """Returns the field for a value; None: there is none."""
    match value:
        case None:
            return Field("V", None)
        case bool():
            return Field("t", value)
        case Timestamp():
            return Field("T", value // 1000) if value >= 0 else None
        case ULong() if value > _LONG_MAX:
            return Field("S", str(int(value)).encode())
        case int():
            return Field(_INTEGERS.get(type(value), "l"), int(value))
        case float():
            return Field("f" if isinstance(value, Float) else "d", float(value))
        case str():
            return Field("S", value.encode())
        case Decimal64():
            return _decimal_field(value)
        case Decimal32() | Decimal128():
            return None
        case bytes():
            return Field("S", value)
        case UUID():
            return Field("S", value.urn.encode())
        case list():
            return _array_field(value)
        case Array():
            return _array_field(value.items)
        case Mapping():
            return Field("F", Table.from_fields(fields_of(value)))
        case Described():
            return field_of(value.value)
    return None


def fields_of(values: Mapping[Value, Value]) -> list[tuple[str, Field]]:
    """Returns the fields for a map, by the text of its keys; a key that is none or too long is left
    out with its value."""
    found = []
    for key, value in values.items():
        name = key if isinstance(key, str) else str(key) if isinstance(key, int) else None
        field = None if name is None else field_of(value)
        if name is not None and field is not None and len(name.encode()) <= SHORT_STRING_BYTES_MAX:
            found.append((str(name), field))
    return found


def value_of(field: Field) -> Value:
    """Returns the value for a field."""
    match field.code, field.value:
        case "S", bytes(data):
            return _text_value(data)
        case "T", int(seconds):
            return Timestamp(min(seconds * 1000, _LONG_MAX))
        case "A", tuple(items):
            return [value_of(item) for item in items]
        case "F", Table() as table:
            return map_of(table)
        case "D", Decimal(scale, value):
            bits = (_EXPONENT_BIAS - scale) << _EXPONENT_AT | value
            return Decimal64(bits.to_bytes(8, "big"))
        case code, int() | float() as number if code in _NUMBERS:
            return _NUMBERS[code](number)  # type: ignore[call-arg]
        case _, value:
            return value


def map_of(table: Table) -> dict[Value, Value]:
    """Returns the map for a table; a key that is no ASCII is text, and left out if it is none."""
    found: dict[Value, Value] = {}
    for key, field in table.items():
        name = key_of(key)
        if name is not None:
            found.setdefault(name, value_of(field))
    return found


def key_of(name: str) -> str | None:
    """Returns the key for the name of a field; None: it is no text."""
    if name.isascii():
        return Symbol(name)
    return text_or_none(name)


def text_or_none(text: str) -> str | None:
    """Returns a short string of AMQP 0-9-1; None: it is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def _text_value(data: bytes) -> Value:
    if len(data) <= TEXT_BYTES_MAX and b"\0" not in data:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    return data


def _array_field(items: list[Value] | tuple[Value, ...]) -> Field:
    fields = (field_of(item) for item in items)
    return Field("A", tuple(field for field in fields if field is not None))


def _decimal_field(value: Decimal64) -> Field | None:
    """Returns a decimal; None: it has a sign or an exponent that `D` has no place for."""
    bits = int.from_bytes(value, "big")
    scale = _EXPONENT_BIAS - (bits >> _EXPONENT_AT)
    coefficient = bits & (1 << _EXPONENT_AT) - 1
    if not 0 <= scale <= _SCALE_MAX or coefficient > _COEFFICIENT_MAX:
        return None
    return Field("D", Decimal(scale, coefficient))
