"""Connections that a node makes to itself: pairs of sockets, whose user is `access.OPERATOR`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from convoymq.edges.acceptor import connection_ids
from convoymq.edges.edge import Certificate, Edge
from convoymq.edges.prefaces import Prefaces
from convoymq.model.tasks import Tasks

HANDSHAKE_S = 10.0


class _Inside:
    """The edge's end. Implements `Incoming`."""

    inside = True
    tls = False
    certificate: Certificate | None = None

    def __init__(self, sock: socket.socket, head: bytes, tasks: Tasks) -> None:
        self.id = next(connection_ids)
        self.head = head
        self.peer = ("127.0.0.1", self.id)
        self.local = ("127.0.0.1", 0)
        self._sock = sock
        self._tasks = tasks

    def handshake_left_s(self) -> float:
        """See `Incoming`."""
        return HANDSHAKE_S

    def take_socket(self) -> socket.socket:
        """See `Incoming`."""
        return self._sock

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """See `Incoming`."""
        self._tasks.spawn(self._adopt(protocol))

    async def _adopt(self, protocol: asyncio.BaseProtocol) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: protocol, self._sock)


def connect_inside(edges: Sequence[Edge], head: bytes, tasks: Tasks) -> socket.socket:
    """Returns a connection to this node's edge of a protocol, which has sent the first bytes.

    Args:
        tasks: have the work that begins the connection.
    """
    own, other = socket.socketpair()
    own.setblocking(False)
    other.setblocking(False)
    edge = Prefaces(edges).edge_of(head)
    assert edge is not None
    edge.connect(_Inside(other, head, tasks))
    return own
