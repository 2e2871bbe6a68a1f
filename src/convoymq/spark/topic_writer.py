"""Writes of a task to an ordered topic: with sequences per logical partition, once.

A task is a producer with a name: that of the query (or of the batch write) and the task's number.
Each attempt is a session of it, so an attempt that was given up for dead stores nothing any more.
Every message has a source position, which the topic keeps of the last one by logical partition:
micro-batch, place in the session's order, number of rows of the logical partition in this attempt,
and a digest of these rows. A repeat learns it when its session begins. When its first rows are the
same, they are there and are passed over. When they are others, because their order has changed, all
are written: rows may come twice then, and none is lost (ADR 0029, ADR 0070).
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from convoymq.client.errors import Unavailable
from convoymq.spark import clients
from convoymq.spark.errors import SourceError
from convoymq.spark.frames import plain_binary

if TYPE_CHECKING:
    from convoymq.client.producer_thread import TopicReceipt
    from convoymq.spark.options import SinkOptions

DIGEST_BYTES = 16
REQUESTS_UNDER_WAY = 4
"""So many times `convoymq.produce.maxBytes` is under way at most."""
_POSITION = struct.Struct(f">QQQ{DIGEST_BYTES}s")

Headers = Mapping[str, bytes]


class Producer(Protocol):
    """Part of a `client.topic_producer.TopicProducer` that is needed here."""

    @property
    def pending(self) -> int:
        """Returns the number of messages without an outcome."""

    def send(
        self,
        key: bytes | str,
        body: bytes,
        headers: Headers | None = None,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[TopicReceipt]:
        """Publishes a message."""

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every message has an outcome."""

    def last_positions(self) -> dict[int, bytes]:
        """Returns the position of the last message that is stored, by logical partition."""

    def close(self, timeout: float | None = None) -> None:
        """Ends it."""


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


@dataclass(frozen=True, slots=True)
class Row:
    """One message."""

    key: bytes
    body: bytes
    headers: Headers | None

    def digest(self, before: bytes) -> bytes:
        """Returns a digest of it and all rows before it."""
        found = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
        parts = [self.key, self.body]
        for name, value in (self.headers or {}).items():
            parts += [name.encode(), value]
        for part in parts:
            found.update(len(part).to_bytes(4, "little"))
            found.update(part)
        return found.digest()


@dataclass(slots=True)
class _Progress:
    """State of one logical partition in an attempt."""

    stored: Position | None
    """Of attempts before, in the same micro-batch; None when it makes no difference any more."""
    place: int = 0
    count: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    held: list[tuple[Row, bytes]] = field(default_factory=list)
    """Rows, each with the digest, of which it is not known yet whether they are stored."""


class TopicWrite:
    """The rows of one task."""

    def __init__(
        self,
        producer: Producer,
        options: SinkOptions,
        lp_of: Callable[[bytes], int],
        batch_id: int,
    ) -> None:
        """Raises SourceError: a later micro-batch of the query is stored."""
        self._producer = producer
        self._options = options
        self._timeout_s = options.connection.timeout_ms / 1000
        self._lp_of = lp_of
        self._batch = batch_id
        self._progress: dict[int, _Progress] = {}
        self._stored: dict[int, Position] = {}
        self._futures: deque[tuple[Future[TopicReceipt], int]] = deque()
        self._bytes = 0
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
        """Sends rows. Raises SourceError, ClientError."""
        for row in rows_of(batch):
            self.rows += 1
            self._add(row)

    def _add(self, row: Row) -> None:
        if not self._options.idempotent:
            self._send(row, None)
            return
        lp = self._lp_of(row.key)
        progress = self._progress.get(lp)
        if progress is None:
            stored = self._stored.get(lp)
            progress = self._progress[lp] = _Progress(stored)
            progress.place = 0 if stored is None else stored.place
        progress.digest = row.digest(progress.digest)
        stored = progress.stored
        if stored is None:
            self._send_next(progress, row, progress.count + 1, progress.digest)
            progress.count += 1
            return
        progress.count += 1
        progress.held.append((row, progress.digest))
        if progress.count < stored.count:
            return
        if progress.digest == stored.digest:
            self.duplicates += len(progress.held)
            progress.held.clear()
        self._release(progress)

    def _release(self, progress: _Progress) -> None:
        """Sends what was held: the attempt before had other rows."""
        progress.stored = None
        held, progress.held = progress.held, []
        for number, (row, digest) in enumerate(held, 1):
            self._send_next(progress, row, number, digest)

    def _send_next(self, progress: _Progress, row: Row, count: int, digest: bytes) -> None:
        progress.place += 1
        self._send(row, Position(self._batch, progress.place, count, digest).pack())

    def _send(self, row: Row, position: bytes | None) -> None:
        size = len(row.key) + len(row.body)
        self._bytes += size
        self._settle(REQUESTS_UNDER_WAY * self._options.request_bytes_max)
        try:
            future = self._producer.send(
                row.key, row.body, row.headers, position, timeout=self._timeout_s
            )
        except ValueError as error:
            raise SourceError(f"a row can't be published to the topic: {error}") from error
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
        for progress in self._progress.values():
            if progress.held:
                # Fewer rows than before: others, that is.
                self._release(progress)
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
    done = False
    try:
        write = TopicWrite(producer, options, route.lp_of, batch_id)
        for batch in batches:
            write.add(batch)
        write.finish()
        done = True
    finally:
        producer.close(None if done else 0.0)
    return write.rows, write.duplicates


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yields the messages of a record batch. Raises SourceError: one has no key, or headers that a
    topic does not keep."""
    names = batch.schema.names
    keys = plain_binary(batch.column(names.index("key"))).to_pylist()
    # A null value is an empty body.
    bodies = plain_binary(batch.column(names.index("value"))).to_pylist()
    headers: list[list[dict[str, object]] | None] = [None] * batch.num_rows
    if "headers" in names:
        headers = batch.column(names.index("headers")).to_pylist()
    for key, body, fields in zip(keys, bodies, headers, strict=True):
        if not key:
            raise SourceError("the key of a row is null or empty: a topic orders rows by key")
        yield Row(key, body or b"", None if not fields else _headers_of(fields))


def _headers_of(fields: list[dict[str, object]]) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for each in fields:
        name, value = each["key"], each["value"]
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise SourceError(f"header {name!r}: a topic takes no nulls in headers")
        if name in made:
            raise SourceError(f"header {name!r} stands twice in a row; a topic takes it once")
        made[name] = value
    return made
