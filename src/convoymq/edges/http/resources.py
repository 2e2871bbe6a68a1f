"""The rows of the HTTP API: what exists and how it does, under RabbitMQ's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

from convoymq import __version__
from convoymq.broker.facade import Broker
from convoymq.broker.queue_facts import settings_in_force
from convoymq.broker.records import QueueRecord, User, Vhost
from convoymq.edges.configuration import listeners as listeners_of
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.rates import NO_RANGES, Range, Ranges, Rates
from convoymq.model.compatibility import COMPATIBLE_VERSION, RELEASE_4_3
from convoymq.model.config import Config
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices
from convoymq.model.tables import Table
from convoymq.queues.interface import SINGLE_ACTIVE
from convoymq.routing.ignored_arguments import ignored_of_exchange, ignored_of_queue
from convoymq.routing.policies import Chosen, Policies
from convoymq.routing.types import (
    Binding,
    DestinationKind,
    Exchange,
    ExchangeType,
    Queue,
    QueueType,
)

QUEUE_COUNTERS = {
    "published": "publish",
    "delivered": "deliver_get",
    "acked": "ack",
    "redelivered": "redeliver",
}
"""Names of a queue's own counters -> those of the API."""
QUEUE_GAUGES = frozenset(
    (
        "ready", "blocked", "unacked", "ready_bytes", "unacked_bytes", "returned_ready",
        "consumers", "delayed", "delayed_bytes", "dlx", "dlx_bytes", "segments",
    )
)  # fmt: skip
"""Numbers that may fall, so they have no rate. The queue's row shows them by other names."""

NODE_GAUGES = ("mem_used", "fd_used", "sockets_used", "proc_used", "disk_free")
MESSAGE_COUNTS = ("messages", "messages_ready", "messages_unacknowledged")


def message_stats(counters: Mapping[str, int]) -> dict[str, int]:
    """Totals of a node under the API's names."""
    stats = {
        "publish": counters.get("published", 0),
        "confirm": counters.get("confirmed", 0),
        "deliver": counters.get("delivered", 0),
        "deliver_no_ack": counters.get("delivered_no_ack", 0),
        "get": counters.get("get", 0),
        "get_no_ack": counters.get("get_no_ack", 0),
        "get_empty": counters.get("get_empty", 0),
        "redeliver": counters.get("redelivered", 0),
        "ack": counters.get("acknowledged", 0),
        "return_unroutable": counters.get("returned_unroutable", 0),
        "drop_unroutable": counters.get("dropped_unroutable", 0),
    }
    stats["deliver_get"] = sum(
        stats[name] for name in ("deliver", "deliver_no_ack", "get", "get_no_ack")
    )
    return stats


def delivered_stats(counters: JsonObject) -> dict[str, int]:
    """Returns what a channel got from a queue under the API's names. Acknowledgements are counted
    by channel alone."""
    names = ("deliver", "deliver_no_ack", "get", "get_no_ack", "get_empty", "redeliver")
    stats = message_stats({name: count_in(counters, name) for name in counters})
    return {name: stats[name] for name in (*names, "deliver_get")}


def queue_stats(totals: JsonObject) -> dict[str, int]:
    """Totals of a queue under the API's names. `deliver` counts what `basic.get` took as well: a
    queue does not tell them apart."""
    stats = {
        QUEUE_COUNTERS.get(name, name): value
        for name, value in totals.items()
        if isinstance(value, int) and name not in QUEUE_GAUGES
    }
    if "deliver_get" in stats:
        stats["deliver"] = stats["deliver_get"]
    return stats


def _single_active(consumers: object) -> str | None:
    """Returns the tag of the single active consumer among a queue's consumers."""
    rows = consumers if isinstance(consumers, list) else []
    tags = (row["consumer_tag"] for row in rows if row.get("activity_status") == SINGLE_ACTIVE)
    return next(tags, None)


def exchange_types() -> list[JsonObject]:
    """Returns the exchange types that are served."""
    return [
        {"name": kind.value, "description": kind.description, "enabled": True}
        for kind in ExchangeType
    ]


