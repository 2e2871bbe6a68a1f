"""Types of AMQP 1.0: values and their bytes (OASIS AMQP 1.0 part 1, sections 1.1 to 1.6).

| AMQP                         | here                                                           |
|------------------------------|----------------------------------------------------------------|
| null, boolean, binary, utf8  | None, bool, bytes, str                                         |
| ubyte … ulong, byte … long   | UByte … ULong, Byte … Long; a plain int is written as a long   |
| float, double                | Float, float                                                   |
| decimal32, 64, 128           | Decimal32, Decimal64, Decimal128: their bytes                  |
| char, timestamp, uuid        | Char, Timestamp (ms), uuid.UUID                                |
| symbol                       | Symbol                                                         |
| list, map, array             | list, dict, Array                                              |
| described                    | Described                                                      |

Values compare as Python's do: UInt(1) equals 1, Symbol("a") equals "a". A value is written in its
shortest form, the elements of an array in the longest one. The size of a list or map counts, not
its number of items.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import TypeAlias
from uuid import UUID

from convoymq.model.errors import Misuse, PeerError

DEPTH_MAX = 32
"""Of lists, maps, arrays and described values inside each other."""
EMPTY_ITEMS_MAX = 255
"""Elements of an array whose elements have no bytes of their own."""

Value: TypeAlias = "object"
"""A value of one of the types above."""


class Symbol(str):
    """ASCII text of a domain of names."""

    __slots__ = ()


class Char(str):
    """One character."""

    __slots__ = ()


class Float(float):
    """Float of 32 bits."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970."""

    __slots__ = ()


class UByte(int):
    """Unsigned integer of 8 bits."""

    __slots__ = ()


class UShort(int):
    """Unsigned integer of 16 bits."""

    __slots__ = ()


class UInt(int):
    """Unsigned integer of 32 bits."""

    __slots__ = ()


class ULong(int):
    """Unsigned integer of 64 bits."""

    __slots__ = ()


class Byte(int):
    """Integer of 8 bits."""

    __slots__ = ()


class Short(int):
    """Integer of 16 bits."""

    __slots__ = ()


class Int(int):
    """Integer of 32 bits."""

    __slots__ = ()


class Long(int):
    """Integer of 64 bits."""

    __slots__ = ()


class Decimal32(bytes):
    """Decimal as its 4 bytes."""

    __slots__ = ()


class Decimal64(bytes):
    """Decimal as its 8 bytes."""

    __slots__ = ()


