"""`apply`: ordered change events to Delta tables that equal their source.

Per micro-batch and table: the latest event of each key (by position), one MERGE into the table
(`merging`: through the driver, or on the executors), and in the same commit the batch's id and its
offsets, so that a batch that is repeated after a crash between MERGE and checkpoint is skipped.
What is merged again changes nothing, so a batch of which that is not known is merged: after an
older checkpoint was put back, old numbers stand for other events. Three columns make the MERGE
safe against late events: `_position` and `_offset` (a row is only replaced by a younger event: one
of a higher position, or of the same position and a higher offset) and `_deleted` (a tombstone
stays, or an older insert would bring the row back). Of an ordered topic `_position` is the route
version that created the event's partition: with the offset there it is the order token, which grows
along the history of a key through splits, merges and moves. `purge` removes tombstones by age,
`rows` reads a table without them.

An event is applied whole or not at all: JSON that Spark would read as NULL, or as another number,
because it does not fit the schema, is a bad event.

Each table has its own transactions: replays are safe, several tables are not one atomic step.
Tables of a batch are merged side by side. The batch ends when all have it; when one fails it fails,
and its repeat passes over those that have it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines import merging
from convoymq.spark.pipelines.checkpoint import app_id, offsets_of, plan_id
from convoymq.spark.pipelines.merging import (
    OFFSET,
    POSITION,
    Batch,
    DriverMerger,
    ExecutorMerger,
    MergePath,
    TableMerger,
    chosen_path,
    has_delta,
    location,
    run_together,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import DataType, StructType

PARALLEL_TABLES = 4
"""Tables that are merged at a time."""
DELETED = "_deleted"
CHANGED_AT = "_changed_at"
META = (POSITION, OFFSET, DELETED, CHANGED_AT)
CORRUPT = "_corrupt_record"
EVENT = ("topic", "partition", "offset", "timestamp", "key", "value")
"""Columns of the source that are kept of a bad event."""
KEYS_PROPERTY = "convoymq.keys"
"""Of the Delta table: the columns that name a row."""
TOPIC_PROPERTY = "convoymq.topic"
"""Of the Delta table: the topic that it follows, name and time of creation. Tokens of another topic
compare with nothing."""

UPSERTS = {"debezium": ("c", "r", "u"), "flat": ("c", "create", "i", "insert", "r", "read", "u",
                                                 "update", "upsert")}  # fmt: skip
DELETES = {"debezium": ("d",), "flat": ("d", "delete")}
INTEGERS = ("tinyint", "smallint", "int", "bigint")
YEAR_MAX = 9999
MADE_INFINITE = ('"Infinity"', '"-Infinity"', '"NaN"')
"""Texts that Spark makes, quotes included, of a number beyond a double where a text is wanted."""
INFINITIES = ("Infinity", "+Infinity", "-Infinity", "INF", "+INF", "-INF")

Probe = Callable[[str, str, int], None]
"""Called with (point, table, batch id) at `merging` and `merged`: tests stop a batch there."""


class BadEvent(SourceError):
    """An event that can't be applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One table that follows its events."""

    path: str
    """Directory (or URL) of the Delta table."""
    schema: str
    """The row, as DDL: `id bigint, name string`."""
    keys: tuple[str, ...]
    """Columns that name a row."""
    name: str = ""
    """Name of the table in events; "" = every event is for this table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Form of events: JSON, and the places of their parts in it.

    `debezium`: {"op": "c" | "r" | "u" | "d", "before": row, "after": row, "source": {"table": …}},
    also inside {"payload": …}. `flat`: the row itself with a field (default `op`) that says what
    happened (c, create, i, insert, r, read, u, update, upsert; d, delete; in any case of letters),
    and a field (default `table`) that names the table. In both a row is whole: a column that it
    lacks is NULL. An empty message is a tombstone of a log and says nothing new.
    """

    envelope: str = "debezium"
    op_field: str = "op"
    table_field: str = "table"
    position_field: str = ""
    """A number that orders events (a log position), by its path in the JSON: `source.pos`. Empty:
    the message's offset. Use it where a snapshot and the log are interleaved. Of events with equal
    positions the one with the higher offset is the later."""


