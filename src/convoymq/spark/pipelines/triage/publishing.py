"""Carries out recorded decisions: messages go on, each once.

One task publishes the messages of a batch in their order, as one named producer whose sequences are
the batch's number << 32 plus the number of the message among those that go on. The rows come from
the table, so whoever repeats a batch sends the same rows with the same sequences, and quorum queues
and streams drop what they have (docs/formats/columnar-protocol.md, PRODUCE). Every frame is
`mandatory`: one with a row that has no queue is refused whole, and may come again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from convoymq.client.errors import ClientError
from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import build_frame
from convoymq.spark import clients
from convoymq.spark.errors import SourceError
from convoymq.spark.frames import binary_buffers, plain_binary
from convoymq.spark.pipelines.triage import deaths

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from convoymq.client import Client
    from convoymq.spark.options import Connection

FRAME_ROWS_MAX = 2000
FRAME_BYTES_MAX = 4 << 20
BATCH_BITS = 32
"""A sequence is the batch's number, shifted by this, plus the message's number."""
_COLUMNS = (
    "value", "content_header", "action", "deaths", "republish_count", "keep_deaths",
    "target_exchange", "target_routing_key",
)  # fmt: skip
_RESULT = pa.schema([("rows", pa.int64()), ("duplicates", pa.int64())])


class PublishError(SourceError):
    """The broker does not take messages of a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Publisher that tasks run."""

    connection: Connection
    producer: str
    batch: int = 0

    def check(self, rows: DataFrame) -> None:
        """Asks the broker whether it would take the messages that go on. Raises what it says."""
        _going(rows).mapInArrow(partial(_checked, self), "rows bigint, duplicates bigint").collect()

    def publish(self, rows: DataFrame) -> tuple[int, int]:
        """Publishes the messages that go on, in their order.

        Returns:
            How many, and how many of them were in their queues already (summed over queues).
        """
        going = _going(rows).coalesce(1).sortWithinPartitions("offset")
        done = going.mapInArrow(partial(_published, self), "rows bigint, duplicates bigint")
        found = done.collect()
        return sum(row.rows for row in found), sum(row.duplicates for row in found)


def _going(rows: DataFrame) -> DataFrame:
    return rows.where("action <> 'drop'").select("offset", *_COLUMNS)


def _checked(publisher: Publisher, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task."""
    client = clients.connect(publisher.connection)
    for frame, rows, what in _frames(batches):
        try:
            client.check_produce(frame, producer=publisher.producer, mandatory=True)
        except ClientError as error:
            raise PublishError(f"nothing was done: {what}: {error}") from None
        yield _result(rows, 0)


def _published(publisher: Publisher, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: the only one."""
    client = clients.connect(publisher.connection)
    sequence = publisher.batch << BATCH_BITS
    for frame, rows, what in _frames(batches):
        try:
            done = _send(client, frame, publisher.producer, sequence)
        except ClientError as error:
            raise PublishError(f"{what}: {error}. Start again to go on") from None
        sequence += rows
        assert sequence < (publisher.batch + 1) << BATCH_BITS, "sequences of the next batch"
        yield _result(rows, done)


def _send(client: Client, frame: bytes, producer: str, sequence: int) -> int:
    done = client.produce(frame, producer=producer, sequence=sequence, mandatory=True)
    return done.duplicates


def _frames(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[bytes, int, str]]:
    """Yields (frame, its rows, where the first of them goes) of messages that go on."""
    for batch in batches:
        columns = {name: batch.column(name) for name in _COLUMNS}
        headers = pa.array([_header(row) for row in _rows(columns)], pa.binary())
        lengths = pc.add(pc.binary_length(columns["value"]), pc.binary_length(headers))
        sizes = pc.fill_null(lengths, 0).to_pylist()
        for start, end in _cuts(sizes):
            buffers: list[pa.Buffer | bytes] = [
                *binary_buffers(plain_binary(columns["value"].slice(start, end - start)))
            ]
            names = []
            for name in ("target_exchange", "target_routing_key"):
                column = columns[name].slice(start, end - start)
                names.append(column[0].as_py())
                buffers += binary_buffers(plain_binary(column))[1:]
            buffers += binary_buffers(headers.slice(start, end - start))[1:]
            used = bits.VALUE | bits.EXCHANGE | bits.ROUTING_KEY | bits.PROPERTIES
            frame = build_frame(used, end - start, 0, end - start, buffers)
            place = (
                f"{end - start} messages from exchange {names[0]!r}, routing key {names[1]!r} on"
            )
            yield frame, end - start, place


def _rows(columns: dict[str, pa.Array]) -> Iterator[tuple[bytes, str, int, int, bool]]:
    names = ("content_header", "action", "deaths", "republish_count", "keep_deaths")
    return zip(*(columns[name].to_pylist() for name in names), strict=True)


def _header(row: tuple[bytes, str, int, int, bool]) -> bytes:
    header, action, died, count, keep = row
    return deaths.outgoing(
        header, republish=action == "republish", deaths=died, count=count, keep_deaths=keep
    )


def _cuts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows within the bounds of a frame, each of at least one."""
    start = size = 0
    for i, each in enumerate(sizes):
        if i > start and (i - start == FRAME_ROWS_MAX or size + each > FRAME_BYTES_MAX):
            yield start, i
            start, size = i, 0
        size += each
    if len(sizes) > start:
        yield start, len(sizes)


def _result(rows: int, duplicates: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"rows": rows, "duplicates": duplicates}], schema=_RESULT)
