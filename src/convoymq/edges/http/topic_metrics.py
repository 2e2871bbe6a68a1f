"""Metrics of ordered topics (docs/metrics.md). On a node without topics all are 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.broker.topic_parts import TopicParts
    from convoymq.edges.http.exposition import Text

PHASES = ("prepared", "targets_ready", "sealing", "sealed", "published")
"""Phases of a change that goes on."""
ENDS = ("split", "merge", "move", "rebucket", "aborted")
OWN = "convoy_topic_"


def write_topics(text: Text, broker: Broker, *, per_object: bool) -> None:
    """Writes the metrics of topics.

    Args:
        per_object: a line per group beside the sums.
    """
    _publishes(text, broker)
    sealed, unknown = broker.topic_seals()
    text.counter(f"{OWN}partitions_sealed_from_outside_total", sealed)
    text.gauge(f"{OWN}partitions_end_unknown", unknown)
    parts = broker.known_topic_parts
    if parts is None:
        _nothing(text)
        return
    done = parts.upkeep.counters
    text.counter(f"{OWN}partitions_deleted_total", done.partitions_deleted)
    text.counter(f"{OWN}groups_expired_total", done.groups_expired)
    phases = parts.controller.phases
    _changes(
        text,
        {phase.value: durations.total_s for phase, durations in phases.seconds.items()},
        phases.ended,
    )
    _counts(text, parts)
    _groups(text, broker, parts, per_object=per_object)
    for (action, rule), count in sorted(parts.scaling.counters.decisions.items()):
        labels = {"action": action, "rule": rule}
        text.counter(f"{OWN}autoscaler_decisions_total", count, labels)
    text.gauge(f"{OWN}hot_logical_partitions", parts.scaling.hot)


def _publishes(text: Text, broker: Broker) -> None:
    sent_again, pauses, paused_ms = broker.local_topics.publish_counts()
    text.counter(f"{OWN}publishes_retried_total", sent_again)
    text.counter(f"{OWN}producer_pauses_total", pauses)
    text.counter(f"{OWN}producer_pause_seconds_total", paused_ms / 1000)


def _changes(text: Text, seconds: Mapping[str, float], ended: Mapping[str, int]) -> None:
    for phase in PHASES:
        labels = {"phase": phase}
        text.counter(f"{OWN}change_seconds_total", seconds.get(phase, 0.0), labels)
    for kind in ENDS:
        text.counter(f"{OWN}changes_total", ended.get(kind, 0), {"kind": kind})


def _counts(text: Text, parts: TopicParts) -> None:
    counts = parts.count()
    text.gauge(f"{OWN}parked_keys", counts.parked_keys)
    text.counter(f"{OWN}acks_fenced_total", counts.fenced)
    text.counter(f"{OWN}duplicates_refused_total", counts.duplicates)


def _groups(text: Text, broker: Broker, parts: TopicParts, *, per_object: bool) -> None:
    from convoymq.topics.shell.measures import group_waits

    waits = group_waits(broker.tree.vhosts.all(), int(time.time() * 1000))
    text.gauge(f"{OWN}group_versions_behind_max", max((w.versions for w in waits), default=0))
    text.gauge(f"{OWN}group_wait_seconds_max", max((w.seconds for w in waits), default=0.0))
    stalls = parts.coordinators.stalls
    text.counter(f"{OWN}consumer_stalls_total", stalls.all.count)
    text.counter(f"{OWN}consumer_stall_seconds_total", stalls.all.total_s)
    if not per_object:
        return
    for wait in waits:
        labels = {"vhost": wait.vhost, "topic": wait.topic, "group": wait.group}
        text.gauge(f"{OWN}group_versions_behind", wait.versions, labels)
        text.gauge(f"{OWN}group_wait_seconds", wait.seconds, labels)
    for (vhost, topic, group), durations in sorted(stalls.by_group.items()):
        labels = {"vhost": vhost, "topic": topic, "group": group}
        text.counter(f"{OWN}group_stalls_total", durations.count, labels)
        text.counter(f"{OWN}group_stall_seconds_total", durations.total_s, labels)


def _nothing(text: Text) -> None:
    for name in ("partitions_deleted", "groups_expired", "acks_fenced", "duplicates_refused",
                 "consumer_stalls", "consumer_stall_seconds"):  # fmt: skip
        text.counter(f"{OWN}{name}_total", 0)
    _changes(text, {}, {})
    for name in ("parked_keys", "group_versions_behind_max", "group_wait_seconds_max",
                 "hot_logical_partitions"):  # fmt: skip
        text.gauge(f"{OWN}{name}", 0)
