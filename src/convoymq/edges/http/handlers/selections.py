"""Browsing a queue, and operations on chosen messages (docs/browse.md)."""

from __future__ import annotations

import uuid

from convoymq.broker.browse import (
    EXCHANGE,
    FIRST,
    NAME_BYTES_MAX,
    ORIGIN,
    QUEUE,
    RETRIES,
    ROWS_MAX,
    Filter,
    MoveSpec,
    Place,
    Question,
)
from convoymq.broker.records import QueueRecord
from convoymq.edges.http import selections
from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.call import Call
from convoymq.edges.http.fields import exchange_name, text_in
from convoymq.edges.http.handlers.queues import existing_queue
from convoymq.edges.http.routes import Routes
from convoymq.edges.http.served import LARGE_BODY_BYTES_MAX
from convoymq.model.errors import NotFound
from convoymq.model.json import JsonObject

routes = Routes()
GONE = "the message is not in the queue any more"


def _record(call: Call) -> QueueRecord:
    """Returns the path's queue; whoever may read it may look at it, and take messages out."""
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    return call.broker.tree.queues.get(vhost, name)


@routes.add("GET", "convoy/queues/{vhost}/{name}/messages")
async def first_messages(call: Call) -> JsonObject:
    """Returns a page of the ready messages, without a filter."""
    record = _record(call)
    names = ("count", "cursor", "truncate", "encoding")
    given = call.request.query_params
    return await _page(call, record, {name: given[name] for name in names if name in given})


@routes.add("POST", "convoy/queues/{vhost}/{name}/messages/browse")
async def browse(call: Call) -> JsonObject:
    """Returns a page of the ready messages, by a filter."""
    record = _record(call)
    return await _page(call, record, await call.json())


async def _page(call: Call, record: QueueRecord, body: JsonObject) -> JsonObject:
    encoding = text_in(body, "encoding", "auto")
    if encoding not in ("auto", "base64"):
        raise bad_request("encoding must be auto or base64")
    page = await call.broker.browsing.page(record, selections.question_in(body))
    return selections.page_json(page, encoding)


@routes.add("POST", "convoy/queues/{vhost}/{name}/messages/delete")
async def delete(call: Call) -> JsonObject:
    """Deletes messages that are chosen by their names or by a filter."""
    record = _record(call)
    return await _operate(call, record, await call.json(LARGE_BODY_BYTES_MAX), None)


@routes.add("POST", "convoy/queues/{vhost}/{name}/messages/move")
async def move(call: Call) -> JsonObject:
    """Publishes chosen messages to a queue or an exchange, and removes them here."""
    record = _record(call)
    body = await call.json(LARGE_BODY_BYTES_MAX)
    return await _operate(call, record, body, _target_in(call, record, body))


@routes.add("POST", "convoy/queues/{vhost}/{name}/messages/retry")
async def retry(call: Call) -> JsonObject:
    """Publishes chosen dead letters to where they came from, and removes them here."""
    record = _record(call)
    body = await call.json(LARGE_BODY_BYTES_MAX)
    return await _operate(call, record, body, _retry_in(call, record, body))


@routes.add("POST", "convoy/queues/{vhost}/{name}/messages/republish")
async def republish(call: Call) -> JsonObject:
    """Publishes one message with other properties or another payload, and removes it here."""
    record = _record(call)
    body = await call.json(LARGE_BODY_BYTES_MAX)
    id = _operation_in(body)
    place = selections.place_of(body.get("id"))
    named = "queue" in body or "exchange" in body
    spec = (_target_in if named else _retry_in)(call, record, body)
    call.broker.alarms.check()
    known = (await call.broker.browsing.operations(record)).get(id)
    if known is not None:
        return selections.operation_json(id, *known)
    found = await call.broker.browsing.message(record, place)
    if found is None:
        raise ApiError(404, "not_found", GONE)
    edited = MoveSpec(
        to=spec.to,
        queue=spec.queue,
        exchange=spec.exchange,
        key=spec.key,
        record=selections.edited_record(found, body, call.user, call.served.message_bytes_max),
    )
    summary = await call.broker.browsing.claim(record, id, [place], edited.pack())
    return selections.operation_json(id, summary)


@routes.add("GET", "convoy/queues/{vhost}/{name}/operations")
async def operations(call: Call) -> list[JsonObject]:
    """Operations that run, and those that ended lately."""
    found = await call.broker.browsing.operations(_record(call))
    return [selections.operation_json(id, *known) for id, known in found.items()]


