"""What is recorded of a queue, and that what is claimed to be covered is really there."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from convoymq.broker.facade import Broker
from convoymq.edges.http import metrics
from convoymq.edges.http.exposition import Text
from convoymq.model import trace as words
from convoymq.model.config import TraceConfig
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.trace import segments
from convoymq.trace.recorder import Traces
from convoymq.trace.segments import Segment
from convoymq.trace.writer import Writer
from tests.patience import PATIENCE_S
from tests.unit.queues.quorum.support import Log, session_id

from .support import Recording, random_log, rows_of, wall_clock_us

PUBLISHER = session_id(1, 1)
CONSUMER = session_id(200, 2)

DECIDED = (
    words.PUBLISHED,
    words.DELIVERED,
    words.ACKED,
    words.RETURNED,
    words.DROPPED,
    words.OWNER,
)


def decided(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Decided rows in log order, without who wrote them."""
    keys = words.ROW_COLUMNS
    found = [tuple(row[key] for key in keys) for row in rows if row["kind"] in DECIDED]
    return sorted(found, key=lambda row: (row[keys.index("index")], row[keys.index("ordinal")]))


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    rows = sorted(rows, key=lambda row: (row["index"], row["ordinal"]))
    return [words.KIND_NAMES[row["kind"]] for row in rows if row["kind"] in DECIDED]


def test_a_message_leaves_a_row_for_every_step(tmp_path: Path) -> None:
    log = Log()
    log.publish(PUBLISHER, [10] * 5)
    log.seal()
    log.checkout(CONSUMER, 1, prefetch=3)
    log.seal()
    log.settle(CONSUMER, 1, 0, 1)
    log.return_(CONSUMER, 1, 2, 2, failed=True)
    log.seal()
    recording = Recording(tmp_path)
    recording.apply(log.entries)
    recording.close()

    rows = rows_of(tmp_path)
    assert kinds(rows) == [
        "published",
        "owner",
        "delivered",
        "acked",
        "delivered",
        "returned",
        "delivered",
    ]
    by_kind = {row["kind"]: row for row in rows}
    published = by_kind[words.PUBLISHED]
    assert (published["index"], published["position_index"], published["count"]) == (1, 1, 5)
    # The session's first command opened it.
    assert (published["term"], published["seq"], published["first_id"]) == (1, 2, 0)
    assert published["time_us"] == log.entries[0].time_ms * 1000
    again = max((r for r in rows if r["kind"] == words.DELIVERED), key=lambda r: r["ordinal"])
    assert (again["acquired"], again["delivered"]) == (1, 1)
    assert again["flags"] & words.REDELIVERED
    assert again["session"] & (2**64 - 1) == CONSUMER
    assert (published["vhost"], published["queue"], published["group"]) == ("/", "orders", 7)


def test_the_state_snapshot_at_the_end_is_what_is_in_the_queue(tmp_path: Path) -> None:
    log = random_log(3)
    recording = Recording(tmp_path)
    recording.apply(log.entries)
    machine = recording.machine
    expected = Counter(
        {
            True: machine.backlog.unacked,
            False: machine.backlog.fresh.messages + machine.backlog.returned.messages,
        }
    )
    recording.close()
    rows = rows_of(tmp_path)
    counted: Counter[bool] = Counter()
    for row in rows:
        if row["kind"] == words.STATE:
            counted[bool(row["flags"] & words.HELD)] += row["count"]
    assert counted == +expected
    (summary,) = [row for row in rows if row["kind"] == words.SUMMARY]
    assert summary["index"] == log.entries[-1].index
    assert (summary["seq"], summary["first_id"]) == (
        machine.backlog.published,
        machine.backlog.acked,
    )
    assert summary["flags"] & words.COMPLETE


def test_an_end_in_order_is_told_also_when_the_last_segment_was_complete(tmp_path: Path) -> None:
    """A queue that is idle for longer than a segment's age has nothing else to tell at the end."""
    log = random_log(4)
    recording = Recording(tmp_path)
    recording.apply(log.entries)
    recording.trace.rotate()
    recording.trace.rotate()
    recording.close()
    found = [segments.read_metadata(path) for path in sorted(recording.directory.iterdir())]
    assert [each["closed"] for each in found] == [False, True]
    (before,), (after,) = (each["acts"] for each in found)
    assert before[1] == after[0]


