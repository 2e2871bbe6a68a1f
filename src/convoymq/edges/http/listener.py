"""Listens for HTTP.

The sockets listen from the start; the web framework is imported when the first client connects,
so a process that nobody looks at does not carry it.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.http.times import Times
from convoymq.transport.listening import listen

if TYPE_CHECKING:
    import ssl
    from typing import TypeAlias

    import uvicorn
    from starlette.types import ASGIApp

    _MakeServer: TypeAlias = Callable[[ASGIApp, Times, int, ssl.SSLContext | None], uvicorn.Server]

log = structlog.get_logger()

STOP_TIMEOUT_S = 2.0


class Listener:
    """The sockets of a host and, after the first connection, the server behind them."""

    def __init__(
        self,
        address: tuple[str, int],
        make_app: Callable[[], ASGIApp],
        times: Times,
        backlog: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self.backlog = backlog
        self._tls = tls
        self._times = times
        self._make_app = make_app
        self._sockets: list[socket.socket] = []
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def open(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the first client.

        Args:
            sockets: listen already, and belong to the listener from now on; None: it binds its
                address.
        """
        self._sockets = sockets or listen(*self.address, self.backlog)
        self.port = self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._on_first)

    def _on_first(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock.fileno())
        # Owned by this object: `close` ends and awaits it.
        self._task = loop.create_task(self._serve(list(self._sockets)))

    async def _serve(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                # Importing takes a tenth of a second: in a thread that does not stop the loop.
                make_server = await loop.run_in_executor(None, _import_server)
                app = await loop.run_in_executor(None, self._make_app)
                self._server = make_server(app, self._times, self.backlog, self._tls)
                await self._server.serve(sockets=sockets)
                return
            except Exception as error:
                # Without file descriptors modules cannot be opened, and a half imported one fails
                # in any way.
                log.error("management.start_failed", port=self.port, reason=repr(error))
            self._server = None
            await asyncio.sleep(self._times.start_pause_s)
            importlib.invalidate_caches()

    async def close(self) -> None:
        """Ends it; `open` begins anew."""
        sockets, self._sockets = self._sockets, []
        if not sockets:
            return
        if self._task is None:
            for sock in sockets:
                asyncio.get_running_loop().remove_reader(sock.fileno())
        elif self._server is None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            self._server.should_exit = True
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.shield(self._task)
            except TimeoutError:
                self._server.force_exit = True
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
                # The server leaves the connections of requests that still run.
                for connection in list(self._server.server_state.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
                await asyncio.sleep(0)
        self._task = self._server = None
        for sock in sockets:
            sock.close()


def _import_server() -> _MakeServer:
    from convoymq.edges.http.http_server import make_server

    return make_server
