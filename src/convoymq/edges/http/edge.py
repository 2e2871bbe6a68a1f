"""The HTTP API and metrics as an edge of a node."""

from __future__ import annotations

from convoymq.edges.edge import Edge, NodeParts
from convoymq.edges.http.process import places_info, process_info, watermark_setting
from convoymq.edges.http.server import ManagementServer
from convoymq.model.json import JsonObject


def open_edge(parts: NodeParts) -> ManagementEdge:
    """Makes the edge as the node's configuration wants it, and tells the broker of the process."""
    config = parts.config
    places = places_info(config, parts.data.path)

    def node_info() -> JsonObject:
        setting = watermark_setting(config, parts.watermarks)
        live = process_info(parts.data.path, parts.watermarks)
        return {**live, **places, "vm_memory_high_watermark_setting": setting}

    parts.broker.cluster.node_info = node_info
    parts.broker.watermarks = parts.watermarks
    parts.broker.link_info = parts.links.info
    parts.broker.clock_skew = parts.links.clock_skew
    return ManagementEdge(
        ManagementServer(
            parts.broker,
            [(address.host, address.port) for address in config.management.tcp],
            [(address.host, address.port) for address in config.management.prometheus],
            message_bytes_max=config.amqp.max_message_size,
            backlog=config.listeners.backlog,
        )
    )


class ManagementEdge(Edge):
    """See the module text."""

    after_ready = True

    def __init__(self, server: ManagementServer) -> None:
        self._server = server

    async def start(self) -> None:
        """See `Edge`."""
        await self._server.start()

    async def stop(self) -> None:
        """See `Edge`."""
        await self._server.stop()
