"""Servers of the remoting protocol."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

import structlog

from convoymq.model.tasks import Tasks
from convoymq.rocketmq.machine import MACHINE, Listening, Machine
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.remoting.tls import ServerTls

log = structlog.get_logger()

IDLE_S = 120.0
CONNECTIONS_MAX = 65_536


class RemotingServer:
    """Listens on ports, and serves what connects.

    Args:
        handler: answers requests.
        closed: hears of connections that ended.
        idle_s: a connection on which nothing arrives for so long is closed.
        tls: which connections have TLS; None: none.
        refused: counts answers other than success, by code.
    """

    def __init__(
        self,
        handler: Handler,
        closed: Callable[[Connection], None],
        *,
        idle_s: float = IDLE_S,
        tls: ServerTls | None = None,
        refused: Counter[int] | None = None,
        machine: Machine = MACHINE,
    ) -> None:
        self._tls = tls
        self._refused = refused
        self._machine = machine
        self.connections: set[Connection] = set()
        self._handler = handler
        self._on_closed = closed
        self._idle_s = idle_s
        self._tasks = Tasks()
        self._servers: list[Listening] = []

    async def listen(self, host: str, port: int) -> int:
        """Serves a port, 0 takes a free one; returns its number. Raises OSError."""
        servers, port = await self._machine.listen(self._accept, host, port)
        self._servers += servers
        return port

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self.connections) >= CONNECTIONS_MAX:
            log.warning("remoting.too_many_connections", limit=CONNECTIONS_MAX)
            return _Refused()
        connection = Connection(
            self._handler, self._tasks, self._closed, idle_s=self._idle_s, tls=self._tls,
            refused=self._refused,
        )  # fmt: skip
        self.connections.add(connection)
        return connection

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._on_closed(connection)

    async def stop(self) -> None:
        """Closes ports and connections."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close()
        await self._tasks.stop()


class _Refused(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        cast("asyncio.Transport", transport).abort()
