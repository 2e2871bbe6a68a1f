"""Messages of AMQP 1.0: what is stored of a transfer, and the transfer of a stored message.

Header and delivery-annotations are the business of one transfer: the broker takes the header's
fields over and writes another header. Message-annotations keep what the publisher wrote, but for
those of the broker's own. The bare message stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from convoymq.kernels.amqp10_delivery import plain_transfer
from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp091 import Properties, decode_header
from convoymq.messages.amqp10.encoding import (
    COPY_ANNOTATION,
    DELIVERY_DELAY,
    DELIVERY_TIME,
    deaths_in,
    headers_of,
    sections_of,
    table_of,
    view_of,
)
from convoymq.messages.amqp10.sections import (
    Header,
    Sections,
    annotations_in,
    annotations_of,
    annotations_section,
    header_section,
)
from convoymq.messages.amqp10.sections import split as split
from convoymq.messages.amqp10.values import Long, Symbol
from convoymq.messages.copies import COPY
from convoymq.messages.encodings import AMQP_10, encoding_octet
from convoymq.messages.record import (
    PERSISTENT,
    as_amqp091,
    tells_deaths,
    with_body,
    with_properties,
)
from convoymq.model.tables import EMPTY, shown

EXCHANGE = Symbol("x-exchange")
ROUTING_KEY = Symbol("x-routing-key")
ACQUIRED_COUNT = Symbol("x-acquired-count")
DELIVERY_COUNT = Symbol("x-delivery-count")
STREAM_OFFSET = Symbol("x-stream-offset")

_TTL_MS_MAX = (1 << 32) - 1
_OCTET = encoding_octet(AMQP_10)
_COPY_ANNOTATION = Symbol(COPY_ANNOTATION)
_RESERVED = frozenset((COPY_ANNOTATION, DELIVERY_TIME, DELIVERY_DELAY))
_DEATH_WORDS = ("x-first-death-", "x-last-death-")


class Stored(NamedTuple):
    """A message as a record has it (`record.content_of`, in encoding 2)."""

    properties: Properties
    """By which brokers and queues know it."""
    body: bytes
    sections: Sections
    """Of the transfer."""


def stored_of(payload: bytes) -> Stored:
    """Returns what is stored of a transfer. Raises PeerError: its message cannot be parsed."""
    sections = split(payload)
    notes = payload[sections.annotations_at] if sections.annotations else b""
    return Stored(view_of(sections), notes + payload[sections.bare_at :], sections)


def transfer_of(
    exchange: str,
    routing_key: str,
    content: bytes,
    *,
    acquired_count: int = 0,
    failed_count: int = 0,
    annotations: bytes = b"",
    stream_offset: int = -1,
) -> bytes:
    """Returns the message of a transfer for a stored one, in whatever encoding.

    Args:
        content: of the record.
        acquired_count: deliveries before this one.
        failed_count: those that failed.
        annotations: an encoded map, which counts before those of publisher and broker.
        stream_offset: negative: of no stream.
    Raises:
        PeerError, ValueError: the content is damaged.
    """
    if not annotations:
        names = shown(exchange).encode(), shown(routing_key).encode()
        made = plain_transfer(*names, content, acquired_count, failed_count, stream_offset)
        if made is not None:
            return made
    return composed_transfer(
        exchange, routing_key, content, acquired_count, failed_count, annotations, stream_offset
    )


def composed_transfer(
    exchange: str,
    routing_key: str,
    content: bytes,
    acquired_count: int,
    failed_count: int,
    annotations: bytes,
    stream_offset: int = -1,
) -> bytes:
    """Does the same for any message. Raises as `transfer_of` does."""
    told = tells_deaths(content)
    if content[:1] != bytes((_OCTET,)):
        content = as_amqp091(content)
    header, body = content_parts(content)
    properties = decode_header(header).properties
    if content[0] == _OCTET:
        notes, bare_at = annotations_in(body)
        bare = body[bare_at:]
        headers = properties.headers or EMPTY
        if told:
            notes |= deaths_in(headers)
            if COPY not in headers:
                # A dead-letter routing key took the place of all keys.
                notes.pop(_COPY_ANNOTATION, None)
    else:
        notes, bare = sections_of(properties, body, deaths_told=told)
    notes |= {EXCHANGE: shown(exchange), ROUTING_KEY: shown(routing_key)}
    if acquired_count:
        notes[ACQUIRED_COUNT] = Long(acquired_count)
    if failed_count:
        notes[DELIVERY_COUNT] = Long(failed_count)
    if stream_offset >= 0:
        notes[STREAM_OFFSET] = Long(stream_offset)
    if annotations:
        notes |= annotations_of(annotations)
    first = not (acquired_count or failed_count or told)
    return (
        header_section(header_of(properties, first_acquirer=first, delivery_count=failed_count))
        + annotations_section(notes)
        + bare
    )


def annotated(record: bytes, annotations: bytes) -> bytes:
    """Returns a record with more annotations, which are headers for AMQP 0-9-1; those that do not
    fit are left out, and those by which the broker routes or tells of deaths.

    Args:
        annotations: an encoded map.
    Raises:
        PeerError, ValueError: the record or the map is damaged.
    """
    notes = {
        key: value
        for key, value in annotations_of(annotations).items()
        if key not in _RESERVED and not str(key).startswith(_DEATH_WORDS)
    }
    names, content = split_record(record)
    if content[:1] == bytes((_OCTET,)):
        _, body = content_parts(content)
        own, bare_at = annotations_in(body)
        content = with_body(content, annotations_section(own | notes) + body[bare_at:])
    header = decode_header(content_parts(content)[0])
    fields = dict((header.properties.headers or EMPTY).items())
    fields |= headers_of(Sections(annotations=notes))
    properties = replace(header.properties, headers=table_of(fields))
    return names + with_properties(content, replace(header, properties=properties))


def header_of(properties: Properties, *, first_acquirer: bool, delivery_count: int) -> Header:
    """Returns the header of a message with properties of AMQP 0-9-1."""
    digits = properties.expiration or ""
    ttl_ms = int(digits) if digits.isascii() and digits.isdigit() else None
    return Header(
        properties.delivery_mode == PERSISTENT,
        properties.priority,
        ttl_ms if ttl_ms is None or ttl_ms <= _TTL_MS_MAX else None,
        first_acquirer,
        delivery_count,
    )
