"""Reads of streams against a broker in memory, called as Spark calls them."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from convoymq.client.errors import AccessRefused, Unavailable
from convoymq.spark.errors import DataLoss, SchemaError, SourceError
from tests.spark.fakes import T0_MS, FakeBroker
from tests.spark.support import Query, batch_rows, numbered, stream_source, tasks_rows


def query(**options: Any) -> Query:
    data_source = stream_source(**{"convoymq.pollInterval": "0ms", **options})
    return Query(lambda: data_source.stream_reader(data_source.schema()))


def values(rows: list[dict[str, Any]]) -> list[bytes]:
    return [row["value"] for row in rows]


# --- batch -----------------------------------------------------------------------------------


def test_a_batch_reads_everything_that_is_kept(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 10)).drop(3)
    broker.stream("t", b"other")
    rows = batch_rows(stream_source(subscribe="s,t"))
    assert [(r["topic"], r["offset"], r["value"]) for r in rows] == [
        *(("s", i, b"%d" % i) for i in range(3, 10)),
        ("t", 0, b"other"),
    ]


@pytest.mark.parametrize("parts", [1, 3, 7, 100])
def test_tasks_cover_every_row_once(broker: FakeBroker, parts: int) -> None:
    broker.stream("s", *numbered(0, 50))
    data_source = stream_source(subscribe="s", minPartitions=parts, **{"convoymq.fetch.maxRows": 4})
    reader = data_source.reader(data_source.schema())
    partitions = reader.partitions()
    assert len(partitions) == min(parts, 50)
    assert values(tasks_rows(reader, partitions)) == numbered(0, 50)


@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_a_task_reads_part_by_part_with_and_without_reading_ahead(
    broker: FakeBroker, prefetch: str
) -> None:
    broker.stream("s", *numbered(0, 20))
    options = {"convoymq.fetch.maxRows": 6, "convoymq.fetch.prefetch": prefetch}
    assert values(batch_rows(stream_source(subscribe="s", **options))) == numbered(0, 20)
    assert broker.calls.count("fetch") == 4


def test_a_bounded_rate_is_kept_and_not_made_up_for(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.stream("s", *numbered(10, 50))
    clock = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("convoymq.spark.reading.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("convoymq.spark.reading.time.sleep", sleep)
    options = {
        "convoymq.fetch.maxRows": 10,
        "convoymq.fetch.prefetch": "false",
        "convoymq.fetch.maxBytesPerSecond": "1000",
    }
    data_source = stream_source(subscribe="s", **options)
    reader = data_source.reader(data_source.schema())
    sizes = []
    for number, batch in enumerate(reader.read(reader.partitions()[0])):
        sizes.append(batch.num_rows)
        if number == 2:
            # A slow consumer: what it lost is lost.
            clock[0] += 50.0
    assert sizes == [10] * 4
    assert len(slept) == 4
    # Ten rows of about 20 B.
    assert slept == pytest.approx([slept[0]] * 4)
    assert 0.18 <= slept[0] <= 0.32


def test_a_bounded_rate_asks_for_small_parts() -> None:
    def part(**options: str) -> int:
        given = {f"convoymq.fetch.{name}": value for name, value in options.items()}
        reader: Any = stream_source(subscribe="s", **given)
        return int(reader.reader(reader.schema())._options.fetching.part_bytes)

    assert part() == 8 << 20
    assert part(maxBytesPerSecond="50m") == 1 << 20
    assert part(maxBytesPerSecond="1000") == 64 << 10
    assert part(maxBytesPerSecond="1g", maxBytes="2m") == 2 << 20


def test_a_read_that_stops_early_ends_its_thread(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 20))
    data_source = stream_source(subscribe="s", **{"convoymq.fetch.maxRows": 5})
    reader = data_source.reader(data_source.schema())
    rows = reader.read(reader.partitions()[0])
    next(rows)
    rows.close()
    assert broker.calls.count("fetch") <= 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": '{"s":{"0":3}}', "endingOffsets": '{"s":{"0":5}}'}, (3, 5)),
        ({"startingOffsets": '{"s":{"0":-2}}', "endingOffsets": '{"s":{"0":-1}}'}, (0, 10)),
        ({"startingTimestamp": T0_MS + 4, "endingTimestamp": T0_MS + 6}, (4, 6)),
        ({"startingOffsetsByTimestamp": f'{{"s":{{"0":{T0_MS + 8}}}}}'}, (8, 10)),
        ({"endingOffsetsByTimestamp": f'{{"s":{{"0":{T0_MS + 2}}}}}'}, (0, 2)),
        ({"endingTimestamp": T0_MS + 99}, (0, 10)),
        (
            {
                "startingTimestamp": T0_MS + 99,
                "startingOffsetsByTimestampStrategy": "latest",
            },
            (10, 10),
        ),
    ],
)
def test_ranges_by_offset_and_by_time(
    broker: FakeBroker, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    broker.stream("s", *numbered(0, 10))
    assert values(batch_rows(stream_source(subscribe="s", **options))) == numbered(*expected)


def test_a_start_later_than_every_message_is_an_error_unless_said_otherwise(
    broker: FakeBroker,
) -> None:
    broker.stream("s", b"x")
    with pytest.raises(SourceError, match="no message at or after"):
        batch_rows(stream_source(subscribe="s", startingTimestamp=T0_MS + 5))


def test_a_pattern_reads_what_matches_as_a_whole(broker: FakeBroker) -> None:
    for name in ("flights-a", "flights-b", "my-flights"):
        broker.stream(name, name.encode())
    rows = batch_rows(stream_source(subscribePattern="flights.*"))
    assert values(rows) == [b"flights-a", b"flights-b"]


def test_an_empty_batch_reads_nothing_from_the_partition_that_spark_invents(
    broker: FakeBroker,
) -> None:
    broker.stream("s")
    data_source = stream_source(subscribe="s")
    reader = data_source.reader(data_source.schema())
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


def test_a_wrong_name_is_told_with_the_near_ones(broker: FakeBroker) -> None:
    broker.stream("flights")
    broker.queue("orders")
    with pytest.raises(SourceError, match=r"no stream flihgts; did you mean flights"):
        batch_rows(stream_source(subscribe="flihgts"))
    with pytest.raises(SourceError, match=r"orders is a quorum queue.*convoymq_queue"):
        batch_rows(stream_source(subscribe="orders"))


def test_a_broker_that_is_down_is_told_as_such(broker: FakeBroker) -> None:
    broker.stream("s")
    broker.down = True
    with pytest.raises(Unavailable, match="no answer from fake:1"):
        batch_rows(stream_source(subscribe="s"))


def test_offsets_outside_of_the_stream_are_a_loss(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 10)).drop(4)
    early = {"startingOffsets": '{"s":{"0":1}}'}
    with pytest.raises(DataLoss, match="offset 1 is wanted, the earliest kept is 4"):
        batch_rows(stream_source(subscribe="s", **early))
    rows = batch_rows(stream_source(subscribe="s", failOnDataLoss="false", **early))
    assert values(rows) == numbered(4, 10)
    late = {"endingOffsets": '{"s":{"0":50}}'}
    with pytest.raises(DataLoss, match="offset 50 is wanted, but its end is 10"):
        batch_rows(stream_source(subscribe="s", **late))
    rows = batch_rows(stream_source(subscribe="s", failOnDataLoss="false", **late))
    assert values(rows) == numbered(4, 10)


def test_what_retention_takes_between_plan_and_read_is_a_loss(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 10))
    for flag, expected in (("true", None), ("false", numbered(6, 10))):
        data_source = stream_source(subscribe="s", failOnDataLoss=flag)
        reader = data_source.reader(data_source.schema())
        partitions = reader.partitions()
        stream.drop(3)
        if expected is None:
            with pytest.raises(DataLoss, match="messages 0 to 2 are gone; the earliest kept is 3"):
                tasks_rows(reader, partitions)
        else:
            assert values(tasks_rows(reader, partitions)) == expected
    data_source = stream_source(subscribe="s")
    reader = data_source.reader(data_source.schema())
    partitions = reader.partitions()
    del broker.streams["s"]
    with pytest.raises(DataLoss, match="stream s is gone: messages 6 to 9"):
        tasks_rows(reader, partitions)


def test_a_schema_that_does_not_fit_is_refused() -> None:
    data_source = stream_source(subscribe="s")
    for fields, text in (
        ([StructField("valeu", StringType())], "did you mean value"),
        ([StructField("offset", StringType())], "has the type bigint, not string"),
        ([StructField("key", data_source.schema()["key"].dataType, False)], "NOT NULL"),
        ([StructField("offset", LongType()), StructField("offset", LongType())], "twice"),
        ([], "without columns"),
    ):
        with pytest.raises(SchemaError, match=text):
            data_source.reader(StructType(fields))


def test_partitions_hold_no_secret(broker: FakeBroker) -> None:
    broker.stream("s", b"x")
    data_source = stream_source(subscribe="s", password="hush")
    reader = data_source.reader(data_source.schema())
    assert b"hush" not in pickle.dumps(reader.partitions())


# --- filters ---------------------------------------------------------------------------------


def time(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp((T0_MS + ms) / 1000, datetime.UTC)


@pytest.mark.parametrize(
    ("filters", "left", "expected"),
    [
        ([GreaterThan(("offset",), 3), LessThan(("offset",), 6)], 0, [4, 5]),
        ([GreaterThanOrEqual(("offset",), 8)], 0, [8, 9]),
        ([LessThanOrEqual(("offset",), 1)], 0, [0, 1]),
        ([EqualTo(("offset",), 7)], 0, [7]),
        ([In(("offset",), (2, 5))], 1, [2, 3, 4, 5]),
        ([EqualTo(("offset",), 70)], 0, []),
        ([GreaterThan(("offset",), 6), LessThan(("offset",), 3)], 0, []),
        ([EqualTo(("topic",), "s")], 0, list(range(10))),
        ([EqualTo(("topic",), "other")], 0, []),
        ([StringStartsWith(("topic",), "x")], 0, []),
        ([EqualTo(("partition",), 1)], 0, []),
        ([IsNotNull(("offset",))], 0, list(range(10))),
        ([IsNotNull(("key",))], 1, list(range(10))),
        ([Not(EqualTo(("offset",), 1))], 1, list(range(10))),
        ([StringContains(("value",), "1")], 1, list(range(10))),
        ([EqualTo(("properties", "type"), "x")], 1, list(range(10))),
    ],
)
def test_filters_narrow_what_is_fetched(
    broker: FakeBroker, filters: list[Any], left: int, expected: list[int]
) -> None:
    broker.stream("s", *numbered(0, 10))
    data_source = stream_source(subscribe="s", pushdown="true")
    reader = data_source.reader(data_source.schema())
    assert len(list(reader.pushFilters(filters))) == left
    assert [row["offset"] for row in tasks_rows(reader, reader.partitions())] == expected


def test_filters_on_time_lose_no_row(broker: FakeBroker) -> None:
    broker.stream("s").add(*numbered(0, 100), step_ms=10)
    data_source = stream_source(subscribe="s", pushdown="true")
    for low, high in ((205, 300), (200, 300), (210, 290)):
        reader = data_source.reader(data_source.schema())
        filters = [
            GreaterThanOrEqual(("timestamp",), time(low)),
            LessThan(("timestamp",), time(high)),
        ]
        assert list(reader.pushFilters(filters)) == filters
        rows = tasks_rows(reader, reader.partitions())
        kept = [r["offset"] for r in rows if time(low) <= r["timestamp"] < time(high)]
        assert kept == [i for i in range(100) if low <= i * 10 < high]
        assert len(rows) <= len(kept) + 2


def test_without_the_option_there_is_no_pushdown() -> None:
    """Spark refuses a reader that has the method, unless the session allows it."""
    from pyspark.sql.datasource import DataSourceReader

    data_source = stream_source(subscribe="s")
    reader = data_source.reader(data_source.schema())
    assert type(reader).pushFilters is DataSourceReader.pushFilters


# --- streaming -------------------------------------------------------------------------------


def test_each_message_is_read_once_while_the_stream_grows(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 5))
    running = query(subscribe="s", startingOffsets="earliest")
    running.start()
    running.run()
    stream.add(*numbered(5, 8))
    running.run()
    assert running.values == numbered(0, 8)
    assert len(running.wal) == 2


def test_latest_is_pinned_by_the_first_batch(broker: FakeBroker) -> None:
    """Spark asks for the initial offset twice, and again after a restart: trap 1."""
    stream = broker.stream("s", *numbered(0, 5))
    running = query(subscribe="s")
    running.start()
    assert running.step()
    stream.add(*numbered(5, 8))
    assert running.initial() == running.initial()
    assert running.step(crash="planned")
    stream.add(*numbered(8, 9))
    running.start()
    running.run()
    assert running.values == numbered(5, 9)


def test_a_first_batch_that_was_planned_but_not_done_is_repeated_as_it_was(
    broker: FakeBroker,
) -> None:
    stream = broker.stream("s", *numbered(0, 5))
    running = query(subscribe="s", startingOffsets="earliest")
    running.start()
    assert running.step(crash="planned")
    stream.add(*numbered(5, 8))
    running.start()
    running.run()
    assert [values(rows) for rows in running.sink.values()] == [numbered(0, 5), numbered(5, 8)]


@pytest.mark.parametrize("crash", ["planned", "sunk"])
def test_a_repeated_batch_has_the_same_rows(broker: FakeBroker, crash: str) -> None:
    stream = broker.stream("s", *numbered(0, 3))
    running = query(subscribe="s", startingOffsets="earliest", maxOffsetsPerTrigger=4)
    running.start()
    for i in range(3, 40, 4):
        stream.add(*numbered(i, i + 4))
        running.step(crash=crash if i % 3 == 0 else "")
        if i % 3 == 0:
            running.start()
    running.run()
    assert running.values == numbered(0, stream.end)


def test_idle_offsets_are_the_same_text(broker: FakeBroker) -> None:
    """Otherwise empty batches run for ever: trap 4."""
    broker.stream("s", *numbered(0, 5))
    broker.stream("t")
    running = query(subscribe="t,s", startingOffsets="earliest")
    running.start()
    running.run()
    assert len(running.wal) == 1
    for _ in range(3):
        assert not running.step()


def test_limits_are_shared_by_backlog(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 30))
    broker.stream("t", *numbered(0, 10))
    running = query(subscribe="s,t", startingOffsets="earliest", maxOffsetsPerTrigger=8)
    running.start()
    running.run()
    sizes = [len(rows) for rows in running.sink.values()]
    assert sizes == [8, 8, 8, 8, 8]
    first = [row["topic"] for row in running.sink[0]]
    assert (first.count("s"), first.count("t")) == (6, 2)
    assert len(running.rows) == 40


@pytest.mark.parametrize("has_replica", [True, False])
def test_a_limit_in_bytes_uses_the_mean_size(broker: FakeBroker, has_replica: bool) -> None:
    broker.stream("s", *([bytes(100)] * 50)).sizes_known = has_replica
    running = query(subscribe="s", startingOffsets="earliest", maxBytesPerTrigger=1000)
    running.start()
    running.run()
    assert [len(rows) for rows in running.sink.values()] == [10] * 5


def test_a_trigger_that_asks_for_all_gets_all(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 50))
    data_source = stream_source(subscribe="s", startingOffsets="earliest", maxOffsetsPerTrigger=5)
    reader = data_source.stream_reader(data_source.schema())
    assert reader.getDefaultReadLimit() == ReadMaxRows(5)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end["p"] == {"s": {"0": 50}}


def test_small_batches_wait_for_the_minimum(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 3))
    running = query(subscribe="s", startingOffsets="earliest", minOffsetsPerTrigger=10)
    running.start()
    assert running.step()
    stream.add(*numbered(3, 12))
    assert not running.step()
    stream.add(*numbered(12, 13))
    assert running.step()
    assert running.values == numbered(0, 13)


def test_available_now_ends_where_the_streams_ended_at_its_start(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 10))
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 4}
    running = query(subscribe="s", minOffsetsPerTrigger=3, **options)
    running.start(available_now=True)
    stream.add(*numbered(10, 15))
    running.run()
    assert running.values == numbered(0, 10)
    running.start(available_now=True)
    running.run()
    assert running.values == numbered(0, 15)
    batches = len(running.wal)
    running.start(available_now=True)
    running.run()
    assert len(running.wal) == batches


def test_available_now_of_a_pattern_leaves_new_streams_to_the_next_run(broker: FakeBroker) -> None:
    broker.stream("s-1", b"a")
    running = query(subscribePattern="s-.*", startingOffsets="earliest")
    running.start(available_now=True)
    broker.stream("s-2", b"b")
    running.run()
    assert running.values == [b"a"]
    running.start(available_now=True)
    running.run()
    assert running.values == [b"a", b"b"]


def test_a_new_stream_of_a_pattern_is_read_from_its_beginning(broker: FakeBroker) -> None:
    broker.stream("s-1", b"a")
    running = query(subscribePattern="s-.*")
    running.start()
    running.run()
    broker.stream("s-2", b"b", b"c")
    assert running.step(crash="planned")
    running.start()
    running.run()
    assert running.values == [b"b", b"c"]


def test_a_gap_by_retention_is_a_loss(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 5))
    for flag in ("true", "false"):
        running = query(subscribe="s", startingOffsets="earliest", failOnDataLoss=flag)
        running.start()
        running.run()
        at = stream.end
        stream.add(*numbered(at, at + 10))
        stream.drop(stream.end - stream.first - 3)
        if flag == "true":
            with pytest.raises(DataLoss, match=f"offset {at} is wanted"):
                running.step()
        else:
            assert running.step(crash="planned")
            running.start()
            assert running.values[-3:] == numbered(at + 7, at + 10)
            assert not running.step()


def test_a_stream_that_was_declared_again_is_a_loss(broker: FakeBroker) -> None:
    """Even when it has grown beyond the old offset: these are other messages."""
    broker.stream("s", *numbered(0, 5))
    for flag in ("true", "false"):
        running = query(subscribe="s", startingOffsets="earliest", failOnDataLoss=flag)
        running.start()
        running.run()
        broker.stream("s", *numbered(100, 120))
        if flag == "true":
            with pytest.raises(DataLoss, match="deleted and declared again"):
                running.step()
        else:
            assert running.step()
            assert running.values[-20:] == numbered(100, 120)
            assert not running.step()


@pytest.mark.parametrize("flag", ["true", "false"])
def test_a_repeated_batch_reads_no_rows_of_another_stream_of_its_name(
    broker: FakeBroker, flag: str
) -> None:
    """Deleted and declared again between a batch's plan and its repeat."""
    broker.stream("s", *numbered(0, 5))
    running = query(subscribe="s", startingOffsets="earliest", failOnDataLoss=flag)
    running.start()
    running.step(crash="planned")
    broker.stream("s", *numbered(100, 110))
    if flag == "true":
        with pytest.raises(DataLoss, match="s was deleted and declared again: messages 0 to 4"):
            running.start()
        assert running.rows == []
    else:
        running.start()
        assert running.rows == []
        running.run()
        assert running.values == numbered(100, 110)


