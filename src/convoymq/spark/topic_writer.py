"""Writes of a task to an ordered topic: with sequences per logical partition, once.

A task is a producer with a name: that of the query (or of the batch write) and the task's number.
Each attempt is a session of it, so an attempt that was given up for dead stores nothing any more.
Rows are sorted by logical partition, some thousands at a time, and sent in chunks of one of them:
nothing is done row by row. The topic keeps a source position of the last chunk that is stored by
logical partition: micro-batch, place in the session's order, number of rows of the logical
partition in this attempt, and a digest of these rows, however they were cut. A repeat learns it
when its session begins. When its first rows are the same, they are there and are passed over. When
they are others, because their order has changed, all are written: rows may come twice then, and
none is lost (ADR 0029, ADR 0070, ADR 0094).
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type

from convoymq.client.errors import Unavailable
from convoymq.client.topic_rows import (
    ORDER_KEY,
    ROUTING_KEY_BYTES_MAX,
    HeaderTexts,
    RowBlock,
    RowChunk,
    Texts,
    is_routing_key,
)
from convoymq.spark import clients
from convoymq.spark.errors import SourceError
from convoymq.spark.frames import binary_buffers, header_buffers, plain_binary
from convoymq.spark.schema import HEADERS
from convoymq.spark.topic_frames import logical_partitions

if TYPE_CHECKING:
    from convoymq.client.producer_thread import TopicReceipt
    from convoymq.client.topic_producer import TopicProducer
    from convoymq.spark.options import SinkOptions

DIGEST_BYTES = 16
REQUESTS_UNDER_WAY = 4
"""So many times `convoymq.produce.maxBytes` is under way at most."""
SORTED_ROWS_MAX = 50_000
SORTED_BYTES_MAX = 16 << 20
"""Of what is sorted at a time."""
CHUNK_ROWS_MAX = 500
CHUNK_BYTES_MAX = 256 << 10
"""A row that is larger goes alone."""
_POSITION = struct.Struct(f">QQQ{DIGEST_BYTES}s")
_LENGTH = pa.binary(4)
_EMPTY = pa.scalar(b"", pa.binary())
_NO_LENGTH = pa.scalar(b"\xff\xff\xff\xff", pa.binary())


@dataclass(frozen=True, slots=True)
class Position:
    """Source position of a message."""

    batch: int
    place: int
    """Rises with every message of the logical partition in the micro-batch, over all attempts."""
    count: int
    """Rows of the logical partition in this attempt so far."""
    digest: bytes
    """Of these rows."""

    def pack(self) -> bytes:
        """Returns bytes that compare as batches and places do."""
        return _POSITION.pack(self.batch, self.place, self.count, self.digest)

    @classmethod
    def unpack(cls, packed: bytes) -> Position:
        """Returns what was packed. Raises SourceError."""
        try:
            return cls(*_POSITION.unpack(packed))
        except struct.error:
            raise SourceError(
                "the producer's name of this write is taken by another program: give another "
                "producerName"
            ) from None


class Digest:
    """Of the rows of a logical partition so far, however they are cut."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def update(self, rows: Texts, start: int, end: int) -> bytes:
        """Adds rows in their form for digests; returns the digest of all rows."""
        self._hash.update(rows.data[rows.ends[start] : rows.ends[end]])
        return self._hash.copy().digest()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk, and what is known of the rows up to its end."""

    chunk: RowChunk
    count: int
    digest: bytes


@dataclass(slots=True)
class _Progress:
    """State of one logical partition in an attempt."""

    stored: Position | None
    """Of attempts before, in the same micro-batch; None when it makes no difference any more."""
    place: int = 0
    count: int = 0
    digest: Digest = field(default_factory=Digest)
    held: list[_Piece] = field(default_factory=list)
    """Rows of which it is not known yet whether they are stored."""


class TopicWrite:
    """The rows of one task.

    Args:
        lps_of: returns the logical partitions of keys.
    """

    def __init__(
        self,
        producer: TopicProducer,
        options: SinkOptions,
        lps_of: Callable[[pa.Array], pa.Array],
        batch_id: int,
    ) -> None:
        """Raises SourceError: a later micro-batch of the query is stored."""
        self._producer = producer
        self._options = options
        self._timeout_s = options.connection.timeout_ms / 1000
        self._lps_of = lps_of
        self._batch = batch_id
        self._progress: dict[int, _Progress] = {}
        self._stored: dict[int, Position] = {}
        self._futures: deque[tuple[Future[TopicReceipt], int]] = deque()
        self._bytes = 0
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0
        self.rows = 0
        self.duplicates = 0
        if options.idempotent:
            self._look_back()

    def _look_back(self) -> None:
        for lp, packed in self._producer.last_positions().items():
            found = Position.unpack(packed)
            if found.batch > self._batch:
                raise SourceError(
                    f"topic {self._options.topic} has rows of batch {found.batch} of this query, "
                    f"which is at batch {self._batch}: another driver has gone on, or the "
                    "checkpoint is an older one. idempotent=false writes rows again"
                )
            if found.batch == self._batch:
                self._stored[lp] = found

    def add(self, batch: pa.RecordBatch) -> None:
        """Takes rows. Raises SourceError, ClientError."""
        self._gathered.append(batch)
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._gathered_rows >= SORTED_ROWS_MAX or self._gathered_bytes >= SORTED_BYTES_MAX:
            self._send_gathered()

    def _send_gathered(self) -> None:
        """Sends what was gathered, by logical partition."""
        gathered, self._gathered = self._gathered, []
        self._gathered_rows = self._gathered_bytes = 0
        for batch in _in_bounds(gathered):
            rows = SortedRows.of(batch, self._lps_of)
            start = 0
            for lp, end in rows.groups:
                while start < end:
                    start = self._add(lp, rows, start, end)

    def _add(self, lp: int, rows: SortedRows, start: int, end: int) -> int:
        """Sends or holds the next rows of a logical partition, within bounds; returns where they
        end."""
        end = rows.chunk_end(start, end)
        if not self._options.idempotent:
            self._send(lp, RowChunk(rows.block, start, end), None)
            return end
        progress = self._progress.get(lp)
        if progress is None:
            stored = self._stored.get(lp)
            progress = self._progress[lp] = _Progress(stored)
            progress.place = 0 if stored is None else stored.place
        stored = progress.stored
        if stored is not None:
            # Digests are compared where the attempt before has ended.
            end = min(end, start + max(stored.count - progress.count, 1))
        progress.count += end - start
        digest = progress.digest.update(rows.digested, start, end)
        piece = _Piece(RowChunk(rows.block, start, end), progress.count, digest)
        if stored is None:
            self._send_next(lp, progress, piece)
            return end
        progress.held.append(piece)
        if progress.count >= stored.count:
            if (progress.count, digest) == (stored.count, stored.digest):
                self.duplicates += progress.count
                progress.held.clear()
            self._release(lp, progress)
        return end

    def _release(self, lp: int, progress: _Progress) -> None:
        """Sends what was held: the attempt before had other rows."""
        progress.stored = None
        held, progress.held = progress.held, []
        for piece in held:
            self._send_next(lp, progress, piece)

    def _send_next(self, lp: int, progress: _Progress, piece: _Piece) -> None:
        progress.place += piece.chunk.messages
        position = Position(self._batch, progress.place, piece.count, piece.digest)
        self._send(lp, piece.chunk, position.pack())

    def _send(self, lp: int, chunk: RowChunk, position: bytes | None) -> None:
        size = chunk.size
        self._bytes += size
        self._settle(REQUESTS_UNDER_WAY * self._options.request_bytes_max)
        future = self._producer.send_chunk(lp, chunk, position, timeout=self._timeout_s)
        self._futures.append((future, size))

    def _settle(self, bytes_max: int) -> None:
        """Takes the outcomes that are there, and waits while too much is under way."""
        while self._futures and (self._bytes > bytes_max or self._futures[0][0].done()):
            future, size = self._futures.popleft()
            try:
                future.result(self._timeout_s)
            except TimeoutError:
                raise Unavailable(
                    f"a message has no answer for {self._timeout_s:g} s; {self._producer.pending} "
                    "wait"
                ) from None
            self._bytes -= size

    def finish(self) -> None:
        """Waits until everything is stored. Raises ClientError."""
        self._send_gathered()
        for lp, progress in self._progress.items():
            if progress.held:
                # Fewer rows than before: others, that is.
                self._release(lp, progress)
        pending = self._producer.pending
        while True:
            try:
                self._producer.flush(self._timeout_s)
                break
            except Unavailable:
                if self._producer.pending >= pending:
                    raise
                pending = self._producer.pending
        self._settle(0)


def write_topic(
    options: SinkOptions, batches: Iterator[pa.RecordBatch], name: str, batch_id: int
) -> tuple[int, int]:
    """Writes the rows of a task; returns their number, and how many were there already.

    Args:
        name: of the producer; the same for every attempt.
    """
    assert options.topic is not None
    client = clients.connect(options.connection)
    route = client.topic_route(options.topic, lineage=False)
    producer = clients.topic_producer(
        client, options.topic, name if options.idempotent else None, options.request_rows_max
    )

    def lps_of(keys: pa.Array) -> pa.Array:
        return logical_partitions(keys, route.logical, route.hash_seed)

    done = False
    try:
        write = TopicWrite(producer, options, lps_of, batch_id)
        for batch in batches:
            write.add(batch)
        write.finish()
        done = True
    finally:
        producer.close(None if done else 0.0)
    return write.rows, write.duplicates


# --- rows as columns -------------------------------------------------------------------------


def _in_bounds(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields batches as one, in parts whose columns have 32-bit offsets."""
    if batches:
        for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():
            if batch.num_rows:
                yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRows:
    """Rows by logical partition, those of each in the order in which they came."""

    block: RowBlock
    digested: Texts
    """Each row as it is digested: the length of each part, and the part."""
    groups: list[tuple[int, int]]
    """Logical partition, and where its rows end."""

    @classmethod
    def of(cls, batch: pa.RecordBatch, lps_of: Callable[[pa.Array], pa.Array]) -> SortedRows:
        """Returns the rows of a batch. Raises SourceError: one has no key, or a header without a
        name."""
        names = batch.schema.names
        keys = plain_binary(batch.column(names.index("key")))
        if not pc.all(pc.fill_null(pc.greater(pc.binary_length(keys), 0), False)).as_py():
            raise SourceError("the key of a row is null or empty: a topic orders rows by key")
        lps = lps_of(keys)
        order = pc.sort_indices(lps)
        keys = keys.take(order)
        values = plain_binary(batch.column(names.index("value"))).take(order)
        headers = None
        if "headers" in names:
            headers = batch.column(names.index("headers")).take(order)
        runs = pc.run_end_encode(lps.take(order))
        routing, headers = _routed(keys, headers)
        return cls(
            block=RowBlock(
                _texts_of(routing),
                _texts_of(values),
                None if headers is None else _fields_of(headers),
            ),
            digested=_texts_of(_digested(keys, values, headers)),
            groups=list(zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True)),
        )

    def chunk_end(self, start: int, end: int) -> int:
        """Returns where a chunk ends that begins at a row: in both bounds, but behind it."""
        end = min(end, start + CHUNK_ROWS_MAX)
        ends = self.digested.ends
        if ends[end] - ends[start] > CHUNK_BYTES_MAX:
            end = bisect_right(ends, ends[start] + CHUNK_BYTES_MAX, start, end) - 1
        return max(end, start + 1)


