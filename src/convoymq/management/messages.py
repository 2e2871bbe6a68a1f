"""Messages as JSON: reading, publishing and purging through one-shot queue clients."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from convoymq.broker.facade import Broker
from convoymq.broker.firehose import Copy, Origin
from convoymq.broker.peek import Peeked
from convoymq.kernels.batch import record as record_of
from convoymq.kernels.content import split_record
from convoymq.metadata.machine import User
from convoymq.model.errors import BrokerError, Misuse, PreconditionFailed, Unavailable
from convoymq.model.json import JsonObject
from convoymq.model.refusals import (
    invalid_copy_header,
    message_too_big,
    wrong_user_id,
)
from convoymq.model.tables import Decimal, Field, Table, decode_table, encode_table
from convoymq.queues.interface import Delivery, GetResult, Queue, QueueClient
from convoymq.queues.message_properties import (
    QUEUE_HEADERS,
    RECORD_EXPIRATION,
    RECORD_HEADERS,
    RECORD_PRIORITY,
    asked_property,
    check_expiration,
)

FRAME_BODY_MAX = 131_072 - 8
ANSWER_TIMEOUT_S = 30.0
GET_COUNT_MAX = 10_000
BASIC = 60
END = b"\xce"
IMPERSONATOR = "impersonator"
"""A user with this tag may publish in the name of others."""

_Kind = TypeVar("_Kind", str, int)

ACK_MODES = (
    "ack_requeue_true",
    "ack_requeue_false",
    "reject_requeue_true",
    "reject_requeue_false",
)

# name -> (flag bit, kind), in the order in which they stand in a content header
_PROPERTIES: tuple[tuple[str, int, str], ...] = (
    ("content_type", 15, "s"),
    ("content_encoding", 14, "s"),
    ("headers", 13, "F"),
    ("delivery_mode", 12, "B"),
    ("priority", 11, "B"),
    ("correlation_id", 10, "s"),
    ("reply_to", 9, "s"),
    ("expiration", 8, "s"),
    ("message_id", 7, "s"),
    ("timestamp", 6, "T"),
    ("type", 5, "s"),
    ("user_id", 4, "s"),
    ("app_id", 3, "s"),
    ("cluster_id", 2, "s"),
)


class _Hashed(NamedTuple):
    """Properties of a message that an exchange may hash."""

    correlation_id: str | None
    message_id: str | None
    timestamp: int | None


def build_record(
    exchange: str, routing_key: str, properties: Mapping[str, object], body: bytes
) -> bytes:
    """Returns a message record (docs/formats/entries-and-frames.md).

    Raises:
        PreconditionFailed: a property has no acceptable value.
    """
    flags = 0
    encoded = bytearray()
    for name, bit, kind in _PROPERTIES:
        value = properties.get(name)
        if value is None:
            continue
        flags |= 1 << bit
        if kind == "s":
            encoded += _short(_of_type(name, value, str))
        elif kind == "F":
            encoded += encode_table(_headers(value))
        else:
            most = 0xFF if kind == "B" else (1 << 64) - 1
            if not 0 <= _of_type(name, value, int) <= most:
                raise PreconditionFailed(f"property {name} is not a number from 0 to {most}")
            encoded += struct.pack(">B" if kind == "B" else ">Q", value)
    payload = struct.pack(">HHQH", BASIC, 0, len(body), flags) + encoded
    parts = [_short(exchange), _short(routing_key), _frame(2, payload)]
    for at in range(0, len(body), FRAME_BODY_MAX):
        parts.append(_frame(3, body[at : at + FRAME_BODY_MAX]))
    return b"".join(parts)


def _of_type(name: str, value: object, wanted: type[_Kind]) -> _Kind:
    if type(value) is not wanted:
        word = "a string" if wanted is str else "a number"
        raise PreconditionFailed(f"property {name} is not {word}")
    return value


def _text(properties: Mapping[str, object], name: str) -> str | None:
    value = properties.get(name)
    return None if value is None else _of_type(name, value, str)


def _headers(value: object) -> Table:
    if isinstance(value, Table):
        return value
    if isinstance(value, Mapping):
        return table_from_json(value)
    if value == []:
        return Table.of({})
    raise PreconditionFailed("property headers is not an object")


def read_record(data: bytes) -> tuple[str, str, JsonObject, bytes]:
    """Returns (exchange, routing key, properties, body). Raises BrokerError when malformed."""
    exchange, at = _read_short(data, 0)
    routing_key, at = _read_short(data, at)
    payload, at = _read_frame(data, at)
    flags = int.from_bytes(payload[12:14], "big")
    properties: JsonObject = {}
    place = 14
    for name, bit, kind in _PROPERTIES:
        if not flags >> bit & 1:
            continue
        if kind == "s":
            properties[name], place = _read_short(payload, place)
        elif kind == "F":
            table, place = decode_table(payload, place, len(payload))
            properties[name] = table.to_plain()
        elif kind == "B":
            properties[name] = payload[place]
            place += 1
        else:
            properties[name] = int.from_bytes(payload[place : place + 8], "big")
            place += 8
    body = bytearray()
    while at < len(data):
        part, at = _read_frame(data, at)
        body += part
    return exchange, routing_key, properties, bytes(body)


def table_from_json(values: Mapping[str, object]) -> Table:
    """Returns arguments as they come in JSON: numbers `l`, strings `S`, booleans `t`.

    Raises:
        PreconditionFailed: a value has no form in a table, or there are too many.
    """
    try:
        return Table.of(values)
    except Misuse as error:
        raise PreconditionFailed(error.text) from error


def plain(value: object) -> object:
    """Returns a table, or what is in one, as JSON values."""
    match value:
        case Table():
            return value.to_plain()
        case Field():
            return plain(value.value)
        case Decimal():
            return value.value / 10**value.scale
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case _:
            return value


class OneShot:
    """A queue client for a single question; hears the answer as a future."""

    def __init__(self, broker: Broker, queue: Queue) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[object] = self._loop.create_future()
        self.client = queue.client(broker.new_session(), self)

    async def wait(self) -> object:
        """Returns the next answer. Raises the queue's refusal, or Unavailable."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._answer
        except TimeoutError:
            raise Unavailable("the queue did not answer in time") from None
        finally:
            self._answer = self._loop.create_future()

    async def settled(self) -> None:
        """Waits until what was settled or returned is applied. Raises Unavailable."""
        self.client.when_settled(self._tell)
        if not await self.wait():
            raise Unavailable("the queue was lost")

    def _tell(self, result: object, error: Exception | None = None) -> None:
        if self._answer.done():
            return
        if error is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(result)

    def on_published(self, client: QueueClient, tags: Sequence[int], ok: bool) -> None:
        """See `ClientEvents`."""
        self._tell(ok)

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Nothing was subscribed to."""

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """Nothing was subscribed to."""

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """Nothing was subscribed to."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """Nothing was subscribed to."""

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """See `ClientEvents`."""
        self._tell(result, result.error)

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self._tell(count, error)

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """A single message is let through."""


async def purge(broker: Broker, vhost: str, name: str) -> int:
    """Drops the ready messages of a queue and returns how many."""
    shot = OneShot(broker, broker.queue_admin.find_queue(vhost, name))
    try:
        shot.client.purge()
        count = await shot.wait()
        assert isinstance(count, int)
        return count
    finally:
        shot.client.close()


async def get_messages(
    broker: Broker,
    vhost: str,
    name: str,
    *,
    count: int,
    ack_mode: str,
    encoding: str,
    truncate: int | None,
    user: User,
) -> list[JsonObject]:
    """Takes up to `count` messages, and settles or returns them as `ack_mode` says: by the time
    that this returns, unless the queue does not answer for ANSWER_TIMEOUT_S."""
    if ack_mode not in ACK_MODES:
        raise PreconditionFailed(f"ackmode must be one of {', '.join(ACK_MODES)}")
    if encoding not in ("auto", "base64"):
        raise PreconditionFailed("encoding must be auto or base64")
    shot = OneShot(broker, broker.queue_admin.find_queue(vhost, name))
    rows: list[JsonObject] = []
    ids: list[int] = []
    try:
        for _ in range(min(count, GET_COUNT_MAX)):
            shot.client.get(no_ack=False)
            found = await shot.wait()
            assert isinstance(found, GetResult)
            if found.block is None:
                break
            data = record_of(found.block, found.command, found.record)
            ids += (found.get_id, found.get_id)
            rows.append(row_of(data, found.acquired_count, found.ready, encoding, truncate))
            if vhost in broker.firehose.vhosts:
                again = found.acquired_count > 0
                made = broker.firehose.delivered(
                    vhost, name, data, _origin(user), redelivered=again
                )
                await _send_copy(broker, made)
        if ids:
            if ack_mode == "ack_requeue_false":
                shot.client.settle(0, ids)
            elif ack_mode == "reject_requeue_false":
                shot.client.discard(0, ids)
            else:
                shot.client.return_(0, ids, failed=ack_mode.startswith("reject"))
            # What was taken is shown in any case: nobody else may get it any more.
            with contextlib.suppress(Unavailable):
                await shot.settled()
    finally:
        shot.client.close()
    return rows


async def publish(
    broker: Broker,
    vhost: str,
    exchange: str,
    *,
    routing_key: str,
    properties: Mapping[str, object],
    payload: str,
    payload_encoding: str,
    user: User,
    size_max: int,
) -> bool:
    """Publishes one message and waits until it is safe; False when no queue got it.

    Raises:
        PreconditionFailed: the payload does not fit its encoding, a queue does not serve one of the
            properties, or refused the message.
    """
    if payload_encoding not in ("string", "base64"):
        raise PreconditionFailed("payload_encoding must be string or base64")
    try:
        body = (
            base64.b64decode(payload, validate=True)
            if payload_encoding == "base64"
            else payload.encode()
        )
    except (binascii.Error, ValueError) as error:
        raise PreconditionFailed(f"payload is not base64: {error}") from error
    if len(body) > size_max:
        raise message_too_big(len(body), size_max)
    for name, _, kind in _PROPERTIES:
        if kind == "s":
            _short(_text(properties, name) or "")
    claimed, expiration = _text(properties, "user_id"), _text(properties, "expiration")
    if claimed is not None and claimed != user.name and IMPERSONATOR not in user.tags:
        raise wrong_user_id(claimed, user.name)
    if expiration is not None:
        check_expiration(expiration)
    headers = _headers(properties.get("headers") or {})
    keys = dict.fromkeys((routing_key, *_copies(headers, "CC"), *_copies(headers, "BCC")))
    broker.publishing.check_write(user, vhost, exchange, tuple(keys))
    priority = properties.get("priority")
    asked = asked_property(expiration, priority if isinstance(priority, int) else None, headers)
    hashed = _hashed(properties)
    route = broker.publishing.route(vhost, exchange, tuple(keys), headers, asked, hashed)
    kept = headers.without("BCC")
    properties = dict(properties) | ({"headers": kept} if properties.get("headers") else {})
    data = build_record(exchange, routing_key, properties, body)
    flags = RECORD_EXPIRATION if properties.get("expiration") is not None else 0
    if properties.get("priority") is not None:
        flags |= RECORD_PRIORITY
    if any(name in headers for name in QUEUE_HEADERS):
        flags |= RECORD_HEADERS
    if vhost in broker.firehose.vhosts:
        content, origin = split_record(data)[1], _origin(user)
        made = broker.firehose.published(vhost, exchange, keys, content, route.queues, origin)
        await _send_copy(broker, made)
    refused = any(queue.refuses_publishes for queue in route.queues)
    shots = [OneShot(broker, queue) for queue in route.queues if not queue.refuses_publishes]
    try:
        for shot in shots:
            shot.client.target.publish([data], len(body), 1, flags)
            # A second command closes the first, so that it is on its way.
            shot.client.settle(0, ())
        if not all([await shot.wait() for shot in shots]) or refused:
            raise PreconditionFailed("a queue refused the message")
    finally:
        for shot in shots:
            shot.client.close()
    return bool(shots)


def _origin(user: User) -> Origin:
    return Origin("HTTP API", 0, user.name)


async def _send_copy(broker: Broker, made: Copy | None) -> None:
    """Publishes a copy for the firehose; what becomes of it is nobody's matter."""
    for queue in made.queues if made is not None else ():
        shot = OneShot(broker, queue)
        try:
            assert made is not None
            shot.client.target.publish([made.key + made.content], made.body_size, 1, 0)
            shot.client.settle(0, ())
            with contextlib.suppress(BrokerError):
                await shot.wait()
        finally:
            shot.client.close()


