"""Writes to streams, queues and exchanges: batch and streaming, a repeat adds nothing.

A task sends its rows in requests. A request carries the name of its writer and a digest of its rows
and their place, and the broker drops the rows of a request that it has had before (ADR 0029). The
name is the query's id (or one made for a batch write) and the task's number; the place is the
micro-batch's number and that of the first row. So a task that runs again, and a micro-batch that is
repeated after a crash, add only what is missing, provided that the same rows come in the same tasks
and in the same order. Reading our own sources and files they do; after a shuffle,
`repartition(n, key).sortWithinPartitions(...)` makes it so. Where they do not, rows come twice and
none is lost.

Rows are visible as soon as they are confirmed, before the rest of their batch is.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from convoymq.client.errors import MaybeProduced, PreconditionFailed
from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import build_frame
from convoymq.spark import clients
from convoymq.spark.broker import check_target
from convoymq.spark.errors import OptionError, SchemaError, SourceError
from convoymq.spark.frames import binary_buffers, header_buffers, plain_binary
from convoymq.spark.rocket_writer import write_rocket
from convoymq.spark.schema import HEADERS
from convoymq.spark.topic_writer import write_topic

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from convoymq.client import Client, ProduceResult
    from convoymq.spark.options import SinkOptions

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"

ROWS_OF_TASK_BITS = 32
"""A place is the micro-batch's number, shifted by this, plus the row's number in its task."""

DIGEST_BYTES = 16

_WRITTEN = frozenset({"key", "value", "headers", "topic", "routing_key", "message_id"})
"""Columns that matter; others are ignored, as Kafka's sink does."""

_TEXT_TYPES = ("string", "binary")
_PERSISTENT = 2
_PROPERTIES_CLASS = 60
_FLAG_DELIVERY_MODE = 1 << 12
_FLAG_MESSAGE_ID = 1 << 7
_MESSAGE_ID_BYTES_MAX = 255
_ROW_DIGITS = 10
UNROUTABLE = "has no queue for routing key"
"""In the broker's refusal of a mandatory frame."""
_MAYBE_TRIES_MAX = 5
"""Requests of which nobody knows whether they were carried out are made anew this often."""
# A length byte is looked up here, so that no row is touched in Python.
_LENGTH_BYTES = pa.array([bytes([length]) for length in range(256)], pa.binary())


@dataclass(frozen=True, slots=True)
class TaskResult(WriterCommitMessage):
    """Result of a task's writes; all of them are safe."""

    rows: int
    duplicates: int
    """Rows that were there already, summed over targets."""
    unroutable: int


class BatchWriter(DataSourceArrowWriter):
    """A batch write. Made in the driver, pickled into the tasks."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._of_topic = _check_writable(options, schema, overwrite)
        self._options = options
        self._name = options.producer_name or str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """In a task."""
        return _write(self._options, iterator, self._name, 0, of_topic=self._of_topic)


class MicroBatchWriter(DataSourceStreamArrowWriter):
    """A streaming write. Made anew for each batch, and again to commit it."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._of_topic = _check_writable(options, schema, overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """In a task."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID_PROPERTY) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID_PROPERTY) if context is not None else None
        if not query or batch is None:
            raise SourceError(
                "Spark did not tell the task its query and batch, so a repeat could not be told "
                "from new rows"
            )
        return _write(self._options, iterator, query, int(batch), of_topic=self._of_topic)


def _check_writable(options: SinkOptions, schema: StructType, overwrite: bool) -> bool:
    """In the driver: what can be known before a row is written. Returns whether rows go to an
    ordered topic."""
    if overwrite:
        raise OptionError("a log can't be overwritten: use mode append, or output mode append")
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    _check_type(types, "value", _TEXT_TYPES, needed=True)
    _check_type(types, "key", _TEXT_TYPES)
    _check_type(types, "topic", ("string",))
    _check_type(types, "routing_key", ("string",))
    _check_type(types, "message_id", ("string",))
    _check_type(types, "headers", (HEADERS.simpleString(),))
    if options.connection.namesrv:
        if options.topic is None:
            raise OptionError("give the option topic, that names a topic of RocketMQ")
        _check_type(types, "tags", ("string",))
        _check_type(types, "keys", ("array<string>",))
        _check_type(types, "properties", ("map<string,string>",))
        return False
    if options.queue is not None or options.exchange is not None:
        if options.exchange is not None and options.routing_key is None:
            _check_type(types, "routing_key", ("string",), needed=True)
        if options.queue is not None:
            check_target(options.connection, options.queue, stream=False)
        return False
    if options.topic is None:
        if "topic" not in types:
            raise SchemaError("give the option topic, or a column topic, that names the stream")
        return False
    of_topic = check_target(options.connection, options.topic, stream=True)
    if of_topic:
        _check_type(types, "key", _TEXT_TYPES, needed=True)
        if options.message_ids or "message_id" in types:
            raise SchemaError(
                "rows for an ordered topic have no message ids: leave messageId=auto and the "
                "column message_id out"
            )
    return of_topic


