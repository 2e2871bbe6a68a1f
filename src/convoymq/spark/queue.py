"""Reads of queues: format convoymq_queue, in mode reservation or lease, and browsing as a batch.

A queue forgets what is acknowledged, and Spark reads a batch again when a task or the driver dies.
So the broker holds the messages of a batch for the query (ADR 0008), and they are settled inside
`latestOffset(start)`: `start` is the end of a batch whose commit is written, and it is asked for
after every batch. `commit` comes a batch late, and never for the last one.

    mode reservation   {"v":1,"queue":"q","epoch":7,"off":1200,"from":1000}
                     where the batch ends in the reservation (exclusive), and where it begins if
                     that is not the end of the one before
                 {"v":1,"queue":"q","epoch":7,"off":1200,"closed":true}
                     all settled: the end of an AvailableNow run. The reservation is given back when
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
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from convoymq.client.errors import ClientError, ReservationGone
from convoymq.kernels import columns as bits
from convoymq.spark import clients, offsets, planning, reading
from convoymq.spark.errors import ReservationLost, SourceError
from convoymq.spark.frames import BatchMaker
from convoymq.spark.options import TTL_MS_MAX
from convoymq.spark.partition import Browse, ReservationRange
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
"""An empty reservation holds nothing back, so it may wait long for its query to come back."""
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
    """Reader that both modes share."""

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        check_schema(QUEUE_COLUMNS, schema)
        self._options = options
        self._maker = BatchMaker(schema, QUEUE_COLUMNS)
        self._idle_since: float | None = None
        self._latest: dict[str, object] | None = None

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        """Returns a word; nothing is taken yet."""
        return offsets.symbol("queue")

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit that Spark hands to `latestOffset`, unless a trigger overrides it."""
        rows_max = self._options.rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """Returns the end of what the broker holds for the query."""
        return self._latest

    def stop(self) -> None:
        """Nothing: Spark does not always call this, so nothing may depend on it."""

    def __getstate__(self) -> dict[str, object]:
        # The tasks' instance holds no reservation, and a thread can't be pickled.
        return {**self.__dict__, "_held": None}

    _fields: tuple[str, ...]
    """Fields that an offset of this mode must have, besides the queue."""

    def _check(self, offset: Mapping[str, object]) -> None:
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

    def _op(self, op: str, reservation: str, **fields: object) -> dict[str, object]:
        return self._client.reservation(self._options.queue, op, reservation=reservation, **fields)

    def _nothing_ready(self) -> bool:
        """Returns whether a look at the queue, which costs no log entry, finds it empty."""
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

    def _cut(self, reservation: str, epoch: int, start: int, end: int) -> list[InputPartition]:
        fetching = self._options.fetching
        parts = planning.split(
            [(reservation, start, end)], fetching.partitions_min, fetching.records_per_partition_max
        )
        return [
            ReservationRange(self._options.queue, reservation, epoch, low, high)
            for reservation, low, high in parts
        ]

    def _read(self, partition: InputPartition, *, skip_expired: bool) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReservationRange):
            return iter(())
        options = self._options
        return reading.read_reservation(
            options.connection, options.fetching, self._maker, partition, skip_expired=skip_expired
        )


