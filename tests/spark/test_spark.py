"""The data sources inside Spark, on three real nodes."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from convoymq.spark import LagListener
from tests.patience import PATIENCE_S, pause_s
from tests.spark.cluster import Broker
from tests.spark.support import SCALE, numbered

KAFKA = [
    ("key", "binary"),
    ("value", "binary"),
    ("topic", "string"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("timestampType", "int"),
]


class Sink:
    """A Parquet directory and a checkpoint."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self._spark = spark
        self.out = str(path / "out")
        self.checkpoint = path / "checkpoint"

    def start(self, rows: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = rows.writeStream.format("parquet").option("path", self.out)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def run(self, rows: DataFrame) -> None:
        """Everything that is there now."""
        query = self.start(rows, availableNow=True)
        assert query.awaitTermination(PATIENCE_S)

    @property
    def values(self) -> list[bytes]:
        rows = self._spark.read.parquet(self.out).select("value").collect()
        return sorted((bytes(row.value) for row in rows), key=int)

    def batches(self, kind: str) -> int:
        """How many batches the checkpoint has in `offsets` or `commits`."""
        directory = self.checkpoint / kind
        return sum(p.name.isdigit() for p in directory.iterdir()) if directory.exists() else 0


@pytest.fixture
def sink(spark: SparkSession, tmp_path: Path) -> Sink:
    return Sink(spark, tmp_path)


@pytest.fixture
def reading(spark: SparkSession, nodes: Broker) -> Callable[..., DataFrame]:
    """A batch read of a stream."""

    def read(stream: str, schema: str | None = None, **options: Any) -> DataFrame:
        reader = spark.read.format("convoymq").option("servers", nodes.servers)
        reader = reader.options(subscribe=stream, **options)
        return (reader.schema(schema) if schema else reader).load()

    return read


@pytest.fixture
def streaming(spark: SparkSession, nodes: Broker) -> Callable[..., DataFrame]:
    """A streaming read; of a queue when the name says so."""

    def read(name: str, **options: Any) -> DataFrame:
        of_stream = name.startswith("stream")
        reader = spark.readStream.format("convoymq" if of_stream else "convoymq_queue")
        reader = reader.option("servers", nodes.servers)
        named = {"subscribe" if of_stream else "queue": name}
        if of_stream:
            named["startingOffsets"] = "earliest"
        return reader.options(**{**named, **options}).load()

    return read


def eventually(condition: Callable[[], Any], what: str) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < began + PATIENCE_S, f"waited in vain for {what}"
        time.sleep(pause_s(began))
    return found


# --- batch -----------------------------------------------------------------------------------


def test_a_stream_reads_as_kafkas_table(nodes: Broker, reading: Callable[..., DataFrame]) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 25_000))
    frame = reading(stream, minPartitions=3)
    assert [(n, t) for n, t in frame.dtypes] == KAFKA
    assert frame.rdd.getNumPartitions() == 3
    found = frame.agg(
        f.count("*").alias("rows"),
        f.countDistinct("offset").alias("offsets"),
        f.max("offset").alias("last"),
        f.sum(f.col("value").cast("string").cast("long")).alias("sum"),
        f.min("topic").alias("topic"),
        f.max("timestampType").alias("kind"),
    ).first()
    assert found is not None
    assert found.asDict() == {
        "rows": 25_000,
        "offsets": 25_000,
        "last": 24_999,
        "sum": sum(range(25_000)),
        "topic": stream,
        "kind": 1,
    }


def test_only_the_columns_that_are_asked_for(
    nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 10))
    frame = reading(stream, "offset bigint, value binary")
    assert frame.dtypes == [("offset", "bigint"), ("value", "binary")]
    assert [(r.offset, bytes(r.value)) for r in frame.collect()] == list(enumerate(numbered(0, 10)))
    with pytest.raises(PySparkException, match="did you mean offset"):
        reading(stream, "ofset bigint").collect()
    with pytest.raises(PySparkException, match="has the type bigint, not string"):
        reading(stream, "offset string").collect()


