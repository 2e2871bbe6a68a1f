"""Section of the configuration of the HTTP API and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import Address, Listener, parse_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementConfig(Section):
    """The HTTP API and the metrics."""

    NAME: ClassVar[str] = "management"

    tcp: tuple[Address, ...] = key(
        "management.tcp.port",
        (Address("localhost", 15672),),
        "HTTP API: a port, an address and port, or `none`, as `listeners.tcp.default`.",
        parse=parse_listener,
    )
    ssl: tuple[Address, ...] = key(
        "management.ssl.port",
        (),
        "HTTP API with TLS, as `management.tcp.port`. Needs `management.ssl.certfile`, `.keyfile`.",
        parse=parse_listener,
    )
    prometheus: tuple[Address, ...] = key(
        "prometheus.tcp.port",
        (Address("localhost", 15692),),
        "Metrics for Prometheus: a port, an address and port, or `none`, as the others.",
        parse=parse_listener,
    )
    prometheus_ssl: tuple[Address, ...] = key(
        "prometheus.ssl.port",
        (),
        "Metrics with TLS, as the others. Needs `prometheus.ssl.certfile` and `.keyfile`.",
        parse=parse_listener,
    )
    session_timeout_min: int = key(
        "management.login_session_timeout",
        480,
        "Minutes after which a browser that logged in must do so again.",
        low=1,
        high=525_600,
    )

    def listeners(self) -> tuple[Listener, ...]:
        return (
            Listener("http", "http", "HTTP API", "management.tcp.port", self.tcp),
            Listener(
                "https", "https", "HTTP API with TLS", "management.ssl.port", self.ssl,
                "management_ssl",
            ),
            Listener(
                "metrics", "http/prometheus", "metrics", "prometheus.tcp.port", self.prometheus
            ),
            Listener(
                "metrics_tls", "https/prometheus", "metrics with TLS", "prometheus.ssl.port",
                self.prometheus_ssl, "prometheus_ssl",
            ),
        )  # fmt: skip


SECTION = ManagementConfig
