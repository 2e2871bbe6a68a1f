"""What each path of the HTTP API does. Importing this module fills `app.ROUTES`."""

from __future__ import annotations

import platform
from typing import Any
from urllib.parse import quote

from convoymq import __version__
from convoymq.management import definitions, messages, resources
from convoymq.management.app import ROUTES, Call, Status, matching, number, object_not_found, route
from convoymq.management.bodies import LARGE_BODY_BYTES_MAX, ApiError, bad_request
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import (
    Command,
    DeletePermission,
    DeleteTopicPermission,
    DeleteUser,
    DeleteVhost,
    ForgetNode,
    PutPermission,
    PutSetting,
    PutTopicPermission,
    PutUser,
)
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed, Unavailable
from convoymq.model.tables import Table
from convoymq.queues.slices import in_slices
from convoymq.replication import versions as supported
from convoymq.routing.types import Binding, Destination, DestinationKind, QueueType

ALIAS = "amq.default"
CREATED = 201
DONE = 204
ALIVENESS_QUEUE = "aliveness-test"
REASON_CHARS_MAX = 100
"""Of why a connection is closed: with the rest of the text it has to fit into a short string."""


def _put(created: bool) -> Status:
    return Status(CREATED if created else DONE)


async def _change(call: Call, command: Command) -> bool:
    return bool(await call.broker.metadata.execute(command))


def _text(body: dict[str, Any], key: str, default: str | None = None) -> str:
    value = body.get(key, default)
    if not isinstance(value, str):
        raise bad_request(f"key {key} is missing or not a string")
    return value


def _table(body: dict[str, Any], key: str = "arguments") -> Table:
    return messages.table_from_json(_object(body, key))


def _object(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None or value == []:
        # An empty list is what clients in PHP and Lua make of an empty object.
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"key {key} is not an object")
    return value


def _exchange_name(name: str) -> str:
    return "" if name == ALIAS else name


# --- the cluster -------------------------------------------------------------------------


@route("GET", "overview")
async def overview(call: Call) -> Any:
    return await resources.overview(call.broker, call.rates, call.visible)


@route("GET", "whoami")
async def whoami(call: Call) -> Any:
    return {"name": call.user.name, "tags": list(call.user.tags)}


@route("GET", "version")
async def version(call: Call) -> Any:
    return COMPATIBLE_VERSION


@route("GET", "cluster-name")
async def cluster_name(call: Call) -> Any:
    return {"name": call.broker.cluster_name}


@route("PUT", "cluster-name")
async def set_cluster_name(call: Call) -> Any:
    call.need(call.is_administrator)
    name = _text(await call.json(), "name")
    await _change(call, PutSetting(name="cluster_name", value=name))
    return Status(DONE)


@route("GET", "nodes", listing=True)
async def nodes(call: Call) -> Any:
    call.need(call.is_monitor)
    return await resources.nodes(call.broker)


@route("GET", "nodes/{node}")
async def node(call: Call) -> Any:
    call.need(call.is_monitor)
    for row in await resources.nodes(call.broker):
        if row["name"] == call.path["node"]:
            return row
    raise object_not_found()


@route("GET", "nodes/{node}/memory")
async def node_memory(call: Call) -> Any:
    row = await node(call)
    return {"memory": {"total": {"rss": row.get("mem_used", 0)}}}


@route("DELETE", "convoy/nodes/{node}")
async def forget_node(call: Call) -> Any:
    """Removes a node, by number or name, from the cluster. `force`: even if it runs."""
    call.need(call.is_administrator)
    text, tree = call.path["node"], call.broker.metadata.tree
    number = next((n.id for n in tree.nodes.values() if text in (n.name, str(n.id))), None)
    if number is None or call.broker.keeper is None:
        raise object_not_found()
    try:
        call.broker.keeper.check_forget(number, force=call.flag("force"))
        await call.broker.metadata.execute(ForgetNode(id=number))
    except PreconditionFailed as error:
        raise ApiError(409, "conflict", error.text) from None
    return Status(DONE)


@route("GET", "convoy/nodes/{node}/groups")
async def groups_of_node(call: Call) -> Any:
    """How many groups have the node as a member; a forgotten one should end with 0."""
    call.need(call.is_monitor)
    node = number(call.path["node"])
    if node is None or call.broker.keeper is None:
        raise object_not_found()
    return {"groups": call.broker.keeper.groups_with(node)}


