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

An event may give its row another key: the row of the former key is gone then, a tombstone of that
event. One that empties the table (a TRUNCATE) removes the rows of all events before it; the table
keeps its place as a property, so that late events bring nothing back.

Of a batch one job of Spark makes the latest rows, and counts meanwhile what else is in it. Only
what does not pass through the driver at once, or is for several tables, is kept and read again.

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
from typing import TYPE_CHECKING, Any

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines import merging
from convoymq.spark.pipelines.change_events import (
    CORRUPT,
    ENVELOPES,
    EVENT,
    EventColumns,
    Events,
    Order,
    has_payload,
    is_note,
    table_name,
    unserved,
)
from convoymq.spark.pipelines.checkpoint import app_id, offsets_of, plan_id
from convoymq.spark.pipelines.connect_types import declared_type
from convoymq.spark.pipelines.merging import (
    CHANGED_AT,
    DELETED,
    OFFSET,
    POSITION,
    Batch,
    DriverMerger,
    Emptied,
    ExecutorMerger,
    MergePath,
    TableMerger,
    chosen_path,
    has_delta,
    location,
    run_together,
)
from convoymq.spark.query_runs import run_queries, triggered

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import DataType, StructType

PARALLEL_TABLES = 4
"""Tables that are merged at a time."""
META = (POSITION, OFFSET, DELETED, CHANGED_AT)
KEYS_PROPERTY = "convoymq.keys"
"""Of the Delta table: the columns that name a row."""
TOPIC_PROPERTY = "convoymq.topic"
"""Of the Delta table: the topic that it follows, name and time of creation. Tokens of another topic
compare with nothing."""

EMPTIED_PROPERTY = "convoymq.emptied"
"""Of the Delta table: the last event that emptied it."""
POSITION_PROPERTY = "convoymq.position"
"""Of the Delta table: the parts of its positions."""

_FILE_POSITION = "source.pos"
"""Field of Debezium's connectors of MySQL and MariaDB."""

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
    _check(targets, rules)
    # A position of the source orders the events of all keys, wherever they are published.
    followed = _followed(source) if topic and not rules.positions else None
    for target in targets:
        _fit_table(target, followed, rules)
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
        of_topic=bool(topic),
    )
    started = time.monotonic()
    rows_read = spark.readStream.format("convoymq").options(**source).load()
    query = rows_read.writeStream.queryName(f"apply {stream or topic}").foreachBatch(writer)
    query = query.option("checkpointLocation", str(place))
    run_queries([triggered(query, every)])
    report.seconds = time.monotonic() - started
    return report


