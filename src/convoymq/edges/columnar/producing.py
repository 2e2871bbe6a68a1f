"""PRODUCE: rows of a columnar frame become ENQUEUE commands of ordinary publishers.

A frame is checked and encoded as a whole before its first row is appended, so a refused one leaves
nothing behind. Requests of one connection are appended in the order in which they came. With a
producer's name PRODUCER stands before each ENQUEUE; as rows of higher sequence make the lower ones
repeats, only one request of a name may be under way. Source: ADR 0007 section 5.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from convoymq.edges.columnar.errors import as_error
from convoymq.edges.columnar.fields import Produce, read
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.stream_spans import COLUMNAR, StreamSpans
from convoymq.kernels.batch import CMD_ENQUEUE, CMD_PRODUCER
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_records import encode_enqueue, enqueue_flags
from convoymq.kernels.columns import EXCHANGE, ROUTING_KEY
from convoymq.messages.record import read_stored
from convoymq.model.columnar import ColumnarError, ErrorCode, Frame
from convoymq.model.errors import BrokerError, PreconditionFailed, Unavailable
from convoymq.model.refusals import managed_queue, queue_subject
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.message_properties import check_records
from convoymq.queues.null_events import NullEvents
from convoymq.routing.types import QueueType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from convoymq.edges.columnar.connection import FetchConnection

COMMAND_HEAD = 32
LARGE_PAYLOAD_BYTES = 8 << 20
LARGE_COMPRESSED_BYTES = 64 << 10
"""Payloads above these are checked on a thread; others cost less than the hand-over."""
COMPRESSION_AT = 6
"""Position in a columnar frame of the byte that says whether its body is compressed."""
SEGMENTS_PER_STEP = 64
SEGMENTS_MAX = 100_000
"""Most times that the rows of one request may change their targets; each time costs a command."""
ROUTED_ROWS_MAX = 1 << 20
PRODUCER_BYTES_MAX = 255
UNSERVED_TYPES = ("topic", "partition")
"""Types of queues that take no rows."""
PENDING_BYTES_MAX = 16 << 20
"""Most bytes that one connection may have under way into one queue."""


class Segment(NamedTuple):
    """Rows that go to the same queues."""

    first: int
    rows: int
    exchange: bytes
    key: bytes | None
    """None: each row has its own, from the column."""
    queues: tuple[Queue, ...]


Routes: TypeAlias = Counter[tuple[bytes, tuple[Queue, ...]]]
"""(exchange, queues) -> rows; no queues: they have no route."""


class Command(NamedTuple):
    """An ENQUEUE command that is ready to be appended."""

    first: int
    rows: int
    flags: int
    position: int
    body: bytes
    queues: tuple[Queue, ...]


class _Batch:
    """One request: how many commands are not yet safe, and what became of the others."""

    def __init__(self, spans: StreamSpans | None) -> None:
        self.spans = spans
        self.waiting = 0
        self.appended = False
        self.whole = False
        self.error: BrokerError | None = None
        self.duplicates = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, duplicates: int, error: BrokerError | None) -> None:
        """One command is safe, without the rows that its target had already; or refused."""
        self.waiting -= 1
        self.duplicates += duplicates
        self.error = self.error or error
        self.check()

    def end_spans(self) -> None:
        """The request is answered."""
        if self.spans is not None:
            safe = self.whole and not self.waiting and self.error is None
            self.spans.confirmed(lambda _: False, accepted=safe)

    def check(self) -> None:
        """Ends the wait when the last answer is here, or one that decides."""
        if (self.error or (self.whole and not self.waiting)) and not self.done.done():
            self.done.set_result(None)


class Producing(NullEvents):
    """The publishing side of one connection."""

    def __init__(self, connection: FetchConnection) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._edge = connection.edge
        self._clients: dict[Queue, QueueClient] = {}
        self._blocked: set[QueueClient] = set()
        self._progress = asyncio.Event()
        self._order = asyncio.Lock()
        self._producers: set[str] = set()
        self._tags = itertools.count(1)
        self._tagged: dict[int, Callable[[int, BrokerError | None], None]] = {}

    def sessions(self) -> list[int]:
        """Sessions of this connection."""
        return [client.session for client in self._clients.values()]

    def close(self) -> None:
        """The connection is gone; what was appended goes on without it."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._progress.set()

    # --- the request -----------------------------------------------------------------------

    async def produce(self, frame: Frame) -> dict[str, object]:
        """Answers PRODUCE when every row is safe.

        Raises:
            ColumnarError, BrokerError: nothing was appended, unless the details have `maybe`.
        """
        request = read(Produce, frame.map)
        _check(request)
        name = request.producer
        if name is not None and name in self._producers:
            raise ColumnarError(
                ErrorCode.PRECONDITION_FAILED,
                f"a request of producer {name!r} is under way; its sequences must rise",
            )
        spans = StreamSpans.of(self._broker.spans, self._connection.vhost, COLUMNAR)
        batch = _Batch(spans)
        if name is not None:
            self._producers.add(name)
        try:
            async with self._order:
                unroutable, rows = await self._append_all(request, frame, batch)
            await self._until_safe(batch)
        except BrokerError as error:
            if not batch.appended:
                raise
            told = as_error(error)
            told.details["maybe"] = True
            raise told from error
        finally:
            batch.end_spans()
            if name is not None:
                self._producers.discard(name)
        self._edge.messages.confirmed += rows
        self._edge.counters.rows_in += rows
        return {"count": rows, "duplicates": batch.duplicates, "unroutable": unroutable}

    async def check(self, frame: Frame) -> dict[str, object]:
        """Answers CHECK_PRODUCE: whether PRODUCE would take these rows now. Publishes nothing.

        Raises:
            ColumnarError, BrokerError: it would not.
        """
        request = read(Produce, frame.map)
        _check(request)
        columns = await self.open_frame(frame.payload)
        segments, routes = await self._route(request, columns)
        await self._encode(columns, segments)
        return {"count": int(columns.rows), "unroutable": _unrouted(routes)}

    async def _append_all(self, request: Produce, frame: Frame, batch: _Batch) -> tuple[int, int]:
        """Checks and appends; returns (unroutable rows, rows)."""
        await self.until_unblocked()
        columns = await self.open_frame(frame.payload)
        segments, routes = await self._route(request, columns)
        unroutable = _unrouted(routes)
        commands = await self._encode(columns, segments)
        if batch.spans is not None:
            for command in commands:
                batch.spans.produced(command.body, command.rows, command.position)
        rows = int(columns.rows)
        messages = self._edge.messages
        messages.published_confirm += rows
        messages.dropped_unroutable += unroutable
        for (exchange, queues), count in routes.items():
            self._broker.publishing.count_published(
                messages, self._connection.vhost, exchange.decode(), queues, count
            )
        await self._append(request, commands, batch)
        return unroutable, rows

    async def until_unblocked(self) -> None:
        """Waits while an alarm blocks publishers. Raises ColumnarError."""
        if self._edge.unblocked.is_set():
            return
        self._connection.set_blocked(True)
        try:
            async with asyncio.timeout(self._edge.settings.alarm_wait_s):
                await self._edge.unblocked.wait()
        except TimeoutError:
            names = " and ".join(sorted(self._broker.alarms.effective))
            raise ColumnarError(
                ErrorCode.RESOURCE_ALARM, f"publishers are blocked by an alarm: {names}"
            ) from None
        finally:
            self._connection.set_blocked(False)

    async def open_frame(self, payload: memoryview) -> ColumnFrame:
        """Returns the columns of a payload. Raises ColumnarError."""
        body_max = self._edge.settings.frame_max
        compressed = payload.nbytes > COMPRESSION_AT and payload[COMPRESSION_AT]
        large = LARGE_COMPRESSED_BYTES if compressed else LARGE_PAYLOAD_BYTES
        try:
            if payload.nbytes <= large:
                columns = ColumnFrame(payload, body_max)
            else:
                loop = asyncio.get_running_loop()
                columns = await loop.run_in_executor(None, ColumnFrame, payload, body_max)
        except ValueError as error:
            self._edge.counters.malformed += 1
            raise ColumnarError(ErrorCode.PRECONDITION_FAILED, f"columnar frame: {error}") from None
        limit = self._edge.message_size_max
        if columns.value_max > limit:
            raise ColumnarError(
                ErrorCode.PRECONDITION_FAILED,
                f"message size {columns.value_max} is larger than configured max size {limit}",
            )
        return columns

    # --- routing ---------------------------------------------------------------------------

    async def _route(self, request: Produce, columns: ColumnFrame) -> tuple[list[Segment], Routes]:
        """Routes the rows; returns (segments, rows by route)."""
        routes: Routes = Counter()
        if not columns.rows:
            return [], routes
        name = request.stream if request.stream is not None else request.queue
        if name is not None:
            queue = self._named_queue(request, name)
            routes[b"", (queue,)] = columns.rows
            return [Segment(0, columns.rows, b"", name.encode(), (queue,))], routes
        if columns.rows > ROUTED_ROWS_MAX:
            raise PreconditionFailed(
                f"{columns.rows} rows for an exchange, at most {ROUTED_ROWS_MAX} are routed at once"
            )
        time = Slice(self._edge.turns)
        found: list[Segment] = []
        known: dict[tuple[bytes, bytes], tuple[Queue, ...] | None] = {}
        for place, (first, count, exchange, key) in enumerate(_runs(request, columns)):
            if not place % SEGMENTS_PER_STEP:
                await time.check()
            route = exchange, key
            if route not in known:
                known[route] = self._resolve(request, exchange, key)
            queues = known[route]
            rows = [(first, count)]
            if queues is None:
                rows = [(row, 1) for row in range(first, first + count)]
            for at, length in rows:
                if queues is None:
                    await time.check()
                chosen = queues
                if chosen is None:
                    chosen = self._route_row(request, columns, at, exchange, key)
                if not chosen and request.mandatory:
                    raise _unroutable(exchange, key)
                routes[exchange, chosen] += length
                if not chosen:
                    continue
                last = found[-1] if found else None
                if (
                    last is not None
                    and last.first + last.rows == at
                    and last.exchange == exchange
                    and last.queues == chosen
                    and (last.key == key or columns.columns & ROUTING_KEY)
                ):
                    same = key if last.key == key else None
                    found[-1] = Segment(last.first, last.rows + length, exchange, same, chosen)
                elif len(found) < SEGMENTS_MAX:
                    found.append(Segment(at, length, exchange, key, chosen))
                else:
                    raise PreconditionFailed(
                        f"rows change their targets more than {SEGMENTS_MAX} times: sort them by"
                        " routing key, or send smaller frames"
                    )
        return found, routes

    def _named_queue(self, request: Produce, name: str) -> Queue:
        connection = self._connection
        connection.permissions.check("write", "queue", name)
        queue: Queue = self._broker.queue_admin.find_queue(connection.vhost, name, connection.id)
        if QueueType(queue.type).is_managed:
            raise managed_queue(queue_subject(connection.vhost, name))
        if request.stream is not None and not queue.features.reads_by_offset:
            raise PreconditionFailed(f"queue '{name}' is of type {queue.type}, not a stream")
        self._check_type(request, queue)
        return queue

    def _check_type(self, request: Produce, queue: Queue) -> None:
        if queue.type in UNSERVED_TYPES:
            raise PreconditionFailed(
                f"{queue.type} '{queue.name}' takes no columnar rows: publish to it by AMQP,"
                " or by TOPIC_PRODUCE"
            )
        if request.producer is not None and not queue.features.drops_repeats:
            raise PreconditionFailed(
                f"{queue.type} queue '{queue.name}' cannot tell a producer's repeats: use a quorum"
                " queue or a stream, or no producer"
            )

    def _resolve(self, request: Produce, exchange: bytes, key: bytes) -> tuple[Queue, ...] | None:
        """Queues of an exchange and key; None = that depends on each row's headers."""
        connection = self._connection
        publishing = self._broker.publishing
        names = _text(exchange, "exchange"), _text(key, "routing key")
        publishing.check_write(connection.user, connection.vhost, names[0], names[1:])
        route = publishing.route(connection.vhost, names[0], names[1:], None)
        if not route.cacheable:
            return None
        for queue in route.queues:
            self._check_type(request, queue)
        return tuple(route.queues)

    def _route_row(
        self, request: Produce, columns: ColumnFrame, row: int, exchange: bytes, key: bytes
    ) -> tuple[Queue, ...]:
        """Queues of one row of an exchange that looks at headers."""
        try:
            body, _, position = encode_enqueue(columns, row, 1, exchange, key)
        except ValueError as error:
            raise _refused(error) from None
        properties = read_stored(next(records_of(body, 1, position))).properties
        route = self._broker.publishing.route(
            self._connection.vhost,
            exchange.decode(),
            (key.decode(),),
            properties.headers,
            properties=properties,
        )
        for queue in route.queues:
            self._check_type(request, queue)
        return tuple(route.queues)

    # --- appending -------------------------------------------------------------------------

    async def _encode(self, columns: ColumnFrame, segments: Sequence[Segment]) -> list[Command]:
        time = Slice(self._edge.turns)
        commands: list[Command] = []
        size = self._edge.settings.command_bytes
        try:
            for first, count, exchange, key, queues in segments:
                end = first + count
                while first < end:
                    await time.check()
                    step = min(end - first, columns.rows_within(first, size))
                    body, rows, position = encode_enqueue(columns, first, step, exchange, key)
                    flags = enqueue_flags(columns, first, step)
                    check_records(flags, records_of(body, rows, position), queues)
                    commands.append(Command(first, rows, flags, position, body, queues))
                    first += step
        except ValueError as error:
            raise _refused(error) from None
        return commands

    async def _append(self, request: Produce, commands: Sequence[Command], batch: _Batch) -> None:
        """Hands the commands to the queues, as fast as these take them."""
        time = Slice(self._edge.turns)
        producer = None if request.producer is None else request.producer.encode()
        async with self._deadline():
            for command in commands:
                for queue in command.queues:
                    await time.check()
                    client = await self._ready_client(queue)
                    if batch.error is not None:
                        return
                    self._command(client, command, producer, request, batch)
        batch.whole = True
        batch.check()

    def _command(
        self,
        client: QueueClient,
        command: Command,
        producer: bytes | None,
        request: Produce,
        batch: _Batch,
    ) -> None:
        """One ENQUEUE, behind its PRODUCER: nothing of this session may come between them."""
        if client.queue.refuses_publishes:
            raise Unavailable(f"{client.queue.name} refused rows")
        target = client.target
        if producer is not None:
            number = (request.sequence + command.first).to_bytes(8, "little")
            digest = request.digest or b""
            body = number + producer + digest
            target.command(CMD_PRODUCER, 0, len(producer), len(digest), body)
        batch.appended = True
        batch.waiting += 1

        def answered(duplicates: int, error: BrokerError | None) -> None:
            batch.answered(duplicates, error)
            self._progress.set()

        target.command(
            CMD_ENQUEUE, command.flags, command.rows, command.position, command.body, answered
        )
        if client.queue.features.answers_by_tags:
            # Its client tells of publishes by their tags, as it does to AMQP channels.
            tag = next(self._tags)
            target.pending[-1].tags = [tag, tag]
            self._tagged[tag] = answered

    async def _ready_client(self, queue: Queue) -> QueueClient:
        """Returns this connection's stream into the queue, when it takes more."""
        while True:
            client = self._clients.get(queue)
            if client is None:
                self._close_idle()
                client = self._clients[queue] = queue.client(self._broker.new_session(), self)
            if client not in self._blocked and not _is_full(client):
                return client
            self._progress.clear()
            await self._progress.wait()

    def _close_idle(self) -> None:
        if len(self._clients) < self._edge.settings.targets_max:
            return
        for queue, client in list(self._clients.items()):
            if not client.has_pending:
                client.close()
                del self._clients[queue]

    async def _until_safe(self, batch: _Batch) -> None:
        if batch.waiting and batch.error is None:
            async with self._deadline():
                await batch.done
        if batch.error is not None:
            raise batch.error

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._edge.settings.request_timeout_s):
                yield
        except TimeoutError:
            raise Unavailable("a queue did not confirm all rows in time") from None

    # --- what the queues say ---------------------------------------------------------------

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                answered = self._tagged.pop(tag, None)
                if answered is not None:
                    answered(
                        0, None if outcome else Unavailable(f"{client.queue.name} refused rows")
                    )

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        if blocked:
            self._blocked.add(client)
        else:
            self._blocked.discard(client)
            self._progress.set()