@route("GET", "convoy/node")
async def own_node(call: Call) -> Any:
    """What `convoy status` shows of the node that answers."""
    call.need(call.is_monitor)
    broker = call.broker
    replicas = list(broker.host.groups.values())
    led = sum(1 for replica in replicas if replica.is_leader)
    local, proxied = broker.deliveries()
    counters = broker.counters
    skew_ms, skewed = broker.clock_skew()
    return {
        "state": "running" if broker.metadata.leader is not None else "no majority",
        "id": broker.node_id,
        "name": broker.node_name,
        "cluster_name": broker.cluster_name,
        "metadata_leader": broker.metadata.leader,
        "groups_led": led,
        "groups_followed": len(replicas) - led,
        "replicas_behind": sum(map(_behind, replicas)) + len(broker.host.stopped),
        "replicas_stopped": broker.stopped_replicas(),
        "versions": _versions(broker),
        "connections": len(broker.connections),
        "published": counters.published,
        "confirmed": counters.confirmed,
        "delivered": counters.delivered + counters.delivered_no_ack,
        "deliveries_local": local,
        "deliveries_proxied": proxied,
        "alarms": sorted({*broker.alarms, *(("clock",) if skewed else ())}),
        "clock_skew_ms": skew_ms,
        "uptime_ms": broker.uptime_ms,
        "build": f"{__version__}, compiled kernels, Python {platform.python_version()}",
        "links": broker.link_info(),
        **broker.node_info(),
    }


def _versions(broker: Any) -> dict[str, dict[str, int]]:
    """Per kind of machine what this build supports, and the lowest and highest version that is in
    force in a group with a replica here."""
    found = {}
    replicas = list(broker.host.groups.values())
    for kind, (oldest, newest) in sorted(supported.supports().items()):
        here = [each.machine.version for each in replicas if kind == each.machine.KIND]
        found[kind] = {"oldest": oldest, "newest": newest}
        if here:
            found[kind] |= {"in_force_min": min(here), "in_force_max": max(here)}
    return found


def _behind(replica: Any) -> int:
    """Replicas that cannot replace another one yet, as far as this node knows: a leader's followers
    that lack something committed or have no vote, and an own one that lost its data and catches up.
    A restart elsewhere had better wait."""
    core = replica.core
    own = int(replica.faulty != "" or core.lost_state or core.quarantined)
    if not replica.is_leader:
        return own
    peers = core.progress.values()
    return own + sum(1 for peer in peers if not peer.voter or peer.match < core.commit_index)


@route("GET", "extensions")
async def extensions(call: Call) -> Any:
    return []


@route("GET", "auth")
async def auth(call: Call) -> Any:
    return {"oauth_enabled": False}


@route("GET", "feature-flags", listing=True)
async def feature_flags(call: Call) -> Any:
    return []


@route("GET", "deprecated-features", listing=True)
async def deprecated_features(call: Call) -> Any:
    return []


def _none_of(pattern: str, *, of_vhost: bool = False) -> None:
    """Registers a list of what is not served: always empty."""

    @route("GET", pattern, listing=True)
    async def listed(call: Call) -> Any:
        if of_vhost:
            call.vhost()
        return []


def _refuse(word: str, *patterns: str, readable: bool = True) -> None:
    """Registers paths that would change what is not served: refused by name. Who only asks whether
    there is one (`readable`) hears that there is none."""

    async def refused(call: Call) -> Any:
        call.need("policymaker" in call.user.tags or call.is_administrator)
        raise bad_request(f"{word} are not served by this release")

    async def missing(call: Call) -> Any:
        call.vhost()
        raise object_not_found()

    for pattern in patterns:
        for method in ("PUT", "DELETE"):
            route(method, pattern)(refused)
        if readable:
            route("GET", pattern)(missing)


for _path in ("policies", "operator-policies", "vhost-limits", "parameters"):
    _none_of(_path)
_none_of("user-limits")
_none_of("parameters/{component}")
for _path in ("policies/{vhost}", "operator-policies/{vhost}", "vhost-limits/{vhost}"):
    _none_of(_path, of_vhost=True)
_none_of("parameters/{component}/{vhost}", of_vhost=True)
_refuse("policies", "policies/{vhost}/{name}")
_refuse("operator policies", "operator-policies/{vhost}/{name}")
_refuse("parameters", "parameters/{component}/{vhost}/{name}")
_refuse("global parameters", "global-parameters/{name}", readable=False)
_refuse("limits of virtual hosts", "vhost-limits/{vhost}/{name}", readable=False)
_refuse("limits of users", "user-limits/{user}/{name}", readable=False)


@route("GET", "global-parameters", listing=True)
async def global_parameters(call: Call) -> Any:
    return [{"name": "cluster_name", "value": call.broker.cluster_name}]


@route("GET", "global-parameters/{name}")
async def global_parameter(call: Call) -> Any:
    for row in await global_parameters(call):
        if row["name"] == call.path["name"]:
            return row
    raise object_not_found()


# --- definitions -------------------------------------------------------------------------


@route("GET", "definitions")
async def get_definitions(call: Call) -> Any:
    call.need(call.is_administrator)
    return definitions.export(call.broker)


@route("POST", "definitions")
async def post_definitions(call: Call) -> Any:
    call.need(call.is_administrator)
    await definitions.load(call.broker, await call.json(LARGE_BODY_BYTES_MAX))
    return Status(DONE)


@route("GET", "definitions/{vhost}")
async def get_definitions_of(call: Call) -> Any:
    call.need(call.is_administrator)
    return definitions.export(call.broker, call.vhost())


