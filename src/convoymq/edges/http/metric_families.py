"""Families of metrics, as RabbitMQ groups them for `/metrics/detailed`, and the objects that they
are about.

| request                | lines                                                                |
|------------------------|----------------------------------------------------------------------|
| `/metrics`             | sums over the objects of this node                                   |
| `/metrics/per-object`  | one for each object                                                  |
| `/metrics/detailed`    | one for each object, of the families that are asked for: `detailed_` |

Families of the cluster (`CLUSTER`) are in `/metrics/detailed` only: all nodes give the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from starlette.datastructures import QueryParams

from convoymq.broker.facade import Broker
from convoymq.broker.records import QueueRecord
from convoymq.broker.replica_views import ReplicaView
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.exposition import Text
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.resources import queue_stats
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject
from convoymq.model.near_names import hint
from convoymq.model.patterns import Pattern, compile_pattern
from convoymq.model.slices import in_slices

QUEUE_FILTER_MAX = 2000
"""Characters of a filter for queues."""

Labels: TypeAlias = dict[str, str]
Object: TypeAlias = tuple[Labels, Mapping[str, object]]


class Sample(NamedTuple):
    """A metric, and the field of its object's row that has the value. Objects without the field
    have no line."""

    name: str
    field: str
    kind: str = "gauge"
    is_max: bool = False
    """Over several objects the largest is given, not the sum."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Objects that a request asks for."""

    vhosts: frozenset[str] | None = None
    """None: of all virtual hosts."""
    queue: Pattern | None = None
    expression: str = ""
    """Text of `queue`."""

    def as_row(self) -> list[object]:
        """Returns it for another process: the arguments of `filter_of`."""
        vhosts = None if self.vhosts is None else sorted(self.vhosts)
        return [vhosts, self.expression]

    def wants(self, vhost: str, queue: str | None = None) -> bool:
        """Returns whether an object of a virtual host, and of a queue, is asked for."""
        if self.vhosts is not None and vhost not in self.vhosts:
            return False
        return queue is None or self.queue is None or self.queue.search(queue)


ALL = Filter()
Source: TypeAlias = Callable[[Broker, Filter], Iterator[Object]]


def _counter(name: str, field: str | None = None) -> Sample:
    return Sample(f"{name}_total", field or name, "counter")


CHURN = tuple(
    _counter(name)
    for name in ("connections_opened", "connections_closed", "channels_opened", "channels_closed",
                 "queues_declared", "queues_created", "queues_deleted")
)  # fmt: skip
DELIVERIES = (
    _counter("get_ack", "get"), _counter("get", "get_no_ack"),
    _counter("messages_delivered_ack", "delivered"),
    _counter("messages_delivered", "delivered_no_ack"),
    _counter("messages_redelivered", "redelivered"),
    _counter("get_empty"),
)  # fmt: skip
RAFT = (
    Sample("raft_term", "term"),
    Sample("raft_commit_index", "commit_index"),
    Sample("raft_last_applied", "last_applied"),
    Sample("raft_last_written_index", "written_index"),
    Sample("raft_snapshot_index", "snapshot_index"),
    Sample("raft_num_segments", "segments"),
    Sample("raft_commit_latency_seconds", "commit_latency_s", is_max=True),
    # Names before RabbitMQ 4.2, which dashboards of 4.1 ask for.
    Sample("raft_term_total", "term"),
    Sample("raft_log_commit_index", "commit_index"),
    Sample("raft_log_last_applied_index", "last_applied"),
    Sample("raft_log_last_written_index", "written_index"),
    Sample("raft_log_snapshot_index", "snapshot_index"),
    Sample("raft_entry_commit_latency_seconds", "commit_latency_s", is_max=True),
)
CONSUMERS = Sample("queue_consumers", "consumers")
QUEUE = (
    CONSUMERS,
    Sample("queue_consumer_capacity", "consumer_capacity"),
    Sample("queue_consumer_utilisation", "consumer_utilisation"),
    Sample("queue_process_memory_bytes", "memory"),
    Sample("queue_messages_ram", "messages_ram"),
    Sample("queue_messages_ram_bytes", "message_bytes_ram"),
    Sample("queue_messages_ready_ram", "messages_ready_ram"),
    Sample("queue_messages_unacked_ram", "messages_unacknowledged_ram"),
    Sample("queue_messages_paged_out", "messages_paged_out"),
    Sample("queue_messages_paged_out_bytes", "message_bytes_paged_out"),
    Sample("queue_messages_bytes", "message_bytes"),
    Sample("queue_messages_ready_bytes", "message_bytes_ready"),
    Sample("queue_messages_unacked_bytes", "message_bytes_unacknowledged"),
    Sample("stream_segments", "segments"),
    Sample("convoy_queue_messages_delayed", "messages_delayed"),
    Sample("convoy_queue_messages_delayed_bytes", "message_bytes_delayed"),
    Sample("convoy_queue_messages_blocked", "messages_blocked"),
    Sample("convoy_queue_messages_blocked_bytes", "message_bytes_blocked"),
    Sample("convoy_queue_deduplication_ids", "deduplication_ids"),
    Sample("convoy_queue_deduplication_bytes", "deduplication_bytes"),
)

