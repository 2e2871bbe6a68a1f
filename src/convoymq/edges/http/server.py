"""The HTTP API and the metrics of a node, on their ports."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.facade import Broker
from convoymq.edges.http.listener import Listener
from convoymq.edges.http.served import Served
from convoymq.edges.http.times import Times
from convoymq.transport.listening import BACKLOG
from convoymq.transport.shared_sockets import TurnSockets

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

    from convoymq.edges.http.authentication import Authentication


log = structlog.get_logger()

LOOK_S = 0.1
"""So often a process looks whether it serves the HTTP addresses of its machine."""


@dataclass(frozen=True, slots=True)
class Secured:
    """Addresses with TLS."""

    addresses: Sequence[tuple[str, int]]
    tls: ssl.SSLContext


class ManagementServer:
    """The HTTP endpoints of one node."""

    def __init__(
        self,
        broker: Broker,
        api: Sequence[tuple[str, int]],
        prometheus: Sequence[tuple[str, int]] = (),
        *,
        api_tls: Secured | None = None,
        prometheus_tls: Secured | None = None,
        served: Served | None = None,
        times: Times | None = None,
        backlog: int = BACKLOG,
        turns: TurnSockets | None = None,
    ) -> None:
        """
        Args:
            api, prometheus: addresses as (host, port); port 0 takes a free one.
            backlog: connections that the system accepts ahead of the node.
            turns: the sockets of the addresses, where the processes of a machine share them.
        """
        self._turns = turns
        self._shared: list[list[socket.socket]] = []
        """Sockets of each listener that this process shares with others."""
        self._looking: asyncio.Task[None] | None = None
        self._broker = broker
        self._authentication: Authentication | None = None
        """Of all addresses."""
        self._served = served
        times = times or Times()
        self._listeners = [
            Listener(address, make, times, backlog, tls)
            for make, plain, secured in (
                (self._make_api, api, api_tls),
                (self._make_metrics, prometheus, prometheus_tls),
            )
            for addresses, tls in (
                (plain, None),
                (secured.addresses, secured.tls) if secured else ((), None),
            )
            for address in addresses
        ]

    @property
    def ports(self) -> list[int]:
        """Returns the ports that are listened on, in the order of the addresses."""
        return [listener.port for listener in self._listeners]

    async def start(self) -> None:
        """Listens. Raises OSError when an address is taken."""
        turns = self._turns
        if turns is not None:
            for listener in self._listeners:
                self._shared.append(turns.open(*listener.address, listener.backlog, clients=0))
            self._looking = asyncio.create_task(self._take_turns(turns))
            return
        try:
            for listener in self._listeners:
                listener.open()
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops listening and ends requests under way."""
        if self._turns is not None and self._looking is not None:
            # Another process serves new connections meanwhile.
            self._turns.close()
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._close()
        for sock in (sock for sockets in self._shared for sock in sockets):
            sock.close()

    async def _take_turns(self, turns: TurnSockets) -> None:
        """Serves while it is this process's turn."""
        served = False
        while True:
            serves = turns.look(time.monotonic_ns() // 1_000_000)
            if serves and not served:
                served = self._open_shared()
            elif served and not serves:
                await self._close()
                served = False
            await asyncio.sleep(LOOK_S)

    def _open_shared(self) -> bool:
        """Returns whether there were descriptors for it; if not, it is tried again."""
        duplicates: list[list[socket.socket]] = []
        try:
            for sockets in self._shared:
                duplicates.append([])
                for sock in sockets:
                    duplicates[-1].append(sock.dup())
        except OSError as error:
            log.error("management.start_failed", port=0, reason=repr(error))
            for sock in (sock for sockets in duplicates for sock in sockets):
                sock.close()
            return False
        for listener, sockets in zip(self._listeners, duplicates, strict=True):
            listener.open(sockets)
        return True

    async def _close(self) -> None:
        for listener in self._listeners:
            await listener.close()

    def _make_api(self) -> ASGIApp:
        from convoymq.edges.http.app import make_api
        from convoymq.edges.http.authentication import Authentication

        if self._authentication is None:
            self._authentication = Authentication(self._broker, self._served or Served())
        return make_api(
            self._broker,
            served=self._served,
            authentication=self._authentication,
        )

    def _make_metrics(self) -> ASGIApp:
        from convoymq.edges.http.app import make_metrics

        return make_metrics(self._broker, self._served)
