"""Records as channels write them, made by the codec."""

from __future__ import annotations

import struct

from convoymq.edges.amqp091._spec import Properties
from convoymq.edges.amqp091.codec import ContentHeader, encode_header
from convoymq.model.tables import Table


def record_of(
    exchange: str,
    routing_key: str,
    body: bytes,
    headers: Table | None = None,
    content_type: str | None = None,
) -> bytes:
    """Returns a record: exchange, routing key, and content frames."""
    names = [name.encode() for name in (exchange, routing_key)]
    properties = Properties(headers=headers, content_type=content_type)
    payload = encode_header(ContentHeader(body_size=len(body), properties=properties))
    frames = [b"\x02\x00\x01" + struct.pack(">I", len(payload)) + payload + b"\xce"]
    if body:
        frames.append(b"\x03\x00\x01" + struct.pack(">I", len(body)) + body + b"\xce")
    return b"".join((*(bytes((len(name),)) + name for name in names), *frames))
