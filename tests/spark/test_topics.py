"""Ordered topics inside Spark, on three real nodes: split, merged and moved while a query runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from convoymq.client import Client, ClientConfig
from convoymq.client.topic_producer import TopicProducer
from convoymq.client.topic_reader import TopicReader
from convoymq.spark.errors import OptionError
from convoymq.spark.pipelines import apply as pipeline
from convoymq.topics.rules.hashing import logical_partition
from tests.clusters import call
from tests.faults.topic_traffic import changed, create, leader_of, open_pids, path
from tests.spark.cluster import Broker
from tests.spark.test_apply import NOW, ROW, Applier, table
from tests.spark.test_spark import eventually

KEYS = 12
TOPIC_COLUMNS = ["lp", "pid", "route_version", "order_token"]


class Published:
    """Publishes numbers in order, key by key in turn, and knows what was confirmed."""

    def __init__(self, nodes: Broker, topic: str, partitions: int = 2) -> None:
        self.nodes = nodes
        self.topic = topic
        self.count = 0
        create(nodes.cluster, topic, partitions)

    def more(self, count: int = 120) -> None:
        with self.nodes.channel() as channel:
            channel.confirm_delivery()
            for _ in range(count):
                key = f"key-{self.count % KEYS}"
                channel.basic_publish(self.topic, key, b"%d" % self.count)
                self.count += 1

    def check(self, rows: DataFrame) -> None:
        """Every message is there once, and each key's are in order by their tokens."""
        found = rows.select("key", "value", "order_token").orderBy("order_token").collect()
        values = [int(bytes(row.value)) for row in found]
        assert sorted(values) == list(range(self.count))
        for number in range(KEYS):
            own = [value for value in values if value % KEYS == number]
            assert own == sorted(own)
        assert all(bytes(row.key) == b"key-%d" % (int(row.value) % KEYS) for row in found)


@pytest.fixture
def reading(spark: SparkSession, nodes: Broker) -> Callable[..., DataFrame]:
    def read(topic: str, *, stream: bool = False, **options: Any) -> DataFrame:
        reader = (spark.readStream if stream else spark.read).format("convoymq")
        return reader.options(servers=nodes.servers, topic=topic, **options).load()

    return read


def test_a_query_runs_on_through_changes_kills_and_restarts(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame], tmp_path: Path
) -> None:
    published = Published(nodes, "followed")
    out, checkpoint = str(tmp_path / "out"), tmp_path / "checkpoint"
    rows = reading("followed", stream=True, startingOffsets="earliest")

    def start(**trigger: Any) -> StreamingQuery:
        writer = rows.writeStream.format("parquet").option("path", out)
        writer = writer.option("checkpointLocation", str(checkpoint))
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def read_all() -> bool:
        assert query.exception() is None
        return sum(each.numInputRows for each in query.recentProgress) >= published.count

    def last_cut() -> set[int]:
        assert query.exception() is None
        progress = query.lastProgress
        if progress is None:
            return set()
        return set(map(int, json.loads(progress.sources[0].endOffset)["p"]["followed"]))

    cluster = nodes.cluster
    published.more()
    query = start()
    eventually(lambda: (checkpoint / "commits" / "0").exists(), "the first batch")
    changed(cluster, "followed", "split", pid=0)
    published.more()
    killed = leader_of(cluster, "followed", open_pids(cluster, "followed")[0])
    cluster.kill(killed)
    published.more()
    changed(cluster, "followed", "merge", pids=open_pids(cluster, "followed")[1:])
    published.more()
    eventually(read_all, "all rows, with a node away")
    assert last_cut() == set(open_pids(cluster, "followed"))
    query.stop()
    nodes.bring_back(killed)
    # The driver has died between the sink and the commit, and everything goes on meanwhile.
    commits = checkpoint / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for file in commits.glob(f"*{last}*"):
        file.unlink()
    changed(cluster, "followed", "split", pid=open_pids(cluster, "followed")[0])
    published.more()
    query = start(availableNow=True)
    assert query.awaitTermination(90)
    published.check(spark.read.parquet(out))
    found = spark.read.parquet(out).agg(f.countDistinct("pid").alias("pids")).first()
    assert found is not None
    assert found.pids >= 5


