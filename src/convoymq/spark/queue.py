"""Reads of queues: format convoymq_queue, in mode stage or lease, and browsing as a batch.

A queue forgets what is acknowledged, and Spark reads a batch again when a task or the driver dies.
So the broker holds the messages of a batch for the query (ADR 0008), and they are settled inside
`latestOffset(start)`: `start` is the end of a batch whose commit is written, and it is asked for
after every batch. `commit` comes a batch late, and never for the last one.

    mode stage   {"v":1,"queue":"q","epoch":7,"off":1200,"from":1000}
                     where the batch ends in the stage (exclusive), and where it begins if that is
                     not the end of the one before
                 {"v":1,"queue":"q","epoch":7,"off":1200,"closed":true}
                     all settled: the end of an AvailableNow run. The stage is given back when
                     this is written
    mode lease   {"v":1,"queue":"q","lease":"…","epoch":9,"n":500}
                     the batch is this lease

With asynchronous progress tracking `start` may be ahead of the commit: not for this source.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from convoymq.client.errors import ClientError, StageGone
from convoymq.kernels import columns as bits
from convoymq.spark import clients, offsets, planning, reading
from convoymq.spark.errors import SourceError, StageLost
from convoymq.spark.frames import BatchMaker
from convoymq.spark.options import TTL_MS_MAX
from convoymq.spark.partition import Browse, StageRange
from convoymq.spark.schema import QUEUE_COLUMNS, check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from convoymq.client import Client
    from convoymq.spark.options import QueueReadOptions

log = logging.getLogger(__name__)

TAKE_MAX = 1 << 40
"""Stands for "all"; the broker takes what is ready."""
TAKE_AGAIN_ROWS = 16_384
"""A take moves at most this many runs of messages: after as many messages there may be more."""
IDLE_TTL_MS = TTL_MS_MAX
"""An empty stage holds nothing back, so it may wait long for its query to come back."""
_HEARTBEATS_PER_TTL = 4
_SINGLE_ACTIVE = "x-single-active-consumer"
_TYPES = ("quorum", "classic", "stream")


class BrowseReader(DataSourceReader):
    """A batch read: what is ready, without taking it."""

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        check_schema(QUEUE_COLUMNS, schema)
        self._options = options
        self._maker = BatchMaker(schema, QUEUE_COLUMNS)

    def partitions(self) -> list[InputPartition]:
        """One: a cursor goes from message to message."""
        return [Browse(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        if not isinstance(partition, Browse):
            return iter(())
        options = self._options
        return reading.read_browsed(options.connection, options.fetching, self._maker, partition)


class _QueueStreamReader(DataSourceStreamReader):
    """What both modes share."""

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        check_schema(QUEUE_COLUMNS, schema)
        self._options = options
        self._maker = BatchMaker(schema, QUEUE_COLUMNS)
        self._idle_since: float | None = None
        self._latest: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """A word; nothing is taken yet."""
        return offsets.symbol("queue")

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What Spark hands to `latestOffset`, unless a trigger overrides it."""
        rows_max = self._options.rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of what the broker holds for the query."""
        return self._latest

    def stop(self) -> None:
        """Nothing: Spark does not always call this, so nothing may depend on it."""

    def __getstate__(self) -> dict[str, Any]:
        # The tasks' instance holds no stage, and a thread can't be pickled.
        return {**self.__dict__, "_held": None}

    _fields: tuple[str, ...]
    """What an offset of this mode must hold, besides the queue."""

    def _check(self, offset: Mapping[str, Any]) -> None:
        """Raises SourceError: a checkpoint of another source, queue or mode."""
        if offsets.is_symbol(offset):
            return
        queue = self._options.queue
        if offset.get("queue") != queue or not all(name in offset for name in self._fields):
            raise SourceError(
                f"the checkpoint holds {str(dict(offset))[:200]}: not one of queue {queue} in mode "
                f"{self._options.mode}"
            )

    @property
    def _client(self) -> Client:
        return clients.connect(self._options.connection)

    def _op(self, op: str, stage: str, **fields: Any) -> dict[str, Any]:
        return self._client.stage(self._options.queue, op, stage=stage, **fields)

    def _nothing_ready(self) -> bool:
        """Whether a look at the queue, which costs no log entry, finds it empty."""
        result, cursor = self._client.browse(self._options.queue, max_rows=1, columns=bits.OFFSET)
        return not result.frame.rows and cursor is None

    def _pace(self) -> None:
        """Spark asks an idle source a hundred times a second; the broker need not hear of each."""
        if self._idle_since is not None:
            due = self._idle_since + self._options.poll_interval_ms / 1000
            time.sleep(max(0.0, due - time.monotonic()))

    def _rows_max(self, limit: ReadLimit) -> int:
        rows_max = self._options.rows_max
        if rows_max is None or isinstance(limit, ReadAllAvailable):
            return TAKE_MAX
        return rows_max

    def _cut(self, stage: str, epoch: int, start: int, end: int) -> list[InputPartition]:
        fetching = self._options.fetching
        parts = planning.split(
            [(stage, start, end)], fetching.partitions_min, fetching.records_per_partition_max
        )
        return [
            StageRange(self._options.queue, stage, epoch, low, high) for stage, low, high in parts
        ]

    def _read(self, partition: InputPartition, *, skip_expired: bool) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StageRange):
            return iter(())
        options = self._options
        return reading.read_stage(
            options.connection, options.fetching, self._maker, partition, skip_expired=skip_expired
        )


class StageReader(_QueueStreamReader, SupportsTriggerAvailableNow):
    """Mode stage: in order, exactly once into a checkpointed sink."""

    _fields = ("epoch", "off")

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._available_now = False
        self._target: int | None = None
        self._held: _Stage | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is ready at the first `latestOffset` is staged at once: that is the query's end."""
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Settles what ends at `start`, and stages the next batch.

        Raises:
            StageLost: the broker no longer holds the messages behind `start` for this query.
            ClientError: the broker did not answer before the deadline, or refused.
        """
        self._check(start)
        if self._available_now and self._target is not None and start.get("closed"):
            self._close()
            return start
        self._pace()
        stage = self._opened()
        begin, fresh = self._begin(stage, start)
        ready = self._stage_more(stage, begin, limit)
        end = min(
            begin + self._rows_max(limit), stage.next if self._target is None else self._target
        )
        self._latest = _stage_offset(self._options.queue, stage.epoch, stage.next)
        if end > begin:
            self._idle_since = None
            return _stage_offset(self._options.queue, stage.epoch, end, begin if fresh else None)
        if self._available_now:
            # The stage is given back when this offset is written. Who died in between would come
            # back with an epoch that is gone, and could not tell that from a loss.
            return _stage_offset(
                self._options.queue, stage.epoch, begin, begin if fresh else None, closed=True
            )
        if not ready:
            stage.rest()
        self._idle_since = time.monotonic()
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch. A repeated batch gets the same ranges, whatever the broker says."""
        self._check(end)
        begin = end.get("from", start.get("off"))
        if not isinstance(begin, int):
            raise SourceError(f"the checkpoint holds {end} behind {start}: no batch of a stage")
        parts = self._cut(self._options.stage, int(end["epoch"]), begin, int(end["off"]))
        if parts and self._held is None:
            self._resume(int(end["epoch"]))
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return self._read(partition, skip_expired=not self._options.fail_on_data_loss)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: see the module text."""

    # --- parts of latestOffset ---------------------------------------------------------------

    def _opened(self) -> _Stage:
        if self._held is None:
            self._held = _Stage(self._options)
        return self._held

    def _resume(self, epoch: int) -> None:
        """After a restart a batch is repeated before `latestOffset` is asked for: its stage must
        not expire while that takes."""
        try:
            self._op("touch", self._options.stage, epoch=epoch)
        except StageGone:
            # Opened now, it would be another one. The tasks say what became of this one.
            return
        self._opened()

    def _close(self) -> None:
        """Gives the stage back: the offset that says that all is settled is committed."""
        stage, self._held = self._held, None
        if stage is not None:
            stage.close()

    def _begin(self, stage: _Stage, start: Mapping[str, Any]) -> tuple[int, bool]:
        """(Where the next batch begins, whether that is not simply the end of the one before)."""
        if "start" in start:
            return stage.first, True
        at, epoch = int(start["off"]), int(start["epoch"])
        if epoch == stage.epoch:
            stage.settle(at)
            if epoch == stage.epoch:
                return at, False
        if start.get("closed"):
            return stage.first, True
        text = (
            f"queue {self._options.queue}: the stage {self._options.stage} was given up, after "
            f"{self._options.ttl_ms} ms (stageTtl) without a sign of this query or by an operator. "
            "Nothing is lost, but what the last batches read may come once more"
        )
        if self._options.fail_on_data_loss:
            raise StageLost(f"{text}. failOnDataLoss=false goes on")
        log.warning("%s", text)
        return stage.first, True

    def _stage_more(self, stage: _Stage, begin: int, limit: ReadLimit) -> bool:
        """Takes messages if nothing is staged behind `begin`. Returns whether any were there."""
        if self._available_now:
            if self._target is None:
                # All of it now, whatever the batches' size: that fixes where the query ends.
                while stage.take(TAKE_MAX, stage.next) >= TAKE_AGAIN_ROWS:
                    pass
                self._target = stage.next
            return True
        if stage.next > begin:
            return True
        if self._idle_since is not None and self._nothing_ready():
            return False
        return stage.take(self._rows_max(limit), begin) > 0


class _Stage:
    """The query's stage, open: in the driver's process only."""

    def __init__(self, options: QueueReadOptions) -> None:
        self._options = options
        self._owner = str(uuid.uuid4())
        self._resting = False
        infos = self._client.metadata(names=[options.queue], types=_TYPES)
        arguments = infos[0].arguments if infos else {}
        # Of these, even an empty stage keeps all other consumers away.
        self._single_active = bool(arguments.get(_SINGLE_ACTIVE))
        self.epoch = self._fence = self.first = self.next = 0
        self._open(options.ttl_ms)
        self._ended = _keep_alive(self._touch, options.ttl_ms)

    @property
    def _client(self) -> Client:
        return clients.connect(self._options.connection)

    def settle(self, upto: int) -> None:
        """What lies below is done. A stage that is gone is opened anew, with another epoch."""
        if upto <= self.first:
            return
        try:
            self._note(self._op("settle", upto=upto))
        except StageGone as error:
            self._explain(error)
            self._open(self._options.ttl_ms)

    def take(self, rows_max: int, after: int) -> int:
        """Stages what is ready. Returns how many more messages are staged now."""
        if self._resting:
            self._resting = False
            self._reopen(self._options.ttl_ms)
        before = self.next
        try:
            self._note(self._op("take", max=rows_max, after=after))
        except StageGone as error:
            self._explain(error)
            raise StageLost(f"queue {self._options.queue}: {error.text}") from error
        return self.next - before

    def rest(self) -> None:
        """Nothing is staged and nothing is ready: the stage may outlast a long pause."""
        if not self._resting and not self._single_active and self.first == self.next:
            self._resting = True
            self._reopen(IDLE_TTL_MS)

    def close(self) -> None:
        """Gives the stage back."""
        self._ended.set()
        with contextlib.suppress(StageGone):
            self._op("close", failed=False)

    def _op(self, op: str, **fields: Any) -> dict[str, Any]:
        return self._client.stage(
            self._options.queue,
            op,
            stage=self._options.stage,
            epoch=self.epoch,
            fence=self._fence,
            **fields,
        )

    def _open(self, ttl_ms: int) -> None:
        answer = self._client.stage(
            self._options.queue,
            "open",
            stage=self._options.stage,
            owner=self._owner,
            ttl_ms=ttl_ms,
        )
        self._note(answer)

    def _reopen(self, ttl_ms: int) -> None:
        """Another time to live. Whoever took the stage over meanwhile keeps it."""
        try:
            self._note(self._op("touch"))
        except StageGone as error:
            self._explain(error)
            raise StageLost(f"queue {self._options.queue}: {error.text}") from error
        self._open(ttl_ms)

    def _note(self, answer: Mapping[str, Any]) -> None:
        self.epoch = int(answer["epoch"])
        self._fence = int(answer["fence"])
        self.first = int(answer["first"])
        self.next = int(answer["next"])

    def _explain(self, error: StageGone) -> None:
        if error.reason == "stage_fenced":
            raise StageLost(
                f"queue {self._options.queue}: another query has taken over the stage "
                f"{self._options.stage}. Two queries on one queue need two names: option stage"
            ) from error

    def _touch(self) -> None:
        self._op("touch")


class LeaseReader(_QueueStreamReader):
    """Mode lease: at least once. A lease that expires is delivered again, whoever has read it."""

    _fields = ("lease", "epoch", "n")

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._held: _Lease | None = None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Settles the lease that is done, and makes the next.

        Raises:
            ClientError: the broker did not answer before the deadline, or refused.
        """
        self._check(start)
        self._pace()
        if "lease" in start:
            self._settle(start)
        if self._idle_since is not None and self._nothing_ready():
            self._idle_since = time.monotonic()
            return start
        name = f"{self._options.connection.name}-{uuid.uuid4()}"
        answer = self._op("lease", name, ttl_ms=self._options.ttl_ms, max=self._rows_max(limit))
        if not answer["next"]:
            self._idle_since = time.monotonic()
            return start
        self._idle_since = None
        self._latest = {
            "v": offsets.VERSION,
            "queue": self._options.queue,
            "lease": name,
            "epoch": int(answer["epoch"]),
            "n": int(answer["next"]),
        }
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch. Asks nobody: a repeated batch gets the same ranges."""
        self._check(end)
        lease, epoch = str(end["lease"]), int(end["epoch"])
        if self._held is None or self._held.name != lease:
            self._let_go()
            self._held = _Lease(
                lease, partial(self._op, "touch", lease, epoch=epoch), self._options
            )
        return self._cut(lease, epoch, 0, int(end["n"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return self._read(partition, skip_expired=self._options.skip_expired)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: see the module text."""

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _settle(self, start: Mapping[str, Any]) -> None:
        self._let_go()
        try:
            self._op("settle", str(start["lease"]), epoch=int(start["epoch"]), upto=int(start["n"]))
        except StageGone as error:
            log.warning(
                "queue %s: a lease of %d messages ended before it was settled, they come again: %s",
                self._options.queue,
                int(start["n"]),
                error.text,
            )


class _Lease:
    """A lease whose batch is under way."""

    def __init__(self, name: str, touch: Callable[[], Any], options: QueueReadOptions) -> None:
        self.name = name
        self._ended = _keep_alive(touch, options.ttl_ms)

    def end(self) -> None:
        """Nobody reads it any more."""
        self._ended.set()


def _keep_alive(touch: Callable[[], Any], ttl_ms: int) -> threading.Event:
    """A batch may take longer than the time to live; its query is alive all the same.

    Returns: what ends it when it is set.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(ttl_ms / 1000 / _HEARTBEATS_PER_TTL):
            # What is wrong is found out, and told, by the next op.
            with contextlib.suppress(ClientError):
                touch()

    threading.Thread(target=run, name="convoymq-stage", daemon=True).start()
    return ended


def _stage_offset(
    queue: str, epoch: int, end: int, begin: int | None = None, *, closed: bool = False
) -> dict[str, Any]:
    made: dict[str, Any] = {"v": offsets.VERSION, "queue": queue, "epoch": epoch, "off": end}
    if begin is not None:
        made["from"] = begin
    if closed:
        made["closed"] = True
    return made