@dataclass(frozen=True, slots=True)
class FollowedTopic:
    """Topic whose order tokens order the events."""

    name: str
    created_ms: int

    def __str__(self) -> str:
        return f"{self.name} of {self.created_ms}"


@dataclass(slots=True, kw_only=True)
class TableReport:
    """Counts of one table."""

    events: int = 0
    keys: int = 0
    """Rows that were merged: the latest event of each key."""
    batches: int = 0
    skipped: int = 0
    """Batches that the table had already."""


@dataclass(slots=True, kw_only=True)
class ApplyReport:
    """Result of one call of `apply`."""

    tables: dict[str, TableReport] = field(default_factory=dict)
    events: int = 0
    diverted: int = 0
    """Events that went to `bad_path`."""
    seconds: float = 0.0
    merge: MergePath = MergePath.DRIVER
    """Path of the rows: never AUTO."""


def apply(
    spark: SparkSession,
    *,
    servers: str,
    stream: str = "",
    topic: str = "",
    tables: Sequence[TableSpec],
    checkpoint: str | os.PathLike[str],
    events: Events | None = None,
    bad_path: str | None = None,
    options: Mapping[str, str] | None = None,
    every: str | None = None,
    merge: str = MergePath.AUTO,
    parallel: int = PARALLEL_TABLES,
    probe: Probe | None = None,
) -> ApplyReport:
    """Applies everything that is there (or goes on for ever).

    Args:
        servers: `host:port` of nodes, comma between.
        stream, topic: of change events, one of them. In a topic the tokens order them.
        tables: the tables; with more than one, each has a name.
        checkpoint: a directory: Spark's checkpoint and the pipeline's id. Tables remember batches
            by that id.
        bad_path: where events go that can't be applied (Parquet, with the reason); None: they end
            the pipeline with `BadEvent`.
        options: more options of the source.
        every: trigger interval such as "5 seconds": never returns. None: until the present end.
        merge: a `MergePath`: where the rows of a MERGE go.
        parallel: how many tables are merged at a time.

    Raises:
        OptionError: specs that don't fit.
        StreamingQueryException: an event is bad, or a source or table failed; call again to go on.
    """
    rules = events or Events()
    targets = [_Target(spark, spec) for spec in tables]
    if bool(stream) == bool(topic):
        raise OptionError("give either a stream or a topic to apply")
    if parallel < 1:
        raise OptionError(f"parallel {parallel}: at least one table is merged at a time")
    path = chosen_path(spark, merge)
    source = _source(servers, stream, topic, options or {})
    _check(targets, rules, of_topic=bool(topic))
    followed = _followed(source) if topic else None
    for target in targets:
        _fit_table(target, followed)
    place = Path(checkpoint)
    tables_report = {target.label: TableReport() for target in targets}
    report = ApplyReport(tables=tables_report, merge=path)
    writer = _BatchApplier(
        targets,
        rules,
        _mergers(spark, path, app_id(place), targets, parallel),
        report,
        bad_path,
        probe,
        parallel=parallel,
        checkpoint=place,
        followed=followed,
    )
    started = time.monotonic()
    rows_read = spark.readStream.format("convoymq").options(**source).load()
    query = rows_read.writeStream.queryName(f"apply {stream or topic}").foreachBatch(writer)
    _run(query.option("checkpointLocation", str(place)), every)
    report.seconds = time.monotonic() - started
    return report


