"""One connection of the columnar protocol: preface, login, requests under way, output.

    state     hears                    goes to
    GREETING  preface                  LOGIN (CLOSED when it asks for another version)
    LOGIN     AUTHENTICATE             OPEN, CLOSED (refused)
    OPEN      requests                 CLOSED
    CLOSED    nothing

At most `requests_max` requests are under way. Answers with rows go out one after the other: the
next one is built when the client has read the one before, so a client that does not read costs one
answer, and is dropped after a while. Source: docs/formats/columnar-protocol.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING

import structlog

from convoymq import __version__
from convoymq.broker.records import User
from convoymq.edges.columnar.errors import as_error
from convoymq.edges.columnar.fields import Authenticate, read
from convoymq.edges.columnar.requests import Requests
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.connections import NOBODY, ClientConnection
from convoymq.edges.permissions import Permissions
from convoymq.edges.sasl import Credentials
from convoymq.model.columnar import (
    ANSWER,
    HANDSHAKE_FRAME_MAX,
    PREFACE,
    VERSION,
    ColumnarError,
    ErrorCode,
    Frame,
    FrameReader,
    Op,
    ProtocolError,
    encode_error,
    encode_frame,
    preface_version,
)
from convoymq.model.errors import BrokerError
from convoymq.transport.listening import descriptor_of

if TYPE_CHECKING:
    from convoymq.edges.columnar.edge import FetchEdge

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0
SCRATCH_BYTES = 64 << 10
"""Bytes read at a time of a connection whose input is discarded."""
PROGRESS_BYTES_MIN = 16 << 10
"""Bytes that a slow client must at least read, or write, within the time limit."""
ROOM_BYTES_MIN = 64 << 10
"""Larger frames ask for room before they are read."""

Parts = list[bytes | memoryview]


class State(Enum):
    """See the module's table."""

    GREETING = "starting"
    LOGIN = "authenticating"
    OPEN = "running"
    CLOSED = "closed"