def test_a_batch_reads_a_topic_as_a_table(nodes: Broker, reading: Callable[..., DataFrame]) -> None:
    published = Published(nodes, "table")
    published.more()
    before_ms = int(time.time() * 1000)
    (low, high) = changed(nodes.cluster, "table", "split", pid=0)
    published.more(60)
    frame = reading("table")
    assert frame.columns[-len(TOPIC_COLUMNS) :] == TOPIC_COLUMNS
    assert frame.rdd.getNumPartitions() == 4
    published.check(frame)
    for row in frame.collect():
        assert row.lp == logical_partition(bytes(row.key), 1024)
        assert row.partition == row.pid
        assert row.order_token == f"{row.route_version:016x}-{row.offset:016x}"
    vector = json.dumps({"table": {str(low): 1, str(high): 1, "1": 1}})
    after = reading("table", startingOffsets=vector).select("pid").distinct().collect()
    assert {row.pid for row in after} == {1, low, high}
    until = reading("table", endingTimestamp=str(before_ms)).count()
    since = reading("table", startingTimestamp=str(before_ms)).count()
    assert until + since == published.count
    assert until >= 1


# --- apply -------------------------------------------------------------------------------------

SPEC = {"schema": "id bigint, name string", "keys": ("id",)}


def change(key: int, name: str | None) -> dict[str, Any]:
    row = {"id": key, "name": name}
    if name is None:
        return {"op": "d", "before": row, "after": None}
    return {"op": "u", "before": None, "after": row}


def test_a_row_is_applied_when_its_token_is_greater(spark: SparkSession, tmp_path: Path) -> None:
    """Offsets begin anew in every partition: by them alone the older events would win."""
    spec = pipeline.TableSpec(path=str(tmp_path / "t"), **SPEC)  # type: ignore[arg-type]
    followed = pipeline.FollowedTopic("changes", 1)
    applier = Applier(spark, spec, followed=followed)

    def write(batch_id: int, *events: tuple[int, int, dict[str, Any]]) -> None:
        rows = [
            (b"k", json.dumps(event).encode(), "changes", 0, offset, NOW, version)
            for version, offset, event in events
        ]
        applier.write(spark.createDataFrame(rows, f"{ROW}, route_version bigint"), batch_id)

    write(0, (0, 90, change(1, "old")), (3, 2, change(1, "new")), (1, 5, change(2, "kept")))
    late = [(2, 900, change(1, "late")), (3, 2, change(1, "again"))]
    write(1, *late, (3, 1, change(2, None)), (0, 7, change(3, "first")))
    assert table(spark, tmp_path / "t") == {1: "new", 3: "first"}
    target = pipeline._Target(spark, spec)
    for other in (None, pipeline.FollowedTopic("changes", 2)):
        with pytest.raises(OptionError, match="which do not compare with"):
            pipeline._fit_table(target, other)
    pipeline._fit_table(target, followed)


def test_a_table_follows_a_topic_through_a_split(
    spark: SparkSession, nodes: Broker, tmp_path: Path
) -> None:
    create(nodes.cluster, "changes", 1)
    kept: dict[int, str] = {}

    def publish(numbers: range) -> None:
        with nodes.channel() as channel:
            channel.confirm_delivery()
            for number in numbers:
                key = number % 10
                name = None if number % 7 == 0 else f"n{number}"
                kept.pop(key, None) if name is None else kept.update({key: name})
                channel.basic_publish("changes", f"{key}", json.dumps(change(key, name)).encode())

    publish(range(60))
    changed(nodes.cluster, "changes", "split", pid=0)
    publish(range(60, 95))
    spec = pipeline.TableSpec(path=str(tmp_path / "t"), **SPEC)  # type: ignore[arg-type]
    given: dict[str, Any] = {"servers": nodes.servers, "tables": [spec]}
    given["checkpoint"] = tmp_path / "state"
    report = pipeline.apply(spark, topic="changes", **given)
    assert report.events == 95
    # One batch reads parents and children: the token decides, not the order of tasks.
    assert report.tables["t"].batches == 1
    assert table(spark, tmp_path / "t") == kept
    with pytest.raises(OptionError, match="which do not compare with positions"):
        pipeline.apply(spark, topic="changes", events=pipeline.Events(position_field="x"), **given)
    for wrong in ({}, {"topic": "changes", "stream": "s"}):
        with pytest.raises(OptionError, match="either a stream or a topic"):
            pipeline.apply(spark, **wrong, **given)
    status, _ = call(nodes.cluster, "DELETE", path("changes"))
    assert status in (200, 204)
    create(nodes.cluster, "changes", 1)
    with pytest.raises(OptionError, match="which do not compare with"):
        pipeline.apply(spark, topic="changes", **given)


