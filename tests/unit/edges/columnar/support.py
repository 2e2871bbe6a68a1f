"""A columnar server without sockets: real broker, fake cluster, peers with fake transports."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from convoymq.edges.columnar.config import FetchConfig
from convoymq.edges.columnar.connection import FetchConnection
from convoymq.edges.columnar.edge import FetchEdge
from convoymq.edges.http.metrics import render
from convoymq.kernels.batch import CMD_ENQUEUE, CommandBuilder, PublishTarget
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.column_records import encode_enqueue
from convoymq.kernels.columns import VALUE
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import PutPermission, PutUser
from convoymq.model.columnar import (
    ANSWER,
    PREFACE,
    ErrorCode,
    Frame,
    FrameReader,
    Op,
    encode_frame,
)
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.queues.interface import Queue
from convoymq.queues.stream.queue import StreamQueue
from tests.unit.queues.fake_cluster import FakeCluster, until

TIME_MS = 1_700_000_000_000


def values_frame(values: Sequence[bytes], base: int = 0) -> bytes:
    """A columnar frame of values alone."""
    ends = list(itertools.accumulate(map(len, values), initial=0))
    lengths = struct.pack(f"<{len(ends)}i", *ends)
    rows = len(values)
    return build_frame(VALUE, rows, base, base + rows, [b"", lengths, b"".join(values)])


def values_of(payload: bytes | memoryview) -> list[bytes]:
    """The values of a columnar frame."""
    frame = ColumnFrame(payload)
    _, ends, data = frame.buffers(VALUE)
    bounds = ends.cast("i") if len(ends) else []
    return [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(frame.rows)]


class FakeTransport(asyncio.Transport):
    """Takes what is written; a peer that does not read is `stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.written = bytearray()
        self.waiting = 0
        self.stuck = False
        self.reading = True
        self.closed = False
        self.aborted = False
        #: Whether it can be closed by halves, as a plain socket can.
        self.half = False
        self.ended = False

    def write(self, data: Any) -> None:
        assert not self.closed
        assert not self.ended
        self.written += data
        if self.stuck:
            before, self.waiting = self.waiting, self.waiting + len(data)
            if before <= self.high < self.waiting:
                self.protocol.pause_writing()

    def unstick(self) -> None:
        self.stuck = False
        paused = self.waiting > self.high
        self.waiting = 0
        if paused:
            self.protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return self.half

    def write_eof(self) -> None:
        assert not self.ended
        self.ended = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()


class Peer:
    """A client's end of one connection."""

    _ids = itertools.count(1)

    def __init__(self, edge: FetchEdge, head: bytes = PREFACE) -> None:
        self.transport = FakeTransport()
        made = FetchConnection(
            edge,
            head,
            1_000_000 + next(self._ids),
            ("127.0.0.1", 9),
            ("127.0.0.1", 1),
            False,
        )
        self.connection: FetchConnection = made
        self.transport.protocol = made
        self.reader = FrameReader(1 << 30)
        self.read_to = len(PREFACE)
        self.answers: list[Frame] = []
        self._correlation = itertools.count(1)
        made.connection_made(self.transport)

    def feed(self, data: bytes) -> None:
        """Bytes arrive, as far as the server reads them."""
        view = memoryview(data)
        while len(view) and not self.transport.closed:
            room = self.connection.get_buffer(-1)
            count = min(len(room), len(view))
            room[:count] = view[:count]
            room.release()
            view = view[count:]
            self.connection.buffer_updated(count)

    def send(self, op: int, fields: dict[str, Any], payload: bytes = b"") -> int:
        """Send a request without waiting; returns its correlation id."""
        number = next(self._correlation)
        self.feed(b"".join(encode_frame(op, 0, number, fields, payload)))
        return number

    def heard(self) -> list[Frame]:
        """All answers so far."""
        written = self.transport.written
        if len(written) > self.read_to:
            self.answers += self.reader.feed(bytes(written[self.read_to :]))
            self.read_to = len(written)
        return self.answers

    def answer_to(self, number: int) -> Frame | None:
        return next((frame for frame in self.heard() if frame.correlation == number), None)

    async def ask(self, op: int, payload: bytes = b"", /, **fields: Any) -> Frame:
        """Send a request and wait for its answer."""
        number = self.send(op, fields, payload)
        await until(lambda: self.answer_to(number) is not None or self.transport.closed)
        found = self.answer_to(number)
        assert found is not None, "closed without an answer"
        assert found.op == op + ANSWER
        return found

    async def refusal(self, op: int, payload: bytes = b"", /, **fields: Any) -> tuple[int, str]:
        """(error code, text) of a request that must fail."""
        answer = await self.ask(op, payload, **fields)
        assert answer.status, answer.map
        return ErrorCode(answer.status), answer.map["text"]

    async def log_in(self, user: str = "guest", password: str = "guest", vhost: str = "/") -> Frame:
        return await self.ask(
            Op.AUTHENTICATE, mechanism="PLAIN", user=user, password=password, vhost=vhost
        )


class Chunks:
    def __init__(self, first: int, high: int, runs: list[Any]) -> None:
        self.first = first
        self.high = high
        self.runs = runs


class FakeDescriptor:
    """A place in a file."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def pack(self) -> bytes:
        return self.packed


class FakeStream(Queue):
    """A stream whose rows are made up; `error` is raised by the next read."""

    type = "stream"
    features = StreamQueue.features

    def __init__(self, name: str) -> None:
        self.vhost = "/"
        self.name = name
        self.group = 100
        self.first = 0
        self.local = True
        self.blocks: list[tuple[bytes, int, int]] = []
        self.error: BrokerError | None = None
        self.place: bytes | None = None
        self.stored: dict[str, int] = {}
        self.reads = 0
        self.hold: asyncio.Event | None = None

    @property
    def high(self) -> int:
        return self.blocks[-1][1] + self.blocks[-1][2] if self.blocks else 0

    def append(self, values: Sequence[bytes]) -> None:
        """One more chunk."""
        frame = ColumnFrame(values_frame(values))
        body, count, position = encode_enqueue(frame, 0, len(values), b"", self.name.encode())
        builder = CommandBuilder()
        PublishTarget(builder, 1, None).command(CMD_ENQUEUE, 0, count, position, body)
        entry = builder.take_entry(1, len(self.blocks) + 1, 1, TIME_MS)
        self.blocks.append((entry.data, self.high, count))

    def machine(self) -> object | None:
        return self if self.local else None

    def bounds(self) -> tuple[int, int]:
        return (self.first, self.high) if self.local else (0, 0)

    async def where(self) -> tuple[int, int, int, int]:
        if self.error is not None:
            raise self.error
        return self.first, self.high, 55, 0

    def read_descriptor(self, offset: int, end: int | None) -> FakeDescriptor | None:
        return None if self.place is None else FakeDescriptor(self.place)

    async def fetch_chunks(
        self, offset: int, end: int | None, max_rows: int, max_bytes: int, wait_ms: int
    ) -> Chunks:
        self.reads += 1
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        runs = []
        for block, start, count in self.blocks:
            first = max(0, offset - start)
            taken = min(count - first, max_rows)
            if end is not None:
                taken = min(taken, end - start - first)
            if taken > 0:
                runs.append((block, 48, first, taken, start + first, TIME_MS))
                break
        return Chunks(self.first, self.high, runs)

    async def offsets(self, what: str, ms: int | None) -> tuple[int | None, int | None]:
        match what:
            case "earliest":
                return self.first, TIME_MS
            case "latest":
                return self.high, None
            case _:
                assert ms is not None
                return (self.first, TIME_MS) if ms <= TIME_MS else (None, None)

    async def store_offset(self, name: str, offset: int) -> None:
        self.stored[name] = offset

    async def query_offset(self, name: str) -> int | None:
        return self.stored.get(name)

    def client(self, session: int, events: Any) -> Any:
        raise Unavailable("nobody publishes to this one")

    async def ready(self, timeout: float) -> None: ...

    async def counts(self) -> tuple[int, int]:
        return 0, 0

    def info(self) -> dict[str, Any]:
        return {"message_bytes": 77}


class Rig:
    """`async with Rig(directory) as rig`: one node and its columnar server."""

    def __init__(
        self, directory: Path, machine: str = "", message_size_max: int = 16 << 20, **settings: Any
    ) -> None:
        self.cluster = FakeCluster(directory)
        self.machine = machine
        self.message_size_max = message_size_max
        self.settings = FetchConfig(**settings)
        self.streams: dict[str, FakeStream] = {}

    async def __aenter__(self) -> Rig:
        await self.cluster.__aenter__()
        self.broker = self.cluster.nodes[1].broker
        self.edge = FetchEdge(
            broker=self.broker,
            settings=self.settings,
            machine=self.machine,
            message_size_max=self.message_size_max,
        )
        find: Callable[..., Queue] = self.broker.queue_admin.find_queue

        def find_queue(vhost: str, name: str, owner: int | None = None) -> Queue:
            return self.streams.get(name) or find(vhost, name, owner)

        self.broker.queue_admin.find_queue = find_queue  # type: ignore[method-assign]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.edge.stop()
        await self.cluster.__aexit__()

    def stream(self, name: str, *chunks: Sequence[bytes]) -> FakeStream:
        made = self.streams[name] = FakeStream(name)
        for values in chunks:
            made.append(values)
        return made

    async def queue(self, name: str, kind: str = "quorum") -> None:
        await self.cluster.queue(1, name, arguments={"x-queue-type": kind})

    async def show(self) -> str:
        """The metrics, as Prometheus gets them."""
        return await render(self.broker, [self.edge])

    def peer(self) -> Peer:
        return Peer(self.edge)

    async def client(self) -> Peer:
        """A peer that has logged in."""
        made = self.peer()
        answer = await made.log_in()
        assert answer.status == 0, answer.map
        return made

    async def count(self, name: str) -> int:
        return (await self.broker.queue_admin.find_queue("/", name).counts())[0]


async def reader(rig: Rig, *, read: str = "", write: str = "") -> Peer:
    """A peer whose user has just these permissions."""
    store = rig.cluster.nodes[1].store
    await store.execute(PutUser(name="u", password_hash=hash_sha256(b"u"), algorithm=SHA256))
    await store.execute(PutPermission(user="u", vhost="/", configure="", write=write, read=read))
    peer = rig.peer()
    assert (await peer.log_in("u", "u")).status == 0
    return peer