@route("POST", "definitions/{vhost}")
async def post_definitions_of(call: Call) -> Any:
    call.need(call.is_administrator)
    vhost = call.vhost()
    await definitions.load(call.broker, await call.json(LARGE_BODY_BYTES_MAX), vhost)
    return Status(DONE)


# --- connections, channels, consumers ----------------------------------------------------


def _own(call: Call, rows: list[dict[str, Any]], user_key: str = "user") -> list[dict[str, Any]]:
    if call.is_monitor:
        return rows
    return [row for row in rows if row.get(user_key) == call.user.name]


@route("GET", "connections", listing=True)
async def connections(call: Call) -> Any:
    return _own(call, await call.broker.list_connections())


@route("GET", "vhosts/{vhost}/connections", listing=True)
async def connections_in(call: Call) -> Any:
    vhost = call.vhost()
    return resources.visible_rows(await connections(call), {vhost})


@route("GET", "connections/username/{user}", listing=True)
async def connections_by(call: Call) -> Any:
    return [row for row in await connections(call) if row.get("user") == call.path["user"]]


@route("GET", "connections/{name}")
async def connection(call: Call) -> Any:
    for row in await connections(call):
        if row.get("name") == call.path["name"]:
            return row
    raise object_not_found()


@route("DELETE", "connections/username/{user}")
async def close_connections_of(call: Call) -> Any:
    call.need(call.is_administrator or call.path["user"] == call.user.name)
    for row in await connections_by(call):
        await call.broker.close_connection(row["name"], _reason(call))
    return Status(DONE)


@route("DELETE", "connections/{name}")
async def close_connection(call: Call) -> Any:
    row = await connection(call)
    call.need(call.is_administrator or row.get("user") == call.user.name)
    if not await call.broker.close_connection(call.path["name"], _reason(call)):
        raise object_not_found()
    return Status(DONE)


def _reason(call: Call) -> str:
    given = call.request.headers.get("x-reason") or "Closed via management plugin"
    return given[:REASON_CHARS_MAX]


@route("GET", "connections/{name}/channels", listing=True)
async def channels_of(call: Call) -> Any:
    name = call.path["name"]
    return [
        row for row in await channels(call) if row.get("connection_details", {}).get("name") == name
    ]


@route("GET", "channels", listing=True)
async def channels(call: Call) -> Any:
    return _own(call, await call.broker.list_channels())


@route("GET", "vhosts/{vhost}/channels", listing=True)
async def channels_in(call: Call) -> Any:
    vhost = call.vhost()
    return resources.visible_rows(await channels(call), {vhost})


@route("GET", "channels/{name}")
async def channel(call: Call) -> Any:
    for row in await channels(call):
        if row.get("name") == call.path["name"]:
            return row
    raise object_not_found()


@route("GET", "consumers", listing=True)
async def consumers(call: Call) -> Any:
    visible = call.visible
    rows = await call.broker.list_consumers()
    return [row for row in rows if row.get("queue", {}).get("vhost") in visible]


@route("GET", "consumers/{vhost}", listing=True)
async def consumers_in(call: Call) -> Any:
    vhost = call.vhost()
    return [row for row in await consumers(call) if row["queue"]["vhost"] == vhost]


# --- exchanges ---------------------------------------------------------------------------


@route("GET", "exchanges", listing=True)
async def exchanges(call: Call) -> Any:
    return resources.exchanges(call.broker, call.visible)


@route("GET", "exchanges/{vhost}", listing=True)
async def exchanges_in(call: Call) -> Any:
    return resources.exchanges(call.broker, {call.vhost()})


@route("GET", "exchanges/{vhost}/{name}")
async def exchange(call: Call) -> Any:
    vhost = call.vhost()
    topology = call.broker.metadata.tree.vhosts[vhost].topology
    try:
        found = topology.exchange(_exchange_name(call.path["name"]))
    except NotFound:
        raise object_not_found() from None
    return resources.exchange_row(vhost, found)


@route("PUT", "exchanges/{vhost}/{name}")
async def put_exchange(call: Call) -> Any:
    vhost = call.vhost()
    name = _exchange_name(call.path["name"])
    call.may("configure", "exchange", name)
    body = await call.json()
    created = await call.broker.declare_exchange(
        vhost,
        name,
        _text(body, "type", "direct"),
        durable=definitions.truth(body.get("durable", True)),
        auto_delete=definitions.truth(body.get("auto_delete", False)),
        internal=definitions.truth(body.get("internal", False)),
        arguments=_table(body),
        user=call.user,
    )
    return _put(created)


@route("DELETE", "exchanges/{vhost}/{name}")
async def delete_exchange(call: Call) -> Any:
    await exchange(call)
    name = _exchange_name(call.path["name"])
    call.may("configure", "exchange", name)
    await call.broker.delete_exchange(call.vhost(), name, if_unused=call.flag("if-unused"))
    return Status(DONE)


