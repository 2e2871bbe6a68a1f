"""One connection of the remoting protocol, whichever side opened it: both may send requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, cast

import structlog

from convoymq.model.errors import BrokerError, PeerError, Unavailable
from convoymq.model.tasks import Tasks
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import (
    FRAME_BYTES_MAX,
    Command,
    CommandReader,
    Refusal,
    encode,
)
from convoymq.rocketmq.remoting.tls import ServerTls, TlsLayer

log = structlog.get_logger()

OUTPUT_BYTES_MAX = 64 << 20
"""Of what a peer has not read; more closes its connection."""

Answered: TypeAlias = "Command | Awaitable[Command | None] | None"
"""An answer. None: not now, or never, since the request is one-way."""
Handler: TypeAlias = "Callable[[Connection, Command], Answered]"
"""Answers a request."""
Handlers: TypeAlias = "Mapping[int, Handler]"
"""By the code of the request."""


class Unreachable(Unavailable):
    """The connection to a peer cannot be made, or ended before the answer."""


def dispatch(handlers: Handlers) -> Handler:
    """Returns a handler that asks the one for the request's code, and refuses unknown codes."""

    def unknown(_connection: Connection, command: Command) -> Command:
        text = f" request type {command.code} not supported"
        return command.answer(Answer.REQUEST_CODE_NOT_SUPPORTED, remark=text)

    return lambda connection, command: handlers.get(command.code, unknown)(connection, command)


class Connection(asyncio.Protocol):
    """A connection.

    Args:
        handler: answers requests of the peer.
        tasks: where answers that take their time are made.
        closed: hears of the end, once.
        idle_s: a connection on which nothing arrives for so long is closed; 0 = never.
        tls: of the server that accepted it.
        refused: counts answers other than success, by code.
        sign: signs a request before it is sent.
    """

    def __init__(
        self,
        handler: Handler,
        tasks: Tasks,
        closed: Callable[[Connection], None],
        *,
        idle_s: float = 0.0,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        tls: ServerTls | None = None,
        refused: Counter[int] | None = None,
        sign: Callable[[Command], None] | None = None,
    ) -> None:
        self._sign = sign
        self._refused = refused
        self._server_tls = tls
        self._tls: TlsLayer | None = None
        self.remote = ("", 0)
        self._handler = handler
        self._tasks = tasks
        self._closed = closed
        self._idle_s = idle_s
        self._reader = CommandReader(frame_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Command]] = {}
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Returns the peer as logs show it."""
        return f"{self.remote[0]}:{self.remote[1]}"

    @property
    def is_open(self) -> bool:
        """Returns whether commands can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    # --- asyncio's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        self.remote = (str(peer[0]), int(peer[1]))
        if self._idle_s:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(Unreachable(f"the connection to {self.name} ended"))
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = self._loop.time()
        try:
            commands = self._reader.feed(self._content(data))
        except PeerError as error:
            log.warning("remoting.broken_frame", peer=self.name, reason=error.text)
            self.close()
            return
        for command in commands:
            if command.is_answer:
                self._on_answer(command)
            else:
                self._on_request(command)

    def _content(self, data: bytes) -> bytes:
        """Returns bytes without TLS. Raises FrameFault."""
        if self._server_tls is not None:
            self._tls, self._server_tls = self._server_tls.layer(data), None
        if self._tls is None:
            return data
        try:
            return self._tls.receive(data)
        finally:
            pending = self._tls.pending()
            if pending and self._transport is not None:
                self._transport.write(pending)

    def _watch(self) -> None:
        left_s = self._heard + self._idle_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
            return
        log.info("remoting.idle", peer=self.name)
        self.close()

    # --- requests of the peer --------------------------------------------------------------

    def _on_request(self, command: Command) -> None:
        try:
            found = self._handler(self, command)
        except Exception as error:
            self._on_failed(command, error)
            return
        if isinstance(found, Command):
            self.answer(command, found)
        elif found is not None:
            self._tasks.spawn(self._answer_later(command, found))

    async def _answer_later(self, command: Command, found: Awaitable[Command | None]) -> None:
        try:
            answer = await found
        except Exception as error:
            self._on_failed(command, error)
            return
        if answer is not None:
            self.answer(command, answer)

    def _on_failed(self, command: Command, error: Exception) -> None:
        """One request failed; the others are none the worse."""
        if not isinstance(error, BrokerError):
            log.error("remoting.fault", peer=self.name, code=command.code, exc_info=error)
        text = error.text if isinstance(error, BrokerError) else f"{type(error).__name__}: {error}"
        known = error if isinstance(error, Refusal) else Refusal(Answer.SYSTEM_ERROR, text)
        self.answer(command, command.answer(known.code, known.fields, remark=text))

    def answer(self, command: Command, answer: Command) -> None:
        """Sends an answer, which may be late, unless nobody waits for it."""
        if answer.code and self._refused is not None:
            self._refused[answer.code] += 1
        if not command.is_one_way:
            self.send(answer)

    def answer_all(self, answers: Sequence[Command]) -> None:
        """Sends answers without slices as one write."""
        if self._refused is not None:
            self._refused.update(each.code for each in answers if each.code)
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._write(transport, (b"".join(map(encode, answers)),))

    # --- requests of ours --------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Sends a command; nothing happens when the connection has ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._sign is not None and not command.is_answer:
            self._sign(command)
        self._write(transport, (encode(command), *command.slices))

    def _write(self, transport: asyncio.Transport, parts: tuple[bytes | memoryview, ...]) -> None:
        if self._tls is not None:
            parts = (self._tls.wrap(parts),)
        if len(parts) == 1:
            transport.write(parts[0])
        else:
            transport.writelines(parts)
        if transport.get_write_buffer_size() > OUTPUT_BYTES_MAX:
            log.warning("remoting.peer_does_not_read", peer=self.name)
            transport.abort()

    async def request(self, command: Command, timeout_s: float) -> Command:
        """Sends a request and returns its answer. Raises Unreachable, Unavailable."""
        if not self.is_open:
            raise Unreachable(f"the connection to {self.name} ended")
        future: asyncio.Future[Command] = self._loop.create_future()
        self._waiting[command.opaque] = future
        try:
            self.send(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(command.opaque, None)

    def _on_answer(self, command: Command) -> None:
        future = self._waiting.get(command.opaque)
        # Nobody waits any more for one that is late.
        if future is not None and not future.done():
            future.set_result(command)

    def close(self) -> None:
        """Ends the connection; what was sent before still arrives."""
        if self._transport is not None:
            self._transport.close()