def _routed(keys: pa.Array, headers: pa.Array | None) -> tuple[pa.Array, pa.Array | None]:
    """Returns routing keys and headers of rows. The order key is the routing key where that can
    hold it, else a header. A header of that name that came with a row would be another key."""
    names = [] if headers is None else pc.unique(headers.flatten().field("key")).to_pylist()
    try:
        pa.compute.cast(keys, pa.string())
        fits = (pc.max(pc.binary_length(keys)).as_py() or 0) <= ROUTING_KEY_BYTES_MAX
    except pa.ArrowInvalid:
        fits = False
    if fits and ORDER_KEY not in names:
        return keys, headers
    routing: list[bytes] = []
    fields: list[list[tuple[str, bytes | None]] | None] = []
    given = [None] * len(keys) if headers is None else headers.to_pylist()
    for key, row in zip(keys.to_pylist(), given, strict=True):
        own = [(each["key"], each["value"]) for each in row or () if each["key"] != ORDER_KEY]
        alone = is_routing_key(key)
        routing.append(key if alone else b"")
        fields.append(own if alone else [*own, (ORDER_KEY, key)])
    kind = to_arrow_type(HEADERS)
    return pa.array(routing, pa.binary()), pa.array(
        [[{"key": name, "value": value} for name, value in row or ()] for row in fields], kind
    )