@route("POST", "exchanges/{vhost}/{name}/publish")
async def publish(call: Call) -> Any:
    vhost = call.vhost()
    name = _exchange_name(call.path["name"])
    call.may("write", "exchange", name)
    alarms = sorted(call.broker.alarms)
    if alarms:
        raise Unavailable(f"publishers are blocked by an alarm: {' and '.join(alarms)}")
    try:
        return await _publish(call, vhost, name, await call.json(LARGE_BODY_BYTES_MAX))
    except NotFound as error:
        # As RabbitMQ answers: what is missing is not the path.
        raise bad_request(f"404 NOT_FOUND - {error.text}") from None


async def _publish(call: Call, vhost: str, name: str, body: dict[str, Any]) -> dict[str, bool]:
    routing_key = _text(body, "routing_key")
    routed = await messages.publish(
        call.broker,
        vhost,
        name,
        routing_key=routing_key,
        properties=_object(body, "properties"),
        user=call.user,
        size_max=call.message_bytes_max,
        payload=_text(body, "payload"),
        payload_encoding=_text(body, "payload_encoding", "string"),
    )
    return {"routed": routed}


@route("GET", "exchanges/{vhost}/{name}/bindings/source", listing=True)
async def bindings_from(call: Call) -> Any:
    await exchange(call)
    name = _exchange_name(call.path["name"])
    rows = resources.bindings(call.broker, {call.vhost()})
    return [row for row in rows if row["source"] == name]


@route("GET", "exchanges/{vhost}/{name}/bindings/destination", listing=True)
async def bindings_to(call: Call) -> Any:
    await exchange(call)
    return _bindings_at(call, "exchange", _exchange_name(call.path["name"]))


def _bindings_at(call: Call, kind: str, name: str) -> list[dict[str, Any]]:
    return [
        row
        for row in resources.bindings(call.broker, {call.vhost()})
        if row["destination_type"] == kind and row["destination"] == name
    ]


# --- queues ------------------------------------------------------------------------------


@route("GET", "queues", listing=True)
async def queues(call: Call) -> Any:
    return resources.visible_rows(await resources.queues(call.broker, call.rates), call.visible)


@route("GET", "queues/detailed", listing=True)
async def queues_detailed(call: Call) -> Any:
    return await queues(call)


@route("GET", "queues/{vhost}", listing=True)
async def queues_in(call: Call) -> Any:
    vhost = call.vhost()
    rows = await resources.queues(call.broker, call.rates)
    return resources.visible_rows(rows, {vhost})


@route("GET", "queues/{vhost}/{name}")
async def queue(call: Call) -> Any:
    broker = call.broker
    record = broker.metadata.tree.vhosts[call.vhost()].queues.get(call.path["name"])
    if record is None:
        raise object_not_found()
    live = (await broker.queue_infos()).get(record.group)
    consumers = await broker.list_consumers()
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


@route("PUT", "queues/{vhost}/{name}")
async def put_queue(call: Call) -> Any:
    vhost, name = call.vhost(), call.path["name"]
    call.may("configure", "queue", name)
    body = await call.json()
    place = call.broker.metadata.tree.vhosts.get(vhost)
    exists = place is not None and name in place.queues
    await call.broker.declare_queue(
        vhost,
        name,
        durable=definitions.truth(body.get("durable", True)),
        exclusive=False,
        auto_delete=definitions.truth(body.get("auto_delete", False)),
        arguments=_table(body),
        user=call.user,
    )
    return _put(not exists)


def _existing_queue(call: Call) -> tuple[str, str]:
    vhost, name = call.vhost(), call.path["name"]
    if name not in call.broker.metadata.tree.vhosts[vhost].queues:
        raise object_not_found()
    return vhost, name


@route("DELETE", "queues/{vhost}/{name}")
async def delete_queue(call: Call) -> Any:
    vhost, name = _existing_queue(call)
    call.may("configure", "queue", name)
    await call.broker.delete_queue(
        vhost, name, if_unused=call.flag("if-unused"), if_empty=call.flag("if-empty")
    )
    return Status(DONE)


@route("GET", "queues/{vhost}/{name}/bindings", listing=True)
async def queue_bindings(call: Call) -> Any:
    return _bindings_at(call, "queue", call.path["name"])


@route("DELETE", "queues/{vhost}/{name}/contents")
async def purge_queue(call: Call) -> Any:
    vhost, name = _existing_queue(call)
    call.may("read", "queue", name)
    await messages.purge(call.broker, vhost, name)
    return Status(DONE)


@route("POST", "queues/{vhost}/{name}/get")
async def get_messages(call: Call) -> Any:
    vhost, name = call.vhost(), call.path["name"]
    call.may("read", "queue", name)
    body = await call.json()
    count = _number(body, "count", 1)
    return await messages.get_messages(
        call.broker,
        vhost,
        name,
        count=1 if count is None else count,
        ack_mode=_text(body, "ackmode", "ack_requeue_true"),
        encoding=_text(body, "encoding", "auto"),
        truncate=_number(body, "truncate", None),
    )