def test_a_checkpoint_of_another_stream_is_refused(broker: FakeBroker) -> None:
    for name in "abc":
        broker.stream(name, *numbered(0, 5))
    of_a = query(subscribe="a", startingOffsets="earliest")
    of_a.start()
    of_a.step(crash="sunk")
    other = query(subscribe="b,c", startingOffsets="earliest")
    other.wal, other.commits = of_a.wal, of_a.commits
    text = "the checkpoint is of stream a, not of b, c"
    with pytest.raises(SourceError, match=text):
        other.start()
    other.commits = len(other.wal)
    other.start()
    with pytest.raises(SourceError, match=text):
        other.step()
    more = query(subscribe="a,b", startingOffsets="earliest")
    more.wal, more.commits, more.sink = of_a.wal, of_a.commits, of_a.sink
    more.start()
    more.run()
    assert sorted(more.values) == sorted(numbered(0, 5) * 2)


def test_a_topic_is_no_stream_and_that_is_told(broker: FakeBroker) -> None:
    broker.topic("t")
    source = stream_source(subscribe="t")
    with pytest.raises(SourceError, match="t is an ordered topic, no stream: option topic reads"):
        source.reader(source.schema()).partitions()


def test_a_batch_read_is_of_one_stream_from_its_plan_to_its_tasks(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 5))
    reader = stream_source(subscribe="s").reader(stream_source(subscribe="s").schema())
    partitions = reader.partitions()
    broker.stream("s", *numbered(100, 110))
    with pytest.raises(DataLoss, match="deleted and declared again"):
        tasks_rows(reader, partitions)


