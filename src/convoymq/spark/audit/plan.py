"""The audit as a Spark job: three shuffles of runs, and small tables of findings.

| step     | rows                          | grouped by               | sweep                   |
|----------|-------------------------------|--------------------------|-------------------------|
| replicas | all decided rows of all nodes | part of the log          | digests are compared    |
| messages | decided rows of one node each | ENQUEUE command          | `messages.MessageSweep` |
| order    | published, delivered, owner   | part of the log          | `order.LogSweep`        |
| confirms | published, confirmed          | session                  | `order.ConfirmSweep`    |
| sent     | delivered, sent               | consumer and message ids | `order.SentSweep`       |

Nothing is expanded to single messages, and nothing of the trace's size is collected: the driver
sees footers, digests per part of the log, and findings.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import pyarrow as pa

from convoymq.model import trace as words
from convoymq.model.errors import Misuse
from convoymq.model.trace import Footer
from convoymq.spark.audit import messages, order
from convoymq.spark.audit.coverage import QueueFacts, queue_facts
from convoymq.spark.audit.findings import (
    LAST_ORDINAL,
    ORDINAL_BITS,
    SPARK_SCHEMA,
    FindingRow,
    Scope,
    Sweep,
)
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.result import AuditReport, gather
from convoymq.spark.audit.topics import effects
from convoymq.spark.audit.topics.job import TopicJob
from convoymq.trace import segments

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

DECIDED = (
    words.PUBLISHED,
    words.DELIVERED,
    words.ACKED,
    words.RETURNED,
    words.DROPPED,
    words.OWNER,
    *words.TOPIC_DECIDED,
)
SMALL = {"kind": "tinyint", "reason": "tinyint", "flags": "int", "ordinal": "int"}
FILE_SCHEMA = ", ".join(
    [f"`{name}` {SMALL.get(name, 'bigint')}" for name in words.ROW_COLUMNS]
    + ["`group` bigint", "node int", "incarnation bigint"]
)
LOG_PART_BITS = 10
"""A part of the log is 1024 entries, a part of a consumer 2^18 messages."""
ID_PART_BITS = 18
DIGEST_PARTS_MAX = 50_000
ARROW_ROWS = 1 << 17
PARTITION_ROWS = 1_000_000
PARTITIONS_MAX = 10_000
FEWEST = 8
EXAMPLES = 5

Finding: TypeAlias = "Row | Found"
Progress = Callable[[str], None]


def audit(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    queues: Iterable[str] = (),
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Proves a trace, or shows where the broker broke a promise.

    Args:
        paths: trace directories (or `data` directories) of the nodes of one cluster, on a file
            system that the driver and the executors see.
        queues: names of the queues to look at; none = all.
        spark: the session, or what makes it when the files have been found good; None =
            `convoymq.spark.session`.
        progress: is told the name of each step before it begins.

    Raises:
        Misuse: no segment is there, a file is no segment, or the files are of two clusters.
    """
    started = time.monotonic()
    tell = progress or (lambda _: None)
    tell("footers")
    files, footers = read_footers(paths)
    wanted = set(queues)
    if wanted:
        kept = [k for k, footer in enumerate(footers) if _names(footer) & wanted]
        missing = wanted - {name for k in kept for name in _names(footers[k])}
        if any(footers[k]["type"] == words.PARTITION_TYPE for k in kept):
            routes = [k for k, each in enumerate(footers) if each["type"] == words.TOPICS_TYPE]
            kept = sorted({*kept, *routes})
        if missing:
            raise Misuse(f"no trace of queue '{sorted(missing)[0]}' below the given paths")
        files, footers = [files[k] for k in kept], [footers[k] for k in kept]
    try:
        facts = queue_facts(footers)
    except ValueError as error:
        raise Misuse(str(error)) from None
    if spark is None:
        from convoymq.spark import session

        tell("session")
        spark = session("convoymq audit")
    elif callable(spark):
        tell("session")
        spark = spark()
    found: list[FindingRow] = []
    for job in _jobs(spark, files, facts, footers, effects.files_of(paths)):
        with job.settings():
            found += [cast(FindingRow, row.asDict()) for step in job.steps(tell) for row in step]
    report = gather(facts, found)
    report.rows = sum(int(footer["rows"]) for footer in footers)
    report.files = len(files)
    report.duration_s = time.monotonic() - started
    return report