def _number(body: dict[str, Any], key: str, default: int | None) -> int | None:
    """A number, or text that is one; not negative."""
    value = body.get(key, default)
    found = number(value) if isinstance(value, str) else value
    if value is None or (type(found) is int and found >= 0):
        return found
    raise bad_request(f"key {key} is not a number")


@route("GET", "queues/quorum/{vhost}/{name}/status")
async def quorum_status(call: Call) -> Any:
    row = await queue(call)
    if row["type"] != QueueType.QUORUM.value:
        raise bad_request("not a quorum queue")

    def state(name: str) -> str:
        if name not in row["online"]:
            return "noproc"
        if name in row.get("stopped", ()):
            return "stopped"
        return "leader" if name == row.get("leader") else "follower"

    return [
        {
            "Node Name": name,
            "Raft State": state(name),
            "Machine Version": row.get("machine_version"),
            "Reason": row.get("stopped", {}).get(name, ""),
        }
        for name in row["members"]
    ]


# --- bindings ----------------------------------------------------------------------------


@route("GET", "bindings", listing=True)
async def bindings(call: Call) -> Any:
    return resources.bindings(call.broker, call.visible)


@route("GET", "bindings/{vhost}", listing=True)
async def bindings_in(call: Call) -> Any:
    return resources.bindings(call.broker, {call.vhost()})


def _ends(call: Call) -> tuple[str, Destination]:
    kinds = {"q": DestinationKind.QUEUE, "e": DestinationKind.EXCHANGE}
    kind = kinds.get(call.path["kind"])
    if kind is None:
        raise object_not_found()
    destination = call.path["destination"]
    if kind is DestinationKind.EXCHANGE:
        destination = _exchange_name(destination)
    return _exchange_name(call.path["source"]), Destination(kind, destination)


def _between(call: Call) -> list[dict[str, Any]]:
    source, destination = _ends(call)
    return [
        row
        for row in resources.bindings(call.broker, {call.vhost()})
        if row["source"] == source
        and row["destination"] == destination.name
        and row["destination_type"] == destination.kind.value
    ]


@route("GET", "bindings/{vhost}/e/{source}/{kind}/{destination}", listing=True)
async def bindings_between(call: Call) -> Any:
    return _between(call)


@route("POST", "bindings/{vhost}/e/{source}/{kind}/{destination}")
async def post_binding(call: Call) -> Any:
    vhost = call.vhost()
    source, destination = _ends(call)
    call.may("write", destination.kind.value, destination.name)
    call.may("read", "exchange", source)
    body = await call.json()
    routing_key, arguments = _text(body, "routing_key", ""), _table(body)
    call.broker.check_topic_permission(call.user, vhost, "read", source, routing_key)
    bind = (
        call.broker.bind_queue
        if destination.kind is DestinationKind.QUEUE
        else call.broker.bind_exchange
    )
    await bind(vhost, destination.name, source, routing_key, arguments)
    key = resources.properties_key(routing_key, arguments.canonical())
    parts = (call.path["destination"], quote(key, safe=""))
    return Status(CREATED, location="/".join(parts))


@route("GET", "bindings/{vhost}/e/{source}/{kind}/{destination}/{key}")
async def binding(call: Call) -> Any:
    for row in _between(call):
        if call.path["key"] in (row["properties_key"], row["routing_key"] or "~"):
            return row
    raise object_not_found()


@route("DELETE", "bindings/{vhost}/e/{source}/{kind}/{destination}/{key}")
async def delete_binding(call: Call) -> Any:
    row = await binding(call)
    vhost = call.vhost()
    source, destination = _ends(call)
    call.may("write", destination.kind.value, destination.name)
    call.may("read", "exchange", source)
    found = _found_binding(call, vhost, source, destination, row)
    unbind = (
        call.broker.unbind_queue
        if destination.kind is DestinationKind.QUEUE
        else call.broker.unbind_exchange
    )
    await unbind(vhost, destination.name, source, found.routing_key, found.arguments)
    return Status(DONE)


def _found_binding(
    call: Call, vhost: str, source: str, destination: Destination, row: dict[str, Any]
) -> Binding:
    topology = call.broker.metadata.tree.vhosts[vhost].topology
    # Nothing is awaited between the row and this.
    for found in topology.bindings(source=source, destination=destination):
        if resources.binding_row(vhost, found)["properties_key"] == row["properties_key"]:
            return found
    raise object_not_found()


# --- virtual hosts -----------------------------------------------------------------------


@route("GET", "vhosts", listing=True)
async def vhosts(call: Call) -> Any:
    return await resources.vhosts(call.broker, call.rates, call.visible)


@route("GET", "vhosts/{vhost}")
async def vhost(call: Call) -> Any:
    rows = await resources.vhosts(call.broker, call.rates, {call.vhost()})
    if not rows:
        # It went away meanwhile.
        raise object_not_found()
    return rows[0]


