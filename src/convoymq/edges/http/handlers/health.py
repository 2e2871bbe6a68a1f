"""Health checks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from convoymq.broker.records import QueueRecord
from convoymq.edges.certificates import expiry_of
from convoymq.edges.http import messages, resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import Call, object_not_found
from convoymq.edges.http.fields import number
from convoymq.edges.http.handlers.queues import queues, queues_in
from convoymq.edges.http.lists import Lazy, matching
from convoymq.edges.http.routes import Routes
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices
from convoymq.routing.types import QueueType

ALIVENESS_QUEUE = "aliveness-test"
DAYS_OF_UNIT = {"days": 1, "weeks": 7, "months": 30, "years": 365}
CERTIFICATE_UNITS_MAX = 1_000

Verdict: TypeAlias = JsonObject | tuple[int, JsonObject]
"""Answer of a check, with a status when it fails."""

routes = Routes()


def _healthy() -> JsonObject:
    return {"status": "ok"}


def _unhealthy(reason: str, **more: object) -> Verdict:
    return 503, {"status": "failed", "reason": reason, **more}


@routes.add("GET", "aliveness-test/{vhost}")
async def aliveness(call: Call) -> Verdict:
    """Declares a queue, publishes a message and gets it: with the user's permissions."""
    vhost = call.vhost()
    for permission in ("configure", "write", "read"):
        call.may(permission, "queue", ALIVENESS_QUEUE)
    call.may("write", "exchange", "")
    broker = call.broker
    try:
        await broker.declarations.declare_queue(
            vhost, ALIVENESS_QUEUE, durable=False, exclusive=False, auto_delete=False,
            arguments=messages.table_from_json({"x-queue-type": QueueType.CLASSIC.value}),
            user=call.user.name,
        )  # fmt: skip
        await messages.publish(
            broker, vhost, "", routing_key=ALIVENESS_QUEUE, properties={}, payload="test_message",
            payload_encoding="string", user=call.user, size_max=call.served.message_bytes_max,
        )  # fmt: skip
        rows = await messages.get_messages(
            broker, vhost, ALIVENESS_QUEUE, count=1, ack_mode="ack_requeue_false", encoding="auto",
            truncate=None, user=call.user,
        )  # fmt: skip
    except BrokerError as error:
        return _unhealthy(error.text)
    return _healthy() if rows else _unhealthy("the message did not come back")


@routes.add("GET", "health/checks/alarms")
async def check_alarms(call: Call) -> Verdict:
    broker = call.broker
    alarms = [
        {"node": node.name, "resource": name}
        for node in broker.tree.nodes.all()
        for name in sorted(broker.alarms.of(node.id))
    ]
    return _unhealthy("resource alarm(s) in effect", alarms=alarms) if alarms else _healthy()


@routes.add("GET", "health/checks/local-alarms")
async def check_local_alarms(call: Call) -> Verdict:
    alarms = sorted(call.broker.alarms.of(call.broker.node_id))
    return _unhealthy("resource alarm(s) in effect", alarms=alarms) if alarms else _healthy()


@routes.add("GET", "health/checks/virtual-hosts")
async def check_virtual_hosts(call: Call) -> Verdict:
    """Fails when a queue of a virtual host is not served on this node because of its files."""
    broken = _broken_here(call)
    if broken:
        hosts = sorted({str(row["virtual_host"]) for row in broken})
        reason = "Some virtual hosts have queues that are stopped on this node"
        return _unhealthy(reason, **{"virtual-hosts": hosts, "queues": broken})
    return _healthy()


def _broken_here(call: Call) -> list[JsonObject]:
    """Queues with damaged files, or with a replica that was stopped, on this node."""
    broker = call.broker
    groups = broker.local.broken()
    return [
        {"name": record.name, "virtual_host": record.vhost, "type": record.type.value}
        for record in broker.tree.queues.all()
        if record.group in groups
    ]


