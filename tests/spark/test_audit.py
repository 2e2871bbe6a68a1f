"""The audit finds every kind of broken promise, and nothing in a trace where none was broken.

Traces are made by the real machine and recorder on three nodes, one queue per kind of injury; all
of them are audited in one run. The last test records a real cluster whose leader is killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks import audit as benchmark
from pyspark.sql import SparkSession

from convoymq.model import trace as words
from convoymq.model.errors import Misuse
from convoymq.spark.audit import AuditReport, audit
from convoymq.spark.audit.coverage import Gap, queue_facts
from convoymq.spark.audit.plan import read_footers
from convoymq.spark.audit.report import html_page, tables
from convoymq.spark.audit.result import QueueReport
from tests.forked_nodes import ForkedCluster
from tests.ports import cluster_ports
from tests.unit.trace.support import Recording, random_log

Row = dict[str, Any]
Rows = list[Row]
PORT = cluster_ports(__name__)
MESSAGES = 400


def of_kind(rows: Rows, kind: int, **wanted: Any) -> Rows:
    """Rows of a kind in log order."""
    found = [
        row
        for row in rows
        if row["kind"] == kind and all(row[key] == value for key, value in wanted.items())
    ]
    return sorted(found, key=lambda row: (row["index"], row["ordinal"], row["time_us"]))


def middle(rows: Rows) -> Row:
    return rows[len(rows) // 2]


def added(rows: Rows, row: Row, **changes: Any) -> None:
    """A decided row that no machine decided, at the end of its entry."""
    index = changes.get("index", row["index"])
    last = max((r["ordinal"] for r in rows if r["index"] == index), default=0)
    rows.append({**row, "ordinal": last + 1, **changes})


# Injuries: each changes the rows of one node's file in place; `node` tells whose.


def other_replica(rows: Rows, node: int) -> None:
    if node == 2:
        middle(of_kind(rows, words.DELIVERED))["consumer"] += 1


def missing_on_a_replica(rows: Rows, node: int) -> None:
    if node == 3:
        rows.remove(middle(of_kind(rows, words.ACKED)))


def time_goes_back(rows: Rows, node: int) -> None:
    middle(of_kind(rows, words.PUBLISHED))["time_us"] -= 10_000_000


def term_goes_back(rows: Rows, node: int) -> None:
    middle(of_kind(rows, words.PUBLISHED))["term"] -= 1


def number_left_out(rows: Rows, node: int) -> None:
    for row in of_kind(rows, words.PUBLISHED)[20:]:
        row["first_id"] += 1


def published_twice(rows: Rows, node: int) -> None:
    row = middle(of_kind(rows, words.PUBLISHED))
    added(rows, row, index=row["index"] + 2)


def publisher_swapped(rows: Rows, node: int) -> None:
    first = middle(of_kind(rows, words.PUBLISHED))
    mine = of_kind(rows, words.PUBLISHED, session=first["session"])
    second = mine[mine.index(first) + 1]
    first["seq"], second["seq"] = second["seq"], first["seq"]


def confirmed_for_nothing(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.CONFIRMED)
    if found:
        rows.append({**found[-1], "seq": 90_000, "first_id": 90_001, "count": 3})


def confirmed_too_many(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.CONFIRMED)
    if found:
        middle(found)["count"] += 1


def confirmed_again(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.CONFIRMED)
    if found:
        rows.append(dict(middle(found)))


def delivered_from_nowhere(rows: Rows, node: int) -> None:
    row = middle(of_kind(rows, words.DELIVERED, acquired=0))
    row["position_first"] += 500


def settled_from_nowhere(rows: Rows, node: int) -> None:
    added(rows, middle(of_kind(rows, words.ACKED)), position_command=4_000_000)


def two_owners(rows: Rows, node: int) -> None:
    row = middle(of_kind(rows, words.DELIVERED))
    added(rows, row, consumer=row["consumer"] + 7)


def back_from_the_dead(rows: Rows, node: int) -> None:
    settled = middle(of_kind(rows, words.ACKED))
    row = of_kind(rows, words.DELIVERED, session=settled["session"])[-1]
    place = {k: settled[k] for k in ("position_index", "position_command", "position_first")}
    added(rows, row, count=settled["count"], index=settled["index"] + 1, **place)


def settled_twice(rows: Rows, node: int) -> None:
    row = middle(of_kind(rows, words.ACKED))
    added(rows, row, index=row["index"] + 1)


def settled_by_another_session(rows: Rows, node: int) -> None:
    middle(of_kind(rows, words.ACKED))["session"] += 1


def settled_unasked(rows: Rows, node: int) -> None:
    """Of a message that went back to the queue, and was not handed out again at once."""
    row = of_kind(rows, words.PUBLISHED)[-1]
    added(rows, {**of_kind(rows, words.ACKED)[0],
        "position_index": row["position_index"],
        "position_command": row["position_command"],
        "position_first": row["position_first"] + row["count"] - 1,
        "index": row["index"],
        "count": 1
    })  # fmt: skip


def overtaken(rows: Rows, node: int) -> None:
    """Two messages of one run change places on their first way to the consumer."""
    fresh = [row for row in of_kind(rows, words.DELIVERED, acquired=0) if not row["flags"] & 4]
    for first in fresh[10:]:
        later = [
            row
            for row in fresh
            if (row["session"], row["consumer"]) == (first["session"], first["consumer"])
            and row["index"] > first["index"]
        ]
        if later:
            for key in ("position_index", "position_command", "position_first", "count"):
                first[key], later[0][key] = later[0][key], first[key]
            return


def id_left_out(rows: Rows, node: int) -> None:
    row = middle([r for r in of_kind(rows, words.DELIVERED) if not r["flags"] & 4])
    for each in rows:
        same = (each["session"], each["consumer"]) == (row["session"], row["consumer"])
        if each["kind"] in (words.DELIVERED, words.SENT) and same:
            each["first_id"] += each["first_id"] >= row["first_id"]


def delivered_after_cancel(rows: Rows, node: int) -> None:
    gone = next(row for row in of_kind(rows, words.OWNER) if row["flags"] & words.GONE)
    got = of_kind(rows, words.DELIVERED, session=gone["session"], consumer=gone["consumer"])[-1]
    added(rows, got, index=gone["index"], first_id=got["first_id"] + got["count"], count=1)


def flag_forgotten(rows: Rows, node: int) -> None:
    again = [row for row in of_kind(rows, words.DELIVERED) if row["acquired"]]
    middle(again)["flags"] &= ~words.REDELIVERED


def count_forgotten(rows: Rows, node: int) -> None:
    again = [row for row in of_kind(rows, words.DELIVERED) if row["delivered"]]
    middle(again)["delivered"] -= 1


def sent_with_other_count(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.SENT)
    if found:
        middle(found)["acquired"] += 1


def sent_twice(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.SENT)
    if found:
        rows.append(dict(middle(found)))


def sent_undecided(rows: Rows, node: int) -> None:
    found = of_kind(rows, words.SENT)
    if found:
        rows.append({**middle(found), "first_id": 1 << 30})


def sent_out_of_order(rows: Rows, node: int) -> None:
    for row in of_kind(rows, words.SENT)[40:41]:
        row["time_us"] -= 10_000_000


def lost_from_the_queue(rows: Rows, node: int) -> None:
    """Published, and neither settled nor in the state snapshot."""
    ready = [row for row in of_kind(rows, words.STATE) if not row["flags"] & words.HELD]
    rows.remove(ready[0])


def lost_by_its_owner(rows: Rows, node: int) -> None:
    rows.remove(middle(of_kind(rows, words.ACKED)))


def settled_and_still_queued(rows: Rows, node: int) -> None:
    settled = middle(of_kind(rows, words.ACKED))
    place = {k: settled[k] for k in ("position_index", "position_command", "position_first")}
    rows.append({**of_kind(rows, words.STATE)[0], "count": settled["count"], **place})


def dropped_without_reason(rows: Rows, node: int) -> None:
    middle(of_kind(rows, words.DROPPED))["reason"] = 0


def totals_off(rows: Rows, node: int) -> None:
    """In the footer: see `injure`."""


INJURIES: dict[Callable[[Rows, int], None], str] = {
    other_replica: "replicas_agree",
    missing_on_a_replica: "replicas_agree",
    time_goes_back: "log_order",
    term_goes_back: "log_order",
    number_left_out: "numbered",
    published_twice: "numbered",
    publisher_swapped: "publisher_order",
    confirmed_for_nothing: "confirmed_is_published",
    confirmed_too_many: "confirmed_is_published",
    confirmed_again: "confirmed_once",
    delivered_from_nowhere: "delivered_is_published",
    settled_from_nowhere: "delivered_is_published",
    two_owners: "one_owner",
    back_from_the_dead: "ended_stays_ended",
    settled_twice: "ended_stays_ended",
    settled_by_another_session: "left_by_owner",
    settled_unasked: "left_by_owner",
    overtaken: "first_delivery_order",
    id_left_out: "delivery_numbers",
    delivered_after_cancel: "delivery_numbers",
    flag_forgotten: "redelivered",
    count_forgotten: "redelivered",
    sent_with_other_count: "sent_as_decided",
    sent_twice: "sent_as_decided",
    sent_undecided: "sent_as_decided",
    sent_out_of_order: "sent_as_decided",
    lost_from_the_queue: "nothing_lost",
    lost_by_its_owner: "nothing_lost",
    settled_and_still_queued: "nothing_lost",
    dropped_without_reason: "dropped_by_rule",
    totals_off: "totals",
}
UNHURT = ("clean-0", "clean-1", "clean-2")
NODES = (1, 2, 3)


def record(
    root: Path, name: str, group: int, seed: int, entries: int = 60, segments: int = 1
) -> None:
    """One queue on three nodes, with what their clients hear."""
    log = random_log(seed, entries, purge=False)
    half = len(log.entries) // segments
    for node in NODES:
        place = root / f"node-{node}"
        recording = Recording(place, node, queue=name, group=group, replicas=NODES)
        recording.apply(log.entries[:half], log, log.entries)
        if segments > 1:
            recording.trace.rotate()
            recording.apply(log.entries[half:], log, log.entries)
        recording.close()


def files_of(root: Path, name: str) -> Iterator[tuple[int, Path]]:
    for node in NODES:
        for path in sorted((root / f"node-{node}" / "%2F" / name).glob("*.parquet")):
            yield node, path


def rewrite(path: Path, change: Callable[[Rows, dict[str, Any]], None]) -> None:
    """Changes a segment's rows and footer."""
    table = pq.read_table(path, partitioning=None)
    facts = json.loads(pq.read_metadata(path).metadata[words.METADATA_KEY])
    rows = table.to_pylist()
    change(rows, facts)
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=table.schema))
        writer.add_key_value_metadata({words.METADATA_KEY: json.dumps(facts).encode()})


