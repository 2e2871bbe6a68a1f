"""The HTTP API and metrics as an edge of a node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convoymq.broker.access import HTTP
from convoymq.broker.registry import MessageCounters
from convoymq.edges.edge import Edge, Metric, NodeParts, message_metrics, size_metrics
from convoymq.edges.http.config import ManagementConfig
from convoymq.edges.http.served import served_by
from convoymq.edges.http.server import ManagementServer, Secured
from convoymq.model.config import Address, SslConfig

if TYPE_CHECKING:
    from convoymq.broker.cluster_queries import Family
    from convoymq.edges.http.definition_files import DefinitionFiles


def open_edge(parts: NodeParts) -> ManagementEdge:
    """Makes the edge as the node's configuration wants it."""
    config = parts.config
    own = config.of(ManagementConfig)

    async def families(asked: list[object]) -> list[Family]:
        # Takes the web framework with it, which an idle node does not load.
        from convoymq.edges.http.metrics import families_of, scrape_of

        return await families_of(parts.broker, parts.edges(), scrape_of(asked))

    parts.broker.cluster.metric_families = families
    return ManagementEdge(
        ManagementServer(
            parts.broker,
            _pairs(own.tcp),
            _pairs(own.prometheus),
            api_tls=_secured(own.ssl, config.management_ssl),
            prometheus_tls=_secured(own.prometheus_ssl, config.prometheus_ssl),
            served=served_by(config, parts.edges),
            backlog=config.listeners.backlog,
            turns=parts.turns,
        ),
        parts.broker.counters.of(HTTP),
        _files(parts, own),
    )


def _files(parts: NodeParts, own: ManagementConfig) -> DefinitionFiles | None:
    if not own.definitions_path:
        return None
    # Takes the whole of definitions with it, which an idle node does not load.
    from convoymq.edges.http.definition_files import DefinitionFiles

    memory = Path(parts.config.node.data_dir) / "definitions.imported"
    return DefinitionFiles(parts.broker, own, memory)


def _pairs(addresses: Sequence[Address]) -> list[tuple[str, int]]:
    return [(address.host, address.port) for address in addresses]


def _secured(addresses: Sequence[Address], options: SslConfig) -> Secured | None:
    if not addresses:
        return None
    # Takes OpenSSL with it, which a node without TLS does not load.
    from convoymq.edges.tls import client_tls

    return Secured(_pairs(addresses), client_tls(options))


class ManagementEdge(Edge):
    """See the module text."""

    after_ready = True

    def __init__(
        self,
        server: ManagementServer,
        messages: MessageCounters,
        files: DefinitionFiles | None = None,
    ) -> None:
        self._server = server
        self._messages = messages
        self._files = files

    async def start(self) -> None:
        await self._server.start()
        if self._files is not None:
            self._files.start()

    def metrics(self) -> list[Metric]:
        return [
            *message_metrics(HTTP, self._messages),
            *size_metrics(HTTP, self._messages.sizes),
        ]

    async def stop(self) -> None:
        if self._files is not None:
            await self._files.stop()
        await self._server.stop()