@routes.add("GET", "health/checks/is-in-service")
async def check_in_service(call: Call) -> Verdict:
    """Fails while this node can't change anything, or takes no AMQP clients."""
    if call.broker.maintenance.is_drained:
        return _unhealthy("the node is drained: it takes no clients until it is revived")
    return _metadata_health(call) if _takes_clients(call) else _unhealthy("no AMQP listener")


@routes.add("GET", "health/checks/ready-to-serve-clients")
async def check_ready(call: Call) -> Verdict:
    """As is-in-service, and publishers are not blocked."""
    alarms = sorted(call.broker.alarms.effective)
    if alarms:
        return _unhealthy("publishers are blocked by an alarm", alarms=alarms)
    return await check_in_service(call)


def _takes_clients(call: Call) -> bool:
    return any(row["protocol"] in ("amqp", "amqp/ssl") for row in _own_listeners(call))


@routes.add("GET", "health/checks/metadata-store/initialized")
async def check_metadata(call: Call) -> Verdict:
    return _metadata_health(call)


@routes.add("GET", "health/checks/metadata-store/initialized/with-data")
async def check_metadata_data(call: Call) -> Verdict:
    tree = call.broker.tree
    if not tree.vhosts.names() or tree.nodes.find(str(call.broker.node_id)) is None:
        return _unhealthy("the metadata store has no data")
    return _metadata_health(call)


def _metadata_health(call: Call) -> Verdict:
    if call.broker.tree.leader is None:
        return _unhealthy("the metadata store has no leader")
    return _healthy()


@routes.add("GET", "health/checks/reached-target-cluster-size")
async def check_cluster_size(call: Call) -> Verdict:
    broker = call.broker
    wanted = call.served.cluster_size_target or len(broker.tree.nodes)
    running = len(broker.running_nodes())
    return _healthy() if running >= wanted else _unhealthy(f"{running} of {wanted} nodes run")


@routes.add("GET", "health/checks/node-is-quorum-critical")
async def check_quorum_critical(call: Call) -> Verdict:
    checks = call.broker.quorum_checks
    if checks.is_single_node:
        return {**_healthy(), "reason": "single node cluster"}
    critical = await checks.critical()
    if critical:
        return _unhealthy("There are quorum queues that would lose their quorum if the target "
                          "node is shut down", queues=critical)  # fmt: skip
    return _healthy()


@routes.add("GET", "health/checks/quorum-queue-replicas-initial-sync")
async def check_initial_sync(call: Call) -> Verdict:
    """Fails while a new replica of a queue on this node has no vote yet."""
    joining = await call.broker.quorum_checks.joining()
    if joining:
        return _unhealthy("There are quorum queues with promotable replicas on the target node",
                          queues=joining)  # fmt: skip
    return _healthy()


@routes.add("GET", "health/checks/node-is-mirror-sync-critical")
async def check_mirrors(call: Call) -> Verdict:
    """Fails while a mirrored queue would have no synchronised copy without this node."""
    found = await call.broker.quorum_checks.unmirrored()
    if found:
        return _unhealthy(
            "There are classic mirrored queues without online synchronised mirrors", queues=found
        )
    return _healthy()


@routes.add("GET", "health/checks/port-listener/{port}")
async def check_port(call: Call) -> Verdict:
    ports = [row["port"] for row in _own_listeners(call)]
    wanted = number(call.path["port"])
    if wanted is None:
        raise bad_request("not a port")
    if wanted in ports:
        return {"status": "ok", "port": wanted}
    return _unhealthy("No active listener", missing=wanted, ports=ports)


@routes.add("GET", "health/checks/protocol-listener/{protocol}")
async def check_protocol(call: Call) -> Verdict:
    protocols = sorted({str(row["protocol"]) for row in _own_listeners(call)})
    wanted = {"amqp091": "amqp", "amqps": "amqp/ssl"}.get(
        call.path["protocol"], call.path["protocol"]
    )
    if wanted in protocols:
        return {"status": "ok", "protocol": call.path["protocol"]}
    return _unhealthy("No active listener", missing=call.path["protocol"], protocols=protocols)