def test_filters_are_pushed_down_when_asked(
    nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 1000))
    frame = reading(stream, pushdown="true", maxRecordsPerPartition=100)
    narrow = frame.where("offset >= 500 and offset < 620 and partition = 0")
    assert narrow.rdd.getNumPartitions() == 2
    assert sorted(r.offset for r in narrow.collect()) == list(range(500, 620))
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    assert frame.where(f.col("timestamp") > f.lit(later)).count() == 0
    assert frame.where(f.col("timestamp") < f.lit(later)).count() == 1000


def test_headers_and_properties(nodes: Broker, reading: Callable[..., DataFrame]) -> None:
    import pika

    stream = nodes.declare("stream")
    with nodes.channel() as channel:
        channel.confirm_delivery()
        properties = pika.BasicProperties(
            headers={"x-key": "k", "kind": "test"}, message_id="m1", priority=3, timestamp=7
        )
        channel.basic_publish("", stream, b"x", properties)
    (row,) = reading(stream, includeHeaders="true", includeProperties="true").collect()
    assert bytes(row.key) == b"k"
    assert [(h.key, bytes(h.value)) for h in row.headers] == [("kind", b"test")]
    kept = row.properties
    assert (kept.message_id, kept.priority, kept.routing_key) == ("m1", 3, stream)
    assert kept.timestamp == datetime.datetime(1970, 1, 1, 0, 0, 7)


def test_a_batch_write_arrives_once_and_in_order(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    source, target = nodes.declare("stream"), nodes.declare("stream")
    nodes.publish(source, numbered(0, 12_000))
    for _ in range(2):
        writer = reading(source).write.format("convoymq").mode("append")
        writer.options(servers=nodes.servers, topic=target, producerName="copy").save()
    assert nodes.values(target) == numbered(0, 12_000)
    # Without a common name, a second write is another write.
    rows = spark.range(3).select(f.col("id").cast("string").alias("value"))
    for _ in range(2):
        rows.write.format("convoymq").mode("append").options(
            servers=nodes.servers, topic=target
        ).save()
    assert len(nodes.values(target)) == 12_006


def test_keys_headers_and_ids_come_back(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    stream = nodes.declare("stream")
    rows = spark.range(50).select(
        f.when(f.col("id") % 3 != 0, f.format_string("k%d", "id")).alias("key"),
        f.col("id").cast("string").cast("binary").alias("value"),
        f.lit(stream).alias("topic"),
        f.array(
            f.struct(
                f.lit("n").alias("key"), f.col("id").cast("string").cast("binary").alias("value")
            )
        ).alias("headers"),
        f.format_string("m%d", "id").alias("message_id"),
    )
    rows.repartition(1).sortWithinPartitions("message_id").write.format("convoymq").mode(
        "append"
    ).option("servers", nodes.servers).save()
    found = reading(stream, includeHeaders="true", includeProperties="true").collect()
    assert len(found) == 50
    for row in found:
        number = int(row.value)
        assert row.key == (f"k{number}".encode() if number % 3 else None)
        assert [(h.key, bytes(h.value)) for h in row.headers] == [("n", b"%d" % number)]
        assert row.properties.message_id == f"m{number}"
        assert row.properties.delivery_mode == 2


# --- streaming -------------------------------------------------------------------------------


def test_available_now_reads_each_message_once_over_many_runs(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    stream = nodes.declare("stream")
    for i in range(3):
        nodes.publish(stream, numbered(i * 1000, i * 1000 + 1000))
        sink.run(streaming(stream, maxOffsetsPerTrigger=600, minPartitions=2))
        assert sink.values == numbered(0, i * 1000 + 1000)
    assert sink.batches("commits") == 6
    sink.run(streaming(stream))
    assert sink.batches("commits") == 6


def test_latest_begins_where_the_first_run_began(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 10))
    query = sink.start(streaming(stream, startingOffsets="latest"))
    eventually(lambda: sink.batches("commits"), "the batch that pins the start")
    nodes.publish(stream, numbered(10, 20))
    query.processAllAvailable()
    query.stop()
    nodes.publish(stream, numbered(20, 30))
    query = sink.start(streaming(stream, startingOffsets="latest"))
    query.processAllAvailable()
    query.stop()
    assert sink.values == numbered(10, 30)


def test_a_repeated_batch_is_the_same_batch(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    """As after a crash between plan and commit: the commit is taken away."""
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 10))
    sink.run(streaming(stream))
    forget_last_commit(sink.checkpoint)
    shutil.rmtree(Path(sink.out))
    nodes.publish(stream, numbered(10, 20))
    sink.run(streaming(stream))
    assert sink.values == numbered(0, 20)


def forget_last_commit(checkpoint: Path) -> None:
    last = max(int(p.name) for p in (checkpoint / "commits").iterdir() if p.name.isdigit())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["stream", "quorum"])