@pytest.mark.parametrize("how", ["subscribe", "subscribePattern"])
@pytest.mark.parametrize("flag", ["true", "false"])
def test_a_permission_that_is_taken_away_is_told_and_nothing_comes_again(
    broker: FakeBroker, how: str, flag: str
) -> None:
    broker.stream("s", *numbered(0, 5))
    broker.stream("t", b"t")
    names = {"subscribe": "s,t", "subscribePattern": "s|t"}[how]
    running = query(startingOffsets="earliest", failOnDataLoss=flag, **{how: names})
    running.start()
    running.run()
    broker.refuse_reads.add("s")
    for _ in range(2):
        with pytest.raises(AccessRefused, match="read access to s refused"):
            running.step()
        running.start()
    broker.refuse_reads.clear()
    broker.streams["s"].add(b"5")
    running.run()
    assert sorted(running.values) == [*numbered(0, 6), b"t"]


@pytest.mark.parametrize("how", ["subscribe", "subscribePattern"])
@pytest.mark.parametrize("flag", ["true", "false"])
def test_a_node_whose_metadata_is_behind_does_not_make_a_stream_look_gone(
    broker: FakeBroker, how: str, flag: str
) -> None:
    broker.stream("s", b"other")
    before = dict(broker.streams)
    broker.stream("s", *numbered(0, 5))
    running = query(startingOffsets="earliest", failOnDataLoss=flag, **{how: "s"})
    running.start()
    running.run()
    for behind in ({}, before):
        broker.behind = behind
        broker.streams["s"].add(b"%d" % broker.streams["s"].end)
        running.run()
    assert running.values == numbered(0, 7)