def test_a_right_that_is_missing_is_told(
    nodes: Broker, reading: Callable[..., DataFrame], tmp_path: Path
) -> None:
    from benchmarks.convoy import add_user

    published = Published(nodes, "guarded")
    published.more()
    api = f"http://127.0.0.1:{nodes.cluster.nodes[0].http_port}"
    add_user(api, "half", configure="^$", write="^$", read="^guarded$")
    add_user(api, "none", configure="^$", write="^$", read="^$")
    half = {"user": "half", "password": "half"}
    missing = r"AccessRefused.*partition \d of topic guarded may not be read: read access to"
    with pytest.raises(PySparkException, match=missing):
        reading("guarded", **half).count()
    rows = reading("guarded", stream=True, startingOffsets="earliest", **half)
    place = {"path": str(tmp_path / "rows"), "checkpointLocation": str(tmp_path / "state")}
    query = rows.writeStream.options(**place).trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match=missing):
        query.awaitTermination(90)
    with pytest.raises(PySparkException, match=r"read access to queue 'guarded'.*and write access"):
        reading("guarded", user="none", password="none").count()
    every = r"^(guarded|amq\.partition\.guarded\..*)$"
    add_user(api, "half", configure="^$", write="^$", read=every)
    assert reading("guarded", **half).count() == published.count
    query = rows.writeStream.options(**place).trigger(availableNow=True).start()
    assert query.awaitTermination(90)
    assert reading("guarded").sparkSession.read.parquet(place["path"]).count() == published.count


# --- NULL values -------------------------------------------------------------------------------


def test_tombstones_stay_null_through_streams_and_topics(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame]
) -> None:
    create(nodes.cluster, "gone", 2)
    with nodes.channel() as channel:
        channel.queue_declare("gone-too", durable=True, arguments={"x-queue-type": "stream"})
        channel.confirm_delivery()
        headers = {"x-tombstone": True}
        channel.basic_publish("gone", "amqp", b"", pika.BasicProperties(headers=headers))
    rows = spark.createDataFrame(
        [("a", b"1"), ("b", None), ("c", b""), ("d", None)], "key string, value binary"
    )
    for target in ({"topic": "gone"}, {"topic": "gone-too"}):
        writer = rows.repartition(1).write.format("convoymq").mode("append")
        writer.options(servers=nodes.servers, **target).save()
    expected = {"a": b"1", "b": None, "c": b"", "d": None}
    stream = spark.read.format("convoymq").options(servers=nodes.servers, subscribe="gone-too")

    def values(found: DataFrame) -> dict[str, bytes | None]:
        rows = found.select(f.col("key").cast("string"), "value").collect()
        return {key: None if value is None else bytes(value) for key, value in rows}

    assert values(stream.load()) == expected
    assert values(reading("gone", includeHeaders=True)) == {**expected, "amqp": None}
    with Client(ClientConfig(tuple(nodes.servers.split(",")))) as client:
        with TopicProducer(client, "gone") as producer:
            producer.send("client", None)
        rows_read = list(TopicReader(client, "gone"))
        found = {each.key.decode(): each.body for rows in rows_read for each in rows.messages()}
    assert found == {**expected, "amqp": None, "client": None}


# --- sink --------------------------------------------------------------------------------------


def test_a_sink_writes_each_row_once_over_a_change(
    spark: SparkSession, nodes: Broker, reading: Callable[..., DataFrame], tmp_path: Path
) -> None:
    published = Published(nodes, "origin")
    create(nodes.cluster, "copy", 2)
    published.more()
    checkpoint = tmp_path / "checkpoint"
    rows = reading("origin", stream=True, startingOffsets="earliest").select("key", "value")

    def run() -> None:
        writer = rows.writeStream.format("convoymq").option("checkpointLocation", str(checkpoint))
        writer = writer.options(servers=nodes.servers, topic="copy")
        assert writer.trigger(availableNow=True).start().awaitTermination(90)

    run()
    published.check(reading("copy"))
    changed(nodes.cluster, "copy", "split", pid=0)
    # The batch is repeated: what it stored before the split is known behind it.
    for file in (checkpoint / "commits").glob("*0*"):
        file.unlink()
    changed(nodes.cluster, "origin", "split", pid=1)
    published.more()
    run()
    published.check(reading("copy"))
    batch = spark.createDataFrame([(b"key-0", b"120")], "key binary, value binary")
    batch.write.format("convoymq").mode("append").options(
        servers=nodes.servers, topic="copy", producerName="once"
    ).save()
    assert reading("copy").count() == published.count + 1
