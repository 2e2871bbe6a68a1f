"""Topics of broker groups inside Spark: real name server and brokers, whose master is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lz4.frame
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

from convoymq.model import trace as words
from convoymq.model.errors import Unavailable
from convoymq.rocketmq.client.blocking import Blocking
from convoymq.rocketmq.client.client import Queue, RocketClient, send_fields
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.spark import clients
from convoymq.spark.audit import audit
from convoymq.spark.errors import DataLoss, OptionError, SourceError
from convoymq.spark.options import Connection
from convoymq.spark.sources import StreamSource
from tests.patience import PATIENCE_S
from tests.rocketmq.processes import BrokerProcess, Server
from tests.rocketmq.test_tls import Secured
from tests.spark.support import Query, batch_rows
from tests.spark.test_audit import Rows, of_kind, rewrite
from tests.spark.test_spark import eventually

T = TypeVar("T")
WRITTEN = StructType([
    StructField("key", StringType()), StructField("value", StringType()),
    StructField("tags", StringType()), StructField("keys", ArrayType(StringType())),
    StructField("properties", MapType(StringType(), StringType())),
])  # fmt: skip
GROUP = {
    "brokerClusterName": "c", "totalReplicas": 2, "enableSlaveActingMaster": "true",
    "slaveReadEnable": "true", "compatibleWithOldNameSrv": "false", "auditTraceEnable": "true",
}  # fmt: skip


async def make_topic(client: RocketClient, topic: str, queues: int, broker: str) -> None:
    fields = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
        "writeQueueNums": str(queues), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    made = await client.ask("TBW102", broker, Request.UPDATE_AND_CREATE_TOPIC, fields)
    assert made.code == Answer.SUCCESS
    if Queue(broker, queues - 1) not in await client.queues(topic):
        raise Unavailable("name servers do not know yet")


class Group:
    """A name server, and a group `n` of a master and a slave."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("0", "1", "m"):
            (directory / name).mkdir()
        self.names = Server(directory)
        self.slave = self.replica(1)
        self.master = self.replica(0)
        for each in (self.slave, self.master):
            each.wait_for("rocketmq.online")
        self.client = Blocking(self.names.address, "test", timeout_s=PATIENCE_S)

    def replica(self, number: int) -> BrokerProcess:
        role = {"brokerRole": "SLAVE"} if number else {
            "brokerRole": "SYNC_MASTER", "inSyncReplicas": 2
        }  # fmt: skip
        return BrokerProcess(
            self.directory / str(number), self.names.address, brokerName="n", brokerId=number,
            **GROUP | role,
        )  # fmt: skip

    def call(self, work: Callable[[RocketClient], Awaitable[T]]) -> T:
        return self.client.call(work)

    def make(self, topic: str, queues: int = 3, broker: str = "n") -> None:
        self.call(lambda client: make_topic(client, topic, queues, broker))

    def send(self, topic: str, numbers: range, queues: int = 3, broker: str = "n") -> None:
        """Each queue has its numbers in order."""

        async def work(client: RocketClient) -> None:
            for number in numbers:
                properties = {"TAGS": f"t{number % 2}", "KEYS": f"k{number} all", "p": "ü",
                              "__SHARDINGKEY": f"key-{number % 7}"}  # fmt: skip
                await client.send(topic, Queue(broker, number % queues), b"%d" % number, properties)

        self.call(work)

    def close(self) -> None:
        self.client.close()
        for each in (self.master, self.slave, self.names):
            each.process.kill()
            each.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    yield made
    made.close()


def source(group: Group, topic: str, **more: Any) -> StreamSource:
    given = {"namesrv": group.names.address, "topic": topic, **more}
    return StreamSource({name.lower(): str(value) for name, value in given.items()})


def query(group: Group, topic: str, **more: Any) -> Query:
    def reader() -> Any:
        made = source(group, topic, startingOffsets="earliest", **more)
        return made.stream_reader(made.schema())

    started = Query(reader)
    started.start()
    return started


def check(rows: DataFrame, count: int) -> None:
    """Each message is there once, and those of a queue are in the order of their offsets."""
    found = [
        (row.broker, row.partition, row.offset, int(bytes(row.value)))
        for row in rows.select("broker", "partition", "offset", "value").collect()
    ]
    assert Counter(number for *_, number in found) == Counter(range(count))
    assert len({place[:3] for place in found}) == count
    for queue in {place[:2] for place in found}:
        numbers = [number for *place, number in sorted(found) if tuple(place[:2]) == queue]
        assert numbers == sorted(numbers)