class FetchConnection(asyncio.BufferedProtocol, ClientConnection):
    """See the module text. Implements the registry's handle."""

    def __init__(
        self,
        edge: FetchEdge,
        head: bytes,
        id: int,
        peer: tuple[str, int],
        local: tuple[str, int],
        ssl: bool,
        handshake_left_s: float = 10.0,
    ) -> None:
        """
        Args:
            head: the first bytes, which were read already.
            handshake_left_s: until the client has logged in.
        """
        self.edge = edge
        self.broker = edge.broker
        self.begin(id, peer, local, ssl)
        self.client = ""
        self.state = State.GREETING
        self.received = 0
        self.sent = 0
        self.blocked = False
        self._head = head
        self._handshake_left_s = handshake_left_s
        self._reader = FrameReader(HANDSHAKE_FRAME_MAX)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._reading = True
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes_under_way = 0
        #: Room in the node's input budget for the frame that is being read; -1 = asked for.
        self._room = 0
        self._input_timer: asyncio.TimerHandle | None = None
        self._input_seen = 0
        self._frames = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._backlog = 0
        self._stuck_since = 0.0
        self._turn = asyncio.Lock()
        self._writing = False
        self._held: list[Parts] = []
        self.permissions = Permissions(self)
        self.requests = Requests(self)

    # --- the transport ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        assert self._transport is not None
        if self.state is State.CLOSED:
            self._transport.abort()
            return
        # What the transport keeps is a part of an answer and holds all of it: the answer is done,
        # and its room given back, when nothing is kept. TLS pauses at the bound, not above it.
        self._transport.set_write_buffer_limits(high=int(self.ssl), low=0)
        head, self._head = self._head, b""
        self._transport.write(PREFACE)
        try:
            version = preface_version(head[: len(PREFACE)])
        except ProtocolError as error:
            self._break_off(error.text)
            return
        if version != VERSION:
            # The answer to the preface has said which version is spoken here.
            self._close()
            return
        if not self.edge.admit(self):
            self.close("too many connections of this protocol", ErrorCode.UNAVAILABLE)
            return
        self.state = State.LOGIN
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._handshake_left_s, self._late)
        self._feed(head[len(PREFACE) :])

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.state is State.CLOSED:
            return memoryview(bytearray(SCRATCH_BYTES))
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._count_in(nbytes)
        if self.state is State.CLOSED:
            return
        try:
            frames = self._reader.advance(nbytes)
        except ProtocolError as error:
            self._break_off(error.text, error.correlation)
            return
        for frame in frames:
            self._take(frame)
        self._ask_for_room()

    def _feed(self, data: bytes) -> None:
        self._count_in(len(data))
        try:
            frames = self._reader.feed(data)
        except ProtocolError as error:
            for frame in error.frames:
                self._take(frame)
            self._break_off(error.text, error.correlation)
            return
        for frame in frames:
            self._take(frame)
        self._ask_for_room()

    def _ask_for_room(self) -> None:
        """A large frame has begun: its rest is read when the node has room for it."""
        if self._room or self._reader.length <= ROOM_BYTES_MIN or self.state is State.CLOSED:
            return
        self._room = -1
        self._update_reading()
        self.edge.spawn(self._wait_for_room(self._reader.length, self._frames))

    async def _wait_for_room(self, length: int, frames: int) -> None:
        size = await self.edge.input.take(length)
        if self.state is State.CLOSED or self._frames != frames:
            # Its last bytes were on their way when reading was stopped.
            self.edge.input.give_back(size)
            return
        self._room = size
        self._update_reading()
        self._watch_input()

    def _watch_input(self) -> None:
        """Starts the time limit for a client that may send: it must send."""
        self._input_seen = self._reader.waiting
        self._input_timer = asyncio.get_running_loop().call_later(
            self.edge.settings.write_timeout_s, self._check_input
        )

    def _check_input(self) -> None:
        self._input_timer = None
        if self._room <= 0:
            return
        if self._reading and self._reader.waiting - self._input_seen < PROGRESS_BYTES_MIN:
            self.edge.counters.slow += 1
            log.warning("fetch.slow_writer_dropped", connection=self.name, got=self._input_seen)
            self.abort()
            return
        self._watch_input()

    def _count_in(self, count: int) -> None:
        self.received += count
        self.edge.counters.bytes_in += count

    def eof_received(self) -> None:
        """See `asyncio.BaseProtocol`: nobody is left to hear answers."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._close()
        self._drained.set()
        self.edge.gone(self)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._drained.clear()
        self._update_reading()
        self._watch_output()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._drained.set()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        self._update_reading()

    def _watch_output(self) -> None:
        if self._transport is None or self.state is State.CLOSED:
            return
        self._stuck_since = asyncio.get_running_loop().time()
        self._backlog = self._transport.get_write_buffer_size()
        self._look_later()

    def _look_later(self) -> None:
        settings = self.edge.settings
        pause = min(settings.write_timeout_s, settings.pressed_timeout_s)
        self._slow_timer = asyncio.get_running_loop().call_later(pause, self._check_output)

    def _check_output(self) -> None:
        self._slow_timer = None
        if self._transport is None or self._drained.is_set():
            return
        waiting = self._transport.get_write_buffer_size()
        if waiting + PROGRESS_BYTES_MIN <= self._backlog:
            self._watch_output()
            return
        settings = self.edge.settings
        # Memory that others wait for is not left for long to who does not read.
        timeout_s = settings.write_timeout_s
        if self.edge.budget.is_short:
            timeout_s = min(timeout_s, settings.pressed_timeout_s)
        if asyncio.get_running_loop().time() - self._stuck_since < timeout_s * 0.99:
            self._look_later()
            return
        self.edge.counters.slow += 1
        log.warning("fetch.slow_reader_dropped", connection=self.name, waiting=waiting)
        self.abort()

    # --- closing ---------------------------------------------------------------------------

    def _late(self) -> None:
        if self.state is State.LOGIN and self.user is NOBODY:
            log.warning("fetch.login_timeout", connection=self.name)
            self._close()

    def _break_off(self, text: str, correlation: int = 0) -> None:
        """The peer broke the protocol: say so and close."""
        if self.state is State.CLOSED:
            return
        self.edge.counters.malformed += 1
        self.edge.counters.errors[ErrorCode.FRAME_ERROR] += 1
        log.warning("fetch.malformed", connection=self.name, reason=text)
        self._last_words(correlation, ColumnarError(ErrorCode.FRAME_ERROR, text))

    def close(self, reason: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> None:
        """Closes on an operator's behalf, or the node's; the client is told why."""
        if self.state is not State.CLOSED:
            log.info("fetch.connection_forced", connection=self.name, reason=reason)
            text = f"the connection was closed by the server: {reason}"
            self._last_words(0, ColumnarError(code, text))

    def check_access(self) -> None:
        """See `ConnectionHandle`."""
        self.permissions.forget()

    def _last_words(self, correlation: int, error: ColumnarError) -> None:
        if not self._writing:
            self._write(encode_error(Op.AUTHENTICATE, correlation, error))
        self._close(linger=True)

    def _close(self, *, linger: bool = False) -> None:
        """Writes what is left, within a bound of time, and closes. Safe to call twice.

        `linger`: first let the peer close. Its unread bytes would turn our close into a reset,
        which may overtake our last words.
        """
        if self.state is State.CLOSED:
            return
        was_open = self.user is not None
        self.state = State.CLOSED
        for timer in (self._timer, self._slow_timer, self._input_timer):
            if timer is not None:
                timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        for _, room in self._waiting:
            self.edge.input.give_back(room)
        self._waiting.clear()
        self._drop_room()
        self._held.clear()
        self.requests.close()
        if was_open:
            self.broker.connections.remove(self)
            self.broker.counters.connections_closed += 1
        transport = self._transport
        if transport is None:
            return
        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, transport.abort)
        if linger and transport.can_write_eof() and not self.edge.stopping:
            transport.write_eof()
            if not self._reading:
                transport.resume_reading()
        else:
            transport.close()

    def _drop_room(self) -> None:
        if self._room > 0:
            self.edge.input.give_back(self._room)
        self._room = 0

    def fileno(self) -> int:
        """Returns the socket's descriptor; -1 without one."""
        return descriptor_of(self._transport)

    def abort(self) -> None:
        """Ends the connection without a word: its client is gone."""
        self._close()
        if self._transport is not None:
            self._transport.abort()

    # --- requests --------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        """One frame came in."""
        if self.state is State.CLOSED:
            return
        self._frames += 1
        if frame.is_answer:
            self._break_off(f"an answer, operation {frame.op}, from a client", frame.correlation)
            return
        if self.state is State.LOGIN and not self._tasks and not self._waiting:
            if frame.op != Op.AUTHENTICATE:
                self._break_off("the first request is not AUTHENTICATE", frame.correlation)
                return
            self._start(frame, 0)
        else:
            room, self._room = max(self._room, 0), 0
            if self._input_timer is not None:
                self._input_timer.cancel()
                self._input_timer = None
            self._waiting.append((frame, room))
            self._start_waiting()
        self._update_reading()

    def _start_waiting(self) -> None:
        while self._waiting and self.state is State.OPEN and self._has_room():
            self._start(*self._waiting.popleft())

    def _has_room(self) -> bool:
        settings = self.edge.settings
        return (
            len(self._tasks) < settings.requests_max and self._bytes_under_way <= settings.frame_max
        )

    def _start(self, frame: Frame, room: int) -> None:
        """`room`: of the node's input budget; given back when the request is done."""
        self._bytes_under_way += frame.payload.nbytes
        work = self._log_in(frame) if self.state is State.LOGIN else self._serve(frame)
        task = self.edge.spawn(work)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._bytes_under_way -= frame.payload.nbytes
            self.edge.input.give_back(room)
            self._start_waiting()
            self._update_reading()

        task.add_done_callback(ended)

    def set_blocked(self, on: bool) -> None:
        """A publish waits for an alarm to end: nothing more is read meanwhile, as in AMQP."""
        self.blocked = on
        self._update_reading()

    def _update_reading(self) -> None:
        if self._transport is None or self.state is State.CLOSED:
            return
        logging_in = self.state is State.LOGIN and bool(self._tasks)
        on = (
            not logging_in
            and self._room >= 0
            and not self._waiting
            and not self.blocked
            and self._drained.is_set()
            and self._has_room()
        )
        if on != self._reading:
            self._reading = on
            if on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _register(self, user: User, vhost: str) -> None:
        """Counts from now on, unless it went away while others were asked."""
        if self.state is State.LOGIN:
            self.user = user
            self.vhost = vhost
            self.broker.connections.add(self)

    async def _log_in(self, frame: Frame) -> None:
        self.edge.counters.requests[Op.AUTHENTICATE] += 1
        name = ""
        try:
            request = read(Authenticate, frame.map)
            name = request.user
            if request.mechanism != "PLAIN":
                raise ColumnarError(
                    ErrorCode.PRECONDITION_FAILED,
                    f"mechanism {request.mechanism!r} is not known; PLAIN is",
                )
            credentials = Credentials(request.user, request.password.encode())
            user = await self.edge.login.user(credentials, self.peer[0])
            self.broker.access.open_vhost(user, request.vhost)
            await self.broker.limits.open_connection(
                user.name, request.vhost, lambda: self._register(user, request.vhost)
            )
        except BrokerError as error:
            told = as_error(error)
            self.edge.counters.errors[ErrorCode(told.code)] += 1
            log.warning("fetch.login_refused", connection=self.name, user=name, reason=told.text)
            self._last_words(frame.correlation, told)
            return
        if self.state is not State.LOGIN:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.client = request.client
        self.state = State.OPEN
        self._reader.frame_max = self.edge.settings.frame_max
        self.broker.counters.connections_opened += 1
        log.info(
            "fetch.connection_opened",
            connection=self.name,
            user=user.name,
            vhost=self.vhost,
            client=self.client,
        )
        told_map = {
            "node": self.broker.node_name,
            "cluster": self.broker.cluster_name,
            "version": __version__,
            "frame_max": self.edge.settings.frame_max,
        }
        self._send(encode_frame(frame.op + ANSWER, 0, frame.correlation, told_map))

    async def _serve(self, frame: Frame) -> None:
        counters = self.edge.counters
        try:
            answer = await self.requests.serve(frame)
            if answer is not None:
                self._send(encode_frame(frame.op + ANSWER, 0, frame.correlation, answer))
            return
        except BrokerError as error:
            told = as_error(error)
            if told.code == ErrorCode.INTERNAL_ERROR:
                log.error("fetch.request_failed", connection=self.name, reason=error.text)
        except TimeoutError:
            told = ColumnarError(ErrorCode.UNAVAILABLE, "the queue did not answer in time")
        except Exception:
            log.exception("fetch.request_failed", connection=self.name)
            # Nobody knows how far a PRODUCE had come.
            details = {"maybe": True} if frame.op in (Op.PRODUCE, Op.TOPIC_PRODUCE) else {}
            told = ColumnarError(ErrorCode.INTERNAL_ERROR, "internal error", details)
        counters.errors[ErrorCode(told.code)] += 1
        self._send(encode_error(frame.op, frame.correlation, told))

    # --- output ----------------------------------------------------------------------------

    @asynccontextmanager
    async def output(self) -> AsyncIterator[None]:
        """The right to build and send a large answer: one at a time, when the client has read those
        before and the node has room for it."""
        async with self._turn:
            await self._drained.wait()
            size = await self.edge.budget.take(self.edge.settings.answer_max)
            try:
                yield
                await self._drained.wait()
            finally:
                self.edge.budget.give_back(size)

    async def send_rows(self, frame: Frame, answer: Mapping[str, object], payload: bytes) -> None:
        """Sends an answer with a payload, a step at a time; only inside `output`.

        Raises:
            ColumnarError: it is larger than any frame may be.
        """
        parts = encode_frame(frame.op + ANSWER, 0, frame.correlation, answer, payload)
        length = sum(len(part) for part in parts)
        limit = self.edge.settings.frame_max
        if length > limit:
            raise ColumnarError(
                ErrorCode.PRECONDITION_FAILED,
                f"the answer would have {length} bytes, fetch.frame_max is {limit}",
            )
        step = self.edge.settings.step_bytes
        slice_ = Slice(self.edge.turns)
        self._writing = True
        try:
            for part in parts:
                view = memoryview(part)
                for at in range(0, len(view), step):
                    await slice_.check()
                    await self._drained.wait()
                    if self.state is State.CLOSED:
                        return
                    self._write([view[at : at + step]])
        finally:
            self._writing = False
        held, self._held = self._held, []
        for waiting in held:
            self._write(waiting)

    def _send(self, parts: Parts) -> None:
        """Sends a small answer at once, or behind the large one that is on its way."""
        if self.state is State.CLOSED:
            return
        if self._writing:
            self._held.append(parts)
        else:
            self._write(parts)

    def _write(self, parts: Parts) -> None:
        if self._transport is None or self.state is State.CLOSED:
            return
        for part in parts:
            self.sent += len(part)
            self.edge.counters.bytes_out += len(part)
            self._transport.write(part)

    # --- for the management API ------------------------------------------------------------

    def given_name(self) -> str:
        """See `ClientConnection`."""
        return self.client

    def info(self) -> dict[str, object]:
        """Returns one row of /api/connections."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self.row(
            state="blocked" if self.blocked else self.state.value,
            channels=0,
            channel_max=0,
            frame_max=self.edge.settings.frame_max,
            timeout=0,
            protocol=f"Columnar {VERSION}",
            auth_mechanism="PLAIN",
            client_properties={"connection_name": self.client} if self.client else {},
            recv_oct=self.received,
            send_oct=self.sent,
            send_pend=waiting,
            requests=len(self._tasks),
        )

    def sessions(self) -> list[int]:
        """Returns the sessions through which it publishes."""
        return self.requests.sessions()
