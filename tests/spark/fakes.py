"""A broker in memory behind the client's interface: the columnar protocol without sockets.

Frames are real ones, built and checked by the kernel; the rules of reservations are the broker's
own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from convoymq.client import errors
from convoymq.client.results import FetchResult, ProduceResult, QueueInfo
from convoymq.client.topics import TopicRoute, route_of
from convoymq.edges.columnar.topic_routes import lineage_rows
from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.queues.reservations import REASONS, Refusal, Reservation, Reservations
from convoymq.queues.sessions import Written
from convoymq.spark.frames import binary_buffers, header_buffers
from convoymq.topics.rules.changes import Kind
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.lineage import PartitionState
from tests.unit.topics.rules.histories import History

T0_MS = 1_700_000_000_000


@dataclass
class Message:
    """One message as the broker keeps it."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] | None = None
    exchange: str = ""
    routing_key: str = ""
    properties: bytes = b"\x00\x3c" + bytes(12)
    time_ms: int = T0_MS
    acquired: int = 0
    delivered: int = 0


def frame_of(
    columns: int, base: int, messages: Sequence[Message], after: int | None = None
) -> ColumnFrame:
    """The frame that a server would answer with."""
    rows = len(messages)
    buffers: list[Any] = []

    def numbers(values: Iterable[int], kind: pa.DataType) -> None:
        buffers.append(pa.array(values, kind).buffers()[1] or b"")

    def text(values: Iterable[str]) -> None:
        buffers.extend(binary_buffers(pa.array(values, pa.string()))[1:])

    if columns & bits.OFFSET:
        buffers.append(b"")
    if columns & bits.TIMESTAMP:
        numbers((m.time_ms * 1000 for m in messages), pa.int64())
    if columns & bits.KEY:
        buffers.extend(binary_buffers(pa.array((m.key for m in messages), pa.binary())))
    if columns & bits.VALUE:
        buffers.extend(binary_buffers(pa.array((m.value for m in messages), pa.binary())))
    if columns & bits.HEADERS:
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        rows_of_headers = [
            None if m.headers is None else [{"key": k, "value": v} for k, v in m.headers]
            for m in messages
        ]
        buffers.extend(header_buffers(pa.array(rows_of_headers, kind)))
    if columns & bits.EXCHANGE:
        text(m.exchange for m in messages)
    if columns & bits.ROUTING_KEY:
        text(m.routing_key for m in messages)
    if columns & bits.PROPERTIES:
        array = pa.array((m.properties for m in messages), pa.binary())
        buffers.extend(binary_buffers(array)[1:])
    if columns & bits.DELIVERY_COUNT:
        numbers((m.delivered for m in messages), pa.int32())
    if columns & bits.REDELIVERED:
        numbers((m.acquired for m in messages), pa.int32())
    end = base + rows if after is None else after
    return ColumnFrame(build_frame(columns, rows, base, end, buffers))


@dataclass
class FakeStream:
    """A stream: messages from offset `first` on."""

    group: int
    messages: list[Message] = field(default_factory=list)
    first: int = 0
    written: dict[str, Written] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    sizes_known: bool = True
    """Whether the node that is asked has a replica."""

    @property
    def end(self) -> int:
        return self.first + len(self.messages)

    def add(self, *values: bytes, step_ms: int = 1, **fields: Any) -> None:
        for value in values:
            time_ms = T0_MS + self.end * step_ms
            self.messages.append(Message(value=value, time_ms=time_ms, **fields))

    def drop(self, count: int) -> None:
        """Retention."""
        del self.messages[:count]
        self.first += count