def _check_type(
    types: Mapping[str, str], name: str, allowed: tuple[str, ...], *, needed: bool = False
) -> None:
    found = types.get(name)
    if found is None:
        if needed:
            raise SchemaError(f"there is no column {name}; there are {', '.join(types)}")
    elif found not in allowed:
        raise SchemaError(f"column {name} must be {' or '.join(allowed)}, not {found}")


# --- in a task -------------------------------------------------------------------------------


def _write(
    options: SinkOptions,
    batches: Iterator[pa.RecordBatch],
    name: str,
    batch_id: int,
    *,
    of_topic: bool,
) -> TaskResult:
    context = TaskContext.get()
    task = context.partitionId() if context is not None else 0
    if options.connection.namesrv:
        rows, duplicates = write_rocket(options, batches, f"{name}:{task}", batch_id)
        return TaskResult(rows, duplicates, 0)
    if of_topic:
        rows, duplicates = write_topic(options, batches, f"{name}:{task}", batch_id)
        return TaskResult(rows, duplicates, 0)
    sending = _Sending(options, f"{name}:{task}", f"{name}/{batch_id}/{task}/", batch_id)
    with ThreadPoolExecutor(1, thread_name_prefix="convoymq-produce") as thread:
        # One request is under way while the next is made.
        pending: Future[ProduceResult] | None = None
        for batch in batches:
            for request in sending.requests(batch):
                if pending is not None:
                    sending.add(pending.result())
                pending = thread.submit(request.send, sending.client)
        if pending is not None:
            sending.add(pending.result())
    return sending.result


class Target(TypedDict, total=False):
    """Target of rows, as `Client.produce` takes it."""

    stream: str
    queue: str
    exchange: str
    routing_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    frame: bytes
    target: Target
    producer: str | None
    sequence: int
    digest: bytes | None
    mandatory: bool
    """Refused whole when a row has no queue: rows that went on would make it a repeat."""

    def send(self, client: Client) -> ProduceResult:
        """Until it is confirmed. Without a producer, at least once."""
        for _ in range(_MAYBE_TRIES_MAX - 1):
            with contextlib.suppress(MaybeProduced):
                return self._send(client)
        return self._send(client)

    def _send(self, client: Client) -> ProduceResult:
        try:
            return client.produce(
                self.frame,
                **self.target,
                producer=self.producer,
                sequence=self.sequence,
                digest=self.digest,
                mandatory=self.mandatory,
            )
        except PreconditionFailed as error:
            if self.mandatory and UNROUTABLE in error.text:
                raise SourceError(f"{error.text}; onUnroutable=drop lets such rows go") from error
            raise