def test_a_batch_has_the_columns_of_messages(group: Group) -> None:
    group.make("plain")
    group.send("plain", range(9))
    packed = send_fields(group="g", topic="plain", broker="n", queue=0, properties="", born_ms=-1,
                         sys_flag=0x101)  # fmt: skip
    body = lz4.frame.compress(b"packed")
    for content in (body, body[:-9]):
        group.call(lambda client, content=content: client.ask(  # type: ignore[misc]
            "plain", "n", Request.SEND_MESSAGE_V2, packed, content
        ))  # fmt: skip
    rows = sorted(batch_rows(source(group, "plain")), key=lambda r: (r["partition"], r["offset"]))
    assert [row["value"] for row in rows] == [
        *(b"0", b"3", b"6", b"packed", body[:-9]), *(b"1", b"4", b"7"), *(b"2", b"5", b"8"),
    ]  # fmt: skip
    row = rows[1]
    assert (row["topic"], row["broker"], row["partition"], row["offset"]) == ("plain", "n", 0, 1)
    assert (row["key"], row["tags"], row["keys"]) == (b"key-3", "t1", ["k3", "all"])
    assert (row["timestampType"], row["reconsume_times"]) == (1, 0)
    assert dict(row["properties"])["p"] == "ü"
    assert row["message_id"] == dict(row["properties"])["UNIQ_KEY"]
    assert row["timestamp"] >= row["born_timestamp"]
    assert (rows[3]["key"], rows[3]["keys"], rows[3]["born_timestamp"]) == (None, [], None)
    given = {
        "startingOffsets": json.dumps({"n": {"0": 1, "1": -2, "2": 3}}),
        "endingOffsets": json.dumps({"n": {"0": 2, "1": 2, "2": -1}}),
        "minPartitions": 3,
    }
    some = [row["value"] for row in batch_rows(source(group, "plain", **given))]
    assert sorted(some) == [b"1", b"3", b"4"]
    later = int(rows[2]["timestamp"].timestamp() * 1000)
    timed = batch_rows(source(group, "plain", startingTimestamp=later))
    assert {row["value"] for row in rows if row["timestamp"] >= rows[2]["timestamp"]} == {
        row["value"] for row in timed
    }
    for more, error, text in (
        ({"startingOffsets": '{"n":{"0":1}}'}, SourceError, "has the queues n:0, n:1, n:2"),
        ({"startingTimestamp": later + 10**9}, SourceError, "has no message at or after"),
        ({"includeHeaders": True}, OptionError, "includeHeaders has no meaning with namesrv"),
        ({"servers": "h:1"}, OptionError, "servers has no meaning with namesrv"),
        ({"topic": "missing"}, SourceError, "knows a topic missing"),
        ({"startingOffsets": '{"n":{"0":99,"1":0,"2":0}}'}, DataLoss, "queue 0: offset 99"),
    ):
        with pytest.raises(error, match=text):
            batch_rows(source(group, **{"topic": "plain", **more}))


def test_a_query_follows_new_queues_and_brokers_and_what_is_cut_off_fails_it(group: Group) -> None:
    group.make("grown")
    group.send("grown", range(30))
    running = query(group, "grown", maxOffsetsPerTrigger=20, groupId="shown")
    assert running.step()
    assert running.step(crash="sunk")
    group.make("grown", queues=5)
    group.send("grown", range(30, 60), queues=5)
    another = BrokerProcess(
        group.directory / "m", group.names.address, brokerName="m", brokerClusterName="c"
    )
    try:
        group.make("grown", broker="m", queues=1)
        group.send("grown", range(60, 70), queues=1, broker="m")
        running.start()
        running.run()
        assert sorted(map(int, running.values)) == list(range(70))
        shown = Blocking(group.names.address, "shown")
        assert shown.call(lambda client: client.committed("grown", Queue("n", 0)))
        shown.close()
        # A checkpoint of another topic, or of streams, is none of this one.
        other = query(group, "plain")
        other.wal, other.commits = running.wal[:], running.commits
        with pytest.raises(SourceError, match="is of RocketMQ's topic grown, not of"):
            other.step()
    finally:
        another.stop()
    # A queue that nobody serves is waited for, and fails the query; or the others go on.
    impatient = query(group, "grown", **{"convoymq.timeout": "200ms"})
    impatient.wal, impatient.commits = running.wal[:], running.commits
    with pytest.raises(SourceError, match="nobody serves topic grown, broker m, queue 0"):
        impatient.step()
    group.send("grown", range(70, 75))
    going_on = query(group, "grown", failOnDataLoss=False)
    going_on.wal, going_on.commits = running.wal[:], running.commits
    going_on.run()
    assert sorted(map(int, going_on.values)) == list(range(70, 75))
    assert json.loads(going_on.wal[-1])["p"]["m"] == {"0": 10}


