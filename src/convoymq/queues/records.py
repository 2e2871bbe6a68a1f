"""Records of messages: their one reader and writer (docs/formats/entries-and-frames.md).

    record    exchange, routing key (short strings), content
    content   header frame, body frames

Names and properties come as `tables.text_of` makes them: a record that is written again has the
same bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from convoymq.kernels.content import content_parts, replace_header, split_record
from convoymq.model.content_header import (
    BASIC,
    HEADER_BYTES_MAX,
    ContentHeader,
    Properties,
    decode_header,
    encode_header,
    encode_properties,
)
from convoymq.model.errors import Misuse, PeerError
from convoymq.model.tables import (
    EMPTY,
    SHORT_STRING_BYTES_MAX,
    Table,
    bytes_of,
    decode_short_string,
)

FRAME_PAYLOAD_MAX = HEADER_BYTES_MAX
_BODY_SIZE_AT = 4
_FRAME_HEADER, _FRAME_BODY = 2, 3
_END = b"\xce"


class MessageRecord(NamedTuple):
    """A record and what it says."""

    exchange: str
    routing_key: str
    header: ContentHeader
    content: bytes
    body: bytes
    """As far as it is there: of a record that was cut, less than the header says."""

    @property
    def properties(self) -> Properties:
        """Returns the properties."""
        return self.header.properties

    @property
    def headers(self) -> Table:
        """Returns the headers; empty without the property."""
        return self.properties.headers or EMPTY


def read_record(record: bytes) -> MessageRecord:
    """Returns a message. Raises PeerError: it is damaged."""
    try:
        names, content = split_record(record)
        header, body = content_parts(content)
    except ValueError as error:
        raise PeerError(str(error)) from error
    return MessageRecord(*read_names(names), decode_header(header), content, body)


def read_names(names: bytes) -> tuple[str, str]:
    """Returns exchange and routing key. Raises PeerError."""
    exchange, at = decode_short_string(names, 0, len(names))
    return exchange, decode_short_string(names, at, len(names))[0]


def names_of(exchange: str, routing_key: str) -> bytes:
    """Returns the beginning of a record. Raises Misuse: a name is too long."""
    return _short(exchange) + _short(routing_key)


def content_of(properties: Properties, body: bytes) -> bytes:
    """Returns the content of a message. Raises Misuse: a property does not fit, or all of them."""
    header = struct.pack(">HHQ", BASIC, 0, len(body)) + encode_properties(properties)
    if len(header) > HEADER_BYTES_MAX:
        raise Misuse(f"properties and headers of {len(header)} bytes, at most {HEADER_BYTES_MAX}")
    return _frame(_FRAME_HEADER, header) + _body_frames(body)


def with_body(content: bytes, body: bytes) -> bytes:
    """Returns the content with another body. Raises ValueError: it is damaged."""
    header, _ = content_parts(content)
    size = len(body).to_bytes(8, "big")
    header = header[:_BODY_SIZE_AT] + size + header[_BODY_SIZE_AT + 8 :]
    # Frame type and channel: deaths that the cluster wrote stay known as such.
    head = content[:3] + len(header).to_bytes(4, "big") + header + _END
    return head + _body_frames(body)


def with_properties(content: bytes, header: ContentHeader) -> bytes:
    """Returns the content with other properties. Raises Misuse, ValueError."""
    changed: bytes = replace_header(content, encode_header(header))
    return changed


def _body_frames(body: bytes) -> bytes:
    starts = range(0, len(body), FRAME_PAYLOAD_MAX)
    return b"".join(_frame(_FRAME_BODY, body[at : at + FRAME_PAYLOAD_MAX]) for at in starts)


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 0, len(payload)) + payload + _END


def _short(text: str) -> bytes:
    data = bytes_of(text)
    if len(data) > SHORT_STRING_BYTES_MAX:
        raise Misuse(f"a name of {len(data)} bytes")
    return bytes((len(data),)) + data