def test_a_stream_that_was_deleted_is_a_loss(broker: FakeBroker) -> None:
    for flag in ("true", "false"):
        broker.stream("s", b"a")
        broker.stream("t", b"b")
        running = query(subscribe="s,t", startingOffsets="earliest", failOnDataLoss=flag)
        running.start()
        running.run()
        del broker.streams["s"]
        if flag == "true":
            with pytest.raises(DataLoss, match="read up to offset 1, was deleted"):
                running.step()
        else:
            running.run()
            broker.streams["t"].add(b"c")
            running.run()
            assert running.values == [b"a", b"b", b"c"]


def test_a_leader_that_lags_is_no_loss(broker: FakeBroker) -> None:
    """A new leader learns late what is committed: its end may lie below what was read."""
    stream = broker.stream("s", *numbered(0, 10))
    running = query(subscribe="s", startingOffsets="earliest")
    running.start()
    running.run()
    tail = stream.messages[6:]
    del stream.messages[6:]
    assert not running.step()
    stream.messages += tail
    stream.add(*numbered(10, 12))
    running.run()
    assert running.values == numbered(0, 12)


def test_progress_is_stored_for_people_and_never_read(broker: FakeBroker) -> None:
    stream = broker.stream("s", *numbered(0, 5))
    running = query(subscribe="s", startingOffsets="earliest", groupId="g")
    running.start()
    running.run()
    assert stream.offsets == {"g": 4}
    stores = broker.calls.count("store_offset")
    running.step()
    assert broker.calls.count("store_offset") == stores
    stream.offsets["g"] = 0
    running.start()
    running.run()
    assert running.values == numbered(0, 5)


