"""AMQP 0-9-1 bytes to values and back, sans IO.

The hot methods (publish, deliver, ack) have a compiled kernel of their own; this codec serves all
methods and frames (`messages.amqp091`: content headers), and is the place where a wrong byte
becomes a `PeerError`:

    FrameFault (501)     a frame or a length is broken, or text of a method is not UTF-8
    SyntaxFault (502)    a table is broken, or bytes are left over
    CommandFault (503)   no such method

Decoding never raises anything else, whatever the input.

    frame            u8 type, u16 channel, u32 size, payload, end octet 206
    method payload   u16 class, u16 method, arguments; consecutive bits share octets, low bit first
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from convoymq.edges.amqp091 import _spec
from convoymq.edges.amqp091._spec import FieldType, Method
from convoymq.messages.amqp091 import ContentHeader as ContentHeader
from convoymq.messages.amqp091 import Properties as Properties
from convoymq.messages.amqp091 import decode_header as decode_header
from convoymq.messages.amqp091 import decode_properties as decode_properties
from convoymq.messages.amqp091 import encode_header as encode_header
from convoymq.messages.amqp091 import encode_properties as encode_properties
from convoymq.model.errors import CommandFault, FrameFault, Misuse, SyntaxFault
from convoymq.model.tables import (
    SHORT_STRING_BYTES_MAX,
    Table,
    decode_short_string,
    decode_table,
    encode_table,
    is_text,
)

FRAME_OVERHEAD_BYTES = 8
HEARTBEAT = bytes((_spec.FRAME_HEARTBEAT, 0, 0, 0, 0, 0, 0, _spec.FRAME_END))

_FRAME_HEAD = struct.Struct(">BHI")
_METHOD_HEAD = struct.Struct(">HH")
_NUMBERS: dict[FieldType, struct.Struct] = {
    FieldType.OCTET: struct.Struct(">B"),
    FieldType.SHORT: struct.Struct(">H"),
    FieldType.LONG: struct.Struct(">I"),
    FieldType.LONGLONG: struct.Struct(">Q"),
}
_LONG_LENGTH = _NUMBERS[FieldType.LONG]
_NOT_TEXT = "Malformed UTF-8 in shortstr"
"""Names are text; what a message carries need not be."""


class Frame(NamedTuple):
    """One frame without its end octet."""

    type: int
    channel: int
    payload: bytes


def frame(frame_type: int, channel: int, payload: bytes) -> bytes:
    """Returns a complete frame."""
    assert 0 <= channel <= 0xFFFF
    head = _FRAME_HEAD.pack(frame_type, channel, len(payload))
    return b"".join((head, payload, bytes((_spec.FRAME_END,))))


def decode_frame(data: bytes, offset: int = 0, *, payload_bytes_max: int) -> Frame | None:
    """Decodes the frame at `offset`; None when it is not complete yet.

    Raises:
        FrameFault: unknown type, too long, or a wrong end octet.
    """
    if len(data) - offset < _FRAME_HEAD.size:
        return None
    frame_type, channel, size = _FRAME_HEAD.unpack_from(data, offset)
    if frame_type not in (_spec.FRAME_METHOD, _spec.FRAME_HEADER, _spec.FRAME_BODY,
                          _spec.FRAME_HEARTBEAT):  # fmt: skip
        raise FrameFault(f"unknown frame type {frame_type}")
    if size > payload_bytes_max:
        raise FrameFault(f"frame of {size} bytes, at most {payload_bytes_max} are allowed")
    start = offset + _FRAME_HEAD.size
    if len(data) < start + size + 1:
        return None
    if data[start + size] != _spec.FRAME_END:
        raise FrameFault(f"frame ends with {data[start + size]} instead of {_spec.FRAME_END}")
    return Frame(frame_type, channel, data[start : start + size])


def method_frame(channel: int, method: Method) -> bytes:
    """Returns the frame that carries `method`."""
    return frame(_spec.FRAME_METHOD, channel, encode_method(method))


def header_frame(channel: int, header: ContentHeader) -> bytes:
    """Returns the frame that carries `header`."""
    return frame(_spec.FRAME_HEADER, channel, encode_header(header))


def content_frames(
    channel: int, method: Method, properties: Properties, body: bytes, *, frame_bytes_max: int
) -> bytes:
    """Returns method, header and body frames of one message, the body cut to fit."""
    assert method.HAS_CONTENT
    step = frame_bytes_max - FRAME_OVERHEAD_BYTES
    assert step > 0
    header = ContentHeader(body_size=len(body), properties=properties)
    parts = [method_frame(channel, method), header_frame(channel, header)]
    parts += [
        frame(_spec.FRAME_BODY, channel, body[start : start + step])
        for start in range(0, len(body), step)
    ]
    return b"".join(parts)


def encode_method(method: Method) -> bytes:
    """Returns the payload of a method frame.

    Raises:
        Misuse: a value does not fit its type.
    """
    out = bytearray(_METHOD_HEAD.pack(method.CLASS_ID, method.METHOD_ID))
    bits = bit_count = 0
    for name, kind in method.ARGUMENTS:
        value = getattr(method, name)
        if kind is FieldType.BIT:
            if bit_count == 8:
                out.append(bits)
                bits = bit_count = 0
            bits |= bool(value) << bit_count
            bit_count += 1
            continue
        if bit_count:
            out.append(bits)
            bits = bit_count = 0
        out += _encode_field(name, kind, value)
    if bit_count:
        out.append(bits)
    return bytes(out)


def decode_method(payload: bytes) -> Method:
    """Decodes the payload of a method frame.

    Raises:
        PeerError: no such method, or broken arguments.
    """
    if len(payload) < _METHOD_HEAD.size:
        raise FrameFault("method frame without a method")
    cls = _spec.METHODS.get(_METHOD_HEAD.unpack_from(payload))
    if cls is None:
        raise CommandFault("unimplemented method")
    end = len(payload)
    offset = _METHOD_HEAD.size
    values: dict[str, object] = {}
    bits = bit_count = 0
    for name, kind in cls.ARGUMENTS:
        if kind is not FieldType.BIT:
            bit_count = 0
            values[name], offset = _decode_field(kind, payload, offset, end)
            continue
        if bit_count % 8 == 0:
            if offset >= end:
                raise FrameFault(f"{cls.NAME} ends before its arguments do")
            bits = payload[offset]
            offset += 1
        values[name] = bool(bits >> (bit_count % 8) & 1)
        bit_count += 1
    if offset != end:
        raise SyntaxFault(f"{end - offset} bytes behind the arguments of {cls.NAME}")
    return cls(**values)


def _encode_field(name: str, kind: FieldType, value: object) -> bytes:
    number = _NUMBERS.get(kind)
    try:
        if number is not None:
            return number.pack(value)
        if isinstance(value, Table):
            return encode_table(value)
        if kind is FieldType.LONGSTR and isinstance(value, bytes):
            return _LONG_LENGTH.pack(len(value)) + value
        if kind is FieldType.SHORTSTR and isinstance(value, str):
            text = value.encode()
            if len(text) <= SHORT_STRING_BYTES_MAX:
                return bytes((len(text),)) + text
    except (struct.error, UnicodeEncodeError) as error:
        raise Misuse(f"{name} does not fit a {kind.value}: {error}") from error
    raise Misuse(f"{name} does not fit a {kind.value}")


def _decode_field(kind: FieldType, data: bytes, offset: int, end: int) -> tuple[object, int]:
    number = _NUMBERS.get(kind)
    if number is not None:
        stop = offset + number.size
        if stop > end:
            raise FrameFault("number beyond the end of its frame")
        return number.unpack_from(data, offset)[0], stop
    if kind is FieldType.SHORTSTR:
        text, stop = decode_short_string(data, offset, end)
        if not is_text(text):
            raise FrameFault(_NOT_TEXT)
        return text, stop
    if kind is FieldType.TABLE:
        table, stop = decode_table(data, offset, end)
        if not table.has_text_keys():
            raise FrameFault(_NOT_TEXT)
        return table, stop
    assert kind is FieldType.LONGSTR
    start = offset + _LONG_LENGTH.size
    if start > end:
        raise FrameFault("long string beyond the end of its frame")
    stop = start + _LONG_LENGTH.unpack_from(data, offset)[0]
    if stop > end:
        raise FrameFault("long string beyond the end of its frame")
    return data[start:stop], stop
