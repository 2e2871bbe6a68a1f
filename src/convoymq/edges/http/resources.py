"""The rows of the HTTP API: what exists and how it does, under RabbitMQ's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

from convoymq import __version__
from convoymq.broker.cluster_queries import Known, KnownQueue
from convoymq.broker.facade import Broker
from convoymq.broker.queue_facts import settings_in_force
from convoymq.broker.read_model import decoded, figures_in, lengths_in
from convoymq.broker.records import QueueRecord, User, Vhost
from convoymq.broker.tracks import TIERS, Series
from convoymq.edges.configuration import listeners as listeners_of
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.lists import NEEDS_ROW
from convoymq.edges.http.rates import NO_RANGES, Range, Ranges, Rates
from convoymq.model.compatibility import COMPATIBLE_VERSION, RELEASE_4_3
from convoymq.model.config import Config
from convoymq.model.json import JsonObject
from convoymq.model.tables import Table
from convoymq.queues.interface import FIGURES
from convoymq.routing.ignored_arguments import ignored_of_exchange, ignored_of_queue
from convoymq.routing.policies import Chosen, Policies
from convoymq.routing.types import (
    RESERVED_PREFIX,
    Binding,
    DestinationKind,
    Exchange,
    ExchangeType,
    Queue,
    QueueType,
)

DECLARED_BY = "user_who_performed_action"
"""Field of a queue or an exchange: the user that declared it."""
INTERNAL_USER = "rmq-internal"
"""Name in `DECLARED_BY` for what the broker declared itself."""

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


MESSAGE_STATS = {
    "publish": "published",
    "confirm": "confirmed",
    "deliver": "delivered",
    "deliver_no_ack": "delivered_no_ack",
    "get": "get",
    "get_no_ack": "get_no_ack",
    "get_empty": "get_empty",
    "redeliver": "redelivered",
    "ack": "acknowledged",
    "return_unroutable": "returned_unroutable",
    "drop_unroutable": "dropped_unroutable",
}
"""Names of the API -> those of a node's counters."""


def message_stats(counters: JsonObject) -> dict[str, int]:
    """Totals of a node under the API's names."""
    stats = {name: count_in(counters, counter) for name, counter in MESSAGE_STATS.items()}
    stats["deliver_get"] = sum(
        stats[name] for name in ("deliver", "deliver_no_ack", "get", "get_no_ack")
    )
    return stats


def delivered_stats(queue: str, channel: JsonObject) -> dict[str, int]:
    """Returns what a channel got from a queue under the API's names. Acknowledgements are counted
    by channel alone."""
    counters = part(part(channel, "delivered_from"), queue)
    names = ("deliver", "deliver_no_ack", "get", "get_no_ack", "get_empty", "redeliver")
    stats = message_stats(counters)
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
        **await overview_numbers(broker, rates, visible, ranges),
        "listeners": listeners(broker),
        "contexts": contexts(broker),
        "statistics_db_event_queue": 0,
        "default_queue_type": broker.declarations.default_queue_type.value,
        "rabbitmq_compatibility": broker.settings.compatibility,
        "disable_stats": False,
        "enable_queue_totals": False,
        "is_op_policy_updating_enabled": False,
        "sample_retention_policies": {
            name: [step_ms * size // 1000 for step_ms, size in TIERS]
            for name in ("global", "basic", "detailed")
        },
    }


async def overview_numbers(
    broker: Broker, rates: Rates, visible: set[str], ranges: Ranges = NO_RANGES
) -> JsonObject:
    """Returns the parts of the first page that change."""
    nodes = (await broker.cluster.nodes()).values()
    stats: Counter[str] = Counter()
    for known in nodes:
        stats.update(message_stats(part(known.row, "counters")))
    published = [Series(each.track, _message_stats_in) for known in nodes for each in known.series]
    totals, consumers = await queue_totals(broker, rates, visible, ranges)
    seen = list(broker.tree.vhosts.all(visible))
    return {
        "message_stats": rates.with_details(published, stats, ranges.messages),
        "churn_rates": churn(nodes, rates, ranges.messages),
        "queue_totals": totals,
        "object_totals": {
            "connections": sum(count_in(known.row, "connections") for known in nodes),
            "channels": sum(count_in(known.row, "channels") for known in nodes),
            "exchanges": sum(1 for vhost in seen for _ in vhost.topology.exchanges()),
            "queues": sum(len(vhost.queues) for vhost in seen),
            "consumers": consumers,
        },
    }