def _source(servers: str, stream: str, topic: str, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of the source."""
    source = {"servers": servers, "startingOffsets": "earliest"}
    if topic:
        # The latest event of a key is chosen by its token, in whichever task and order it comes.
        return {**source, "afterClose": "same-batch", **more, "topic": topic}
    return {**source, **more, "subscribe": stream}


def _run(query: DataStreamWriter, every: str | None) -> None:
    trigger = query.trigger(processingTime=every) if every else query.trigger(availableNow=True)
    running = trigger.start()
    try:
        running.awaitTermination()
    finally:
        running.stop()


def rows(spark: SparkSession, path: str) -> DataFrame:
    """Returns the table as its source has it: no tombstones, no columns of ours."""
    from deltalake import DeltaTable
    from pyspark.sql import functions as f

    table = DeltaTable(path)
    uris = table.file_uris()
    if not uris:
        raise SourceError(f"{path}: the table has no rows yet")
    if has_delta(spark):
        found = spark.read.format("delta").load(location(path))
    elif "deletionVectors" in (table.protocol().reader_features or ()):
        raise SourceError(f"{path}: deletion vectors are read by Delta Lake's extension only")
    else:
        # Files that are older than a column do not have it.
        found = spark.read.schema(_schema_of(table)).parquet(*uris)
    return found.where(~f.col(DELETED)).drop(*META)


def purge(path: str, older_than: timedelta) -> int:
    """Removes tombstones of events that are older. Late events of such keys would insert again, so
    keep them for longer than any event can be late. Returns how many went."""
    from deltalake import DeltaTable

    limit = (datetime.now(UTC) - older_than).isoformat(timespec="microseconds")
    # Delta's own columns are in microseconds; a plain literal would be in nanoseconds.
    moment = f"arrow_cast('{limit}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
    done = DeltaTable(path).delete(f"{DELETED} AND {CHANGED_AT} < {moment}")
    return int(done["num_deleted_rows"])


class _Target:
    def __init__(self, spark: SparkSession, spec: TableSpec) -> None:
        from pyspark.sql.types import StructType

        self.spec = spec
        self.label = spec.name or os.path.basename(spec.path.rstrip("/"))
        try:
            row = StructType.fromDDL(spec.schema)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise OptionError(f"table {self.label}: schema {spec.schema!r}: {reason}") from error
        if not isinstance(row, StructType):
            raise OptionError(f"table {self.label}: schema {spec.schema!r} is one type, not a row")
        self.row = row
        names = row.fieldNames()
        missing = [key for key in spec.keys if key not in names]
        if not spec.keys or missing:
            raise OptionError(f"table {self.label}: keys {spec.keys} are not columns of {names}")
        for each in row:
            if (unserved := _unserved(each.dataType)) is not None:
                raise OptionError(f"table {self.label}: column {each.name}: {unserved}")
        taken = [name for name in names if name in (*META, CORRUPT)]
        if taken:
            raise OptionError(f"table {self.label}: columns {taken} are the pipeline's own")


def _followed(source: Mapping[str, str]) -> FollowedTopic:
    """Asks the broker for the topic. Raises OptionError, SourceError, ClientError."""
    from convoymq.spark.option_table import Use, parse_options
    from convoymq.spark.options import StreamReadOptions
    from convoymq.spark.topic_broker import Topic

    # Spark takes options in any case of letters; of two spellings it takes the last.
    values = parse_options("convoymq", {name.lower(): value for name, value in source.items()})
    topic = Topic(StreamReadOptions.of(values, Use.STREAM_READ))
    if topic.client.topic_route(topic.name, lineage=False).mode != "strict":
        raise OptionError(
            f"topic {topic.name} is weak: it spreads messages without a key, and the order tokens "
            "of a row's changes may not be in the order of the changes. Apply a strict topic"
        )
    return FollowedTopic(topic.name, topic.history().created_ms)


def _check(targets: Sequence[_Target], rules: Events, *, of_topic: bool = False) -> None:
    if not targets:
        raise OptionError("nothing to apply to: name tables")
    names = [target.spec.name for target in targets]
    if len(targets) > 1 and (not all(names) or len(set(names)) != len(names)):
        raise OptionError("several tables: each needs a name of its own, as the events have it")
    if rules.envelope not in ("debezium", "flat"):
        raise OptionError(f"envelope {rules.envelope}: there are debezium and flat")
    if rules.position_field and of_topic:
        raise OptionError("events of a topic are ordered by their tokens, not by a position field")
    if rules.position_field and not re.fullmatch(r"\w+(\.\w+)*", rules.position_field):
        raise OptionError(f"position field {rules.position_field!r}: a path such as source.pos")


def _mergers(
    spark: SparkSession, path: MergePath, app: str, targets: Sequence[_Target], parallel: int
) -> list[TableMerger]:
    """Returns what merges into each table."""
    made: list[TableMerger] = []
    together = max(1, min(parallel, len(targets)))
    for spec in (target.spec for target in targets):
        if path is MergePath.EXECUTORS:
            made.append(ExecutorMerger(spark, app, spec.path, spec.keys))
        else:
            rows_max = max(1, merging.MERGE_ROWS_MAX // together)
            made.append(DriverMerger(app, spec.path, spec.keys, rows_max=rows_max))
    return made


class _BatchApplier:
    """Callable for `foreachBatch`."""

    def __init__(
        self,
        targets: Sequence[_Target],
        rules: Events,
        mergers: Sequence[TableMerger],
        report: ApplyReport,
        bad_path: str | None,
        probe: Probe | None,
        *,
        parallel: int = PARALLEL_TABLES,
        checkpoint: Path | None = None,
        followed: FollowedTopic | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._followed = followed
        self._targets = targets
        self._rules = rules
        self._mergers = mergers
        self._parallel = parallel
        self._named = all(target.spec.name for target in targets)
        self._report = report
        self._bad_path = bad_path
        self._probe = probe or (lambda point, table, batch: None)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        from pyspark.sql import functions as f

        self._check_topic(batch_id)
        batch = batch.where(f.length("value") > 0)
        if self._named:
            batch = batch.withColumn("_table", _table_name(self._rules))
        # Without this every action below would read the source again.
        batch = batch.persist()
        try:
            self._report.events += batch.count()
            works = [
                partial(self._apply, target, merger, batch, batch_id)
                for target, merger in zip(self._targets, self._mergers, strict=True)
            ]
            self._report.diverted += sum(run_together(batch.sparkSession, works, self._parallel))
            self._report.diverted += self._divert_unknown(batch, batch_id)
        finally:
            batch.unpersist()

    def _check_topic(self, batch_id: int) -> None:
        """Raises SourceError: the batch is of another topic of this name (`failOnDataLoss`)."""
        followed, place = self._followed, self._checkpoint
        if followed is None or place is None:
            return
        created_ms = json.loads(offsets_of(place, batch_id)).get("created")
        if created_ms != followed.created_ms:
            raise SourceError(
                f"topic {followed.name} was deleted and created again, and its order tokens begin "
                "anew: it needs tables and a checkpoint of its own"
            )

    def _apply(self, target: _Target, merger: TableMerger, batch: DataFrame, batch_id: int) -> int:
        """Merges the events of one table. Returns how many can't be applied. Runs beside others of
        its kind: it changes the counts of its own table only."""
        from deltalake import DeltaTable
        from pyspark.sql import functions as f

        if target.spec.name:
            batch = batch.where(f.col("_table") == target.spec.name)
        parsed = _parsed(batch, self._rules, target.row, by_token=self._followed is not None)
        # Kept, and so read once. Spark 4.2 also loses `_misread` of an event when it merges the
        # reason into a filter: the event would be bad and applied.
        judged = (
            parsed.withColumn("reason", _reason(target, self._rules))
            .select(*EVENT, "reason", "_row", POSITION, DELETED)
            .persist()
        )
        chosen = _latest(judged.where(f.col("reason").isNull()), target).persist()
        try:
            # A column counts where it is not null.
            found = judged.agg(f.count("*").alias("events"), f.count("reason").alias("bad")).first()
            assert found is not None
            bad = int(found.bad)
            if bad:
                self._divert(judged.where(f.col("reason").isNotNull()), target.label, batch_id)
            keys = chosen.count()
            if not keys:
                return bad
            if not DeltaTable.is_deltatable(target.spec.path):
                _create(target.spec.path, chosen, target, self._followed)
            place = self._checkpoint
            plan = "" if place is None else plan_id(offsets_of(place, batch_id))

            def probe(point: str) -> None:
                self._probe(point, target.label, batch_id)

            merged = merger.merge(chosen, keys, Batch(number=batch_id, plan=plan), probe)
        finally:
            chosen.unpersist()
            judged.unpersist()
        counts = self._report.tables[target.label]
        counts.batches += 1
        counts.skipped += not merged
        counts.events += int(found.events) - bad
        counts.keys += keys
        return bad

    def _divert_unknown(self, batch: DataFrame, batch_id: int) -> int:
        """Events of a table that nobody follows are bad, too. Returns how many there are."""
        from pyspark.sql import functions as f

        if not self._named:
            return 0
        table = f.col("_table")
        lost = batch.where(table.isNull() | ~table.isin([each.spec.name for each in self._targets]))
        count = lost.count()
        if count:
            reason = f.concat(f.lit("no such table: "), f.coalesce(table, f.lit("none named")))
            self._divert(lost.withColumn("reason", reason), "unknown", batch_id)
        return count

    def _divert(self, bad: DataFrame, label: str, batch_id: int) -> None:
        """Writes bad events to the place for them. Raises BadEvent: there is none."""
        if self._bad_path is None:
            first = bad.select("topic", "partition", "offset", "reason").orderBy("offset").limit(3)
            where = "; ".join(
                f"{r.topic}/{r.partition}@{r.offset}: {r.reason}" for r in first.collect()
            )
            raise BadEvent(f"events that can't be applied to {label}: {where}")
        kept = bad.select(*EVENT, "reason")
        place = f"{self._bad_path}/table={label}/batch={batch_id:010d}"
        # By batch: a repeat writes over what it wrote.
        kept.write.mode("overwrite").parquet(place)


def _latest(events: DataFrame, target: _Target) -> DataFrame:
    """Returns the row of each key as its latest event has it, with the columns of ours."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    latest = Window.partitionBy(*[f.col(f"_row.{key}") for key in target.spec.keys]).orderBy(
        f.col(POSITION).desc(), f.col("offset").desc()
    )
    return (
        events.withColumn("_rank", f.row_number().over(latest))
        .where("_rank = 1")
        .select(
            "_row.*",
            POSITION,
            f.col("offset").alias(OFFSET),
            DELETED,
            f.col("timestamp").alias(CHANGED_AT),
        )
    )