FAMILIES: Mapping[str, Mapping[str, Sequence[Sample]]] = {
    "connection_churn_metrics": {"node": CHURN},
    "auth_attempt_metrics": {
        "node": (
            _counter("auth_attempts"),
            _counter("auth_attempts_succeeded", "auth_succeeded"),
            _counter("auth_attempts_failed", "auth_failed"),
        )
    },
    "node_coarse_metrics": {
        "node": (
            Sample("process_open_fds", "fd_used"),
            Sample("process_open_tcp_sockets", "sockets_used"),
            Sample("process_resident_memory_bytes", "mem_used"),
            Sample("disk_space_available_bytes", "disk_free"),
            Sample("erlang_processes_used", "proc_used"),
            _counter("erlang_gc_runs", "gc_num"),
            _counter("erlang_scheduler_context_switches", "context_switches"),
        )
    },
    "node_metrics": {
        "node": (
            Sample("process_max_fds", "fd_total"),
            Sample("process_max_tcp_sockets", "sockets_total"),
            Sample("resident_memory_limit_bytes", "mem_limit"),
            Sample("disk_space_available_limit_bytes", "disk_free_limit"),
            Sample("erlang_processes_limit", "proc_total"),
            Sample("erlang_uptime_seconds", "uptime_s"),
        )
    },
    "node_persister_metrics": {
        "node": (
            _counter("io_read_bytes"),
            _counter("io_write_ops", "io_write_count"),
            _counter("io_write_bytes"),
            _counter("io_sync_ops", "io_sync_count"),
            _counter("io_sync_time_seconds", "io_sync_time_s"),
        )
    },
    "ra_metrics": {"replica": RAFT},
    "queue_coarse_metrics": {
        "queue": (
            Sample("queue_messages", "messages"),
            Sample("queue_messages_ready", "messages_ready"),
            Sample("queue_messages_unacked", "messages_unacknowledged"),
        )
    },
    "queue_consumer_count": {"queue": (CONSUMERS,)},
    "queue_metrics": {"queue": QUEUE},
    "queue_delivery_metrics": {
        "queue": (
            _counter("queue_messages_published", "publish"),
            _counter("queue_messages_delivered", "deliver_get"),
            _counter("queue_messages_redelivered", "redeliver"),
            _counter("queue_messages_acked", "ack"),
        )
    },
    "queue_exchange_metrics": {
        "queue and exchange": (_counter("queue_exchange_messages_published", "messages"),)
    },
    "exchange_metrics": {"exchange": (_counter("exchange_messages_published", "in"),)},
    "channel_metrics": {
        "channel": (
            Sample("channel_consumers", "consumer_count"),
            Sample("channel_messages_unacked", "messages_unacknowledged"),
            Sample("channel_messages_unconfirmed", "messages_unconfirmed"),
            Sample("consumer_prefetch", "prefetch_count"),
            Sample("channel_prefetch", "global_prefetch_count"),
        )
    },
    "channel_exchange_metrics": {
        "channel and exchange": (_counter("channel_messages_published", "messages"),),
        "channel": (
            _counter("channel_messages_confirmed", "confirmed"),
            _counter("channel_messages_unroutable_returned", "returned_unroutable"),
            _counter("channel_messages_unroutable_dropped", "dropped_unroutable"),
        ),
    },
    "channel_queue_metrics": {
        "channel and queue": tuple(
            Sample(f"channel_{each.name}", each.field, each.kind) for each in DELIVERIES
        ),
        "channel": (_counter("channel_messages_acked", "acknowledged"),),
    },
    "connection_coarse_metrics": {
        "connection": (
            _counter("connection_incoming_bytes", "recv_oct"),
            _counter("connection_outgoing_bytes", "send_oct"),
        )
    },
    "connection_metrics": {
        "connection": (
            Sample("convoy_connection_pending_bytes", "send_pend"),
            Sample("connection_channels", "channels"),
        )
    },
}
"""Family -> subject -> metrics."""
CLUSTER: Mapping[str, Mapping[str, Sequence[Sample]]] = {
    "vhost_status": {"virtual host": (Sample("vhost_status", "running"),)},
    "exchange_names": {"exchange of the cluster": (Sample("exchange_name", "one"),)},
    "exchange_bindings": {"exchange of the cluster": (Sample("exchange_bindings", "bindings"),)},
}
QUEUE_FAMILIES = frozenset(("queue_coarse_metrics", "queue_consumer_count", "queue_metrics"))
"""Families with `queue_info`."""
WITHOUT_MEANING = frozenset((
    "auth_attempt_detailed_metrics", "channel_process_metrics", "channel_queue_exchange_metrics",
    "stream_consumer_metrics",
))  # fmt: skip
"""Families of RabbitMQ of which there is nothing here: who asks for them gets no line."""