class Decimal128(bytes):
    """Decimal as its 16 bytes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A value with the descriptor that says what it stands for."""

    descriptor: Value
    value: Value


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one type."""

    kind: type
    """Type of its items; described ones are the values alone."""
    items: tuple[Value, ...]
    descriptor: Value = None
    """Of all items; None: they are not described."""


def decode(data: bytes, at: int, end: int) -> tuple[Value, int]:
    """Decodes the value at `at`.

    Returns:
        The value and the place behind it.
    Raises:
        PeerError: it is cut off, or its bytes break a rule or a limit.
    """
    return _decode(data, at, end, 1)


def encode(value: Value) -> bytes:
    """Returns the bytes of a value. Raises Misuse: it has no such form."""
    out = bytearray()
    _encode(value, out, 1)
    return bytes(out)


# Reading

_Decoder = Callable[[bytes, int, int, int], tuple[Value, int]]
"""Decodes what stands behind a constructor: data, place, end, depth."""


def _decode(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
    if at >= end:
        raise _cut_off()
    return _decoder(data[at])(data, at + 1, end, depth)


def _decoder(code: int) -> _Decoder:
    decoder = _DECODERS.get(code)
    if decoder is None:
        raise PeerError(f"0x{code:02x} is no constructor of a type")
    return decoder


def _fixed(pattern: str, kind: Callable[..., Value]) -> _Decoder:
    form = struct.Struct(pattern)

    def decoder(data: bytes, at: int, end: int, _depth: int) -> tuple[Value, int]:
        stop = at + form.size
        if stop > end:
            raise _cut_off()
        return kind(form.unpack_from(data, at)[0]), stop

    return decoder


def _constant(value: Value) -> _Decoder:
    return lambda _data, at, _end, _depth: (value, at)


def _variable(width: int, kind: Callable[[bytes], Value]) -> _Decoder:
    def decoder(data: bytes, at: int, end: int, _depth: int) -> tuple[Value, int]:
        start, stop = _span(data, at, end, width)
        return kind(data[start:stop]), stop

    return decoder


def _list(width: int) -> _Decoder:
    def decoder(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
        count, at, stop = _counted(data, at, end, width, depth)
        _check_count(count, stop - at)
        items = []
        while at < stop:
            item, at = _decode(data, at, stop, depth + 1)
            items.append(item)
        return items, stop

    return decoder


def _map(width: int) -> _Decoder:
    def decoder(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
        count, at, stop = _counted(data, at, end, width, depth)
        _check_count(count, stop - at)
        if count % 2:
            raise PeerError(f"a map of {count} keys and values")
        items = {}
        while at < stop:
            key, at = _decode(data, at, stop, depth + 1)
            item, at = _decode(data, at, stop, depth + 1)
            try:
                items[key] = item
            except TypeError:
                raise PeerError(f"a {type(key).__name__} as the key of a map") from None
        return items, stop

    return decoder


def _array(width: int) -> _Decoder:
    def decoder(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
        count, at, stop = _counted(data, at, end, width, depth)
        if at >= stop:
            raise _cut_off()
        code, at, descriptor = data[at], at + 1, None
        if code == _DESCRIBED:
            descriptor, at = _decode(data, at, stop, depth + 1)
            if at >= stop:
                raise _cut_off()
            code, at = data[at], at + 1
        kind, item = _kind_of(code), _decoder(code)
        items: tuple[Value, ...]
        if code >> 4 == 4:
            if count > EMPTY_ITEMS_MAX or descriptor is not None:
                raise PeerError(f"an array of {count} items without bytes")
            items = _repeated(code, count)
        else:
            found = []
            for _ in range(count):
                value, at = item(data, at, stop, depth + 1)
                found.append(value)
            items = tuple(found)
        if at != stop:
            raise PeerError(f"{stop - at} bytes behind the items of an array")
        return Array(kind, items, descriptor), stop

    return decoder


@lru_cache(maxsize=6 * (EMPTY_ITEMS_MAX + 1))
def _repeated(code: int, count: int) -> tuple[Value, ...]:
    """Returns the items of an array without bytes. Equal ones are shared: a message of few bytes
    may hold thousands of such arrays."""
    return (_decoder(code)(b"", 0, 0, 1)[0],) * count


def _described(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
    _check_depth(depth)
    descriptor, at = _decode(data, at, end, depth + 1)
    value, at = _decode(data, at, end, depth + 1)
    return Described(descriptor, value), at


def _span(data: bytes, at: int, end: int, width: int) -> tuple[int, int]:
    """Returns where the bytes behind a size of `width` bytes begin and end."""
    start = at + width
    stop = start + int.from_bytes(data[at:start], "big")
    if start > end or stop > end:
        raise _cut_off()
    return start, stop


def _counted(data: bytes, at: int, end: int, width: int, depth: int) -> tuple[int, int, int]:
    """Returns number, beginning and end of the items of a compound value."""
    _check_depth(depth)
    at, stop = _span(data, at, end, width)
    start = at + width
    if start > stop:
        raise _cut_off()
    return int.from_bytes(data[at:start], "big"), start, stop


def _check_count(count: int, size: int) -> None:
    if count > size:
        raise PeerError(f"{count} items in {size} bytes")


def _check_depth(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise PeerError(f"values are nested deeper than {DEPTH_MAX}")


def _cut_off() -> PeerError:
    return PeerError("a value is cut off")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PeerError(f"text that is not UTF-8: {error.reason}") from error


def _symbol(data: bytes) -> Symbol:
    try:
        return Symbol(data.decode("ascii"))
    except UnicodeDecodeError:
        raise PeerError("a symbol that is not ASCII") from None


def _char(code: int) -> Char:
    try:
        text = chr(code)
        text.encode()
    except (ValueError, OverflowError):
        raise PeerError(f"0x{code:x} is no character") from None
    return Char(text)


def _boolean(code: int) -> bool:
    if code > 1:
        raise PeerError(f"{code} is no boolean")
    return code == 1


_DESCRIBED = 0x00
_DECODERS: dict[int, _Decoder] = {
    _DESCRIBED: _described,
    0x40: _constant(None),
    0x41: _constant(True),
    0x42: _constant(False),
    0x43: _constant(UInt(0)),
    0x44: _constant(ULong(0)),
    0x45: lambda _data, at, _end, _depth: ([], at),
    0x50: _fixed(">B", UByte),
    0x51: _fixed(">b", Byte),
    0x52: _fixed(">B", UInt),
    0x53: _fixed(">B", ULong),
    0x54: _fixed(">b", Int),
    0x55: _fixed(">b", Long),
    0x56: _fixed(">B", _boolean),
    0x60: _fixed(">H", UShort),
    0x61: _fixed(">h", Short),
    0x70: _fixed(">I", UInt),
    0x71: _fixed(">i", Int),
    0x72: _fixed(">f", Float),
    0x73: _fixed(">I", _char),
    0x74: _fixed(">4s", Decimal32),
    0x80: _fixed(">Q", ULong),
    0x81: _fixed(">q", Long),
    0x82: _fixed(">d", float),
    0x83: _fixed(">q", Timestamp),
    0x84: _fixed(">8s", Decimal64),
    0x94: _fixed(">16s", Decimal128),
    0x98: _fixed(">16s", lambda data: UUID(bytes=data)),
    0xA0: _variable(1, bytes),
    0xA1: _variable(1, _text),
    0xA3: _variable(1, _symbol),
    0xB0: _variable(4, bytes),
    0xB1: _variable(4, _text),
    0xB3: _variable(4, _symbol),
    0xC0: _list(1),
    0xC1: _map(1),
    0xD0: _list(4),
    0xD1: _map(4),
    0xE0: _array(1),
    0xF0: _array(4),
}

# Writing

_WIDE: dict[type, int] = {
    NoneType: 0x40,
    UByte: 0x50,
    Byte: 0x51,
    bool: 0x56,
    UShort: 0x60,
    Short: 0x61,
    UInt: 0x70,
    Int: 0x71,
    Float: 0x72,
    Char: 0x73,
    Decimal32: 0x74,
    ULong: 0x80,
    Long: 0x81,
    float: 0x82,
    Timestamp: 0x83,
    Decimal64: 0x84,
    Decimal128: 0x94,
    UUID: 0x98,
    bytes: 0xB0,
    str: 0xB1,
    Symbol: 0xB3,
    list: 0xD0,
    dict: 0xD1,
    Array: 0xF0,
}
"""The longest constructor of each type."""

_NUMBERS = {
    code: struct.Struct(pattern)
    for code, pattern in (
        *((0x50, ">B"), (0x51, ">b"), (0x56, ">B"), (0x60, ">H"), (0x61, ">h"), (0x70, ">I")),
        *((0x71, ">i"), (0x72, ">f"), (0x80, ">Q"), (0x81, ">q"), (0x82, ">d"), (0x83, ">q")),
    )
}
_RAW = {0x73: 4, 0x74: 4, 0x84: 8, 0x94: 16, 0x98: 16}
_SHORT_INTEGERS: dict[int, tuple[int | None, int, range]] = {
    0x70: (0x43, 0x52, range(256)),
    0x80: (0x44, 0x53, range(256)),
    0x71: (None, 0x54, range(-128, 128)),
    0x81: (None, 0x55, range(-128, 128)),
}
"""Constructors of zero and of a short value, and the short values, by the longest one."""


def _kind_of(code: int) -> type:
    """Returns the type of an array's items."""
    kind = _KINDS.get(code)
    if kind is None:
        raise PeerError(f"0x{code:02x} is no constructor of an array's items")
    return kind


