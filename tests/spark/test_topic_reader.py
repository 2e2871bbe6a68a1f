"""Reads of a topic against a broker in memory, driven as Spark drives them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.client.errors import AccessRefused
from convoymq.spark.errors import DataLoss, OptionError, SourceError
from convoymq.spark.listener import LagListener
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken
from tests.spark.fakes import T0_MS, FakeBroker, FakeTopic
from tests.spark.support import Query, batch_rows, stream_source

KEYS = [f"key-{number}" for number in range(12)]
Rows = list[dict[str, Any]]


class Published:
    """What was published to a topic, by key, in order."""

    def __init__(self, topic: FakeTopic) -> None:
        self.topic = topic
        self.by_key: dict[str, list[bytes]] = {}
        self.count = 0

    def more(self, count: int = 24) -> None:
        for _ in range(count):
            key, value = KEYS[self.count % len(KEYS)], b"%d" % self.count
            self.topic.publish((key, value))
            self.by_key.setdefault(key, []).append(value)
            self.count += 1


@pytest.fixture
def published(broker: FakeBroker) -> Published:
    return Published(broker.topic("t", partitions=2))


def by_key(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[bytes]]:
    """Values by key, sorted by order token."""
    found: dict[str, list[bytes]] = {}
    for row in sorted(rows, key=lambda row: row["order_token"]):
        found.setdefault(row["key"].decode(), []).append(row["value"])
    return found


def streaming(**options: Any) -> Query:
    source = stream_source(**{"topic": "t", "startingOffsets": "earliest", **options})
    return Query(lambda: source.stream_reader(source.schema()))


def batch(**options: Any) -> Rows:
    return batch_rows(stream_source(topic="t", **options))


def change_everything(published: Published) -> None:
    """A split, a merge over old and new partitions, and messages between."""
    published.more()
    published.topic.split(0, 2)
    published.more()
    first, second, third = published.topic.history.open_pids
    published.topic.merge(second, third)
    published.more()
    assert first


# --- batch -----------------------------------------------------------------------------------


def test_rows_have_their_place_in_the_topic(published: Published) -> None:
    change_everything(published)
    rows = batch()
    assert by_key(rows) == published.by_key
    for row in rows:
        assert row["lp"] == logical_partition(row["key"], 16)
        assert row["topic"] == "t"
        assert row["pid"] == row["partition"]
        line = published.topic.history.lineage.partition(row["pid"])
        assert row["route_version"] == line.created_version
        assert row["order_token"] == str(OrderToken(line.created_version, row["offset"]))
        assert line.lo <= row["lp"] < line.hi
    assert {row["offset"] for row in rows if row["pid"] == 0} == set(
        range(1, published.topic.stream(0).end + 1)
    )


def test_one_task_reads_one_partition(published: Published) -> None:
    change_everything(published)
    source = stream_source(topic="t")
    parts = source.reader(source.schema()).partitions()
    assert len(parts) == len({part.partition for part in parts}) == 5


def test_the_order_key_is_a_header_or_the_routing_key(broker: FakeBroker) -> None:
    topic = broker.topic("t")
    topic.publish(("a", b"1"))
    header = [("other", b"x"), ("x-order-key", b"\xff1"), ("x-order-key", b"second")]
    topic.publish(("b", b"2"), headers=header)
    topic.publish(("c", b"3"), headers=[("x-order-key", b"")])
    topic.publish(("", b"4"), headers=[])
    rows = batch()
    assert [row["key"] for row in rows] == [b"a", b"\xff1", b"c", None]
    assert [row["lp"] for row in rows[:2]] == [logical_partition(k, 16) for k in (b"a", b"\xff1")]
    assert rows[3]["lp"] is None


def test_tokens_and_offsets_of_far_offsets(broker: FakeBroker) -> None:
    topic = broker.topic("t")
    topic.stream(0).first = 0x1FFFD
    topic.publish(*(("k", b"%d" % i) for i in range(5)))
    assert [row["order_token"] for row in batch()] == [
        str(OrderToken(0, 0x1FFFE + i)) for i in range(5)
    ]


def test_a_batch_between_two_vectors(published: Published) -> None:
    change_everything(published)
    history = published.topic.history
    start = {"t": {"0": 3, "1": -2}}
    end = {"t": {str(pid): 2 for pid in history.open_pids}}
    rows = batch(startingOffsets=json.dumps(start), endingOffsets=json.dumps(end))
    for pid, line in history.lineage.partitions.items():
        found = [row["offset"] for row in rows if row["pid"] == pid]
        low = 3 if pid == 0 else 1
        high = 2 if line.close_offset is None else line.close_offset
        assert found == list(range(low, high))
    for wrong, text in (
        ({"t": {"0": 3}}, "no place"),
        ({"t": {"0": 3, "1": 1, "2": 1}}, "two places"),
        ({"t": {"0": 3, "77": 1}}, "no partition 77"),
        ({"t": {str(pid): 3 for pid in history.open_pids}}, "behind the end"),
    ):
        with pytest.raises(SourceError, match=text):
            batch(startingOffsets=json.dumps(wrong), endingOffsets=json.dumps(end))
    with pytest.raises(DataLoss, match="but its end is"):
        batch(startingOffsets='{"t":{"0":3,"1":100000}}')


def test_a_batch_between_two_times(broker: FakeBroker) -> None:
    topic = broker.topic("t")
    for step in range(4):
        for number in range(3):
            topic.publish((KEYS[number], b"%d" % step))
        for pid in topic.history.open_pids:
            for message in topic.stream(pid).messages:
                message.time_ms = T0_MS + step
        topic.split(topic.history.open_pids[0], *([topic.history.route.spans[0].hi // 2]))
    rows = batch(startingTimestamp=T0_MS + 1, endingTimestamp=T0_MS + 3)
    assert {row["value"] for row in rows} <= {b"1", b"2"}
    late = batch(startingTimestamp=T0_MS + 9, startingOffsetsByTimestampStrategy="latest")
    assert late == []
    with pytest.raises(SourceError, match="no message at or after"):
        batch(startingTimestamp=T0_MS + 9)


def test_a_topic_that_is_not_there(broker: FakeBroker) -> None:
    broker.stream("s")
    with pytest.raises(SourceError, match=r"no topic 'x' in vhost '/'$"):
        batch_rows(stream_source(topic="x"))
    with pytest.raises(SourceError, match="option subscribe reads streams"):
        batch_rows(stream_source(topic="s"))


@pytest.mark.parametrize(
    "given",
    [
        {"groupId": "g"},
        {"startingOffsetsByTimestamp": '{"t":{"0":5}}'},
        {"startingOffsets": '{"other":{"0":5}}'},
        {"subscribe": "s"},
    ],
)
def test_what_a_topic_does_not_serve_is_refused(given: dict[str, str]) -> None:
    source = stream_source(topic="t", **given)
    with pytest.raises(OptionError):
        source.stream_reader(source.schema())


# --- streaming -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["next-batch", "same-batch"])
@pytest.mark.parametrize("limit", [None, 5])
def test_a_query_runs_on_through_changes(
    published: Published, after: str, limit: int | None
) -> None:
    options = {"afterClose": after}
    if limit is not None:
        options["maxOffsetsPerTrigger"] = str(limit)
    query = streaming(**options)
    query.start()
    published.more()
    query.step()
    change_everything(published)
    query.step()
    published.topic.split(published.topic.history.open_pids[0], 1)
    published.more()
    query.run()
    assert by_key(query.rows) == published.by_key
    seen: dict[str, int] = {}
    for number in sorted(query.sink):
        rows = query.sink[number]
        pids: dict[bytes, set[int]] = {}
        for row in sorted(rows, key=lambda row: row["order_token"]):
            pids.setdefault(row["key"], set()).add(row["pid"])
            key = row["key"].decode()
            assert row["value"] == published.by_key[key][seen.get(key, 0)]
            seen[key] = seen.get(key, 0) + 1
        if after == "next-batch":
            assert all(len(each) == 1 for each in pids.values())
        assert limit is None or len(rows) <= limit
    if after == "next-batch":
        return
    assert any(len({row["pid"] for row in rows}) > 2 for rows in query.sink.values())


@pytest.mark.parametrize("crash", ["planned", "sunk"])
def test_a_batch_is_repeated_with_the_same_rows_after_changes(
    published: Published, crash: str
) -> None:
    query = streaming(maxOffsetsPerTrigger="7")
    query.start()
    published.more()
    query.step()
    published.topic.split(0, 2)
    published.more()
    query.step(crash=crash)
    published.topic.merge(*published.topic.history.open_pids[:2])
    published.more()
    query.start()
    while query.step():
        query.start()
    assert by_key(query.rows) == published.by_key


def test_available_now_ends_where_it_began_and_the_next_run_goes_on(published: Published) -> None:
    published.more()
    query = streaming()
    query.start(available_now=True)
    wanted = dict(published.by_key)
    wanted = {key: list(values) for key, values in wanted.items()}
    published.topic.split(0, 2)
    published.more()
    query.run()
    assert by_key(query.rows) == wanted
    query.start(available_now=True)
    query.run()
    assert by_key(query.rows) == published.by_key


def test_latest_begins_behind_what_is_there(published: Published) -> None:
    change_everything(published)
    query = streaming(startingOffsets="latest")
    query.start()
    assert query.step()
    assert query.rows == []
    published.by_key.clear()
    published.more()
    published.topic.split(published.topic.history.open_pids[-1], 12)
    published.more()
    query.run()
    assert by_key(query.rows) == published.by_key


def test_an_idle_query_has_no_batches(published: Published, broker: FakeBroker) -> None:
    published.more()
    query = streaming(**{"convoymq.pollInterval": "1ms"})
    query.start()
    query.run()
    before = len(query.wal)
    query.run()
    assert len(query.wal) == before
    # Of a change without messages only the place is noted.
    published.topic.split(0, 2)
    assert query.step()
    assert not query.step()
    assert by_key(query.rows) == published.by_key


def test_what_is_deleted_before_it_was_read_is_a_loss(published: Published) -> None:
    published.more()
    query = streaming(maxOffsetsPerTrigger="3")
    query.start()
    query.step()
    published.topic.split(0, 2)
    published.more()
    published.topic.delete(0)
    with pytest.raises(DataLoss, match="topic t, partition 0: it was deleted"):
        query.step()
    lenient = streaming(failOnDataLoss="false")
    lenient.wal, lenient.commits, lenient.sink = query.wal, query.commits, query.sink
    lenient.start()
    lenient.run()
    found = by_key(lenient.rows)
    for key, values in published.by_key.items():
        assert found[key] == [value for value in values if value in found[key]]
    assert len(lenient.rows) > 24


def test_earliest_begins_behind_what_retention_deleted(published: Published) -> None:
    published.more()
    published.topic.split(0, 2)
    published.topic.delete(0)
    published.more()
    published.topic.stream(1).drop(2)
    query = streaming()
    query.start()
    query.run()
    assert min(row["offset"] for row in query.rows if row["pid"] == 1) == 3
    assert not any(row["pid"] == 0 for row in query.rows)


def test_a_lost_partition_ends_the_query_unless_it_may_go_on(published: Published) -> None:
    published.more()
    query = streaming()
    query.start()
    query.run()
    published.topic.split(0, 2)
    published.topic.history.lineage.partition(0).close_offset = None
    published.more()
    query.run()
    held = {row["pid"] for row in query.rows}
    assert held == {0, 1}
    published.topic.lost.add(0)
    with pytest.raises(DataLoss, match="declared lost"):
        query.step()
    lenient = streaming(failOnDataLoss="false")
    lenient.wal, lenient.commits, lenient.sink = query.wal, query.commits, query.sink
    lenient.start()
    lenient.run()
    assert {row["pid"] for row in lenient.rows} == {0, 1, 2, 3}


def test_a_topic_that_was_created_again_is_another_one(
    published: Published, broker: FakeBroker
) -> None:
    published.more()
    query = streaming()
    query.start()
    query.step(crash="sunk")
    again = Published(broker.topic("t"))
    again.more()
    # Not even the repeated batch has rows of the other topic.
    with pytest.raises(DataLoss, match="topic t, partition 0 was deleted and declared again"):
        query.start()
    query.commits += 1
    with pytest.raises(DataLoss, match="deleted and created again"):
        query.step()
    lenient = streaming(failOnDataLoss="false")
    lenient.wal, lenient.commits = query.wal, query.commits
    lenient.start()
    lenient.run()
    assert by_key(lenient.rows) == again.by_key


def test_checkpoints_of_something_else_are_refused(
    published: Published, broker: FakeBroker
) -> None:
    broker.stream("s", b"1")
    of_stream = stream_source(subscribe="s", startingOffsets="earliest")
    query = Query(lambda: of_stream.stream_reader(of_stream.schema()))
    query.start()
    query.run()
    topical = streaming()
    topical.wal, topical.commits = query.wal, query.commits
    topical.start()
    with pytest.raises(SourceError, match="is of streams, not of topic t"):
        topical.step()
    topical = streaming()
    topical.start()
    topical.step()
    query.wal, query.commits = topical.wal, topical.commits
    with pytest.raises(SourceError, match="is of topic t, not of streams"):
        query.step()
    for damage in ({"p": 3}, {"hash": [1]}, {"g": {"0": 1}}, {"p": {"u": {"0": 1}}}):
        topical.wal[-1] = json.dumps({**json.loads(topical.wal[-1]), **damage})
        with pytest.raises(SourceError, match="damaged"):
            topical.step()


def test_no_permission_is_no_loss(published: Published, broker: FakeBroker) -> None:
    broker.refuse_reads.add("t")
    query = streaming(failOnDataLoss="false")
    query.start()
    with pytest.raises(AccessRefused):
        query.step()


@pytest.mark.parametrize("flag", ["true", "false"])
def test_partitions_that_may_not_be_read_are_told(
    published: Published, broker: FakeBroker, flag: str
) -> None:
    """Metadata hides what the user may not read: it is not there for the reader, and no loss."""
    published.more()
    query = streaming(failOnDataLoss=flag)
    query.start()
    query.step()
    broker.refuse_reads.add("amq.partition.t.0")
    wanted = r"partition 0 of topic t may not be read: .*needs read on t and on the names amq\."
    source = stream_source(topic="t", failOnDataLoss=flag)
    with pytest.raises(AccessRefused, match=wanted):
        source.reader(source.schema()).partitions()
    for _ in range(2):
        with pytest.raises(AccessRefused, match=wanted):
            query.step()
        query.start()
    broker.refuse_reads.clear()
    published.more()
    query.run()
    assert by_key(query.rows) == published.by_key


def test_the_lag_of_partitions_that_are_done_is_forgotten(published: Published) -> None:
    published.more()
    query = streaming(maxOffsetsPerTrigger="5")
    query.start()
    listener = LagListener()
    state = listener._query("run", "q", "id")  # type: ignore[arg-type]

    def progress() -> None:
        latest = json.dumps(query.reader.reportLatestOffset())
        source = SimpleNamespace(endOffset=query.wal[-1], latestOffset=latest)
        progress = SimpleNamespace(
            runId="run",
            name="q",
            id="id",
            batchId=1,
            numInputRows=1,
            processedRowsPerSecond=1.0,
            batchDuration=1,
            sources=(source,),
        )
        listener.onQueryProgress(SimpleNamespace(progress=progress))  # type: ignore[arg-type]

    query.step()
    progress()
    assert sum(state.lag.values()) == 19
    published.topic.split(0, 2)
    query.run()
    progress()
    assert state.lag == {("t", 1): 0, ("t", 2): 0, ("t", 3): 0}
    assert listener.prometheus().count('partition="2"') == 2