async def queue_totals(
    broker: Broker, rates: Rates, vhosts: set[str], ranges: Ranges
) -> tuple[JsonObject, int]:
    """Returns the messages in the queues of virtual hosts, and the number of their consumers."""
    await broker.cluster.sampler.read_figures()
    totals = broker.cluster.totals(vhosts)
    held = Counter(dict.fromkeys((*MESSAGE_COUNTS, "consumers"), 0))
    for each in totals:
        held.update(_counts_in(each.track.data))
    consumers = held.pop("consumers")
    series = [Series(each.track, _counts_in) for each in totals]
    return rates.with_details(series, held, ranges.lengths, falls=True), consumers


def _counts_in(data: bytes) -> dict[str, int]:
    """Returns lengths and consumers from packed figures."""
    row = lengths_in(data)
    return {name: count_in(row, name) for name in (*MESSAGE_COUNTS, "consumers")}


def _message_stats_in(data: bytes) -> Mapping[str, float]:
    return message_stats(part(decoded(data), "counters"))


CHURN = {
    "connection_created": "connections_opened",
    "connection_closed": "connections_closed",
    "channel_created": "channels_opened",
    "channel_closed": "channels_closed",
    "queue_declared": "queues_declared",
    "queue_created": "queues_created",
    "queue_deleted": "queues_deleted",
}


def _churn(row: JsonObject) -> dict[str, int]:
    counters = part(row, "counters")
    return {name: count_in(counters, counter) for name, counter in CHURN.items()}