def test_messages_that_were_cut_off_fail_a_query(group: Group) -> None:
    group.make("cut", queues=1)
    group.send("cut", range(5), queues=1)
    running, lax = (query(group, "cut", failOnDataLoss=fails) for fails in (True, False))
    for each in (running, lax):
        each.run()
    group.call(lambda client: client.ask("cut", "n", Request.DELETE_TOPIC_IN_BROKER,
                                         {"topic": "cut"}))  # fmt: skip
    group.make("cut", queues=1)
    group.send("cut", range(10, 12), queues=1)
    with pytest.raises(DataLoss, match="offset 5 is wanted, but its end is"):
        running.step()
    lax.run()
    group.send("cut", range(12, 14), queues=1)
    lax.run()
    assert [int(value) for value in lax.values][-2:] == [12, 13]


def test_a_query_reads_on_from_the_slave_of_a_killed_master(
    group: Group, spark: SparkSession, tmp_path: Path
) -> None:
    """The master is killed under the query, the driver ends and goes on, the master returns."""
    group.make("followed")
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")
    rows = (
        spark.readStream.format("convoymq")
        .options(namesrv=group.names.address, topic="followed", startingOffsets="earliest",
                 maxOffsetsPerTrigger="40")
        .load()
    )  # fmt: skip

    def start(**trigger: Any) -> StreamingQuery:
        writer = rows.writeStream.format("parquet").option("path", out)
        return writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()

    def count() -> int:
        return spark.read.schema(rows.schema).parquet(out).count() if Path(out).exists() else 0

    group.send("followed", range(120))
    running = start(processingTime="0 seconds")
    eventually(lambda: count() >= 40, "rows")
    group.master.process.kill()
    group.master.process.wait(PATIENCE_S)
    eventually(lambda: count() == 120, "rows of the slave")
    running.stop()
    group.master = group.replica(0)
    group.master.wait_for("rocketmq.online")
    group.send("followed", range(120, 200))
    last = start(availableNow=True)
    assert last.awaitTermination(int(PATIENCE_S))
    check(spark.read.parquet(out), 200)


def rows_of(numbers: range) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"key": f"k{n % 7}", "value": str(n), "tags": "t", "keys": ["a", "b"],
          "properties": [("p", "q"), ("CLUSTER", "left out")]} for n in numbers],
        to_arrow_schema(WRITTEN),
    )  # fmt: skip


def test_an_attempt_of_a_write_adds_what_is_missing(group: Group) -> None:
    """An attempt that ends in the middle, one that repeats it, and one whose rows are others."""
    group.make("written")
    sink = source(group, "written", producerName="w", **{"convoymq.produce.maxRows": 10})
    writer = sink.writer(WRITTEN, False)

    def stored() -> list[int]:
        return [int(bytes(row["value"])) for row in batch_rows(source(group, "written"))]

    def cut() -> Iterator[pa.RecordBatch]:
        yield rows_of(range(35))
        raise ValueError("the task ends")

    with pytest.raises(ValueError, match="the task ends"):
        writer.write(cut())
    assert sorted(stored()) == list(range(30))
    for _ in range(2):
        result = writer.write(iter([rows_of(range(25)), rows_of(range(25, 50))]))
        assert sorted(stored()) == list(range(50))
    assert (result.rows, result.duplicates) == (50, 50)
    row = batch_rows(source(group, "written"))[0]
    assert (bytes(row["key"]), row["tags"], row["keys"]) == (
        f"k{int(row['value']) % 7}".encode(), "t", ["a", "b"],
    )  # fmt: skip
    assert dict(row["properties"]).get("CLUSTER") is None
    assert dict(row["properties"])["p"] == "q"
    places = [(int(r["value"]) % 7, r["partition"], r["offset"], int(r["value"]))
              for r in batch_rows(source(group, "written"))]  # fmt: skip
    for key in range(7):
        own = sorted(place[1:] for place in places if place[0] == key)
        assert len({queue for queue, *_ in own}) == 1
        assert [number for *_, number in own] == sorted(number for *_, number in own)
    writer.write(iter([rows_of(range(49, -1, -1))]))
    assert Counter(stored()) == Counter(dict.fromkeys(range(50), 2)), "other rows are not lost"
    for wrong, text in (({"messageId": "auto"}, "messageId has no meaning"),):
        with pytest.raises(OptionError, match=text):
            source(group, "written", **wrong).writer(WRITTEN, False)


