"""AMQP field tables: values that keep the type codes they came with.

The dialect is RabbitMQ's, which differs from the printed 0-9-1 text: `s` is a 16-bit integer,
`l` and `L` are both signed 64-bit, `x` is a byte array. A `Table` holds the bytes it was decoded
from, so it is emitted again byte for byte, whatever oddities (duplicate keys, booleans other than
0 and 1, signalling NaNs) those bytes have.

    table   u32 length, then fields until the length is used up
    field   shortstr key, value
    value   u8 type code, then by code:
              t b B: 1 byte   s u: 2   I i f: 4   l L d T: 8   V: 0   D: u8 scale + u32
              S x: u32 length + bytes   A: u32 length + values   F: a table

Keys and short strings are text that need not be UTF-8: `text_of` keeps every other byte as half of
a surrogate pair, and `bytes_of` gives the same bytes again. `shown` is for people.

Tables live in the model, because routing compares arguments and matches headers by them and the
metadata keeps them.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from convoymq.model.errors import FrameFault, Misuse, PeerError, SyntaxFault

DEPTH_MAX = 32
TABLE_BYTES_MAX = 1 << 20
SHORT_STRING_BYTES_MAX = 255

NOT_TEXT = "Not UTF-8, base64 is: "
"""Begin of the text that stands for bytes that are no text, as in RabbitMQ's HTTP API; their base64
follows."""

_SIGNED_64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Decimal:
    """`value` divided by ten to the power of `scale`, kept as it was sent."""

    scale: int
    value: int


Value: TypeAlias = "bool | int | float | bytes | Decimal | Table | tuple[Field, ...] | None"

TYPE_NAMES: dict[str, str] = {
    "t": "bool",
    "b": "byte",
    "B": "unsignedbyte",
    "s": "short",
    "u": "unsignedshort",
    "I": "signedint",
    "i": "unsignedint",
    "l": "long",
    "L": "long",
    "f": "float",
    "d": "double",
    "D": "decimal",
    "S": "longstr",
    "x": "binary",
    "T": "timestamp",
    "F": "table",
    "A": "array",
    "V": "void",
}

INTEGER_CODES = frozenset("bBsuIilL")
_INTEGER_CLASS = INTEGER_CODES | {"D"}
_FLOAT_CLASS = frozenset("fd")

_FIXED: dict[str, struct.Struct] = {
    "t": struct.Struct(">B"),
    "b": struct.Struct(">b"),
    "B": struct.Struct(">B"),
    "s": struct.Struct(">h"),
    "u": struct.Struct(">H"),
    "I": struct.Struct(">i"),
    "i": struct.Struct(">I"),
    "l": struct.Struct(">q"),
    "L": struct.Struct(">q"),
    "f": struct.Struct(">f"),
    "d": struct.Struct(">d"),
    "T": struct.Struct(">Q"),
}
_DECIMAL = struct.Struct(">BI")
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Field:
    """One value with its type code."""

    code: str
    value: Value

    @property
    def type_name(self) -> str:
        """Returns the word that error texts use for the type."""
        return TYPE_NAMES[self.code]

    def equivalent(self, other: Field) -> bool:
        """Returns whether two arguments count as equal: same class of types, same value.

        All integers and decimals are one class, both floats another.
        """
        return (
            _type_class(self.code) == _type_class(other.code)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def same_content(self, other: Field) -> bool:
        """Returns whether a headers exchange takes the two for equal: value and kind, not width.
        All numbers are one kind, as in Erlang: 5 is 5.0."""
        kinds = {type(self.value), type(other.value)}
        return (len(kinds) == 1 or kinds == {int, float}) and self.value == other.value

    def term(self) -> str:
        """Returns the value as RabbitMQ prints it inside error texts: text plain, the rest as
        terms."""
        if isinstance(self.value, bytes):
            return self.value.decode("utf-8", "replace")
        return erlang_term(self)


class Table:
    """An immutable sequence of (key, field) with the bytes that stand for it.

    Two tables are equal when their bytes are.
    """

    __slots__ = ("_fields", "encoded")

    encoded: bytes
    """The fields on the wire, without the length in front."""

    def __init__(self, encoded: bytes, fields: tuple[tuple[str, Field], ...]) -> None:
        """Pair bytes with what they mean; use `of`, `from_fields` or `decode_body` instead."""
        self.encoded = encoded
        self._fields = fields

    @classmethod
    def from_fields(cls, fields: Iterable[tuple[str, Field]]) -> Table:
        """Builds a table from keys and typed values.

        Raises:
            Misuse: a value does not fit its code, or a key its 255 bytes.
        """
        kept = tuple(fields)
        out = bytearray()
        try:
            for key, field in kept:
                name = bytes_of(key)
                if len(name) > SHORT_STRING_BYTES_MAX:
                    raise Misuse(f"table key of {len(name)} bytes")
                out.append(len(name))
                out += name
                _encode_value(field, out)
            encoded = bytes(out)
            # What is built here gets stored: it has to be readable under the same bounds.
            _decode_table(encoded, 0, len(encoded), depth=1)
        except (struct.error, OverflowError, UnicodeEncodeError, PeerError) as error:
            raise Misuse(f"value does not fit its type: {error}") from error
        return cls(encoded, kept)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Table:
        """Builds a table from plain values: int `l`, str and bytes `S`, bool `t`, float `d`,
        None `V`, mapping `F`, list or tuple `A`; a `Field` stays as it is.

        Raises:
            Misuse: a value has no such form.
        """
        return cls.from_fields((key, field_of(value)) for key, value in values.items())

    def get(self, key: str) -> Field | None:
        """Returns the first field of that key."""
        for name, field in self._fields:
            if name == key:
                return field
        return None

    def items(self) -> tuple[tuple[str, Field], ...]:
        """Returns all fields in their order."""
        return self._fields

    def keys(self) -> tuple[str, ...]:
        """Returns all keys in their order."""
        return tuple(name for name, _ in self._fields)

    def with_field(self, key: str, value: object) -> Table:
        """Returns a table where `key` has this value: in its place, or at the end."""
        new = (key, field_of(value))
        if self.get(key) is None:
            return Table.from_fields((*self._fields, new))
        seen = False
        kept: list[tuple[str, Field]] = []
        for name, field in self._fields:
            if name != key:
                kept.append((name, field))
            elif not seen:
                kept.append(new)
                seen = True
        return Table.from_fields(kept)

    def without(self, key: str) -> Table:
        """Returns a table without that key."""
        if self.get(key) is None:
            return self
        return Table.from_fields(pair for pair in self._fields if pair[0] != key)

    def canonical(self) -> Table:
        """Returns the table with its keys in order: the identity of binding arguments."""
        ordered = tuple(sorted(self._fields, key=lambda pair: pair[0]))
        return self if ordered == self._fields else Table.from_fields(ordered)

    def to_plain(self) -> dict[str, object]:
        """Returns plain values for display: text where bytes are UTF-8, lists for arrays."""
        return {shown(key): _plain(field) for key, field in self._fields}

    def has_text_keys(self) -> bool:
        """Returns whether all keys are UTF-8, those of inner tables too."""
        return all(is_text(key) and _has_text_keys(field) for key, field in self._fields)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return self.encoded == other.encoded if isinstance(other, Table) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        shown = (f"{key}={field.code}:{field.term()}" for key, field in self._fields)
        return f"Table({', '.join(shown)})"


def text_of(data: bytes) -> str:
    """Returns a short string's text; `bytes_of` gives the same bytes again, whatever they are."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """Returns the bytes of `text_of`. Raises UnicodeEncodeError: the text comes from elsewhere, and
    has no bytes."""
    return text.encode("utf-8", "surrogateescape")


def is_text(text: str) -> bool:
    """Returns whether the bytes of `text_of` are UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: str | bytes) -> str:
    """Returns text for people and JSON: the text, or `NOT_TEXT` and base64."""
    if isinstance(value, str):
        if is_text(value):
            return value
        value = value.encode("utf-8", "surrogateescape")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return NOT_TEXT + base64.b64encode(value).decode()


