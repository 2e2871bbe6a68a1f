"""Servers of the remoting protocol, and connections to others."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias, cast

import structlog

from convoymq.model.tasks import Tasks
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.connection import Connection, Handler, Unreachable
from convoymq.rocketmq.remoting.tls import ServerTls
from convoymq.transport.listening import listen

log = structlog.get_logger()

IDLE_S = 120.0
CONNECT_TIMEOUT_S = 3.0
CONNECTIONS_MAX = 65_536

Handlers: TypeAlias = Mapping[int, Handler]
"""By the code of the request."""


def split_address(address: str) -> tuple[str, str]:
    """Returns host and port of `host:port`; an IPv6 host may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def dispatch(handlers: Handlers) -> Handler:
    """Returns a handler that asks the one for the request's code, and refuses unknown codes."""

    def unknown(_connection: Connection, command: Command) -> Command:
        text = f" request type {command.code} not supported"
        return command.answer(Answer.REQUEST_CODE_NOT_SUPPORTED, remark=text)

    return lambda connection, command: handlers.get(command.code, unknown)(connection, command)


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
    ) -> None:
        self._tls = tls
        self._refused = refused
        self.connections: set[Connection] = set()
        self._handler = handler
        self._on_closed = closed
        self._idle_s = idle_s
        self._tasks = Tasks()
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, port: int) -> int:
        """Serves a port, 0 takes a free one; returns its number. Raises OSError."""
        sockets = listen(host, port)
        loop = asyncio.get_running_loop()
        for sock in sockets:
            self._servers.append(await loop.create_server(self._accept, sock=sock))
        return int(sockets[0].getsockname()[1])

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


class RemotingClient:
    """Connections to other servers: one to each address, made when it is needed.

    Args:
        handler: answers requests that they send.
        tls: of the connections; None: none.
        sign: signs a request before it is sent.
    """

    def __init__(
        self,
        handler: Handler | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        sign: Callable[[Command], None] | None = None,
    ) -> None:
        self._handler = handler or dispatch({})
        self._tls = tls
        self.sign = sign
        self._tasks = Tasks()
        self._open: dict[str, Connection] = {}
        self._dialling: dict[str, asyncio.Task[Connection]] = {}

    async def connected(self, address: str, timeout_s: float) -> Connection:
        """Returns the connection to `host:port`. Raises Unreachable."""
        if self.is_connected(address):
            return self._open[address]
        task = self._dialling.get(address)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(address))
            self._dialling[address] = task
            task.add_done_callback(partial(self._dialled, address))
        try:
            # Others may wait for the same connection: who gives up does not end it for them.
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Unreachable(f"{address} cannot be reached within {timeout_s:g} s") from None

    def _dialled(self, address: str, task: asyncio.Task[Connection]) -> None:
        del self._dialling[address]
        if not task.cancelled():
            # Nobody may wait for it any more.
            task.exception()

    async def _dial(self, address: str) -> Connection:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._handler, self._tasks, self._forget, sign=self.sign),
                    host,
                    int(port),
                    ssl=self._tls,
                )
        except (OSError, ValueError) as error:
            raise Unreachable(f"{address} cannot be reached: {error}") from None
        self._open[address] = connection
        return connection

    def _forget(self, connection: Connection) -> None:
        for address in [a for a, c in self._open.items() if c is connection]:
            del self._open[address]

    def is_connected(self, address: str) -> bool:
        """Returns whether there is a connection to an address."""
        found = self._open.get(address)
        return found is not None and found.is_open

    def close(self, address: str) -> None:
        """Ends the connection to an address, if there is one."""
        found = self._open.pop(address, None)
        if found is not None:
            found.close()

    async def stop(self) -> None:
        """Ends all connections."""
        for task in list(self._dialling.values()):
            task.cancel()
        for connection in list(self._open.values()):
            connection.close()
        await self._tasks.stop()