def test_a_repeated_batch_adds_nothing_to_the_sink(
    nodes: Broker, streaming: Callable[..., DataFrame], tmp_path: Path, kind: str
) -> None:
    source, target = nodes.declare("stream"), nodes.declare(kind)
    nodes.publish(source, numbered(0, 500))

    def copy() -> None:
        is_stream = kind == "stream"
        writer = streaming(source, minPartitions=2, maxOffsetsPerTrigger=200).writeStream
        writer = writer.format("convoymq" if is_stream else "convoymq_queue")
        writer = writer.option("servers", nodes.servers).option(
            "topic" if is_stream else "queue", target
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "copy"))
        assert writer.trigger(availableNow=True).start().awaitTermination(PATIENCE_S)

    copy()
    forget_last_commit(tmp_path / "copy")
    nodes.publish(source, numbered(500, 600))
    copy()
    if kind == "stream":
        assert sorted(nodes.values(target), key=int) == numbered(0, 600)
    else:
        assert nodes.cluster.messages_in(target) == 600


def test_lag_is_seen_while_a_query_runs(
    spark: SparkSession, nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 100))
    listener = LagListener()
    spark.streams.addListener(listener)
    try:
        rows = streaming(stream, maxOffsetsPerTrigger=30, groupId="tests")
        query = sink.start(rows, availableNow=True)
        assert query.awaitTermination(PATIENCE_S)
        state = eventually(
            lambda: next((q for q in listener.queries() if q.state == "ended"), None), "the end"
        )
    finally:
        spark.streams.removeListener(listener)
    assert state.rows == 100
    assert state.positions == {(stream, 0): 100}
    assert state.lag == {(stream, 0): 0}
    assert f'topic="{stream}"}} 100' in listener.prometheus()
    assert nodes.client.query_offset(stream, "tests") == 99


# --- queues ----------------------------------------------------------------------------------