@route("PUT", "vhosts/{vhost}")
async def put_vhost(call: Call) -> Any:
    call.need(call.is_administrator)
    name = call.path["vhost"]
    created = await _change(call, definitions.vhost_command(name, await call.json()))
    if created:
        # As RabbitMQ does: who makes a virtual host through the API may use it.
        await _change(
            call,
            PutPermission(user=call.user.name, vhost=name, configure=".*", write=".*", read=".*"),
        )
    return _put(created)


@route("DELETE", "vhosts/{vhost}")
async def delete_vhost(call: Call) -> Any:
    call.need(call.is_administrator)
    await _change(call, DeleteVhost(name=call.vhost()))
    return Status(DONE)


@route("GET", "vhosts/{vhost}/permissions", listing=True)
async def vhost_permissions(call: Call) -> Any:
    call.need(call.is_administrator)
    return resources.visible_rows(resources.permissions(call.broker), {call.vhost()})


@route("GET", "vhosts/{vhost}/topic-permissions", listing=True)
async def vhost_topic_permissions(call: Call) -> Any:
    call.need(call.is_administrator)
    return resources.visible_rows(resources.topic_permissions(call.broker), {call.vhost()})


# --- users and permissions ---------------------------------------------------------------


@route("GET", "users", listing=True)
async def users(call: Call) -> Any:
    call.need(call.is_administrator)
    tree = call.broker.metadata.tree
    return [resources.user_row(tree.users[name]) for name in sorted(tree.users)]


@route("GET", "users/without-permissions", listing=True)
async def users_without_permissions(call: Call) -> Any:
    allowed = {user for user, _ in call.broker.metadata.tree.permissions}
    return [row for row in await users(call) if row["name"] not in allowed]


@route("GET", "users/{user}")
async def user(call: Call) -> Any:
    call.need(call.is_administrator)
    found = call.broker.metadata.tree.users.get(call.path["user"])
    if found is None:
        raise object_not_found()
    return resources.user_row(found)


@route("PUT", "users/{user}")
async def put_user(call: Call) -> Any:
    call.need(call.is_administrator)
    body = await call.json()
    if "tags" not in body:
        raise bad_request("key tags is missing")
    algorithm = _text(body, "hashing_algorithm", SHA256)
    if body.get("password"):
        password_hash, algorithm = hash_sha256(_text(body, "password").encode()), SHA256
    else:
        password_hash = _text(body, "password_hash", "")
    command = PutUser(
        name=call.path["user"],
        password_hash=password_hash,
        algorithm=algorithm,
        tags=definitions.tags_of(body["tags"]),
    )
    return _put(await _change(call, command))


@route("DELETE", "users/{user}")
async def delete_user(call: Call) -> Any:
    await user(call)
    await _change(call, DeleteUser(name=call.path["user"]))
    return Status(DONE)


@route("POST", "users/bulk-delete")
async def delete_users(call: Call) -> Any:
    call.need(call.is_administrator)
    names = (await call.json()).get("users")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_request("key users is not a list of names")
    for name in names:
        await _change(call, DeleteUser(name=name))
    return Status(DONE)


@route("GET", "users/{user}/permissions", listing=True)
async def user_permissions(call: Call) -> Any:
    await user(call)
    rows = resources.permissions(call.broker)
    return [row for row in rows if row["user"] == call.path["user"]]


@route("GET", "users/{user}/topic-permissions", listing=True)
async def user_topic_permissions(call: Call) -> Any:
    await user(call)
    rows = resources.topic_permissions(call.broker)
    return [row for row in rows if row["user"] == call.path["user"]]


@route("GET", "permissions", listing=True)
async def permissions(call: Call) -> Any:
    call.need(call.is_administrator)
    return resources.permissions(call.broker)


@route("GET", "permissions/{vhost}/{user}")
async def permission(call: Call) -> Any:
    for row in await permissions(call):
        if row["vhost"] == call.path["vhost"] and row["user"] == call.path["user"]:
            return row
    raise object_not_found()


@route("PUT", "permissions/{vhost}/{user}")
async def put_permission(call: Call) -> Any:
    call.need(call.is_administrator)
    body = await call.json()
    command = PutPermission(
        user=call.path["user"],
        vhost=call.path["vhost"],
        configure=_text(body, "configure"),
        write=_text(body, "write"),
        read=_text(body, "read"),
    )
    return _put(await _change(call, command))


@route("DELETE", "permissions/{vhost}/{user}")
async def delete_permission(call: Call) -> Any:
    await permission(call)
    await _change(call, DeletePermission(user=call.path["user"], vhost=call.path["vhost"]))
    return Status(DONE)


@route("GET", "topic-permissions", listing=True)
async def topic_permissions(call: Call) -> Any:
    call.need(call.is_administrator)
    return resources.topic_permissions(call.broker)


