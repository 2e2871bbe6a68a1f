"""The HTTP server; imports the web framework, so only `server` imports this, when it has to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import h11
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from convoymq.management.times import Times

log = structlog.get_logger()

KEEP_ALIVE_S = 30
CONNECTIONS_MAX = 1024


class _Server(uvicorn.Server):
    """Leaves signals to the node."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Ends connections that keep a request or an answer waiting; uvicorn bounds idle ones."""

    times = Times()
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

    def _watch_head(self) -> None:
        """The time for a head runs while no request is answered, and no idle time runs."""
        busy = self.cycle is not None and not self.cycle.response_complete
        idle = (
            self.timeout_keep_alive_task is not None
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
        )
        if busy or idle or self.transport.is_closing():
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


def make_server(app: ASGIApp, times: Times, backlog: int) -> _Server:
    """Makes a server for sockets that listen already."""
    config = uvicorn.Config(
        app,
        loop="none",
        backlog=backlog,
        http=type("Protocol", (_Protocol,), {"times": times}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    return _Server(config)