async def overview(
    broker: Broker, rates: Rates, visible: set[str], ranges: Ranges = NO_RANGES
) -> JsonObject:
    """Returns the first page: versions, totals, listeners."""
    nodes = await broker.cluster.list_nodes()
    rows = [row for row in await queues(broker, rates) if row["vhost"] in visible]
    stats: dict[str, int] = {}
    for node in nodes.values():
        for name, value in message_stats(node.get("counters", {})).items():
            stats[name] = stats.get(name, 0) + value
    totals = {name: sum(count_in(row, name) for row in rows) for name in MESSAGE_COUNTS}
    channels = await broker.cluster.list_channels()
    return {
        "management_version": COMPATIBLE_VERSION,
        "rates_mode": "basic",
        "product_name": "ConvoyMQ",
        "product_version": __version__,
        "rabbitmq_version": COMPATIBLE_VERSION,
        "cluster_name": broker.cluster_name,
        "erlang_version": "",
        "erlang_full_version": "",
        "node": broker.node_name,
        "exchange_types": exchange_types(),
        "message_stats": rates.with_details("overview", stats, ranges.messages),
        "churn_rates": churn(nodes, rates, ranges.messages),
        # Of other virtual hosts they are other ones.
        "queue_totals": rates.with_details(
            f"totals.{sorted(visible)}", totals, ranges.lengths, falls=True
        ),
        "object_totals": {
            "connections": sum(node.get("connections", 0) for node in nodes.values()),
            "channels": len(channels),
            "exchanges": sum(
                1 for vhost in broker.tree.vhosts.all(visible) for _ in vhost.topology.exchanges()
            ),
            "queues": len(rows),
            "consumers": sum(count_in(row, "consumers") for row in rows),
        },
        "listeners": listeners(broker),
        "contexts": contexts(broker),
        "statistics_db_event_queue": 0,
        "default_queue_type": broker.declarations.default_queue_type.value,
        "rabbitmq_compatibility": broker.settings.compatibility,
        "disable_stats": False,
        "enable_queue_totals": False,
        "is_op_policy_updating_enabled": False,
        "sample_retention_policies": {"global": [], "basic": [], "detailed": []},
    }


def churn(nodes: dict[str, JsonObject], rates: Rates, wanted: Range | None) -> JsonObject:
    """Returns how often connections, channels and queues come and go."""
    made: dict[str, int] = {}
    for api_name, counter in (
        ("connection_created", "connections_opened"),
        ("connection_closed", "connections_closed"),
        ("channel_created", "channels_opened"),
        ("channel_closed", "channels_closed"),
        ("queue_declared", "queues_declared"),
        ("queue_created", "queues_created"),
        ("queue_deleted", "queues_deleted"),
    ):
        made[api_name] = sum(count_in(part(n, "counters"), counter) for n in nodes.values())
    return rates.with_details("churn", made, wanted)


def listeners(broker: Broker) -> list[JsonObject]:
    """Returns the listeners of the nodes, as they announced them."""
    names = {"link": "clustering"}
    names |= {listener.name: listener.protocol for listener in listeners_of(Config())}
    rows = []
    for node in broker.tree.nodes.all():
        for key, protocol in names.items():
            address = node.addresses.get(key)
            if address:
                host, _, port = address.rpartition(":")
                rows.append(
                    {
                        "node": node.name,
                        "protocol": protocol,
                        "ip_address": host.strip("[]"),
                        "port": int(port) if port.isascii() and port.isdecimal() else 0,
                    }
                )
    return rows


def contexts(broker: Broker, node: str | None = None) -> list[JsonObject]:
    """Returns the HTTP servers of all nodes, or of one."""
    words = {"http": "RabbitMQ Management", "http/prometheus": "RabbitMQ Prometheus"}
    return [
        {
            "node": row["node"],
            "description": words[row["protocol"]],
            "path": "/" if row["protocol"] == "http" else "/metrics",
            "ip": row["ip_address"],
            "port": str(row["port"]),
            "ssl_opts": [],
        }
        for row in listeners(broker)
        if row["protocol"] in words and node in (None, row["node"])
    ]


