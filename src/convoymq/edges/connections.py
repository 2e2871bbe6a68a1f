"""Connections of clients as lists and operators see them, whatever they speak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from convoymq.broker.records import User

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.queues.interface import Row

CREDENTIAL_EXPIRED = "credential expired"
NOBODY = User(name="")
"""User of a connection until the log-in."""


def connection_name(peer: tuple[str, int], local: tuple[str, int]) -> str:
    """Returns the name of a connection in lists and the log."""
    ends = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in (peer, local))
    return " -> ".join(ends)


class ClientConnection:
    """Base of an edge's connections: `broker.registry.ConnectionHandle` but for `sessions` and
    `close`. Lists of a protocol without channels or consumers have none of it."""

    broker: Broker
    received: int
    sent: int

    def begin(self, id: int, peer: tuple[str, int], local: tuple[str, int], ssl: bool) -> None:
        """Takes the facts of the socket."""
        self.id = id
        self.peer = peer
        self.local = local
        self.ssl = ssl
        self.name = connection_name(peer, local)
        self.user = NOBODY
        self.vhost = ""
        self.connected_at_ms = int(time.time() * 1000)

    def details(self) -> Row:
        """Returns the fields by which other rows describe this connection."""
        return {
            "name": self.name,
            "user_provided_name": self.given_name(),
            "peer_host": self.peer[0],
            "peer_port": self.peer[1],
        }

    def channel_details(self, number: int) -> Row:
        """Returns the fields by which rows of consumers describe a channel or session."""
        return {
            "name": f"{self.name} ({number})",
            "number": number,
            "connection_name": self.name,
            "user_provided_name": self.given_name(),
            "node": self.broker.node_name,
            "peer_host": self.peer[0],
            "peer_port": self.peer[1],
            "user": self.user.name,
        }

    def given_name(self) -> str:
        """Returns the name that the client gave to the connection; empty if it gave none."""
        return ""

    def row(self, **more: object) -> Row:
        """Returns a row of the list of connections."""
        return {
            "name": self.name,
            "node": self.broker.node_name,
            "user": self.user.name,
            "vhost": self.vhost,
            "ssl": self.ssl,
            "host": self.local[0],
            "port": self.local[1],
            "peer_host": self.peer[0],
            "peer_port": self.peer[1],
            "connected_at": self.connected_at_ms,
            "type": "network",
            "user_provided_name": self.given_name(),
            **more,
        }

    def traffic(self) -> int:
        """See `ConnectionHandle`."""
        return self.received + self.sent

    def channel_infos(self) -> list[Row]:
        """Returns the rows of the list of channels."""
        return []

    def session_infos(self) -> list[Row] | None:
        """Returns the sessions of AMQP 1.0 with their links; None: there are no such ones."""
        return None

    def consumer_infos(self) -> list[Row]:
        """Returns the rows of the list of consumers."""
        return []

    def expire(self) -> None:
        """See `ConnectionHandle`."""
        self.close(CREDENTIAL_EXPIRED)

    def close(self, reason: str) -> None:
        """See `ConnectionHandle`."""
        raise NotImplementedError

    def set_prefetch(self, queue: str, tag: str, prefetch: int) -> int:
        """See `ConnectionHandle`."""
        return 0


class Closable(Protocol):
    """A connection that its edge closes when the node stops."""

    def close(self, reason: str) -> None:
        """Closes it, and tells the client why."""

    def lost(self) -> None:
        """The socket is gone."""


async def close_all(
    connections: Mapping[int, Closable],
    reason: str,
    flush: Callable[[], None],
    timeout_s: float,
) -> None:
    """Closes connections, and waits a bounded time for the answers of their clients.

    Args:
        connections: those that are there; one that ends leaves it.
        flush: writes the output.
    """
    for connection in list(connections.values()):
        connection.close(reason)
    flush()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while connections and loop.time() < deadline:
        await asyncio.sleep(0.01)
        flush()
    for connection in list(connections.values()):
        connection.lost()