def bytes_shown(text: str) -> bytes:
    """Returns the bytes of which `shown` makes this text. Raises Misuse: they are none."""
    if text.startswith(NOT_TEXT):
        try:
            data = base64.b64decode(text[len(NOT_TEXT) :], validate=True)
        except (binascii.Error, ValueError):
            data = b""
        # Text that only looks so stays as it is.
        if data and shown(data) == text:
            return data
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Misuse("text with half of a surrogate pair") from error


def field_of(value: object) -> Field:
    """Returns `value` with the code that `Table.of` documents.

    Raises:
        Misuse: there is none, or the value is nested too deeply.
    """
    return _field_of(value, 1)


def _field_of(value: object, depth: int) -> Field:
    if depth > DEPTH_MAX:
        raise Misuse(f"table nested deeper than {DEPTH_MAX}")
    match value:
        case Field():
            return value
        case None:
            return Field("V", None)
        case bool():
            return Field("t", value)
        case Decimal():
            return Field("D", value)
        case int() if value in _SIGNED_64:
            return Field("l", value)
        case float():
            return Field("d", value)
        case str():
            return Field("S", bytes_shown(value))
        case bytes():
            return Field("S", value)
        case Table():
            return Field("F", value)
        case Mapping():
            pairs = ((key, _field_of(item, depth + 1)) for key, item in value.items())
            return Field("F", Table.from_fields(pairs))
        case list() | tuple():
            return Field("A", tuple(_field_of(item, depth + 1) for item in value))
        case _:
            raise Misuse(f"no field type for {value!r}")


