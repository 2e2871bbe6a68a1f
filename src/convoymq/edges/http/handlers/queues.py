"""Queues."""

from __future__ import annotations

from convoymq.edges.http import resources
from convoymq.edges.http.call import DONE, Call, Status, object_not_found, put_status
from convoymq.edges.http.fields import table_in, truth
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()


@routes.listing("queues")
async def queues(call: Call) -> list[JsonObject]:
    return resources.visible_rows(await resources.queues(call.broker, call.rates), call.visible)


@routes.listing("queues/detailed")
async def queues_detailed(call: Call) -> list[JsonObject]:
    return await queues(call)


@routes.listing("queues/{vhost}")
async def queues_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    rows = await resources.queues(call.broker, call.rates)
    return resources.visible_rows(rows, {vhost})


@routes.add("GET", "queues/{vhost}/{name}")
async def queue(call: Call) -> JsonObject:
    broker = call.broker
    record = broker.tree.queues.find(call.vhost(), call.path["name"])
    if record is None:
        raise object_not_found()
    live = (await broker.cluster.queue_infos()).get(record.group)
    consumers = await broker.cluster.list_consumers()
    row = resources.queue_row(broker, record, live, call.rates)
    if row is None:
        # It went away meanwhile.
        raise object_not_found()
    row["consumer_details"] = [
        consumer
        for consumer in consumers
        if consumer.get("queue") == {"name": record.name, "vhost": record.vhost}
    ]
    return row


@routes.add("PUT", "queues/{vhost}/{name}")
async def put_queue(call: Call) -> Status:
    vhost, name = call.vhost(), call.path["name"]
    call.may("configure", "queue", name)
    body = await call.json()
    arguments = table_in(body)
    target = arguments.get("x-dead-letter-exchange")
    if target is not None and isinstance(target.value, bytes):
        call.may("read", "queue", name)
        call.may("write", "exchange", target.term())
    place = call.broker.tree.vhosts.find(vhost)
    exists = place is not None and name in place.queues
    await call.broker.declarations.declare_queue(
        vhost,
        name,
        durable=truth(body.get("durable", True)),
        exclusive=False,
        auto_delete=truth(body.get("auto_delete", False)),
        arguments=arguments,
    )
    return put_status(not exists)


def existing_queue(call: Call) -> tuple[str, str]:
    """Returns virtual host and name of the path's queue. Raises 404 or 401."""
    vhost, name = call.vhost(), call.path["name"]
    if name not in call.broker.tree.vhosts.get(vhost).queues:
        raise object_not_found()
    return vhost, name


@routes.add("DELETE", "queues/{vhost}/{name}")
async def delete_queue(call: Call) -> Status:
    vhost, name = existing_queue(call)
    call.may("configure", "queue", name)
    await call.broker.queue_admin.delete_queue(
        vhost, name, if_unused=call.flag("if-unused"), if_empty=call.flag("if-empty")
    )
    return Status(DONE)


@routes.listing("queues/{vhost}/{name}/bindings")
async def queue_bindings(call: Call) -> list[JsonObject]:
    return resources.bindings_at(call.broker, call.vhost(), "queue", call.path["name"])
