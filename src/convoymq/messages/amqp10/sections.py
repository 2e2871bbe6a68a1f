"""Sections of a message of AMQP 1.0 (OASIS AMQP 1.0 part 3, section 3.2).

    header? delivery-annotations? message-annotations?
    properties? application-properties? (data+ | amqp-sequence+ | amqp-value) footer?

What is behind the message-annotations is the bare message, which nobody changes between publisher
and consumer. Sections of the body and the footer are found and not decoded.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from convoymq.messages.amqp10.values import (
    DEPTH_MAX,
    Symbol,
    UByte,
    UInt,
    ULong,
    Value,
    decode,
    encode,
)
from convoymq.model.errors import PeerError

SECTIONS_MAX = 10_000
FRONT_BYTES_MAX = 1 << 20
"""Of a section in front of the body: these are decoded at once."""
HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS = 0x70, 0x71, 0x72
PROPERTIES, APPLICATION_PROPERTIES = 0x73, 0x74
DATA, SEQUENCE, VALUE, FOOTER = 0x75, 0x76, 0x77, 0x78
FIELDS = (
    *("message-id", "user-id", "to", "subject", "reply-to", "correlation-id", "content-type"),
    *("content-encoding", "absolute-expiry-time", "creation-time", "group-id", "group-sequence"),
    "reply-to-group-id",
)
"""Names of the properties, in their order."""

Annotations = dict[Symbol, Value]
"""Keys begin with `x-`."""

_WORDS = {
    HEADER: "header",
    DELIVERY_ANNOTATIONS: "delivery-annotations",
    MESSAGE_ANNOTATIONS: "message-annotations",
    PROPERTIES: "properties",
    APPLICATION_PROPERTIES: "application-properties",
    DATA: "data",
    SEQUENCE: "amqp-sequence",
    VALUE: "amqp-value",
    FOOTER: "footer",
}
_FORMS = {HEADER: "list", PROPERTIES: "list", DATA: "binary", SEQUENCE: "list", VALUE: "*"}
_CODES = {f"amqp:{word}:{_FORMS.get(code, 'map')}": code for code, word in _WORDS.items()}
_HEADER_TYPES = (bool, UByte, UInt, bool, UInt)
_SIZES = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZED = {0xA: 1, 0xC: 1, 0xE: 1, 0xB: 4, 0xD: 4, 0xF: 4}
_EMPTY = slice(0, 0)


class Header(msgspec.Struct, frozen=True):
    """Fields of the header section."""

    durable: bool = False
    priority: int | None = None
    ttl_ms: int | None = None
    first_acquirer: bool = False
    delivery_count: int = 0


NO_HEADER = Header()


class Sections(msgspec.Struct):
    """Sections of a message: where they are, and what those in front of the body mean."""

    header: Header = NO_HEADER
    delivery_annotations: Annotations = {}
    annotations: Annotations = {}
    """Of the message."""
    properties: dict[str, Value] = {}
    """By name; those that are null are left out."""
    application_properties: dict[str, Value] = {}

    annotations_at: slice = _EMPTY
    properties_at: slice = _EMPTY
    application_properties_at: slice = _EMPTY
    body_at: slice = _EMPTY
    footer_at: slice = _EMPTY
    bare_at: int = 0
    """Begin of the bare message."""
    body_kind: int = 0
    """DATA, SEQUENCE or VALUE."""


def split(payload: bytes) -> Sections:
    """Returns the sections of a message. Raises PeerError: it cannot be parsed, has no body, or its
    sections are out of order."""
    found = Sections()
    at, last, end = 0, 0, len(payload)
    for _ in range(SECTIONS_MAX):
        if at == end:
            break
        code, start = section_at(payload, at, end)
        stop = skip(payload, start, end)
        again = code == last and code in (DATA, SEQUENCE)
        if not again and (code <= last or (found.body_kind and code != FOOTER)):
            raise PeerError(f"section {_WORDS[code]} behind section {_WORDS[last]}")
        if code <= APPLICATION_PROPERTIES:
            _read(found, code, payload, start, stop)
        _enter(found, code, payload, slice(at, stop), start)
        at, last = stop, code
    if at != end:
        raise PeerError(f"more than {SECTIONS_MAX} sections")
    if not found.body_kind:
        raise PeerError("a message without a body")
    return found


def section_at(payload: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns code and value's place of the section at `at`. Raises PeerError: there is none."""
    if end - at > 2 and payload[at : at + 2] == b"\x00\x53":
        code, start = payload[at + 2], at + 3
    else:
        if payload[at : at + 1] != b"\x00":
            raise PeerError("bytes that are no section")
        descriptor, start = decode(payload, at + 1, end)
        named = _CODES.get(descriptor) if isinstance(descriptor, Symbol) else None
        code = descriptor if isinstance(descriptor, ULong) else named or 0
    if code not in _WORDS:
        raise PeerError("a described value that is no section")
    return code, start


def skip(data: bytes, at: int, end: int) -> int:
    """Returns the place behind a value, by its size alone. Raises PeerError: it is cut off, or no
    value."""
    values, depth = 1, 0
    while values:
        if at >= end:
            raise PeerError("a section is cut off")
        code = data[at]
        at += 1
        values -= 1
        if code == 0:
            depth += 1
            if depth > DEPTH_MAX:
                raise PeerError(f"values are nested deeper than {DEPTH_MAX}")
            values += 2
            continue
        width = _SIZED.get(code >> 4)
        if width is not None:
            at += width + int.from_bytes(data[at : at + width], "big")
        elif code >> 4 in _SIZES:
            at += _SIZES[code >> 4]
        else:
            raise PeerError(f"0x{code:02x} is no constructor of a type")
    if at > end:
        raise PeerError("a section is cut off")
    return at