def _check(request: Produce) -> None:
    """Raises ColumnarError for fields that do not go together."""
    places = [request.stream, request.queue, request.exchange]
    if sum(place is not None for place in places) > 1:
        text = "PRODUCE: stream, queue and exchange exclude each other"
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text)
    if request.producer is not None and len(request.producer.encode()) > PRODUCER_BYTES_MAX:
        text = f"PRODUCE: producer has more than {PRODUCER_BYTES_MAX} bytes"
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text)
    if request.digest is not None and request.producer is None:
        text = "PRODUCE: a digest needs a producer"
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text)


def _runs(request: Produce, columns: ColumnFrame) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yields (first, count, exchange, routing key) of rows that agree in both, in their order."""
    rows = int(columns.rows)
    exchanges = _column_runs(columns, EXCHANGE, request.exchange, "exchange", rows)
    keys = _column_runs(columns, ROUTING_KEY, request.routing_key, "routing_key", rows)
    at = here = there = 0
    while at < rows:
        exchange, key = exchanges[here], keys[there]
        ends = exchange[0] + exchange[1], key[0] + key[1]
        end = min(ends)
        yield at, end - at, exchange[2], key[2]
        at = end
        here += end == ends[0]
        there += end == ends[1]


def _column_runs(
    columns: ColumnFrame, column: int, given: str | None, name: str, rows: int
) -> Sequence[tuple[int, int, bytes]]:
    if given is not None:
        return [(0, rows, given.encode())]
    if not columns.columns & column:
        text = f"PRODUCE: neither a stream, a queue nor an {name}, and no column of that name"
        if column == ROUTING_KEY:
            text = f"PRODUCE: no {name}, and no column of that name"
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text)
    return list(columns.runs(column))


def _unrouted(routes: Routes) -> int:
    """Returns the number of rows without a route."""
    return sum(rows for (_, queues), rows in routes.items() if not queues)


def _text(name: bytes, what: str) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, f"{what} is not UTF-8") from None
    if len(name) > 255:
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, f"{what} has more than 255 bytes")
    return text


def _is_full(client: QueueClient) -> bool:
    target = client.target
    return target.pending_bytes > min(target.pending_bytes_max, PENDING_BYTES_MAX)


def records_of(body: bytes, count: int, position: int) -> Iterator[bytes]:
    """Yields the records of an ENQUEUE command without its head, whose offsets lie at
    `position`."""
    table = position - COMMAND_HEAD
    for at in range(table, table + 4 * count, 4):
        begin = int.from_bytes(body[at : at + 4], "little") - COMMAND_HEAD
        end = int.from_bytes(body[at + 4 : at + 8], "little") - COMMAND_HEAD
        yield body[begin:end]


def _unroutable(exchange: bytes, key: bytes) -> PreconditionFailed:
    names = exchange.decode(errors="replace"), key.decode(errors="replace")
    return PreconditionFailed(
        f"exchange '{names[0]}' has no queue for routing key '{names[1]}'; nothing was published"
    )


def _refused(error: ValueError) -> ColumnarError:
    return ColumnarError(ErrorCode.PRECONDITION_FAILED, f"PRODUCE: {error}")