@pytest.mark.parametrize("seed", range(5))
def test_replicas_record_the_same(tmp_path: Path, seed: int) -> None:
    log = random_log(seed)
    found = []
    for node in (1, 2, 3):
        recording = Recording(tmp_path / str(node), node)
        recording.apply(log.entries)
        recording.close()
        found.append(decided(rows_of(tmp_path / str(node))))
    assert found[0] == found[1] == found[2]
    assert len({row[3:5] for row in found[0]}) == len(found[0]), "(index, ordinal) names a row"


@pytest.mark.parametrize("seed", range(5))
def test_rows_add_up_to_the_machine(tmp_path: Path, seed: int) -> None:
    """Every counter of the machine is the sum of its rows."""
    log = random_log(seed)
    recording = Recording(tmp_path, delivery_limit=1)
    recording.apply(log.entries)
    totals = recording.machine.totals()
    recording.close()
    counted: Counter[str] = Counter()
    for row in rows_of(tmp_path):
        counted[words.KIND_NAMES[row["kind"]]] += row["count"]
        if row["kind"] == words.DROPPED:
            counted[words.REASON_NAMES[row["reason"]]] += row["count"]
    assert counted["published"] == totals["published"]
    assert counted["delivered"] == totals["delivered"]
    assert counted["acked"] == totals["acked"]
    assert counted["returned"] == totals["returned"]
    assert counted["rejected"] == totals["dropped_rejected"]
    assert counted["delivery_limit"] == totals["dropped_delivery_limit"]
    assert counted["purged"] == totals["purged"]


def test_a_replay_after_a_restart_is_not_recorded_twice(tmp_path: Path) -> None:
    """Goal: restart from the log alone, and from a snapshot, both after a kill -9."""
    log = random_log(1)
    whole = Recording(tmp_path / "whole")
    whole.apply(log.entries)
    whole.close()

    first = Recording(tmp_path / "cut", incarnation=1)
    first.apply(log.entries[:20])
    first.trace.flush()
    first.apply(log.entries[20:25])
    first.kill()
    second = Recording(tmp_path / "cut", incarnation=2)
    second.apply(log.entries[:40])
    snapshot = second.machine.snapshot()
    second.trace.flush()
    second.apply(log.entries[40:45])
    second.kill()
    third = Recording(tmp_path / "cut", incarnation=3)
    third.machine.restore(snapshot)
    third.apply(log.entries[40:])
    third.close()
    assert decided(rows_of(tmp_path / "cut")) == decided(rows_of(tmp_path / "whole"))


def test_a_snapshot_from_elsewhere_leaves_a_hole_in_the_coverage(tmp_path: Path) -> None:
    log = random_log(2)
    other = Recording(tmp_path / "other")
    other.apply(log.entries[:40])
    snapshot = other.machine.snapshot()
    other.close()
    recording = Recording(tmp_path / "mine")
    recording.apply(log.entries[:10])
    recording.machine.restore(snapshot)
    recording.apply(log.entries[40:])
    recording.close()
    marks = [
        (row["position_index"], row["index"])
        for row in rows_of(tmp_path / "mine")
        if row["kind"] == words.COVERED
    ]
    last = log.entries[-1].index
    covered = {index for start, end in marks for index in range(start + 1, end + 1)}
    assert covered == set(range(1, 11)) | set(range(41, last + 1))


def test_a_torn_journal_becomes_a_segment_of_what_is_whole(tmp_path: Path) -> None:
    log = random_log(4)
    recording = Recording(tmp_path)
    recording.apply(log.entries[:10])
    recording.trace.flush()
    recording.apply(log.entries[10:20])
    recording.trace.flush()
    recording.kill()
    (journal,) = recording.directory.glob("*.journal")
    data = journal.read_bytes()
    journal.write_bytes(data[: len(data) - 40])

    again = Recording(tmp_path, incarnation=2)
    assert again.trace.rows.skip_through == 10
    again.apply(log.entries[:20])
    again.close()
    rows = rows_of(tmp_path)
    assert {row["index"] for row in rows if row["kind"] in DECIDED} == set(range(1, 21))
    assert not list(tmp_path.rglob("*.journal"))
    assert not list(tmp_path.rglob("*.part"))


