"""Connections of the remoting protocol to others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial

from convoymq.model.errors import Unavailable
from convoymq.model.tasks import Tasks
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.connection import Connection, Handler, Unreachable, dispatch

CONNECT_TIMEOUT_S = 3.0


def split_address(address: str) -> tuple[str, str]:
    """Returns host and port of `host:port`; an IPv6 host may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


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

    async def ask(self, address: str, command: Command, timeout_s: float) -> Command:
        """Returns the answer to a request; `timeout_s` is the time for the connection and the
        answer together. Raises Unavailable."""
        if self.is_connected(address):
            return await self._open[address].request(command, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.connected(address, timeout_s)
                return await connection.request(command, timeout_s)
        except TimeoutError:
            raise Unavailable(f"{address} did not answer within {timeout_s:g} s") from None

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
