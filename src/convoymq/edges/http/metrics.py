"""Metrics of this node, and of the other processes of its machine, in Prometheus' text format,
under the names that dashboards know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from convoymq import __version__
from convoymq.broker.facade import Broker
from convoymq.broker.local_queues import AT_LEAST_ONCE_NAME, STRATEGIES
from convoymq.edges.http.exposition import Text
from convoymq.edges.http.json_values import count_in
from convoymq.edges.http.metric_families import (
    ALL,
    CLUSTER,
    FAMILIES,
    QUEUE_FAMILIES,
    Filter,
    filter_of,
    write_families,
    write_queue_info,
)
from convoymq.edges.http.metric_help import HELP
from convoymq.edges.http.topic_metrics import write_topics
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import JsonObject

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """Metrics that a client asks for."""

    per_object: bool = False
    """A line per object instead of sums."""
    open_metrics: bool = False
    names: Sequence[str] | None = None
    """Families of `/metrics/detailed`; None: all metrics."""
    wanted: Filter = ALL

    def as_row(self) -> list[object]:
        """Returns it for another process: the argument of `scrape_of`."""
        names = None if self.names is None else list(self.names)
        return [self.per_object, self.open_metrics, names, *self.wanted.as_row()]


def scrape_of(row: Sequence[object]) -> Scrape:
    """Returns what a process of the machine asks for."""
    per_object, open_metrics, names, vhosts, expression = msgspec.convert(
        row, type=tuple[bool, bool, list[str] | None, list[str] | None, str]
    )
    wanted = filter_of(vhosts, expression)
    return Scrape(per_object=per_object, open_metrics=open_metrics, names=names, wanted=wanted)


async def render(
    broker: Broker,
    edges: Sequence[Edge] = (),
    *,
    per_object: bool = False,
    open_metrics: bool = False,
) -> str:
    """Returns the metrics of the machine; lines of objects are made while the event loop goes on.

    Args:
        edges: their own metrics are added.
        per_object: a line per object instead of sums.
    """
    text = Text(HELP, open_metrics=open_metrics)
    _identity(text, broker, "per-object" if per_object else "aggregated")
    scrape = Scrape(per_object=per_object, open_metrics=open_metrics)
    await _write_machine(text, broker, edges, scrape)
    return text.render()


async def render_detailed(
    broker: Broker, names: Sequence[str], wanted: Filter, *, open_metrics: bool = False
) -> str:
    """Returns families of metrics with a line per object, under names of their own."""
    text = Text(HELP, open_metrics=open_metrics)
    _identity(text, broker, "detailed")
    own = [name for name in names if name in FAMILIES]
    await _write_machine(
        text, broker, (), Scrape(open_metrics=open_metrics, names=own, wanted=wanted)
    )
    text.prefix = "cluster_"
    cluster = [name for name in names if name in CLUSTER]
    await write_families(text, broker, cluster, per_object=True, wanted=wanted)
    return text.render()


async def _write_machine(text: Text, broker: Broker, edges: Sequence[Edge], scrape: Scrape) -> None:
    """Writes the metrics of this process and of the others of its machine."""
    machine = broker.tree.nodes.of_machine(broker.node_id)
    others = [node for node in machine if node != broker.node_id]
    asked = broker.cluster.metrics_of(others, scrape.as_row())
    for families in await asyncio.gather(families_of(broker, edges, scrape), asked):
        text.extend(families)


async def families_of(
    broker: Broker, edges: Sequence[Edge], scrape: Scrape
) -> list[tuple[str, list[str]]]:
    """Returns the families of this process, with its number as a label where the machine has
    several."""
    own = broker.tree.nodes.find(str(broker.node_id))
    several = own is not None and len(broker.tree.nodes.of_machine(own.id)) > 1
    labels = {"process": str(own.process)} if own is not None and several else None
    text = Text(HELP, open_metrics=scrape.open_metrics, labels=labels)
    if scrape.names is None:
        await _write_all(text, broker, edges, per_object=scrape.per_object)
    else:
        await _write_detailed(text, broker, list(scrape.names), scrape.wanted)
    return text.families()


async def _write_all(
    text: Text, broker: Broker, edges: Sequence[Edge], *, per_object: bool
) -> None:
    _edges(text, broker)
    _process(text, broker, broker.node.info())
    await write_families(text, broker, FAMILIES, per_object=per_object)
    if per_object:
        await write_queue_info(text, broker)
    text.gauge("queues", broker.cluster.sampler.queue_count)
    text.gauge("convoy_queues_leaderless", broker.locations.leaderless())
    write_topics(text, broker, per_object=per_object)
    _replication(text, broker)
    _traces(text, broker)
    for edge in edges:
        for kind, name, labels, value in edge.metrics():
            text.add(kind, name, value, labels)


async def _write_detailed(text: Text, broker: Broker, names: list[str], wanted: Filter) -> None:
    if "queue_metrics" in names and "queue_consumer_count" in names:
        names.remove("queue_consumer_count")
    text.prefix = "detailed_"
    await write_families(text, broker, names, per_object=True, wanted=wanted)
    if not QUEUE_FAMILIES.isdisjoint(names):
        await write_queue_info(text, broker, wanted)


def _identity(text: Text, broker: Broker, endpoint: str) -> None:
    """Writes who answers: the machine, under the name of its first process."""
    first = min(broker.tree.nodes.of_machine(broker.node_id), default=broker.node_id)
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
            "rabbitmq_node": broker.node_name_of(first),
            "rabbitmq_cluster": broker.cluster_name,
            "rabbitmq_cluster_permanent_id": broker.cluster_name,
            "rabbitmq_endpoint": endpoint,
        },
    )


def _edges(text: Text, broker: Broker) -> None:
    counters = broker.counters
    connections = broker.connections.all()
    channels = [row for connection in connections for row in connection.channel_infos()]
    text.gauge("connections", len(connections))
    text.gauge("channels", len(channels))
    text.gauge("consumers", sum(len(each.consumer_infos()) for each in connections))
    text.counter("convoy_queues_migrated_total", counters.queues_migrated)
    text.counter("convoy_direct_replies_dropped_total", counters.dropped_replies)
    _dead_letters(text, broker)


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


def _process(text: Text, broker: Broker, info: JsonObject) -> None:
    if "proc_used" in info:
        text.gauge("convoy_process_threads", count_in(info, "proc_used"))
    alarms = broker.alarms.of(broker.node_id)
    text.gauge("alarms_memory_used_watermark", int("memory" in alarms))
    text.gauge("alarms_free_disk_space_watermark", int("disk" in alarms))
    used, most = count_in(info, "fd_used"), count_in(info, "fd_total", 1)
    text.gauge("alarms_file_descriptor_limit", int(used >= most))
    text.gauge("convoy_clock_skew_ms", broker.node.clock_skew()[0])


def _traces(text: Text, broker: Broker) -> None:
    traces, spans = broker.traces, broker.spans
    text.counter("convoy_spans_sent_total", 0 if spans is None else spans.sent)
    text.counter("convoy_spans_dropped_total", 0 if spans is None else spans.dropped)
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
    counters = broker.replicas.counters()
    text.gauge("raft_wal_files", broker.replicas.storage().wal_files)
    text.gauge("raft_entries", counters["entries_appended"])
    text.gauge("raft_bytes_written", counters["bytes_appended"])
    for name, size in broker.cluster.model.load().items():
        text.gauge(f"convoy_read_model_{name}", size)
    _linked(text, broker)


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
