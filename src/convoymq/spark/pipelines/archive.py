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

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from convoymq.spark.errors import OptionError, SourceError
from convoymq.spark.pipelines.manifest import (
    ATTEMPTS_MAX,
    Archive,
    ArchivedFile,
    Manifest,
    RemovedFile,
    sync_directory,
    sync_files,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

APP_FILE = "convoymq-app"
COMPACT_BYTES = 128 << 20
"""A compaction joins files to about this size."""
RANGES_ID = "convoymq/ranges"
RANGES_KEY = "convoymq.ranges"
PLANS_KEY = "convoymq.plans"
"""In a Delta table: the transaction that each commit of ours makes, and what it says of ranges and
of the offsets of last batches."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

Ranges = dict[str, list[int]]
"""topic/partition → [first offset, next offset]"""
Probe = Callable[[str, int], None]
"""Called with (point, batch id) at `staged`, `moved` and `committed`: tests stop a batch there."""


@dataclass(slots=True, kw_only=True)
class ArchiveReport:
    """What one call of `archive` did."""

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


class OverlapError(SourceError):
    """A batch holds offsets that the archive already has."""


class CheckpointError(SourceError):
    """The checkpoint has other messages for a batch than those that were archived as that batch."""


class SupersededError(SourceError):
    """Another run of this pipeline has begun since: this one may not commit any more."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """A file that Spark has written for a batch."""

    path: Path
    folder: str
    """`column=value/…` below the data directory."""
    rows: int
    bytes: int
    schema: str
    """A name of its columns and types."""


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
        when
            they are archived.
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
    root = Path(target)
    if "://" in str(target):
        raise OptionError(
            f"target {target}: an archive needs a mounted POSIX file system, whose renames and "
            "links are atomic"
        )
    base = Path(checkpoint) if checkpoint is not None else root / "_checkpoint"
    root.mkdir(parents=True, exist_ok=True)
    report = ArchiveReport(target=str(root), format=format)
    started = time.monotonic()
    queries: list[tuple[Any, _Sink]] = []
    try:
        for name, column, frame in _sources(spark, servers, streams, queues, dict(options or {})):
            place = base / name
            sink = _sink(format, root, app_id(place))
            columns = tuple(dict.fromkeys((column, *partition_by)))
            writer = _BatchWriter(
                sink, columns, report, compact_files, keep_replaced_s, probe, checkpoint=place
            )
            stream = (
                frame.writeStream.queryName(f"archive {name}")
                .foreachBatch(writer)
                .option("checkpointLocation", str(place))
            )
            stream = (
                stream.trigger(processingTime=every) if every else stream.trigger(availableNow=True)
            )
            queries.append((stream.start(), sink))
        for query, _ in queries:
            query.awaitTermination()
    finally:
        for query, _ in queries:
            query.stop()
    for _, sink in queries:
        if compact_files:
            report.compacted += sink.compact(compact_files, keep_replaced_s)
        report.rows_total, report.files_total = sink.totals()
    report.seconds = time.monotonic() - started
    return report


def archived(spark: SparkSession, target: str | os.PathLike[str]) -> DataFrame:
    """What an archive holds, read natively by Spark: only files that count.

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


def _delta_rows(spark: SparkSession, table: Any, root: Path) -> DataFrame:
    import functools

    import pyarrow as pa
    from pyspark.sql import functions as f

    names = table.metadata().partition_columns
    kinds = {field.name: field.type.type for field in table.schema().fields}
    groups: dict[tuple[Any, ...], list[str]] = {}
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
    """(name, the column that names the source, messages) of each query."""
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


def app_id(checkpoint: Path) -> str:
    """The pipeline's id: as old as its checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    path = checkpoint / APP_FILE
    if not path.exists():
        draft = checkpoint / f".{APP_FILE}-{uuid.uuid4().hex}"
        draft.write_text(uuid.uuid4().hex)
        sync_files([draft])
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        sync_directory(checkpoint)
    return path.read_text().strip()


def offsets_of(checkpoint: Path, batch_id: int) -> str:
    """What the checkpoint says of where a batch ends: canonical JSON. Raises SourceError."""
    try:
        return (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[2]
    except (FileNotFoundError, IndexError) as error:
        raise SourceError(
            f"{checkpoint}: the offsets of batch {batch_id} can't be read: {error!r}"
        ) from error


def plan_id(offsets: str) -> str:
    """Names the offsets of a batch."""
    return hashlib.sha256(offsets.encode()).hexdigest()[:16]


class _BatchWriter:
    """What `foreachBatch` calls."""

    def __init__(
        self,
        sink: _Sink,
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
        staged = _staged_files(staging)
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
        """The group of each stream, as the checkpoint has it for the batch."""
        groups = self._known(offsets).get("g", {}) if offsets else {}
        return {str(name): int(group) for name, group in groups.items()}

    def _known(self, offsets: str) -> dict[str, Any]:
        try:
            known: dict[str, Any] = json.loads(offsets)
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


def _staged_files(staging: Path) -> list[_Staged]:
    import pyarrow.parquet as pq

    found = []
    for path in sorted(staging.rglob("*.parquet")):
        place = path.parent.relative_to(staging)
        # `_temporary` holds what tasks have begun and not committed.
        if any(part.startswith(("_", ".")) for part in place.parts):
            continue
        facts = pq.read_metadata(path)
        if facts.num_rows:
            schema = facts.schema.to_arrow_schema().remove_metadata()
            name = hashlib.sha256(schema.serialize()).hexdigest()[:16]
            size = path.stat().st_size
            found.append(_Staged(path, place.as_posix(), facts.num_rows, size, name))
    return found


def _ranges(staged: Sequence[_Staged], incarnations: Mapping[str, int]) -> Ranges:
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


def merge_ranges(into: Ranges, other: Mapping[str, Sequence[int]]) -> None:
    """Widens the ranges of `into` by those of `other`."""
    for key, (first, next_offset) in other.items():
        known = into.get(key)
        into[key] = (
            [first, next_offset]
            if known is None
            else [min(known[0], first), max(known[1], next_offset)]
        )


def check_overlap(known: Mapping[str, Mapping[str, Sequence[int]]], ranges: Ranges) -> None:
    """Raises OverlapError when a range begins before the end of what `known` (by app) holds."""
    for app, held in known.items():
        for key, (first, next_offset) in ranges.items():
            if key in held and first < held[key][1] and next_offset > held[key][0]:
                raise OverlapError(
                    f"{key}: offsets {first} to {next_offset} begin before {held[key][1]}, the end "
                    f"of what pipeline {app} has archived here. Was its checkpoint deleted? "
                    "Bring it back, or archive to another target"
                )


class _Sink:
    """Where a query's batches go: what both formats share."""

    def __init__(self, root: Path, app: str, data: Path) -> None:
        self.root = root
        self.app = app
        self.data = data
        self.staging = root / "_staging"
        self.run = uuid.uuid4().hex
        """This run of the pipeline: the last one that began may commit."""
        self._begun = False

    def begin(self) -> None:
        """Takes the pipeline over from earlier runs, and removes what they left. Once."""
        if not self._begun:
            self.take_over()
            self._begun = True
            self.clean()

    def take_over(self) -> None:
        """Notes this run as the one that may commit."""
        raise NotImplementedError

    def is_fenced(self) -> bool:
        """Whether earlier runs are kept from committing. Raises SupersededError."""
        return True

    def counted(self) -> set[str]:
        """Paths of the files that count or did. Raises SupersededError when this run may not
        commit any more, as of the same version."""
        raise NotImplementedError

    def _superseded(self) -> SupersededError:
        return SupersededError(
            f"{self.root}: another run of pipeline {self.app} has begun: this one is out of date"
        )

    def applied(self) -> int:
        """The last batch that counts; -1 = none."""
        raise NotImplementedError

    def last_plan(self) -> str:
        """Names the offsets of the last batch that counts; "" = not known."""
        raise NotImplementedError

    def held(self) -> Ranges:
        """What this pipeline has archived."""
        raise NotImplementedError

    def commit(
        self,
        batch_id: int,
        staged: Sequence[_Staged],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        """Makes the files count, in one step. `plan` names the offsets of the batch."""
        raise NotImplementedError

    def compact(self, files_min: int, keep_s: float) -> int:
        """Joins small files. Returns how many were replaced."""
        raise NotImplementedError

    def totals(self) -> tuple[int, int]:
        """(messages, files) that count."""
        raise NotImplementedError

    def check(self, ranges: Ranges) -> None:
        """Raises OverlapError when the archive has some of these offsets."""
        raise NotImplementedError

    def place(self, file: _Staged) -> Path:
        """The directory where a file belongs."""
        return self.data / file.folder

    def plan(self, batch_id: int, attempt: str) -> Path:
        """The file that names what an attempt moves: on disk before it moves anything."""
        return self.staging / f"{self.app}-{batch_id:010d}-{attempt}.plan"

    def clean(self, keep: Path | None = None) -> None:
        """Removes what other attempts of this pipeline left. None of them can commit any more:
        they belong to runs that were taken over from, or this run has given them up.

        Raises:
            SupersededError: this run has been taken over from.
        """
        if not self.is_fenced():
            return
        self.counted()
        # First what is staged: an older run that still works can't move anything afterwards.
        for place in self.staging.glob(f"{self.app}-*"):
            if place.is_dir() and place != keep:
                shutil.rmtree(place, ignore_errors=True)
            elif place.suffix in (".parquet", ".draft"):
                place.unlink(missing_ok=True)
        for plan in self.staging.glob(f"{self.app}-*.plan"):
            self.undo(plan, self.counted())

    def undo(self, plan: Path, counted: set[str] | None = None) -> None:
        """Removes the files that a plan names and that do not count; then the plan."""
        known = self.names() if counted is None else counted
        # Another run may have done it already.
        with contextlib.suppress(FileNotFoundError):
            for name in json.loads(plan.read_text()):
                if name not in known:
                    (self.root / name).unlink(missing_ok=True)
            plan.unlink()

    def names(self) -> set[str]:
        """Paths of the files that count or did, whichever run may commit."""
        raise NotImplementedError

    def write_plan(self, plan: Path, names: Sequence[str]) -> None:
        """Puts a plan on disk."""
        self.staging.mkdir(parents=True, exist_ok=True)
        draft = plan.with_suffix(".draft")
        draft.write_text(json.dumps(names))
        sync_files([draft])
        os.replace(draft, plan)
        sync_directory(self.staging)

    def move(self, staged: Sequence[_Staged], batch_id: int, attempt: str) -> list[ArchivedFile]:
        """Moves a batch's files to their places; a plan that is on disk first tells which."""
        files = []
        moves = []
        for number, file in enumerate(staged):
            name = f"{self.app[:12]}-{batch_id:010d}-{attempt}-{number:05d}.parquet"
            place = self.place(file) / name
            moves.append((file.path, place))
            files.append(
                ArchivedFile(
                    path=place.relative_to(self.root).as_posix(),
                    rows=file.rows,
                    bytes=file.bytes,
                    app=self.app,
                    first_batch=batch_id,
                    last_batch=batch_id,
                    schema=file.schema,
                )
            )
        self.write_plan(self.plan(batch_id, attempt), [file.path for file in files])
        for source, place in moves:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, place)
        sync_files([place for _, place in moves])
        for folder in {place.parent for _, place in moves}:
            while folder not in (self.root, folder.parent):
                folder = folder.parent
                sync_directory(folder)
        return files


class _ParquetSink(_Sink):
    def __init__(self, root: Path, app: str) -> None:
        self.archive = Archive(root)
        super().__init__(root, app, self.archive.data)

    def take_over(self) -> None:
        self.archive.commit(lambda now: replace(now, runs={**now.runs, self.app: self.run}))

    def counted(self) -> set[str]:
        now = self.archive.current()
        if self._begun and now.runs.get(self.app) != self.run:
            raise self._superseded()
        return self._names(now)

    def names(self) -> set[str]:
        return self._names(self.archive.current())

    def _names(self, now: Manifest) -> set[str]:
        return {file.path for file in now.files} | {file.path for file in now.removed}

    def check(self, ranges: Ranges) -> None:
        check_overlap(self.archive.current().ranges, ranges)

    def applied(self) -> int:
        return self.archive.current().applied.get(self.app, -1)

    def last_plan(self) -> str:
        return self.archive.current().plans.get(self.app, "")

    def held(self) -> Ranges:
        return self.archive.current().ranges.get(self.app, {})

    def commit(
        self,
        batch_id: int,
        staged: Sequence[_Staged],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        def change(now: Manifest) -> Manifest:
            if now.runs.get(self.app) != self.run or now.applied.get(self.app, -1) >= batch_id:
                raise self._superseded()
            check_overlap(now.ranges, ranges)
            held = {key: list(value) for key, value in now.ranges.get(self.app, {}).items()}
            merge_ranges(held, ranges)
            return replace(
                now,
                applied={**now.applied, self.app: batch_id},
                ranges={**now.ranges, self.app: held},
                plans={**now.plans, self.app: plan},
                files=(*now.files, *files),
            )

        self.archive.commit(change)

    def compact(self, files_min: int, keep_s: float) -> int:
        replaced = 0
        now = self.archive.current()
        small = [file for file in now.files if file.bytes < COMPACT_BYTES]
        folders = Counter(os.path.dirname(file.path) for file in small)
        for folder, count in sorted(folders.items()):
            if count >= files_min:
                mine = [file for file in small if os.path.dirname(file.path) == folder]
                for group in _groups(mine):
                    replaced += self._join(folder, group)
        self.archive.remove_replaced(keep_s)
        return replaced

    def _join(self, folder: str, group: Sequence[ArchivedFile]) -> int:
        import pyarrow.parquet as pq

        number = uuid.uuid4().hex
        place = self.root / folder / f"joined-{number}.parquet"
        draft = self.staging / f"{self.app}-joined-{number}.parquet"
        plan = draft.with_suffix(".plan")
        self.write_plan(plan, [place.relative_to(self.root).as_posix()])
        gone = {file.path for file in group}
        rows = 0
        try:
            schema = pq.read_schema(self.root / group[0].path)
            with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
                for file in group:
                    parquet = pq.ParquetFile(self.root / file.path)
                    for part in parquet.iter_batches():
                        writer.write_batch(part)
                        rows += part.num_rows
        except FileNotFoundError:
            draft.unlink(missing_ok=True)
            plan.unlink(missing_ok=True)
            if gone <= {file.path for file in self.archive.current().files}:
                raise
            # Another pipeline has joined them meanwhile, and removed them.
            return 0
        if rows != sum(file.rows for file in group):
            draft.unlink()
            plan.unlink()
            raise SourceError(f"{folder}: files hold {rows} rows, the manifest says otherwise")
        try:
            os.replace(draft, place)
        except FileNotFoundError:
            # A later run of the pipeline has removed what this one left.
            return 0
        sync_files([place])
        joined = ArchivedFile(
            path=place.relative_to(self.root).as_posix(),
            rows=rows,
            bytes=place.stat().st_size,
            app=group[0].app,
            first_batch=min(file.first_batch for file in group),
            last_batch=max(file.last_batch for file in group),
            schema=group[0].schema,
        )
        at = time.time()

        def change(now: Manifest) -> Manifest | None:
            if not gone <= {file.path for file in now.files}:
                return None
            kept = tuple(file for file in now.files if file.path not in gone)
            removed = tuple(RemovedFile(path=path, at=at) for path in sorted(gone))
            return replace(now, files=(*kept, joined), removed=(*now.removed, *removed))

        done = self.archive.commit(change)
        counts = joined in done.files
        if not counts:
            place.unlink(missing_ok=True)
        plan.unlink(missing_ok=True)
        return len(gone) if counts else 0

    def totals(self) -> tuple[int, int]:
        now = self.archive.current()
        return now.rows, len(now.files)


def _groups(files: Sequence[ArchivedFile]) -> list[list[ArchivedFile]]:
    """Files of one directory in groups of at least two that make about one large file: of one
    pipeline, and with the same columns, which options may change from run to run."""
    groups: list[list[ArchivedFile]] = []
    group: list[ArchivedFile] = []
    size = 0
    for file in sorted(files, key=lambda each: (each.app, each.schema, each.first_batch)):
        alike = group and (file.app, file.schema) == (group[0].app, group[0].schema)
        if group and (size + file.bytes > COMPACT_BYTES or not alike):
            groups.append(group)
            group, size = [], 0
        group.append(file)
        size += file.bytes
    groups.append(group)
    return [group for group in groups if len(group) > 1]


@dataclass(frozen=True, slots=True)
class _Commit:
    """What a version adds to a Delta table."""

    actions: Sequence[Any]
    versions: Mapping[str, int]
    ranges: Ranges
    plan: str = ""
    """Of the batch; "" = this is none."""


class _DeltaSink(_Sink):
    """A Delta table: files are moved below it, and one commit with an app transaction adds them.

    The files lie in one directory: the table's log knows their partitions, and the names of streams
    need no encoding."""

    def __init__(self, root: Path, app: str) -> None:
        super().__init__(root, app, root / "data")
        self._run_id = f"{app}/run"
        self._epoch = 0

    def place(self, file: _Staged) -> Path:
        return self.data

    def _table(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(str(self.root)) if DeltaTable.is_deltatable(str(self.root)) else None

    def applied(self) -> int:
        table = self._table()
        version = None if table is None else table.transaction_version(self.app)
        return -1 if version is None else int(version)

    def last_plan(self) -> str:
        table = self._table()
        return "" if table is None else self._noted(table)[1].get(self.app, "")

    def held(self) -> Ranges:
        table = self._table()
        return {} if table is None else self._noted(table)[0].get(self.app, {})

    def take_over(self) -> None:
        # Where there is no table there is nothing to take over yet, and nothing to fence with.
        if self._table() is not None:
            self._transact(self._take)

    def _take(self, table: Any) -> _Commit:
        last = table.transaction_version(self._run_id) or 0
        if self._begun and last:
            # Another run made the table.
            raise self._superseded()
        self._epoch = last + 1
        return _Commit((), {}, {})

    def is_fenced(self) -> bool:
        if not self._epoch and self._table() is not None:
            self._transact(self._take)
        return self._epoch > 0

    def names(self) -> set[str]:
        table = self._table()
        return set() if table is None else self._names(table)

    def _names(self, table: Any) -> set[str]:
        import pyarrow as pa

        return set(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())

    def counted(self) -> set[str]:
        table = self._table()
        if table is None:
            return set()
        self._check_run(table)
        return self._names(table)

    def _check_run(self, table: Any) -> None:
        if self._begun and (table.transaction_version(self._run_id) or 0) != self._epoch:
            raise self._superseded()

    def check(self, ranges: Ranges) -> None:
        table = self._table()
        if table is not None:
            check_overlap(self._noted(table)[0], ranges)

    def commit(
        self,
        batch_id: int,
        staged: Sequence[_Staged],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        from deltalake.transaction import AddAction

        if self._table() is None:
            if not files:
                return
            self._create(staged[0].folder, files[0].path)
        self.is_fenced()
        self._check_run(self._table())
        self._widen(files)
        actions = [
            AddAction(
                path=file.path,
                size=file.bytes,
                partition_values=_partition_values(source.folder),
                modification_time=int(time.time() * 1000),
                data_change=True,
                stats=json.dumps({"numRecords": file.rows}),
            )
            for source, file in zip(staged, files, strict=True)
        ]

        def change(table: Any) -> _Commit:
            self._check_run(table)
            last = table.transaction_version(self.app)
            if last is not None and last >= batch_id:
                raise self._superseded()
            return _Commit(actions, {self.app: batch_id}, ranges, plan)

        self._transact(change)

    def _transact(self, change: Callable[[Any], _Commit]) -> None:
        """Makes the next version. Each names the run and the ranges as transactions, so that Delta
        refuses a version that was made meanwhile by another run, or by another pipeline that could
        overlap; then `change` looks at the table again."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        for _ in range(ATTEMPTS_MAX):
            table = self._table()
            wanted = change(table)
            known, plans = self._noted(table)
            check_overlap(known, wanted.ranges)
            merge_ranges(known.setdefault(self.app, {}), wanted.ranges)
            number = (table.transaction_version(RANGES_ID) or 0) + 1
            versions = {self._run_id: self._epoch, RANGES_ID: number, **wanted.versions}
            if self.app in wanted.versions:
                plans[self.app] = wanted.plan
            try:
                table.create_write_transaction(
                    list(wanted.actions),
                    "append",
                    table.schema(),
                    table.metadata().partition_columns,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(*each) for each in versions.items()],
                        custom_metadata={
                            RANGES_KEY: json.dumps(known),
                            PLANS_KEY: json.dumps(plans),
                        },
                    ),
                )
            except CommitFailedError:
                continue
            return
        raise SourceError(f"{self.root}: too many writers")

    def _create(self, folder: str, path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from deltalake import DeltaTable, Schema

        names = list(_partition_values(folder))
        schema = pq.read_schema(self.root / path).remove_metadata()
        kinds = {"date": pa.date32(), "hour": pa.int32()}
        for name in names:
            schema = schema.append(pa.field(name, kinds.get(name, pa.string())))
        # A later batch may come without a column that this one has.
        schema = pa.schema([field.with_nullable(True) for field in schema])
        DeltaTable.create(
            str(self.root), Schema.from_arrow(schema), mode="ignore", partition_by=names
        )

    def _widen(self, files: Sequence[ArchivedFile]) -> None:
        """Adds columns that the table lacks: options may ask for more than they did before."""
        import pyarrow.parquet as pq
        from deltalake import Field, Schema

        table = self._table()
        known = {field.name for field in table.schema().fields}
        fresh: dict[str, Any] = {}
        for path in {file.schema: file.path for file in files}.values():
            schema = pq.read_schema(self.root / path).remove_metadata()
            fields = Schema.from_arrow(schema).fields
            # What is archived already does not have them.
            fresh |= {
                field.name: Field(field.name, field.type, nullable=True)
                for field in fields
                if field.name not in known
            }
        if fresh:
            table.alter.add_columns(list(fresh.values()))

    def _noted(self, table: Any) -> tuple[dict[str, Ranges], dict[str, str]]:
        """What each pipeline has archived, and how its last batch is named: every commit of any of
        them says it of all."""
        for limit in (4, 64, None):
            for commit in table.history(limit):
                if RANGES_KEY in commit:
                    plans = commit.get(PLANS_KEY, "{}")
                    return json.loads(commit[RANGES_KEY]), json.loads(plans)
        return {}, {}

    def compact(self, files_min: int, keep_s: float) -> int:
        from deltalake.exceptions import CommitFailedError

        table = self._table()
        if table is None:
            return 0
        replaced = 0
        if len(table.file_uris()) >= files_min:
            # Another pipeline may be at it.
            with contextlib.suppress(CommitFailedError):
                done = table.optimize.compact(target_size=COMPACT_BYTES)
                replaced = int(done["numFilesRemoved"])
        # Only what the table's log calls removed: not what batches under way have moved.
        hours = math.ceil(keep_s / 3600)
        for path in table.vacuum(hours, dry_run=True, enforce_retention_duration=False):
            (self.root / unquote(path)).unlink(missing_ok=True)
        return replaced

    def totals(self) -> tuple[int, int]:
        table = self._table()
        if table is None:
            return 0, 0
        import pyarrow as pa

        actions = pa.table(table.get_add_actions(flatten=True))
        return sum(actions["num_records"].to_pylist()), actions.num_rows


def _partition_values(folder: str) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for part in folder.split("/"):
        name, _, value = part.partition("=")
        values[name] = None if value == HIVE_NULL else unquote(value)
    return values


def _sink(format: str, root: Path, app: str) -> _Sink:
    if format == "parquet":
        return _ParquetSink(root, app)
    if format == "delta":
        return _DeltaSink(root, app)
    raise OptionError(f"format {format}: there are parquet and delta")