def test_a_queue_is_reserved_read_once_and_settled(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    queue = nodes.declare("quorum")
    nodes.publish(queue, numbered(0, 1000))
    rows = streaming(queue, maxOffsetsPerTrigger=300, minPartitions=2)
    query = sink.start(rows)
    query.processAllAvailable()
    nodes.publish(queue, numbered(1000, 1200))
    query.processAllAvailable()
    eventually(lambda: nodes.cluster.messages_in(queue) == 0, "the queue to be empty")
    query.stop()
    nodes.publish(queue, numbered(1200, 1300))
    sink.run(streaming(queue))
    assert sink.values == numbered(0, 1300)
    assert nodes.cluster.messages_in(queue) == 0


def test_a_queue_is_leased(nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink) -> None:
    queue = nodes.declare("quorum")
    nodes.publish(queue, numbered(0, 500))
    query = sink.start(streaming(queue, mode="lease", maxOffsetsPerTrigger=200))
    query.processAllAvailable()
    eventually(lambda: nodes.cluster.messages_in(queue) == 0, "the queue to be empty")
    query.stop()
    assert sink.values == numbered(0, 500)


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_browsing_takes_nothing(spark: SparkSession, nodes: Broker, kind: str) -> None:
    queue = nodes.declare(kind)
    nodes.publish(queue, numbered(0, 300))
    reader = spark.read.format("convoymq_queue").options(servers=nodes.servers, queue=queue)
    rows = reader.load().collect()
    assert [bytes(row.value) for row in rows] == numbered(0, 300)
    assert {(row.queue, row.redelivered) for row in rows} == {(queue, 0)}
    assert nodes.cluster.messages_in(queue) == 300


def test_a_classic_queue_is_reserved_and_written(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink, spark: SparkSession
) -> None:
    queue = nodes.declare("classic")
    rows = spark.range(0, 100, 1, 1).select(f.col("id").cast("string").alias("value"))
    writer = rows.write.format("convoymq_queue").mode("append")
    writer = writer.options(servers=nodes.servers, queue=queue)
    with pytest.raises(PySparkException, match="cannot tell a producer's repeats"):
        writer.save()
    writer.option("idempotent", "false").save()
    sink.run(streaming(queue))
    assert sink.values == numbered(0, 100)


# --- SQL -------------------------------------------------------------------------------------


def test_sql_reads_and_writes_by_a_view(spark: SparkSession, nodes: Broker) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 100))
    options = f"OPTIONS (servers '{nodes.servers}', {{}} '{stream}')"
    reading, writing = options.format("subscribe"), options.format("topic")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING convoymq {reading}")
    columns = "key BINARY, value BINARY"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW sink ({columns}) USING convoymq {writing}")
    count = "SELECT count(*) AS rows FROM orders WHERE offset >= 50"
    assert spark.sql(count).collect()[0].rows == 50
    spark.sql("INSERT INTO sink SELECT CAST('k' AS BINARY), CAST('v' AS BINARY)")
    assert spark.sql(count).collect()[0].rows == 51
    with pytest.raises(PySparkException, match=r"^[^\n]*CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE refused USING convoymq {reading}")


# --- errors ----------------------------------------------------------------------------------