def _node(broker: Broker, _wanted: Filter) -> Iterator[Object]:
    info = broker.node.info()
    row: JsonObject = {**broker.counters.as_dict(), **info}
    row["sockets_used"] = len(broker.connections)
    row["sockets_total"] = info.get("fd_total")
    row["uptime_s"] = broker.cluster.uptime_ms / 1000
    if "io_sync_time" in info:
        row["io_sync_time_s"] = count_in(info, "io_sync_time") / 1e6
    yield {}, row


def _queues(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for row in broker.cluster.local_rows():
        # A queue that is being deleted is here for a moment longer than in the tree.
        record = broker.tree.queues.of_group(count_in(row, "group"))
        if record is None or not wanted.wants(record.vhost, record.name):
            continue
        totals = part(row, "totals") or part(row, "message_stats")
        yield {"vhost": record.vhost, "queue": record.name}, {**row, **queue_stats(totals)}


def _replicas(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for record, replica in broker.replicas.of_queues():
        if wanted.wants(record.vhost, record.name):
            yield {"vhost": record.vhost, "queue": record.name}, _replica(replica)


def _replica(replica: ReplicaView) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(replica, name) for name in _REPLICA_FIELDS}
    row["commit_latency_s"] = replica.commit_latency_ms / 1000
    return row


_REPLICA_FIELDS = frozenset(each.field for each in RAFT) - {"commit_latency_s"}


def _routes(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for row in broker.route_counts.rows():
        if wanted.wants(row["vhost"]):
            labels = {"vhost": row["vhost"], "exchange": row["exchange"]}
            for queue, messages in row["out"].items():
                if wanted.wants(row["vhost"], queue):
                    yield {**labels, "queue": queue}, {"messages": messages}


def _exchanges(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for row in broker.route_counts.totals():
        if wanted.wants(row["vhost"]):
            yield {"vhost": row["vhost"], "exchange": row["exchange"]}, row


def _channel_rows(broker: Broker, wanted: Filter) -> Iterator[tuple[Labels, JsonObject]]:
    for connection in broker.connections.all():
        if wanted.wants(connection.vhost):
            for row in connection.channel_infos():
                yield {"channel": str(row["name"])}, row


def _channels(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for labels, row in _channel_rows(broker, wanted):
        counters = dict.fromkeys(
            ("confirmed", "returned_unroutable", "dropped_unroutable", "acknowledged"), 0
        )
        yield labels, {**row, **counters, **part(row, "counters")}


def _channel_exchanges(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for labels, row in _channel_rows(broker, wanted):
        for exchange, messages in part(row, "published_to").items():
            more = {"vhost": str(row["vhost"]), "exchange": exchange}
            yield {**labels, **more}, {"messages": messages}


def _channel_queues(broker: Broker, wanted: Filter) -> Iterator[Object]:
    zeros = dict.fromkeys((each.field for each in DELIVERIES), 0)
    for labels, row in _channel_rows(broker, wanted):
        for queue, counts in part(row, "delivered_from").items():
            if wanted.wants(str(row["vhost"]), queue):
                assert isinstance(counts, dict)
                more = {"vhost": str(row["vhost"]), "queue": queue}
                yield {**labels, **more}, {**zeros, **counts}


def _connections(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for connection in broker.connections.all():
        if wanted.wants(connection.vhost):
            yield {"connection": connection.name}, connection.info()


def _vhosts(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for vhost in broker.tree.vhosts.all():
        if wanted.wants(vhost.name):
            yield {"vhost": vhost.name}, {"running": 1}


def _cluster_exchanges(broker: Broker, wanted: Filter) -> Iterator[Object]:
    for vhost in broker.tree.vhosts.all():
        if not wanted.wants(vhost.name):
            continue
        for exchange in vhost.topology.exchanges():
            if exchange.name and not exchange.internal:
                labels = {
                    "vhost": vhost.name, "exchange": exchange.name, "type": exchange.type.value
                }  # fmt: skip
                bindings = len(list(vhost.topology.bindings(source=exchange.name)))
                yield labels, {"one": 1, "bindings": bindings}


SOURCES: Mapping[str, Source] = {
    "node": _node,
    "replica": _replicas,
    "queue": _queues,
    "queue and exchange": _routes,
    "exchange": _exchanges,
    "channel": _channels,
    "channel and exchange": _channel_exchanges,
    "channel and queue": _channel_queues,
    "connection": _connections,
    "virtual host": _vhosts,
    "exchange of the cluster": _cluster_exchanges,
}
"""Subject -> its objects on this node."""


def detailed_in(query: QueryParams) -> tuple[list[str], Filter]:
    """Returns the families and the filter that a request names by `family`, `vhost` and `queue`.
    Raises ApiError."""
    names = list(dict.fromkeys(query.getlist("family")))
    known = sorted(FAMILIES.keys() | CLUSTER.keys() | WITHOUT_MEANING)
    for name in names:
        if name not in known:
            raise bad_request(f"family: there is no {name}{hint(name, known)}")
    expression = query.get("queue", "")
    if len(expression) > QUEUE_FILTER_MAX or len(query.getlist("queue")) > 1:
        raise bad_request(f"queue: one expression of at most {QUEUE_FILTER_MAX} characters")
    try:
        return names, filter_of(query.getlist("vhost") or None, expression)
    except BrokerError as error:
        raise bad_request(f"queue: {error.text}") from None


def filter_of(vhosts: Iterable[str] | None, expression: str) -> Filter:
    """Returns a filter for virtual hosts (None: all) and names of queues ("": all). Raises
    BrokerError: the expression cannot be compiled."""
    queue = compile_pattern(expression) if expression else None
    named = None if vhosts is None else frozenset(vhosts)
    return Filter(vhosts=named, queue=queue, expression=expression)


async def write_families(
    text: Text,
    broker: Broker,
    names: Iterable[str],
    *,
    per_object: bool,
    wanted: Filter = ALL,
) -> None:
    """Writes families; lines of objects are made while the event loop goes on."""
    samples: dict[str, dict[Sample, None]] = {}
    for name in names:
        for subject, found in (FAMILIES.get(name) or CLUSTER[name]).items():
            samples.setdefault(subject, {}).update(dict.fromkeys(found))
    for subject, metrics in samples.items():
        if subject == "queue" and not per_object:
            await _write_sums(text, list(metrics), in_slices([({}, await _queue_sums(broker))]))
            continue
        objects = in_slices(SOURCES[subject](broker, wanted))
        if per_object or subject == "node":
            async for labels, row in objects:
                for each in metrics:
                    if (value := _value(row, each.field)) is not None:
                        text.add(each.kind, each.name, value, labels)
        else:
            await _write_sums(text, list(metrics), objects)


async def _queue_sums(broker: Broker) -> JsonObject:
    """Returns the sums over the queues that this node decides about, as a row of one."""
    sums, *counted = await broker.cluster.sampler.sums()
    for stats in counted:
        for name, value in queue_stats(stats).items():
            sums[name] = sums.get(name, 0) + value
    return sums


async def _write_sums(
    text: Text, metrics: Sequence[Sample], objects: AsyncIterator[Object]
) -> None:
    sums = dict.fromkeys(metrics, 0.0)
    async for _, row in objects:
        for each in metrics:
            if (value := _value(row, each.field)) is not None:
                sums[each] = max(sums[each], value) if each.is_max else sums[each] + value
    for each, total in sums.items():
        text.add(each.kind, each.name, total)


def _value(row: Mapping[str, object], field: str) -> float | None:
    value = row.get(field)
    return value if isinstance(value, int | float) else None


def led_here(broker: Broker) -> Iterator[QueueRecord]:
    """Yields the queues that this node leads or is the home of."""
    for queue in broker.local.handles():
        if queue.figures() is not None:
            record = broker.tree.queues.of_group(queue.group)
            if record is not None:
                yield record


async def write_queue_info(text: Text, broker: Broker, wanted: Filter = ALL) -> None:
    """Writes the type of each queue with a replica here, and the part of this node in it."""
    members = {record.group: (record, "follower") for record, _ in broker.replicas.of_queues()}
    members |= {record.group: (record, "leader") for record in led_here(broker)}
    async for record, membership in in_slices(members.values()):
        if wanted.wants(record.vhost, record.name):
            labels = {
                "vhost": record.vhost, "queue": record.name,
                "queue_type": f"rabbit_{record.type.value}_queue", "membership": membership,
            }  # fmt: skip
            text.gauge("queue_info", 1, labels)