def decode_body(data: bytes | memoryview) -> Table:
    """Decodes a table that stands alone, without its length.

    Raises:
        PeerError: the bytes are no such table.
    """
    return _decode_table(bytes(data), 0, len(data), depth=1)


def decode_table(data: bytes, offset: int, end: int) -> tuple[Table, int]:
    """Decodes the table at `offset`; `end` is where readable bytes stop.

    Returns:
        The table and the offset behind it.
    Raises:
        PeerError: the bytes are no such table.
    """
    start = offset + 4
    stop = start + _read_length(data, offset, end)
    return _decode_table(data, start, stop, depth=1), stop


def encode_table(table: Table) -> bytes:
    """Returns the table as it stands in a frame, length first."""
    return _LENGTH.pack(len(table.encoded)) + table.encoded


def decode_short_string(data: bytes, offset: int, end: int) -> tuple[str, int]:
    """Decodes the short string at `offset`.

    Raises:
        FrameFault: it reaches beyond `end`.
    """
    if offset >= end:
        raise FrameFault("short string beyond the end of its frame")
    start = offset + 1
    stop = start + data[offset]
    if stop > end:
        raise FrameFault("short string beyond the end of its frame")
    return text_of(data[start:stop]), stop


def erlang_term(field: Field) -> str:
    """Returns a value as RabbitMQ's error texts print it."""
    value = field.value
    match value:
        case None:
            return "undefined"
        case bool():
            return "true" if value else "false"
        case Table():
            return f"[{','.join(_named_term(key, item) for key, item in value.items())}]"
        case Decimal():
            return f"{{{value.scale},{value.value}}}"
        case tuple():
            return f"[{','.join(f'{{{item.type_name},{erlang_term(item)}}}' for item in value)}]"
        case bytes():
            return f'<<"{value.decode("utf-8", "replace")}">>'
        case float() if math.isfinite(value):
            return repr(value)
        case _:
            return str(value)


def _named_term(key: str, field: Field) -> str:
    return f'{{<<"{key}">>,{field.type_name},{erlang_term(field)}}}'


def _type_class(code: str) -> str:
    if code in _INTEGER_CLASS:
        return "integer"
    return "float" if code in _FLOAT_CLASS else code


def _plain(field: Field) -> object:
    match field.value:
        case Table() as table:
            return table.to_plain()
        case Decimal(scale, value):
            return value / 10**scale
        case tuple() as items:
            return [_plain(item) for item in items]
        case bytes() as data:
            return shown(data)
        case other:
            return other


