"""Messages as JSON: reading, publishing and purging through one-shot queue clients."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping

from convoymq.broker.access import HTTP
from convoymq.broker.facade import Broker
from convoymq.broker.firehose import Copy, Origin
from convoymq.broker.peek import Peeked
from convoymq.broker.records import User
from convoymq.edges.one_shot import OneShot
from convoymq.edges.stream_spans import StreamSpans
from convoymq.kernels.batch import record as record_of
from convoymq.kernels.channel_codec import DISCARD, RETURN, RETURN_FAILED, SETTLE
from convoymq.messages.amqp091 import Properties, PropertyType
from convoymq.messages.record import content_of, names_of, read_record
from convoymq.model.errors import (
    BrokerError,
    Misuse,
    PeerError,
    PreconditionFailed,
    Unavailable,
)
from convoymq.model.json import JsonObject
from convoymq.model.refusals import message_too_big
from convoymq.model.tables import (
    EMPTY,
    SHORT_STRING_BYTES_MAX,
    Table,
    bytes_shown,
    shown,
    text_of,
)
from convoymq.queues.interface import Delivery, GetResult
from convoymq.queues.message_checks import check_message

GET_COUNT_MAX = 10_000

ACK_MODES = {
    "ack_requeue_true": RETURN,
    "ack_requeue_false": SETTLE,
    "reject_requeue_true": RETURN_FAILED,
    "reject_requeue_false": DISCARD,
}
"""Outcome of messages, by the word of a request."""

_JSON_TYPES = {
    PropertyType.SHORTSTR: (str, "a string"),
    PropertyType.OCTET: (int, "a number"),
    PropertyType.TIMESTAMP: (int, "a number"),
}
_NUMBERS_MAX = {PropertyType.OCTET: 0xFF, PropertyType.TIMESTAMP: (1 << 64) - 1}


def properties_in(given: Mapping[str, object]) -> Properties:
    """Returns the properties that stand in JSON. Raises PreconditionFailed."""
    values: dict[str, object] = {}
    for name, kind in Properties.FIELDS:
        value = given.get(name)
        if value is not None:
            values[name] = _property_in(name, kind, value)
    return Properties(**values)  # type: ignore[arg-type]


def _property_in(name: str, kind: PropertyType, value: object) -> object:
    if kind is PropertyType.TABLE:
        if value == []:
            return EMPTY
        if isinstance(value, Mapping):
            return table_from_json(value, text_names=False)
        raise PreconditionFailed(f"property {name} is not an object")
    wanted, word = _JSON_TYPES[kind]
    if type(value) is not wanted:
        raise PreconditionFailed(f"property {name} is not {word}")
    if isinstance(value, str):
        return _short_text_in(value)
    most = _NUMBERS_MAX[kind]
    assert isinstance(value, int)
    if not 0 <= value <= most:
        raise PreconditionFailed(f"property {name} is not a number from 0 to {most}")
    return value


def _short_text_in(text: str) -> str:
    try:
        data = bytes_shown(text)
    except Misuse as error:
        raise PreconditionFailed(error.text) from error
    _check_short(data)
    return text_of(data)


def _check_short(data: bytes) -> None:
    if len(data) > SHORT_STRING_BYTES_MAX:
        raise PreconditionFailed("a name or property of more than 255 bytes")


def payload_in(payload: str, encoding: str) -> bytes:
    """Returns the bytes of a payload in JSON. Raises PreconditionFailed."""
    if encoding not in ("string", "base64"):
        raise PreconditionFailed("payload_encoding must be string or base64")
    try:
        return (
            base64.b64decode(payload, validate=True) if encoding == "base64" else payload.encode()
        )
    except (binascii.Error, ValueError) as error:
        raise PreconditionFailed(f"payload is not {encoding}: {error}") from error


def content_in(properties: Mapping[str, object], body: bytes) -> bytes:
    """Returns the content of a message that stands in JSON. Raises PreconditionFailed."""
    try:
        return content_of(properties_in(properties), body)
    except Misuse as error:
        raise PreconditionFailed(error.text) from error


def properties_json(properties: Properties) -> JsonObject:
    """Returns properties as JSON; what is no UTF-8 as `tables.shown` has it."""
    made: JsonObject = {}
    for name, _ in Properties.FIELDS:
        match getattr(properties, name):
            case None:
                continue
            case Table() as table:
                made[name] = table.to_plain()
            case str() as text:
                made[name] = shown(text)
            case number:
                made[name] = number
    return made


def table_from_json(values: Mapping[str, object], *, text_names: bool = True) -> Table:
    """Returns arguments as they come in JSON: numbers `l` and `d`, strings `S`, booleans `t`.

    Args:
        text_names: all names have to be text, as those of arguments.
    Raises:
        PreconditionFailed: a value has no form in a table, or there are too many.
    """
    try:
        names = {text_of(bytes_shown(name)): _unshown(item) for name, item in values.items()}
        table = Table.of(names)
    except Misuse as error:
        raise PreconditionFailed(error.text) from error
    if text_names and not table.has_text_keys():
        raise PreconditionFailed("the name of an argument is not text")
    return table


def _unshown(value: object) -> object:
    """Returns a JSON value, nested as bodies may be, with the names that it has in a table."""
    if isinstance(value, Mapping):
        return {text_of(bytes_shown(name)): _unshown(item) for name, item in value.items()}
    return [_unshown(item) for item in value] if isinstance(value, list) else value


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
    counters = broker.counters.of(HTTP)
    rows: list[JsonObject] = []
    ids: list[int] = []
    settled = False
    spans = StreamSpans.of(broker.spans, vhost, "http")
    try:
        for _ in range(min(count, GET_COUNT_MAX)):
            shot.client.get(no_ack=False)
            found = await shot.wait()
            assert isinstance(found, GetResult)
            if found.block is None:
                counters.get_empty += 1
                break
            counters.get += 1
            counters.redelivered += found.acquired_count > 0
            data = record_of(found.block, found.command, found.record)
            ids += (found.get_id, found.get_id)
            rows.append(row_of(data, found.acquired_count, found.ready, encoding, truncate))
            if spans is not None:
                spans.delivered(shot.client, _delivery(found), settles=True)
            if vhost in broker.firehose.vhosts:
                again = found.acquired_count > 0
                made = broker.firehose.delivered(
                    vhost, name, data, _origin(user), redelivered=again
                )
                await _send_copy(broker, made)
        if ids:
            settled = True
            if spans is not None:
                spans.settled(shot.client, 0, ids, ACK_MODES[ack_mode])
            outcome = ACK_MODES[ack_mode]
            if outcome == SETTLE:
                counters.acknowledged += len(ids) // 2
                shot.client.settle(0, ids)
            elif outcome == DISCARD:
                shot.client.discard(0, ids)
            else:
                rejected = outcome == RETURN_FAILED
                # Who looks at messages does not try them.
                shot.client.return_(0, ids, failed=rejected, untried=not rejected)
            # What was taken is shown in any case: nobody else may get it any more.
            with contextlib.suppress(Unavailable):
                await shot.settled()
    finally:
        if ids and not settled:
            # Nobody has looked at them: that is no failed delivery.
            shot.client.return_(0, ids, failed=False)
        if spans is not None:
            spans.close()
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
    body = payload_in(payload, payload_encoding)
    if len(body) > size_max:
        raise message_too_big(len(body), size_max)
    _check_short(routing_key.encode())
    message = check_message(content_in(properties, body), routing_key, user=user)
    publishing = broker.publishing
    publishing.check_write(user, vhost, exchange, message.routing_keys)
    route = publishing.route(
        vhost, exchange, message.routing_keys, message.headers, message.asked, message.properties
    )
    parts = (names_of(exchange, routing_key), message.content)
    if vhost in broker.firehose.vhosts:
        made = broker.firehose.published(
            vhost, exchange, message.routing_keys, message.content, route.queues, _origin(user)
        )
        await _send_copy(broker, made)
    counters = broker.counters.of(HTTP)
    counters.published_confirm += 1
    counters.dropped_unroutable += not route.queues
    counters.sizes.add(len(body))
    publishing.count_published(counters, vhost, exchange, route.queues)
    spans = StreamSpans.of(broker.spans, vhost, "http")
    if spans is not None:
        spans.take(*parts, 1)
    refused = any(queue.refuses_publishes for queue in route.queues)
    shots = [OneShot(broker, queue) for queue in route.queues if not queue.refuses_publishes]
    try:
        for shot in shots:
            if message.producer is not None and shot.client.queue.features.drops_repeats:
                shot.client.target.name_next(*message.producer)
            shot.client.target.publish(parts, len(body), 1, message.flags)
            # A second command closes the first, so that it is on its way.
            shot.client.settle(0, ())
        if not all([await shot.wait() for shot in shots]) or refused:
            raise PreconditionFailed("a queue refused the message")
        if spans is not None:
            spans.confirmed(lambda _: False, accepted=True)
    finally:
        if spans is not None:
            spans.close()
        for shot in shots:
            shot.client.close()
    counters.confirmed += 1
    return bool(shots)


def _delivery(found: GetResult) -> Delivery:
    assert found.block is not None
    return Delivery(0, found.get_id, found.block, found.command, found.record, 1, 0, 0)


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


def row_of(
    data: bytes, acquired_count: int, ready: int, encoding: str, truncate: int | None
) -> JsonObject:
    """Returns a record as JSON. One that is damaged is shown as its bytes, and said to be so."""
    try:
        message = read_record(data)
        exchange, routing_key = shown(message.exchange), shown(message.routing_key)
        properties, body = properties_json(message.properties), message.body
    except PeerError:
        exchange, routing_key, properties, body = "", "", {}, data
        damaged: JsonObject = {"unreadable": True}
    else:
        damaged = {}
    part = body if truncate is None else body[:truncate]
    payload, used = base64.b64encode(part).decode(), "base64"
    if encoding == "auto":
        # What is not text goes out as base64.
        with contextlib.suppress(UnicodeDecodeError):
            payload, used = part.decode(), "string"
    return {
        "payload": payload,
        "payload_bytes": len(body),
        "payload_encoding": used,
        "redelivered": acquired_count > 0,
        "exchange": exchange,
        "routing_key": routing_key,
        "message_count": ready,
        "properties": properties,
        **damaged,
    }


def peeked_row(peeked: Peeked) -> JsonObject:
    """Returns a message that was looked at, as JSON."""
    row = row_of(peeked.record, peeked.acquired_count, 0, "auto", None)
    del row["message_count"]
    return {**row, "delivery_count": peeked.failed_delivery_count}
