"""Exchanges."""

from __future__ import annotations

from functools import partial

from convoymq.edges.http import resources
from convoymq.edges.http.call import DONE, Call, Status, object_not_found, put_status
from convoymq.edges.http.fields import exchange_name, table_in, text_in, truth
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.routes import Routes
from convoymq.model.errors import NotFound
from convoymq.model.json import JsonObject
from convoymq.routing.types import Exchange

routes = Routes()


async def _all(call: Call, visible: set[str]) -> list[JsonObject]:
    published = await call.broker.cluster.published()
    rows = resources.exchanges(call.broker, visible)
    for row in rows:
        vhost, name = str(row["vhost"]), str(row["name"])
        row |= resources.exchange_stats(vhost, name, published, call.rates, call.ranges)
    return rows


@routes.listing("exchanges")
async def exchanges(call: Call) -> list[JsonObject]:
    return await _all(call, call.visible)


@routes.listing("exchanges/{vhost}")
async def exchanges_in(call: Call) -> list[JsonObject]:
    return await _all(call, {call.vhost()})


def existing_exchange(call: Call) -> Exchange:
    """Returns the path's exchange. Raises 404 or 401."""
    place = call.broker.tree.vhosts.get(call.vhost())
    try:
        return place.topology.exchange(exchange_name(call.path["name"]))
    except NotFound:
        raise object_not_found() from None


@routes.add("GET", "exchanges/{vhost}/{name}")
async def exchange(call: Call) -> JsonObject:
    found, vhost = existing_exchange(call), call.vhost()
    row = resources.exchange_row(call.broker.tree.vhosts.get(vhost), found)
    look = partial(_look, call, vhost, found.name)
    call.watch(("exchange", vhost, found.name), look)
    return row | await look()


async def _look(call: Call, vhost: str, exchange: str) -> JsonObject:
    """Returns what was published to an exchange, by which channels, and where it went."""
    cluster, rates = call.broker.cluster, call.rates
    published = await cluster.published()
    key = f"exchange.{vhost}/{exchange}"
    incoming = []
    for channel in await cluster.list_channels():
        count = part(channel, "published_to").get(exchange)
        if channel.get("vhost") == vhost and isinstance(count, int):
            what: JsonObject = {"channel_details": resources.channel_details(channel)}
            own = f"{key}.{channel.get('node')}.{channel.get('name')}"
            incoming.append(resources.detailed(own, what, {"publish": count}, rates))
    out = part(published.get((vhost, exchange), {}), "out")
    outgoing = [
        resources.detailed(
            f"{key}.{queue}",
            {"queue": {"name": queue, "vhost": vhost}},
            {"publish": count_in(out, queue)},
            rates,
        )
        for queue in out
    ]
    stats = resources.exchange_stats(vhost, exchange, published, rates, call.ranges)
    return {**stats, "incoming": incoming, "outgoing": outgoing}


@routes.add("PUT", "exchanges/{vhost}/{name}")
async def put_exchange(call: Call) -> Status:
    vhost = call.vhost()
    name = exchange_name(call.path["name"])
    call.may("configure", "exchange", name)
    body = await call.json()
    arguments = table_in(body)
    call.broker.declarations.check_link(vhost, "exchange", name, arguments, call.may)
    created = await call.broker.declarations.declare_exchange(
        vhost,
        name,
        text_in(body, "type", "direct"),
        durable=truth(body.get("durable", True)),
        auto_delete=truth(body.get("auto_delete", False)),
        internal=truth(body.get("internal", False)),
        arguments=arguments,
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
