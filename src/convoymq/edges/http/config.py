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

    definitions_backend: str = key(
        "definitions.import_backend",
        "local_filesystem",
        "Source of definitions that are imported at the start.",
        choices=("local_filesystem",),
    )
    definitions_path: str = key(
        "definitions.local.path load_definitions management.load_definitions",
        "",
        """File with definitions, or a directory whose files `*.json` are imported by name: at the
        start, and when they change. Empty: none.""",
    )
    definitions_skip_if_unchanged: bool = key(
        "definitions.skip_if_unchanged",
        False,
        "Do not import again at a start what this node has imported before.",
    )
    definitions_skip_unsupported: bool = key(
        "definitions.skip_unsupported",
        False,
        """Leave out what this release does not serve, and log it; otherwise a file with such a part
        is not imported at all.""",
    )
    definitions_interval_s: int = key(
        "definitions.interval",
        10,
        "Time after which changed files are looked for; 0 = at the start only.",
        unit="s",
        low=0,
        high=86_400,
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
