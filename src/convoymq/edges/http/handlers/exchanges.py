"""Exchanges."""

from __future__ import annotations

from convoymq.edges.http import resources
from convoymq.edges.http.call import DONE, Call, Status, object_not_found, put_status
from convoymq.edges.http.fields import exchange_name, table_in, text_in, truth
from convoymq.edges.http.routes import Routes
from convoymq.model.errors import NotFound
from convoymq.model.json import JsonObject
from convoymq.routing.types import Exchange

routes = Routes()


@routes.listing("exchanges")
async def exchanges(call: Call) -> list[JsonObject]:
    return resources.exchanges(call.broker, call.visible)


@routes.listing("exchanges/{vhost}")
async def exchanges_in(call: Call) -> list[JsonObject]:
    return resources.exchanges(call.broker, {call.vhost()})


def existing_exchange(call: Call) -> Exchange:
    """Returns the path's exchange. Raises 404 or 401."""
    place = call.broker.tree.vhosts.get(call.vhost())
    try:
        return place.topology.exchange(exchange_name(call.path["name"]))
    except NotFound:
        raise object_not_found() from None


@routes.add("GET", "exchanges/{vhost}/{name}")
async def exchange(call: Call) -> JsonObject:
    found = existing_exchange(call)
    row = resources.exchange_row(call.broker.tree.vhosts.get(call.vhost()), found)
    # Of whom and to whom is not counted: `rates_mode` is basic.
    return row | {"incoming": [], "outgoing": []}


@routes.add("PUT", "exchanges/{vhost}/{name}")
async def put_exchange(call: Call) -> Status:
    vhost = call.vhost()
    name = exchange_name(call.path["name"])
    call.may("configure", "exchange", name)
    body = await call.json()
    created = await call.broker.declarations.declare_exchange(
        vhost,
        name,
        text_in(body, "type", "direct"),
        durable=truth(body.get("durable", True)),
        auto_delete=truth(body.get("auto_delete", False)),
        internal=truth(body.get("internal", False)),
        arguments=table_in(body),
    )
    return put_status(created)


@routes.add("DELETE", "exchanges/{vhost}/{name}")
async def delete_exchange(call: Call) -> Status:
    existing_exchange(call)
    name = exchange_name(call.path["name"])
    call.may("configure", "exchange", name)
    await call.broker.declarations.delete_exchange(
        call.vhost(), name, if_unused=call.flag("if-unused")
    )
    return Status(DONE)


@routes.listing("exchanges/{vhost}/{name}/bindings/source")
async def bindings_from(call: Call) -> list[JsonObject]:
    existing_exchange(call)
    name = exchange_name(call.path["name"])
    rows = resources.bindings(call.broker, {call.vhost()})
    return [row for row in rows if row["source"] == name]


@routes.listing("exchanges/{vhost}/{name}/bindings/destination")
async def bindings_to(call: Call) -> list[JsonObject]:
    existing_exchange(call)
    return resources.bindings_at(
        call.broker, call.vhost(), "exchange", exchange_name(call.path["name"])
    )
