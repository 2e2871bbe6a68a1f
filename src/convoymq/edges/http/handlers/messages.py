"""Messages: publishing one, getting some, purging a queue."""

from __future__ import annotations

from convoymq.edges import one_shot
from convoymq.edges.http import messages
from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.call import DONE, Call, Status
from convoymq.edges.http.fields import exchange_name, number, number_in, object_in, text_in
from convoymq.edges.http.handlers.queues import existing_queue
from convoymq.edges.http.routes import Routes
from convoymq.edges.http.served import LARGE_BODY_BYTES_MAX
from convoymq.model.errors import NotFound
from convoymq.model.json import JsonObject

routes = Routes()


@routes.add("POST", "exchanges/{vhost}/{name}/publish")
async def publish(call: Call) -> JsonObject:
    vhost = call.vhost()
    name = exchange_name(call.path["name"])
    call.may("write", "exchange", name)
    call.broker.alarms.check()
    try:
        return await _publish(call, vhost, name, await call.json(LARGE_BODY_BYTES_MAX))
    except NotFound as error:
        # As RabbitMQ answers: what is missing is not the path.
        raise bad_request(f"404 NOT_FOUND - {error.text}") from None


async def _publish(call: Call, vhost: str, name: str, body: JsonObject) -> JsonObject:
    routing_key = text_in(body, "routing_key")
    routed = await messages.publish(
        call.broker,
        vhost,
        name,
        routing_key=routing_key,
        properties=object_in(body, "properties"),
        user=call.user,
        size_max=call.served.message_bytes_max,
        payload=text_in(body, "payload"),
        payload_encoding=text_in(body, "payload_encoding", "string"),
    )
    return {"routed": routed}


@routes.add("DELETE", "queues/{vhost}/{name}/contents")
async def purge_queue(call: Call) -> Status:
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    await one_shot.purge(call.broker, vhost, name)
    return Status(DONE)


@routes.add("POST", "queues/{vhost}/{name}/actions")
async def act_on_queue(call: Call) -> Status:
    """Begins to bring the mirrors of a queue up to date, or ends that."""
    vhost, name = existing_queue(call)
    call.may("configure", "queue", name)
    action = text_in(await call.json(), "action")
    if action not in ("sync", "cancel_sync"):
        raise bad_request(f"unknown action '{action}'")
    call.broker.queue_admin.find_queue(vhost, name).synchronise(cancels=action == "cancel_sync")
    return Status(DONE)


@routes.add("GET", "queues/quorum/{vhost}/{name}/peek/{position}")
async def peek(call: Call) -> JsonObject:
    """Returns a ready message, which stays where it is; positions count from 1."""
    vhost, name = existing_queue(call)
    call.may("read", "queue", name)
    position = number(call.path["position"])
    if position is None or position < 1:
        raise bad_request("a position is a number from 1 on")
    record = call.broker.tree.queues.get(vhost, name)
    found = await call.broker.peeking.peek(record, position)
    if found is None:
        raise ApiError(404, "not_found", "Target queue does not have a message at that position")
    return messages.peeked_row(found)


@routes.add("POST", "queues/{vhost}/{name}/get")
async def get_messages(call: Call) -> list[JsonObject]:
    vhost, name = call.vhost(), call.path["name"]
    call.may("read", "queue", name)
    body = await call.json()
    count = number_in(body, "count", 1)
    return await messages.get_messages(
        call.broker,
        vhost,
        name,
        count=1 if count is None else count,
        ack_mode=text_in(body, "ackmode", "ack_requeue_true"),
        encoding=text_in(body, "encoding", "auto"),
        truncate=number_in(body, "truncate", None),
        user=call.user,
    )
