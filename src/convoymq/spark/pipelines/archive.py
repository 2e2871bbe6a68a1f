"""`archive`: streams and queues to partitioned Parquet or Delta, exactly once.

Each source is a streaming query; a micro-batch is written by Spark to a staging directory, moved to
its place and then made to count in one atomic step: the next version of the manifest
(`manifest.py`) or a Delta commit with an app transaction. Spark gives a repeated batch the same
rows, so a batch id that counts already is skipped, provided that the checkpoint has the same
offsets for it: after an older checkpoint was put back, old numbers stand for other messages.

Two drivers may hold one checkpoint: an older one that was only stopped, and its replacement. Every
attempt at a batch writes files with names of its own, and who begins takes the pipeline over in the
manifest: from then on an older run can't commit, and what it left can be removed (ADR 0030).

A second guard does not depend on the checkpoint: offsets of a stream are absolute, so a batch that
overlaps what the archive has of a stream is refused (somebody has deleted the checkpoint). A stream
that was deleted and declared again is another stream: ranges carry its group.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import quote, unquote

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines.archive_sink import (
    Ranges,
    Sink,
    StagedFile,
    merge_ranges,
    staged_files,
)
from convoymq.spark.pipelines.checkpoint import CheckpointError, app_id, offsets_of, plan_id
from convoymq.spark.pipelines.manifest import Archive
from convoymq.spark.query_runs import run_queries, triggered

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Probe = Callable[[str, int], None]
"""Called with (point, batch id) at `staged`, `moved` and `committed`: tests stop a batch there."""


@dataclass(slots=True, kw_only=True)
class ArchiveReport:
    """Result of one call of `archive`."""

    target: str
    format: str
    rows: int = 0
    """Messages archived by this call."""
    batches: int = 0
    skipped: int = 0
    """Batches that counted already: repeats after a crash."""
    files: int = 0
    rows_total: int = 0
    """Messages in the archive, from all calls."""
    files_total: int = 0
    compacted: int = 0
    """Files that a compaction has replaced."""
    seconds: float = 0.0
    ranges: Ranges = field(default_factory=dict)


def archive(
    spark: SparkSession,
    *,
    servers: str,
    target: str | os.PathLike[str],
    streams: Sequence[str] = (),
    queues: Sequence[str] = (),
    format: str = "parquet",
    checkpoint: str | os.PathLike[str] | None = None,
    partition_by: Sequence[str] = ("date",),
    options: Mapping[str, str] | None = None,
    every: str | None = None,
    compact_files: int = 64,
    keep_replaced_s: float = 3600.0,
    probe: Probe | None = None,
) -> ArchiveReport:
    """Archives everything that is there (or goes on for ever).

    Args:
        servers: `host:port` of nodes, comma between.
        target: directory on a POSIX file system; a Delta table with format "delta".
        streams: stream queues; one query reads them all.
        queues: other queues; one query each, in mode `reservation`. Their messages leave the queue
            when they are archived.
        format: "parquet" or "delta".
        checkpoint: Spark's checkpoint; default `<target>/_checkpoint`. Whoever deletes it while the
            target stays is refused.
        partition_by: columns below the source's name (`topic` or `queue`, always the first);
            `date` and `hour` are made from the timestamp (UTC).
        options: more options of the formats: user, password, vhost, maxOffsetsPerTrigger, …
        every: a trigger interval such as "10 seconds": never returns. None: until the end as it is
            now.
        compact_files: join the files of a directory when there are so many of less than 128 MiB; 0
            = never.
        keep_replaced_s: how long files that a compaction replaced stay for readers that have begun
            (of a Delta table, all files that are out of date; in whole hours, rounded up).

    Raises:
        OptionError: nothing to archive, or an unknown format.
        OverlapError, CheckpointError: see the module's docstring.
        StreamingQueryException: a source or a sink failed; call again to go on.
    """
    if not streams and not queues:
        raise OptionError("nothing to archive: name streams or queues")
    root = _root(target)
    base = Path(checkpoint) if checkpoint is not None else root / "_checkpoint"
    root.mkdir(parents=True, exist_ok=True)
    report = ArchiveReport(target=str(root), format=format)
    started = time.monotonic()
    queries: list[DataStreamWriter] = []
    sinks: list[Sink] = []
    for name, column, frame in _sources(spark, servers, streams, queues, dict(options or {})):
        place = base / name
        sink = _sink(format, root, app_id(place))
        columns = tuple(dict.fromkeys((column, *partition_by)))
        writer = _BatchWriter(
            sink, columns, report, compact_files, keep_replaced_s, probe, checkpoint=place
        )
        queries.append(_query(f"archive {name}", frame, writer, place, every))
        sinks.append(sink)
    run_queries(queries)
    for sink in sinks:
        if compact_files:
            report.compacted += sink.compact(compact_files, keep_replaced_s)
        report.rows_total, report.files_total = sink.totals()
    report.seconds = time.monotonic() - started
    return report


def _root(target: str | os.PathLike[str]) -> Path:
    if "://" in str(target):
        raise OptionError(
            f"target {target}: an archive needs a mounted POSIX file system, whose renames and "
            "links are atomic"
        )
    return Path(target)


def _query(
    name: str, frame: DataFrame, writer: _BatchWriter, checkpoint: Path, every: str | None
) -> DataStreamWriter:
    stream = frame.writeStream.queryName(name).foreachBatch(writer)
    return triggered(stream.option("checkpointLocation", str(checkpoint)), every)


def archived(spark: SparkSession, target: str | os.PathLike[str]) -> DataFrame:
    """Returns what an archive holds, read natively by Spark: only files that count.

    Raises:
        SourceError: there is nothing yet.
    """
    root = Path(target)
    if (root / "_delta_log").is_dir():
        from deltalake import DeltaTable

        return _delta_rows(spark, DeltaTable(str(root)), root)
    archive = Archive(root)
    held = archive.current()
    if not held.files:
        raise SourceError(f"{root}: nothing is archived there")
    reader = spark.read.option("basePath", str(archive.data))
    if len({file.schema for file in held.files}) > 1:
        # Else Spark would take the columns of one file for those of all.
        reader = reader.option("mergeSchema", "true")
    return reader.parquet(*archive.paths(held))


def _delta_rows(spark: SparkSession, table: DeltaTable, root: Path) -> DataFrame:
    import functools

    import pyarrow as pa
    from pyspark.sql import functions as f

    names = table.metadata().partition_columns
    kinds = {field.name: field.type.type for field in table.schema().fields}
    groups: dict[tuple[object, ...], list[str]] = {}
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        values = tuple(action[f"partition.{name}"] for name in names)
        groups.setdefault(values, []).append(str(root / unquote(action["path"])))
    if not groups:
        raise SourceError(f"{root}: nothing is archived there")
    parts = []
    for values, paths in groups.items():
        part = spark.read.option("mergeSchema", "true").parquet(*paths)
        for name, value in zip(names, values, strict=True):
            kind = {"integer": "int"}.get(kinds[name], kinds[name])
            part = part.withColumn(name, f.lit(value).cast(kind))
        parts.append(part)
    return functools.reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), parts)


def _sources(
    spark: SparkSession,
    servers: str,
    streams: Sequence[str],
    queues: Sequence[str],
    options: dict[str, str],
) -> list[tuple[str, str, DataFrame]]:
    """Returns (name, the column that names the source, messages) of each query."""
    found: list[tuple[str, str, DataFrame]] = []
    if streams:
        reader = spark.readStream.format("convoymq").option("servers", servers)
        reader = reader.option("subscribe", ",".join(streams)).option("startingOffsets", "earliest")
        found.append(("streams", "topic", reader.options(**options).load()))
    for queue in queues:
        reader = spark.readStream.format("convoymq_queue").option("servers", servers)
        reader = reader.option("queue", queue).option("reservation", "archive").options(**options)
        found.append((f"queue-{quote(queue, safe='')}", "queue", reader.load()))
    return found


class _StreamOffset(TypedDict, total=False):
    """Of an offset of streams (`convoymq.spark.offsets`): what is used here."""

    p: dict[str, dict[str, int]]
    """Stream, partition → end."""
    g: dict[str, int]
    """Stream → group."""


class _BatchWriter:
    """Callable for `foreachBatch`."""

    def __init__(
        self,
        sink: Sink,
        columns: tuple[str, ...],
        report: ArchiveReport,
        compact_files: int,
        keep_replaced_s: float,
        probe: Probe | None,
        *,
        checkpoint: Path | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._sink = sink
        self._columns = columns
        self._report = report
        self._compact_files = compact_files
        self._keep_replaced_s = keep_replaced_s
        self._probe = probe or (lambda point, batch: None)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        sink, report = self._sink, self._report
        sink.begin()
        last = sink.applied()
        if last >= batch_id:
            self._check_repeat(batch_id, last)
            report.skipped += 1
            return
        attempt = uuid.uuid4().hex[:8]
        staging = sink.staging / f"{sink.app}-{batch_id:010d}-{attempt}"
        batch.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        rows = _with_time_columns(batch, self._columns)
        rows.write.partitionBy(*self._columns).parquet(str(staging))
        self._probe("staged", batch_id)
        staged = staged_files(staging)
        offsets = "" if self._checkpoint is None else offsets_of(self._checkpoint, batch_id)
        ranges = _ranges(staged, self._incarnations(offsets))
        sink.clean(keep=staging)
        sink.check(ranges)
        moved = sink.move(staged, batch_id, attempt)
        self._probe("moved", batch_id)
        try:
            sink.commit(batch_id, staged, moved, ranges, plan_id(offsets) if offsets else "")
        except SourceError:
            # It is known now that these files will never count.
            sink.undo(sink.plan(batch_id, attempt))
            raise
        self._probe("committed", batch_id)
        shutil.rmtree(staging, ignore_errors=True)
        sink.plan(batch_id, attempt).unlink(missing_ok=True)
        report.batches += 1
        report.files += len(moved)
        report.rows += sum(file.rows for file in moved)
        merge_ranges(report.ranges, {key.rpartition("@")[0] or key: ranges[key] for key in ranges})
        # A query that never ends must not leave more and more small files behind.
        if self._compact_files and (batch_id + 1) % self._compact_files == 0:
            report.compacted += sink.compact(self._compact_files, self._keep_replaced_s)

    def _check_repeat(self, batch_id: int, last: int) -> None:
        """Raises CheckpointError unless all that the checkpoint has for the batch is archived."""
        if self._checkpoint is None:
            return
        offsets = offsets_of(self._checkpoint, batch_id)
        if batch_id == last and self._sink.last_plan() in ("", plan_id(offsets)):
            return
        # Of streams it is known what is archived, whatever the batches were.
        known = self._known(offsets)
        held = self._sink.held()
        groups = known.get("g", {})
        ends = {
            f"{topic}/{partition}" + (f"@{groups[topic]}" if groups.get(topic) else ""): end
            for topic, parts in known.get("p", {}).items()
            for partition, end in parts.items()
        }
        if not ends or any(end > held.get(key, (0, 0))[1] for key, end in ends.items()):
            raise CheckpointError(
                f"{self._sink.root}: batch {batch_id} was archived with other messages than the "
                f"checkpoint {self._checkpoint} has for it. Was an older one put back? Go on with "
                "the checkpoint that belongs to this archive, or archive to another target"
            )

    def _incarnations(self, offsets: str) -> dict[str, int]:
        """Returns the group of each stream, as the checkpoint has it for the batch."""
        groups = self._known(offsets).get("g", {}) if offsets else {}
        return {str(name): int(group) for name, group in groups.items()}

    def _known(self, offsets: str) -> _StreamOffset:
        try:
            known: _StreamOffset = json.loads(offsets)
        except ValueError as error:
            raise SourceError(f"{self._checkpoint}: damaged offsets: {error!r}") from error
        return known


def _with_time_columns(batch: DataFrame, columns: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as f

    # Not the session's zone: the directory of a message must not depend on who archives it.
    time_utc = f.to_utc_timestamp("timestamp", f.current_timezone())
    if "date" in columns and "date" not in batch.columns:
        batch = batch.withColumn("date", f.to_date(time_utc))
    if "hour" in columns and "hour" not in batch.columns:
        batch = batch.withColumn("hour", f.hour(time_utc))
    return batch


def _ranges(staged: Sequence[StagedFile], incarnations: Mapping[str, int]) -> Ranges:
    """First and next offset of each stream and partition; nothing for queues, whose offsets are
    those of a reservation."""
    import pyarrow.parquet as pq

    ranges: Ranges = {}
    for file in staged:
        column, _, value = file.folder.split("/")[0].partition("=")
        if column != "topic":
            continue
        table = pq.ParquetFile(file.path).read(columns=["partition", "offset"])
        groups = table.group_by("partition").aggregate([("offset", "min"), ("offset", "max")])
        for row in groups.to_pylist():
            group = incarnations.get(topic := unquote(value), 0)
            key = f"{topic}/{row['partition']}" + (f"@{group}" if group else "")
            merge_ranges(ranges, {key: [row["offset_min"], row["offset_max"] + 1]})
    return ranges


def _sink(format: str, root: Path, app: str) -> Sink:
    if format == "parquet":
        from convoymq.spark.pipelines.parquet_sink import ParquetSink

        return ParquetSink(root, app)
    if format == "delta":
        from convoymq.spark.pipelines.delta_sink import DeltaSink

        return DeltaSink(root, app)
    raise OptionError(f"format {format}: there are parquet and delta")
