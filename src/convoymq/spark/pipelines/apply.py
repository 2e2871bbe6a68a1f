"""`apply`: ordered change events to Delta tables that equal their source.

Per micro-batch and table: the latest event of each key (by position), one MERGE into the table, and
in the same commit an app transaction with the batch's id, so that a batch that is repeated after a
crash between MERGE and checkpoint changes nothing. Two columns make the MERGE safe against events
that come late: `_position` (a row is only replaced by a younger event) and `_deleted` (a tombstone
stays, or an older insert would bring the row back). `purge` removes tombstones by age, `rows` reads
a table without them.

Each table has its own transactions: replays are safe, several tables are not one atomic step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines.archive import app_id

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

MERGE_ROWS_MAX = 1_000_000
"""Rows of one MERGE: they pass through the driver. More are merged in slices by key."""
POSITION = "_position"
DELETED = "_deleted"
CHANGED_AT = "_changed_at"
META = (POSITION, DELETED, CHANGED_AT)

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
    """What the events call it; "" = every event is for this table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """How events are written: JSON, and where in it to find what.

    `debezium`: {"op": "c" | "r" | "u" | "d", "before": row, "after": row, "source": {"table": …}},
    also inside {"payload": …}. `flat`: the row itself with a field (default `op`) that says insert,
    update or delete (their first letters do), and a field (default `table`) that names the table.
    In both an empty message is a tombstone of a log and says nothing new.
    """

    envelope: str = "debezium"
    op_field: str = "op"
    table_field: str = "table"
    position_field: str = ""
    """A number that orders events (a log position), by its path in the JSON: `source.pos`. Empty:
    the message's offset. Use it where a snapshot and the log are interleaved."""


@dataclass(slots=True, kw_only=True)
class TableReport:
    """What happened to one table."""

    events: int = 0
    keys: int = 0
    """Rows that were merged: the latest event of each key."""
    batches: int = 0
    skipped: int = 0
    """Batches that the table had already."""


@dataclass(slots=True, kw_only=True)
class ApplyReport:
    """What one call of `apply` did."""

    tables: dict[str, TableReport] = field(default_factory=dict)
    events: int = 0
    diverted: int = 0
    """Events that went to `bad_path`."""
    seconds: float = 0.0


def apply(
    spark: SparkSession,
    *,
    servers: str,
    stream: str,
    tables: Sequence[TableSpec],
    checkpoint: str | os.PathLike[str],
    events: Events | None = None,
    bad_path: str | None = None,
    options: Mapping[str, str] | None = None,
    every: str | None = None,
    probe: Probe | None = None,
) -> ApplyReport:
    """Applies everything that is there (or goes on for ever).

    Args:
        servers: `host:port` of nodes, comma between.
        stream: the stream of change events.
        tables: the tables; with more than one, each has a name.
        checkpoint: a directory: Spark's checkpoint and the pipeline's id. Tables remember batches
            by that id.
        bad_path: where events go that can't be applied (Parquet, with the reason); None: they end
            the pipeline with `BadEvent`.
        options: more options of the source.
        every: trigger interval such as "5 seconds": never returns. None: until the present end.

    Raises:
        OptionError: specs that don't fit.
        StreamingQueryException: an event is bad, or a source or table failed; call again to go on.
    """
    rules = events or Events()
    targets = [_Target(spark, spec) for spec in tables]
    _check(targets, rules)
    place = Path(checkpoint)
    report = ApplyReport(tables={target.label: TableReport() for target in targets})
    writer = _BatchApplier(targets, rules, app_id(place), report, bad_path, probe)
    started = time.monotonic()
    reader = spark.readStream.format("convoymq").option("servers", servers)
    reader = reader.option("subscribe", stream).option("startingOffsets", "earliest")
    query = (
        reader.options(**dict(options or {}))
        .load()
        .writeStream.queryName(f"apply {stream}")
        .foreachBatch(writer)
        .option("checkpointLocation", str(place))
    )
    trigger = query.trigger(processingTime=every) if every else query.trigger(availableNow=True)
    running = trigger.start()
    try:
        running.awaitTermination()
    finally:
        running.stop()
    report.seconds = time.monotonic() - started
    return report