class ReservationReader(_QueueStreamReader, SupportsTriggerAvailableNow):
    """Mode reservation: in order, exactly once into a checkpointed sink."""

    _fields = ("epoch", "off")

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._available_now = False
        self._target: int | None = None
        self._held: _Reservation | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Lets the first `latestOffset` reserve at once what is ready: that is the query's end."""
        self._available_now = True

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        """Settles what ends at `start`, and reservations the next batch.

        Raises:
            ReservationLost: the broker no longer holds the messages behind `start` for this query.
            ClientError: the broker did not answer before the deadline, or refused.
        """
        self._check(start)
        if self._available_now and self._target is not None and start.get("closed"):
            self._close()
            return start
        self._pace()
        reservation = self._opened()
        begin, fresh = self._begin(reservation, start)
        ready = self._reservation_more(reservation, begin, limit)
        end = min(
            begin + self._rows_max(limit),
            reservation.next if self._target is None else self._target,
        )
        self._latest = _reservation_offset(self._options.queue, reservation.epoch, reservation.next)
        if end > begin:
            self._idle_since = None
            return _reservation_offset(
                self._options.queue, reservation.epoch, end, begin if fresh else None
            )
        if self._available_now:
            # The reservation is given back when this offset is written. Who died in between would
            # come back with an epoch that is gone, and could not tell that from a loss.
            return _reservation_offset(
                self._options.queue, reservation.epoch, begin, begin if fresh else None, closed=True
            )
        if not ready:
            reservation.rest()
        self._idle_since = time.monotonic()
        return start

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        """Returns the tasks of a batch. A repeated batch gets the same ranges, whatever the broker
        says."""
        self._check(end)
        begin = end.get("from", start.get("off"))
        if not isinstance(begin, int):
            raise SourceError(
                f"the checkpoint holds {end} behind {start}: no batch of a reservation"
            )
        parts = self._cut(
            self._options.reservation,
            offsets.number(end, "epoch"),
            begin,
            offsets.number(end, "off"),
        )
        if parts and self._held is None:
            self._resume(offsets.number(end, "epoch"))
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return self._read(partition, skip_expired=not self._options.fail_on_data_loss)

    def commit(self, end: dict[str, object]) -> None:
        """Nothing: see the module text."""

    # --- parts of latestOffset ---------------------------------------------------------------

    def _opened(self) -> _Reservation:
        if self._held is None:
            self._held = _Reservation(self._options)
        return self._held

    def _resume(self, epoch: int) -> None:
        """After a restart a batch is repeated before `latestOffset` is asked for: its reservation
        must not expire while that takes."""
        try:
            self._op("touch", self._options.reservation, epoch=epoch)
        except ReservationGone:
            # Opened now, it would be another one. The tasks say what became of this one.
            return
        self._opened()

    def _close(self) -> None:
        """Gives the reservation back: the offset that says that all is settled is committed."""
        reservation, self._held = self._held, None
        if reservation is not None:
            reservation.close()

    def _begin(self, reservation: _Reservation, start: Mapping[str, object]) -> tuple[int, bool]:
        """Returns (Where the next batch begins, whether that is not simply the end of the one
        before)."""
        if "start" in start:
            return reservation.first, True
        at, epoch = offsets.number(start, "off"), offsets.number(start, "epoch")
        if epoch == reservation.epoch:
            reservation.settle(at)
            if epoch == reservation.epoch:
                return at, False
        if start.get("closed"):
            return reservation.first, True
        text = (
            f"queue {self._options.queue}: the reservation {self._options.reservation} was given "
            f"up, after {self._options.ttl_ms} ms (reservationTtl) without a sign of this query or "
            "by an operator. "
            "Nothing is lost, but what the last batches read may come once more"
        )
        if self._options.fail_on_data_loss:
            raise ReservationLost(f"{text}. failOnDataLoss=false goes on")
        log.warning("%s", text)
        return reservation.first, True

    def _reservation_more(self, reservation: _Reservation, begin: int, limit: ReadLimit) -> bool:
        """Takes messages if nothing is reserved behind `begin`. Returns whether any were there."""
        if self._available_now:
            if self._target is None:
                # All of it now, whatever the batches' size: that fixes where the query ends.
                while reservation.take(TAKE_MAX, reservation.next) >= TAKE_AGAIN_ROWS:
                    pass
                self._target = reservation.next
            return True
        if reservation.next > begin:
            return True
        if self._idle_since is not None and self._nothing_ready():
            return False
        return reservation.take(self._rows_max(limit), begin) > 0


