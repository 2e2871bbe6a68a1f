"""The checks A1 to A15 of ordered topics as Spark jobs: on injured copies of a topic's trace, one
for each check, and on that of a real cluster.

Every kind of injury is in tests/unit/trace/test_topic_checks.py, without Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from convoymq.cli.cluster import LocalCluster
from convoymq.model import trace as words
from convoymq.spark.audit import AuditReport, audit
from convoymq.spark.audit.coverage import queue_facts
from convoymq.spark.audit.findings import FindingRow
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.plan import Job, read_footers
from convoymq.spark.audit.result import gather
from convoymq.spark.audit.topics import effects
from convoymq.spark.audit.topics.job import TopicJob
from tests.clusters import call, serving_cluster
from tests.faults.topic_traffic import (
    KEYS,
    Member,
    TopicTraffic,
    changed,
    create,
    leader_of,
    open_pids,
    path,
)
from tests.faults.traffic import until
from tests.ports import cluster_ports
from tests.spark.test_audit import rewrite
from tests.unit.trace.topic_injuries import INJURIES, Copy, Original, Rows

PORT = cluster_ports(__name__)
ONE_EACH: dict[Invariant, Callable[[Copy], None]] = {
    check: injury for injury, check in INJURIES.items()
}
CLEAN = "unhurt"
UNWRITTEN = "unwritten"


def leave_a_process_out(copy: Copy) -> None:
    """One publisher's process was killed before it had written any row."""
    (opened, *_) = copy.of_kind(1, words.PUBLISHER)
    session = opened["session"]
    acts = (words.PUBLISHER, words.TAGGED)
    rows = copy.partitions[1]
    rows[:] = [row for row in rows if row["session"] != session or row["kind"] not in acts]
    for row in rows:
        if row["session"] == session:
            row["session"] += 7 << 24