def test_rows_that_find_no_room_are_never_claimed(tmp_path: Path) -> None:
    """The thread stands still: rows are dropped, counted, and outside every mark."""
    log = random_log(5)
    recording = Recording(tmp_path, backlog_max_bytes=1)
    recording.apply(log.entries[:5])
    recording.trace.flush()
    overloaded = recording.writer._done
    recording.writer._handed += 10_000
    recording.apply(log.entries[5:20])
    recording.trace.flush()
    assert recording.trace.lost > 0
    recording.writer._handed -= 10_000
    while recording.writer.overloaded:
        assert recording.writer._done >= overloaded
    recording.apply(log.entries[20:])
    recording.close()
    rows = rows_of(tmp_path)
    marks = [row for row in rows if row["kind"] == words.COVERED]
    covered = {
        index for mark in marks for index in range(mark["position_index"] + 1, mark["index"] + 1)
    }
    assert covered == set(range(1, len(log.entries) + 1)) - set(range(6, 21))
    assert sum(mark["count"] for mark in marks) == recording.trace.lost


@pytest.mark.provokes("trace.not_written")
def test_a_full_disk_ends_the_coverage_and_the_queue_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = random_log(6)
    recording = Recording(tmp_path)
    recording.apply(log.entries[:10])
    recording.trace.rotate()
    while not list(recording.directory.glob("*.parquet")):
        pass

    def full(self: Segment, rows: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "write", full)
        recording.apply(log.entries[10:20])
        recording.trace.flush()
        while not recording.trace._feed.failed:
            pass
        recording.apply(log.entries[20:30])
        recording.trace.flush()
    while recording.trace._feed.failed:
        pass
    recording.apply(log.entries[30:])
    recording.close()
    rows = rows_of(tmp_path)
    covered = {
        index
        for mark in rows
        if mark["kind"] == words.COVERED
        for index in range(mark["position_index"] + 1, mark["index"] + 1)
    }
    assert covered == set(range(1, len(log.entries) + 1)) - set(range(11, 31))
    assert recording.writer.errors == 1


