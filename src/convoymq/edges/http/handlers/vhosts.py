"""Virtual hosts."""

from __future__ import annotations

from convoymq.broker.changes import DeleteVhost, PutPermission, set_protected, set_traced
from convoymq.broker.shovels import clear_shovel
from convoymq.edges.http import resources
from convoymq.edges.http.call import (
    DONE,
    Call,
    Status,
    change,
    done,
    object_not_found,
    put_status,
)
from convoymq.edges.http.definition_steps import protection_of, vhost_command
from convoymq.edges.http.fields import truth
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()


@routes.listing("vhosts")
async def vhosts(call: Call) -> list[JsonObject]:
    return await resources.vhosts(call.broker, call.rates, call.visible, call.ranges)


@routes.add("GET", "vhosts/{vhost}")
async def one_vhost(call: Call) -> JsonObject:
    vhost = call.vhost()
    rows = await resources.vhosts(call.broker, call.rates, {vhost}, call.ranges)
    if not rows:
        # It went away meanwhile.
        raise object_not_found()
    return rows[0]


@routes.add("PUT", "vhosts/{vhost}")
async def put_vhost(call: Call) -> Status:
    call.need(call.is_administrator)
    name, body = call.path["vhost"], await call.json()
    exists = name in call.broker.tree.vhosts.names()
    created = False
    # Tracing alone leaves the description and the rest as they are.
    if not exists or body.keys() - {"name", "tracing"}:
        created = await change(call, vhost_command(name, body))
    if created and call.broker.tree.users.find(call.user.name) is not None:
        # As RabbitMQ does: a user of the cluster that makes a virtual host may use it.
        await change(
            call,
            PutPermission(user=call.user.name, vhost=name, configure=".*", write=".*", read=".*"),
        )
    protected = protection_of(body)
    if protected is not None:
        await change(call, set_protected(name, protected=protected))
    if "tracing" in body:
        await _trace(call, name, traced=truth(body["tracing"]))
    return put_status(created)


async def _trace(call: Call, vhost: str, *, traced: bool) -> None:
    if traced != (vhost in call.broker.firehose.vhosts):
        await change(call, set_traced(vhost, traced=traced))


@routes.add("DELETE", "vhosts/{vhost}")
async def delete_vhost(call: Call) -> Status:
    call.need(call.is_administrator)
    vhost = call.vhost()
    traced = vhost in call.broker.firehose.vhosts
    shovels = list(call.broker.tree.shovels.all({vhost}))
    await change(call, DeleteVhost(name=vhost))
    # The next one of this name is not traced, and has no shovels.
    if traced:
        await change(call, set_traced(vhost, traced=False))
    for shovel in shovels:
        await change(call, clear_shovel(shovel))
    return Status(DONE)


@routes.add("POST", "vhosts/{vhost}/deletion/protection")
async def protect_vhost(call: Call) -> Status:
    call.need(call.is_administrator)
    return await done(call, set_protected(call.vhost(), protected=True))


@routes.add("DELETE", "vhosts/{vhost}/deletion/protection")
async def unprotect_vhost(call: Call) -> Status:
    call.need(call.is_administrator)
    return await done(call, set_protected(call.vhost(), protected=False))


@routes.listing("vhosts/{vhost}/permissions")
async def vhost_permissions(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return resources.visible_rows(resources.permissions(call.broker), {call.vhost()})


@routes.listing("vhosts/{vhost}/topic-permissions")
async def vhost_topic_permissions(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return resources.visible_rows(resources.topic_permissions(call.broker), {call.vhost()})