async def nodes(broker: Broker, rates: Rates, ranges: Ranges = NO_RANGES) -> list[JsonObject]:
    """Returns all nodes of the cluster, those that are down too."""
    known = await broker.cluster.list_nodes()
    drained = broker.tree.nodes.drained()
    rows = []
    for record in broker.tree.nodes.all():
        live = known.get(record.name)
        row: JsonObject = {
            "name": record.name,
            "type": "disc",
            "running": live is not None,
            "id": record.id,
            "addresses": record.addresses,
            "being_drained": record.id in drained,
            "partitions": [],
            "contexts": contexts(broker, record.name),
            "cluster_links": [],
            "applications": [],
            "auth_mechanisms": [{"name": "PLAIN", "description": "", "enabled": True}],
            "exchange_types": exchange_types(),
            "enabled_plugins": [],
            "rates_mode": "basic",
            "net_ticktime": 60,
            "release": record.release,
            "supported_versions": {k: list(v) for k, v in record.supports.items()},
        }
        if live is not None:
            row |= {key: value for key, value in live.items() if key != "counters"}
            row["sockets_used"] = live.get("connections", 0)
            row["sockets_total"] = live.get("fd_total", 0)
            used = {name: count_in(row, name) for name in NODE_GAUGES if name in row}
            row |= rates.with_details(f"node.{record.name}", used, ranges.node, falls=True)
        rows.append(row)
    return rows


def connection_row(row: JsonObject, rates: Rates, ranges: Ranges = NO_RANGES) -> JsonObject:
    """Returns one connection, from what its node says of it."""
    key = f"connection.{row.get('node')}.{row.get('name')}.{row.get('connected_at')}"
    data: dict[str, float] = {
        name: count_in(row, name) for name in ("recv_oct", "send_oct") if name in row
    }
    return row | rates.with_details(key, data, ranges.data)


def channel_row(row: JsonObject, rates: Rates, ranges: Ranges = NO_RANGES) -> JsonObject:
    """Returns one channel, from what its node says of it. Nodes of 0.3.0 count nothing by
    channel."""
    counters = row.pop("counters", None)
    row.pop("published_to", None)
    row.pop("delivered_from", None)
    if isinstance(counters, dict):
        key = f"channel.{row.get('node')}.{row.get('name')}"
        row["message_stats"] = rates.with_details(key, message_stats(counters), ranges.messages)
    return row


async def vhosts(
    broker: Broker, rates: Rates, visible: set[str], ranges: Ranges = NO_RANGES
) -> list[JsonObject]:
    """Virtual hosts with what they hold."""
    rows = await queues(broker, rates)
    running = {broker.node_name_of(node): "running" for node in broker.running_nodes()}
    made = []
    for vhost in broker.tree.vhosts.all(visible):
        own = [row for row in rows if row["vhost"] == vhost.name]
        held = {name: sum(count_in(row, name) for row in own) for name in MESSAGE_COUNTS}
        made.append(
            {
                **vhost_row(broker, vhost),
                "cluster_state": running,
                **rates.with_details(f"vhost.{vhost.name}", held, ranges.lengths, falls=True),
            }
        )
    return made


def vhost_row(broker: Broker, vhost: Vhost) -> JsonObject:
    """Returns a virtual host's own properties."""
    metadata: JsonObject = {
        "description": vhost.description,
        "tags": list(vhost.tags),
        "default_queue_type": vhost.default_queue_type or "undefined",
        "rabbitmq_compatibility": vhost.compatibility or "undefined",
    }
    tracing = vhost.name in broker.firehose.vhosts
    return {"name": vhost.name, **metadata, "metadata": metadata, "tracing": tracing}


async def queues(broker: Broker, rates: Rates, ranges: Ranges = NO_RANGES) -> list[JsonObject]:
    """Returns all queues, with what their leading nodes say of them."""
    live = await broker.cluster.queue_infos()
    made = []
    async for record in in_slices(list(broker.tree.queues.all())):
        row = queue_row(broker, record, live.get(record.group), rates, ranges)
        if row is not None:
            made.append(row)
    return made