def _own_listeners(call: Call) -> list[JsonObject]:
    return [row for row in resources.listeners(call.broker) if row["node"] == call.broker.node_name]


@routes.add("GET", "health/checks/below-node-connection-limit")
async def check_connection_limit(call: Call) -> Verdict:
    broker = call.broker
    current, limit = len(broker.connections), call.served.connections_max
    if current < limit:
        return {**_healthy(), "current": current, "limit": limit}
    return _unhealthy("node connection limit is reached", current=current, limit=limit)


@routes.add("GET", "health/checks/certificate-expiration/{within}/{unit}")
async def check_certificates(call: Call) -> Verdict:
    """Fails when the certificate of a listener of this node ends to be good within a time."""
    within, days = number(call.path["within"]), DAYS_OF_UNIT.get(call.path["unit"])
    if days is None:
        raise bad_request("Invalid expiration unit.")
    if within is None or not 0 <= within <= CERTIFICATE_UNITS_MAX:
        raise bad_request("Invalid expiration value.")
    listeners = [row for row in _own_listeners(call) if row["protocol"] == "amqp/ssl"]
    path = call.served.certificate_file
    if not listeners or not path:
        return _healthy()
    try:
        expiry = await asyncio.to_thread(lambda: expiry_of(Path(path).read_bytes()))
    except (OSError, ValueError) as error:
        return _unhealthy(f"certificate {path} cannot be read: {error}", expired=[])
    if expiry > datetime.now(UTC) + timedelta(days=within * days):
        return _healthy()
    expired = [
        {**row, "certfile": path, "certfile_expires_on": f"{expiry:%Y-%m-%d %H:%M:%S}"}
        for row in listeners
    ]
    return _unhealthy("Certificates expiring", expired=expired)


@routes.add("GET", "health/checks/quorum-queues-without-elected-leaders/vhost/{vhost}")
@routes.add("GET", "health/checks/quorum-queues-without-elected-leaders/vhost/{vhost}/pattern/{p}")
async def check_leaders(call: Call) -> Verdict:
    return await _leaderless(await queues_in(call), call.path.get("p", ""))


@routes.add("GET", "health/checks/quorum-queues-without-elected-leaders/all-vhosts")
@routes.add("GET", "health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/{p}")
async def check_all_leaders(call: Call) -> Verdict:
    return await _leaderless(await queues(call), call.path.get("p", ""))


async def _leaderless(found: Lazy[QueueRecord], pattern: str) -> Verdict:
    records = await matching(list(found.items), pattern, found.name, ignore_case=False)
    missing = [
        {
            "readable_name": f"queue '{record.name}' in vhost '{record.vhost}'",
            "name": record.name,
            "virtual_host": record.vhost,
            "type": "quorum",
        }
        async for record in in_slices(records)
        if record.type is QueueType.QUORUM and (found.row(record) or {}).get("leader") is None
    ]
    return _unhealthy("queues without a leader", queues=missing) if missing else _healthy()


@routes.add("GET", "healthchecks/node")
async def health_node(call: Call) -> JsonObject:
    """The old check of everything: 200 in any case, as there."""
    for check in (check_local_alarms, check_virtual_hosts, check_metadata_data):
        found = await check(call)
        if isinstance(found, tuple):
            return {"status": "failed", "reason": found[1]["reason"]}
    return _healthy()


@routes.add("GET", "healthchecks/node/{node}")
async def health_named_node(call: Call) -> JsonObject:
    """The old check, of a node by name; the state of another one is known as far as it runs."""
    for row in await resources.nodes(call.broker, call.rates):
        if row["name"] == call.path["node"]:
            if row["name"] == call.broker.node_name:
                return await health_node(call)
            alarms = [name for name in ("mem_alarm", "disk_free_alarm") if row.get(name)]
            if not row["running"]:
                return {"status": "failed", "reason": "nodedown"}
            if alarms:
                return {"status": "failed", "reason": "resource alarm(s) in effect"}
            return _healthy()
    raise object_not_found()
