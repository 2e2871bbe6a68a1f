"""Connections, channels and consumers."""

from __future__ import annotations

from functools import partial

from convoymq.broker.cluster_queries import Known
from convoymq.edges.http import resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import number_in, text_of_header
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

REASON_CHARS_MAX = 100
"""Of the reason why a connection is closed."""

AMQP_10 = "AMQP 1-0"

PREFETCH_MAX = 0xFFFF
"""As basic.qos can say it."""

routes = Routes()


def _owned_by_caller(call: Call, rows: list[JsonObject]) -> list[JsonObject]:
    """Returns the rows of the user's own connections; all for who may see all."""
    if call.is_monitor:
        return rows
    return [row for row in rows if row.get("user") == call.user.name]


@routes.listing("connections")
async def connections(call: Call) -> list[JsonObject]:
    found = await call.broker.cluster.connections()
    rows = [resources.connection_row(known, call.rates, call.ranges) for known in found]
    return _owned_by_caller(call, rows)


@routes.listing("vhosts/{vhost}/connections")
async def connections_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return resources.visible_rows(await connections(call), {vhost})


@routes.listing("connections/username/{user}")
async def connections_by(call: Call) -> list[JsonObject]:
    return [row for row in await connections(call) if row.get("user") == call.path["user"]]


@routes.add("GET", "connections/{name}")
async def connection(call: Call) -> JsonObject:
    """One that was opened a moment ago on another node is in no list yet: nodes are asked."""
    for row in await connections(call):
        if row["name"] == call.path["name"]:
            return row
    return call.chosen(
        _owned_by_caller(call, await call.broker.cluster.list_connections()), "name"
    )[0]


@routes.add("DELETE", "connections/username/{user}")
async def close_connections_of(call: Call) -> Status:
    call.need(call.is_administrator or call.path["user"] == call.user.name)
    for row in await call.broker.cluster.list_connections():
        if row.get("user") == call.path["user"]:
            await call.broker.cluster.close_connection(str(row["name"]), _reason(call))
    return Status(DONE)


@routes.add("DELETE", "connections/{name}")
async def close_connection(call: Call) -> Status:
    row = await connection(call)
    call.need(call.is_administrator or row.get("user") == call.user.name)
    if not await call.broker.cluster.close_connection(call.path["name"], _reason(call)):
        raise object_not_found()
    return Status(DONE)


def _reason(call: Call) -> str:
    given = text_of_header(call.request, "x-reason") or "Closed via management plugin"
    return given[:REASON_CHARS_MAX]


@routes.listing("connections/{name}/channels")
async def channels_of(call: Call) -> list[JsonObject]:
    name = call.path["name"]
    return [
        row for row in await channels(call) if part(row, "connection_details").get("name") == name
    ]


@routes.listing("connections/{name}/sessions")
async def sessions_of(call: Call) -> list[JsonObject]:
    row = await connection(call)
    if row.get("protocol") != AMQP_10:
        raise bad_request("connection does not use AMQP 1.0")
    return await call.broker.cluster.list_sessions(str(row["name"]))


@routes.listing("channels")
async def channels(call: Call) -> list[JsonObject]:
    found = await call.broker.cluster.channels()
    rows = [resources.channel_row(known, call.rates, call.ranges) for known in found]
    return _owned_by_caller(call, rows)


@routes.listing("vhosts/{vhost}/channels")
async def channels_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return resources.visible_rows(await channels(call), {vhost})


@routes.add("GET", "channels/{name}")
async def channel(call: Call) -> JsonObject:
    name = call.path["name"]
    for known in await call.broker.cluster.channels():
        if known.row.get("name") == name and _owned_by_caller(call, [known.row]):
            return _with_partners(call, known)
    raise object_not_found()


def _with_partners(call: Call, known: Known) -> JsonObject:
    """Returns a channel with what it published to each exchange, and got from each queue."""
    row, vhost = known.row, known.row.get("vhost")
    publishes = [
        resources.detailed(
            {"exchange": {"name": exchange, "vhost": vhost}},
            row,
            partial(_published_to, exchange),
            call.rates,
            known.series,
        )
        for exchange in part(row, "published_to")
    ]
    deliveries = [
        resources.detailed(
            {"queue": {"name": queue, "vhost": vhost}},
            row,
            partial(resources.delivered_stats, queue),
            call.rates,
            known.series,
        )
        for queue in part(row, "delivered_from")
    ]
    found = resources.channel_row(known, call.rates, call.ranges)
    return found | {"publishes": publishes, "deliveries": deliveries}


def _published_to(exchange: str, channel: JsonObject) -> dict[str, int]:
    return {"publish": count_in(part(channel, "published_to"), exchange)}


@routes.listing("consumers")
async def consumers(call: Call) -> list[JsonObject]:
    visible = call.visible
    rows = await call.broker.cluster.list_consumers()
    return [row for row in rows if part(row, "queue").get("vhost") in visible]


@routes.add("PUT", "convoy/consumers/{vhost}/{queue}/{tag}/prefetch")
async def prefetch(call: Call) -> JsonObject:
    vhost, queue, tag = call.vhost(), call.path["queue"], call.path["tag"]
    call.may("configure", "queue", queue)
    count = number_in(await call.json(), "prefetch_count", None)
    if count is None or not 0 <= count <= PREFETCH_MAX:
        raise bad_request(f"prefetch_count must be a number from 0 to {PREFETCH_MAX}")
    changed = await call.broker.cluster.set_prefetch(vhost, queue, tag, count)
    if not changed:
        raise object_not_found()
    return {"consumers": changed, "prefetch_count": count}


@routes.listing("consumers/{vhost}")
async def consumers_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return [row for row in await consumers(call) if part(row, "queue")["vhost"] == vhost]