@routes.add("GET", "convoy/queues/{vhost}/{name}/operations/{operation}")
async def operation(call: Call) -> JsonObject:
    """Returns one operation."""
    id = call.path["operation"]
    known = (await call.broker.browsing.operations(_record(call))).get(id)
    if known is None:
        raise ApiError(404, "not_found", "the operation is not known")
    return selections.operation_json(id, *known)


@routes.add("DELETE", "convoy/queues/{vhost}/{name}/operations/{operation}")
async def cancel(call: Call) -> JsonObject:
    """Gives back what is not on its way."""
    id = call.path["operation"]
    return selections.operation_json(id, await call.broker.browsing.cancel(_record(call), id))


def _operation_in(body: JsonObject) -> str:
    """Returns the name of the operation: asking again by it does nothing twice."""
    id = text_in(body, "operation", uuid.uuid4().hex)
    if not 0 < len(id.encode()) <= NAME_BYTES_MAX:
        raise bad_request(f"operation is a name of at most {NAME_BYTES_MAX} bytes")
    return id


def _target_in(call: Call, record: QueueRecord, body: JsonObject) -> MoveSpec:
    """Returns a queue, or an exchange with a routing key; without one the messages keep theirs."""
    place, vhost = call.broker.tree.vhosts.get(record.vhost), record.vhost
    if ("queue" in body) == ("exchange" in body):
        raise bad_request("messages are moved to either a queue or an exchange")
    if "queue" in body:
        queue = text_in(body, "queue")
        if queue not in place.queues:
            raise bad_request(f"no queue '{queue}' in vhost '{vhost}'")
        _may_write(call, vhost, "", (queue,))
        return MoveSpec(to=QUEUE, queue=queue)
    exchange = exchange_name(text_in(body, "exchange"))
    key = text_in(body, "routing_key") if body.get("routing_key") is not None else None
    try:
        place.topology.exchange_for_publish(exchange)
    except NotFound as error:
        # What is missing is not the path.
        raise bad_request(f"404 NOT_FOUND - {error.text}") from None
    _may_write(call, vhost, exchange, () if key is None else (key,))
    if key is None and exchange and not call.is_operator:
        call.need(not call.broker.access.has_topic_permissions(call.user, vhost))
    return MoveSpec(to=EXCHANGE, exchange=exchange, key=key)


def _retry_in(call: Call, record: QueueRecord, body: JsonObject) -> MoveSpec:
    """Returns where dead letters go back to. Exchanges that messages name are for
    administrators."""
    to = text_in(body, "to", FIRST)
    if to not in RETRIES:
        raise bad_request(f"to must be one of {', '.join(RETRIES)}")
    if to == ORIGIN:
        call.need(call.is_administrator)
    _may_write(call, record.vhost, "", ())
    return MoveSpec(to=to)


def _may_write(call: Call, vhost: str, exchange: str, keys: tuple[str, ...]) -> None:
    if not call.is_operator:
        call.broker.publishing.check_write(call.user, vhost, exchange, keys)


async def _operate(
    call: Call, record: QueueRecord, body: JsonObject, spec: MoveSpec | None
) -> JsonObject:
    """Begins an operation, or says how far the one of this name is."""
    id = _operation_in(body)
    places = selections.places_in(body)
    wanted = selections.filter_in(body) if places is None else None
    if spec is not None:
        call.broker.alarms.check()
    browsing = call.broker.browsing
    first_part = 0
    if wanted is not None:
        known = (await browsing.operations(record)).get(id)
        if known is not None and known[0]["sealed"]:
            return selections.operation_json(id, *known)
        # Begun by a request that was not finished: what it has chosen is not found again.
        first_part = known[0]["parts"] if known is not None else 0
        places = await _found(call, record, wanted)
    packed = None if spec is None else spec.pack()
    summary = await browsing.claim(record, id, places or [], packed, first_part)
    return selections.operation_json(id, summary)


async def _found(call: Call, record: QueueRecord, wanted: Filter) -> list[Place]:
    """Returns the messages that a filter finds, in the order of delivery."""
    places: dict[Place, None] = {}
    cursor = None
    while True:
        question = Question(filter=wanted, cursor=cursor, rows=ROWS_MAX)
        page = await call.broker.browsing.page(record, question)
        places.update((row[:3], None) for row in page.rows)
        if len(places) > selections.SELECTED_MAX:
            raise bad_request(
                f"the filter finds more than {selections.SELECTED_MAX} messages: choose fewer, by"
                " position or time"
            )
        cursor = page.cursor
        if cursor is None:
            return list(places)