def queue_row(
    broker: Broker,
    record: QueueRecord,
    live: JsonObject | None,
    rates: Rates,
    ranges: Ranges = NO_RANGES,
) -> JsonObject | None:
    """Returns one queue; None when it is gone.

    The state of a queue with several members is that of its `QueueLocation`; a classic queue is
    `down` while its node is, and `crashed` after an error of its own, until it is opened anew.
    """
    vhost = broker.tree.vhosts.find(record.vhost)
    declared = vhost.topology.find_queue(record.name) if vhost is not None else None
    if vhost is None or declared is None:
        return None
    row: JsonObject = {
        "name": record.name,
        "vhost": record.vhost,
        "type": record.type.value,
        "durable": declared.durable,
        "auto_delete": declared.auto_delete,
        "exclusive": declared.exclusive_owner is not None,
        "arguments": declared.arguments.to_plain(),
        "ignored_arguments": ignored_of_queue(record.type.value, declared.arguments),
        **_release_shown(record),
        "node": broker.node_name_of(record.home),
        **_policies_shown(vhost.policies.for_queue(declared)),
        **_settings_shown(declared, vhost.policies),
        "state": "down",
    }
    facts = dict(live or {})
    leader = facts.get("leader")
    assert leader is None or isinstance(leader, int)
    location = broker.locations.locate(record, leader)
    if location is not None:
        row["members"] = [broker.node_name_of(node) for node in location.members]
        row["online"] = [broker.node_name_of(node) for node in location.online]
        row["state"] = location.state
        facts.pop("state", None)
    if live is None:
        return row
    stopped = facts.pop("stopped_members", {})
    assert isinstance(stopped, dict)
    row["stopped"] = {broker.node_name_of(node): reason for node, reason in stopped.items()}
    totals = facts.pop("totals", None) or facts.pop("message_stats", None) or {}
    assert isinstance(totals, dict)
    if facts.get("single_active"):
        facts["single_active_consumer_tag"] = _single_active(facts.get("consumer_details"))
    for hidden in ("leader", "members", "online", "group", "consumer_details", "vhost", "name"):
        facts.pop(hidden, None)
    row |= {key: value for key, value in facts.items() if value is not None}
    if "sync_messages" in facts:
        row["state"] = "syncing"
    row["type"] = record.type.value
    if location is not None and leader is not None:
        row["node"] = row["leader"] = broker.node_name_of(leader)
    row.setdefault("messages", 0)
    key = f"queue.{record.group}"
    row["message_stats"] = rates.with_details(key, queue_stats(totals), ranges.messages)
    held = {name: count_in(row, name) for name in MESSAGE_COUNTS}
    return row | rates.with_details(f"{key}.messages", held, ranges.lengths, falls=True)


def _release_shown(record: QueueRecord) -> JsonObject:
    """Returns the release of RabbitMQ whose rules a queue follows, of types for which releases
    differ."""
    if record.type is not QueueType.QUORUM:
        return {}
    return {"rabbitmq_compatibility": record.compatibility or RELEASE_4_3}


def _settings_shown(queue: Queue, policies: Policies) -> JsonObject:
    """Returns the settings that act in a queue."""
    settings, warning = settings_in_force(queue, policies)
    return {"effective_settings": settings, **({"overflow_warning": warning} if warning else {})}


def _policies_shown(chosen: Chosen) -> JsonObject:
    policy, operator = chosen
    return {
        "policy": policy.name if policy is not None else None,
        "operator_policy": operator.name if operator is not None else None,
        "effective_policy_definition": dict(chosen.definition),
    }


def exchange_row(vhost: Vhost, exchange: Exchange) -> JsonObject:
    """Returns one exchange."""
    return {
        "name": exchange.name,
        "vhost": vhost.name,
        "type": exchange.type.value,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": exchange.arguments.to_plain(),
        "ignored_arguments": ignored_of_exchange(exchange.type.value, exchange.arguments),
        **_policies_shown(vhost.policies.for_exchange(exchange.name)),
        "user_who_performed_action": "",
    }


def exchanges(broker: Broker, visible: set[str]) -> list[JsonObject]:
    """Returns all exchanges."""
    return [
        exchange_row(vhost, exchange)
        for vhost in broker.tree.vhosts.all(visible)
        for exchange in vhost.topology.exchanges()
    ]