def section(code: int, value: Value) -> bytes:
    """Returns a section. Raises Misuse: the value has no form."""
    return bytes((0, 0x53, code)) + encode(value)


def header_section(header: Header) -> bytes:
    """Returns the header; what is not set has no place at its end."""
    values: list[Value] = [
        header.durable,
        None if header.priority is None else UByte(header.priority),
        None if header.ttl_ms is None else UInt(header.ttl_ms),
        header.first_acquirer,
        UInt(header.delivery_count),
    ]
    return section(HEADER, values)


def annotations_section(annotations: Annotations) -> bytes:
    """Returns the annotations of a message; without any, nothing."""
    return section(MESSAGE_ANNOTATIONS, annotations) if annotations else b""


def annotations_in(payload: bytes) -> tuple[Annotations, int]:
    """Returns the annotations that a stored message begins with, and where its bare message does.
    Raises PeerError."""
    if payload:
        code, start = section_at(payload, 0, len(payload))
        if code == MESSAGE_ANNOTATIONS:
            value, stop = decode(payload, start, len(payload))
            return _annotations(value), stop
    return {}, 0


def annotations_of(data: bytes) -> Annotations:
    """Returns the annotations that an encoded map has. Raises PeerError."""
    value, at = decode(data, 0, len(data))
    if at != len(data):
        raise PeerError("bytes behind annotations")
    return _annotations(value)


def body_of(payload: bytes) -> tuple[int, int]:
    """Returns kind and place of the body of a stored message. Raises PeerError."""
    at, end = 0, len(payload)
    while True:
        code, start = section_at(payload, at, end)
        if code >= DATA:
            return code, at
        at = skip(payload, start, end)


def joined_data(payload: bytes, at: int) -> bytes:
    """Returns the bytes of the data sections of a body. Raises PeerError."""
    parts = []
    while at < len(payload):
        code, start = section_at(payload, at, len(payload))
        if code == FOOTER:
            break
        part, at = decode(payload, start, len(payload))
        if not isinstance(part, bytes):
            raise PeerError("a data section without binary")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _enter(found: Sections, code: int, payload: bytes, place: slice, start: int) -> None:
    """Notes where a section is."""
    if code <= MESSAGE_ANNOTATIONS:
        found.bare_at = place.stop
        if code == MESSAGE_ANNOTATIONS:
            found.annotations_at = place
    elif code == PROPERTIES:
        found.properties_at = place
    elif code == APPLICATION_PROPERTIES:
        found.application_properties_at = place
    elif code == FOOTER:
        found.footer_at = place
    else:
        if code == DATA and payload[start] not in (0xA0, 0xB0):
            raise PeerError("a data section without binary")
        if code == SEQUENCE and payload[start] not in (0x45, 0xC0, 0xD0):
            raise PeerError("an amqp-sequence section without a list")
        found.body_at = slice(found.body_at.start if found.body_kind else place.start, place.stop)
        found.body_kind = code


def _read(found: Sections, code: int, payload: bytes, start: int, stop: int) -> None:
    """Enters the value of a section in front of the body."""
    if stop - start > FRONT_BYTES_MAX:
        raise PeerError(f"section {_WORDS[code]} has more than {FRONT_BYTES_MAX} bytes")
    value, at = decode(payload, start, stop)
    if at != stop:
        raise PeerError("a section is larger than its value")
    match code, value:
        case 0x70, list():
            found.header = _header(value)
        case 0x71, _:
            found.delivery_annotations = _annotations(value)
        case 0x72, _:
            found.annotations = _annotations(value)
        case 0x73, list():
            named = zip(FIELDS, value, strict=False)
            found.properties = {name: each for name, each in named if each is not None}
        case 0x74, dict():
            found.application_properties = _application_properties(value)
        case _:
            raise PeerError(f"section {_WORDS[code]} holds another type")


def _header(values: list[Value]) -> Header:
    for value, kind in zip(values, _HEADER_TYPES, strict=False):
        if value is not None and not isinstance(value, kind):
            raise PeerError("section header holds another type")
    durable, priority, ttl_ms, first_acquirer, count = (*values, *(None,) * 5)[:5]
    return Header(
        durable is True,
        priority if isinstance(priority, UByte) else None,
        ttl_ms if isinstance(ttl_ms, UInt) else None,
        first_acquirer is True,
        count if isinstance(count, UInt) else 0,
    )


def _annotations(value: Value) -> Annotations:
    """Returns annotations. Raises PeerError: a key is reserved, being no symbol that begins with
    `x-`."""
    if not isinstance(value, Mapping):
        raise PeerError("annotations that are no map")
    for key in value:
        if not isinstance(key, Symbol) or not key.startswith("x-"):
            raise PeerError(f"annotation {key!s:.64} is reserved")
    return dict(value)


def _application_properties(value: Mapping[Value, Value]) -> dict[str, Value]:
    for key in value:
        if type(key) is not str:
            raise PeerError("an application property whose name is no text")
    return {str(key): each for key, each in value.items()}