def test_errors_reach_the_driver_in_time(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    stream = nodes.declare("stream")
    with pytest.raises(PySparkException, match=rf"^[^\n]*no stream x{stream}.*did you mean"):
        reading(f"x{stream}").collect()
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        reading(stream, startingOffset="earliest")
    quick = {"convoymq.timeout": "2s"}
    with pytest.raises(PySparkException, match=r"no answer from 127\.0\.0\.1:9 within 2 s"):
        reading(stream, servers="127.0.0.1:9", **quick).collect()
    with pytest.raises(PySparkException, match="AccessRefused"):
        reading(stream, password="wrong", **quick).collect()
    with pytest.raises(PySparkException, match="the environment has no CONVOY_NONE"):
        reading(stream, password="env:CONVOY_NONE").collect()


def test_no_permission_is_told(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    from benchmarks.convoy import add_user

    stream, other = nodes.declare("stream"), nodes.declare("stream")
    api = f"http://127.0.0.1:{nodes.cluster.nodes[0].http_port}"
    add_user(api, "reader", configure="^$", write="^$", read=f"^{other}$")
    who = {"user": "reader", "password": "reader"}
    assert reading(other, **who).count() == 0
    with pytest.raises(PySparkException, match=f"stream {stream} may not be read: .*refused"):
        reading(stream, **who).collect()
    rows = spark.range(0, 3, 1, 1).select(f.col("id").cast("string").alias("value"))
    writer = rows.write.format("convoymq").mode("append")
    with pytest.raises(PySparkException, match="AccessRefused"):
        writer.options(servers=nodes.servers, topic=other, **who).save()


def test_what_retention_has_dropped_is_a_loss(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    small = {"max_length_bytes": 100_000, "stream_max_segment_size_bytes": 50_000}
    stream = nodes.declare("stream", **small)
    nodes.publish(stream, numbered(0, 10))
    sink.run(streaming(stream))
    values = [b"%09d" % i for i in range(10, 40_010)]
    nodes.publish(stream, values, part=1000)
    eventually(lambda: (nodes.client.offsets([(stream, "earliest", None)])[0][0] or 0) > 10, "it")
    query = sink.start(streaming(stream), availableNow=True)
    with pytest.raises(PySparkException, match=r"offset 10 is wanted, the earliest kept is \d+"):
        query.awaitTermination(PATIENCE_S)
    sink.run(streaming(stream, failOnDataLoss="false"))
    kept = [int(v) for v in sink.values]
    first = kept[10]
    assert first > 10
    assert kept == [*range(10), *range(first, 40_010)]


# --- faults ----------------------------------------------------------------------------------


def test_all_nodes_are_killed_in_turn_in_mid_batch(
    nodes: Broker, streaming: Callable[..., DataFrame], tmp_path: Path
) -> None:
    """Read from a stream, written to another: each message once, whoever dies."""
    source, target = nodes.declare("stream"), nodes.declare("stream")
    nodes.publish(source, numbered(0, 1000 * SCALE))
    copy = streaming(source, maxOffsetsPerTrigger=100 * SCALE, minPartitions=2).writeStream
    copy = copy.format("convoymq").options(servers=nodes.servers, topic=target)
    query = copy.option("checkpointLocation", str(tmp_path / "copy")).start()
    commits = tmp_path / "copy" / "commits"
    for number in (1, 2, 3):
        before = len(list(commits.glob("*")))
        eventually(lambda before=before: len(list(commits.glob("*"))) > before, "a batch")
        nodes.cluster.kill(number)
        published = 700 + number * 300
        nodes.publish(source, numbered(published * SCALE, (published + 300) * SCALE))
        nodes.bring_back(number)
    query.processAllAvailable()
    query.stop()
    assert sorted(nodes.values(target), key=int) == numbered(0, 1900 * SCALE)


def test_the_leader_of_a_reserved_queue_is_killed(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    queue = nodes.declare("quorum")
    nodes.publish(queue, numbered(0, 2000 * SCALE))
    query = sink.start(streaming(queue, maxOffsetsPerTrigger=200 * SCALE))
    eventually(lambda: sink.batches("commits") >= 3, "three batches")
    killed = nodes.kill_leader(queue)
    try:
        query.processAllAvailable()
        nodes.publish(queue, numbered(2000 * SCALE, 2300 * SCALE))
        query.processAllAvailable()
        query.stop()
        assert sink.values == numbered(0, 2300 * SCALE)
    finally:
        nodes.bring_back(killed)


def test_workers_are_killed_in_mid_batch(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    """The task is repeated, and reads the same rows."""
    import psutil

    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 3000 * SCALE))
    query = sink.start(streaming(stream, maxOffsetsPerTrigger=500 * SCALE, minPartitions=2))
    killed = 0
    for done in (1, 3):
        eventually(lambda done=done: sink.batches("commits") >= done, "batches")
        for process in psutil.Process().children(recursive=True):
            # Workers are forks of the daemon; the source's own process is no fork of it.
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent and "pyspark.daemon" in " ".join(parent.cmdline()):
                    process.kill()
                    killed += 1
    query.processAllAvailable()
    query.stop()
    assert killed
    assert sink.values == numbered(0, 3000 * SCALE)


def test_offsets_in_the_checkpoint_are_what_the_docs_say(
    nodes: Broker, streaming: Callable[..., DataFrame], sink: Sink
) -> None:
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 10))
    sink.run(streaming(stream))
    lines = (sink.checkpoint / "offsets" / "0").read_text().splitlines()
    kept = json.loads(lines[-1])
    assert kept["v"] == 1
    assert kept["p"] == {stream: {"0": 10}}
    assert kept["from"] == {stream: {"0": 0}}