@route("GET", "topic-permissions/{vhost}/{user}", listing=True)
async def topic_permission(call: Call) -> Any:
    rows = [
        row
        for row in await topic_permissions(call)
        if row["vhost"] == call.path["vhost"] and row["user"] == call.path["user"]
    ]
    if not rows:
        raise object_not_found()
    return rows


@route("GET", "topic-permissions/{vhost}/{user}/{exchange}", listing=True)
async def topic_permission_of_exchange(call: Call) -> Any:
    name = call.path["exchange"]
    rows = [row for row in await topic_permission(call) if row["exchange"] == name]
    if not rows:
        raise object_not_found()
    return rows


@route("PUT", "topic-permissions/{vhost}/{user}")
async def put_topic_permission(call: Call) -> Any:
    call.need(call.is_administrator)
    body = await call.json()
    command = PutTopicPermission(
        user=call.path["user"],
        vhost=call.path["vhost"],
        exchange=_text(body, "exchange"),
        write=_text(body, "write"),
        read=_text(body, "read"),
    )
    return _put(await _change(call, command))


@route("DELETE", "topic-permissions/{vhost}/{user}")
async def delete_topic_permission(call: Call) -> Any:
    await topic_permission(call)
    await _change(call, DeleteTopicPermission(user=call.path["user"], vhost=call.path["vhost"]))
    return Status(DONE)


@route("DELETE", "topic-permissions/{vhost}/{user}/{exchange}")
async def delete_topic_permission_of_exchange(call: Call) -> Any:
    await topic_permission_of_exchange(call)
    command = DeleteTopicPermission(
        user=call.path["user"], vhost=call.path["vhost"], exchange=call.path["exchange"]
    )
    await _change(call, command)
    return Status(DONE)


# --- health ------------------------------------------------------------------------------


def _healthy() -> dict[str, str]:
    return {"status": "ok"}