def _text() -> Column:
    from pyspark.sql import functions as f

    return f.col("value").cast("string")


def _json_path(rules: Events, path: str) -> Column:
    from pyspark.sql import functions as f

    if rules.envelope == "flat":
        return f.get_json_object(_text(), f"$.{path}")
    return f.coalesce(
        f.get_json_object(_text(), f"$.payload.{path}"), f.get_json_object(_text(), f"$.{path}")
    )


def _table_name(rules: Events) -> Column:
    path = "source.table" if rules.envelope == "debezium" else rules.table_field
    return _json_path(rules, path)


def _parsed(
    batch: DataFrame, rules: Events, row: StructType, *, by_token: bool = False
) -> DataFrame:
    """Adds `_op`, `_row` (the row, or what named it before it was deleted), `_text` (the
    same row, every value as the text of its JSON), `_misread` (something does not fit the schema),
    `_deleted` and `_position`."""
    from pyspark.sql import functions as f

    batch = batch.withColumn("_op", f.lower(_json_path(rules, _op_path(rules))))
    deleted = f.coalesce(f.col("_op").isin(*DELETES[rules.envelope]), f.lit(False))
    parsed = batch.withColumns(
        {
            "_good": f.from_json(_text(), _message(rules, row, corrupt=True)),
            "_wide": f.from_json(_text(), _message(rules, _row_as_text(row), corrupt=False)),
        }
    )

    def row_of(parsed_name: str) -> Column:
        if rules.envelope == "flat":
            names = [f.col(f"{parsed_name}.`{name}`") for name in row.fieldNames()]
            return f.when(f.col(parsed_name).isNotNull(), f.struct(*names))
        sides = []
        for side in ("before", "after"):
            inner = f.col(f"{parsed_name}.payload.{side}")
            sides.append(f.coalesce(inner, f.col(f"{parsed_name}.{side}")))
        return f.when(deleted, sides[0]).otherwise(sides[1])

    position = (
        _json_path(rules, rules.position_field).try_cast("long")
        if rules.position_field
        else f.col("route_version" if by_token else "offset")
    )
    return (
        parsed.withColumn("_row", row_of("_good"))
        .withColumn("_text", row_of("_wide"))
        .withColumn("_misread", f.col(f"_good.{CORRUPT}").isNotNull())
        .withColumn(DELETED, deleted)
        .withColumn(POSITION, position)
    )