class _Sending:
    """The rows of a task on their way."""

    def __init__(self, options: SinkOptions, producer: str, id_prefix: str, batch_id: int) -> None:
        self._options = options
        self._producer = producer
        self._id_prefix = id_prefix
        self._base = batch_id << ROWS_OF_TASK_BITS
        self._sent: dict[str, int] = {}
        self._taken = 0
        self.client = clients.connect(options.connection)
        self.result = TaskResult(0, 0, 0)

    def requests(self, batch: pa.RecordBatch) -> Iterator[_Request]:
        """Yields a batch's rows as requests, each in its bounds, in order for each target."""
        if not batch.num_rows:
            return
        names = batch.schema.names
        columns = {name: batch.column(i) for i, name in enumerate(names) if name in _WRITTEN}
        ids = self._message_ids(columns, batch.num_rows)
        if ids is not None:
            columns["message_id"] = ids
        self._taken += batch.num_rows
        for name, target, rows in self._targets(columns, batch.num_rows):
            chosen = columns if rows is None else {n: c.take(rows) for n, c in columns.items()}
            yield from self._cut(name, target, chosen)

    def add(self, result: ProduceResult) -> None:
        """Counts what a request has done.

        Raises:
            SourceError: messages went nowhere; only a node of release 0.2 does not refuse them.
        """
        if result.unroutable and self._options.fail_on_unroutable:
            raise SourceError(
                f"{result.unroutable} of {result.count} messages have no queue to go to from "
                f"exchange {self._options.exchange!r}; onUnroutable=drop lets them go"
            )
        self.result = replace(
            self.result,
            rows=self.result.rows + result.count,
            duplicates=self.result.duplicates + result.duplicates,
            unroutable=self.result.unroutable + result.unroutable,
        )

    def _targets(
        self, columns: Mapping[str, pa.Array], rows: int
    ) -> Iterator[tuple[str, Target, pa.Array | None]]:
        """Yields (name, where to, row numbers or None = all) for each target among the rows."""
        options = self._options
        if options.queue is not None:
            yield options.queue, {"queue": options.queue}, None
        elif options.exchange is not None:
            target: Target = {"exchange": options.exchange, "routing_key": options.routing_key}
            yield options.exchange, target, None
        elif options.topic is not None:
            yield options.topic, {"stream": options.topic}, None
        else:
            topics = columns["topic"]
            if topics.null_count:
                raise SourceError("the topic of a row is null, and there is no option topic")
            found = pc.unique(topics).to_pylist()
            for topic in found:
                chosen = pc.indices_nonzero(pc.equal(topics, topic)) if len(found) > 1 else None
                yield topic, {"stream": topic}, chosen

    def _cut(
        self, name: str, target: Target, columns: Mapping[str, pa.Array]
    ) -> Iterator[_Request]:
        rows = len(columns["value"])
        size = sum(column.nbytes for column in columns.values())
        # Parts alike: a small rest would wait for a round trip and a flush of its own.
        parts = max(
            math.ceil(rows / self._options.request_rows_max),
            math.ceil(size / self._options.request_bytes_max),
        )
        step = math.ceil(rows / min(parts, rows))
        for start in range(0, rows, step):
            part = {n: column.slice(start, step) for n, column in columns.items()}
            count = min(step, rows - start)
            done = self._sent.get(name, 0)
            if done + count > 1 << ROWS_OF_TASK_BITS:
                raise SourceError(f"a task can write {1 << ROWS_OF_TASK_BITS} rows in a batch")
            self._sent[name] = done + count
            frame = _frame(part, count, by_key=target.get("routing_key", "") is None)
            sequence = self._base + done
            named = self._options.idempotent
            yield _Request(
                frame=frame,
                target=target,
                producer=self._producer if named else None,
                sequence=sequence,
                digest=_digest(sequence, frame) if named else None,
                mandatory="exchange" in target and self._options.fail_on_unroutable,
            )

    def _message_ids(self, columns: Mapping[str, pa.Array], rows: int) -> pa.Array | None:
        """Returns the ids as bytes: those of the user's column, or made of batch, task and row."""
        given = columns.get("message_id")
        if given is not None:
            return plain_binary(given)
        if not self._options.message_ids:
            return None
        ones = pa.repeat(pa.scalar(1, pa.int64()), rows)
        numbers = pc.cumulative_sum(ones, start=self._taken - 1).cast(pa.string())
        padded = pc.utf8_lpad(numbers, width=_ROW_DIGITS, padding="0")
        prefix = pa.scalar(self._id_prefix, pa.string())
        ids = pc.binary_join_element_wise(prefix, padded, pa.scalar("", pa.string()))
        return plain_binary(ids)


def _digest(sequence: int, frame: bytes) -> bytes:
    """Stands for the rows of a request and their place. The frame is a function of the rows."""
    found = hashlib.sha256(sequence.to_bytes(8, "little"))
    found.update(frame)
    return found.digest()[:DIGEST_BYTES]


def _frame(columns: Mapping[str, pa.Array], rows: int, *, by_key: bool) -> bytes:
    """Returns a columnar frame of the columns that a message is made of. Columns stand in bit
    order."""
    used = bits.VALUE
    buffers: list[pa.Buffer | bytes] = []
    key = columns.get("key")
    if key is not None:
        used |= bits.KEY
        buffers += binary_buffers(plain_binary(key))
    # A null value is a tombstone.
    buffers += binary_buffers(plain_binary(columns["value"]))
    headers = columns.get("headers")
    if headers is not None:
        used |= bits.HEADERS
        buffers += header_buffers(headers)
    if by_key:
        routing_keys = columns["routing_key"]
        if routing_keys.null_count:
            raise SourceError("the routing_key of a row is null, and there is no option routingKey")
        used |= bits.ROUTING_KEY
        buffers += binary_buffers(plain_binary(routing_keys))[1:]
    ids = columns.get("message_id")
    if ids is not None:
        used |= bits.PROPERTIES
        buffers += binary_buffers(_properties_of(ids))[1:]
    return build_frame(used, rows, 0, rows, buffers)


def _properties_of(ids: pa.Array) -> pa.Array:
    """Content header payloads that set the message id, where it is not null, and persistence."""
    lengths = pc.binary_length(ids)
    longest = pc.max(lengths).as_py()
    if longest is not None and longest > _MESSAGE_ID_BYTES_MAX:
        raise SourceError(f"a message_id has {longest} bytes; {_MESSAGE_ID_BYTES_MAX} are allowed")
    prefix = _PROPERTIES_CLASS.to_bytes(2, "big") + bytes(10)
    with_id = prefix + (_FLAG_DELIVERY_MODE | _FLAG_MESSAGE_ID).to_bytes(2, "big")
    without = prefix + _FLAG_DELIVERY_MODE.to_bytes(2, "big")
    made = pc.binary_join_element_wise(
        pa.scalar(with_id + bytes([_PERSISTENT]), pa.binary()),
        _LENGTH_BYTES.take(lengths),
        ids,
        pa.scalar(b"", pa.binary()),
    )
    return pc.fill_null(made, pa.scalar(without + bytes([_PERSISTENT]), pa.binary()))
