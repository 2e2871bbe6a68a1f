"""The pipeline: a queue's dead letters, batch by batch, from its reservation to their end.

    reserved   Spark's log of offsets says which messages the batch has (ADR 0008)
    staged     messages, deaths and decisions are Parquet files that do not count yet
    checked    the broker says that it would take all that goes on
    recorded   one commit of the Delta table: from here on the decisions stand
    published  republished and parked messages are in their queues, by sequence
    executed   another commit of the table says so
    settled    Spark's commit log has the batch; the next look at the queue acknowledges it

Each step may be repeated, and every later one follows from what the earlier ones left (ADR 0054).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convoymq.client.errors import ReservationGone
from convoymq.model.json import Json
from convoymq.spark import clients
from convoymq.spark.errors import OptionError, ReservationLost, SourceError
from convoymq.spark.option_table import Use, parse_options
from convoymq.spark.options import QueueReadOptions
from convoymq.spark.pipelines.archive import archived
from convoymq.spark.pipelines.archive_sink import staged_files
from convoymq.spark.pipelines.checkpoint import CheckpointError, app_id, offsets_of, plan_id
from convoymq.spark.pipelines.triage import decisions
from convoymq.spark.pipelines.triage.publishing import Publisher
from convoymq.spark.pipelines.triage.report import TriageReport, summarise
from convoymq.spark.pipelines.triage.rules import Rules
from convoymq.spark.pipelines.triage.table import TriageTable
from convoymq.spark.query_runs import run_queries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

RESERVATION = "triage"
"""With the checkpoint's id behind it: another checkpoint must not get what this one has begun."""
RESERVATION_TTL = "7d"
"""As long as the broker remembers a producer's sequences."""
DRY_RUN = "dry-run"
"""Directory of a dry run's table below the target."""

Probe = Callable[[str, int], None]
"""Called with (point, batch id) at `staged`, `checked`, `recorded`, `published` and `executed`:
tests stop a batch there."""


def triage(
    spark: SparkSession,
    *,
    servers: str,
    queue: str,
    rules: Rules,
    target: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
    dry_run: bool = False,
    probe: Probe | None = None,
) -> TriageReport:
    """Decides about every dead letter that is there, and carries the decisions out.

    Args:
        servers: `host:port` of nodes, comma between.
        queue: the queue that dead letters go to.
        rules: what to do with them.
        target: directory of the Delta table, on a POSIX file system.
        checkpoint: Spark's checkpoint; default `<target>/_checkpoint`.
        options: more options of the source: user, password, vhost, maxOffsetsPerTrigger, …
        dry_run: look at what is ready, decide, and change nothing in the broker. The table is
            `<target>/dry-run`, made anew each time.

    Raises:
        RuleError, OptionError: what is asked for does not fit.
        StreamingQueryException: a step failed, DecisionError and PublishError among the causes;
            call again to go on.
    """
    if "://" in str(target):
        raise OptionError(f"target {target}: a triage needs a mounted POSIX file system")
    started = time.monotonic()
    given = {"servers": servers, "queue": queue, **dict(options or {})}
    decisions.check_conditions(spark, rules)
    root = Path(target)
    run = _dry_run if dry_run else _run
    report = run(spark, given, rules, root, checkpoint, probe)
    report.seconds = time.monotonic() - started
    return report


def messages(spark: SparkSession, target: str | os.PathLike[str]) -> DataFrame:
    """Returns the table of a triage (or of a dry run: `<target>/dry-run`), read natively by Spark.

    Raises:
        SourceError: there is nothing yet.
    """
    return archived(spark, target)


def _run(
    spark: SparkSession,
    given: Mapping[str, str],
    rules: Rules,
    root: Path,
    checkpoint: str | os.PathLike[str] | None,
    probe: Probe | None,
) -> TriageReport:
    place = Path(checkpoint) if checkpoint is not None else root / "_checkpoint"
    root.mkdir(parents=True, exist_ok=True)
    app = app_id(place)
    known = {name.lower() for name in given}
    own = {"reservation": f"{RESERVATION}-{app}", "reservationTtl": RESERVATION_TTL}
    wanted = {**{n: v for n, v in own.items() if n.lower() not in known}, **given}
    read = QueueReadOptions.of(parse_options("convoymq_queue", wanted), Use.STREAM_READ)
    if read.mode != "reservation":
        raise OptionError("a triage needs mode=reservation: a lease may be delivered twice")
    table = TriageTable(root, app)
    report = TriageReport(queue=read.queue, target=str(root), rules_hash=rules.hash)
    batches = _Batches(read, rules, table, place, report, probe)
    query = (
        spark.readStream.format("convoymq_queue")
        .options(**wanted)
        .option("includeContentHeader", "true")
        .load()
        .writeStream.queryName(f"triage {read.queue}")
        .foreachBatch(batches)
        .option("checkpointLocation", str(place))
        .trigger(availableNow=True)
    )
    run_queries([query])
    if batches.done:
        rows = messages(spark, root).where(f"run = '{table.app}'")
        rows = rows.where(rows["batch"].isin(batches.done))
        summarise(report, rows, rules)
    return report


