"""Metrics of this node in Prometheus' text format, under the names that dashboards know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq import __version__
from convoymq.broker.facade import Broker
from convoymq.broker.local_queues import AT_LEAST_ONCE_NAME, STRATEGIES
from convoymq.edges.http.exposition import Text
from convoymq.edges.http.json_values import count_in
from convoymq.edges.http.metric_help import HELP
from convoymq.edges.http.topic_metrics import write_topics
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge

QUEUE_METRICS = (
    ("queue_messages", "messages"),
    ("queue_messages_ready", "messages_ready"),
    ("queue_messages_unacked", "messages_unacknowledged"),
    ("queue_messages_bytes", "message_bytes"),
    ("queue_messages_ready_bytes", "message_bytes_ready"),
    ("queue_consumers", "consumers"),
    ("queue_process_memory_bytes", "memory"),
    ("convoy_queue_messages_delayed", "messages_delayed"),
    ("convoy_queue_messages_delayed_bytes", "message_bytes_delayed"),
    ("convoy_queue_messages_blocked", "messages_blocked"),
    ("convoy_queue_messages_blocked_bytes", "message_bytes_blocked"),
    ("convoy_queue_deduplication_ids", "deduplication_ids"),
    ("convoy_queue_deduplication_bytes", "deduplication_bytes"),
)
"""Names of the gauges of a queue, and of its row's columns."""
RAFT_METRICS = (
    ("raft_term", "term"),
    ("raft_commit_index", "commit_index"),
    ("raft_last_applied", "last_applied"),
    ("raft_last_written_index", "written_index"),
    ("raft_snapshot_index", "snapshot_index"),
    ("raft_num_segments", "segments"),
)
"""Names of the gauges of a queue's replica on this node, and of its view's fields; sums where no
queue is named."""
RAFT_FORMER_NAMES = {
    "raft_commit_index": "raft_log_commit_index",
    "raft_last_applied": "raft_log_last_applied_index",
    "raft_last_written_index": "raft_log_last_written_index",
    "raft_snapshot_index": "raft_log_snapshot_index",
    "raft_commit_latency_seconds": "raft_entry_commit_latency_seconds",
}
"""Names that the same had before RabbitMQ 4.2: dashboards of 4.1 ask for them."""


async def render(
    broker: Broker,
    edges: Sequence[Edge] = (),
    *,
    per_object: bool = False,
    open_metrics: bool = False,
) -> str:
    """Returns the metrics; lines of queues are made while the event loop goes on.

    Args:
        edges: their own metrics are added.
        per_object: a line per queue instead of sums.
    """
    text = Text(HELP, open_metrics=open_metrics)
    _identity(text, broker)
    _edges(text, broker)
    rows = [row async for row in in_slices(broker.cluster.local_rows())]
    await _queues(text, broker, rows, per_object=per_object)
    _process(text, broker, broker.node.info())
    write_topics(text, broker, per_object=per_object)
    _replication(text, broker)
    await _raft(text, broker, per_object=per_object)
    _traces(text, broker)
    for edge in edges:
        for kind, name, labels, value in edge.metrics():
            text.add(kind, name, value, labels)
    return text.render()


def _identity(text: Text, broker: Broker) -> None:
    text.gauge(
        "build_info",
        1,
        {
            "rabbitmq_version": COMPATIBLE_VERSION,
            "product_name": "ConvoyMQ",
            "product_version": __version__,
            "erlang_version": "",
        },
    )
    text.gauge(
        "identity_info",
        1,
        {
            "rabbitmq_node": broker.node_name,
            "rabbitmq_cluster": broker.cluster_name,
            "rabbitmq_cluster_permanent_id": broker.cluster_name,
        },
    )


def _edges(text: Text, broker: Broker) -> None:
    counters = broker.counters
    connections = broker.connections.all()
    channels = [row for connection in connections for row in connection.channel_infos()]
    text.gauge("connections", len(connections))
    text.gauge("channels", len(channels))
    text.gauge("consumers", sum(len(each.consumer_infos()) for each in connections))
    for name in ("connections_opened", "connections_closed", "channels_opened", "channels_closed"):
        text.counter(f"{name}_total", getattr(counters, name))
    for name in ("declared", "created", "deleted"):
        text.counter(f"queues_{name}_total", getattr(counters, f"queues_{name}"))
    text.counter("convoy_queues_migrated_total", counters.queues_migrated)
    text.counter("convoy_direct_replies_dropped_total", counters.dropped_replies)
    _dead_letters(text, broker)
    text.counter("auth_attempts_total", counters.auth_attempts)
    text.counter("auth_attempts_succeeded_total", counters.auth_succeeded)
    text.counter("auth_attempts_failed_total", counters.auth_failed)


def _dead_letters(text: Text, broker: Broker) -> None:
    """Writes the counters of messages that left queues unacknowledged."""
    left = dict(broker.local.dead_letters_by_type())
    for reason in ("rejected", "delivery_limit", "expired", "maxlen"):
        for name, counts in left.items():
            for strategy in STRATEGIES:
                labels = {"queue_type": f"rabbit_{name}_queue", "dead_letter_strategy": strategy}
                text.counter(
                    f"global_messages_dead_lettered_{reason}_total",
                    counts[strategy, reason],
                    labels,
                )
    labels = {"queue_type": "rabbit_quorum_queue", "dead_letter_strategy": AT_LEAST_ONCE_NAME}
    moved = broker.local.dead_letters_moved()
    text.counter("global_messages_dead_lettered_confirmed_total", moved, labels)
    text.counter("convoy_messages_deduplicated_total", broker.local.deduplicated())