def _texts_of(array: pa.Array) -> Texts:
    _, ends, data = binary_buffers(array)
    nulls = pc.indices_nonzero(pc.is_null(array)).to_pylist() if array.null_count else ()
    return Texts(memoryview(ends).cast("i"), memoryview(data), frozenset(nulls))


def _fields_of(headers: pa.Array) -> HeaderTexts:
    try:
        _, lists, names, name_data, _, values, value_data = header_buffers(headers)
    except ValueError as error:
        raise SourceError(f"a row can't be published to the topic: {error}") from None
    nulls = pc.indices_nonzero(pc.is_null(headers.flatten().field("value"))).to_pylist()
    return HeaderTexts(
        memoryview(lists).cast("i"),
        Texts(memoryview(names).cast("i"), memoryview(name_data)),
        Texts(memoryview(values).cast("i"), memoryview(value_data), frozenset(nulls)),
    )


def _digested(keys: pa.Array, values: pa.Array, headers: pa.Array | None) -> pa.Array:
    """Returns each row as one text, which no other row has."""
    parts = [_length_of(keys), keys, *_nullable(values)]
    if headers is not None:
        fields = headers.flatten()
        names = plain_binary(fields.field("key"))
        texts = plain_binary(fields.field("value"))
        each = pc.binary_join_element_wise(_length_of(names), names, *_nullable(texts), _EMPTY)
        lists = pa.ListArray.from_arrays(_list_ends(headers), each)
        joined = pc.binary_join(lists, _EMPTY)
        parts += [_length_of(joined), joined]
    return pc.binary_join_element_wise(*parts, _EMPTY)


def _nullable(texts: pa.Array) -> list[pa.Array]:
    """Returns length and bytes of each text; a null is not an empty one."""
    known = pc.fill_null(texts, _EMPTY)
    return [pc.if_else(pc.is_null(texts), _NO_LENGTH, _length_of(known)), known]


def _list_ends(headers: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(headers), 0)
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])


def _length_of(texts: pa.Array) -> pa.Array:
    """Returns the length of each text, as four bytes."""
    return pc.binary_length(texts).view(_LENGTH).cast(pa.binary())
