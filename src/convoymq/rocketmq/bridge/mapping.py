"""Messages of one broker as messages of the other: two total functions.

What both sides know by a name of their own is translated; what only one side knows is carried in a
place of its own and put back by the other function, so that a message that crosses twice has the
body, key, headers and properties that it had. Only its origin is added.

| ConvoyMQ | RocketMQ |
|---|---|
| order key | property `__SHARDINGKEY` |
| header | property of the same name |
| header `rocketmq-KEYS`, `-TAGS`, `-UNIQ_KEY` | property `KEYS`, `TAGS`, `UNIQ_KEY` |
| header `rocketmq-` and another name | what the broker or its special services know |
| `content_type` and the other properties | property `AMQP_content_type` … |
| header that is no text, or of a name that RocketMQ uses | part of the property `AMQP_HEADERS` |
| time | born time |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

PREFIX = "rocketmq-"
ORIGIN, BORN, REST = f"{PREFIX}origin", f"{PREFIX}born-ms", f"{PREFIX}properties"
SHARDING_KEY = "__SHARDINGKEY"
CARRIED = "AMQP_HEADERS"
TOMBSTONE = "AMQP_TOMBSTONE"
AMQP = "AMQP_"
TRANSLATED = frozenset(("KEYS", "TAGS", "UNIQ_KEY"))
PROPERTIES = (
    *("content_type", "content_encoding", "correlation_id", "reply_to", "expiration"),
    *("message_id", "type", "app_id"),
)
"""Of AMQP, each a short string. `user_id` is the server's own to check, and is not carried."""
RESERVED = frozenset(("x-order-key", "x-key", "x-tombstone"))
"""Headers that ConvoyMQ has another place for."""
HEADER_NAME_BYTES_MAX = 255
SHORT_BYTES_MAX = 255
OWN = frozenset((
    *("KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG"),
    *("PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG"),
    *("CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME", "MSG_REGION", "TRACE_ON", "UNIQ_KEY"),
    *("EXTEND_UNIQ_INFO", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "INNER_NUM"),
    *("INNER_BASE", "DUP_INFO", "CHECK_IMMUNITY_TIME_IN_SECONDS"),
    *("TRANSACTION_PREPARED_QUEUE_OFFSET", "INSTANCE_ID", "TRANSACTION_CHECK_TIMES"),
    *("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "MSG_TYPE", "CLUSTER", "ARRIVE_TIME"),
    *("PUSH_REPLY_TIME", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "ESCAPE_KEY", "CRC32"),
    *("LMQ", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "SHARDINGKEY"),
))  # fmt: skip
"""Names that clients may not give, or that mean something to a broker."""


class _Carried(msgspec.Struct, omit_defaults=True):
    """Contents that no property can have: JSON, with bytes in base64."""

    headers: list[tuple[str, bytes | None]] = msgspec.field(default_factory=list)
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class AmqpMessage:
    """A message of ConvoyMQ."""

    body: bytes | None
    """None: a tombstone."""
    key: bytes | None = None
    """Order key."""
    headers: Mapping[str, bytes | None] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    """Of `PROPERTIES`."""
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class RocketMessage:
    """A message of RocketMQ."""

    body: bytes
    properties: Mapping[str, str] = field(default_factory=dict)
    born_ms: int = 0
    origin: str = ""
    """`broker:topic:queue:offset`, of one that was pulled."""


def to_rocketmq(message: AmqpMessage) -> RocketMessage:
    """Returns a message for RocketMQ."""
    properties: dict[str, str] = {}
    carried = _Carried()
    for name, value in message.headers.items():
        target, text = _property_of(name), _text(value)
        if target is None or text is None:
            carried.headers.append((name, value))
        else:
            properties[target] = text
    for name, given in message.properties.items():
        text = _text(given.encode())
        if text is None:
            carried.properties[name] = given
        else:
            properties[AMQP + name] = text
    if message.key is not None:
        text = _text(message.key)
        if text is None:
            carried.key = message.key
        else:
            properties[SHARDING_KEY] = text
    if message.body is None:
        properties[TOMBSTONE] = "true"
    if carried != _Carried():
        properties[CARRIED] = msgspec.json.encode(carried).decode()
    return RocketMessage(message.body or b"", properties, message.time_ms)


def to_amqp(message: RocketMessage) -> AmqpMessage:
    """Returns a message for ConvoyMQ."""
    properties = dict(message.properties)
    carried = _take_carried(properties)
    headers = dict(carried.headers)
    amqp = dict(carried.properties)
    rest: dict[str, str] = {}
    key = carried.key
    is_tombstone = not message.body and properties.get(TOMBSTONE) == "true"
    if is_tombstone:
        del properties[TOMBSTONE]
    for name, value in properties.items():
        content = value.encode("utf-8", "replace")
        header = _header_of(name)
        if name == SHARDING_KEY:
            key = content
        elif name.removeprefix(AMQP) in PROPERTIES and len(content) <= SHORT_BYTES_MAX and (
            name.startswith(AMQP)
        ):  # fmt: skip
            amqp[name.removeprefix(AMQP)] = value
        elif header is None:
            rest[name] = value
        else:
            headers[header] = content
    if rest:
        headers[REST] = msgspec.json.encode(rest)
    if message.origin:
        headers[ORIGIN] = message.origin.encode()
        headers[BORN] = str(message.born_ms).encode()
    body = None if is_tombstone else message.body
    return AmqpMessage(body, key, headers, amqp, max(0, message.born_ms))


def _property_of(header: str) -> str | None:
    """Returns the property that stands for a header; None: it has to be carried."""
    if header.startswith(PREFIX):
        name = header.removeprefix(PREFIX)
        return name if name in TRANSLATED else None
    is_free = header not in OWN | RESERVED and not header.startswith((AMQP, "__", "TIMER_"))
    return header if is_free and _text(header.encode("utf-8", "replace")) else None


def _header_of(name: str) -> str | None:
    """Returns the header that stands for a property; None: it goes with the rest."""
    header = name if _property_of(name) == name else PREFIX + name
    is_taken = header in RESERVED or header in (ORIGIN, BORN, REST)
    try:
        size = len(header.encode())
    except UnicodeEncodeError:
        return None
    return None if is_taken or size > HEADER_NAME_BYTES_MAX else header


def _text(value: bytes | None) -> str | None:
    """Returns a value as a property can have it: UTF-8, not empty, without separators."""
    if not value or b"\x01" in value or b"\x02" in value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _take_carried(properties: dict[str, str]) -> _Carried:
    """Takes out what only AMQP knows; what is not ours stays."""
    text = properties.get(CARRIED)
    if text is None:
        return _Carried()
    try:
        found = msgspec.json.decode(text, type=_Carried)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return _Carried()
    names = [name for name, _ in found.headers]
    if not RESERVED.isdisjoint(names) or not found.properties.keys() <= set(PROPERTIES) or any(
        not 0 < len(name.encode("utf-8", "replace")) <= HEADER_NAME_BYTES_MAX for name in names
    ) or any(len(value.encode("utf-8", "replace")) > SHORT_BYTES_MAX
             for value in found.properties.values()):  # fmt: skip
        return _Carried()
    del properties[CARRIED]
    return found
