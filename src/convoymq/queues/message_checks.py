"""Checks of a message at the boundary: the same for every way by which one comes in, sans IO.

    AMQP publish, tx.commit ─┐
    HTTP publish ────────────┼─▶ check_message ─▶ routing keys, content that is stored, flags
    edited and republished ──┘

The columnar protocol checks columns, in its kernel (`kernels.column_records`), by the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from convoymq.kernels.content import content_parts
from convoymq.messages.amqp091 import Properties, decode_header
from convoymq.messages.attributes import (
    asked_property,
    check_expiration,
    flags_of,
    with_integer_delay,
)
from convoymq.messages.copies import BLIND_COPY, extra_keys, without_blind_copies
from convoymq.messages.record import with_properties
from convoymq.metadata.machine import User
from convoymq.model.errors import PreconditionFailed
from convoymq.model.refusals import REPLY_CONSUMER_MISSING, reply_consumer, wrong_user_id
from convoymq.model.tables import INTEGER_CODES, Table
from convoymq.queues.sessions import PRODUCER_NAME_BYTES_MAX

REPLY_QUEUE = "amq.rabbitmq.reply-to"
REPLY_PREFIX = REPLY_QUEUE + "."
IMPERSONATOR = "impersonator"
"""A user with this tag may publish in the name of others."""
PRODUCER_HEADER = "x-stream-producer"
SEQUENCE_HEADER = "x-stream-sequence"


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """A message after its checks."""

    routing_keys: tuple[str, ...]
    headers: Table | None
    """As it came, without the blind copies."""
    content: bytes
    """As it is stored."""
    producer: tuple[bytes, int] | None
    """Name and sequence, of messages whose publisher wants repeats dropped."""
    asked: str | None
    """The property by which the message asks for what only some queues do."""
    properties: Properties
    flags: int
    """Of ENQUEUE."""


def check_message(
    content: bytes, routing_key: str, *, user: User, reply_token: str | None = None
) -> CheckedMessage:
    """Checks user-id and expiration, collects CC and BCC, takes BCC out, fills the reply-to in,
    finds the named producer, gives a delay the type that queues read.

    Args:
        reply_token: of the consumer of direct replies; None: there is none.
    Raises:
        PreconditionFailed: a property that is not acceptable.
        PeerError, ValueError: the content is broken.
    """
    header = decode_header(content_parts(content)[0])
    properties = header.properties
    _check_user(properties.user_id, user)
    if properties.expiration is not None:
        check_expiration(properties.expiration)
    headers = properties.headers
    keys = [routing_key]
    changed = properties
    if headers is not None:
        keys += extra_keys(headers)
        if BLIND_COPY in headers:
            headers = without_blind_copies(headers)
        headers = with_integer_delay(headers)
        if headers is not properties.headers:
            changed = replace(changed, headers=headers)
    if properties.reply_to == REPLY_QUEUE:
        if reply_token is None:
            raise reply_consumer(REPLY_CONSUMER_MISSING)
        changed = replace(changed, reply_to=REPLY_PREFIX + reply_token)
    if changed is not properties:
        content = with_properties(content, replace(header, properties=changed))
    return CheckedMessage(
        routing_keys=tuple(dict.fromkeys(keys)),
        headers=headers,
        content=content,
        producer=None if headers is None else _producer(headers),
        asked=asked_property(properties.expiration, properties.priority, headers),
        properties=properties,
        flags=flags_of(changed),
    )


def _check_user(user_id: str | None, user: User) -> None:
    """Raises PreconditionFailed unless the user may say that a message is from `user_id`."""
    if user_id is not None and user_id != user.name and IMPERSONATOR not in user.tags:
        raise wrong_user_id(user_id, user.name)


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