def _dry_run(
    spark: SparkSession,
    given: Mapping[str, str],
    rules: Rules,
    root: Path,
    _checkpoint: str | os.PathLike[str] | None,
    _probe: Probe | None,
) -> TriageReport:
    streaming = ("maxoffsetspertrigger", "reservation", "reservationttl", "failondataloss", "mode")
    wanted = {name: value for name, value in given.items() if name.lower() not in streaming}
    read = QueueReadOptions.of(parse_options("convoymq_queue", wanted), Use.BATCH_READ)
    place = root / DRY_RUN
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    table = TriageTable(place, DRY_RUN)
    report = TriageReport(queue=read.queue, target=str(place), rules_hash=rules.hash, dry_run=True)
    found = (
        spark.read.format("convoymq_queue")
        .options(**wanted)
        .option("includeContentHeader", "true")
        .load()
    )
    batches = _Batches(read, rules, table, None, report, None)
    table.begin()
    if batches.record(found, 0, ""):
        summarise(report, messages(spark, place), rules)
    return report


class _Batches:
    """Callable for `foreachBatch`."""

    def __init__(
        self,
        read: QueueReadOptions,
        rules: Rules,
        table: TriageTable,
        checkpoint: Path | None,
        report: TriageReport,
        probe: Probe | None,
    ) -> None:
        self._read = read
        self._rules = rules
        self._table = table
        self._checkpoint = checkpoint
        self._report = report
        self._probe = probe or (lambda point, batch: None)
        self.done: list[int] = []
        """Batches that this call has brought to their end."""

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        assert self._checkpoint is not None, "a dry run has no batches"
        table = self._table
        table.begin()
        offsets = offsets_of(self._checkpoint, batch_id)
        if table.applied() < batch_id:
            if not self.record(batch, batch_id, plan_id(offsets)):
                return
        else:
            self._check_repeat(batch_id, plan_id(offsets))
            self._report.recorded_before += 1
        if table.executed() < batch_id:
            if not self._is_held(offsets):
                return
            self._execute(batch.sparkSession, batch_id)
        self.done.append(batch_id)
        self._report.batches += 1

    def record(self, batch: DataFrame, batch_id: int, plan: str) -> bool:
        """Decides and records. Returns whether there was anything to decide."""
        spark, table, queue = batch.sparkSession, self._table, self._read.queue
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        attempt = uuid.uuid4().hex[:8]
        staging = table.staging / f"{table.app}-{batch_id:010d}-{attempt}"
        rows = decisions.decided(
            decisions.exploded(batch), self._rules, queue=queue, run=table.app, batch=batch_id
        )
        rows.write.partitionBy("action").parquet(str(staging))
        self._probe("staged", batch_id)
        staged = staged_files(staging)
        table.clean(keep=staging)
        if staged:
            found = spark.read.parquet(str(staging))
            decisions.check_targets(found, queue)
            self._publisher(batch_id).check(found)
            self._probe("checked", batch_id)
            table.keep_rules(self._rules)
            moved = table.move(staged, batch_id, attempt)
            try:
                table.commit(batch_id, staged, moved, {}, plan)
            except SourceError:
                table.undo(table.plan(batch_id, attempt))
                raise
            self._probe("recorded", batch_id)
        shutil.rmtree(staging, ignore_errors=True)
        table.plan(batch_id, attempt).unlink(missing_ok=True)
        return bool(staged)

    def _check_repeat(self, batch_id: int, plan: str) -> None:
        """Raises CheckpointError unless what is recorded for the batch are the same messages."""
        if batch_id == self._table.applied() and self._table.last_plan() == plan:
            return
        raise CheckpointError(
            f"{self._table.root}: batch {batch_id} was recorded with other messages than the "
            f"checkpoint {self._checkpoint} has for it. Was an older one put back? Go on with the "
            "checkpoint that belongs to this table, or begin with another target"
        )

    def _is_held(self, offsets: str) -> bool:
        """Returns whether the broker still holds the batch's messages for this pipeline.

        Raises:
            ReservationLost: it does not, and failOnDataLoss is true.
        """
        epoch = _epoch(offsets)
        client = clients.connect(self._read.connection)
        try:
            client.reservation(
                self._read.queue, "touch", reservation=self._read.reservation, epoch=epoch
            )
        except ReservationGone as error:
            text = (
                f"queue {self._read.queue}: decisions are recorded, but the messages are no longer "
                f"reserved ({error.text}), so they are in the queue again; what of them was "
                "published before may come twice"
            )
            if self._read.fail_on_data_loss:
                raise ReservationLost(
                    f"{text}. failOnDataLoss=false gives these decisions up"
                ) from error
            log.warning("%s", text)
            self._report.given_up += 1
            return False
        return True

    def _execute(self, spark: SparkSession, batch_id: int) -> None:
        rows = messages(spark, self._table.root)
        mine = rows.where(f"run = '{self._table.app}' AND batch = {batch_id}")
        published, duplicates = self._publisher(batch_id).publish(mine)
        self._report.published += published
        self._report.duplicates += duplicates
        self._probe("published", batch_id)
        self._table.mark_executed(batch_id)
        self._probe("executed", batch_id)

    def _publisher(self, batch_id: int) -> Publisher:
        return Publisher(
            connection=self._read.connection,
            producer=f"triage/{self._table.app}",
            batch=batch_id,
        )


def _epoch(offsets: str) -> int:
    known: Json = json.loads(offsets)
    epoch = known.get("epoch") if isinstance(known, dict) else None
    if not isinstance(epoch, int):
        raise SourceError(f"the checkpoint holds {offsets[:200]}: no batch of a reservation")
    return epoch
