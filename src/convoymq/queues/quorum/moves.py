"""Targets of moved messages, and what they arrive as (ADR 0053). Pure functions.

| `to`       | routed by                                         | arrives with               |
|------------|---------------------------------------------------|----------------------------|
| `queue`    | the queue's name                                  | default exchange, its name |
| `exchange` | the exchange, and the key; None = its own keys    | these                      |
| `first`    | the queue in which the message died first         | what it had come there by  |
| `last`     | the queue in which it died last                   | what it had come there by  |
| `origin`   | exchange and keys by which it came to the first   | these                      |

Properties, headers and body stay, deaths too, unless the spec has a record that takes the
message's place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from convoymq.kernels.content import content_parts, split_record
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table, decode_short_string
from convoymq.queues.classic.records import traits_of
from convoymq.queues.death_history import Origin, history_of, text_of
from convoymq.queues.deaths import Properties
from convoymq.queues.message_properties import (
    GROUP_ID,
    RECORD_EXPIRATION,
    RECORD_HEADERS,
    RECORD_PRIORITY,
    asked_property,
)
from convoymq.routing.copies import COPY

QUEUE, EXCHANGE, FIRST, LAST, ORIGIN = "queue", "exchange", "first", "last", "origin"
TARGETS = (QUEUE, EXCHANGE, FIRST, LAST, ORIGIN)
RETRIES = (FIRST, LAST, ORIGIN)

_PRIORITY = 1 << 11
_EXPIRATION = 1 << 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSpec:
    """Options by which an operation moves its messages."""

    to: str
    queue: str = ""
    exchange: str = ""
    key: str | None = None
    record: bytes | None = None
    """Published instead of the message."""

    def pack(self) -> bytes:
        """As the log has it."""
        return msgspec.msgpack.encode(asdict(self))


def unpack_spec(data: bytes) -> MoveSpec | None:
    """Returns the spec of `pack`; None: it is not known to this release."""
    try:
        spec = MoveSpec(**msgspec.msgpack.decode(data))
    except (TypeError, ValueError, msgspec.DecodeError):
        return None
    return spec if spec.to in TARGETS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A message on its way."""

    exchange: str
    keys: tuple[str, ...]
    """By these it is routed."""
    properties: Properties
    parts: tuple[bytes, bytes]
    """The record: exchange and routing key, content."""
    flags: int
    """Of ENQUEUE."""
    asked: str | None
    """The property by which it asks for what only some queues do."""

    @property
    def headers(self) -> Table:
        """For exchanges that look at them."""
        return self.properties.headers


def move_of(record: bytes, spec: MoveSpec) -> Move | None:
    """Returns the move of a record; None: it does not say where it came from, or is broken."""
    try:
        names, content = split_record(record)
        properties = Properties(content_parts(content)[0])
        target = _target(names, content, properties.headers, spec)
        if spec.record is not None:
            content = split_record(spec.record)[1]
            properties = Properties(content_parts(content)[0])
    except (BrokerError, ValueError, IndexError):
        return None
    if target is None:
        return None
    exchange, keys, shown = target
    flags = RECORD_PRIORITY if properties.flags & _PRIORITY else 0
    if properties.flags & _EXPIRATION:
        flags |= RECORD_EXPIRATION
    if GROUP_ID in properties.headers:
        flags |= RECORD_HEADERS
    priority = traits_of(names + content).priority if flags & RECORD_PRIORITY else None
    return Move(
        exchange=exchange,
        keys=tuple(dict.fromkeys(keys)),
        properties=properties,
        parts=(_short(shown[0]) + _short(shown[1]), content),
        flags=flags,
        asked=asked_property(properties.expiration, priority),
    )


def _target(
    names: bytes, content: bytes, headers: Table, spec: MoveSpec
) -> tuple[str, tuple[str, ...], tuple[str, str]] | None:
    """Returns (exchange, routing keys, exchange and key that the record shows)"""
    if spec.to == QUEUE:
        return "", (spec.queue,), ("", spec.queue)
    if spec.to == EXCHANGE:
        if spec.key is not None:
            return spec.exchange, (spec.key,), (spec.exchange, spec.key)
        _, at = decode_short_string(names, 0, len(names))
        own, _ = decode_short_string(names, at, len(names))
        return spec.exchange, (own, *_copies(headers)), (spec.exchange, own)
    history = history_of(content, headers)
    if history is None:
        return None
    origin = history.last if spec.to == LAST else history.first
    shown = _shown(origin)
    if spec.to == ORIGIN:
        return origin.exchange, origin.routing_keys or (origin.queue,), shown
    return "", (origin.queue,), shown


def _shown(origin: Origin) -> tuple[str, str]:
    return (origin.exchange, origin.routing_keys[0]) if origin.routing_keys else ("", origin.queue)


def _copies(headers: Table) -> list[str]:
    field = headers.get(COPY)
    if field is None or not isinstance(field.value, tuple):
        return []
    return [text_of(item) for item in field.value]


def _short(text: str) -> bytes:
    data = text.encode()[:255]
    return bytes((len(data),)) + data
