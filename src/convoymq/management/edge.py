"""The HTTP API and metrics as an edge of a node."""

from __future__ import annotations

from functools import partial

from convoymq.edges.edge import Edge, NodeParts
from convoymq.management.process import process_info
from convoymq.management.server import ManagementServer


def open_edge(parts: NodeParts) -> ManagementEdge:
    """Makes the edge as the node's configuration wants it, and tells the broker of the process."""
    config = parts.config
    parts.broker.cluster.node_info = partial(process_info, parts.data.path, parts.watermarks)
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
