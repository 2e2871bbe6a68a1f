"""Measures the Spark data sources against Spark's own Parquet and against the load tool.

    python benchmarks/spark.py                 everything, writes docs/benchmarks-spark.md
    python benchmarks/spark.py --quick         small, prints only
    python benchmarks/spark.py --cases read    only some cases, prints only

One cluster of three nodes and one session (local[2]) for all cases; in a round every case runs once
beside what it is compared with, so that the ratio of a round is of one machine in one minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from benchmarks.background import Background, background
from benchmarks.convoy import convoy_cluster
from benchmarks.disk import Disk
from benchmarks.load import Load
from benchmarks.systems import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.compiled_modules import build_text
from convoymq.kernels import columns
from convoymq.kernels.column_frame import build_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

ROOT = Path(__file__).resolve().parent.parent
SPARK_DELTA = Path(sys.prefix) / "spark-delta"
"""What `make spark-jars` makes: a Spark that Delta Lake has jars for."""
PRODUCE_ROWS = 10_000
SINK_PASSES = 3
WARM_UPS = 3
CASES = ("read", "archive", "sink", "beside", "apply")
RATE = "16m"
"""Bytes a second of a task that drains a backlog beside a latency-bound load: some 270,000 rows of
100 B a second in two tasks."""
SMALL_BATCH = 25_000
"""Changes of a micro-batch."""
SMALL_BATCHES = 4
CHANGE = "id bigint, name string, city string, amount bigint"
SESSION = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "2g",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much: rows of the streams with 200 B and 1 KiB values, rows of the backlog, changes that
    are applied, rounds."""

    rows_200: int = 6_000_000
    rows_1k: int = 1_500_000
    backlog: int = 10_000_000
    changes: int = 2_000_000
    seconds: float = 10.0
    rounds: int = 3


