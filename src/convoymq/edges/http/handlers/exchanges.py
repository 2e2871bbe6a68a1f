"""Exchanges."""

from __future__ import annotations

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
    routes = await call.broker.cluster.routes()
    rows = resources.exchanges(call.broker, visible)
    for row in rows:
        known = routes.get((str(row["vhost"]), str(row["name"])), [])
        row |= resources.exchange_stats(known, call.rates, call.ranges)
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
    return row | await _traffic(call, vhost, found.name)


async def _traffic(call: Call, vhost: str, exchange: str) -> JsonObject:
    """Returns what was published to an exchange, by which channels, and where it went."""
    cluster, rates = call.broker.cluster, call.rates

    def published(channel: JsonObject) -> dict[str, int]:
        return {"publish": count_in(part(channel, "published_to"), exchange)}

    incoming = [
        resources.detailed(
            {"channel_details": resources.channel_details(channel.row)},
            channel.row,
            published,
            rates,
            channel.series,
        )
        for channel in await cluster.channels()
        if channel.row.get("vhost") == vhost and exchange in part(channel.row, "published_to")
    ]
    out = part((await cluster.published()).get((vhost, exchange), {}), "out")
    flow = resources.flow(rates, ("exchange", vhost, exchange), out)
    outgoing: list[JsonObject] = [
        {"queue": {"name": queue, "vhost": vhost}, "stats": stats} for queue, stats in flow
    ]
    known = (await cluster.routes()).get((vhost, exchange), [])
    stats = resources.exchange_stats(known, rates, call.ranges)
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
        user=call.user.name,
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
