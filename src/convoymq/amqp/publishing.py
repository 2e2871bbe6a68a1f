"""Messages that need a closer look before they are routed, sans IO."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from convoymq.amqp._spec import Properties
from convoymq.amqp.codec import ContentHeader, decode_header, encode_header
from convoymq.kernels.content import content_parts, replace_header
from convoymq.model.errors import FrameFault, PreconditionFailed
from convoymq.model.refusals import (
    REPLY_CONSUMER_MISSING,
    invalid_copy_header,
    reply_consumer,
    wrong_user_id,
)
from convoymq.model.tables import INTEGER_CODES, Table
from convoymq.queues.message_properties import asked_property, check_expiration
from convoymq.queues.sessions import PRODUCER_NAME_BYTES_MAX

REPLY_QUEUE = "amq.rabbitmq.reply-to"
REPLY_PREFIX = REPLY_QUEUE + "."
IMPERSONATOR = "impersonator"
PRODUCER_HEADER = "x-stream-producer"
SEQUENCE_HEADER = "x-stream-sequence"


@dataclass(frozen=True, slots=True)
class Inspected:
    """A message after its checks: all its routing keys, and the content that goes on."""

    routing_keys: tuple[str, ...]
    headers: Table | None
    content: bytes
    producer: tuple[bytes, int] | None
    """Name and sequence, of messages whose publisher wants repeats dropped."""
    asked: str | None
    """The property by which the message asks for what only some queues do."""
    properties: Properties


def names_of(key: bytes) -> tuple[str, str]:
    """Exchange and routing key of a record's first bytes.

    Raises:
        FrameFault: they are not UTF-8.
    """
    length = key[0]
    try:
        return key[1 : 1 + length].decode(), key[2 + length :].decode()
    except UnicodeDecodeError as error:
        raise FrameFault("Malformed UTF-8 in shortstr") from error


def inspect(
    content: bytes,
    routing_key: str,
    *,
    user: str,
    tags: tuple[str, ...],
    reply_token: str | None,
) -> Inspected:
    """Checks user-id and expiration, collects CC and BCC, takes BCC out, fills the reply-to in,
    finds the named producer.

    Raises:
        PreconditionFailed: a property that is not acceptable.
        PeerError: the content header is broken.
    """
    header = decode_header(content_parts(content)[0])
    properties = header.properties
    if properties.user_id is not None and properties.user_id != user and IMPERSONATOR not in tags:
        raise wrong_user_id(properties.user_id, user)
    if properties.expiration is not None:
        check_expiration(properties.expiration)
    headers = properties.headers
    keys = [routing_key]
    changed = properties
    if headers is not None:
        for name in ("CC", "BCC"):
            keys += _copies(headers, name)
        if "BCC" in headers:
            headers = headers.without("BCC")
            changed = replace(changed, headers=headers)
    if properties.reply_to == REPLY_QUEUE:
        if reply_token is None:
            raise reply_consumer(REPLY_CONSUMER_MISSING)
        changed = replace(changed, reply_to=REPLY_PREFIX + reply_token)
    if changed is not properties:
        content = replace_header(
            content,
            encode_header(ContentHeader(body_size=header.body_size, properties=changed)),
        )
    producer = None if headers is None else _producer(headers)
    asked = asked_property(properties.expiration, properties.priority, headers)
    routing_keys = tuple(dict.fromkeys(keys))
    return Inspected(routing_keys, headers, content, producer, asked, properties)


def _producer(headers: Table) -> tuple[bytes, int] | None:
    """Returns the name and sequence of the producer; None without both.

    Raises:
        PreconditionFailed: one of them is not acceptable.
    """
    name, sequence = headers.get(PRODUCER_HEADER), headers.get(SEQUENCE_HEADER)
    if name is None or sequence is None:
        return None
    if not isinstance(name.value, bytes) or not 0 < len(name.value) <= PRODUCER_NAME_BYTES_MAX:
        raise PreconditionFailed(
            f"invalid message: header '{PRODUCER_HEADER}' must be a string of 1 to "
            f"{PRODUCER_NAME_BYTES_MAX} bytes"
        )
    number = sequence.value
    if sequence.code not in INTEGER_CODES or not isinstance(number, int) or number < 0:
        raise PreconditionFailed(
            f"invalid message: header '{SEQUENCE_HEADER}' must be an integer from 0"
        )
    return name.value, number


def _copies(headers: Table, name: str) -> list[str]:
    field = headers.get(name)
    if field is None:
        return []
    if not isinstance(field.value, tuple):
        raise invalid_copy_header(name, field.type_name)
    keys: list[str] = []
    for item in field.value:
        if item.code != "S" or not isinstance(item.value, bytes):
            raise invalid_copy_header(name, item.type_name)
        keys.append(item.value.decode("utf-8", "replace"))
    return keys