async def _queues(text: Text, broker: Broker, found: list[JsonObject], *, per_object: bool) -> None:
    infos = {count_in(row, "group"): row for row in found}
    # A queue that is being deleted is here for a moment longer than in the tree.
    found_here = ((broker.tree.queues.of_group(group), row) for group, row in infos.items())
    rows = [(record, row) for record, row in found_here if record is not None]
    text.gauge("queues", len(rows))
    if per_object:
        async for record, row in in_slices(rows):
            labels = {"vhost": record.vhost, "queue": record.name}
            for metric, key in QUEUE_METRICS:
                text.gauge(metric, _value(row, key), labels)
    else:
        for metric, key in QUEUE_METRICS:
            text.gauge(metric, sum(_value(row, key) for _, row in rows))
    text.gauge("convoy_queues_leaderless", broker.locations.leaderless())


def _value(row: JsonObject, key: str) -> float:
    value = row.get(key) or 0
    assert isinstance(value, int | float)
    return value


def _process(text: Text, broker: Broker, info: JsonObject) -> None:
    for metric, key in (
        ("process_open_fds", "fd_used"),
        ("convoy_process_threads", "proc_used"),
        ("process_max_fds", "fd_total"),
        ("process_resident_memory_bytes", "mem_used"),
        ("resident_memory_limit_bytes", "mem_limit"),
        ("disk_space_available_bytes", "disk_free"),
        ("disk_space_available_limit_bytes", "disk_free_limit"),
    ):
        if key in info:
            text.gauge(metric, float(count_in(info, key)))
    text.gauge("erlang_uptime_seconds", broker.cluster.uptime_ms / 1000)
    alarms = broker.alarms.of(broker.node_id)
    text.gauge("alarms_memory_used_watermark", int("memory" in alarms))
    text.gauge("alarms_free_disk_space_watermark", int("disk" in alarms))
    used, most = count_in(info, "fd_used"), count_in(info, "fd_total", 1)
    text.gauge("alarms_file_descriptor_limit", int(used >= most))
    text.gauge("convoy_clock_skew_ms", broker.node.clock_skew()[0])


def _traces(text: Text, broker: Broker) -> None:
    traces = broker.traces
    if traces is None:
        return
    text.gauge("convoy_trace_queues", traces.queues)
    text.counter("convoy_trace_rows_lost_total", traces.rows_lost)
    text.counter("convoy_trace_write_errors_total", traces.write_errors)


def _replication(text: Text, broker: Broker) -> None:
    local, proxied = broker.local.deliveries()
    text.counter("convoy_deliveries_local_total", local)
    text.counter("convoy_deliveries_proxied_total", proxied)
    _hosted(text, broker)
    for name, size in broker.cluster.model.load().items():
        text.gauge(f"convoy_read_model_{name}", size)
    _linked(text, broker)


async def _raft(text: Text, broker: Broker, *, per_object: bool) -> None:
    """Writes what RabbitMQ tells of its Raft groups, here of the replicas on this node."""
    sums = dict.fromkeys((name for name, _ in RAFT_METRICS), 0.0)
    latency = 0.0
    async for record, replica in in_slices(broker.replicas.of_queues()):
        own = replica.commit_latency_ms / 1000
        latency = max(latency, own)
        labels = {"vhost": record.vhost, "queue": record.name}
        for name, field in RAFT_METRICS:
            value = getattr(replica, field)
            sums[name] += value
            if per_object:
                _raft_gauge(text, name, value, labels)
        if per_object:
            _raft_gauge(text, "raft_commit_latency_seconds", own, labels)
    if not per_object:
        for name, total in sums.items():
            _raft_gauge(text, name, total)
        _raft_gauge(text, "raft_commit_latency_seconds", latency)
    counters = broker.replicas.counters()
    text.gauge("raft_wal_files", broker.replicas.storage().wal_files)
    text.gauge("raft_entries", counters["entries_appended"])
    text.gauge("raft_bytes_written", counters["bytes_appended"])


def _raft_gauge(text: Text, name: str, value: float, labels: dict[str, str] | None = None) -> None:
    text.gauge(name, value, labels)
    former = RAFT_FORMER_NAMES.get(name)
    if former is not None:
        text.gauge(former, value, labels)


def _linked(text: Text, broker: Broker) -> None:
    for link in broker.node.links():
        peer = {"peer": broker.node_name_of(int(link["node"]))}
        text.gauge("convoy_link_full", int(link["full"]), peer)
        text.counter("convoy_link_sent_bytes_total", link["bytes_out"], peer)
        text.counter("convoy_link_received_bytes_total", link["bytes_in"], peer)


def _hosted(text: Text, broker: Broker) -> None:
    replicas = broker.replicas.counts()
    text.gauge("convoy_groups_led", replicas.led)
    text.gauge("convoy_groups_followed", replicas.followed)
    text.gauge("convoy_replicas_behind", replicas.behind)
    for name, value in broker.replicas.counters().items():
        text.counter(f"convoy_raft_{name}_total", value)