@pytest.fixture(scope="module")
def report(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """One audit of the injured topics, and of one that nothing happened to."""
    original = Original(tmp_path_factory.mktemp("original"))
    root = tmp_path_factory.mktemp("topics")
    routes: Rows = []
    injuries: list[tuple[str, Callable[[Copy], None] | None]] = [(CLEAN, None)]
    injuries += [(injury.__name__, injury) for injury in ONE_EACH.values()]
    injuries += [(UNWRITTEN, leave_a_process_out)]
    for number, (name, injury) in enumerate(injuries):
        copy = original.copy(number, name)
        if injury is not None:
            injury(copy)
        original.write(root, copy, number, name)
        routes += copy.routes
    original.write_routes(root, routes)
    return audit_topics(root, spark)


def audit_topics(root: Path, spark: SparkSession) -> AuditReport:
    """The checks of topics alone."""
    files, footers = read_footers(root)
    facts = queue_facts(footers)
    lines = effects.files_of(root)
    job = Job(spark, files, facts, footers, lines)
    with job.settings():
        steps = TopicJob(job, lines).steps(lambda _: None)
        rows = [cast(FindingRow, row.asDict()) for step in steps for row in step]
    return gather(facts, rows)


def violations_of(report: AuditReport, topic: str) -> dict[Invariant, int]:
    """What the audit found of a topic."""
    found: dict[Invariant, int] = {}
    for queue in report.queues:
        if queue.facts.queue.startswith(f"{words.PARTITION_PREFIX}{topic}."):
            for name, rows in queue.violations.items():
                invariant = Invariant[name.upper()]
                found[invariant] = found.get(invariant, 0) + rows
    return found


@pytest.mark.parametrize("check", ONE_EACH, ids=lambda check: check.name.lower())
def test_an_injected_violation_is_found(report: AuditReport, check: Invariant) -> None:
    found = violations_of(report, ONE_EACH[check].__name__)
    assert check in found, found


def test_nothing_is_found_where_nothing_happened(report: AuditReport) -> None:
    assert violations_of(report, CLEAN) == {}
    mine = [
        queue
        for queue in report.queues
        if queue.facts.queue.startswith(f"{words.PARTITION_PREFIX}{CLEAN}.")
    ]
    assert len(mine) == 4
    assert all(not queue.unproved and not queue.facts.gaps for queue in mine)


def test_what_a_process_did_not_write_is_no_violation(report: AuditReport) -> None:
    """Its files may be missing as a whole, and with them all that says so."""
    assert violations_of(report, UNWRITTEN) == {}
    (mine,) = [
        queue
        for queue in report.queues
        if queue.facts.queue == f"{words.PARTITION_PREFIX}{UNWRITTEN}.1"
    ]
    assert mine.unproved


class Rejecting(Member):
    """A member that rejects one message, once: its key is parked."""

    def __init__(self, *arguments: Any, poison: set[int]) -> None:
        super().__init__(*arguments)
        self.poison = poison

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        super().on_message(channel, method, properties, body)
        if int(body) in self.poison:
            self.poison.discard(int(body))
            if method.delivery_tag > 1 and self.unacked > 1:
                channel.basic_ack(method.delivery_tag - 1, multiple=True)
            self.unacked = 0
            channel.basic_nack(method.delivery_tag, requeue=False)


def parked(cluster: LocalCluster, topic: str) -> list[Any]:
    status, rows = call(cluster, "GET", path(topic, "groups", "readers", "park"))
    assert status == 200, rows
    found: list[Any] = rows
    return found


@pytest.mark.long
@pytest.mark.cluster
def test_a_real_topic_through_changes_kills_and_parked_keys_is_clean(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Goal: no violation; and one when a single row of the trace is another one."""
    settings = {"trace.vhosts": "/", "node.stop_timeout": "60000"}
    poison = {KEYS + 5}
    with serving_cluster(tmp_path, PORT, settings) as cluster:
        create(cluster, "real", 2)
        traffic = TopicTraffic(cluster, "real", window=20, prefetch=20)
        ports = [node.amqp_port for node in cluster.nodes]
        traffic.members = [
            Rejecting([ports[n - 1] for n in nodes], "real/readers", 60, 20, traffic.log,
                      poison=poison)
            for nodes in ((1, 2), (3, 2))
        ]  # fmt: skip
        with traffic:
            traffic.goes_on(60)
            until(lambda: parked(cluster, "real"), "no key is parked")
            changed(cluster, "real", "split", pid=0)
            killed = leader_of(cluster, "real", 1)
            cluster.kill(killed)
            traffic.goes_on(60)
            cluster.start_node(killed)
            cluster.wait_ready()
            body = {"keys": [f"key-{5 % KEYS}"]}
            status, answer = call(
                cluster, "POST", path("real", "groups", "readers", "park", "resume"), body
            )
            assert status < 300, answer
            # It is parked as long as more of it comes than is delivered one by one.
            changed(cluster, "real", "merge", pids=open_pids(cluster, "real")[:2])
            (last, *_) = open_pids(cluster, "real")
            other = next(n for n in (1, 2, 3) if n != leader_of(cluster, "real", last))
            changed(cluster, "real", "move", pid=last, node=str(other))
            traffic.goes_on(60)
            traffic.finish()
    found = audit(tmp_path, spark=spark)
    assert found.violations == 0, found.to_json()
    stored = sum(queue.published for queue in found.queues)
    assert stored >= len(traffic.publisher.confirmed) > 180
    tamper(tmp_path)
    names = {
        verdict.invariant.name for verdict in audit(tmp_path, spark=spark).verdicts if verdict.rows
    }
    assert Invariant.TOPIC_LOG_ORDER.name in names


def tamper(root: Path) -> None:
    """One message was published later than all others of its key, by what its channel heard."""
    found = []
    for file in sorted(root.rglob("group-*.parquet")):
        rows = pq.read_table(file, partitioning=None).to_pylist()
        found += [(row["time_us"], file, row) for row in rows if row["kind"] == words.TAGGED]
    _, file, row = min(found, key=lambda each: each[0])

    def later(rows: Rows, _facts: dict[str, Any]) -> None:
        rows[rows.index(row)]["first_id"] += 1_000_000

    rewrite(file, later)