def _source(servers: str, stream: str, topic: str, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of the source."""
    source = {"servers": servers, "startingOffsets": "earliest"}
    if topic:
        # The latest event of a key is chosen by its token, in whichever task and order it comes.
        return {**source, "afterClose": "same-batch", **more, "topic": topic}
    return {**source, **more, "subscribe": stream}


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
            if (wrong := unserved(each.dataType)) is not None:
                raise OptionError(f"table {self.label}: column {each.name}: {wrong}")
            declared_type(each)
        taken = [name for name in names if name in (*META, CORRUPT)]
        if taken:
            raise OptionError(f"table {self.label}: columns {taken} are the pipeline's own")
        self.as_number = False
        """The table has numbers for positions, as release 0.3 made it."""


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


def _check(targets: Sequence[_Target], rules: Events) -> None:
    if not targets:
        raise OptionError("nothing to apply to: name tables")
    names = [target.spec.name for target in targets]
    if len(targets) > 1 and (not all(names) or len(set(names)) != len(names)):
        raise OptionError("several tables: each needs a name of its own, as the events have it")
    if rules.envelope not in ENVELOPES:
        raise OptionError(f"envelope {rules.envelope}: there are {', '.join(ENVELOPES)}")
    if rules.envelope == "upsert" and (names[0] or rules.positions):
        raise OptionError(
            "envelope upsert: a tombstone names neither its table nor its position, so there is "
            "one table without a name, and no position"
        )
    if rules.connect_schemas and not all(has_payload(rules, each.row) for each in targets):
        raise OptionError(
            "schemas of Connect stand beside the payload of envelopes debezium and upsert: an "
            f"event of envelope {rules.envelope} with such columns has none"
        )
    for path in rules.positions:
        if not re.fullmatch(r"\w+(\.\w+)*", path):
            raise OptionError(f"position field {path!r}: a path such as source.lsn")
    if rules.positions[:1] == (_FILE_POSITION,):
        raise OptionError(
            f"position field {_FILE_POSITION}: it begins anew in every file of the log, so older "
            f"events would pass for later ones; take source.file,{_FILE_POSITION}"
        )


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


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The latest rows of a table in a batch."""

    rows: DataFrame
    judged: DataFrame
    """All events, with what is wrong with them."""
    own: Observation
    """Counts of the table's events, filled by the first job that makes the rows."""
    whole: Observation | None
    """Counts of the whole batch; None where they are known."""


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
        of_topic: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._followed = followed
        self._targets = targets
        self._columns = {
            target.label: EventColumns(
                target.row,
                target.spec.keys,
                rules,
                Order(
                    fields=rules.positions,
                    of_topic=of_topic or followed is not None,
                    as_number=target.as_number,
                ),
            )
            for target in targets
        }
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
        if self._rules.envelope != "upsert":
            # A tombstone says nothing that the delete before it has not said.
            batch = batch.where(f.length("value") > 0)
        if self._named:
            batch = batch.withColumn("_table", table_name(self._rules))
        if len(self._targets) > 1:
            # Without this every table would read the source again.
            batch = batch.persist()
        try:
            if len(self._targets) > 1:
                found = batch.agg(*self._counts()).first()
                assert found is not None
                self._note_batch(found.asDict(), batch, batch_id)
            works = [
                partial(self._apply, target, merger, batch, batch_id)
                for target, merger in zip(self._targets, self._mergers, strict=True)
            ]
            self._report.diverted += sum(run_together(batch.sparkSession, works, self._parallel))
        finally:
            if len(self._targets) > 1:
                batch.unpersist()

    def _counts(self) -> list[Column]:
        """Returns what is counted of a whole batch."""
        from pyspark.sql import functions as f

        unknown = f.count_if(self._is_unknown()) if self._named else f.lit(0)
        return [f.count("*").alias("events"), unknown.alias("unknown")]

    def _is_unknown(self) -> Column:
        from pyspark.sql import functions as f

        table = f.col("_table")
        names = [each.spec.name for each in self._targets]
        return ~f.coalesce(table.isin(names), f.lit(False)) & ~is_note(self._rules)

    def _note_batch(self, found: Mapping[str, int], batch: DataFrame, batch_id: int) -> None:
        """Counts a batch, and diverts its events of tables that nobody follows."""
        from pyspark.sql import functions as f

        self._report.events += found["events"]
        self._report.diverted += found["unknown"]
        if found["unknown"]:
            table = f.coalesce(f.col("_table"), f.lit("none named"))
            reason = f.concat(f.lit("no such table: "), table)
            lost = batch.where(self._is_unknown()).withColumn("reason", reason)
            self._divert(lost, "unknown", batch_id)

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
        import pyarrow as pa
        from deltalake import DeltaTable

        chosen = self._chosen(target, batch)
        rows: DataFrame | pa.Table | None = merger.collected(chosen.rows)
        kept: DataFrame | None = None
        try:
            if rows is None:
                # The counts of a job that was cut off are not those of the batch.
                chosen = self._chosen(target, batch)
                rows = kept = chosen.rows.persist()
            keys = rows.num_rows if isinstance(rows, pa.Table) else rows.count()
            if chosen.whole is not None:
                self._note_batch(chosen.whole.get, batch, batch_id)
            found = chosen.own.get
            bad = int(found["bad"])
            if bad:
                self._divert(chosen.judged.where("reason IS NOT NULL"), target.label, batch_id)
            emptied = _emptied_by(found["emptied"])
            if not keys and emptied is None:
                return bad
            if not DeltaTable.is_deltatable(target.spec.path):
                _create(target, rows, self._followed, self._rules)
            emptied = _noted(target, emptied)
            place = self._checkpoint
            plan = "" if place is None else plan_id(offsets_of(place, batch_id))

            def probe(point: str) -> None:
                self._probe(point, target.label, batch_id)

            merged = merger.merge(rows, keys, Batch(number=batch_id, plan=plan), probe, emptied)
        finally:
            if kept is not None:
                kept.unpersist()
        counts = self._report.tables[target.label]
        counts.batches += 1
        counts.skipped += not merged
        counts.events += int(found["events"]) - bad
        counts.keys += keys
        return bad

    def _chosen(self, target: _Target, batch: DataFrame) -> _Chosen:
        """Returns the latest rows of a table, and what is counted while they are made."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        whole = None
        if len(self._targets) == 1:
            whole = Observation()
            batch = batch.observe(whole, *self._counts())
        if target.spec.name:
            batch = batch.where(f.col("_table") == target.spec.name)
        columns = self._columns[target.label]
        judged = columns.judged(batch)
        own = Observation()
        emptied = f.when(
            f.col("_truncates") & f.col("reason").isNull(),
            f.struct(POSITION, "offset", f.unix_micros("timestamp").alias("at_us")),
        )
        # Spark pushes no filter below this: merged into one with the reason it would lose
        # `_misread` of an event (4.2), which would be bad and applied.
        observed = judged.observe(
            own,
            f.count("*").alias("events"),
            f.count("reason").alias("bad"),
            f.max(emptied).alias("emptied"),
        )
        return _Chosen(columns.latest(observed), observed, own, whole)

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


def _emptied_by(found: Any) -> Emptied | None:
    """Returns the last event of a batch that empties the table."""
    if found is None:
        return None
    position, offset, at_us = tuple(found)
    return Emptied(position=position, offset=offset, at_us=at_us)


def _noted(target: _Target, emptied: Emptied | None) -> Emptied | None:
    """Returns the last event that emptied the table, in this batch or before. The table keeps it
    before its rows are removed: a repeat finds both, or removes them again."""
    from deltalake import DeltaTable

    table = DeltaTable(target.spec.path)
    noted = table.metadata().configuration.get(EMPTIED_PROPERTY)
    known = None if noted is None else Emptied.parse(noted)
    if emptied is None or not emptied.is_after(known):
        return known
    table.alter.set_table_properties({EMPTIED_PROPERTY: str(emptied)}, raise_if_not_exists=False)
    return emptied


def _create(
    target: _Target,
    rows: DataFrame | pa.Table,
    followed: FollowedTopic | None,
    rules: Events,
) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable, Schema

    path = target.spec.path
    if "://" not in path:
        Path(path).mkdir(parents=True, exist_ok=True)
    columns = (rows if isinstance(rows, pa.Table) else rows.limit(0).toArrow()).schema
    # A column that is NOT NULL is a feature that deltalake does not list beside those of types, and
    # Delta Lake's extension refuses such a table.
    columns = pa.schema([each.with_nullable(True) for each in columns])
    properties: dict[str, str | None] = {KEYS_PROPERTY: ",".join(target.spec.keys)}
    if followed is not None:
        properties[TOPIC_PROPERTY] = str(followed)
    if rules.positions:
        properties[POSITION_PROPERTY] = ",".join(rules.positions)
    DeltaTable.create(
        path,
        Schema.from_arrow(columns),
        mode="ignore",
        configuration=properties,
        raise_if_key_not_exists=False,
    )


def _schema_of(table: DeltaTable) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(table.schema().to_json()))


def _fit_table(
    target: _Target, followed: FollowedTopic | None = None, rules: Events | None = None
) -> None:
    """Adds columns of the schema that an existing table lacks: NULL until the next event of a row.
    Notes which positions it has.

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
    _check_positions(target, Events() if rules is None else rules, held, properties)
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


def _check_positions(
    target: _Target,
    rules: Events,
    held: Mapping[str, DataType],
    properties: Mapping[str, str],
) -> None:
    """Raises OptionError: the table's rows have positions of another kind."""
    numbers = held[POSITION].simpleString() == "bigint"
    wanted = ",".join(rules.positions)
    # Release 0.3 did not note the one field that it took, and kept numbers.
    old = numbers and len(rules.positions) == 1
    known = properties.get(POSITION_PROPERTY, wanted if numbers or old else "")
    if known != wanted or (len(rules.positions) > 1 and numbers):
        raise OptionError(
            f"table {target.label}: its rows are ordered by {known or 'offsets'}, which do not "
            f"compare with {wanted or 'offsets'}: it needs a table and a checkpoint of its own"
        )
    target.as_number = old


__all__ = [
    "ApplyReport",
    "BadEvent",
    "Events",
    "FollowedTopic",
    "TableReport",
    "TableSpec",
    "apply",
    "purge",
    "rows",
]
