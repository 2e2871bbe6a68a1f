"""Connections, channels and consumers."""

from __future__ import annotations

from functools import partial

from convoymq.edges.http import resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import number_in, text_of_header
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

REASON_CHARS_MAX = 100
"""Of the reason why a connection is closed."""

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
    look = partial(_all_connections, call)
    call.watch("connections", look)
    return _owned_by_caller(call, await look())


async def _all_connections(call: Call) -> list[JsonObject]:
    rows = await call.broker.cluster.list_connections()
    return [resources.connection_row(row, call.rates, call.ranges) for row in rows]


@routes.listing("vhosts/{vhost}/connections")
async def connections_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return resources.visible_rows(await connections(call), {vhost})


@routes.listing("connections/username/{user}")
async def connections_by(call: Call) -> list[JsonObject]:
    return [row for row in await connections(call) if row.get("user") == call.path["user"]]


@routes.add("GET", "connections/{name}")
async def connection(call: Call) -> JsonObject:
    return call.chosen(await connections(call), "name")[0]


@routes.add("DELETE", "connections/username/{user}")
async def close_connections_of(call: Call) -> Status:
    call.need(call.is_administrator or call.path["user"] == call.user.name)
    for row in await connections_by(call):
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


@routes.listing("channels")
async def channels(call: Call) -> list[JsonObject]:
    look = partial(_all_channels, call)
    call.watch("channels", look)
    return _owned_by_caller(call, await look())


async def _all_channels(call: Call) -> list[JsonObject]:
    rows = await call.broker.cluster.list_channels()
    return [resources.channel_row(row, call.rates, call.ranges) for row in rows]


@routes.listing("vhosts/{vhost}/channels")
async def channels_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return resources.visible_rows(await channels(call), {vhost})


@routes.add("GET", "channels/{name}")
async def channel(call: Call) -> JsonObject:
    name = call.path["name"]
    look = partial(_look, call, name)
    call.watch(("channel", name), look)
    row = await look()
    if row is None or not _owned_by_caller(call, [row]):
        raise object_not_found()
    return row


async def _look(call: Call, name: str) -> JsonObject | None:
    """Returns a channel with what it published to each exchange, and got from each queue."""
    rates = call.rates
    for row in await call.broker.cluster.list_channels():
        if row.get("name") != name:
            continue
        vhost = row.get("vhost")
        published, delivered = part(row, "published_to"), part(row, "delivered_from")
        key = f"channel.{row.get('node')}.{name}"
        publishes = [
            resources.detailed(
                f"{key}.to.{exchange}",
                {"exchange": {"name": exchange, "vhost": vhost}},
                {"publish": count_in(published, exchange)},
                rates,
            )
            for exchange in published
        ]
        deliveries = [
            resources.detailed(
                f"{key}.from.{queue}",
                {"queue": {"name": queue, "vhost": vhost}},
                resources.delivered_stats(part(delivered, queue)),
                rates,
            )
            for queue in delivered
        ]
        found = resources.channel_row(row, rates, call.ranges)
        return found | {"publishes": publishes, "deliveries": deliveries}
    return None


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
