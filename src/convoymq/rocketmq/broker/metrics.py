"""Metrics of a broker, under the names of RocketMQ's own exporter where it has them.

The `rocketmq_storage_…` of a replica and all `convoy_broker_group_…` have the labels of `_labels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from convoymq.edges.http.exposition import Text
from convoymq.model.slices import in_slices
from convoymq.rocketmq.broker.names import SCHEDULE_TOPIC
from convoymq.rocketmq.broker.stats import (
    BROKER_GET_NUMS,
    BROKER_GET_SIZE,
    BROKER_PUT_NUMS,
    BROKER_PUT_SIZE,
    GROUP_GET_NUMS,
    GROUP_GET_SIZE,
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
)

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

OWN = "convoy_broker_group_"
HELP = {
    "rocketmq_messages_in_total": "Messages that were stored for clients",
    "rocketmq_messages_out_total": "Messages that were handed out to consumers",
    "rocketmq_throughput_in_total": "Bytes that were stored for clients",
    "rocketmq_throughput_out_total": "Bytes that were handed out to consumers",
    "rocketmq_broker_permission": "4 = readable, 2 = writable, 6 = both",
    "rocketmq_topic_number": "Topics",
    "rocketmq_consumer_group_number": "Consumer groups",
    "rocketmq_producer_connections": "Producers that sent heartbeats",
    "rocketmq_consumer_connections": "Consumers that sent heartbeats",
    "rocketmq_consumer_lag_messages": "Messages behind the committed offsets of consumer groups",
    "rocketmq_storage_size": "Bytes of the log",
    "rocketmq_storage_flush_behind_bytes": "Bytes of the log that are not on the disk",
    "rocketmq_storage_dispatch_behind_bytes": "Bytes of the log that cannot be read yet",
    "rocketmq_half_messages": "Half messages of transactions without an end",
    "rocketmq_timing_messages": "Timed messages that wait",
    "rocketmq_delayed_messages": "Messages that wait in delay levels",
    f"{OWN}pops_open": "Pops whose messages are neither all acknowledged nor due again",
    f"{OWN}role": "1 for what this replica is",
    f"{OWN}takes_writes": "1 while sends are accepted",
    f"{OWN}special_services_run": "1 while delayed, timed, half and pop messages leave from here",
    f"{OWN}replicas_listed": "Replicas that name servers list, this one among them",
    f"{OWN}replicas_in_sync": "Replicas that are in sync, this one among them",
    f"{OWN}slave_lag_bytes": "Bytes of the log that a slave has not acknowledged",
    f"{OWN}log_begin_offset": "Where the log begins",
    f"{OWN}log_end_offset": "Where the log ends",
    f"{OWN}escaped_messages_total": "Messages that this replica gave to another broker",
    f"{OWN}escape_failures_total": "Attempts at it that failed",
    f"{OWN}queue_locks": "Queues that consumers have locked",
    f"{OWN}pulls_waiting": "Pulls that wait for messages",
    f"{OWN}connections": "Connections of clients and other brokers",
    f"{OWN}refused_requests_total": "Answers other than success, by code",
    f"{OWN}damaged_records_total": "Records that were found damaged",
    f"{OWN}write_failures_total": "Files beside the log that could not be written",
}
ROLES = ("master", "acting", "slave", "isolated")


def role_of(broker: Broker) -> str:
    """Returns which of `ROLES` a replica has."""
    role = broker.role
    if role.is_isolated:
        return "isolated"
    return "master" if role.is_master else "acting" if role.is_acting else "slave"


def faults_of(broker: Broker) -> list[str]:
    """Returns why a broker does not serve clients as it should."""
    found = []
    if broker.role.is_isolated:
        found.append("it is not online yet")
    if broker.registrar.servers.addresses and not broker.registrar.is_registered:
        found.append("no name server knows it")
    if broker.replication.state == "SUSPEND":
        found.append("its log differs from its master's (ha.forked)")
    if broker.store.is_disk_full:
        found.append("the disk is full")
    elif broker.role.is_master and not takes_writes(broker):
        found.append("sends are refused")
    return found


def takes_writes(broker: Broker) -> bool:
    """Returns whether sends are accepted now."""
    refusals = broker.replication.refusal(), broker.store.refusal()
    return broker.role.is_master and refusals == (None, None)


async def write_broker(text: Text, broker: Broker, *, per_object: bool) -> None:
    """Writes the metrics of a broker; lines of topics are made while the event loop goes on."""
    role = broker.role
    labels = {"cluster": role.cluster, "node_type": "broker", "node_id": role.name}
    labels |= {"broker_id": str(role.id)}
    _state(text, broker, labels)
    _replicas(text, broker, labels)
    _services(text, broker, labels)
    await _messages(text, broker, labels, per_object=per_object)
    await _lag(text, broker, labels, per_object=per_object)


def _state(text: Text, broker: Broker, labels: dict[str, str]) -> None:
    store = broker.store
    now = role_of(broker)
    for name in ROLES:
        text.gauge(f"{OWN}role", name == now, labels | {"role": name})
    text.gauge(f"{OWN}takes_writes", takes_writes(broker), labels)
    text.gauge("rocketmq_broker_permission", broker.settings.permission, labels)
    text.gauge("rocketmq_topic_number", len(broker.topics.table), labels)
    text.gauge("rocketmq_consumer_group_number", len(broker.groups.table), labels)
    text.gauge(f"{OWN}log_begin_offset", store.min_offset, labels)
    text.gauge(f"{OWN}log_end_offset", store.max_offset, labels)
    text.gauge("rocketmq_storage_size", store.max_offset - store.min_offset, labels)
    behind = {"flush": store.flushed, "dispatch": store.dispatched}
    for name, offset in behind.items():
        text.gauge(f"rocketmq_storage_{name}_behind_bytes", store.max_offset - offset, labels)
    text.counter(f"{OWN}damaged_records_total", broker.damages, labels)
    failures = broker.persist_failures + broker.replication.failures
    text.counter(f"{OWN}write_failures_total", failures, labels)
    connections = sum(len(server.connections) for server in broker.servers)
    text.gauge(f"{OWN}connections", connections, labels)
    producers = {channel for found in broker.clients.producers.values() for channel in found}
    text.gauge("rocketmq_producer_connections", len(producers), labels)
    consumers = {c for found in broker.clients.consumers.values() for c in found.members}
    text.gauge("rocketmq_consumer_connections", len(consumers), labels)
    text.gauge(f"{OWN}pulls_waiting", broker.puller.held, labels)
    text.gauge(f"{OWN}queue_locks", broker.locks.held(broker.steady_ms()), labels)
    for code, count in sorted(broker.refused.items()):
        text.counter(f"{OWN}refused_requests_total", count, labels | {"code": str(code)})


def _replicas(text: Text, broker: Broker, labels: dict[str, str]) -> None:
    links = broker.replication.links()
    text.gauge(f"{OWN}replicas_listed", 1 + len(broker.group.members), labels)
    in_sync = 1 + sum(link.in_sync for link in links)
    text.gauge(f"{OWN}replicas_in_sync", in_sync if broker.role.is_master else 0, labels)
    for link in links:
        slave = link.host if link.slave is None else str(link.slave)
        lag = broker.store.max_offset - link.acked
        text.gauge(f"{OWN}slave_lag_bytes", lag, labels | {"slave": slave})


def _services(text: Text, broker: Broker, labels: dict[str, str]) -> None:
    state = broker.services.state
    text.gauge(f"{OWN}special_services_run", broker.group.services_run, labels)
    text.gauge("rocketmq_half_messages", len(state.transactions), labels)
    text.gauge("rocketmq_timing_messages", state.wheel.count, labels)
    delayed = sum(
        max(0, broker.store.queue_max(SCHEDULE_TOPIC, level - 1) - offset)
        for level, offset in state.levels.offsets.items()
    )
    text.gauge("rocketmq_delayed_messages", delayed, labels)
    text.gauge(f"{OWN}pops_open", len(state.pops), labels)
    escaped = broker.group.bridge
    text.counter(f"{OWN}escaped_messages_total", escaped.stored, labels)
    text.counter(f"{OWN}escape_failures_total", escaped.failures, labels)


async def _messages(
    text: Text, broker: Broker, labels: dict[str, str], *, per_object: bool
) -> None:
    stats, cluster = broker.stats, broker.role.cluster
    if not per_object:
        for name, key in (
            ("messages_in", BROKER_PUT_NUMS), ("throughput_in", BROKER_PUT_SIZE),
            ("messages_out", BROKER_GET_NUMS), ("throughput_out", BROKER_GET_SIZE),
        ):  # fmt: skip
            text.counter(f"rocketmq_{name}_total", stats.total(key, cluster), labels)
        return
    names = {
        TOPIC_PUT_NUMS: "messages_in", TOPIC_PUT_SIZE: "throughput_in",
        GROUP_GET_NUMS: "messages_out", GROUP_GET_SIZE: "throughput_out",
    }  # fmt: skip
    async for (kind, key), total in in_slices(stats.totals()):
        if kind in names:
            topic, _, group = key.partition("@")
            of = {"topic": topic} | ({"consumer_group": group} if group else {})
            text.counter(f"rocketmq_{names[kind]}_total", total, labels | of)


async def _lag(text: Text, broker: Broker, labels: dict[str, str], *, per_object: bool) -> None:
    lags: dict[str, int] = {}
    async for key, lag in in_slices(_lags(broker)):
        lags[key] = lags.get(key, 0) + lag
    if not per_object:
        lags = {"": sum(lags.values())}
    async for key, lag in in_slices(lags.items()):
        topic, _, group = key.partition("@")
        of = {"topic": topic, "consumer_group": group} if per_object else {}
        text.gauge("rocketmq_consumer_lag_messages", lag, labels | of)


def _lags(broker: Broker) -> Iterator[tuple[str, int]]:
    """Yields topic@group and the messages of one queue that the group has not committed."""
    for key, offsets in list(broker.offsets.table.items()):
        topic = key.partition("@")[0]
        for queue, offset in list(offsets.items()):
            yield key, max(0, broker.store.queue_max(topic, queue) - offset)
