"""Bindings."""

from __future__ import annotations

from urllib.parse import quote

from convoymq.edges.http import resources
from convoymq.edges.http.call import CREATED, DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import exchange_name, table_in, text_in
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject
from convoymq.routing.types import Binding, Destination, DestinationKind

routes = Routes()


@routes.listing("bindings")
async def bindings(call: Call) -> list[JsonObject]:
    return resources.bindings(call.broker, call.visible)


@routes.listing("bindings/{vhost}")
async def bindings_in(call: Call) -> list[JsonObject]:
    return resources.bindings(call.broker, {call.vhost()})


def _ends(call: Call) -> tuple[str, Destination]:
    kinds = {"q": DestinationKind.QUEUE, "e": DestinationKind.EXCHANGE}
    kind = kinds.get(call.path["kind"])
    if kind is None:
        raise object_not_found()
    destination = call.path["destination"]
    if kind is DestinationKind.EXCHANGE:
        destination = exchange_name(destination)
    return exchange_name(call.path["source"]), Destination(kind, destination)


def _between(call: Call) -> list[JsonObject]:
    source, destination = _ends(call)
    return [
        row
        for row in resources.bindings(call.broker, {call.vhost()})
        if row["source"] == source
        and row["destination"] == destination.name
        and row["destination_type"] == destination.kind.value
    ]


@routes.listing("bindings/{vhost}/e/{source}/{kind}/{destination}")
async def bindings_between(call: Call) -> list[JsonObject]:
    return _between(call)


@routes.add("POST", "bindings/{vhost}/e/{source}/{kind}/{destination}")
async def post_binding(call: Call) -> Status:
    vhost = call.vhost()
    source, destination = _ends(call)
    call.may("write", destination.kind.value, destination.name)
    call.may("read", "exchange", source)
    body = await call.json()
    routing_key, arguments = text_in(body, "routing_key", ""), table_in(body)
    call.broker.access.check_topic_permission(call.user, vhost, "read", source, routing_key)
    await call.broker.declarations.bind(vhost, source, destination, routing_key, arguments)
    key = resources.properties_key(routing_key, arguments.canonical())
    parts = (call.path["destination"], key)
    return Status(CREATED, location="/".join(quote(part, safe="") for part in parts))


@routes.add("GET", "bindings/{vhost}/e/{source}/{kind}/{destination}/{key}")
async def binding(call: Call) -> JsonObject:
    for row in _between(call):
        if call.path["key"] in (row["properties_key"], row["routing_key"] or "~"):
            return row
    raise object_not_found()


@routes.add("DELETE", "bindings/{vhost}/e/{source}/{kind}/{destination}/{key}")
async def delete_binding(call: Call) -> Status:
    row = await binding(call)
    vhost = call.vhost()
    source, destination = _ends(call)
    call.may("write", destination.kind.value, destination.name)
    call.may("read", "exchange", source)
    found = _found_binding(call, vhost, source, destination, row)
    await call.broker.declarations.unbind(
        vhost, source, destination, found.routing_key, found.arguments
    )
    return Status(DONE)


def _found_binding(
    call: Call, vhost: str, source: str, destination: Destination, row: JsonObject
) -> Binding:
    topology = call.broker.tree.vhosts.get(vhost).topology
    # Nothing is awaited between the row and this.
    for found in topology.bindings(source=source, destination=destination):
        if resources.binding_row(vhost, found)["properties_key"] == row["properties_key"]:
            return found
    raise object_not_found()