QUICK = Scale(
    rows_200=200_000, rows_1k=100_000, backlog=1_000_000, changes=100_000, seconds=4.0, rounds=1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One line of the table."""

    name: str
    title: str
    unit: str
    ours: str
    theirs: str
    wanted: float | None
    """None: not promised, shown to be compared."""
    at_most: bool = False


def read_goals(name: str, size: str) -> tuple[Goal, ...]:
    """Batch reads of values of one size."""
    return (
        Goal(
            name=f"read_{name}",
            title=f"batch read, {size} → noop",
            unit="rows/s",
            ours="stream",
            theirs="native Parquet",
            wanted=0.7,
        ),
        Goal(
            name=f"node_{name}",
            title="the same, through the node (convoymq.fetch.local=false)",
            unit="rows/s",
            ours="stream",
            theirs="native Parquet",
            wanted=None,
        ),
        Goal(
            name=f"tuples_{name}",
            title="the same",
            unit="rows/s",
            ours="columnar",
            theirs="the same source yielding tuples",
            wanted=4.0,
        ),
    )


def beside_goal(name: str, title: str, wanted: float | None = 2.0) -> Goal:
    """p99 beside a drain."""
    return Goal(
        name=name,
        title=title,
        unit="ms",
        ours="draining",
        theirs="undisturbed",
        wanted=wanted,
        at_most=True,
    )


GOALS = (
    *read_goals("200", "200 B"),
    *read_goals("1k", "1 KiB"),
    Goal(
        name="archive_200",
        title="stream → Parquet with checkpoint, 200 B",
        unit="rows/s",
        ours="stream",
        theirs="native Parquet → Parquet",
        wanted=0.6,
    ),
    Goal(
        name="sink_200",
        title="sink → stream, confirmed by three nodes, 200 B",
        unit="rows/s",
        ours="Spark",
        theirs="convoy perf, as many in flight",
        wanted=0.5,
    ),
    Goal(
        name="topic_200",
        title="sink → ordered topic of 4 partitions, 200 B",
        unit="rows/s",
        ours="topic",
        theirs="the sink to a stream",
        wanted=0.5,
    ),
    Goal(
        name="publish_200",
        title="convoy perf, two publishers, 200 B, confirmed by three nodes",
        unit="msg/s",
        ours="stream",
        theirs="quorum queue",
        wanted=1.0,
    ),
    Goal(
        name="apply",
        title="apply of changes to a Delta table, 4 batches, every key changed twice",
        unit="rows/s",
        ours="MERGE on the executors (Spark 4.2)",
        theirs="MERGE by the driver, the same Spark",
        wanted=None,
    ),
    Goal(
        name="apply_small",
        title=f"apply of small batches ({SMALL_BATCH:,} changes) to a Delta table",
        unit="rows/s",
        ours="apply, MERGE by the driver",
        theirs="read, from_json and Parquet, batches alike",
        wanted=0.5,
    ),
    beside_goal(
        "beside",
        "confirm p99 of 1,000 msg/s while Spark, in the background, drains a backlog with "
        f"convoymq.fetch.maxBytesPerSecond={RATE}, all on the same cores",
    ),
    beside_goal("beside_full", "the same at full speed", wanted=None),
    beside_goal(
        "beside_apart",
        "the same at full speed, Spark and the node it reads from on one half of the cores, "
        "the other nodes and the clients on the other",
    ),
)


def fill(servers: str, stream: str, rows: int, size: int) -> None:
    """Declares a stream and produces `rows` messages of `size` bytes with 8-byte keys."""
    declare(servers, stream)
    client = Client(ClientConfig(servers=tuple(servers.split(","))))
    # Half of a value is the same in every row and half is not, as in JSON: Parquet may compress it.
    same = (b'{"field": "value", "another": "the same in every row", ' * size)[: size // 2]
    fresh = size - len(same)
    for first in range(0, rows, PRODUCE_ROWS):
        count = min(PRODUCE_ROWS, rows - first)
        keys = pa.array([b"%08d" % i for i in range(first, first + count)], pa.binary())
        noise = os.urandom(count * fresh // 2 + fresh).hex().encode()
        rows_ = [same + noise[i * fresh : (i + 1) * fresh] for i in range(count)]
        values = pa.array(rows_, pa.binary())
        buffers = [buffer or b"" for each in (keys, values) for buffer in each.buffers()]
        frame = build_frame(columns.KEY | columns.VALUE, count, 0, 0, buffers)
        done = client.produce(frame, stream=stream, producer="fill", sequence=first + 1)
        assert done.count == count
    client.close()


def fill_changes(servers: str, stream: str, rows: int) -> None:
    """Declares a stream and produces changes of half as many keys, as flat JSON."""
    declare(servers, stream)
    client = Client(ClientConfig(servers=tuple(servers.split(","))))
    for first in range(0, rows, PRODUCE_ROWS):
        count = min(PRODUCE_ROWS, rows - first)
        values = pa.array(
            [
                b'{"op": "u", "id": %d, "name": "name of %d", "city": "city %d", "amount": %d}'
                % (number * 7919 % (rows // 2), number, number % 1000, number)
                for number in range(first, first + count)
            ],
            pa.binary(),
        )
        buffers = [buffer or b"" for buffer in values.buffers()]
        frame = build_frame(columns.VALUE, count, 0, 0, buffers)
        client.produce(frame, stream=stream, producer="fill", sequence=first + 1)
    client.close()


def declare(servers: str, stream: str) -> None:
    """Declares a stream anew."""
    import pika

    host, _, port = servers.split(",")[0].partition(":")
    parameters = pika.ConnectionParameters(host, int(port))
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.queue_delete(stream)
        channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})


def create_topic(base_port: int, topic: str) -> None:
    """Creates an ordered topic, unless it is there."""
    url = f"http://127.0.0.1:{base_port + 21}/api/topics/%2F/{topic}"
    with httpx.Client(auth=("guest", "guest"), timeout=60) as http:
        if http.get(url).status_code == httpx.codes.NOT_FOUND:
            http.put(url, json={"partitions": 4}).raise_for_status()


def read(
    spark: SparkSession,
    servers: str,
    stream: str,
    format: str = "convoymq",
    *,
    local: bool = True,
    rate: str | None = None,
) -> DataFrame:
    """All of a stream, in a task for each core, each at most so fast."""
    reader = spark.read.format(format).option("servers", servers)
    reader = reader.option("convoymq.fetch.local", local)
    if rate is not None:
        reader = reader.option("convoymq.fetch.maxBytesPerSecond", rate)
    return reader.option("subscribe", stream).option("minPartitions", "2").load()


def tuple_source() -> type:
    """The same source, with every record batch taken apart into tuples."""
    from pyspark.sql.datasource import DataSourceReader

    from pyspark_convoymq import DefaultSource

    class Tuples(DataSourceReader):
        def __init__(self, inner: DataSourceReader) -> None:
            self.inner = inner

        def partitions(self) -> Any:
            return self.inner.partitions()

        def read(self, partition: Any) -> Iterator[Any]:
            for batch in self.inner.read(partition):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    class TupleSource(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "convoymq_tuples"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Tuples(super().reader(schema))

    return TupleSource


class Bench:
    """The cluster, the session and their data."""

    def __init__(
        self, cluster: LocalCluster, scale: Scale, scratch: Path, behind: Background
    ) -> None:
        from convoymq.spark import session

        self.cluster = cluster
        self.scale = scale
        self.behind = behind
        self.scratch = scratch
        self.servers = ",".join(f"127.0.0.1:{cluster.base_port + n + 1}" for n in range(3))
        self.spark: SparkSession = session("bench", master="local[2]", conf=SESSION)
        self.spark.sparkContext.setLogLevel("ERROR")
        self.spark.dataSource.register(tuple_source())
        self.counter = 0
        self.disk = Disk(scratch)

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fills the streams, and writes the same rows to Parquet."""
        for name, rows, size in (
            ("s200", self.scale.rows_200, 200),
            ("s1k", self.scale.rows_1k, 1024),
        ):
            tell(f"filling {name}")
            fill(self.servers, name, rows, size)
            self.read(name).write.mode("overwrite").parquet(str(self.scratch / name))
        # What the first jobs of a session cost (the JVM compiles) is not what is compared.
        tell("warming up")
        for _ in range(WARM_UPS):
            for name in ("s200", "s1k"):
                self.drain(name)
                self.scan(name)
        self.archive("s200")
        self.parquet("s200").write.parquet(self.place())
        self.sink(self.parquet("s200"))

    def read(self, stream: str, format: str = "convoymq", *, local: bool = True) -> DataFrame:
        return read(self.spark, self.servers, stream, format, local=local)

    def parquet(self, name: str) -> DataFrame:
        return self.spark.read.parquet(str(self.scratch / name))

    def place(self) -> str:
        """A directory that nobody has used."""
        self.counter += 1
        return str(self.scratch / f"out-{self.counter}")

    def drain(self, stream: str, format: str = "convoymq", *, local: bool = True) -> None:
        """Reads all of a stream."""
        self.noop(self.read(stream, format, local=local))

    def scan(self, name: str) -> None:
        """Reads the same rows from Parquet."""
        self.noop(self.parquet(name))

    @staticmethod
    def noop(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def rate(self, rows: int, work: Callable[[], Any], *, writes: bool = False) -> float:
        # What wrote gigabytes just before would be measured with it.
        if writes:
            self.disk.rest_long()
        else:
            self.disk.rest()
        began = time.monotonic()
        work()
        return rows / (time.monotonic() - began)

    def archive(self, stream: str) -> None:
        reader = self.spark.readStream.format("convoymq").option("servers", self.servers)
        reader = reader.option("subscribe", stream).option("startingOffsets", "earliest")
        query = (
            reader.option("minPartitions", "2")
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", self.place())
            .option("path", self.place())
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def sink(self, rows: DataFrame, *, ordered: bool = False) -> None:
        name = "sorted" if ordered else "sunk"
        if ordered:
            create_topic(self.cluster.base_port, name)
        else:
            declare(self.servers, name)
        writer = rows.select("key", "value").write.format("convoymq").mode("append")
        writer.option("servers", self.servers).option("topic", name).save()

    def sink_rate(self, *, ordered: bool = False) -> float:
        """Rows per second of the sink, as long at work as the load tool is."""
        part = self.scale.rows_200 // SINK_PASSES
        source = self.parquet("s200").limit(part).repartition(2).persist()
        source.count()
        # Spark ends workers that were idle for a minute; starting them is no part of a rate.
        self.sink(source.limit(PRODUCE_ROWS), ordered=ordered)
        rows = source
        for _ in range(SINK_PASSES - 1):
            rows = rows.union(source)
        rate = self.rate(part * SINK_PASSES, lambda: self.sink(rows, ordered=ordered), writes=True)
        source.unpersist()
        return rate

    def perf(self, **options: Any) -> dict[str, Any]:
        """The load tool against the first node."""
        uri = f"amqp://guest:guest@127.0.0.1:{self.cluster.base_port + 1}/"
        given = {name.replace("_", "-"): value for name, value in options.items()}
        size = int(given.pop("size", 1024))
        return Load(
            declare=uri,
            publish=[uri],
            consume=[uri],
            pids=[],
            size=size,
            seconds=self.scale.seconds,
            warmup=2.0,
            options=given,
            flags=("persistent",),
        ).run()

    def round(
        self, number: int, cases: Collection[str], tell: Callable[[str], None]
    ) -> dict[str, tuple[float, float]]:
        """(ours, theirs) of the goals of these cases, once; `number` counts the rounds."""
        found: dict[str, tuple[float, float]] = {}
        if "read" in cases:
            found |= self.read_case(tell)
        if "archive" in cases:
            tell("stream to Parquet")
            found["archive_200"] = self.archive_case()
        if "sink" in cases:
            found |= self.sink_case(number, tell)
        if "apply" in cases:
            tell("applying changes")
            found |= self.apply_case(number)
            tell("applying small batches")
            found["apply_small"] = self.small_batches()
        if "beside" in cases:
            tell("beside a backlog")
            found["beside"] = self.beside(rate=RATE)
            found["beside_full"] = self.beside()
            with self.apart() as cores:
                found["beside_apart"] = self.beside(cores=cores)
        return found

    def read_case(self, tell: Callable[[str], None]) -> dict[str, tuple[float, float]]:
        """Batch reads, against Parquet and against tuples."""
        found: dict[str, tuple[float, float]] = {}
        for name, rows in (("200", self.scale.rows_200), ("1k", self.scale.rows_1k)):
            tell(f"reading {name}")
            stream = f"s{name}"
            # The cases before have pushed these files out of memory, and Spark has ended workers
            # that were idle for a minute: both sides are warm when they are measured.
            self.drain(stream)
            self.drain(stream, local=False)
            self.scan(stream)
            ours = self.rate(rows, partial(self.drain, stream))
            native = self.rate(rows, partial(self.scan, stream))
            tuples = self.rate(rows, partial(self.drain, stream, "convoymq_tuples"))
            through = self.rate(rows, partial(self.drain, stream, local=False))
            found[f"read_{name}"] = (ours, native)
            found[f"node_{name}"] = (through, native)
            found[f"tuples_{name}"] = (ours, tuples)
        return found

    def archive_case(self) -> tuple[float, float]:
        """A streaming query into Parquet, against a job from Parquet to Parquet."""
        rows = self.scale.rows_200
        ours = self.rate(rows, lambda: self.archive("s200"), writes=True)
        native = self.rate(
            rows, lambda: self.parquet("s200").write.parquet(self.place()), writes=True
        )
        return ours, native

    def sink_case(self, number: int, tell: Callable[[str], None]) -> dict[str, tuple[float, float]]:
        """The sink against the load tool, and that into a stream against a quorum queue."""
        tell("sink")
        ours = self.sink_rate()
        tell("sink to a topic")
        ordered = self.sink_rate(ordered=True)
        tell("publishing")
        order = ("quorum", "stream") if number % 2 else ("stream", "quorum")
        rates = {queue_type: self.publish(queue_type) for queue_type in order}
        stream, quorum = rates["stream"], rates["quorum"]
        return {
            "sink_200": (ours, stream),
            "topic_200": (ordered, ours),
            "publish_200": (stream, quorum),
        }

    def small_batches(self) -> tuple[float, float]:
        """Changes per second of `apply` and of a plain query over the same micro-batches."""
        from pyspark.sql import functions as f

        from convoymq.spark.pipelines.apply import Events, TableSpec, apply

        rows = SMALL_BATCH * SMALL_BATCHES
        row = f"op string, {CHANGE}"
        limit = {"maxOffsetsPerTrigger": str(SMALL_BATCH)}

        def applied() -> None:
            report = apply(
                self.spark,
                servers=self.servers,
                stream="small",
                tables=[TableSpec(path=self.place(), schema=CHANGE, keys=("id",))],
                checkpoint=self.place(),
                events=Events(envelope="flat"),
                options=limit,
                merge="driver",
            )
            assert report.events == rows

        def parsed() -> None:
            reader = self.spark.readStream.format("convoymq").options(**limit)
            reader = reader.options(servers=self.servers, subscribe="small")
            query = (
                reader.option("startingOffsets", "earliest")
                .load()
                .select(f.from_json(f.col("value").cast("string"), row).alias("change"))
                .select("change.*")
                .writeStream.format("parquet")
                .option("checkpointLocation", self.place())
                .option("path", self.place())
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

        fill_changes(self.servers, "small", rows)
        for _ in range(WARM_UPS):
            applied()
            parsed()
        ours = self.rate(rows, applied, writes=True)
        return ours, self.rate(rows, parsed, writes=True)

    def apply_case(self, number: int) -> dict[str, tuple[float, float]]:
        """Both ways of a MERGE, which take turns in being first; nothing without the jars."""
        if not (SPARK_DELTA / "pyspark").exists():
            return {}
        order = ("executors", "driver") if number % 2 else ("driver", "executors")
        words = ["--servers", self.servers, "--stream", "changes"]
        words += ["--rows", str(self.scale.changes), "--order", *order]
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "spark_apply.py"), *words],
            env={**os.environ, "PYTHONPATH": str(SPARK_DELTA)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rates = json.loads(done.stdout.splitlines()[-1])
        return {"apply": (rates["executors"], rates["driver"])}

    def publish(self, queue_type: str) -> float:
        """Confirms per second of the load tool with as much in flight as the sink has."""
        self.disk.rest_long()
        done = self.perf(
            size=200, mode="pub", queue_type=queue_type, in_flight=2 * PRODUCE_ROWS, publishers=2
        )
        return float(done["confirmed_per_s"])

    @contextmanager
    def apart(self) -> Iterator[set[int]]:
        """Keeps the node that a drain reads from off the cores of the others and of this process,
        as a machine of its own would; gives the cores that it has."""
        everything = os.sched_getaffinity(0)
        ordered = sorted(everything)
        theirs = set(ordered[len(ordered) // 2 :])
        with Client(ClientConfig(servers=tuple(self.servers.split(",")))) as client:
            (backlog,) = client.metadata(["backlog"])
        members = backlog.members
        assert backlog.leader in members
        # See `Client.go_closer`.
        near = members[members.index(backlog.leader) - 1]
        try:
            os.sched_setaffinity(0, everything - theirs)
            for node, pid in zip(self.cluster.nodes, self.cluster.pids, strict=True):
                pin(pid, theirs if node.name == near else everything - theirs)
            yield theirs
        finally:
            os.sched_setaffinity(0, everything)
            for pid in self.cluster.pids:
                pin(pid, everything)

    def beside(
        self, *, rate: str | None = None, cores: set[int] | None = None
    ) -> tuple[float, float]:
        """p99 of confirms of 1,000 msg/s: while Spark drains, so fast, on these cores, and
        alone."""
        self.disk.rest_long()
        alone = self.perf(rate=1000, queue_type="quorum")["confirm_us"]["p99"] / 1000
        # Executors are on other machines in earnest; here they must not have the brokers' cores.
        command = [sys.executable, __file__, "--drain", self.servers]
        if rate:
            command += ["--rate", rate]
        if cores:
            command = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *command]
        command = [*self.behind.command, *command]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        ) as drain:
            assert drain.stdout is not None
            drain.stdout.readline()
            try:
                together = self.perf(rate=1000, queue_type="quorum")["confirm_us"]["p99"] / 1000
            finally:
                os.killpg(drain.pid, signal.SIGKILL)
        return together, alone


def pin(pid: int, cores: set[int]) -> None:
    """Keeps all threads of a process to some cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


def drain_for_ever(servers: str, rate: str | None) -> None:
    """Reads the backlog again and again, each task at most so fast; a line on stdout says that it
    has begun."""
    from convoymq.spark import session

    spark = session("drain", master="local[2]", conf=SESSION)
    spark.sparkContext.setLogLevel("FATAL")
    Bench.noop(read(spark, servers, "backlog"))
    rows = read(spark, servers, "backlog", rate=rate)
    print("draining", flush=True)
    while True:
        Bench.noop(rows)


def markdown(
    samples: dict[str, list[tuple[float, float]]], scale: Scale, behind: Background
) -> str:
    """The page."""
    from datetime import date

    cores = os.cpu_count()
    lines = [
        "# Benchmarks of the Spark data sources",
        "",
        f"Measured {date.today().isoformat()} on {cores} cores by `make bench-spark`: three nodes "
        f"({build_text()}), "
        f"local[2], medians of {scale.rounds} rounds; {scale.rows_200:,} rows of 200 B, "
        f"{scale.rows_1k:,} of 1 KiB, backlog {scale.backlog:,}. Broker, Spark and load tool share "
        "the cores, so only the ratios mean something. In the background: "
        + ("a control group with cpu.idle." if behind.idle_group else "the idle scheduling class."),
        "",
        "| case | ours | compared with | ratio | wanted | reached |",
        "|---|---|---|---|---|---|",
    ]
    for goal in GOALS:
        pairs = samples.get(goal.name, [])
        if not pairs:
            continue
        ours = statistics.median(pair[0] for pair in pairs)
        theirs = statistics.median(pair[1] for pair in pairs)
        ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
        lines.append(
            f"| {goal.title} | {goal.ours}: {ours:,.4g} {goal.unit} | {goal.theirs}: "
            f"{theirs:,.4g} {goal.unit} | {ratio:.2f} | {verdict(goal, ratio)} |"
        )
    return "\n".join(lines) + "\n"


def verdict(goal: Goal, ratio: float) -> str:
    """What was wanted, and whether it is reached."""
    if goal.wanted is None:
        return "– | –"
    kept = ratio <= goal.wanted if goal.at_most else ratio >= goal.wanted
    return f"{'≤' if goal.at_most else '≥'} {goal.wanted:g} | {'yes' if kept else 'no'}"


def main() -> int:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small data, one round, no page")
    parser.add_argument("--drain", help=argparse.SUPPRESS)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--backlog", type=int, help="rows of the backlog that Spark drains")
    parser.add_argument("--changes", type=int, help="changes that are applied to a table")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, help="only these; no page then"
    )
    parser.add_argument("--base-port", type=int, default=20_300)
    parser.add_argument("--json", type=Path, help="also write the samples here")
    options = parser.parse_args()
    if options.drain:
        drain_for_ever(options.drain, options.rate)
    chosen = QUICK if options.quick else Scale()
    scale = Scale(
        rows_200=chosen.rows_200,
        rows_1k=chosen.rows_1k,
        backlog=options.backlog or chosen.backlog,
        changes=options.changes or chosen.changes,
        seconds=chosen.seconds,
        rounds=options.rounds or chosen.rounds,
    )
    console = Console(stderr=True)
    console.print(build_text(), highlight=False)
    scratch = Path(tempfile.mkdtemp(prefix="convoy-bench-spark-"))
    samples: dict[str, list[tuple[float, float]]] = {}
    try:
        with background() as behind, convoy_cluster(base_port=options.base_port) as cluster:
            cluster.start()
            bench = Bench(cluster, scale, scratch, behind)
            if set(options.cases) != {"apply"}:
                bench.prepare(console.log)
                console.log("filling the backlog")
                fill(bench.servers, "backlog", scale.backlog, 100)
            fill_changes(bench.servers, "changes", scale.changes)
            for number in range(scale.rounds):
                console.log(f"round {number + 1} of {scale.rounds}")
                for name, pair in bench.round(number, options.cases, console.log).items():
                    samples.setdefault(name, []).append(pair)
                    console.log(name, f"{pair[0]:,.4g} / {pair[1]:,.4g} = {pair[0] / pair[1]:.2f}")
            bench.spark.stop()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    page = markdown(samples, scale, behind)
    print(page)
    if options.json:
        options.json.write_text(json.dumps(samples))
    if not options.quick and set(options.cases) == set(CASES):
        (ROOT / "docs" / "benchmarks-spark.md").write_text(page)
    table = Table("case", "pairs")
    for name, pairs in samples.items():
        table.add_row(name, ", ".join(f"{a:,.4g}/{b:,.4g}" for a, b in pairs))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
