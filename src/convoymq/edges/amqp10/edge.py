# cython: annotation_typing=False
"""All AMQP 1.0 connections of one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from convoymq.broker.access import AMQP_10
from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.connection import Connection
from convoymq.edges.amqp10.link import Link
from convoymq.edges.amqp10.opening import PROTOCOL_HEADERS
from convoymq.edges.amqp10.receiving import Receiver
from convoymq.edges.connections import close_all
from convoymq.edges.edge import (
    Edge,
    Incoming,
    Metric,
    NodeParts,
    client_gauges,
    message_metrics,
    size_metrics,
)
from convoymq.edges.sasl import Login, LoginConfig
from convoymq.model.clock import Timer
from convoymq.model.tasks import Tasks

SHUTDOWN = "shutdown"


def open_edge(parts: NodeParts) -> Amqp10Edge:
    """Makes the edge as the node's configuration wants it."""
    return Amqp10Edge(parts)


class Amqp10Edge(Edge):
    """See the module text."""

    prefaces = PROTOCOL_HEADERS

    def __init__(self, parts: NodeParts) -> None:
        config = parts.config
        self.broker = parts.broker
        self.settings = config.of(Amqp10Config)
        self.login = Login(self.broker.access, config.of(LoginConfig), AMQP_10)
        self.message_size_max = config.listeners.max_message_size
        self.default_vhost = config.defaults.vhost
        self.connections: dict[int, Connection] = {}
        self.names: dict[bytes, Link] = {}
        self.bytes_moved = 0
        self.flush = self._flush
        self.run_input = parts.run_input
        self._wake = parts.wake
        self._waiting: list[SocketShell] = []
        self._tasks = Tasks()

    async def start(self) -> None:
        """Follows the node's alarms."""
        self.broker.alarms.listeners.append(self._on_alarms)

    async def stop(self) -> None:
        """Closes all connections and waits a bounded time for their answers."""
        if self._on_alarms in self.broker.alarms.listeners:
            self.broker.alarms.listeners.remove(self._on_alarms)
        timeout_s = self.settings.close_timeout_s
        await close_all(self.connections, SHUTDOWN, self._flush, timeout_s)
        await self._tasks.wait(timeout_s)
        self._tasks.cancel()

    def connect(self, incoming: Incoming) -> None:
        incoming.attach(SocketShell(asyncio.get_running_loop(), self, incoming))

    def open_connection(self, shell: SocketShell, incoming: Incoming) -> Connection:
        """Makes a connection, which has received nothing yet."""
        connection = Connection(
            id=incoming.id,
            broker=self.broker,
            settings=self.settings,
            login=self.login,
            shell=shell,
            peer=incoming.peer,
            local=incoming.local,
            ssl=incoming.tls,
            certificate_name=self.login.user_of(incoming),
            handshake_left_s=incoming.handshake_left_s(),
            message_size_max=self.message_size_max,
            default_vhost=self.default_vhost,
            names=self.names,
        )
        self.connections[connection.id] = connection
        return connection

    def connection_count(self) -> int:
        return len(self.connections)

    def activity(self) -> int:
        return self.bytes_moved

    def metrics(self) -> list[Metric]:
        sessions = [s for each in self.connections.values() for s in each.sessions_open.values()]
        consumers = sum(len(session.senders) for session in sessions)
        publishers = sum(isinstance(link, Receiver) for s in sessions for link in s.receivers)
        counters = self.broker.counters.of(AMQP_10)
        return [
            *message_metrics(AMQP_10, counters),
            *size_metrics(AMQP_10, counters.sizes),
            *client_gauges(AMQP_10, publishers=publishers, consumers=consumers),
        ]

    def want_flush(self, shell: SocketShell) -> None:
        """Writes a connection's output at the end of the round."""
        self._waiting.append(shell)
        self._wake()

    def gone(self, connection: Connection) -> None:
        """A connection's socket is closed."""
        self.connections.pop(connection.id, None)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task of this edge."""
        self._tasks.spawn(work)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for shell in waiting:
            shell.write_output()

    def _on_alarms(self, _alarms: frozenset[str]) -> None:
        for connection in list(self.connections.values()):
            connection.set_alarms()


class SocketShell(asyncio.Protocol):
    """A connection on the event loop, with TLS or without. Implements `Shell`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, edge: Amqp10Edge, incoming: Incoming
    ) -> None:
        self._loop = loop
        self._edge = edge
        self._head = incoming.head
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._reading = True
        self._timer: asyncio.TimerHandle | None = None
        self.connection = edge.open_connection(self, incoming)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        assert self._transport is not None
        if self._closed:
            self._transport.abort()
            return
        settings = self._edge.settings
        self._transport.set_write_buffer_limits(
            high=settings.output_bytes_high, low=settings.output_bytes_low
        )
        self.data_received(self._head)

    def data_received(self, data: bytes) -> None:
        self._edge.bytes_moved += len(data)
        self._edge.run_input(lambda: self.connection.receive(bytes(data)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.connection.lost()
        self._edge.gone(self.connection)

    def pause_writing(self) -> None:
        self.update_kept()

    def resume_writing(self) -> None:
        self.update_kept()

    def set_reading(self, on: bool) -> None:
        """See `Shell`."""
        transport = self._transport
        if on == self._reading or transport is None or transport.is_closing():
            return
        self._reading = on
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def want_flush(self) -> None:
        """See `Shell`."""
        self._edge.want_flush(self)

    def write_output(self) -> None:
        """Writes the connection's output."""
        transport = self._transport
        data = self.connection.take_output()
        if transport is None or transport.is_closing() or not data:
            return
        self._edge.bytes_moved += len(data)
        transport.write(data)
        self.update_kept()

    def update_kept(self) -> None:
        """See `Shell`."""
        if self._transport is not None:
            self.connection.on_kept(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """See `Shell`."""
        if self._closed:
            return
        self._closed = True
        transport = self._transport
        if transport is None:
            # `connection_made` ends it.
            return
        self.write_output()
        transport.close()
        self._timer = self._loop.call_later(self._edge.settings.close_timeout_s, transport.abort)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self._loop.call_later(delay_s, call)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """See `Shell`."""
        self._edge.spawn(work)