_SHORT: dict[type, tuple[int, ...]] = {
    bool: (0x41, 0x42),
    UInt: (0x43, 0x52),
    ULong: (0x44, 0x53),
    Int: (0x54,),
    Long: (0x55,),
    list: (0x45, 0xC0),
    bytes: (0xA0,),
    str: (0xA1,),
    Symbol: (0xA3,),
    dict: (0xC1,),
    Array: (0xE0,),
}
"""The other constructors of each type."""
_KINDS = {code: kind for kind, wide in _WIDE.items() for code in (wide, *_SHORT.get(kind, ()))}


def _encode(value: Value, out: bytearray, depth: int) -> None:
    if isinstance(value, Described):
        _check_writable(depth)
        out.append(_DESCRIBED)
        _encode(value.descriptor, out, depth + 1)
        _encode(value.value, out, depth + 1)
        return
    code = _code_of(type(value))
    short = _SHORT_INTEGERS.get(code)
    if isinstance(value, int) and short is not None and value in short[2]:
        zero, form, _ = short
        if value == 0 and zero is not None:
            out.append(zero)
        else:
            out += bytes((form, value & 0xFF))
    elif isinstance(value, bool):
        out.append(0x41 if value else 0x42)
    elif value == []:
        out.append(0x45)
    elif code < 0xA0:
        out.append(code)
        _encode_body(value, code, out, depth)
    else:
        body = bytearray()
        _encode_body(value, code, body, depth)
        # Sizes, and with them counts, in 4 bytes each; in 1 where they fit.
        if code < 0xD0:
            small = len(body) - 4 <= 0xFF
            out.append(code - 0x10 if small else code)
            out += body[3 if small else 0 :]
        else:
            small = len(body) - 7 <= 0xFF and int.from_bytes(body[4:8], "big") <= 0xFF
            out.append(code - 0x10 if small else code)
            out += bytes((len(body) - 7, body[7])) + body[8:] if small else body