def churn(nodes: Iterable[Known], rates: Rates, wanted: Range | None) -> JsonObject:
    """Returns how often connections, channels and queues come and go."""
    made: Counter[str] = Counter(dict.fromkeys(CHURN, 0))
    series = []
    for known in nodes:
        made.update(_churn(known.row))
        series += [Series(each.track, lambda data: _churn(decoded(data))) for each in known.series]
    return rates.with_details(series, made, wanted)


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
    known = await broker.cluster.nodes()
    drained = broker.tree.nodes.drained()
    rows = []
    for record in broker.tree.nodes.all():
        live = known.get(record.name)
        row: JsonObject = {
            "name": record.name,
            "type": "disc",
            "running": live is not None,
            "id": record.id,
            "machine": record.machine,
            "process": record.process,
            "zone": record.zone,
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
            row |= {key: value for key, value in live.row.items() if key != "counters"}
            row["sockets_used"] = live.row.get("connections", 0)
            row["sockets_total"] = live.row.get("fd_total", 0)
            series = [Series(each.track, _gauges_in) for each in live.series]
            row |= rates.with_details(series, _gauges(row), ranges.node, falls=True)
        rows.append(row)
    return rows


def _gauges(row: JsonObject) -> dict[str, int]:
    return {name: count_in(row, name) for name in NODE_GAUGES if name in row}


def _gauges_in(data: bytes) -> Mapping[str, float]:
    row = decoded(data)
    return _gauges({**row, "sockets_used": row.get("connections", 0)})


def _octets(row: JsonObject) -> dict[str, float]:
    return {name: count_in(row, name) for name in ("recv_oct", "send_oct") if name in row}


def connection_row(known: Known, rates: Rates, ranges: Ranges = NO_RANGES) -> JsonObject:
    """Returns one connection, from what its node says of it."""
    series = [Series(each.track, lambda data: _octets(decoded(data))) for each in known.series]
    return known.row | rates.with_details(series, _octets(known.row), ranges.data)


def channel_row(known: Known, rates: Rates, ranges: Ranges = NO_RANGES) -> JsonObject:
    """Returns one channel, from what its node says of it. Nodes of 0.3.0 count nothing by
    channel."""
    row = dict(known.row)
    counters = row.pop("counters", None)
    row.pop("published_to", None)
    row.pop("delivered_from", None)
    if isinstance(counters, dict):
        series = [Series(each.track, _message_stats_in) for each in known.series]
        row["message_stats"] = rates.with_details(series, message_stats(counters), ranges.messages)
    return row


async def vhosts(
    broker: Broker, rates: Rates, visible: set[str], ranges: Ranges = NO_RANGES
) -> list[JsonObject]:
    """Virtual hosts with what they hold."""
    running = {broker.node_name_of(node): "running" for node in broker.running_nodes()}
    made = []
    for vhost in broker.tree.vhosts.all(visible):
        held, _ = await queue_totals(broker, rates, {vhost.name}, ranges)
        if broker.tree.vhosts.find(vhost.name) is None:
            # It went away meanwhile.
            continue
        made.append({**vhost_row(broker, vhost), "cluster_state": running, **held})
    return made


def vhost_row(broker: Broker, vhost: Vhost) -> JsonObject:
    """Returns a virtual host's own properties."""
    metadata: JsonObject = {
        "description": vhost.description,
        "tags": list(vhost.tags),
        "default_queue_type": vhost.default_queue_type or "undefined",
        "rabbitmq_compatibility": vhost.compatibility or "undefined",
        "protected_from_deletion": vhost.name in broker.tree.vhosts.protected(),
    }
    tracing = vhost.name in broker.firehose.vhosts
    return {"name": vhost.name, **metadata, "metadata": metadata, "tracing": tracing}


SUMMED = {name: (place,) for place, name in enumerate(FIGURES[: FIGURES.index("publish")])} | {
    "messages": (0, 1),
    "message_bytes": (2, 3),
}
"""Field of a queue's row -> places of the figures whose sum it is."""


def queue_value(broker: Broker, record: QueueRecord, path: str) -> object:
    """Returns a field of a queue's row without making the row; `NEEDS_ROW` when that is not
    possible."""
    match path:
        case "name" | "vhost":
            return getattr(record, path)
        case "type":
            return record.type.value
        case "user_who_performed_action":
            declared = broker.tree.vhosts.get(record.vhost).declared(record)
            return declared.user if declared is not None else ""
    places = SUMMED.get(path)
    if places is None:
        return NEEDS_ROW
    figures = broker.cluster.figures_of(record)
    return 0 if figures is None else sum(figures[place] for place in places)


def _declared_shown(record: QueueRecord, declared: Queue) -> JsonObject:
    """Returns what a queue was declared as."""
    return {
        "name": record.name,
        "vhost": record.vhost,
        "type": record.type.value,
        "durable": declared.durable,
        "auto_delete": declared.auto_delete,
        "exclusive": declared.exclusive_owner is not None,
        "arguments": declared.arguments.to_plain(),
        DECLARED_BY: declared.user,
    }


def plain_queue_row(broker: Broker, record: QueueRecord, *, with_totals: bool) -> JsonObject | None:
    """Returns one queue without statistics: what it is, and its lengths; None when it is gone."""
    vhost = broker.tree.vhosts.find(record.vhost)
    declared = vhost.topology.find_queue(record.name) if vhost is not None else None
    if declared is None:
        return None
    leader = broker.locations.leader_of(record)
    location = broker.locations.locate(record, leader)
    row: JsonObject = {
        **_declared_shown(record, declared),
        "node": broker.node_name_of(record.home if leader is None else leader),
    }
    if location is not None:
        row["state"] = location.state
    else:
        row["state"] = "running" if broker.is_up(record.home) else "down"
    if with_totals:
        row |= {name: queue_value(broker, record, name) for name in MESSAGE_COUNTS}
    return row


def queue_row(
    broker: Broker,
    record: QueueRecord,
    known: KnownQueue | None,
    rates: Rates,
    ranges: Ranges = NO_RANGES,
) -> JsonObject | None:
    """Returns one queue; None when it is gone.

    The state of a queue with several members is that of its `QueueLocation`; a classic queue is
    `down` while its node is, and `crashed` after an error of its own, until it is opened anew.
    """
    vhost = broker.tree.vhosts.find(record.vhost)
    if vhost is None or (declared := vhost.topology.find_queue(record.name)) is None:
        return None
    row: JsonObject = {
        **_declared_shown(record, declared),
        "ignored_arguments": ignored_of_queue(record.type.value, declared.arguments),
        **_release_shown(record),
        "node": broker.node_name_of(record.home),
        **_policies_shown(vhost.policies.for_queue(declared)),
        **_settings_shown(declared, vhost.policies),
        "state": "down",
    }
    facts = dict(known.row if known is not None else {})
    leader = facts.get("leader")
    if "stale_ms" in facts:
        # A dead master synchronises nobody.
        facts = {k: v for k, v in facts.items() if k not in ("state", "sync_messages")}
    if leader is None or "stale_ms" in facts:
        leader = broker.locations.leader_of(record)
    assert leader is None or isinstance(leader, int)
    location = broker.locations.locate(record, leader)
    if location is not None:
        row["members"] = [broker.node_name_of(node) for node in location.members]
        row["online"] = [broker.node_name_of(node) for node in location.online]
        row["state"] = location.state
        facts.pop("state", None)
    if known is None:
        return row
    stopped = facts.pop("stopped_members", {})
    assert isinstance(stopped, dict)
    row["stopped"] = {broker.node_name_of(node): reason for node, reason in stopped.items()}
    totals = facts.pop("totals", None) or facts.pop("message_stats", None) or {}
    assert isinstance(totals, dict)
    counters = facts.pop("counters", {})
    assert isinstance(counters, dict)
    for hidden in ("leader", "members", "online", "group", "consumer_details", "vhost", "name"):
        facts.pop(hidden, None)
    row |= {key: value for key, value in facts.items() if value is not None}
    if "sync_messages" in facts:
        row["state"] = "syncing"
    row["type"] = record.type.value
    if location is not None and leader is not None:
        row["node"] = row["leader"] = broker.node_name_of(leader)
    row.setdefault("messages", 0)
    stats = queue_stats(totals)
    stats |= {name: count_in(counters, name) for name in stats if name in counters}
    series = [] if known.figures is None else [Series(known.figures, figures_in)]
    counted = series if known.facts is None else [*series, Series(known.facts, _other_stats_in)]
    row["message_stats"] = rates.with_details(counted, stats, ranges.messages)
    held = {name: count_in(row, name) for name in MESSAGE_COUNTS}
    lengths = [Series(each.track, _counts_in) for each in series]
    return row | rates.with_details(lengths, held, ranges.lengths, falls=True)


def _other_stats_in(data: bytes) -> Mapping[str, float]:
    """Returns the counters of a queue that are not among its figures."""
    row = decoded(data)
    stats = queue_stats(part(row, "totals") or part(row, "message_stats"))
    return {name: value for name, value in stats.items() if name not in FIGURES}


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
    predeclared = not exchange.name or exchange.name.startswith(RESERVED_PREFIX)
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
        DECLARED_BY: exchange.user or (INTERNAL_USER if predeclared else ""),
    }


