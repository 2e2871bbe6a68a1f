"""Encoding 2: messages that came by AMQP 1.0, and conversion to and from AMQP 0-9-1.

    body    message-annotations?, bare message: sections as they were published

The content header has the properties and headers by which AMQP 0-9-1 knows the message (`view_of`),
and what queues add to them. Conversions are total: what has no equal on the other side is left out
(docs/formats/amqp10.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote
from uuid import UUID

from msgspec.structs import replace

from convoymq.messages.amqp091 import HEADER_BYTES_MAX, Properties
from convoymq.messages.amqp10.fields import field_of, text_or_none, value_of
from convoymq.messages.amqp10.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    FIELDS,
    PROPERTIES,
    Annotations,
    Sections,
    annotations_section,
    body_of,
    joined_data,
    section,
    split,
)
from convoymq.messages.amqp10.values import Array, Symbol, Timestamp, UInt, ULong, Value
from convoymq.messages.attributes import DELAY, DELIVER_AT
from convoymq.messages.copies import BLIND_COPY, COPY
from convoymq.messages.deaths import X_DEATH, entries_of
from convoymq.messages.encodings import Encoding
from convoymq.model.errors import Misuse, PeerError
from convoymq.model.tables import EMPTY, SHORT_STRING_BYTES_MAX, Field, Table, bytes_of, text_of

ENCODED_TYPE = "amqp-1.0"
"""Type of a message whose body is sections of AMQP 1.0."""
DELIVERY_TIME = "x-opt-delivery-time"
DELIVERY_DELAY = "x-opt-delivery-delay"
COPY_ANNOTATION = "x-cc"
DEATHS = "x-opt-deaths"
RECEIVED_TIME = "x-opt-rabbitmq-received-time"

_HEADERS_BYTES_MAX = HEADER_BYTES_MAX - 16_384
"""Of headers made of application properties and annotations: deaths come later."""
_TRANSIENT, _PERSISTENT = 1, 2
_TTL_MAX = (1 << 32) - 1
_TIMESTAMP_S_MAX = ((1 << 63) - 1) // 1000
_BASIC = "x-basic-"
_BASIC_TYPE, _BASIC_PRIORITY, _BASIC_EXPIRATION = (
    Symbol(_BASIC + name) for name in ("type", "priority", "expiration")
)
_HIDDEN = frozenset(("x-exchange", "x-routing-key", X_DEATH, DEATHS))
"""Annotations that say something only when the broker has written them."""
_RENAMED = {
    COPY_ANNOTATION: COPY,
    DELIVERY_TIME: DELIVER_AT,
    DELIVERY_DELAY: DELAY,
    RECEIVED_TIME: "timestamp_in_ms",
}
_ROUTING_HEADERS = frozenset((COPY, BLIND_COPY))
_URN = "urn:uuid:"
_QUEUES, _EXCHANGES = "/queues/", "/exchanges/"


class Amqp10:
    """See `Encoding`."""

    name = "amqp10"

    def to_amqp091(self, properties: Properties, body: bytes) -> tuple[Properties, bytes]:
        """See `Encoding`. The properties are those of AMQP 0-9-1 already."""
        kind, at = body_of(body)
        if kind == DATA:
            return properties, joined_data(body, at)
        return replace(properties, type=ENCODED_TYPE), body[at:]


ENCODING: Encoding = Amqp10()


def view_of(sections: Sections) -> Properties:
    """Returns the properties and headers by which AMQP 0-9-1 knows a message."""
    header, given, notes = sections.header, sections.properties, sections.annotations
    headers = headers_of(sections)
    expiration = notes.get(_BASIC_EXPIRATION) if header.ttl_ms is None else str(header.ttl_ms)
    priority = notes.get(_BASIC_PRIORITY) if header.priority is None else header.priority
    return Properties(
        content_type=_short(given.get("content-type")),
        content_encoding=_short(given.get("content-encoding")),
        delivery_mode=_PERSISTENT if header.durable else _TRANSIENT,
        priority=priority if isinstance(priority, int) and 0 <= priority <= 0xFF else None,
        correlation_id=_identifier("correlation-id", given, headers),
        reply_to=_short(_queue_of(given.get("reply-to"))),
        expiration=_short(expiration),
        message_id=_identifier("message-id", given, headers),
        timestamp=_seconds(given.get("creation-time")),
        type=_short(notes.get(_BASIC_TYPE)) if sections.body_kind == DATA else ENCODED_TYPE,
        user_id=_user(given.get("user-id")),
        app_id=_short(given.get("group-id")),
        headers=table_of(headers),
    )


def to_amqp10(properties: Properties, body: bytes, *, deaths_told: bool = False) -> bytes:
    """Returns the sections, from the message-annotations on, of a message of AMQP 0-9-1."""
    annotations, bare = sections_of(properties, body, deaths_told=deaths_told)
    return annotations_section(annotations) + bare


def sections_of(
    properties: Properties, body: bytes, *, deaths_told: bool
) -> tuple[Annotations, bytes]:
    """Returns annotations and bare message of a message of AMQP 0-9-1.

    Args:
        deaths_told: the cluster wrote the deaths in the headers.
    """
    headers = properties.headers or EMPTY
    annotations: Annotations = {}
    application: dict[Value, Value] = {}
    for name, field in headers.items():
        if name == COPY and field.code == "A":
            annotations[Symbol(COPY_ANNOTATION)] = value_of(field)
        elif not name.startswith("x-"):
            text = text_or_none(name)
            if text is not None and field.code not in "AF":
                application.setdefault(text, value_of(field))
        elif name.isascii() and not (deaths_told and name == X_DEATH):
            annotations.setdefault(Symbol(name), value_of(field))
    if deaths_told:
        annotations |= deaths_in(headers)
    stored = body if properties.type == ENCODED_TYPE and _is_body(body) else None
    if properties.type is not None and stored is None:
        annotations[_BASIC_TYPE] = _text_or_bytes(properties.type)
    parts = [_properties_section(properties)]
    if application:
        parts.append(section(APPLICATION_PROPERTIES, application))
    parts.append(section(DATA, body) if stored is None else stored)
    return annotations, b"".join(parts)


def deaths_in(headers: Table) -> Annotations:
    """Returns the annotations that tell of the deaths in headers that the cluster wrote."""
    deaths = tuple(_death(entry) for entry in entries_of(headers))
    annotations: Annotations = {Symbol(DEATHS): Array(dict, deaths)} if deaths else {}
    for name, field in headers.items():
        if name.startswith(("x-first-death-", "x-last-death-")):
            annotations[Symbol(name)] = value_of(field)
    return annotations


def _death(entry: Table) -> dict[Value, Value]:
    """Returns an entry of x-death as one of x-opt-deaths. It is not known when the last death of
    several was."""
    found: dict[Value, Value] = {}
    for name, field in entry.items():
        value = value_of(field)
        match name, value:
            case "original-expiration", str() if value.isdigit() and int(value) <= _TTL_MAX:
                found[Symbol("ttl")] = UInt(value)
            case "reason", str():
                found[Symbol("reason")] = Symbol(value)
            case "count", int() if value >= 0:
                found[Symbol("count")] = ULong(value)
            case "time", Timestamp():
                found[Symbol("first-time")] = value
                if found.get(Symbol("count")) == 1:
                    found[Symbol("last-time")] = value
            case "routing-keys", list():
                keys = tuple(key for key in value if isinstance(key, str))
                found[Symbol("routing-keys")] = Array(str, keys)
            case "queue" | "exchange", _:
                found[Symbol(name)] = value
    return found


# To AMQP 0-9-1


def headers_of(sections: Sections) -> dict[str, Field]:
    """Returns the headers: annotations first, for queues act on them."""
    found: dict[str, Field] = {}
    for key, value in sections.annotations.items():
        if key in _HIDDEN or key.startswith(_BASIC):
            continue
        field = field_of(value)
        if key in (DELIVERY_TIME, DELIVERY_DELAY) and isinstance(value, int):
            field = Field("l", int(value))
        if field is not None:
            found[_RENAMED.get(key, str(key))] = field
    if DELIVER_AT in found and Symbol(DELIVERY_TIME) in sections.annotations:
        # Clients send both: they mean the same moment.
        found.pop(DELAY, None)
    for name, value in sections.application_properties.items():
        # A property of this name is no request for copies: the annotation is.
        field = None if name in _ROUTING_HEADERS else field_of(value)
        if field is not None:
            found.setdefault(name, field)
    return found


def table_of(headers: Mapping[str, Field]) -> Table | None:
    """Returns the headers that fit."""
    if not headers:
        return None
    try:
        table = Table.from_fields(headers.items())
        if len(table.encoded) <= _HEADERS_BYTES_MAX:
            return table
    except Misuse:
        pass
    kept: list[tuple[str, Field]] = []
    room = _HEADERS_BYTES_MAX
    for pair in headers.items():
        try:
            size = len(Table.from_fields((pair,)).encoded)
        except Misuse:
            continue
        if size <= room:
            kept.append(pair)
            room -= size
    return Table.from_fields(kept)


def _identifier(name: str, given: Mapping[str, Value], headers: dict[str, Field]) -> str | None:
    """Returns an identifier; one that fits no property becomes a header."""
    value = given.get(name)
    match value:
        case ULong():
            return str(int(value))
        case UUID():
            return value.urn
        case str():
            text = _short(value)
            if text is None:
                headers.setdefault(f"x-{name}", Field("S", value.encode()))
            return text
        case bytes():
            headers.setdefault(f"x-{name}", Field("x", value))
    return None


def _short(value: Value) -> str | None:
    """Returns a short string; None: it is no text, or too long."""
    if isinstance(value, str) and len(value.encode()) <= SHORT_STRING_BYTES_MAX:
        return str(value)
    return None


def _queue_of(address: Value) -> Value:
    """Returns the name of the queue of an address; another address as it is."""
    if isinstance(address, str) and address.startswith(_QUEUES):
        return unquote(address.removeprefix(_QUEUES), errors="surrogateescape")
    return address


def _user(value: Value) -> str | None:
    if isinstance(value, bytes) and len(value) <= SHORT_STRING_BYTES_MAX and b"\0" not in value:
        return text_or_none(text_of(value))
    return None


def _seconds(value: Value) -> int | None:
    return value // 1000 if isinstance(value, Timestamp) and value >= 0 else None


# To AMQP 1.0


def _properties_section(properties: Properties) -> bytes:
    """Returns the properties; without any, nothing."""
    reply_to = properties.reply_to
    given: dict[str, Value] = {
        "message-id": _identifier_value(properties.message_id),
        "user-id": None if properties.user_id is None else bytes_of(properties.user_id),
        "reply-to": None if reply_to is None else _address_of(reply_to),
        "correlation-id": _identifier_value(properties.correlation_id),
        "content-type": _symbol(properties.content_type),
        "content-encoding": _symbol(properties.content_encoding),
        "creation-time": _milliseconds(properties.timestamp),
        "group-id": None if properties.app_id is None else text_or_none(properties.app_id),
    }
    values = [given.get(name) for name in FIELDS]
    while values and values[-1] is None:
        values.pop()
    return section(PROPERTIES, values) if values else b""


def _identifier_value(text: str | None) -> Value:
    if text is None:
        return None
    if text.startswith(_URN):
        try:
            found = UUID(text.removeprefix(_URN))
        except ValueError:
            return text
        return found if found.urn == text else text
    return _text_or_bytes(text)


def _text_or_bytes(text: str) -> Value:
    known = text_or_none(text)
    return bytes_of(text) if known is None else known


def _address_of(reply_to: str) -> str | None:
    """Returns the address of a queue; what is an address already stays as it is."""
    if reply_to.startswith(_EXCHANGES):
        return text_or_none(reply_to)
    return _QUEUES + quote(reply_to, safe="", errors="surrogateescape")


def _symbol(text: str | None) -> Symbol | None:
    return Symbol(text) if text is not None and text.isascii() else None


def _milliseconds(timestamp: int | None) -> Timestamp | None:
    if timestamp is None or timestamp > _TIMESTAMP_S_MAX:
        return None
    return Timestamp(timestamp * 1000)


def _is_body(body: bytes) -> bool:
    """Returns whether bytes are the body and footer of a message."""
    try:
        return bool(split(body).body_at.start == 0)
    except PeerError:
        return False