def _jobs(
    spark: SparkSession, files: list[str], facts: list[QueueFacts], footers: list[Footer],
    others: Sequence[Path],
) -> Iterator[Job]:  # fmt: skip
    """Yields the jobs of queues and of broker groups, as far as there are such."""
    from convoymq.spark.audit.broker_groups import BrokerGroupJob

    for kind, of_brokers in ((Job, False), (BrokerGroupJob, True)):
        chosen = [
            k for k, footer in enumerate(footers)
            if (footer["type"] == words.BROKER_GROUP_TYPE) == of_brokers
        ]  # fmt: skip
        if chosen:
            yield kind(
                spark, [files[k] for k in chosen],
                [each for each in facts if (each.type == words.BROKER_GROUP_TYPE) == of_brokers],
                [footers[k] for k in chosen], others,
            )  # fmt: skip


def _names(footer: Footer) -> set[str]:
    """Returns the names under which a queue may be asked for: a partition by that of its topic."""
    queue = footer["queue"]
    topic = queue.removeprefix(words.PARTITION_PREFIX).rpartition(".")[0]
    return {queue, topic} if footer["type"] == words.PARTITION_TYPE else {queue}


def read_footers(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[list[str], list[Footer]]:
    """Returns all segments below the paths, and what each says of itself. Raises Misuse."""
    roots = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: list[Path] = []
    for root in map(Path, roots):
        if not root.exists():
            raise Misuse(f"{root}: there is no such file or directory")
        found = sorted(root.rglob("group-*.parquet")) if root.is_dir() else [root]
        files += found
    files = list(dict.fromkeys(file.resolve() for file in files))
    if not files:
        raise Misuse(
            "no segment of a trace below " + ", ".join(map(str, roots)) + ": an open one is "
            "completed after trace.segment_max_age, or when the node stops"
        )
    footers: list[Footer] = []
    for file in files:
        try:
            footer = segments.read_metadata(file)
            # Written before these were recorded: then they are not known, and nothing is proved.
            footers.append(cast(Footer, {"members": [], "marked": {}, "previous": None, **footer}))
        except OSError as error:
            raise Misuse(str(error)) from None
    return [str(file) for file in files], footers


class Job:
    """One run of the audit."""

    def __init__(
        self,
        spark: SparkSession,
        files: list[str],
        facts: list[QueueFacts],
        footers: list[Footer],
        others: Sequence[Path] = (),
    ) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        self.spark = spark
        self.others = others
        self.footers = footers
        self.facts = facts
        self.f = F
        rows = sum(int(footer["rows"]) for footer in footers)
        # A remote session (Spark Connect) has no context to ask.
        context = getattr(spark, "sparkContext", None)
        fewest = context.defaultParallelism if context is not None else FEWEST
        self.partitions = min(max(rows // PARTITION_ROWS, fewest), PARTITIONS_MAX)
        self.ends_us: dict[int, int] = defaultdict(int)
        for footer in footers:
            if footer["covered"] and footer["acts"]:
                group = int(footer["group"])
                self.ends_us[group] = max(self.ends_us[group], footer["acts"][-1][1])
        self.scope = Scope(
            groups=tuple(each.group for each in facts),
            state_snapshots=tuple(
                each.state_snapshot["index"] if each.state_snapshot else -1 for each in facts
            ),
            covered=_spans(facts),
        )
        self.raw = spark.read.schema(FILE_SCHEMA).parquet(*files)
        chosen = _files_of_primary(files, footers, facts) or files
        self.raw_primary = spark.read.schema(FILE_SCHEMA).parquet(*chosen)
        self.decided = self._from_primary()

    def settings(self) -> _Settings:
        """Larger Arrow batches while the job runs."""
        return _Settings(
            self.spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS)}
        )

    def steps(self, tell: Progress) -> Iterator[Sequence[Finding]]:
        """Yields the rows of `findings.SCHEMA`, step by step."""
        tell("replicas")
        yield self.replicas()
        if self._groups(streams=False):
            tell("messages")
            yield self.summed(self.messages()).collect()
        tell("order")
        yield self.log_order()
        tell("confirms")
        yield self.summed(self.confirms()).collect()
        tell("sent")
        yield self.summed(self.sent()).collect()
        tell("rows")
        yield self.missing()
        yield from TopicJob(self, self.others).steps(tell)

    # --- parts of the plan ---------------------------------------------------------------

    def small(self, rows: Sequence[tuple[object, ...]], schema: str) -> DataFrame:
        return self.f.broadcast(self.spark.createDataFrame(rows, schema))

    def _within(self, frame: DataFrame, ranges: Sequence[tuple[object, ...]]) -> DataFrame:
        """Returns the rows whose entry lies in a (start, end] of their own node and incarnation."""
        known = self.small(
            ranges, "`group` bigint, node int, incarnation bigint, low bigint, high bigint"
        )
        inside = (self.f.col("index") > self.f.col("low")) & (
            self.f.col("index") <= self.f.col("high")
        )
        return frame.join(known, ["group", "node", "incarnation"]).where(inside)

    def _from_primary(self) -> DataFrame:
        ranges = [
            (each.group, r.node, r.incarnation, r.start, r.end)
            for each in self.facts
            for r in each.primary
        ]
        rows = self.raw_primary.where(self.f.col("kind").isin(*DECIDED))
        return self._within(rows, ranges).withColumns(self.packed(self.f.col("ordinal")))

    def packed(self, ordinal: Column | int) -> dict[str, Column]:
        """Columns that sweeps have instead of some of the files'."""
        F = self.f  # noqa: N806
        return {
            "order": F.shiftleft("index", ORDINAL_BITS) + ordinal,
            "counts": F.shiftleft("acquired", 32) + F.col("delivered"),
            "command": F.col("position_command"),
            "first": F.col("position_first"),
        }

    def _groups(self, *, streams: bool) -> list[int]:
        """Queues, or logs: messages stay there when they are consumed."""
        return [each.group for each in self.facts if (each.type in words.LOG_TYPES) == streams]

    def swept(
        self, frame: DataFrame, columns: Sequence[str], keys: Sequence[str], sort: Sequence[str],
        sweep: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: str = SPARK_SCHEMA,
    ) -> DataFrame:  # fmt: skip
        """Returns what a sweep finds in rows that lie together by `keys`, in the order `sort`."""
        F = self.f  # noqa: N806
        wide = frame.select(*[F.col(f"`{name}`").cast("bigint").alias(name) for name in columns])

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return sweep(batches)

        # A number of our own: Spark's default is many small tasks, each with its worker's cost.
        placed = wide.repartition(self.partitions, *keys).sortWithinPartitions(*sort)
        return placed.mapInArrow(run, schema)

    def summed(self, found: DataFrame) -> DataFrame:
        """Findings with equal keys as one; violations keep some of their examples."""
        F = self.f  # noqa: N806
        counted = F.col("what").isin("violation", "unproved")
        keys = ["what", "group", "k1", "k3"]
        made = found.groupBy(*keys, F.when(counted, 0).otherwise(F.col("k2")).alias("second")).agg(
            F.sum("n").alias("n"),
            F.sum(F.when(counted, F.col("k2")).otherwise(0)).alias("rows"),
            F.max("text").alias("text"),
        )
        rows = F.when(counted, F.col("rows")).otherwise(F.col("second")).alias("k2")
        return made.select("what", "group", "k1", rows, "k3", "n", "text")

    # --- messages ------------------------------------------------------------------------

    def messages(self) -> DataFrame:
        """Returns what became of every message."""
        F = self.f  # noqa: N806
        queues = self._groups(streams=False)
        rows = self.decided.where(
            F.col("group").isin(queues)
            & (F.col("kind") != words.OWNER)
            & ((F.col("kind") != words.PUBLISHED) | (F.col("reason") == 0))
        )
        state_snapshots = [
            (each.group, each.state_snapshot["node"], each.state_snapshot["incarnation"],
             each.state_snapshot["index"] - 1, each.state_snapshot["index"])
            for each in self.facts
            if each.state_snapshot and each.group in queues
        ]  # fmt: skip
        state = self._within(
            self.raw.where(F.col("kind") == words.STATE), state_snapshots
        ).withColumns(self.packed(F.lit(LAST_ORDINAL)))
        columns = messages.COLUMNS
        both = rows.select(*columns).unionByName(state.select(*columns))
        sort = (*messages.KEYS, "order")
        return self.swept(
            both,
            columns,
            ("group", "position_index"),
            sort,
            Sweep(messages.KEYS, messages.follow, self.scope),
        )

    # --- order ---------------------------------------------------------------------------

    def log_order(self) -> Sequence[Finding]:
        """Neighbours in the log, within parts of it and from part to part."""
        F = self.f  # noqa: N806
        rows = self.decided.where(
            F.col("kind").isin(words.PUBLISHED, words.DELIVERED, words.OWNER)
        ).withColumn("part", F.shiftright("index", LOG_PART_BITS))
        found = self.swept(
            rows,
            order.LOG_COLUMNS,
            order.LOG_KEYS,
            (*order.LOG_KEYS, "order"),
            Sweep(order.LOG_KEYS, order.follow_log, self.scope),
        ).persist()
        try:
            made = self.summed(found.where("what <> 'edge'")).collect()
            return made + self._joints(found.where("what = 'edge'")).collect()
        finally:
            found.unpersist()

    def _joints(self, edges: DataFrame) -> DataFrame:
        """Compares where each part begins with where the last one of the same key ended."""
        from pyspark.sql import Window

        F = self.f  # noqa: N806
        window = Window.partitionBy("group", "k1", "k2", "k3").orderBy("k4")
        whole = [each.group for each in self.facts if each.start == 0]
        first_span = self.small(
            _first_spans(self.scope),
            "`group` bigint, first_span bigint",
        )
        chained = (
            edges.withColumns(
                {
                    "e1": F.lag("v3").over(window),
                    "e2": F.lag("v4").over(window),
                    "e_span": F.lag("v6").over(window),
                }
            )
            .join(first_span, "group", "left")
            .withColumn("near", (F.col("e_span") == F.col("v5")) & (F.col("v5") >= 0))
        )
        begin, end = F.col("v1"), F.col("e1")
        kind = F.col("k1")
        alone = (
            F.col("e1").isNull() & F.col("group").isin(whole) & (F.col("v5") == F.col("first_span"))
        )
        wrong = (
            (kind.isin(order.EDGE_TIME, order.EDGE_TERM) & F.col("near") & (begin < end))
            | ((kind == order.EDGE_NUMBER) & F.col("near") & (begin != end))
            | ((kind == order.EDGE_NUMBER) & alone & (begin != 0))
            | ((kind == order.EDGE_SEQ) & F.col("near") & (begin <= end))
            | ((kind == order.EDGE_IDS) & F.col("near") & (begin != order.CAME) & (begin != end))
            | ((kind == order.EDGE_IDS) & alone & (begin != order.CAME))
            | (
                (kind == order.EDGE_PLACE)
                & F.col("near")
                & ((begin < end) | ((begin == end) & (F.col("v2") < F.col("e2"))))
            )
        )
        invariant = F.create_map(
            *[F.lit(int(x)) for pair in order.EDGE_INVARIANTS.items() for x in pair]
        )
        text = F.to_json(
            F.array(
                F.struct(
                    F.shiftright("v7", ORDINAL_BITS).alias("index"),
                    F.lower(F.lpad(F.hex("k2"), 16, "0")).alias("session"),
                    F.col("k3").alias("consumer"),
                    F.col("v1").alias("begins_at"),
                    F.col("e1").alias("expected"),
                )
            )
        )
        return (
            chained.where(wrong)
            .groupBy("group", invariant[kind.cast("int")].alias("k1"))
            .agg(F.count("*").alias("k2"), F.count("*").alias("n"), F.max(text).alias("text"))
            .select(F.lit("violation").alias("what"), "group", "k1", "k2", F.lit(0).alias("k3"),
                    "n", "text")
        )  # fmt: skip

    # --- confirms ------------------------------------------------------------------------

    def _is_whole(self) -> Column:
        """1 for acts about which the trace can tell: the decided rows of their time are there."""
        F = self.f  # noqa: N806
        ends = {
            each.group: self.ends_us[each.group]
            for each in self.facts
            if each.start == 0 and not any(gap.node == 0 for gap in each.gaps)
        }
        nothing: Column = F.lit(0)
        if not ends:
            return nothing
        # A map, not a chain of conditions: those of many queues take Spark long to plan.
        until = F.create_map(*[F.lit(number) for pair in ends.items() for number in pair])
        known = (F.col("time_us") <= until[F.col("group")]).cast("int")
        found: Column = F.coalesce(known, nothing)
        return found

    def _is_told(self) -> Column:
        """1 for decided rows of clients whose node has told of all that it did."""
        F = self.f  # noqa: N806
        node = F.shiftrightunsigned("session", order.NODE_SHIFT)
        told = [
            (each.group << order.NODE_BITS) + number
            for each in self.facts
            if not each.lost
            for number in each.nodes - {gap.node for gap in each.gaps}
        ]
        mine = F.shiftleft("group", order.NODE_BITS) + node
        known: Column = mine.isin(told).cast("int")
        return known

    def missing(self) -> Sequence[Finding]:
        """Returns the rows that the marks of a node's incarnation count, and that are not there."""
        F = self.f  # noqa: N806
        mark = F.col("kind") == words.COVERED
        kinds = {"confirmed": F.col("kind") == words.CONFIRMED, "sent": F.col("kind") == words.SENT}
        counted = [
            F.sum(F.when(mark, F.col(column)).otherwise(0)).alias(f"m_{name}")
            for name, column in words.MARK_COLUMNS.items()
        ]
        found = [
            F.sum(F.when(kinds.get(name, ~mark), 1).otherwise(0)).alias(f"f_{name}")
            for name in words.MARK_COLUMNS
        ]
        counted.append(F.lit(0).alias("m_marks"))
        found.append(F.sum(F.when(mark, 1).otherwise(0)).alias("f_marks"))
        incarnations = (
            self.raw.groupBy("group", "node", "incarnation").agg(*counted, *found).collect()
        )
        told: dict[tuple[int, int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for footer in self.footers:
            incarnation = (footer["group"], footer["node"], footer["incarnation"])
            for name, count in footer["marked"].items():
                told[incarnation][name] += count
        seen = {(row["group"], row["node"], row["incarnation"]): row for row in incarnations}
        made = []
        for incarnation, counts in told.items():
            row = seen.get(incarnation)
            for k, name in enumerate((*words.MARK_COLUMNS, "marks"), 1):
                marked = max(counts[name], 0 if row is None else row[f"m_{name}"])
                n = marked - (0 if row is None else row[f"f_{name}"])
                if n > 0:
                    made.append({"what": "missing", "group": incarnation[0], "k1": k, "n": n})
        return [Found(row) for row in made]

    def confirms(self) -> DataFrame:
        """Confirms against publishes."""
        F = self.f  # noqa: N806
        published = self.decided.where(F.col("kind") == words.PUBLISHED).select(
            "group", "session", "seq", F.lit(1).alias("phase"), "count", F.lit(1).alias("whole")
        )
        confirmed = self.raw.where(
            (F.col("kind") == words.CONFIRMED)
            & (F.col("flags").bitwiseAND(words.DELETED) == 0)
            & F.col("group").isin([each.group for each in self.facts])
        ).withColumn("whole", self._is_whole())
        opens = confirmed.select(
            "group", "session", "seq", F.lit(0).alias("phase"), "count", "whole"
        )
        closes = confirmed.select(
            "group",
            "session",
            F.col("first_id").alias("seq"),
            F.lit(2).alias("phase"),
            "count",
            "whole",
        )
        rows = published.unionByName(opens).unionByName(closes)
        keys = ("group", "session")
        sort = (*keys, "seq", "phase")
        sweep = order.ConfirmSweep(self.scope)
        return self.swept(rows, order.CONFIRM_COLUMNS, keys, sort, sweep)

    # --- sent ----------------------------------------------------------------------------

    def sent(self) -> DataFrame:
        """Returns what nodes wrote to consumers, against what was decided."""
        F = self.f  # noqa: N806
        sent = self.raw.where(F.col("kind") == words.SENT).withColumns(
            {**self.packed(F.lit(0)), "whole": self._is_whole()}
        )
        decided = self.decided.withColumn("whole", self._is_told())
        queue = F.col("group").isin(self._groups(streams=False))
        delivered = decided.where(
            (F.col("kind") == words.DELIVERED)
            & (F.col("flags").bitwiseAND(words.BY_RESERVATION) == 0)
        )
        # At the last id that it could get: see `order.SentSweep`.
        gone = decided.where(
            (F.col("kind") == words.OWNER)
            & (F.col("flags").bitwiseAND(words.GONE) != 0)
            & (F.col("flags").bitwiseAND(words.BY_RESERVATION) == 0)
            & (F.col("first_id") > 0)
        ).withColumns({"first_id": F.col("first_id") - 1, "count": F.lit(1).cast("bigint")})
        told = delivered.unionByName(gone)
        found = self._sent(told.where(queue), sent.where(queue), shared=False)
        if not self._groups(streams=True):
            return found
        stream = F.col("group").isin(self._groups(streams=True))
        nobody = {"session": F.lit(0), "consumer": F.lit(0)}
        published = decided.where(
            stream & (F.col("kind") == words.PUBLISHED) & (F.col("reason") == 0)
        ).withColumns(nobody)
        of_logs = self._sent(published, sent.where(stream).withColumns(nobody), shared=True)
        return found.unionByName(of_logs) if self._groups(streams=False) else of_logs

    def _sent(self, decided: DataFrame, sent: DataFrame, *, shared: bool) -> DataFrame:
        F = self.f  # noqa: N806
        columns = [name for name in order.SENT_COLUMNS if name != "part"]
        rows = decided.select(*columns).unionByName(sent.select(*columns))
        last = F.col("first_id") + F.col("count") - 1
        parts = F.sequence(F.shiftright("first_id", ID_PART_BITS), F.shiftright(last, ID_PART_BITS))
        low = F.greatest("first_id", F.shiftleft("part", ID_PART_BITS))
        high = F.least(last, F.shiftleft(F.col("part") + 1, ID_PART_BITS) - 1)
        cut = (
            rows.where(F.col("count") > 0)
            .withColumn("part", F.explode(parts))
            .withColumns({"low": low, "high": high})
            .withColumns(
                {
                    "first": F.col("first") + F.col("low") - F.col("first_id"),
                    "count": F.col("high") - F.col("low") + 1,
                }
            )
            .withColumn("first_id", F.col("low"))
        )
        keys = order.SENT_KEYS
        sort = (*keys, "first_id", "kind")
        return self.swept(
            cut, order.SENT_COLUMNS, keys, sort, Sweep(order.SENT_KEYS, order.follow_sent, shared)
        )

    # --- replicas ------------------------------------------------------------------------

    def replicas(self) -> Sequence[Finding]:
        """Decided rows of all nodes, compared by digest; where digests differ, row by row."""
        F = self.f  # noqa: N806
        several = [each for each in self.facts if len({r.node for r in each.ranges}) > 1]
        if not several:
            return []
        ranges = [
            (each.group, r.node, r.incarnation, r.start, r.end)
            for each in several
            for r in each.ranges
        ]
        widest = max(each.end - each.start for each in several)
        bits = max(LOG_PART_BITS, (widest // DIGEST_PARTS_MAX).bit_length())
        rows = self._within(self.raw.where(F.col("kind").isin(*DECIDED)), ranges)
        rows = rows.withColumns(
            {
                "digest": F.xxhash64(*words.ROW_COLUMNS),
                "part": F.shiftright("index", bits),
            }
        )
        digests = (
            rows.groupBy("group", "part", "node", "incarnation")
            .agg(
                F.count("*").alias("rows"),
                F.bit_xor("digest").alias("mixed"),
                F.sum(F.col("digest").bitwiseAND(0xFFFFFFFF)).alias("added"),
            )
            .collect()
        )
        suspects = _suspects(several, digests, bits)
        if not suspects:
            return []
        return self._compare_rows(rows, suspects, ranges)

    def _compare_rows(
        self, rows: DataFrame, suspects: list[tuple[int, int]], ranges: Sequence[tuple[object, ...]]
    ) -> Sequence[Finding]:
        F = self.f  # noqa: N806
        few = rows.join(self.small(suspects, "`group` bigint, part bigint"), ["group", "part"])
        known = self.small(
            [(r[0], r[1], r[2], r[3], r[4]) for r in ranges],
            "`group` bigint, r_node int, r_incarnation bigint, r_low bigint, r_high bigint",
        )
        each = few.groupBy("group", "index", "ordinal").agg(
            F.count("*").alias("found"),
            F.count_distinct("digest").alias("different"),
            F.sort_array(F.collect_set("node")).alias("nodes"),
            F.first("kind").alias("kind"),
            F.first("count").alias("messages"),
        )
        inside = (F.col("index") > F.col("r_low")) & (F.col("index") <= F.col("r_high"))
        judged = (
            each.join(known, "group")
            .where(inside)
            .groupBy("group", "index", "ordinal", "found", "different", "nodes", "kind", "messages")
            .agg(F.count("*").alias("expected"))
            .where((F.col("different") > 1) | (F.col("found") != F.col("expected")))
        )
        example = F.to_json(
            F.struct("index", "ordinal", "kind", "nodes", "found", "expected", "different")
        )
        grouped = judged.groupBy("group").agg(
            F.count("*").alias("k2"),
            F.sum("messages").alias("n"),
            F.slice(F.sort_array(F.collect_list(example)), 1, EXAMPLES).alias("texts"),
        )
        return grouped.select(
            F.lit("violation").alias("what"),
            "group",
            F.lit(int(Invariant.REPLICAS_AGREE)).alias("k1"),
            "k2",
            F.lit(0).alias("k3"),
            "n",
            F.concat(F.lit("["), F.concat_ws(",", "texts"), F.lit("]")).alias("text"),
        ).collect()


def _spans(facts: Iterable[QueueFacts]) -> tuple[tuple[int, int, int], ...]:
    """Returns (group, start, end] of what is covered without a gap, by whichever nodes."""
    made: list[tuple[int, int, int]] = []
    for each in facts:
        for part in each.primary:
            if made and made[-1][0] == each.group and made[-1][2] == part.start:
                made[-1] = (each.group, made[-1][1], part.end)
            else:
                made.append((each.group, part.start, part.end))
    return tuple(made)


def _files_of_primary(
    files: Sequence[str], footers: Sequence[Footer], facts: Iterable[QueueFacts]
) -> list[str]:
    """Files that hold decided rows of the ranges that were chosen: the other replicas' are only
    compared."""
    ranges = {each.group: each.primary for each in facts}
    chosen = []
    for file, footer in zip(files, footers, strict=True):
        incarnation = (footer["node"], footer["incarnation"])
        if any(
            (part.node, part.incarnation) == incarnation and start < part.end and part.start < end
            for part in ranges[footer["group"]]
            for start, end in footer["covered"]
        ):
            chosen.append(file)
    return chosen


def _first_spans(scope: Scope) -> list[tuple[int, int]]:
    """Returns (group, number of its first span)."""
    found: dict[int, int] = {}
    for number, (group, _, _) in enumerate(scope.covered):
        found.setdefault(group, number)
    return list(found.items())


def _suspects(
    facts: Iterable[QueueFacts], digests: Iterable[Row], bits: int
) -> list[tuple[int, int]]:
    """Parts of the log that have to be compared row by row: digests differ, or not every node that
    has a share in the part covers all of it."""
    seen: dict[tuple[int, int], dict[tuple[int, int], tuple[int, int, int]]] = defaultdict(dict)
    for row in digests:
        incarnation = (row["node"], row["incarnation"])
        seen[row["group"], row["part"]][incarnation] = (row["rows"], row["mixed"], row["added"])
    suspects = []
    for each in facts:
        parts = {part for group, part in seen if group == each.group}
        for part in sorted(parts):
            low, high = max(part << bits, each.start + 1), min(((part + 1) << bits) - 1, each.end)
            inside = [r for r in each.ranges if r.start < high and r.end >= low]
            whole = [r for r in inside if r.start < low and r.end >= high]
            incarnations = {(r.node, r.incarnation) for r in whole}
            found = seen[each.group, part]
            equal = len(set(found.values())) == 1 and set(found) == incarnations
            if len(inside) > 1 and not (equal and len(whole) == len(inside)):
                suspects.append((each.group, part))
    return suspects


class Found(dict[str, object]):
    """A finding that was not made by Spark."""

    def asDict(self) -> dict[str, object]:  # noqa: N802
        """As Spark's rows do it."""
        return self


class _Settings:
    """Session settings for as long as the context lasts."""

    def __init__(self, spark: SparkSession, wanted: dict[str, str]) -> None:
        self._spark = spark
        self._wanted = wanted
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        for name, value in self._wanted.items():
            self._before[name] = self._spark.conf.get(name, None)
            self._spark.conf.set(name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is None:
                self._spark.conf.unset(name)
            else:
                self._spark.conf.set(name, value)