def injure(root: Path, injury: Callable[[Rows, int], None]) -> None:
    for node, path in files_of(root, injury.__name__):

        def change(rows: Rows, facts: dict[str, Any], node: int = node) -> None:
            injury(rows, node)
            if injury is totals_off:
                facts["state_snapshots"][-1]["published"] += 1

        rewrite(path, change)


@pytest.fixture(scope="module")
def report(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """One audit of all injured queues, and of some that nothing happened to."""
    root = tmp_path_factory.mktemp("traces")
    for k, injury in enumerate(INJURIES):
        record(root, injury.__name__, 100 + k, seed=11)
        injure(root, injury)
    for k, name in enumerate(UNHURT):
        record(root, name, 200 + k, seed=30 + k)
    record(root, "gap", 300, seed=40)
    for _, path in files_of(root, "gap"):

        def cut(rows: Rows, facts: dict[str, Any]) -> None:
            end = facts["covered"][-1][1]
            facts["covered"] = [[0, 20], [30, end]]

        rewrite(path, cut)
    record(root, "late", 301, seed=41)
    for _, path in files_of(root, "late"):

        def trim(rows: Rows, facts: dict[str, Any]) -> None:
            facts["covered"] = [[25, facts["covered"][-1][1]]]

        rewrite(path, trim)
    for k, (name, delete) in enumerate(DELETIONS.items()):
        record(root, name, 400 + k, seed=50, entries=20, segments=2)
        delete(root, name)
    return audit(root, spark=spark)


def delete_files(root: Path, name: str, *, node: int, number: int | None = None) -> None:
    for owner, path in files_of(root, name):
        if owner == node and number in (None, int(path.stem[-1])):
            path.unlink()


def delete_rows(root: Path, name: str, *, kind: int, nodes: tuple[int, ...]) -> None:
    """All rows of a kind; the footer agrees."""
    for node, path in files_of(root, name):

        def without(rows: Rows, facts: dict[str, Any]) -> None:
            rows[:] = [row for row in rows if row["kind"] != kind]
            facts["rows"] = len(rows)

        if node in nodes:
            rewrite(path, without)


def delete_last(root: Path, name: str, *, kind: int, nodes: tuple[int, ...]) -> None:
    """The last row of a kind in each node's last file that has one."""
    for node in nodes:
        for _, path in reversed([each for each in files_of(root, name) if each[0] == node]):
            found = of_kind(pq.read_table(path, partitioning=None).to_pylist(), kind)
            if not found:
                continue

            def without(rows: Rows, facts: dict[str, Any], last: Row = found[-1]) -> None:
                rows.remove(last)
                facts["rows"] = len(rows)

            rewrite(path, without)
            break


def deletions() -> dict[str, Callable[[Path, str], None]]:
    """Every part of a trace: the files of a node, each file, all rows and the last row of each
    kind, on one node and on all."""
    made: dict[str, Callable[[Path, str], None]] = {}
    for node in NODES:
        made[f"no-node-{node}"] = partial(delete_files, node=node)
        for number in (0, 1):
            made[f"no-file-{node}-{number}"] = partial(delete_files, node=node, number=number)
    for kind, word in words.KIND_NAMES.items():
        for nodes in (NODES, (2,), (3,)):
            if kind == words.CONFIRMED and nodes == (3,):
                continue  # Nobody publishes there.
            label = f"{word}-{''.join(map(str, nodes))}"
            made[f"no-{label}"] = partial(delete_rows, kind=kind, nodes=nodes)
            if kind not in (words.MEMBER, words.SUMMARY):
                made[f"no-last-{label}"] = partial(delete_last, kind=kind, nodes=nodes)
    return made


DELETIONS = deletions()


def queue(report: AuditReport, name: str) -> QueueReport:
    return next(each for each in report.queues if each.facts.queue == name)


@pytest.mark.parametrize("injury", INJURIES, ids=lambda injury: injury.__name__)
def test_an_injected_violation_is_found(
    report: AuditReport, injury: Callable[[Rows, int], None]
) -> None:
    found = queue(report, injury.__name__).violations
    assert found.get(INJURIES[injury], 0) > 0, found


@pytest.mark.parametrize("name", DELETIONS)
def test_nothing_is_proved_when_a_part_of_the_trace_is_gone(report: AuditReport, name: str) -> None:
    assert not queue(report, name).proved


@pytest.mark.parametrize("name", UNHURT)
def test_a_whole_trace_is_a_proof(report: AuditReport, name: str) -> None:
    found = queue(report, name)
    assert found.proved, (found.violations, found.unproved, found.facts.gaps, found.facts.missing)


@pytest.mark.parametrize("name", [*UNHURT, "gap", "late"])
def test_nothing_is_found_where_nothing_happened(report: AuditReport, name: str) -> None:
    assert queue(report, name).violations == {}


def test_the_fates_of_a_clean_queue_add_up(report: AuditReport) -> None:
    found = queue(report, "clean-0")
    state_snapshot = found.facts.state_snapshot
    assert state_snapshot is not None
    assert found.published == state_snapshot["published"] == sum(found.fates.values())
    assert found.fates["settled"] == state_snapshot["acked"]
    assert found.fates["ready"] == state_snapshot["ready"]
    assert found.queued_after_snapshot == 0
    assert found.confirmed == state_snapshot["published"]
    dropped = sum(n for name, n in found.fates.items() if name.startswith("dropped"))
    assert dropped == state_snapshot["dropped"]


def test_a_gap_is_told_and_never_taken_for_proof(report: AuditReport) -> None:
    found = queue(report, "gap")
    assert [(gap.start, gap.end) for gap in found.facts.gaps if not gap.node] == [(20, 30)]
    assert not report.proved
    assert any(verdict.unproved for verdict in report.verdicts)


def test_the_report_is_complete_in_every_form(report: AuditReport) -> None:
    assert report.exit_code == 1
    known = json.loads(report.to_json())
    assert {row["name"] for row in known["invariants"] if row["violations"]} == set(
        INJURIES.values()
    )
    assert all(row["examples"] for row in known["invariants"] if row["violations"])
    page = html_page(report)
    assert page.count("<div class='chart'>") >= len(report.queues)
    assert not re.search(r"(?:src|href)=|url\(", page)
    assert tables(report)


def test_bad_input_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(Misuse, match="no segment of a trace"):
        audit(tmp_path, spark=spark)
    with pytest.raises(Misuse, match="no such file"):
        audit(tmp_path / "missing", spark=spark)
    (tmp_path / "group-1-node-1-1-0.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(Misuse, match="no segment of a trace"):
        audit(tmp_path, spark=spark)
    record(tmp_path / "a", "one", 1, seed=1)
    record(tmp_path / "b", "two", 1, seed=1)
    with pytest.raises(Misuse, match="one cluster at a time"):
        audit([tmp_path / "a", tmp_path / "b"], spark=spark)
    with pytest.raises(Misuse, match="no trace of queue 'three'"):
        audit(tmp_path / "a", queues=["three"], spark=spark)


@pytest.mark.cluster
def test_a_real_run_whose_leader_is_killed_is_clean(spark: SparkSession, tmp_path: Path) -> None:
    """Goal: kill -9 and restart of the leader break no promise. Publisher and consumer are on the
    other nodes; all nodes end in order, so their last segments hold a state snapshot."""
    settings = {"trace.segment_max_age": "1000"}
    with ForkedCluster(tmp_path / "data", 3, PORT, settings) as cluster:
        cluster.wait_ready()
        with connect(PORT) as connection:
            arguments = {"x-queue-type": "quorum", "x-trace": True}
            connection.channel().queue_declare("audited", durable=True, arguments=arguments)
        with connect(PORT + 1) as publishing, connect(PORT + 2) as consuming:
            publisher = publishing.channel()
            publisher.confirm_delivery()
            publish(publisher, MESSAGES // 2)
            consumer = consuming.channel()
            consumer.basic_qos(prefetch_count=40)
            consume(consumer, MESSAGES // 4)
            cluster.kill(1)
            publish(publisher, MESSAGES // 2)
            cluster.start_node(1)
            cluster.wait_ready()
            consume(consumer, MESSAGES // 2)
    report = audit(tmp_path / "data", spark=spark)
    (found,) = report.queues
    assert found.violations == {}
    assert found.published == found.confirmed == MESSAGES
    # The consumer's last messages may still be on their way back when the nodes stop.
    left = {"ready", "checked out"} & found.fates.keys()
    assert found.fates.keys() - left == {"settled"}
    assert found.fates["settled"] == MESSAGES // 4 * 3
    assert sum(found.fates[fate] for fate in left) == MESSAGES // 4
    assert found.queued_after_snapshot == 0
    # A node that needed too long for its last segment has an open end as well.
    missing = [gap for gap in found.facts.gaps if "in order" not in gap.why]
    assert {gap.node for gap in missing} <= {1}, missing


@pytest.mark.long
@pytest.mark.cluster
def test_a_real_run_that_ends_in_order_is_proved(spark: SparkSession, tmp_path: Path) -> None:
    """And is not without the files of any of its nodes, or without any of these files."""
    settings = {"trace.segment_max_age": "1000", "node.stop_timeout": "60000"}
    with ForkedCluster(tmp_path / "data", 3, PORT, settings) as cluster:
        cluster.wait_ready()
        with connect(PORT + 1) as publishing, connect(PORT + 2) as consuming:
            publisher = publishing.channel()
            arguments = {"x-queue-type": "quorum", "x-trace": True}
            publisher.queue_declare("audited", durable=True, arguments=arguments)
            publisher.confirm_delivery()
            publish(publisher, MESSAGES // 2)
            consume(consuming.channel(), MESSAGES // 4)
            publish(publisher, MESSAGES // 2)
    places = [tmp_path / "data" / f"node-{node}" for node in NODES]
    (found,) = audit(places, spark=spark).queues
    assert found.proved, (found.violations, found.unproved, found.facts.gaps, found.facts.missing)
    for place in places:
        assert gaps([each for each in places if each != place]), place
    for file in sorted(tmp_path.rglob("*.parquet")):
        aside = file.rename(file.with_suffix(".aside"))
        assert gaps(places), file
        aside.rename(file)


def gaps(places: list[Path]) -> list[Gap]:
    """What the footers alone say is missing; with any of these nothing is proved."""
    (facts,) = queue_facts(read_footers(places)[1])
    return facts.gaps


@pytest.mark.long
def test_the_benchmark_audits_a_trace_that_is_proved(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "CHUNK", 40)
    assert benchmark.write(tmp_path, 1100) > 1100
    (found,) = audit(tmp_path, spark=spark).queues
    assert found.proved, (found.violations, found.unproved, found.facts.gaps, found.facts.missing)
    assert found.published == 100 * benchmark.RUN


def connect(port: int) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))


def publish(channel: Any, count: int) -> None:
    """Each publish is confirmed before the next one."""
    for _ in range(count):
        channel.basic_publish("", "audited", b"x" * 100)


def consume(channel: Any, count: int) -> None:
    """Settles `count` messages, and gives some back on the way."""
    settled = 0
    for k, (method, _, _) in enumerate(channel.consume("audited")):
        if k % 17 == 5:
            channel.basic_nack(method.delivery_tag, requeue=True)
            continue
        channel.basic_ack(method.delivery_tag)
        settled += 1
        if settled == count:
            break
    channel.cancel()
