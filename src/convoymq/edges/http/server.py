"""Listens for the HTTP API and for metrics.

The sockets listen from the start; the web framework is imported when the first client connects,
so a node that nobody looks at does not carry it.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.facade import Broker
from convoymq.edges.http.served import Served
from convoymq.edges.http.times import Times
from convoymq.transport.listening import BACKLOG, listen

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from convoymq.edges.http.rates import Rates

log = structlog.get_logger()

STOP_TIMEOUT_S = 2.0


class ManagementServer:
    """The HTTP endpoints of one node."""

    def __init__(
        self,
        broker: Broker,
        api: Sequence[tuple[str, int]],
        prometheus: Sequence[tuple[str, int]] = (),
        *,
        served: Served | None = None,
        times: Times | None = None,
        backlog: int = BACKLOG,
    ) -> None:
        """
        Args:
            api, prometheus: addresses as (host, port); port 0 takes a free one.
            backlog: connections that the system accepts ahead of the node.
        """
        self._broker = broker
        self._rates: Rates | None = None
        self._served = served
        times = times or Times()
        self._listeners = [
            *(_Listener(address, self._make_api, times, backlog) for address in api),
            *(_Listener(address, self._make_metrics, times, backlog) for address in prometheus),
        ]

    @property
    def ports(self) -> list[int]:
        """Returns the ports that are listened on, in the order of the addresses."""
        return [listener.port for listener in self._listeners]

    async def start(self) -> None:
        """Listens. Raises OSError when an address is taken."""
        try:
            for listener in self._listeners:
                listener.open()
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops listening and ends requests under way."""
        for listener in self._listeners:
            await listener.close()
        if self._rates is not None:
            await self._rates.stop()

    def _make_api(self) -> ASGIApp:
        from convoymq.edges.http.app import make_api
        from convoymq.edges.http.rates import Rates

        if self._rates is None:
            self._rates = Rates()
        return make_api(self._broker, served=self._served, rates=self._rates)

    def _make_metrics(self) -> ASGIApp:
        from convoymq.edges.http.app import make_metrics

        return make_metrics(self._broker, self._served)


class _Listener:
    """The sockets of a host and, after the first connection, the server behind them."""

    def __init__(
        self,
        address: tuple[str, int],
        make_app: Callable[[], ASGIApp],
        times: Times,
        backlog: int,
    ) -> None:
        self._address = address
        self._times = times
        self._make_app = make_app
        self._backlog = backlog
        self._sockets: list[socket.socket] = []
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def open(self) -> None:
        """Binds and waits for the first client."""
        self._sockets = listen(*self._address, self._backlog)
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
                self._server = make_server(app, self._times, self._backlog)
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
        """Ends it."""
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
        for sock in sockets:
            sock.close()


def _import_server() -> Callable[[ASGIApp, Times, int], uvicorn.Server]:
    from convoymq.edges.http.http_server import make_server

    return make_server