class _Reservation:
    """The query's reservation, open: in the driver's process only."""

    def __init__(self, options: QueueReadOptions) -> None:
        self._options = options
        self._owner = str(uuid.uuid4())
        self._resting = False
        infos = self._client.metadata(names=[options.queue], types=_TYPES)
        arguments = infos[0].arguments if infos else {}
        # Of these, even an empty reservation keeps all other consumers away.
        self._single_active = bool(arguments.get(_SINGLE_ACTIVE))
        self.epoch = self._fencing_token = self.first = self.next = 0
        self._open(options.ttl_ms)
        self._ended = _keep_alive(self._touch, options.ttl_ms)

    @property
    def _client(self) -> Client:
        return clients.connect(self._options.connection)

    def settle(self, upto: int) -> None:
        """Settles what lies below. A reservation that is gone is opened anew, with another
        epoch."""
        if upto <= self.first:
            return
        try:
            self._note(self._op("settle", upto=upto))
        except ReservationGone as error:
            self._explain(error)
            self._open(self._options.ttl_ms)

    def take(self, rows_max: int, after: int) -> int:
        """Reservations what is ready. Returns how many more messages are reserved now."""
        if self._resting:
            self._resting = False
            self._reopen(self._options.ttl_ms)
        before = self.next
        try:
            self._note(self._op("take", max=rows_max, after=after))
        except ReservationGone as error:
            self._explain(error)
            raise ReservationLost(f"queue {self._options.queue}: {error.text}") from error
        return self.next - before

    def rest(self) -> None:
        """Nothing is reserved and nothing is ready: the reservation may outlast a long pause."""
        if not self._resting and not self._single_active and self.first == self.next:
            self._resting = True
            self._reopen(IDLE_TTL_MS)

    def close(self) -> None:
        """Gives the reservation back."""
        self._ended.set()
        with contextlib.suppress(ReservationGone):
            self._op("close", failed=False)

    def _op(self, op: str, **fields: object) -> dict[str, object]:
        return self._client.reservation(
            self._options.queue,
            op,
            reservation=self._options.reservation,
            epoch=self.epoch,
            fencing_token=self._fencing_token,
            **fields,
        )

    def _open(self, ttl_ms: int) -> None:
        answer = self._client.reservation(
            self._options.queue,
            "open",
            reservation=self._options.reservation,
            owner=self._owner,
            ttl_ms=ttl_ms,
        )
        self._note(answer)

    def _reopen(self, ttl_ms: int) -> None:
        """Another time to live. Whoever took the reservation over meanwhile keeps it."""
        try:
            self._note(self._op("touch"))
        except ReservationGone as error:
            self._explain(error)
            raise ReservationLost(f"queue {self._options.queue}: {error.text}") from error
        self._open(ttl_ms)

    def _note(self, answer: Mapping[str, object]) -> None:
        self.epoch = offsets.number(answer, "epoch")
        self._fencing_token = offsets.number(answer, "fencing_token")
        self.first = offsets.number(answer, "first")
        self.next = offsets.number(answer, "next")

    def _explain(self, error: ReservationGone) -> None:
        if error.reason == "reservation_fenced":
            raise ReservationLost(
                f"queue {self._options.queue}: another query has taken over the reservation "
                f"{self._options.reservation}. Two queries on one queue need two names: option "
                "reservation"
            ) from error

    def _touch(self) -> None:
        self._op("touch")


class LeaseReader(_QueueStreamReader):
    """Mode lease: at least once. A lease that expires is delivered again, whoever has read it."""

    _fields = ("lease", "epoch", "n")

    def __init__(self, options: QueueReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._held: _Lease | None = None

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
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
            "epoch": offsets.number(answer, "epoch"),
            "n": offsets.number(answer, "next"),
        }
        return self._latest

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        """Returns the tasks of a batch. Asks nobody: a repeated batch gets the same ranges."""
        self._check(end)
        lease, epoch = str(end["lease"]), offsets.number(end, "epoch")
        if self._held is None or self._held.name != lease:
            self._let_go()
            self._held = _Lease(
                lease, partial(self._op, "touch", lease, epoch=epoch), self._options
            )
        return self._cut(lease, epoch, 0, offsets.number(end, "n"))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return self._read(partition, skip_expired=self._options.skip_expired)

    def commit(self, end: dict[str, object]) -> None:
        """Nothing: see the module text."""

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _settle(self, start: Mapping[str, object]) -> None:
        self._let_go()
        try:
            self._op(
                "settle",
                str(start["lease"]),
                epoch=offsets.number(start, "epoch"),
                upto=offsets.number(start, "n"),
            )
        except ReservationGone as error:
            log.warning(
                "queue %s: a lease of %d messages ended before it was settled, they come again: %s",
                self._options.queue,
                offsets.number(start, "n"),
                error.text,
            )


class _Lease:
    """A lease whose batch is under way."""

    def __init__(self, name: str, touch: Callable[[], object], options: QueueReadOptions) -> None:
        self.name = name
        self._ended = _keep_alive(touch, options.ttl_ms)

    def end(self) -> None:
        """Nobody reads it any more."""
        self._ended.set()


def _keep_alive(touch: Callable[[], object], ttl_ms: int) -> threading.Event:
    """A batch may take longer than the time to live; its query is alive all the same.

    Returns: what ends it when it is set.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(ttl_ms / 1000 / _HEARTBEATS_PER_TTL):
            # What is wrong is found out, and told, by the next op.
            with contextlib.suppress(ClientError):
                touch()

    threading.Thread(target=run, name="convoymq-reservation", daemon=True).start()
    return ended


def _reservation_offset(
    queue: str, epoch: int, end: int, begin: int | None = None, *, closed: bool = False
) -> dict[str, object]:
    made: dict[str, object] = {"v": offsets.VERSION, "queue": queue, "epoch": epoch, "off": end}
    if begin is not None:
        made["from"] = begin
    if closed:
        made["closed"] = True
    return made
