"""The HTTP server; imports the web framework, so only `server` imports this, when it has to."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import h11
import structlog
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from convoymq.edges.http.times import Times

log = structlog.get_logger()

KEEP_ALIVE_S = 30
CONNECTIONS_MAX = 1024
WAITING_MAX = CONNECTIONS_MAX // 2
"""Connections without a whole request; who sends one is answered whatever others leave open."""
TOLD_INTERVAL_S = 60.0
"""Time between two log lines about clients that open too many connections."""


class Waiting:
    """Connections of a server on which no request is answered, the oldest first."""

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
        """Removes a connection that sends a request, or is gone."""
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

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

    def _watch_head(self) -> None:
        """The time for a head runs while no request is answered, and no idle time runs."""
        busy = self.cycle is not None and not self.cycle.response_complete
        idle = (
            self.timeout_keep_alive_task is not None
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
        )
        ends = self.transport.is_closing()
        if busy or ends:
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

    def _give_up(self, reason: str) -> None:
        log.info("management.slow_client", peer=self.client, reason=reason)
        self.transport.abort()


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


def make_server(app: ASGIApp, times: Times, backlog: int) -> _Server:
    """Makes a server for sockets that listen already."""
    members = {"times": times, "waiting": Waiting()}
    config = uvicorn.Config(
        _unambiguous(app),
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
    return _Server(config)