def _hashed(properties: Mapping[str, object]) -> _Hashed:
    timestamp = properties.get("timestamp")
    return _Hashed(
        _text(properties, "correlation_id"),
        _text(properties, "message_id"),
        timestamp if isinstance(timestamp, int) else None,
    )


def _copies(headers: Table, name: str) -> list[str]:
    """Returns the routing keys in the CC or BCC header. Raises PreconditionFailed."""
    field = headers.get(name)
    items = () if field is None else field.value
    if not isinstance(items, tuple):
        assert field is not None
        raise invalid_copy_header(name, field.type_name)
    for item in items:
        if item.code != "S":
            raise invalid_copy_header(name, item.type_name)
    return [str(plain(item)) for item in items]


def row_of(
    data: bytes, acquired_count: int, ready: int, encoding: str, truncate: int | None
) -> JsonObject:
    """Returns a record as JSON."""
    exchange, routing_key, properties, body = read_record(data)
    shown = body if truncate is None else body[:truncate]
    payload, used = base64.b64encode(shown).decode(), "base64"
    if encoding == "auto":
        # What is not text goes out as base64.
        with contextlib.suppress(UnicodeDecodeError):
            payload, used = shown.decode(), "string"
    return {
        "payload": payload,
        "payload_bytes": len(body),
        "payload_encoding": used,
        "redelivered": acquired_count > 0,
        "exchange": exchange,
        "routing_key": routing_key,
        "message_count": ready,
        "properties": properties,
    }


def peeked_row(peeked: Peeked) -> JsonObject:
    """Returns a message that was looked at, as JSON."""
    row = row_of(peeked.record, peeked.acquired_count, 0, "auto", None)
    del row["message_count"]
    return {**row, "delivery_count": peeked.failed_delivery_count}


def _short(text: str) -> bytes:
    data = text.encode()
    if len(data) > 255:
        raise PreconditionFailed("a name or property of more than 255 bytes")
    return bytes([len(data)]) + data


def _read_short(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode("utf-8", "replace"), end


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 0, len(payload)) + payload + END


def _read_frame(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 7 + int.from_bytes(data[at + 3 : at + 7], "big")
    return data[at + 7 : end], end + 1
