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

from convoymq.messages.amqp091 import ContentHeader, Properties
from convoymq.messages.attributes import GROUP_ID, RECORD_HEADERS, asked_property, flags_of
from convoymq.messages.copies import kept_keys
from convoymq.messages.deaths import Origin, history_of
from convoymq.messages.record import MessageRecord, names_of, read_stored
from convoymq.model.errors import BrokerError
from convoymq.model.tables import EMPTY, Table

QUEUE, EXCHANGE, FIRST, LAST, ORIGIN = "queue", "exchange", "first", "last", "origin"
TARGETS = (QUEUE, EXCHANGE, FIRST, LAST, ORIGIN)
RETRIES = (FIRST, LAST, ORIGIN)


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
    header: ContentHeader
    parts: tuple[bytes, bytes]
    """The record: exchange and routing key, content."""
    flags: int
    """Of ENQUEUE."""
    asked: str | None
    """The property by which it asks for what only some queues do."""

    @property
    def headers(self) -> Table:
        """For exchanges that look at them."""
        return self.header.properties.headers or EMPTY

    @property
    def properties(self) -> Properties:
        """For exchanges that hash one."""
        return self.header.properties


def move_of(record: bytes, spec: MoveSpec) -> Move | None:
    """Returns the move of a record; None: it does not say where it came from, or is broken."""
    try:
        message = read_stored(record)
        target = _target(message, spec)
        if spec.record is not None:
            message = read_stored(spec.record)
        properties = message.properties
        asked = asked_property(properties.expiration, properties.priority)
    except BrokerError:
        return None
    if target is None:
        return None
    exchange, keys, shown = target
    flags = flags_of(properties)
    if GROUP_ID not in message.headers:
        # It has waited.
        flags &= ~RECORD_HEADERS
    return Move(
        exchange=exchange,
        keys=tuple(dict.fromkeys(keys)),
        header=message.header,
        parts=(names_of(*shown), message.content),
        flags=flags,
        asked=asked,
    )


def _target(
    message: MessageRecord, spec: MoveSpec
) -> tuple[str, tuple[str, ...], tuple[str, str]] | None:
    """Returns (exchange, routing keys, exchange and key that the record shows)"""
    if spec.to == QUEUE:
        return "", (spec.queue,), ("", spec.queue)
    if spec.to == EXCHANGE:
        if spec.key is not None:
            return spec.exchange, (spec.key,), (spec.exchange, spec.key)
        own = message.routing_key
        return spec.exchange, (own, *kept_keys(message.headers)), (spec.exchange, own)
    history = history_of(message.content, message.headers)
    if history is None:
        return None
    origin = history.last if spec.to == LAST else history.first
    shown = _shown(origin)
    if spec.to == ORIGIN:
        return origin.exchange, origin.routing_keys or (origin.queue,), shown
    return "", (origin.queue,), shown


def _shown(origin: Origin) -> tuple[str, str]:
    return (origin.exchange, origin.routing_keys[0]) if origin.routing_keys else ("", origin.queue)
