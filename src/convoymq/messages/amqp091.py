"""Content headers of AMQP 0-9-1: the one reader and writer of properties, sans IO.

    header payload   u16 class, u16 weight, u64 body size, u16 flags..., values;
                     bit 0 of a flags word says that another one follows

Whatever the publish path accepts can be read here, and is written again with the same bytes: short
strings and names of headers need not be UTF-8 (`tables.text_of`).

A record has one in every encoding (`messages.record`); columns have it as it is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

import msgspec

from convoymq.model.errors import FrameFault, Misuse, SyntaxFault
from convoymq.model.tables import (
    SHORT_STRING_BYTES_MAX,
    Table,
    bytes_of,
    decode_table,
    encode_table,
    text_of,
)

BASIC = 60
"""The only class of methods that carry content."""
HEADER_BYTES_MAX = 131_072 - 8
"""Of a payload that every client can be sent: in a frame of the default size."""

_HEAD = struct.Struct(">HHQ")
_FLAGS = struct.Struct(">H")
_LONGLONG = struct.Struct(">Q")
_MORE_FLAGS = 1


class PropertyType(Enum):
    """Encoding of a property."""

    OCTET = "octet"
    SHORTSTR = "shortstr"
    TABLE = "table"
    TIMESTAMP = "timestamp"


_OCTET, _SHORTSTR = PropertyType.OCTET, PropertyType.SHORTSTR
_TABLE, _TIMESTAMP = PropertyType.TABLE, PropertyType.TIMESTAMP


class Properties(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a message; None stands for absent."""

    FIELDS: ClassVar[tuple[tuple[str, PropertyType], ...]] = (
        ("content_type", _SHORTSTR),
        ("content_encoding", _SHORTSTR),
        ("headers", _TABLE),
        ("delivery_mode", _OCTET),
        ("priority", _OCTET),
        ("correlation_id", _SHORTSTR),
        ("reply_to", _SHORTSTR),
        ("expiration", _SHORTSTR),
        ("message_id", _SHORTSTR),
        ("timestamp", _TIMESTAMP),
        ("type", _SHORTSTR),
        ("user_id", _SHORTSTR),
        ("app_id", _SHORTSTR),
        ("cluster_id", _SHORTSTR),
    )

    content_type: str | None = None
    content_encoding: str | None = None
    headers: Table | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None


NO_PROPERTIES = Properties()
_KINDS = dict(Properties.FIELDS)
_KNOWN_FLAGS = sum(1 << (15 - index) for index in range(len(Properties.FIELDS)))
_SPARE_FLAG = 2
"""Of the first flags word: it stands for nothing, and brokers do not look at it."""


class ContentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a content header."""

    class_id: int = BASIC
    body_size: int
    properties: Properties


def encode_header(header: ContentHeader) -> bytes:
    """Returns the payload of a content header frame.

    Raises:
        Misuse: a value does not fit its type.
    """
    head = _HEAD.pack(header.class_id, 0, header.body_size)
    return head + encode_properties(header.properties)


def decode_header(payload: bytes) -> ContentHeader:
    """Decodes the payload of a content header frame; the weight is ignored.

    Raises:
        PeerError: the payload is broken, or of a class without content.
    """
    body_size = _body_size(payload)
    properties = decode_properties(payload, _HEAD.size)
    return ContentHeader(body_size=body_size, properties=properties)


def split_header(payload: bytes) -> tuple[int, dict[str, bytes]]:
    """Returns the size of the body, and the encoded properties of a content header payload. Raises
    PeerError as `decode_header` does, but for what lies inside values."""
    return _body_size(payload), split_properties(payload, _HEAD.size)


def join_header(values: Mapping[str, bytes], body_size: int = 0) -> bytes:
    """Returns the content header payload of encoded properties."""
    return _HEAD.pack(BASIC, 0, body_size) + join_properties(values)


def encode_properties(properties: Properties) -> bytes:
    """Returns flags and values.

    Raises:
        Misuse: a value does not fit its type.
    """
    given = ((name, kind, getattr(properties, name)) for name, kind in Properties.FIELDS)
    return join_properties(
        {name: _encode(name, kind, value) for name, kind, value in given if value is not None}
    )


def decode_properties(data: bytes, offset: int = 0) -> Properties:
    """Decodes flags and values that fill `data` from `offset` to its end.

    Raises:
        PeerError: they are broken, or a flag stands for an unknown property.
    """
    values = split_properties(data, offset)
    return Properties(**{name: _decode(_KINDS[name], value) for name, value in values.items()})  # type: ignore[arg-type]


def split_properties(data: bytes, offset: int = 0) -> dict[str, bytes]:
    """Returns the encoded value of each property that is set, in AMQP's order. Raises PeerError as
    `decode_properties` does, but for what lies inside values."""
    end = len(data)
    flags, offset = _read_flags(data, offset, end)
    values: dict[str, bytes] = {}
    for index, (name, kind) in enumerate(Properties.FIELDS):
        if flags & 1 << (15 - index):
            stop = offset + _length(kind, data, offset, end)
            if stop > end:
                raise FrameFault(f"{name} beyond the end of its frame")
            values[name] = data[offset:stop]
            offset = stop
    if offset != end:
        raise SyntaxFault(f"{end - offset} bytes behind the properties")
    return values


def join_properties(values: Mapping[str, bytes]) -> bytes:
    """Returns flags and encoded values."""
    flags = 0
    parts = [b""]
    for index, (name, _) in enumerate(Properties.FIELDS):
        value = values.get(name)
        if value is not None:
            flags |= 1 << (15 - index)
            parts.append(value)
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


def _body_size(payload: bytes) -> int:
    if len(payload) < _HEAD.size:
        raise FrameFault("content header frame without a header")
    class_id, _weight, body_size = _HEAD.unpack_from(payload)
    if class_id != BASIC:
        raise SyntaxFault(f"content header of class {class_id}")
    assert isinstance(body_size, int)
    return body_size


def _read_flags(data: bytes, offset: int, end: int) -> tuple[int, int]:
    """Reads all flags words; those after the first hold no property that is known."""
    known = 0
    first = True
    while True:
        if end - offset < _FLAGS.size:
            raise FrameFault("property flags beyond the end of their frame")
        word: int = _FLAGS.unpack_from(data, offset)[0]
        offset += _FLAGS.size
        if word & ~_MORE_FLAGS & ~(_KNOWN_FLAGS | _SPARE_FLAG if first else 0):
            raise SyntaxFault("unknown property flags")
        if first:
            known = word & _KNOWN_FLAGS
            first = False
        if not word & _MORE_FLAGS:
            return known, offset


def _length(kind: PropertyType, data: bytes, offset: int, end: int) -> int:
    """Returns the bytes of a value; more than there are when it is cut off."""
    if kind is _OCTET:
        return 1
    if kind is _TIMESTAMP:
        return _LONGLONG.size
    if kind is _SHORTSTR:
        return 1 + data[offset] if offset < end else 1
    return 4 + int.from_bytes(data[offset : offset + 4], "big")


def _encode(name: str, kind: PropertyType, value: object) -> bytes:
    try:
        match kind, value:
            case PropertyType.SHORTSTR, str():
                data = bytes_of(value)
                if len(data) <= SHORT_STRING_BYTES_MAX:
                    return bytes((len(data),)) + data
            case PropertyType.TABLE, Table():
                return encode_table(value)
            case PropertyType.OCTET, int() if 0 <= value <= 0xFF:
                return bytes((value,))
            case PropertyType.TIMESTAMP, int():
                return _LONGLONG.pack(value)
    except (struct.error, UnicodeEncodeError) as error:
        raise Misuse(f"{name} does not fit a {kind.value}: {error}") from error
    raise Misuse(f"{name} does not fit a {kind.value}")


def _decode(kind: PropertyType, value: bytes) -> object:
    """Returns a value of `split_properties`. Raises PeerError: a table is broken."""
    if kind is _SHORTSTR:
        return text_of(value[1:])
    if kind is _TABLE:
        return decode_table(value, 0, len(value))[0]
    return int.from_bytes(value, "big")