def test_a_write_goes_on_when_its_broker_was_killed(group: Group) -> None:
    """The master is killed while rows wait for their confirmation, and another process takes its
    files: each row is there once, and those of a queue are in order."""
    group.make("interrupted")

    def rows() -> Iterator[pa.RecordBatch]:
        yield rows_of(range(40))
        group.master.process.kill()
        group.master.process.wait(PATIENCE_S)
        replacing.start()
        yield rows_of(range(40, 100))

    def replace() -> None:
        group.master = group.replica(0)

    replacing = threading.Thread(target=replace)
    more = {"convoymq.timeout": f"{int(PATIENCE_S)}s"}
    sink = source(
        group, "interrupted", producerName="i", **{"convoymq.produce.maxRows": 10}, **more
    )
    result = sink.writer(WRITTEN, False).write(rows())
    replacing.join(PATIENCE_S)
    assert (result.rows, result.duplicates) == (100, 0)
    stored = batch_rows(source(group, "interrupted"))
    assert sorted(int(bytes(row["value"])) for row in stored) == list(range(100))
    for queue in {row["partition"] for row in stored}:
        own = [(r["offset"], int(bytes(r["value"]))) for r in stored if r["partition"] == queue]
        numbers = [number for _, number in sorted(own)]
        assert numbers == sorted(numbers)


