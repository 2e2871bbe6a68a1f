"""The client protocols of one node, and the ports that they share.

Edges begin before the ports open, but those that say `after_ready`, which begin when the node is
usable, and end first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.edges.acceptor import SharedPorts
from convoymq.edges.edge import Edge, NodeParts
from convoymq.edges.registry import open_edges
from convoymq.model.config import Config
from convoymq.node.rounds import Rounds

if TYPE_CHECKING:
    import ssl

    from convoymq.broker.facade import Broker
    from convoymq.node.supervised import Supervised


class ServedEdges:
    """See the module text.

    Args:
        activity: returns a number that changes when clients are active (`NodeParts.activity`).
        supervised: what the node has in common with other processes of its machine.
    """

    def __init__(
        self,
        config: Config,
        broker: Broker,
        rounds: Rounds,
        activity: Callable[[], int],
        supervised: Supervised | None = None,
    ) -> None:
        self._config = config
        self._shared = supervised.sockets if supervised is not None else None
        self._run_input = rounds.run_input
        parts = NodeParts(
            config=config,
            broker=broker,
            wake=rounds.wake,
            run_input=rounds.run_input,
            activity=activity,
            edges=lambda: self.all,
            turns=supervised.http if supervised is not None else None,
        )
        self._ports: SharedPorts | None = None
        self.all: tuple[Edge, ...] = ()
        self.all = tuple(open_edges(parts))

    async def begin(self) -> SharedPorts:
        """Begins the edges and returns their ports, which are not open yet."""
        await self._start(after_ready=False)
        listeners = self._config.listeners
        ports = self._ports = SharedPorts(
            self.all,
            connections_max=listeners.connections_max,
            handshake_timeout_s=listeners.handshake_timeout_ms / 1000,
            backlog=listeners.backlog,
            run_input=self._run_input,
            shared=self._shared,
        )
        for addresses, tls in ((listeners.tcp, None), (listeners.ssl, self._client_tls())):
            for address in addresses:
                ports.add(address.host, address.port, tls)
        return ports

    async def begin_late(self) -> None:
        """Begins the edges that serve a usable node."""
        await self._start(after_ready=True)

    async def end_late(self) -> None:
        """Ends the edges that serve a usable node."""
        await self._stop(after_ready=True)

    async def end(self) -> None:
        """Closes the ports and ends the other edges."""
        if self._ports is not None:
            self._ports.stop()
        await self._stop(after_ready=False)

    def activity(self) -> int:
        """Returns the sum of the edges' activity."""
        return sum(edge.activity() for edge in self.all)

    def _client_tls(self) -> ssl.SSLContext | None:
        if not self._config.listeners.ssl:
            return None
        # Takes OpenSSL with it, which a node without TLS does not load.
        from convoymq.edges.tls import client_tls

        return client_tls(self._config.ssl)

    async def _start(self, *, after_ready: bool) -> None:
        for edge in self.all:
            if edge.after_ready == after_ready:
                await edge.start()

    async def _stop(self, *, after_ready: bool) -> None:
        await asyncio.gather(*(edge.stop() for edge in self.all if edge.after_ready == after_ready))