def test_segments_end_by_size_and_age_and_go_by_retention(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    log = random_log(7)
    for k in range(0, 40, 10):
        recording.trace.rotate()
        recording.apply(log.entries[k : k + 10])
    recording.close()
    files = sorted(recording.directory.glob("*.parquet"))
    assert len(files) == 4
    sizes = [file.stat().st_size for file in files]
    assert segments.trim(tmp_path, sum(sizes[1:])) == 1
    assert segments.trim(tmp_path, sum(sizes[1:])) == 0
    assert sorted(recording.directory.glob("*.parquet")) == files[1:]


def test_a_segment_says_what_it_is(tmp_path: Path) -> None:
    recording = Recording(tmp_path, queue="a/b ☃ " + "x" * 300)
    recording.apply(random_log(8).entries[:10])
    recording.close()
    (path,) = tmp_path.rglob("*.parquet")
    facts = segments.read_metadata(path)
    assert facts["queue"] == "a/b ☃ " + "x" * 300
    assert (facts["covered"], facts["format"]) == ([[0, 10]], words.FORMAT)
    assert [state_snapshot["index"] for state_snapshot in facts["state_snapshots"]] == [10]
    assert pq.read_table(path, partitioning=None).num_rows == facts["rows"]
    (tmp_path / "strange.parquet").write_bytes(b"not parquet")
    with pytest.raises(OSError, match="no segment of a trace"):
        segments.read_metadata(tmp_path / "strange.parquet")


@pytest.mark.parametrize("name", [".", "..", "...", "a/../b", "%2F", "x" * 255])
def test_no_queue_name_leaves_the_directory(tmp_path: Path, name: str) -> None:
    recording = Recording(tmp_path, queue=name)
    place = recording.directory.resolve()
    assert tmp_path.resolve() in place.parents
    assert place.parent != tmp_path.resolve()
    recording.close()


def test_a_queue_without_messages_leaves_no_file(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.close()
    assert not list(tmp_path.rglob("*.*"))


VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "trace"


def test_files_of_format_1_stay_readable(tmp_path: Path) -> None:
    """A journal and a segment of one queue, as format 1 was written when it was made."""
    origin = Recording(tmp_path).origin
    name = origin.name(0)
    place = tmp_path / "copies"
    place.mkdir()
    for path in VECTORS.iterdir():
        shutil.copy(path, place / path.name)
    segment = place / f"{name}.parquet"
    facts = segments.read_metadata(segment)
    assert (facts["queue"], facts["covered"], facts["closed"]) == ("orders", [[0, 15]], True)
    expected = decided(pq.read_table(segment, partitioning=None).to_pylist())
    assert len(expected) == 95
    segment.unlink()
    assert segments.covered_through(place, origin) == 15
    assert segments.convert(place / f"{name}.journal", origin) == segment
    assert decided(pq.read_table(segment, partitioning=None).to_pylist()) == expected


@pytest.mark.provokes("trace.fault", "trace.unfinished")
@pytest.mark.moves("convoy_trace_write_errors_total", "convoy_trace_queues")
def test_a_fault_in_the_thread_ends_no_trace(tmp_path: Path) -> None:
    traces = Traces(tmp_path, 1, 1, TraceConfig(), wall_clock_us)
    show(traces)
    assert traces.open("/", "q", "quorum", 1) is not None
    writer = traces._writer
    go_on = threading.Event()
    writer._work.put(lambda: 1 // 0)
    writer._work.put(go_on.wait)
    while not writer.errors:
        pass
    show(traces)
    traces.stop()
    traces.join(0.01)
    go_on.set()
    assert writer.close(30)


def test_who_closes_takes_over_from_the_thread_of_low_priority(tmp_path: Path) -> None:
    """In order, and what the thread is at comes first."""
    writer = Writer(tmp_path, retention_bytes=1 << 20, backlog_max_bytes=1 << 20)
    order: list[tuple[int, bool]] = []
    begun, go_on = threading.Event(), threading.Event()

    def note(number: int) -> None:
        order.append((number, threading.current_thread() is threading.main_thread()))

    def first() -> None:
        begun.set()
        go_on.wait()
        note(0)

    writer._work.put(first)
    for number in (1, 2):
        writer._work.put(partial(note, number))
    begun.wait()
    threading.Timer(0.01, go_on.set).start()
    assert writer.close(30)
    assert order == [(0, False), (1, True), (2, True)]


@pytest.mark.provokes("trace.unavailable")
def test_a_node_without_pyarrow_writes_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "is_available", lambda: False)
    assert Traces(tmp_path, 1, 1, TraceConfig(), wall_clock_us).open("/", "q", "quorum", 1) is None


@pytest.mark.provokes("trace.unreadable")
def test_a_directory_that_cannot_be_read_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_place: Any) -> int:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(segments, "covered_through", unreadable)
    traces = Traces(tmp_path, 1, 1, TraceConfig(), wall_clock_us)
    assert traces.open("/", "q", "quorum", 1) is not None
    traces.stop()
    traces.join(PATIENCE_S)


@pytest.mark.moves("convoy_trace_rows_lost_total")
def test_rows_that_are_dropped_are_counted(tmp_path: Path) -> None:
    traces = Traces(tmp_path, 1, 1, TraceConfig(backlog_max_bytes=1), wall_clock_us)
    made = traces.open("/", "q", "quorum", 1)
    assert made is not None
    show(traces)
    log = random_log(3)
    machine = QuorumMachine({})
    made.attach(machine)
    for entry in log.entries:
        machine.apply(entry.index, entry.time_ms, entry.data)
        machine.effects.clear()
        made.flush()
    show(traces)
    traces.stop()
    traces.join(PATIENCE_S)


def show(traces: Traces) -> None:
    """Renders the metrics of traces, as a node does."""
    text = Text({}, open_metrics=False)
    metrics._traces(text, cast(Broker, SimpleNamespace(traces=traces, spans=None)))
    text.render()