def test_a_streaming_write_goes_on_when_its_broker_was_killed(
    group: Group, spark: SparkSession, tmp_path: Path
) -> None:
    group.make("flowing")
    group.make("flown")
    group.send("flowing", range(200))
    rows = (
        spark.readStream.format("convoymq")
        .options(namesrv=group.names.address, topic="flowing", startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", 20)
        .load()
    )
    started = (
        rows.select("key", "value", "tags", "keys", "properties")
        .writeStream.format("convoymq")
        .options(namesrv=group.names.address, topic="flown")
        .option("convoymq.timeout", f"{int(PATIENCE_S)}s")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )

    def written() -> list[int]:
        return [int(bytes(row["value"])) for row in batch_rows(source(group, "flown"))]

    eventually(lambda: len(written()) > 0, "rows")
    group.master.process.kill()
    group.master.process.wait(PATIENCE_S)
    group.master = group.replica(0)
    assert started.awaitTermination(int(PATIENCE_S))
    assert sorted(written()) == list(range(200))


def test_rows_are_written_and_read_by_tls(tmp_path: Path) -> None:
    """The name server and the broker take nothing else."""
    files = Secured(tmp_path)
    settings = files.files | {"tls.server.mode": "enforcing"}
    names = Server(tmp_path, **settings)
    broker = BrokerProcess(tmp_path, names.address, **settings)
    try:
        given = {"namesrv": names.address, "topic": "secret", "producername": "s"}
        tls = {"convoymq.tls": "true", "convoymq.tls.ca": str(files.root)}
        with pytest.raises(OptionError, match=r"or convoymq\.tls\.verify=false"):
            StreamSource(given | {"convoymq.tls": "true"}).writer(WRITTEN, False)
        with pytest.raises(OptionError, match="serverName has no meaning with namesrv"):
            StreamSource(given | tls | {"convoymq.tls.servername": "x"}).writer(WRITTEN, False)
        made = Connection(
            servers=(), namesrv=(names.address,), user="guest", password="", vhost="/", name="t",
            timeout_ms=int(PATIENCE_S * 1000), tls=(str(files.root), "", "", True, ""),
        )  # fmt: skip
        clients.rocket(made, None).call(lambda client: make_topic(client, "secret", 2, "broker-a"))
        result = StreamSource(given | tls).writer(WRITTEN, False).write(iter([rows_of(range(20))]))
        assert result.rows == 20
        del given["producername"]
        found = batch_rows(StreamSource(given | tls))
        assert sorted(int(bytes(row["value"])) for row in found) == list(range(20))
    finally:
        for each in (broker, names):
            each.process.kill()
            each.process.wait(PATIENCE_S)


def test_a_repeated_micro_batch_writes_nothing_new(
    group: Group, spark: SparkSession, tmp_path: Path
) -> None:
    group.make("origin")
    group.make("copied")
    group.send("origin", range(60))
    rows = (
        spark.readStream.format("convoymq")
        .options(namesrv=group.names.address, topic="origin", startingOffsets="earliest")
        .load()
    )
    writer = (
        rows.select("key", "value", "tags", "keys", "properties")
        .writeStream.format("convoymq")
        .options(namesrv=group.names.address, topic="copied")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )
    for _ in range(2):
        assert writer.start().awaitTermination(int(PATIENCE_S))
        found = [int(bytes(row["value"])) for row in batch_rows(source(group, "copied"))]
        assert sorted(found) == list(range(60))
        # As after a crash between the write and its commit.
        for name in ("0", ".0.crc"):
            (tmp_path / "commits" / name).unlink(missing_ok=True)


def test_the_first_program_in_python_runs(group: Group) -> None:
    group.make("hello-python")
    program = Path(__file__).parents[2] / "examples" / "rocketmq" / "hello.py"
    done = subprocess.run(
        [sys.executable, str(program), group.names.address],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"received hello {n}" for n in range(5)]


def test_the_audit_proves_that_a_killed_master_lost_nothing(
    group: Group, spark: SparkSession, tmp_path: Path
) -> None:
    """It is killed while a producer sends; consumers go on at its slave; it returns. The replicas
    end here, so this is the last test. Of all tests before the trace tells as well."""
    group.make("audited")
    sent: list[int] = []
    ended = threading.Event()
    client = Blocking(group.names.address, "producer", timeout_s=PATIENCE_S)

    async def send_one(client: RocketClient) -> None:
        await client.send("audited", Queue("n", len(sent) % 3), b"x", {})

    def produce() -> None:
        while not ended.is_set():
            client.call(send_one)
            sent.append(len(sent))

    sender = threading.Thread(target=produce)
    sender.start()
    try:
        eventually(lambda: len(sent) >= 200, "confirms")
        group.master.process.kill()
        group.master.process.wait(PATIENCE_S)
        before = len(sent)
        assert len(batch_rows(source(group, "audited"))) >= before
        group.master = group.replica(0)
        eventually(lambda: len(sent) >= before + 100, "confirms of the master that is back")
    finally:
        ended.set()
        sender.join(PATIENCE_S)
    client.close()
    assert len(batch_rows(source(group, "audited"))) >= len(sent)
    for each in (group.master, group.slave):
        assert each.end() == 0
    replicas = [group.directory / name for name in ("0", "1")]
    report = audit(replicas, queues=["n"], spark=spark)
    assert report.violations == 0, report.to_json()
    (found,) = report.queues
    assert found.published >= len(sent)
    assert found.confirmed > 0
    facts = found.facts
    assert (facts.nodes, facts.lost, facts.missing, facts.start) == ({1, 2}, 0, {}, 0)
    # The end of the killed master is named: what it confirmed last, it may not have written down.
    assert {gap.node for gap in facts.gaps} == {1}

    def injure(rows: Rows, _facts: dict[str, Any]) -> None:
        stored = [row for row in of_kind(rows, words.STORED) if row["count"] > 1]
        stored.sort(key=lambda row: (row["session"], row["consumer"], row["time_us"]))
        # A gap shows where something of its queue lies on both sides.
        _, gap, _ = neighbours(stored, 3)
        one, other = neighbours(stored[::-1], 2)
        assert gap not in (one, other)
        rows.remove(gap)
        for name in ("position_index", "index"):
            one[name], other[name] = other[name], one[name]
        key = {"kind": words.TAKEN, "seq": 5, "count": 1}
        rows += [{**one, **key}, {**one, **key}]

    def neighbours(rows: Rows, count: int) -> Rows:
        """Returns the first rows of one queue that lie side by side."""
        parts = (rows[at : at + count] for at in range(len(rows) - count + 1))
        return next(p for p in parts if len({(row["session"], row["consumer"]) for row in p}) == 1)

    copy = tmp_path / "copy"
    shutil.copytree(group.directory / "1" / "store" / "trace", copy)
    rewrite(max(copy.rglob("*.parquet"), key=lambda path: path.stat().st_size), injure)
    report = audit([group.directory / "0", copy], spark=spark)
    broken = {each.invariant.name for each in report.verdicts if each.rows}
    assert {"GROUP_NUMBERED", "GROUP_LOG_ORDER", "GROUP_ESCAPED_ONCE"} <= broken