def test_the_streams_end_is_reported_for_the_lag(broker: FakeBroker) -> None:
    broker.stream("s", *numbered(0, 10))
    running = query(subscribe="s", startingOffsets="earliest", maxOffsetsPerTrigger=4)
    running.start()
    running.step()
    assert running.reader.reportLatestOffset() == {"v": 1, "p": {"s": {"0": 10}}}


def test_a_task_reads_nothing_but_what_its_range_says(broker: FakeBroker) -> None:
    """Whatever the broker answers: rows that were not asked for must not become data."""
    from convoymq.client.results import FetchResult
    from convoymq.spark import clients
    from tests.spark.fakes import Message, frame_of

    broker.stream("s", *numbered(0, 10))
    data_source = stream_source(subscribe="s", **{"convoymq.fetch.prefetch": "false"})
    reader = data_source.reader(data_source.schema())
    partitions = reader.partitions()
    client: Any = clients.connect(None)  # type: ignore[arg-type]
    for base, rows in ((1, 3), (0, 11), (0, 0)):
        frame = frame_of(15, base, [Message(b"x")] * rows)
        client.fetch = lambda *_a, frame=frame, **_k: FetchResult(frame=frame, first=0, high=10)
        with pytest.raises(SourceError, match="asked for messages 0 to 9"):
            list(reader.read(partitions[0]))