def _message(rules: Events, row: StructType, *, corrupt: bool) -> StructType:
    """Returns the type of an event whose rows are of this type. Read at once, because a part that
    is cut out as text first has lost digits of its numbers."""
    from pyspark.sql.types import StringType, StructField, StructType

    noted = [StructField(CORRUPT, StringType())] if corrupt else []
    if rules.envelope == "flat":
        return StructType([*row.fields, *noted])
    sides = [StructField("before", row), StructField("after", row)]
    return StructType([*sides, StructField("payload", StructType(sides)), *noted])


def _row_as_text(row: StructType) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(each.name, _as_text(each.dataType)) for each in row])


def _as_text(type: DataType) -> DataType:
    """Returns the type with text in the place of every value."""
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    match type:
        case StructType():
            return _row_as_text(type)
        case ArrayType():
            return ArrayType(_as_text(type.elementType))
        case MapType():
            return MapType(type.keyType, _as_text(type.valueType))
    return StringType()


def _unserved(type: DataType) -> str | None:
    """Returns why a column can't have this type; None = it can."""
    from pyspark.sql import types as t

    match type:
        case t.StructType():
            return next(filter(None, (_unserved(each.dataType) for each in type)), None)
        case t.ArrayType():
            return _unserved(type.elementType)
        case t.MapType():
            if not isinstance(type.keyType, t.StringType):
                name = type.keyType.simpleString()
                return f"the keys of a map are strings in JSON, not {name}"
            return _unserved(type.valueType)
        # A CharType may count as a StringType, and Spark reads none from JSON.
        case t.CharType() | t.VarcharType():
            return f"type {type.simpleString()} is not served; take string"
        case (
            t.StringType()
            | t.BinaryType()
            | t.BooleanType()
            | t.ByteType()
            | t.ShortType()
            | t.IntegerType()
            | t.LongType()
            | t.FloatType()
            | t.DoubleType()
            | t.DecimalType()
            | t.DateType()
            | t.TimestampType()
            | t.TimestampNTZType()
        ):
            return None
    return f"type {type.simpleString()} is not served"


