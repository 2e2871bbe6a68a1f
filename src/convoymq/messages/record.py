"""Records of messages: their one reader and writer (docs/formats/entries-and-frames.md).

    record     exchange, routing key (short strings), content
    content    header frame, body frames
    header     the content header by which brokers and queues know the message, in every encoding
    body       the message's bytes in its encoding; AMQP 0-9-1's are the body alone

The type octet of the header frame is the encoding (`messages.encodings`), its channel number says
whether a dead-lettering queue wrote the header. Names and properties come as `tables.text_of` makes
them: a record that is written again has the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from convoymq.kernels.content import content_parts, replace_header, set_converter, split_record
from convoymq.messages.amqp091 import (
    BASIC,
    HEADER_BYTES_MAX,
    ContentHeader,
    Properties,
    decode_header,
    encode_header,
    encode_properties,
    split_header,
)
from convoymq.messages.encodings import AMQP_091, encoding_octet, encoding_of
from convoymq.model.errors import BrokerError, Misuse, PeerError
from convoymq.model.tables import (
    EMPTY,
    SHORT_STRING_BYTES_MAX,
    Table,
    bytes_of,
    decode_short_string,
)

FRAME_PAYLOAD_MAX = HEADER_BYTES_MAX
PERSISTENT = 2
DEATH_CHANNEL = 0xFFFF
"""Channel number in the header frame of a record whose deaths the cluster wrote. No connection has
such a channel (`edges.amqp091.handshake.CHANNEL_NUMBER_MAX`)."""

_DEATH_CHANNEL = DEATH_CHANNEL.to_bytes(2, "big")
_BODY_SIZE_AT = 4
_FRAME_HEAD = 7
_FRAME_BODY = 3
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


class Traits(NamedTuple):
    """Attributes that decide about a message's fate in a classic queue."""

    persistent: bool
    priority: int | None
    expiration_ms: int | None
    """None as well when it is no number: publishes are checked, older records may hold anything."""
    body_size: int
    whole: bool = True
    """False: the header is cut off or damaged, and nothing can be said of the message."""


CUT_OFF = Traits(False, None, None, 0, whole=False)


def read_record(record: bytes) -> MessageRecord:
    """Returns a message as AMQP 0-9-1 has it. Raises PeerError: it is damaged, or its encoding is
    not known."""
    return read_stored(record, as_amqp091)


def read_stored(
    record: bytes, view: Callable[[bytes], bytes] = lambda content: content
) -> MessageRecord:
    """Returns a message with its body as it is stored, or as a view of its content has it. Raises
    PeerError: it is damaged."""
    try:
        names, content = split_record(record)
        content = view(content)
        header, body = content_parts(content)
    except ValueError as error:
        raise PeerError(str(error)) from error
    return MessageRecord(*read_names(names), decode_header(header), content, body)


def read_names(names: bytes) -> tuple[str, str]:
    """Returns exchange and routing key. Raises PeerError."""
    exchange, at = decode_short_string(names, 0, len(names))
    return exchange, decode_short_string(names, at, len(names))[0]


def head_of(record: bytes) -> bytes:
    """Returns a record without its body frames. Raises PeerError: its names are cut off."""
    return record[: _header_end(record) + len(_END)]


def header_of(record: bytes) -> bytes:
    """Returns the content header payload of a record, as far as it is there. Raises PeerError: its
    names are cut off."""
    return record[_header_frame(record) + _FRAME_HEAD : _header_end(record)]


def split_of(record: bytes) -> tuple[int, dict[str, bytes]]:
    """Returns the size of the body and the encoded properties of a record, whatever its encoding.
    Raises PeerError: its header is damaged."""
    return split_header(header_of(record))


def traits_of(record: bytes) -> Traits:
    """Returns the traits of a record, whatever its bytes are."""
    try:
        body_size, values = split_of(record)
    except PeerError:
        return CUT_OFF
    mode, priority = values.get("delivery_mode"), values.get("priority")
    digits = values.get("expiration", b"\0")[1:].removeprefix(b"+")
    return Traits(
        mode is not None and mode[0] == PERSISTENT,
        None if priority is None else priority[0],
        int(digits) if digits.isdigit() else None,
        body_size,
    )


def names_of(exchange: str, routing_key: str) -> bytes:
    """Returns the beginning of a record. Raises Misuse: a name is too long."""
    return _short(exchange) + _short(routing_key)


def content_of(properties: Properties, body: bytes, encoding: int = AMQP_091) -> bytes:
    """Returns the content of a message.

    Args:
        properties: those by which brokers and queues know the message.
        body: in the encoding.
    Raises:
        Misuse: a property does not fit, or all of them.
    """
    header = struct.pack(">HHQ", BASIC, 0, len(body)) + encode_properties(properties)
    if len(header) > HEADER_BYTES_MAX:
        raise Misuse(f"properties and headers of {len(header)} bytes, at most {HEADER_BYTES_MAX}")
    return _frame(encoding_octet(encoding), header) + _body_frames(body)


def as_amqp091(content: bytes) -> bytes:
    """Returns a content in encoding 1, with the mark of its deaths. Raises ValueError: it is
    damaged, or in an encoding that this release does not know."""
    try:
        encoding = encoding_of(content)
        if encoding is None:
            return content
        header, stored = content_parts(content)
        made = content_of(*encoding.to_amqp091(decode_header(header).properties, stored))
    except BrokerError as error:
        raise ValueError(error.text) from error
    return telling_deaths(made, tells_deaths(content))


def with_body(content: bytes, body: bytes) -> bytes:
    """Returns the content with another body in its encoding. Raises ValueError: it is damaged."""
    header, _ = content_parts(content)
    size = len(body).to_bytes(8, "big")
    header = header[:_BODY_SIZE_AT] + size + header[_BODY_SIZE_AT + 8 :]
    # Frame type and channel: encoding, and deaths that the cluster wrote, stay known as such.
    head = content[:3] + len(header).to_bytes(4, "big") + header + _END
    return head + _body_frames(body)


def with_properties(content: bytes, header: ContentHeader) -> bytes:
    """Returns the content with other properties. Raises Misuse, ValueError."""
    return replace_header(content, encode_header(header))


def cut_body(record: bytes, limit: int) -> bytes:
    """Returns a record as AMQP 0-9-1 has it, with at most `limit` bytes of its body; its header
    still says how many it has. One that is damaged is cut itself."""
    try:
        names, content = split_record(record)
        content = as_amqp091(content)
        body = content_parts(content)[1]
    except ValueError:
        return record[:limit]
    if len(body) <= limit:
        return names + content
    return head_of(names + content) + _frame(_FRAME_BODY, body[:limit])


def tells_deaths(content: bytes) -> bool:
    """Returns whether the cluster wrote the deaths in the headers of a message."""
    return content[1:3] == _DEATH_CHANNEL


def telling_deaths(content: bytes, told: bool) -> bytes:
    """Returns the content with the mark of `tells_deaths`, or without it."""
    return content[:1] + (_DEATH_CHANNEL if told else b"\0\0") + content[3:]


def _header_frame(record: bytes) -> int:
    """Returns where the header frame begins. Raises PeerError."""
    try:
        at = 1 + record[0]
        return at + 1 + record[at]
    except IndexError:
        raise PeerError("record is damaged") from None


def _header_end(record: bytes) -> int:
    """Returns where the content header of a record ends, which may be behind what there is."""
    at = _header_frame(record) + _FRAME_HEAD
    return at + int.from_bytes(record[at - 4 : at], "big")


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


set_converter(as_amqp091)
