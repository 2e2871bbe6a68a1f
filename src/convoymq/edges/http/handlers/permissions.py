"""Permissions and topic permissions."""

from __future__ import annotations

from convoymq.broker.changes import (
    DeletePermission,
    DeleteTopicPermission,
    PutPermission,
    PutTopicPermission,
)
from convoymq.edges.http import resources
from convoymq.edges.http.call import (
    DONE,
    Call,
    Status,
    change,
    object_not_found,
    put_status,
)
from convoymq.edges.http.fields import text_in
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()


@routes.listing("permissions")
async def permissions(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return resources.permissions(call.broker)


@routes.add("GET", "permissions/{vhost}/{user}")
async def permission(call: Call) -> JsonObject:
    for row in await permissions(call):
        if row["vhost"] == call.path["vhost"] and row["user"] == call.path["user"]:
            return row
    raise object_not_found()


@routes.add("PUT", "permissions/{vhost}/{user}")
async def put_permission(call: Call) -> Status:
    call.need(call.is_administrator)
    body = await call.json()
    command = PutPermission(
        user=call.path["user"],
        vhost=call.path["vhost"],
        configure=text_in(body, "configure"),
        write=text_in(body, "write"),
        read=text_in(body, "read"),
    )
    return put_status(await change(call, command))


@routes.add("DELETE", "permissions/{vhost}/{user}")
async def delete_permission(call: Call) -> Status:
    await permission(call)
    await change(call, DeletePermission(user=call.path["user"], vhost=call.path["vhost"]))
    return Status(DONE)


@routes.listing("topic-permissions")
async def topic_permissions(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return resources.topic_permissions(call.broker)


@routes.listing("topic-permissions/{vhost}/{user}")
async def topic_permission(call: Call) -> list[JsonObject]:
    rows = [
        row
        for row in await topic_permissions(call)
        if row["vhost"] == call.path["vhost"] and row["user"] == call.path["user"]
    ]
    if not rows:
        raise object_not_found()
    return rows


@routes.listing("topic-permissions/{vhost}/{user}/{exchange}")
async def topic_permission_of_exchange(call: Call) -> list[JsonObject]:
    name = call.path["exchange"]
    rows = [row for row in await topic_permission(call) if row["exchange"] == name]
    if not rows:
        raise object_not_found()
    return rows


@routes.add("PUT", "topic-permissions/{vhost}/{user}")
async def put_topic_permission(call: Call) -> Status:
    call.need(call.is_administrator)
    body = await call.json()
    command = PutTopicPermission(
        user=call.path["user"],
        vhost=call.path["vhost"],
        exchange=text_in(body, "exchange"),
        write=text_in(body, "write"),
        read=text_in(body, "read"),
    )
    return put_status(await change(call, command))


@routes.add("DELETE", "topic-permissions/{vhost}/{user}")
async def delete_topic_permission(call: Call) -> Status:
    await topic_permission(call)
    await change(call, DeleteTopicPermission(user=call.path["user"], vhost=call.path["vhost"]))
    return Status(DONE)


@routes.add("DELETE", "topic-permissions/{vhost}/{user}/{exchange}")
async def delete_topic_permission_of_exchange(call: Call) -> Status:
    await topic_permission_of_exchange(call)
    command = DeleteTopicPermission(
        user=call.path["user"], vhost=call.path["vhost"], exchange=call.path["exchange"]
    )
    await change(call, command)
    return Status(DONE)
