"""Metrics and health of a role over HTTP: settings, and the listener (ADR 0182)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.http.listener import Listener
from convoymq.edges.http.times import Times
from convoymq.model.config.keys import key
from convoymq.rocketmq.remoting.tls import TlsSettings
from convoymq.transport.listening import BACKLOG

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from convoymq.edges.http.scrapes import Render

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(TlsSettings):
    """Settings that all roles have which clients connect to. The names are RocketMQ's."""

    metrics: str = key(
        "metricsExporterType", "DISABLE", "`PROM`: metrics for Prometheus, and `/health`.",
        choices=("DISABLE", "PROM"),
    )  # fmt: skip
    metrics_port: int = key("metricsPromExporterPort", 5557, "Port of both.", low=0, high=65535)
    metrics_host: str = key(
        "metricsPromExporterHost", "localhost", "Address of that port. There is no log-in."
    )


class Exposition:
    """The listener of a role; nothing without `metricsExporterType=PROM`.

    Args:
        faults: returns why the role does not serve clients.
    """

    def __init__(
        self, settings: ServerSettings, render: Render, faults: Callable[[], list[str]]
    ) -> None:
        self._listener: Listener | None = None
        if settings.metrics == "PROM":
            self._listener = Listener(
                (settings.metrics_host, settings.metrics_port), self._make, Times(), BACKLOG
            )
        self._render = render
        self._faults = faults

    def _make(self) -> ASGIApp:
        from convoymq.edges.http.scrapes import make_scrapes

        return make_scrapes(self._render, self._faults)

    @property
    def port(self) -> int:
        """Returns the port that it listens on, 0 = none."""
        return 0 if self._listener is None else self._listener.port

    def start(self) -> None:
        """Listens. Raises OSError."""
        if self._listener is not None:
            self._listener.open()
            log.info("rocketmq.metrics_listening", port=self._listener.port)

    async def stop(self) -> None:
        """Ends."""
        if self._listener is not None:
            await self._listener.close()