class FakeQueue:
    """A queue whose reservations follow the broker's rules; what they hold are messages."""

    def __init__(self) -> None:
        self.ready: list[Message] = []
        self.reservations = Reservations(self)
        self.epoch = 0
        self.time_ms = 0
        self.commands: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.producers: dict[str, int] = {}
        """The last sequence of each."""

    def add(self, *values: bytes) -> None:
        self.ready += [Message(value=value) for value in values]

    def expire(self, later_ms: int) -> None:
        """Time passes."""
        self.time_ms += later_ms
        self.reservations.expire(self.time_ms)

    def apply(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.commands.append(str(op["op"]))
        self.epoch += 1
        reason, answer = self.reservations.apply(op, self.epoch, self.time_ms)
        if reason is not None:
            raise errors.ReservationGone(REASONS[reason], reason)
        assert isinstance(answer, dict)
        return answer

    # --- queues.reservations.Holder

    def reservation_refusal(self) -> str | None:
        return None

    def reservation_opened(self, reservation: Reservation) -> None:
        reservation.held = {}

    def reservation_closed(self, reservation: Reservation) -> None:
        assert not reservation.held

    def reservation_take(self, reservation: Reservation, limit: int) -> int:
        taken, self.ready = self.ready[:limit], self.ready[limit:]
        for i, message in enumerate(taken):
            reservation.held[reservation.next + i] = message
        return len(taken)

    def reservation_settle(self, reservation: Reservation, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            del reservation.held[offset]

    def reservation_return(
        self, reservation: Reservation, first: int, last: int, failed: bool
    ) -> None:
        returned = [reservation.held.pop(offset) for offset in range(first, last + 1)]
        for message in returned:
            message.acquired += 1
            message.delivered += int(failed)
        self.ready = returned + self.ready


class FakeTopic:
    """An ordered topic: a history, and a stream for each partition."""

    def __init__(self, broker: FakeBroker, name: str, logical: int, partitions: int) -> None:
        self.broker = broker
        self.name = name
        self.logical = logical
        self.created_ms = T0_MS + broker.groups
        self.history = History.begin(logical, partitions)
        self.lost: set[int] = set()
        self._make()

    def stream(self, pid: int) -> FakeStream:
        return self.broker.streams[f"amq.partition.{self.name}.{pid}"]

    def publish(self, *pairs: tuple[str, bytes], **fields: Any) -> None:
        """Stores (key, value) in the partition of each key."""
        for key, value in pairs:
            lp = logical_partition(key.encode(), self.logical)
            fields = {"exchange": self.name, "routing_key": key, **fields}
            self.stream(self.history.route.pid_of(lp)).add(value, **fields)

    def split(self, pid: int, *cuts: int) -> None:
        self.history.split(pid, *cuts, messages=self.stream(pid).end)
        self._make()

    def merge(self, *pids: int) -> None:
        change = self.history.plan(Kind.MERGE, pids)
        self.history.run(change, [self.stream(pid).end for pid in pids])
        self._make()

    def delete(self, pid: int) -> None:
        """Retention deletes a closed partition."""
        self.history.lineage.partition(pid).state = PartitionState.DELETED
        del self.broker.streams[f"amq.partition.{self.name}.{pid}"]

    def _make(self) -> None:
        for pid in self.history.open_pids:
            name = f"amq.partition.{self.name}.{pid}"
            if name not in self.broker.streams:
                self.broker.stream(name)

    def route(self) -> TopicRoute:
        route = self.history.route
        answer = {
            "vhost": "/",
            "topic": self.name,
            "version": route.version,
            "logical": self.logical,
            "hash_id": 1,
            "hash_seed": 0,
            "mode": "strict",
            "created_ms": self.created_ms,
            "ranges": [[span.lo, span.hi, span.pid] for span in route.spans],
            "partitions": lineage_rows(self.history.lineage, self.lost),
        }
        return route_of(answer)


class FakeBroker:
    """Streams and queues by name, and how many calls there were."""

    def __init__(self) -> None:
        self.streams: dict[str, FakeStream] = {}
        self.queues: dict[str, FakeQueue] = {}
        self.topics: dict[str, FakeTopic] = {}
        self.groups = 0
        self.calls: list[str] = []
        self.down = False
        self.refuse_writes: set[str] = set()
        self.refuse_reads: set[str] = set()
        self.behind: dict[str, FakeStream] | None = None
        """What a node whose metadata is behind shows; None = none is."""

    def stream(self, name: str, *values: bytes) -> FakeStream:
        """Declares a stream (again: with another group)."""
        self.groups += 1
        self.streams[name] = FakeStream(self.groups)
        self.streams[name].add(*values)
        return self.streams[name]

    def topic(self, name: str, *, logical: int = 16, partitions: int = 1) -> FakeTopic:
        """Creates a topic (again: another one of that name)."""
        for stream in [each for each in self.streams if each.startswith(f"amq.partition.{name}.")]:
            del self.streams[stream]
        self.topics[name] = FakeTopic(self, name, logical, partitions)
        return self.topics[name]

    def queue(self, name: str, *values: bytes) -> FakeQueue:
        """Declares a queue."""
        self.queues[name] = FakeQueue()
        self.queues[name].add(*values)
        return self.queues[name]


class FakeClient:
    """`convoymq.client.Client` as far as the data sources use it."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker

    def _called(self, name: str) -> None:
        self.broker.calls.append(name)
        if self.broker.down:
            raise errors.Unavailable("no answer from fake:1 within 1 s; last: refused")

    def metadata(
        self,
        names: Iterable[str] | None = None,
        pattern: str | None = None,
        types: Sequence[str] = ("stream",),
        *,
        current: bool = False,
    ) -> list[QueueInfo]:
        self._called("metadata")
        found = []
        streams = self.broker.streams
        if self.broker.behind is not None and not current:
            streams = self.broker.behind
        for name, stream in streams.items():
            if name in self.broker.refuse_reads:
                continue
            found.append(
                QueueInfo(
                    name=name,
                    type="partition" if name.startswith("amq.partition.") else "stream",
                    group=stream.group,
                    leader="a",
                    members=("a",),
                    first=stream.first,
                    next=stream.end,
                    bytes=sum(len(m.value or b"") for m in stream.messages)
                    if stream.sizes_known
                    else None,
                )
            )
        for name, queue in self.broker.queues.items():
            found.append(
                QueueInfo(
                    name=name,
                    type="quorum",
                    group=0,
                    leader="a",
                    members=("a",),
                    first=None,
                    next=None,
                    bytes=None,
                    arguments=queue.arguments,
                )
            )
        wanted = None if names is None else set(names)
        return [
            info
            for info in sorted(found, key=lambda info: info.name)
            if info.type in types
            and (wanted is None or info.name in wanted)
            and (pattern is None or re.fullmatch(pattern, info.name))
        ]

    def topic_route(
        self, topic: str, *, newer_than: int = -1, wait_ms: int = 0, lineage: bool = True
    ) -> TopicRoute:
        self._called("topic_route")
        if topic in self.broker.refuse_reads:
            raise errors.AccessRefused(f"read access to {topic} refused")
        if topic not in self.broker.topics:
            raise errors.NotFound(f"no topic '{topic}' in vhost '/'")
        return self.broker.topics[topic].route()

    def offsets(
        self, queries: Iterable[tuple[str, str, int | None]]
    ) -> list[tuple[int | None, int | None]]:
        self._called("offsets")
        answers: list[tuple[int | None, int | None]] = []
        for name, what, ms in queries:
            stream = self._stream(name)
            if what == "earliest":
                answers.append((stream.first, None))
            elif what == "latest":
                answers.append((stream.end, None))
            else:
                assert ms is not None
                later = (i for i, m in enumerate(stream.messages) if m.time_ms >= ms)
                at = next(later, None)
                answers.append((None, None) if at is None else (stream.first + at, ms))
        return answers

    def go_closer(self, queue: str) -> None:
        """There is one node."""

    def fetch(
        self,
        stream: str,
        offset: int,
        *,
        end: int | None = None,
        max_rows: int = 1000,
        max_bytes: int = 1 << 20,
        columns: int = 15,
        wait_ms: int = 0,
        compression: str = "",
        local: bool = False,
        group: int = 0,
    ) -> FetchResult:
        self._called("fetch")
        kept = self._stream(stream)
        if group not in (0, kept.group):
            raise errors.Recreated(f"group {group} is gone, now it is {kept.group}", kept.group)
        if not kept.first <= offset <= kept.end:
            raise errors.OffsetOutOfRange("out of range", kept.first, kept.end)
        until = min(kept.end if end is None else end, kept.end, offset + max_rows)
        messages = kept.messages[offset - kept.first : until - kept.first]
        return FetchResult(
            frame=frame_of(columns, offset, messages), first=kept.first, high=kept.end
        )

    def produce(
        self,
        frame: bytes,
        *,
        stream: str | None = None,
        queue: str | None = None,
        exchange: str | None = None,
        routing_key: str | None = None,
        producer: str | None = None,
        sequence: int = 0,
        digest: bytes | None = None,
        mandatory: bool = False,
    ) -> ProduceResult:
        self._called("produce")
        parsed = ColumnFrame(frame)
        target = stream or queue or exchange or ""
        if target in self.broker.refuse_writes:
            raise errors.AccessRefused(f"write access to {target} refused")
        messages = messages_of(parsed, routing_key)
        if stream is not None:
            kept: Any = self._stream(stream)
            duplicates = 0
            if producer is not None:
                assert digest is not None
                writer = kept.written.setdefault(producer, Written())
                duplicates = writer.repeated(sequence, len(messages), digest)
            for message in messages[duplicates:]:
                message.time_ms = T0_MS + kept.end
                kept.messages.append(message)
            return ProduceResult(count=len(messages), duplicates=duplicates, unroutable=0)
        names = [queue if queue is not None else message.routing_key for message in messages]
        unroutable = sum(name not in self.broker.queues for name in names)
        if mandatory and unroutable:
            key = next(name for name in names if name not in self.broker.queues)
            raise errors.PreconditionFailed(
                f"exchange '{exchange}' has no queue for routing key '{key}'; nothing was published"
            )
        duplicates = 0
        for i, (name, message) in enumerate(zip(names, messages, strict=True)):
            found = self.broker.queues.get(name)
            if found is None:
                continue
            if producer is not None and digest is None:
                if sequence + i <= found.producers.get(producer, -1):
                    duplicates += 1
                    continue
                found.producers[producer] = sequence + i
            found.ready.append(message)
        return ProduceResult(count=len(messages), duplicates=duplicates, unroutable=unroutable)

    def check_produce(
        self, frame: bytes, *, producer: str | None = None, mandatory: bool = False
    ) -> int:
        self._called("check_produce")
        keys = [message.routing_key for message in messages_of(ColumnFrame(frame), None)]
        unroutable = [key for key in keys if key not in self.broker.queues]
        if mandatory and unroutable:
            raise errors.PreconditionFailed(f"no queue for routing key {unroutable[0]!r}")
        return len(unroutable)

    def store_offset(self, stream: str, consumer: str, offset: int) -> None:
        self._called("store_offset")
        self._stream(stream).offsets[consumer] = offset

    def reservation(self, queue: str, op: str, **fields: Any) -> dict[str, Any]:
        self._called(f"reservation {op}")
        return self._queue(queue).apply({**fields, "op": op})

    def reservation_fetch(
        self,
        queue: str,
        reservation: str,
        epoch: int,
        offset: int,
        *,
        end: int | None,
        max_rows: int = 1000,
        max_bytes: int = 1 << 20,
        columns: int = 15,
        compression: str = "",
    ) -> FetchResult:
        self._called("reservation_fetch")
        try:
            found = self._queue(queue).reservations.reading(reservation, epoch, offset)
        except Refusal as refusal:
            raise errors.ReservationGone(REASONS[refusal.reason], refusal.reason) from None
        until = min(found.next if end is None else end, offset + max_rows)
        messages = [found.held[i] for i in range(offset, until)]
        return FetchResult(
            frame=frame_of(columns, offset, messages), first=found.first, high=found.next
        )

    def browse(
        self,
        queue: str,
        cursor: Any = None,
        *,
        max_rows: int = 1000,
        max_bytes: int = 1 << 20,
        columns: int = 15,
        compression: str = "",
    ) -> tuple[FetchResult, Any]:
        self._called("browse")
        ready = self._queue(queue).ready
        start = cursor or 0
        messages = ready[start : start + max_rows]
        after = start + len(messages)
        frame = frame_of(columns, start, messages)
        return FetchResult(frame=frame, first=0, high=0), after if after < len(ready) else None

    def _stream(self, name: str) -> FakeStream:
        if name in self.broker.refuse_reads:
            raise errors.AccessRefused(f"read access to {name} refused")
        if name not in self.broker.streams:
            raise errors.NotFound(f"no stream {name}")
        return self.broker.streams[name]

    def _queue(self, name: str) -> FakeQueue:
        if name not in self.broker.queues:
            raise errors.NotFound(f"no queue {name}")
        return self.broker.queues[name]


def messages_of(frame: ColumnFrame, routing_key: str | None) -> list[Message]:
    """The messages of a PRODUCE frame."""

    def cells(column: int) -> list[bytes | None]:
        if not frame.columns & column:
            return [None] * frame.rows
        buffers = frame.buffers(column)
        validity, offsets, data = buffers if len(buffers) == 3 else (b"", *buffers)
        ends = offsets.cast("i")
        made: list[bytes | None] = []
        for i in range(frame.rows):
            valid = not len(validity) or validity[i // 8] >> i % 8 & 1
            made.append(bytes(data[ends[i] : ends[i + 1]]) if valid else None)
        return made

    keys, values = cells(bits.KEY), cells(bits.VALUE)
    routing_keys, properties = cells(bits.ROUTING_KEY), cells(bits.PROPERTIES)
    headers = headers_of(frame) if frame.columns & bits.HEADERS else [None] * frame.rows
    return [
        Message(
            value=values[i],
            key=keys[i],
            headers=headers[i],
            routing_key=(routing_keys[i] or b"").decode() if routing_key is None else routing_key,
            properties=properties[i] or b"",
        )
        for i in range(frame.rows)
    ]


def headers_of(frame: ColumnFrame) -> list[list[tuple[str, bytes | None]] | None]:
    """The headers column, row by row."""
    validity, lists, name_ends, names, value_validity, value_ends, values = frame.buffers(
        bits.HEADERS
    )
    table, name_at, value_at = lists.cast("i"), name_ends.cast("i"), value_ends.cast("i")
    made: list[list[tuple[str, bytes | None]] | None] = []
    for i in range(frame.rows):
        if len(validity) and not validity[i // 8] >> i % 8 & 1:
            made.append(None)
            continue
        row: list[tuple[str, bytes | None]] = []
        for j in range(table[i], table[i + 1]):
            name = bytes(names[name_at[j] : name_at[j + 1]]).decode()
            null = len(value_validity) and not value_validity[j // 8] >> j % 8 & 1
            row.append((name, None if null else bytes(values[value_at[j] : value_at[j + 1]])))
        made.append(row)
    return made
