"""The HTTP server; imports the web framework, so only `server` imports this, when it has to."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import h11
import structlog
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from convoymq.edges.http.times import HOLD_BACK, Times
from convoymq.model.errors import InvariantViolated

if TYPE_CHECKING:
    import ssl

log = structlog.get_logger()

KEEP_ALIVE_S = 30
CONNECTIONS_MAX = 1024
WAITING_MAX = CONNECTIONS_MAX // 2
"""Connections without a whole request; who sends one is answered whatever others leave open."""
TOLD_INTERVAL_S = 60.0
"""Time between two log lines about clients that open too many connections."""
HEAD_END = b"\r\n\r\n"
BARE_LF = re.compile(rb"(?<!\r)\n")


class _StrictLines(ReceiveBuffer):
    """Input in which lines of a head end with CR LF. h11 takes LF alone as well: where a head ends
    would be another place than for a proxy in front."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Refuses what h11 would take."""
        if self._data[:2] != b"\r\n":
            end = self._data.find(HEAD_END, max(0, self._multiple_lines_search - 1))
            end = len(self._data) if end < 0 else end
            if BARE_LF.search(self._data, self._multiple_lines_search, end) is not None:
                raise h11.RemoteProtocolError("a line ends without CR")
        return super().maybe_extract_lines()


class Waiting:
    """Connections of a server on which no request is served, the oldest first."""

    def __init__(self) -> None:
        self._hosts: dict[_Protocol, str] = {}
        self._counts: Counter[str] = Counter()
        self._told_at = -TOLD_INTERVAL_S

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, protocol: _Protocol, host: str) -> None:
        """Adds a connection. Beyond `WAITING_MAX` the oldest one of the address that has the most
        is closed."""
        if protocol in self._hosts:
            return
        self._hosts[protocol] = host
        self._counts[host] += 1
        if len(self._hosts) <= WAITING_MAX:
            return
        ((greedy, count),) = self._counts.most_common(1)
        oldest = next(each for each, of in self._hosts.items() if of == greedy)
        now = asyncio.get_running_loop().time()
        if now - self._told_at >= TOLD_INTERVAL_S:
            self._told_at = now
            log.warning("management.crowded", peer=greedy, connections=count)
        self.discard(oldest)
        oldest.transport.abort()

    def discard(self, protocol: _Protocol) -> None:
        """Removes a connection whose request is served, or that is gone."""
        host = self._hosts.pop(protocol, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]


class _Server(uvicorn.Server):
    """Leaves signals to the node."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Ends connections that keep a request or an answer waiting; uvicorn bounds idle ones in time,
    `Waiting` in number."""

    times = Times()
    waiting = Waiting()
    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _held_back: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn._receive_buffer = _StrictLines()
        app = self.app

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            scope[HOLD_BACK] = self._hold_back
            await app(scope, receive, send)

        self.app = run
        self._watch_head()

    async def _hold_back(self, delay_s: float) -> None:
        """Lets time pass before a refusal, or the connection end. It counts as one without a
        request: who guesses passwords keeps nobody out."""
        self._held_back = self.loop.create_future()
        timer = self.loop.call_later(delay_s, self._let_go)
        self._watch_head()
        try:
            await self._held_back
        finally:
            timer.cancel()
            self._held_back = None
            self._watch_head()

    def _let_go(self) -> None:
        if self._held_back is not None and not self._held_back.done():
            self._held_back.set_result(None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = self.loop.call_later(
            self.times.answer_s, self._give_up, "answer not read"
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._answer_timer = None
        self.waiting.discard(self)
        self._let_go()

    def _watch_head(self) -> None:
        """The time for a head runs while no request is answered, and no idle time runs."""
        busy = self.cycle is not None and not self.cycle.response_complete
        idle = (
            self.timeout_keep_alive_task is not None
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
        )
        ends = self.transport.is_closing()
        if ends or (busy and self._held_back is None):
            self.waiting.discard(self)
        else:
            self.waiting.add(self, self.client[0] if self.client else "")
        if busy or idle or ends:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.times.head_s, self._give_up, "no whole request"
            )

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            # The answer has begun: no other can follow.
            self.transport.close()

    def _give_up(self, reason: str) -> None:
        log.info("management.slow_client", peer=self.client, reason=reason)
        self.transport.abort()


def _ending_the_process(app: ASGIApp) -> ASGIApp:
    """Returns the application so that a violated invariant in it reaches the loop, which ends the
    process: uvicorn would answer 500 and go on."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except InvariantViolated as error:
            fault = {"message": f"in a request of {scope['path']}", "exception": error}
            asyncio.get_running_loop().call_exception_handler(fault)
            raise

    return run


def _unambiguous(app: ASGIApp) -> ASGIApp:
    """Returns the application behind a check of how long a request is: a proxy in front may have
    chosen the other of two lengths, and then takes the rest for another client's request."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope["http_version"] == "1.0"
        ):
            body = {"error": "bad_request", "reason": "the length of the body is ambiguous"}
            response = JSONResponse(body, 400, {"connection": "close"})
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return check


def make_server(
    app: ASGIApp, times: Times, backlog: int, tls: ssl.SSLContext | None = None
) -> _Server:
    """Makes a server for sockets that listen already."""
    members = {"times": times, "waiting": Waiting()}
    config = uvicorn.Config(
        _ending_the_process(_unambiguous(app)),
        loop="none",
        backlog=backlog,
        http=type("Protocol", (_Protocol,), members),
        ws="none",
        lifespan="off",
        log_config=None,
        # What clients do wrong is no matter of the log: anyone could fill it.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    # uvicorn makes contexts of files only; ours is renewed when they change.
    config.load()
    config.ssl = tls
    return _Server(config)