def exchange_stats(
    vhost: str,
    exchange: str,
    published: Mapping[tuple[str, str], JsonObject],
    rates: Rates,
    ranges: Ranges,
) -> JsonObject:
    """Returns the `message_stats` of an exchange; without any while nothing was published to it.
    `published`: see `ClusterQueries.published`."""
    counts = published.get((vhost, exchange))
    if counts is None:
        return {}
    out = sum(count_in(part(counts, "out"), queue) for queue in part(counts, "out"))
    stats = {"publish_in": count_in(counts, "in"), "publish_out": out}
    key = f"exchange.{vhost}/{exchange}"
    return {"message_stats": rates.with_details(key, stats, ranges.messages)}


def detailed(key: str, what: JsonObject, stats: Mapping[str, int], rates: Rates) -> JsonObject:
    """Returns a row of an object's detailed stats: what it exchanged messages with, and how
    many."""
    return {**what, "stats": rates.with_details(key, stats)}


def channel_details(row: JsonObject) -> JsonObject:
    """Returns the fields by which other rows describe a channel."""
    connection = part(row, "connection_details")
    return {
        "name": row.get("name"),
        "number": row.get("number"),
        "node": row.get("node"),
        "user": row.get("user"),
        "connection_name": connection.get("name"),
        "peer_host": connection.get("peer_host"),
        "peer_port": connection.get("peer_port"),
    }


def properties_key(routing_key: str, arguments: Table) -> str:
    """Returns the name of a binding in paths: `~`, the routing key, or the key and a hash."""
    if not routing_key and not arguments:
        return "~"
    if not arguments:
        return quote(routing_key, safe="")
    import zlib

    return f"{quote(routing_key, safe='')}~{zlib.crc32(arguments.encoded):08x}"


def binding_row(vhost: str, binding: Binding) -> JsonObject:
    """Returns one binding."""
    return {
        "source": binding.source,
        "vhost": vhost,
        "destination": binding.destination.name,
        "destination_type": binding.destination.kind.value,
        "routing_key": binding.routing_key,
        "arguments": binding.arguments.to_plain(),
        "properties_key": properties_key(binding.routing_key, binding.arguments),
    }


def bindings(broker: Broker, visible: set[str]) -> list[JsonObject]:
    """Returns all bindings, the implicit ones of the default exchange included."""
    rows = []
    for vhost in broker.tree.vhosts.all(visible):
        rows += [default_binding(vhost.name, name) for name in sorted(vhost.queues)]
        rows += [binding_row(vhost.name, binding) for binding in vhost.topology.bindings()]
    return rows


def bindings_at(broker: Broker, vhost: str, kind: str, name: str) -> list[JsonObject]:
    """Returns the bindings of one destination."""
    return [
        row
        for row in bindings(broker, {vhost})
        if row["destination_type"] == kind and row["destination"] == name
    ]


def default_binding(vhost: str, queue: str) -> JsonObject:
    """Returns the implicit binding of a queue to the default exchange."""
    return {
        "source": "",
        "vhost": vhost,
        "destination": queue,
        "destination_type": DestinationKind.QUEUE.value,
        "routing_key": queue,
        "arguments": {},
        "properties_key": quote(queue, safe=""),
    }


def user_row(user: User, limits: Mapping[str, int] | None = None) -> JsonObject:
    """Returns one user; the hash is shown, as definitions need it."""
    return {
        "name": user.name,
        "password_hash": user.password_hash,
        "hashing_algorithm": user.algorithm,
        "tags": list(user.tags),
        "limits": dict(limits or {}),
    }


def permissions(broker: Broker) -> list[JsonObject]:
    """Returns all permissions."""
    return [
        {
            "user": user,
            "vhost": vhost,
            "configure": rules.configure,
            "write": rules.write,
            "read": rules.read,
        }
        for (user, vhost), rules in broker.tree.users.permissions()
    ]


def topic_permissions(broker: Broker) -> list[JsonObject]:
    """Returns all topic permissions."""
    return [
        {
            "user": user,
            "vhost": vhost,
            "exchange": exchange,
            "write": rule.write,
            "read": rule.read,
        }
        for (user, vhost), rules in broker.tree.users.topic_permissions()
        for exchange, rule in sorted(rules.items())
    ]


def visible_rows(rows: Iterable[JsonObject], visible: set[str]) -> list[JsonObject]:
    """Returns the rows of virtual hosts that the user may see."""
    return [row for row in rows if row.get("vhost") in visible]
