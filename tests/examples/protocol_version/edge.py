"""The headers of AMQP 1.0, without and with SASL: each is answered with itself, and that is all."""

from __future__ import annotations

import asyncio
from typing import Any

from convoymq.edges.edge import Edge, Incoming, NodeParts

HEADERS = (b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00")


def open_edge(_parts: NodeParts) -> VersionEdge:
    """Makes the edge."""
    return VersionEdge()


class VersionEdge(Edge):
    """See the module text."""

    prefaces = HEADERS

    def connect(self, incoming: Incoming) -> None:
        """See `Edge`."""
        incoming.attach(_Answer(incoming.head))


class _Answer(asyncio.Protocol):
    def __init__(self, head: bytes) -> None:
        self._head = head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made: Any = transport
        made.write(self._head)
        made.close()