def _misfit(value: Column, text: Column, type: DataType) -> Column:
    """Returns whether a value is not what its JSON says: NULL, or another number."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StringType, StructType

    lost = text.isNotNull() & value.isNull()
    name = type.simpleString()
    match type:
        case StructType():
            for each in type:
                inner = value.getField(each.name), text.getField(each.name)
                lost = lost | _misfit(*inner, each.dataType)
        case ArrayType():
            lost = lost | _any_misfit(value, text, type.elementType)
        case MapType():
            inner = f.map_values(value), f.map_values(text)
            lost = lost | _any_misfit(*inner, type.valueType)
        case StringType():
            lost = lost | value.isin(*MADE_INFINITE)
        case DecimalType():
            # As doubles: Spark's text of a long fraction is that of the nearest double.
            same = text.try_cast("double") == value.cast("double")
            lost = lost | (text.isNotNull() & ~f.coalesce(same, f.lit(False)))
        case _ if name in INTEGERS:
            # A byte of 200 is read as -56.
            lost = lost | (text.try_cast("decimal(38,0)") != value)
        case _ if name in ("date", "timestamp", "timestamp_ntz"):
            lost = lost | ~f.year(value).between(1, YEAR_MAX)
            if name != "date":
                # A number has no unit: Spark would take milliseconds for seconds.
                lost = lost | text.try_cast("decimal(38,0)").isNotNull()
        case _ if name in ("float", "double"):
            lost = lost | ((f.abs(value) == float("inf")) & ~text.isin(*INFINITIES))
    return f.coalesce(lost, f.lit(False))


def _any_misfit(values: Column, texts: Column, type: DataType) -> Column:
    from pyspark.sql import functions as f

    return f.exists(
        f.zip_with(values, texts, lambda a, b: _misfit(a, b, type)), lambda wrong: wrong
    )


def _op_path(rules: Events) -> str:
    return "op" if rules.envelope == "debezium" else rules.op_field


def _reason(target: _Target, rules: Events) -> Column:
    """Returns why an event can't be applied; null = it can."""
    from pyspark.sql import functions as f

    known = (*UPSERTS[rules.envelope], *DELETES[rules.envelope])
    reason = (
        f.when(~f.is_valid_utf8(_text()), f.lit("not UTF-8"))
        .when(f.col("_op").isNull(), f.lit("not JSON, or without an operation"))
        .when(~f.col("_op").isin(*known), f.concat(f.lit("unknown operation "), f.col("_op")))
    )
    for each in target.row:
        text = f.col("_text").getField(each.name)
        name = each.dataType.simpleString()
        shown = f.substring(text if "<" not in name else f.to_json(text), 1, 60)
        reason = reason.when(
            _misfit(f.col("_row").getField(each.name), text, each.dataType),
            f.concat(f.lit(f"{each.name}: "), shown, f.lit(f" does not fit {name}")),
        )
    missing = f.lit(False)
    for key in target.spec.keys:
        missing = missing | f.col("_row").getField(key).isNull()
    return (
        reason.when(f.col("_misread"), f.lit("a value that does not fit the schema"))
        .when(f.col("_row").isNull() | missing, f.lit("without its key"))
        .when(f.col(POSITION).isNull(), f.lit("without its position"))
    )


