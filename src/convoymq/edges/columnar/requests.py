"""Requests of a connection: one method an operation.

Permissions come before existence, so nobody learns names from refusals. Waiting for rows happens
before the right to build an answer is asked for; from there on a request only reads what is there.
Source: docs/formats/columnar-protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from convoymq.edges.columnar.building import Rows
from convoymq.edges.columnar.errors import as_error
from convoymq.edges.columnar.fields import (
    Browse,
    Fetch,
    Metadata,
    Offsets,
    QueryOffset,
    Reservation,
    ReservationFetch,
    StoreOffset,
    read,
)
from convoymq.edges.columnar.producing import Producing
from convoymq.edges.columnar.streams import Run, Stream
from convoymq.edges.columnar.topic_producing import TopicProducing
from convoymq.edges.columnar.topic_routes import TopicRoutes
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.stream_spans import COLUMNAR, StreamSpans
from convoymq.model.columnar import ANSWER_MAP_MAX, ColumnarError, ErrorCode, Frame, Op
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotFound,
    PreconditionFailed,
    Refused,
    StorageFault,
    Unavailable,
)
from convoymq.model.late_imports import import_late
from convoymq.model.near_names import near_names
from convoymq.queues.interface import Queue
from convoymq.queues.reservation_reads import RunsRequest

if TYPE_CHECKING:
    from convoymq.broker.records import QueueRecord
    from convoymq.edges.columnar.connection import FetchConnection
    from convoymq.edges.columnar.topic_members import TopicMembers

NEAR_CANDIDATES_MAX = 500
NEAR_CUTOFF = 0.6
BEHIND_WAIT_MS = 5_000
"""A replica that is behind gets at least this long (docs/formats/columnar-protocol.md)."""
QUERIES_AT_ONCE = 16
"""Questions to other nodes that one request asks at a time."""
WHERE_TIMEOUT_S = 2.0
ROWS_PER_STEP = 32
READS = frozenset((
    Op.OFFSETS, Op.FETCH, Op.RESERVATION, Op.RESERVATION_FETCH, Op.BROWSE, Op.STORE_OFFSET,
    Op.QUERY_OFFSET, Op.TOPIC_ROUTE, Op.TOPIC_PRODUCE, Op.TOPIC_PRODUCER, Op.GROUP_JOIN,
    Op.GROUP_HEARTBEAT, Op.GROUP_WAKE, Op.GROUP_FETCH, Op.GROUP_SETTLE, Op.GROUP_SEEK,
))  # fmt: skip
"""Operations that are worked out once more before NOT_FOUND is answered."""


GROUP_OPS = (
    Op.GROUP_JOIN, Op.GROUP_HEARTBEAT, Op.GROUP_WAKE, Op.GROUP_FETCH, Op.GROUP_SETTLE,
    Op.GROUP_SEEK,
)  # fmt: skip
WITH_ROWS = (Op.PRODUCE, Op.CHECK_PRODUCE, Op.TOPIC_PRODUCE)
"""Operations whose requests have a payload."""


class Requests:
    """The operations of one connection."""

    def __init__(self, connection: FetchConnection) -> None:
        self._connection = connection
        self._edge = connection.edge
        self._broker = connection.broker
        self._settings = connection.edge.settings
        self.spans = StreamSpans.of(self._broker.spans, connection.vhost, COLUMNAR)
        self._producing = Producing(connection)
        routes = TopicRoutes(connection)
        self._topic_producing = TopicProducing(connection, self._producing, routes)
        self._members: TopicMembers | None = None
        self._handlers: dict[int, Callable[[Frame], Awaitable[dict[str, object] | None]]] = {
            Op.METADATA: self._metadata,
            Op.OFFSETS: self._offsets,
            Op.FETCH: self._fetch,
            Op.PRODUCE: self._producing.produce,
            Op.CHECK_PRODUCE: self._producing.check,
            Op.RESERVATION: self._reservation,
            Op.RESERVATION_FETCH: self._reservation_fetch,
            Op.BROWSE: self._browse,
            Op.STORE_OFFSET: self._store_offset,
            Op.QUERY_OFFSET: self._query_offset,
            Op.TOPIC_ROUTE: routes.route,
            Op.TOPIC_PRODUCE: self._topic_producing.produce,
            Op.TOPIC_PRODUCER: self._topic_producing.session,
            **dict.fromkeys(GROUP_OPS, self._ask_members),
        }

    async def serve(self, frame: Frame) -> dict[str, object] | None:
        """Works a request out; returns the answer's map, or None when the answer is sent.

        Raises:
            BrokerError: the request is refused.
        """
        handler = self._handlers.get(frame.op)
        if handler is None:
            known = frame.op == Op.AUTHENTICATE
            text = "AUTHENTICATE comes once" if known else f"operation {frame.op} is not known"
            raise ColumnarError(ErrorCode.NOT_IMPLEMENTED, text)
        self._edge.counters.requests[Op(frame.op)] += 1
        if frame.payload.nbytes and frame.op not in WITH_ROWS:
            text = f"{Op(frame.op).name} has no payload"
            raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text)
        try:
            return await handler(frame)
        except BrokerError as error:
            if frame.op not in READS or as_error(error).code != ErrorCode.NOT_FOUND:
                raise
        # Who is told so may take messages for lost: this node's metadata must not be behind.
        await self._broker.metadata_reads.catch_up()
        return await handler(frame)

    def sessions(self) -> list[int]:
        """Returns the sessions through which it publishes."""
        return self._producing.sessions() + self._topic_producing.sessions()

    def close(self) -> None:
        """The connection is gone."""
        self._producing.close()
        self._topic_producing.close()
        if self._members is not None:
            self._members.close()
        if self.spans is not None:
            self.spans.close()

    async def _ask_members(self, frame: Frame) -> dict[str, object] | None:
        if self._members is None:
            # With the first member: nodes without ordered topics do not carry it.
            import_late("convoymq.edges.columnar.topic_members")
            from convoymq.edges.columnar.topic_members import TopicMembers

            self._members = TopicMembers(self._connection, self.spans)
        return await self._members.handlers[frame.op](frame)

    # --- queues ----------------------------------------------------------------------------

    def _queue(self, name: str) -> Queue:
        """Returns a queue that the user may read. Raises ColumnarError, BrokerError. A type that
        can't be reserved says so itself."""
        connection = self._connection
        connection.permissions.check("read", "queue", name)
        try:
            found: Queue = self._broker.queue_admin.find_queue(
                connection.vhost, name, connection.id
            )
        except NotFound as error:
            details = {"near": self._near(name)}
            raise ColumnarError(ErrorCode.NOT_FOUND, error.text, details) from None
        return found

    def _stream(self, name: str, group: int = 0) -> Stream:
        """Returns a stream that the user may read; `group`: this one of that name, and no other."""
        queue = self._queue(name)
        if not queue.features.reads_by_offset:
            raise PreconditionFailed(f"queue '{name}' is of type {queue.type}, not a stream")
        stream = cast(Stream, queue)
        if group and stream.group != group:
            raise ColumnarError(
                ErrorCode.NOT_FOUND,
                f"stream '{name}' was deleted and declared again: group {group} is gone, now it is"
                f" group {stream.group}",
                {"group": stream.group},
            )
        return stream

    def _records(self, names: Sequence[str] | None = None) -> list[QueueRecord]:
        """Queues of the virtual host, or those of these names."""
        place = self._broker.tree.vhosts.find(self._connection.vhost)
        if place is None:
            return []
        known: Mapping[str, QueueRecord] = place.queues
        if names is None:
            return list(known.values())
        return [known[name] for name in dict.fromkeys(names) if name in known]

    def _may_read(self, name: str) -> bool:
        try:
            self._connection.permissions.check("read", "queue", name)
        except AccessRefused:
            return False
        return True

    def _near(self, name: str) -> list[str]:
        """Names like the one that is not there; a bounded look."""
        length = len(name)
        names = [
            record.name
            for record in self._records()
            if abs(len(record.name) - length) <= max(2, length // 2)
        ]
        names = [each for each in names[:NEAR_CANDIDATES_MAX] if self._may_read(each)]
        return near_names(name, names, NEAR_CUTOFF)

    @asynccontextmanager
    async def _limit(self, extra_ms: int = 0) -> AsyncIterator[None]:
        """Bounds what a queue may take for its answer."""
        async with asyncio.timeout(self._settings.request_timeout_s + extra_ms / 1000):
            yield

    # --- what there is ---------------------------------------------------------------------

    async def _metadata(self, frame: Frame) -> dict[str, object]:
        request = read(Metadata, frame.map)
        if request.names is not None and len(request.names) > self._settings.names_max:
            raise PreconditionFailed(f"more than {self._settings.names_max} names")
        if request.current:
            await self._broker.metadata_reads.catch_up()
        time = Slice(self._edge.turns)
        rows: list[dict[str, object]] = []
        far: list[tuple[dict[str, object], Stream]] = []
        for place, record in enumerate(self._records(request.names)):
            if not place % ROWS_PER_STEP:
                await time.check()
            if record.type.value in request.types and self._may_read(record.name):
                rows.append(self._row(record, far))
        for at in range(0, len(far), QUERIES_AT_ONCE):
            part = far[at : at + QUERIES_AT_ONCE]
            await asyncio.gather(*(self._ask_where(row, stream) for row, stream in part))
        answer: dict[str, object] = {"queues": rows, "node": self._broker.node_name}
        if len(rows) > ROWS_PER_STEP and len(msgspec.msgpack.encode(answer)) > ANSWER_MAP_MAX:
            raise PreconditionFailed(f"{len(rows)} queues do not fit an answer: ask by names")
        return answer

    def _row(
        self, record: QueueRecord, far: list[tuple[dict[str, object], Stream]]
    ) -> dict[str, object]:
        """Returns the row of a queue as far as this node knows it; what another has to be asked for
        goes to `far`."""
        broker = self._broker
        declared = broker.tree.vhosts.get(record.vhost).topology.find_queue(record.name)
        row: dict[str, object] = {
            "name": record.name,
            "type": record.type.value,
            "group": record.group,
            "leader": None,
            "members": [broker.node_name_of(node) for node in sorted(record.members)],
            "first": None,
            "next": None,
            "bytes": None,
            "arguments": _plain(declared.arguments.to_plain()) if declared is not None else {},
        }
        try:
            queue = broker.queue_admin.find_queue(record.vhost, record.name, self._connection.id)
        except Refused:
            # Another connection's, or its home node is away.
            return row
        leader = broker.locations.leader_of(record)
        row["leader"] = None if leader is None else broker.node_name_of(leader)
        row["bytes"] = queue.info().get("message_bytes")
        if queue.features.reads_by_offset:
            stream = cast(Stream, queue)
            if stream.machine() is not None:
                row["first"], row["next"] = stream.bounds()
            else:
                far.append((row, stream))
        return row

    async def _ask_where(self, row: dict[str, object], stream: Stream) -> None:
        """Completes the row of a stream that has no replica here."""
        try:
            async with asyncio.timeout(WHERE_TIMEOUT_S):
                row["first"], row["next"], row["bytes"], *_ = await stream.where()
        except (Refused, Unavailable, TimeoutError):
            # Nobody near knows; the others' rows shall not wait for that.
            return

    async def _offsets(self, frame: Frame) -> dict[str, object]:
        request = read(Offsets, frame.map)
        if len(request.queries) > self._settings.names_max:
            raise PreconditionFailed(f"more than {self._settings.names_max} queries")
        streams: dict[str, Stream] = {}
        time = Slice(self._edge.turns)
        for place, (name, what, ms) in enumerate(request.queries):
            if not place % ROWS_PER_STEP:
                await time.check()
            if name not in streams:
                streams[name] = self._stream(name)
            if what == "timestamp" and ms is None:
                raise PreconditionFailed("OFFSETS: timestamp without a time")
        found: list[tuple[int | None, int | None]] = []
        for at in range(0, len(request.queries), QUERIES_AT_ONCE):
            part = request.queries[at : at + QUERIES_AT_ONCE]
            async with self._limit():
                found += await asyncio.gather(
                    *(streams[name].offsets(what, ms) for name, what, ms in part)
                )
        return {"offsets": [list(row) for row in found]}

    # --- rows ------------------------------------------------------------------------------

    def _answer_bytes(self) -> int:
        settings = self._settings
        if self._edge.turns.others_active():
            return min(settings.answer_max, settings.answer_bytes_beside)
        return settings.answer_max

    def _rows(self, columns: int, max_rows: int, max_bytes: int, queue: str = "") -> Rows:
        """Returns an empty answer; `queue`: its rows are deliveries of that one."""
        spans = self.spans if queue else None
        return Rows(
            Slice(self._edge.turns),
            columns,
            max_rows,
            min(max_bytes, self._answer_bytes()),
            self._settings.step_bytes,
            None if spans is None else partial(spans.sent, queue, None),
        )

    async def _fetch(self, frame: Frame) -> None:
        request = read(Fetch, frame.map)
        if request.end is not None and request.end < request.offset:
            raise PreconditionFailed(f"end {request.end} lies before offset {request.offset}")
        stream = self._stream(request.stream, request.group)
        wait_ms = min(request.wait_ms, self._settings.wait_ms_max)
        here = stream.machine() is not None
        beyond = max(request.offset + 1, request.end or 0) > stream.bounds()[1]
        if beyond if here else wait_ms:
            # Waits, or finds out that this replica is behind. What came is asked for again below:
            # many requests may wait, and none shall hold rows meanwhile.
            async with self._limit(max(wait_ms, BEHIND_WAIT_MS)):
                await stream.fetch_chunks(request.offset, request.end, 1, 1, wait_ms)
        # What a client reads from files itself, this node does not see.
        sees_all = self.spans is not None
        if request.machine and request.machine == self._edge.machine and not sees_all:
            descriptor = stream.read_descriptor(request.offset, request.end)
            if descriptor is not None:
                first, high = stream.bounds()
                told = {"first": first, "high": high, "excerpt": True}
                async with self._connection.output():
                    await self._connection.send_rows(frame, told, descriptor.pack())
                self._edge.counters.read_descriptors += 1
                return
        async with self._connection.output():
            rows = self._rows(request.columns, request.max_rows, request.max_bytes, request.stream)
            at = request.offset
            # A portion from another node costs a round trip.
            portion = self._settings.pull_bytes if here else self._settings.answer_max
            while True:
                size = min(portion, rows.room)
                async with self._limit(BEHIND_WAIT_MS):
                    chunks = await stream.fetch_chunks(
                        at, request.end, request.max_rows - rows.count, size, 0
                    )
                got = await self._add(rows, chunks.runs)
                at += got
                end = chunks.high if request.end is None else min(chunks.high, request.end)
                if not got or rows.full or at >= end or rows.count >= request.max_rows:
                    break
            answer = {"first": chunks.first, "high": chunks.high}
            # While the client reads, only the answer is kept, not the log's blocks.
            del chunks
            await self._send(frame, answer, rows, at, request.compression)

    async def _reservation_fetch(self, frame: Frame) -> None:
        request = read(ReservationFetch, frame.map)
        queue = self._queue(request.queue)
        async with self._connection.output():
            rows = self._rows(request.columns, request.max_rows, request.max_bytes, request.queue)
            at = request.offset
            first = None
            while True:
                async with self._limit():
                    oldest, _, runs = await queue.reservation_runs(
                        RunsRequest(
                            request.reservation,
                            request.epoch,
                            at,
                            request.end,
                            request.max_rows - rows.count,
                            self._settings.pull_bytes,
                        )
                    )
                first = oldest if first is None else first
                got = await self._add(rows, runs)
                at += got
                ended = request.end is not None and at >= request.end
                if not got or rows.full or ended or rows.count >= request.max_rows:
                    break
            del runs
            await self._send(frame, {"first": first, "next": at}, rows, at, request.compression)

    async def _browse(self, frame: Frame) -> None:
        request = read(Browse, frame.map)
        queue = self._queue(request.queue)
        max_rows = request.max_rows
        max_bytes = min(request.max_bytes, self._answer_bytes())
        async with self._connection.output():
            while True:
                async with self._limit():
                    cursor, runs = await queue.browse(request.cursor, max_rows, max_bytes)
                rows = self._rows(request.columns, max_rows, max_bytes)
                wanted = sum(run[3] for run in runs)
                got = await self._add(rows, runs)
                if got == wanted or max_rows <= 1:
                    break
                # The cursor stands behind all that was found: ask for what fits.
                max_rows = max(1, got)
            answer = {"cursor": cursor}
            del runs
            await self._send(frame, answer, rows, rows.count, request.compression)

    async def _add(self, rows: Rows, runs: Sequence[Run]) -> int:
        try:
            return await rows.add(runs)
        except ValueError as error:
            raise StorageFault(f"stored message is damaged: {error}") from error

    async def _send(
        self, frame: Frame, answer: Mapping[str, object], rows: Rows, next_: int, compression: str
    ) -> None:
        payload = await rows.finish(next_, compression)
        await self._connection.send_rows(frame, answer, payload)
        self._edge.sent(rows.count)

    # --- reservations and stored offsets
    # -----------------------------------------------------------

    async def _reservation(self, frame: Frame) -> dict[str, object]:
        request = read(Reservation, frame.map)
        queue = self._queue(request.queue)
        async with self._limit():
            return await queue.reservation(request.body())

    async def _store_offset(self, frame: Frame) -> dict[str, object]:
        request = read(StoreOffset, frame.map)
        stream = self._stream(request.stream)
        async with self._limit():
            await stream.store_offset(request.consumer, request.offset)
        return {}

    async def _query_offset(self, frame: Frame) -> dict[str, object]:
        request = read(QueryOffset, frame.map)
        stream = self._stream(request.stream)
        async with self._limit():
            return {"offset": await stream.query_offset(request.consumer)}


def _plain(value: object) -> object:
    """Arguments as msgpack can carry them; what has no plain form becomes its text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)
