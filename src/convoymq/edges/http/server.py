"""The HTTP API and the metrics of a node, on their ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoymq.broker.facade import Broker
from convoymq.edges.http.listener import Listener
from convoymq.edges.http.served import Served
from convoymq.edges.http.times import Times
from convoymq.transport.listening import BACKLOG

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

    from convoymq.edges.http.authentication import Authentication


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
    ) -> None:
        """
        Args:
            api, prometheus: addresses as (host, port); port 0 takes a free one.
            backlog: connections that the system accepts ahead of the node.
        """
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