def _has_text_keys(field: Field) -> bool:
    match field.value:
        case Table() as table:
            return table.has_text_keys()
        case tuple() as items:
            return all(_has_text_keys(item) for item in items)
        case _:
            return True


def _read_length(data: bytes, offset: int, end: int) -> int:
    if end - offset < 4:
        raise SyntaxFault("length beyond the end of its table")
    length: int = _LENGTH.unpack_from(data, offset)[0]
    if length > end - offset - 4:
        raise SyntaxFault(f"length {length} beyond the end of its table")
    return length


def _decode_table(data: bytes, offset: int, end: int, *, depth: int) -> Table:
    if end - offset > TABLE_BYTES_MAX:
        raise SyntaxFault(f"table of {end - offset} bytes, at most {TABLE_BYTES_MAX} are allowed")
    if offset == end:
        return EMPTY
    start = offset
    fields: list[tuple[str, Field]] = []
    while offset < end:
        key, offset = decode_short_string(data, offset, end)
        field, offset = _decode_value(data, offset, end, depth)
        fields.append((key, field))
    return Table(data[start:end], tuple(fields))


def _decode_value(data: bytes, offset: int, end: int, depth: int) -> tuple[Field, int]:
    if offset >= end:
        raise SyntaxFault("value beyond the end of its table")
    code = chr(data[offset])
    offset += 1
    fixed = _FIXED.get(code)
    if fixed is not None:
        stop = offset + fixed.size
        if stop > end:
            raise SyntaxFault("value beyond the end of its table")
        number = fixed.unpack_from(data, offset)[0]
        return Field(code, bool(number) if code == "t" else number), stop
    match code:
        case "S" | "x":
            start = offset + 4
            stop = start + _read_length(data, offset, end)
            return Field(code, data[start:stop]), stop
        case "V":
            return Field(code, None), offset
        case "D":
            stop = offset + _DECIMAL.size
            if stop > end:
                raise SyntaxFault("value beyond the end of its table")
            return Field(code, Decimal(*_DECIMAL.unpack_from(data, offset))), stop
        case "F" | "A":
            if depth >= DEPTH_MAX:
                raise SyntaxFault(f"table nested deeper than {DEPTH_MAX}")
            start = offset + 4
            stop = start + _read_length(data, offset, end)
            if code == "F":
                return Field(code, _decode_table(data, start, stop, depth=depth + 1)), stop
            return Field(code, _decode_array(data, start, stop, depth + 1)), stop
        case _:
            raise SyntaxFault(f"unknown field type {data[offset - 1]}")


def _decode_array(data: bytes, offset: int, end: int, depth: int) -> tuple[Field, ...]:
    items: list[Field] = []
    while offset < end:
        item, offset = _decode_value(data, offset, end, depth)
        items.append(item)
    return tuple(items)


def _encode_value(field: Field, out: bytearray) -> None:
    code, value = field.code, field.value
    out += code.encode("latin-1")
    fixed = _FIXED.get(code)
    if fixed is not None and isinstance(value, int | float):
        out += fixed.pack(value)
        return
    match code, value:
        case "S" | "x", bytes():
            out += _LENGTH.pack(len(value))
            out += value
        case "V", None:
            pass
        case "D", Decimal():
            out += _DECIMAL.pack(value.scale, value.value)
        case "F", Table():
            out += encode_table(value)
        case "A", tuple():
            inner = bytearray()
            for item in value:
                assert isinstance(item, Field)
                _encode_value(item, inner)
            out += _LENGTH.pack(len(inner))
            out += inner
        case _:
            raise Misuse(f"value of type {type(value).__name__} with field type {code!r}")


EMPTY = Table(b"", ())

__all__ = [
    "DEPTH_MAX",
    "EMPTY",
    "INTEGER_CODES",
    "NOT_TEXT",
    "TABLE_BYTES_MAX",
    "TYPE_NAMES",
    "Decimal",
    "Field",
    "Table",
    "Value",
    "bytes_of",
    "bytes_shown",
    "decode_body",
    "decode_short_string",
    "decode_table",
    "encode_table",
    "erlang_term",
    "field_of",
    "is_text",
    "shown",
    "text_of",
]