def _code_of(kind: type) -> int:
    for base in kind.__mro__:
        code = _WIDE.get(base)
        if code is not None:
            return code
        if base is int:
            return _WIDE[Long]
    raise Misuse(f"AMQP 1.0 has no type for a {kind.__name__}")


def _encode_body(value: Value, code: int, out: bytearray, depth: int) -> None:
    """Appends what stands behind the longest constructor."""
    try:
        match value:
            case None:
                return
            case int() | float():
                out += _NUMBERS[code].pack(value)
            case str() if code >= 0xB0:
                data = value.encode("ascii" if code == 0xB3 else "utf-8")
                out += len(data).to_bytes(4, "big") + data
            case bytes() if code >= 0xB0:
                out += len(value).to_bytes(4, "big") + value
            case _ if code in _RAW:
                out += _raw(value, _RAW[code])
            case _:
                _check_writable(depth)
                count, data = _items(value, depth + 1)
                out += (len(data) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + data
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise Misuse(f"a {type(value).__name__} does not fit its type: {error}") from error


def _raw(value: Value, size: int) -> bytes:
    """Returns the bytes of a character, decimal or UUID."""
    match value:
        case UUID():
            data = value.bytes
        case str():
            data = value.encode("utf-32-be")
        case bytes():
            data = bytes(value)
        case _:
            data = b""
    if len(data) != size:
        raise Misuse(f"{len(data)} bytes instead of {size}")
    return data


def _items(value: Value, depth: int) -> tuple[int, bytes]:
    """Returns number and bytes of the items of a compound value."""
    out = bytearray()
    match value:
        case list():
            for item in value:
                _encode(item, out, depth)
            return len(value), bytes(out)
        case dict():
            for key, item in value.items():
                _encode(key, out, depth)
                _encode(item, out, depth)
            return 2 * len(value), bytes(out)
        case Array(kind, items, descriptor):
            if descriptor is not None:
                out.append(_DESCRIBED)
                _encode(descriptor, out, depth)
            code = _code_of(kind)
            out.append(code)
            for item in items:
                if _code_of(type(item)) != code:
                    raise Misuse(f"a {type(item).__name__} in an array of {kind.__name__}")
                _encode_body(item, code, out, depth)
            return len(items), bytes(out)
    raise Misuse(f"AMQP 1.0 has no type for a {type(value).__name__}")


def _check_writable(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise Misuse(f"values are nested deeper than {DEPTH_MAX}")