def _unhealthy(reason: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return 503, {"status": "failed", "reason": reason, **more}


@route("GET", "aliveness-test/{vhost}")
async def aliveness(call: Call) -> Any:
    """Declares a queue, publishes a message and gets it: with the user's permissions."""
    vhost = call.vhost()
    for permission in ("configure", "write", "read"):
        call.may(permission, "queue", ALIVENESS_QUEUE)
    call.may("write", "exchange", "")
    broker = call.broker
    try:
        await broker.declare_queue(
            vhost, ALIVENESS_QUEUE, durable=False, exclusive=False, auto_delete=False,
            arguments=messages.table_from_json({"x-queue-type": QueueType.CLASSIC.value}),
        )  # fmt: skip
        await messages.publish(
            broker, vhost, "", routing_key=ALIVENESS_QUEUE, properties={}, payload="test_message",
            payload_encoding="string", user=call.user, size_max=call.message_bytes_max,
        )  # fmt: skip
        rows = await messages.get_messages(
            broker, vhost, ALIVENESS_QUEUE, count=1, ack_mode="ack_requeue_false", encoding="auto",
            truncate=None,
        )  # fmt: skip
    except BrokerError as error:
        return _unhealthy(error.text)
    return _healthy() if rows else _unhealthy("the message did not come back")


@route("GET", "health/checks/alarms")
async def check_alarms(call: Call) -> Any:
    broker = call.broker
    alarms = [
        {"node": broker.node_name_of(node), "resource": name}
        for node in broker.metadata.tree.nodes
        for name in sorted(broker.alarms_of(node))
    ]
    return _unhealthy("resource alarm(s) in effect", alarms=alarms) if alarms else _healthy()


@route("GET", "health/checks/local-alarms")
async def check_local_alarms(call: Call) -> Any:
    alarms = sorted(call.broker.alarms_of(call.broker.node_id))
    return _unhealthy("resource alarm(s) in effect", alarms=alarms) if alarms else _healthy()


@route("GET", "health/checks/virtual-hosts")
async def check_virtual_hosts(call: Call) -> Any:
    """Fails when a queue of a virtual host is not served on this node because of its files."""
    broken = _broken_here(call)
    if broken:
        hosts = sorted({row["virtual_host"] for row in broken})
        reason = "Some virtual hosts have queues that are stopped on this node"
        return _unhealthy(reason, **{"virtual-hosts": hosts, "queues": broken})
    return _healthy()


def _broken_here(call: Call) -> list[dict[str, str]]:
    """Queues with damaged files, or with a replica that was stopped, on this node."""
    broker = call.broker
    groups = {*broker.classic.damaged, *broker.host.stopped}
    return [
        {"name": record.name, "virtual_host": record.vhost, "type": record.type.value}
        for record in broker.metadata.tree.records()
        if record.group in groups
    ]


@route("GET", "health/checks/is-in-service")
async def check_in_service(call: Call) -> Any:
    """Fails while this node can't change anything, or takes no AMQP clients."""
    return _metadata_health(call) if _takes_clients(call) else _unhealthy("no AMQP listener")


@route("GET", "health/checks/ready-to-serve-clients")
async def check_ready(call: Call) -> Any:
    """As is-in-service, and publishers are not blocked."""
    alarms = sorted(call.broker.alarms)
    if alarms:
        return _unhealthy("publishers are blocked by an alarm", alarms=alarms)
    return await check_in_service(call)


def _takes_clients(call: Call) -> bool:
    return any(row["protocol"] in ("amqp", "amqp/ssl") for row in _own_listeners(call))


@route("GET", "health/checks/metadata-store/initialized")
async def check_metadata(call: Call) -> Any:
    return _metadata_health(call)


@route("GET", "health/checks/metadata-store/initialized/with-data")
async def check_metadata_data(call: Call) -> Any:
    tree = call.broker.metadata.tree
    if not tree.vhosts or call.broker.node_id not in tree.nodes:
        return _unhealthy("the metadata store has no data")
    return _metadata_health(call)


def _metadata_health(call: Call) -> Any:
    if call.broker.metadata.leader is None:
        return _unhealthy("the metadata store has no leader")
    return _healthy()


@route("GET", "health/checks/reached-target-cluster-size")
async def check_cluster_size(call: Call) -> Any:
    broker = call.broker
    wanted = broker.settings.cluster_size_target or len(broker.metadata.tree.nodes)
    running = len(broker.running_nodes())
    return _healthy() if running >= wanted else _unhealthy(f"{running} of {wanted} nodes run")


@route("GET", "health/checks/node-is-quorum-critical")
async def check_quorum_critical(call: Call) -> Any:
    broker = call.broker
    behind = await broker.replicas_behind()
    critical = []
    async for record in in_slices(list(broker.metadata.tree.records())):
        members = record.members
        if not record.type.is_replicated or broker.node_id not in members:
            continue
        # A replica that runs and lacks something can't stand in for this one.
        others = [
            node
            for node in members
            if node != broker.node_id and broker.is_up(node) and (record.group, node) not in behind
        ]
        # Without this node no majority would be left; a lone member has nobody to hand over to.
        if len(members) > 1 and len(others) < len(members) // 2 + 1:
            critical.append(
                {"readable_name": f"queue '{record.name}' in vhost '{record.vhost}'",
                 "name": record.name, "virtual_host": record.vhost, "type": record.type.value}
            )  # fmt: skip
    if critical:
        return _unhealthy("There are quorum queues that would lose their quorum if the target "
                          "node is shut down", queues=critical)  # fmt: skip
    return _healthy()


@route("GET", "health/checks/node-is-mirror-sync-critical")
async def check_mirrors(call: Call) -> Any:
    raise ApiError(
        404,
        "Object Not Found",
        "this check is not served: there are no mirrored queues; ask node-is-quorum-critical",
    )


@route("GET", "health/checks/port-listener/{port}")
async def check_port(call: Call) -> Any:
    ports = [row["port"] for row in _own_listeners(call)]
    wanted = number(call.path["port"])
    if wanted is None:
        raise bad_request("not a port")
    if wanted in ports:
        return {"status": "ok", "port": wanted}
    return _unhealthy("No active listener", missing=wanted, ports=ports)


@route("GET", "health/checks/protocol-listener/{protocol}")
async def check_protocol(call: Call) -> Any:
    protocols = sorted({row["protocol"] for row in _own_listeners(call)})
    wanted = {"amqp091": "amqp", "amqps": "amqp/ssl"}.get(
        call.path["protocol"], call.path["protocol"]
    )
    if wanted in protocols:
        return {"status": "ok", "protocol": call.path["protocol"]}
    return _unhealthy("No active listener", missing=call.path["protocol"], protocols=protocols)


def _own_listeners(call: Call) -> list[dict[str, Any]]:
    return [row for row in resources.listeners(call.broker) if row["node"] == call.broker.node_name]


@route("GET", "health/checks/quorum-queues-without-elected-leaders/vhost/{vhost}/pattern/{p}")
async def check_leaders(call: Call) -> Any:
    return await _leaderless(await queues_in(call), call.path["p"])


@route("GET", "health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/{p}")
async def check_all_leaders(call: Call) -> Any:
    return await _leaderless(await queues(call), call.path["p"])


async def _leaderless(rows: list[dict[str, Any]], pattern: str) -> Any:
    missing = [
        {"name": row["name"], "virtual_host": row["vhost"], "type": "quorum"}
        for row in await matching(rows, pattern, ignore_case=False)
        if row["type"] == "quorum" and row.get("leader") is None
    ]
    return _unhealthy("queues without a leader", queues=missing) if missing else _healthy()


@route("GET", "healthchecks/node")
async def health_node(call: Call) -> Any:
    """The old check of everything: 200 in any case, as there."""
    for check in (check_local_alarms, check_virtual_hosts, check_metadata_data):
        found = await check(call)
        if isinstance(found, tuple):
            return {"status": "failed", "reason": found[1]["reason"]}
    return _healthy()


__all__ = ["ROUTES", "__version__"]