def _create(path: str, chosen: DataFrame, target: _Target, followed: FollowedTopic | None) -> None:
    from deltalake import DeltaTable, Schema

    if "://" not in path:
        Path(path).mkdir(parents=True, exist_ok=True)
    empty = chosen.limit(0).toArrow()
    properties: dict[str, str | None] = {KEYS_PROPERTY: ",".join(target.spec.keys)}
    if followed is not None:
        properties[TOPIC_PROPERTY] = str(followed)
    DeltaTable.create(
        path,
        Schema.from_arrow(empty.schema),
        mode="ignore",
        configuration=properties,
        raise_if_key_not_exists=False,
    )


def _schema_of(table: DeltaTable) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(table.schema().to_json()))


def _fit_table(target: _Target, followed: FollowedTopic | None = None) -> None:
    """Adds columns of the schema that an existing table lacks: NULL until the next event of a row.

    Raises:
        OptionError: the table has other keys, other types, columns that the schema lacks, or
            another order of its events.
    """
    from deltalake import DeltaTable, Schema
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import LongType, StructField, StructType

    path, label = target.spec.path, target.label
    if not DeltaTable.is_deltatable(path):
        return
    table = DeltaTable(path)
    held = {each.name: each.dataType for each in _schema_of(table)}
    if not {POSITION, DELETED, CHANGED_AT} <= held.keys():
        raise OptionError(f"table {label}: {path} is a table that this pipeline has not made")
    properties = table.metadata().configuration
    order = properties.get(TOPIC_PROPERTY)
    if order != (None if followed is None else str(followed)):
        found = "positions" if order is None else f"the order tokens of topic {order}"
        wanted = "positions" if followed is None else f"the order tokens of topic {followed}"
        raise OptionError(
            f"table {label}: its rows have {found}, which do not compare with {wanted}"
        )
    keys = properties.get(KEYS_PROPERTY, ",".join(target.spec.keys))
    if set(keys.split(",")) != set(target.spec.keys):
        raise OptionError(f"table {label}: its rows are named by {keys}, not {target.spec.keys}")
    unknown = sorted(held.keys() - {*target.row.fieldNames(), *META})
    if unknown:
        raise OptionError(f"table {label} has columns {unknown}, which are not in the schema")
    fresh = []
    for each in (*target.row, StructField(OFFSET, LongType())):
        known = held.get(each.name)
        if known is None:
            fresh.append(StructField(each.name, each.dataType))
        elif known.simpleString() != each.dataType.simpleString():
            raise OptionError(
                f"table {label}: column {each.name} is {known.simpleString()}, "
                f"not {each.dataType.simpleString()}"
            )
    if fresh:
        fields = Schema.from_arrow(to_arrow_schema(StructType(fresh))).fields
        table.alter.add_columns(list(fields))