def rows(spark: SparkSession, path: str) -> DataFrame:
    """The table as its source has it: no tombstones, no columns of ours."""
    from deltalake import DeltaTable
    from pyspark.sql import functions as f

    uris = DeltaTable(path).file_uris()
    if not uris:
        raise SourceError(f"{path}: the table has no rows yet")
    return spark.read.parquet(*uris).where(~f.col(DELETED)).drop(*META)


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
        taken = [name for name in names if name in META]
        if taken:
            raise OptionError(f"table {self.label}: columns {taken} are the pipeline's own")


def _check(targets: Sequence[_Target], rules: Events) -> None:
    if not targets:
        raise OptionError("nothing to apply to: name tables")
    names = [target.spec.name for target in targets]
    if len(targets) > 1 and (not all(names) or len(set(names)) != len(names)):
        raise OptionError("several tables: each needs a name of its own, as the events have it")
    if rules.envelope not in ("debezium", "flat"):
        raise OptionError(f"envelope {rules.envelope}: there are debezium and flat")
    if rules.position_field and not re.fullmatch(r"\w+(\.\w+)*", rules.position_field):
        raise OptionError(f"position field {rules.position_field!r}: a path such as source.pos")


class _BatchApplier:
    """What `foreachBatch` calls."""

    def __init__(
        self,
        targets: Sequence[_Target],
        rules: Events,
        app: str,
        report: ApplyReport,
        bad_path: str | None,
        probe: Probe | None,
    ) -> None:
        self._targets = targets
        self._rules = rules
        self._app = app
        self._report = report
        self._bad_path = bad_path
        self._probe = probe or (lambda point, table, batch: None)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        from pyspark.sql import functions as f

        # Without this every action below would read the source again.
        batch = batch.where(f.length("value") > 0).persist()
        try:
            self._report.events += batch.count()
            for target in self._targets:
                self._apply(target, batch, batch_id)
            self._check_names(batch, batch_id)
        finally:
            batch.unpersist()

    def _apply(self, target: _Target, batch: DataFrame, batch_id: int) -> None:
        from deltalake import DeltaTable
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        counts = self._report.tables[target.label]
        parsed = _parsed(batch, self._rules, target.row)
        if target.spec.name:
            parsed = parsed.where(f.col("_table") == target.spec.name)
        bad = parsed.where(_reason(target).isNotNull())
        self._divert(bad.withColumn("reason", _reason(target)), target.label, batch_id)
        good = parsed.where(_reason(target).isNull())
        latest = Window.partitionBy(*[f.col(f"_row.{key}") for key in target.spec.keys]).orderBy(
            f.col(POSITION).desc(), f.col("offset").desc()
        )
        chosen = (
            good.withColumn("_rank", f.row_number().over(latest))
            .where("_rank = 1")
            .select("_row.*", POSITION, DELETED, f.col("timestamp").alias(CHANGED_AT))
            .persist()
        )
        try:
            keys = chosen.count()
            if not keys:
                return
            path = target.spec.path
            if not DeltaTable.is_deltatable(path):
                _create(path, chosen)
            slices = -(-keys // MERGE_ROWS_MAX)
            done = 0
            for number in range(slices):
                # The same rows give the same slices, so a repeat finds its own transactions.
                app = self._app if slices == 1 else f"{self._app}/{number}/{slices}"
                table = DeltaTable(path)
                last = table.transaction_version(app)
                if last is not None and last >= batch_id:
                    done += 1
                    continue
                part = chosen
                if slices > 1:
                    keyed = f.xxhash64(*target.spec.keys)
                    part = chosen.where(f.pmod(keyed, f.lit(slices)) == number)
                self._probe("merging", target.label, batch_id)
                _merge(table, part, target, app, batch_id)
                self._probe("merged", target.label, batch_id)
            counts.batches += 1
            counts.skipped += done == slices
            counts.events += good.count()
            counts.keys += keys
        finally:
            chosen.unpersist()

    def _check_names(self, batch: DataFrame, batch_id: int) -> None:
        """Events of a table that nobody follows are bad, too."""
        from pyspark.sql import functions as f

        names = [target.spec.name for target in self._targets]
        if not all(names):
            return
        table = _table_name(self._rules)
        lost = batch.where(table.isNull() | ~table.isin(names))
        reason = f.concat(f.lit("no such table: "), f.coalesce(table, f.lit("none named")))
        self._divert(lost.withColumn("reason", reason), "unknown", batch_id)

    def _divert(self, bad: DataFrame, label: str, batch_id: int) -> None:
        first = bad.select("topic", "partition", "offset", "reason").orderBy("offset").limit(3)
        found = first.collect()
        if not found:
            return
        if self._bad_path is None:
            where = "; ".join(f"{r.topic}/{r.partition}@{r.offset}: {r.reason}" for r in found)
            raise BadEvent(f"events that can't be applied to {label}: {where}")
        kept = bad.select("topic", "partition", "offset", "timestamp", "key", "value", "reason")
        place = f"{self._bad_path}/table={label}/batch={batch_id:010d}"
        # By batch: a repeat writes over what it wrote.
        kept.write.mode("overwrite").parquet(place)
        self._report.diverted += kept.count()


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


def _parsed(batch: DataFrame, rules: Events, row: StructType) -> DataFrame:
    """Adds `_table`, `_op`, `_row` (the row, or what named it before it was deleted), `_deleted`
    and `_position`."""
    from pyspark.sql import functions as f

    op = f.lower(f.substring(_json_path(rules, _op_path(rules)), 1, 1))
    deleted = op == "d"
    if rules.envelope == "flat":
        found = f.from_json(_text(), row)
    else:
        before, after = _json_path(rules, "before"), _json_path(rules, "after")
        found = f.from_json(f.when(deleted, before).otherwise(after), row)
    position = (
        _json_path(rules, rules.position_field).cast("long")
        if rules.position_field
        else f.col("offset")
    )
    return (
        batch.withColumn("_table", _table_name(rules))
        .withColumn("_op", op)
        .withColumn("_row", found)
        .withColumn(DELETED, deleted)
        .withColumn(POSITION, position)
    )


def _op_path(rules: Events) -> str:
    return "op" if rules.envelope == "debezium" else rules.op_field


def _reason(target: _Target) -> Column:
    """Why an event can't be applied; null = it can."""
    from pyspark.sql import functions as f

    missing = f.lit(False)
    for key in target.spec.keys:
        missing = missing | f.col(f"_row.{key}").isNull()
    return (
        f.when(f.col("_op").isNull(), f.lit("not JSON, or without an operation"))
        .when(~f.col("_op").isin("c", "r", "i", "u", "d"), f.lit("unknown operation"))
        .when(f.col("_row").isNull() | missing, f.lit("without its key"))
        .when(f.col(POSITION).isNull(), f.lit("without its position"))
    )


def _create(path: str, chosen: DataFrame) -> None:
    from deltalake import DeltaTable, Schema

    if "://" not in path:
        Path(path).mkdir(parents=True, exist_ok=True)
    empty = chosen.limit(0).toArrow()
    DeltaTable.create(path, Schema.from_arrow(empty.schema), mode="ignore")


def _merge(table: Any, part: DataFrame, target: _Target, app: str, batch_id: int) -> None:
    from deltalake import CommitProperties, Transaction

    matched = " AND ".join(f"t.`{key}` = s.`{key}`" for key in target.spec.keys)
    (
        table.merge(
            part.toArrow(),
            matched,
            source_alias="s",
            target_alias="t",
            commit_properties=CommitProperties(app_transactions=[Transaction(app, batch_id)]),
        )
        .when_matched_update_all(f"s.{POSITION} > t.{POSITION}")
        .when_not_matched_insert_all()
        .execute()
    )
