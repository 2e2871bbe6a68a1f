"""The contract of a client protocol: what a node calls, and what it gives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.broker.registry import MessageCounters
    from convoymq.kernels.message_sizes import MessageSizes
    from convoymq.model.config import Config
    from convoymq.transport.shared_sockets import TurnSockets

Metric = tuple[str, str, dict[str, str], int]
"""(kind, name, labels, value)"""
SIZE_BOUNDS = ("100.0", "1000.0", "10000.0", "100000.0", "1e+06", "1e+07", "5e+07", "1e+08", "+Inf")
"""`message_sizes.BOUNDS`, as RabbitMQ writes them and dashboards ask for them."""
Certificate = Mapping[str, tuple[tuple[tuple[str, str], ...], ...]]
"""A verified certificate as `ssl` decodes it; its `subject` is of that type."""
RunInput = Callable[[Callable[[], None]], None]
"""Calls its argument, which reads a connection, and may end the round afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """Parts of a node that an edge may use."""

    config: Config
    broker: Broker
    wake: Callable[[], None]
    """Asks for the end of a round, in which `Edge.flush` is called."""
    run_input: RunInput
    activity: Callable[[], int]
    """A number that changes when clients send or receive, or something is stored here."""
    edges: Callable[[], Sequence[Edge]]
    """Returns all edges of the node."""
    turns: TurnSockets | None
    """Sockets of the edges' own ports, where the processes of a machine share them."""


def message_metrics(protocol: str, counters: MessageCounters) -> list[Metric]:
    """Returns the messages of a protocol's clients under RabbitMQ's names."""
    counters.fold()
    consumed = counters.delivered + counters.delivered_no_ack
    return [
        ("counter", f"global_messages_{name}_total", {"protocol": protocol}, value)
        for name, value in (
            ("received", counters.published),
            ("received_confirm", counters.published_confirm),
            ("routed", counters.routed),
            ("confirmed", counters.confirmed),
            ("unroutable_dropped", counters.dropped_unroutable),
            ("unroutable_returned", counters.returned_unroutable),
            ("delivered", consumed + counters.get + counters.get_no_ack),
            ("delivered_consume_manual_ack", counters.delivered),
            ("delivered_consume_auto_ack", counters.delivered_no_ack),
            ("delivered_get_manual_ack", counters.get),
            ("delivered_get_auto_ack", counters.get_no_ack),
            ("get_empty", counters.get_empty),
            ("redelivered", counters.redelivered),
            ("acknowledged", counters.acknowledged),
        )
    ]


def size_metrics(protocol: str, sizes: MessageSizes) -> list[Metric]:
    """Returns the sizes of messages that a protocol's clients have published, as a histogram."""
    up_to, name = sizes.up_to(), "message_size_bytes"
    buckets: list[Metric] = [
        ("histogram", f"{name}_bucket", {"protocol": protocol, "le": bound}, count)
        for bound, count in zip(SIZE_BOUNDS, up_to, strict=True)
    ]
    labels = {"protocol": protocol}
    return [
        *buckets,
        ("histogram", f"{name}_count", labels, up_to[-1]),
        ("histogram", f"{name}_sum", labels, sizes.total),
    ]


def client_gauges(protocol: str, *, publishers: int, consumers: int) -> list[Metric]:
    """Returns how many of a protocol's clients publish and consume."""
    found = (("publishers", publishers), ("consumers", consumers))
    return [("gauge", f"global_{name}", {"protocol": protocol}, count) for name, count in found]


class Incoming(Protocol):
    """A connection to a shared port, whose first bytes are known. Its edge calls either `attach`
    or `take_socket`."""

    id: int
    """Unique in the process: connections own exclusive queues by it."""
    head: bytes
    """Bytes that were read so far."""
    peer: tuple[str, int]
    local: tuple[str, int]
    tls: bool
    certificate: Certificate | None
    """The client's verified certificate."""
    inside: bool
    """True: the node made the connection to itself (`edges.inside`)."""

    def handshake_left_s(self) -> float:
        """Returns how much of `listeners.handshake_timeout` is left."""

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Lets the event loop read the connection for a protocol. `head` is not repeated."""

    def take_socket(self) -> socket.socket | None:
        """Gives the caller the socket, which does not block; None with TLS: use `attach`."""


class Edge:
    """A client protocol of one node. Methods that an edge does not need do nothing here."""

    prefaces: tuple[bytes, ...] = ()
    """First bytes of its connections to a shared port; none where it has ports of its own. A
    preface names protocol and version as far as the edge serves it: two versions of one protocol
    may have an edge each."""
    takes_unknown = False
    """True if it answers connections that begin with no registered preface."""
    after_ready = False
    """Starts when clients are served, and stops before the others."""
    flush: Callable[[], None] | None = None
    """Writes what waits for clients; called at the end of every round."""

    async def start(self) -> None:
        """Begins to serve. Raises OSError when a port of its own cannot be bound."""

    async def stop(self) -> None:
        """Ends all connections, within a bounded time; clients are told why."""

    def connect(self, incoming: Incoming) -> None:
        """Serves a connection that begins with one of `prefaces`."""
        raise NotImplementedError

    def connection_count(self) -> int:
        """Connections that count for `listeners.max_connections`; 0 where the edge has a bound of
        its own."""
        return 0

    def activity(self) -> int:
        """Returns the number of bytes that were received and sent, for `NodeParts.activity`."""
        return 0

    def metrics(self) -> list[Metric]:
        """Everything that the edge counts."""
        return []