def exchanges(broker: Broker, visible: set[str]) -> list[JsonObject]:
    """Returns all exchanges."""
    return [
        exchange_row(vhost, exchange)
        for vhost in broker.tree.vhosts.all(visible)
        for exchange in vhost.topology.exchanges()
    ]


def exchange_stats(known: Sequence[Known], rates: Rates, ranges: Ranges) -> JsonObject:
    """Returns the `message_stats` of an exchange; without any while nothing was published to it."""
    if not known:
        return {}
    stats: Counter[str] = Counter()
    series = []
    for found in known:
        stats.update(_routed(found.row))
        series += [Series(each.track, lambda data: _routed(decoded(data))) for each in found.series]
    return {"message_stats": rates.with_details(series, stats, ranges.messages)}


def _routed(row: JsonObject) -> dict[str, int]:
    return {"publish_in": count_in(row, "in"), "publish_out": count_in(row, "out")}


def detailed(
    what: JsonObject,
    row: JsonObject,
    numbers: Callable[[JsonObject], Mapping[str, int]],
    rates: Rates,
    series: Iterable[Series] = (),
) -> JsonObject:
    """Returns a row of an object's detailed stats: what it exchanged messages with, and how
    many. `numbers`: reads them from the object's row, which the series have over time."""
    found = [Series(each.track, lambda data: numbers(decoded(data))) for each in series]
    return {**what, "stats": rates.with_details(found, numbers(row))}


def flow(
    rates: Rates, key: tuple[str, ...], counters: JsonObject
) -> Iterator[tuple[str, JsonObject]]:
    """Yields by name the stats of what an object got messages from, or gave them to."""
    found = rates.requested(key, counters)
    for name, messages in counters.items():
        yield name, {"publish": messages, "publish_details": {"rate": found.get(name, 0.0)}}


def channel_details(row: JsonObject) -> JsonObject:
    """Returns the fields by which other rows describe a channel."""
    connection = part(row, "connection_details")
    return {
        "name": row.get("name"),
        "number": row.get("number"),
        "node": row.get("node"),
        "user": row.get("user"),
        "connection_name": connection.get("name"),
        "user_provided_name": connection.get("user_provided_name"),
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
