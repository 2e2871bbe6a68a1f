"""Messages that wait for a time."""

from __future__ import annotations

from convoymq.edges.http import messages
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import number
from convoymq.edges.http.handlers.queues import existing_queue
from convoymq.edges.http.routes import Routes
from convoymq.messages.record import read_stored
from convoymq.model.errors import PeerError
from convoymq.model.json import JsonObject
from convoymq.model.tables import shown
from convoymq.queues.interface import ScheduledMessage, ScheduledPlace

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
CANCEL_MAX = 1_000

routes = Routes()


@routes.add("GET", "convoy/queues/{vhost}/{name}/scheduled")
async def scheduled(call: Call) -> JsonObject:
    """Lists the delayed messages of a queue, in the order in which they are due; `after` is the id
    of the last one of the page before."""
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    query = call.request.query_params
    limit = number(query.get("limit", str(LIMIT_DEFAULT)))
    if limit is None or not 1 <= limit <= LIMIT_MAX:
        raise bad_request(f"limit must be a number from 1 to {LIMIT_MAX}")
    after = _place(query["after"]) if "after" in query else None
    record = call.broker.tree.queues.get(vhost, name)
    queue = call.broker.queue_admin.find_queue(vhost, name)
    found = await call.broker.scheduled.messages(queue, record, after, limit)
    rows = [_row(each) for each in found]
    return {"messages": rows, "next": _id(found[-1].place) if len(found) == limit else None}


@routes.add("DELETE", "convoy/queues/{vhost}/{name}/scheduled/{id}")
async def cancel_one(call: Call) -> Status:
    """Drops a message that waits."""
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    queue = call.broker.queue_admin.find_queue(vhost, name)
    if not await queue.cancel_scheduled([_place(call.path["id"])]):
        raise object_not_found()
    return Status(DONE)


@routes.add("POST", "convoy/queues/{vhost}/{name}/scheduled/cancel")
async def cancel(call: Call) -> JsonObject:
    """Drops messages that wait, by one command of the queue's log."""
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    ids = (await call.json()).get("ids")
    if not isinstance(ids, list) or not 1 <= len(ids) <= CANCEL_MAX:
        raise bad_request(f"ids must be a list of 1 to {CANCEL_MAX} ids")
    queue = call.broker.queue_admin.find_queue(vhost, name)
    return {"cancelled": await queue.cancel_scheduled([_place(each) for each in ids])}


def _row(message: ScheduledMessage) -> JsonObject:
    try:
        head = read_stored(message.head)
        named: JsonObject = {
            "exchange": shown(head.exchange),
            "routing_key": shown(head.routing_key),
            "properties": messages.properties_json(head.properties),
        }
    except PeerError:
        named = {"unreadable": True}
    return {
        "id": _id(message.place),
        "deliver_at": message.place.due_ms,
        "reason": "retry" if message.acquired_count else "scheduled",
        **named,
        "payload_bytes": message.size,
        "acquired_count": message.acquired_count,
        "delivery_count": message.failed_delivery_count,
    }


def _id(place: ScheduledPlace) -> str:
    return "-".join(map(str, place))


def _place(text: object) -> ScheduledPlace:
    """Raises ApiError for what is no id."""
    parts = [number(part) for part in text.split("-")] if isinstance(text, str) else []
    known = [part for part in parts if part is not None]
    if len(known) != 4 or len(parts) != 4:
        raise bad_request(f"{text!r} is not the id of a message that waits")
    return ScheduledPlace(*known)
