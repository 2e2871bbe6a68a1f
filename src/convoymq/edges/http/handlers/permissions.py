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
    Call,
    Status,
    change,
    done,
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
    return call.chosen(await permissions(call), "vhost", "user")[0]


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
    return await done(call, DeletePermission(user=call.path["user"], vhost=call.path["vhost"]))


@routes.listing("topic-permissions")
async def topic_permissions(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return resources.topic_permissions(call.broker)


@routes.listing("topic-permissions/{vhost}/{user}")
async def topic_permission(call: Call) -> list[JsonObject]:
    return call.chosen(await topic_permissions(call), "vhost", "user")


@routes.listing("topic-permissions/{vhost}/{user}/{exchange}")
async def topic_permission_of_exchange(call: Call) -> list[JsonObject]:
    return call.chosen(await topic_permissions(call), "vhost", "user", "exchange")


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
    return await done(call, DeleteTopicPermission(user=call.path["user"], vhost=call.path["vhost"]))


@routes.add("DELETE", "topic-permissions/{vhost}/{user}/{exchange}")
async def delete_topic_permission_of_exchange(call: Call) -> Status:
    await topic_permission_of_exchange(call)
    command = DeleteTopicPermission(
        user=call.path["user"], vhost=call.path["vhost"], exchange=call.path["exchange"]
    )
    return await done(call, command)
