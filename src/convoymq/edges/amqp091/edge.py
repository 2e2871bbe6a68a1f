# cython: annotation_typing=False
"""All AMQP connections of one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from convoymq.broker.access import AMQP
from convoymq.broker.facade import Broker
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.connection import Connection
from convoymq.edges.amqp091.handshake import PROTOCOL_HEADERS, amqplain
from convoymq.edges.amqp091.sockets import SocketShell, TlsShell
from convoymq.edges.connections import close_all
from convoymq.edges.edge import (
    Edge,
    Incoming,
    Metric,
    NodeParts,
    RunInput,
    client_gauges,
    message_metrics,
    size_metrics,
)
from convoymq.edges.sasl import Login, LoginConfig
from convoymq.kernels.connection_buffer import Outbox
from convoymq.model.tasks import Tasks
from convoymq.transport.listening import HangUpWatch

SHUTDOWN = "broker forced connection closure with reason 'shutdown'"


def open_edge(parts: NodeParts) -> AmqpEdge:
    """Makes the edge as the node's configuration wants it."""
    outbox = Outbox(parts.wake)
    config = parts.config
    return AmqpEdge(
        broker=parts.broker,
        settings=config.of(AmqpConfig),
        login=config.of(LoginConfig),
        message_size_max=config.listeners.max_message_size,
        outbox=outbox,
        run_input=parts.run_input,
    )


class AmqpEdge(Edge):
    """See the module text.

    Args:
        outbox: whoever ends the node's rounds flushes it.
        run_input: calls what reads a connection, in place of the loop.
    """

    prefaces = PROTOCOL_HEADERS
    takes_unknown = True
    """Connections of an unknown protocol or version get the protocol header of 0-9-1, as the
    specification demands."""

    def __init__(
        self,
        *,
        broker: Broker,
        settings: AmqpConfig,
        outbox: Outbox,
        login: LoginConfig | None = None,
        message_size_max: int = 16 << 20,
        run_input: RunInput | None = None,
    ) -> None:
        self.broker = broker
        self.settings = settings
        self.login = Login(broker.access, login or LoginConfig(), AMQP, {"AMQPLAIN": amqplain})
        self.message_size_max = message_size_max
        self.outbox = outbox
        self.flush = outbox.flush
        self.run_input = run_input
        self.connections: dict[int, Connection] = {}
        self._tasks = Tasks()
        self._hang_ups = HangUpWatch(self._blocked)

    async def start(self) -> None:
        """Follows the node's alarms."""
        self.broker.alarms.listeners.append(self._on_alarms)
        self._on_alarms(self.broker.alarms.effective)

    async def stop(self) -> None:
        """Closes all connections with 320 and waits a bounded time for their answers."""
        if self._on_alarms in self.broker.alarms.listeners:
            self.broker.alarms.listeners.remove(self._on_alarms)
        self._hang_ups.set(False)
        timeout_s = self.settings.close_timeout_s
        await close_all(self.connections, SHUTDOWN, self.outbox.flush, timeout_s)
        await self._tasks.wait(timeout_s)
        self._tasks.cancel()

    def connect(self, incoming: Incoming) -> None:
        loop = asyncio.get_running_loop()
        sock = incoming.take_socket()
        if sock is None:
            incoming.attach(TlsShell(loop, self, incoming))
            return
        shell = SocketShell(loop, sock, self)
        shell.connection = self.open_connection(shell, sock.fileno(), incoming)
        shell.begin(incoming.head)

    def open_connection(
        self, shell: SocketShell | TlsShell, fd: int, incoming: Incoming
    ) -> Connection:
        """Makes a connection, which has heard nothing yet."""
        connection = Connection(
            id=incoming.id,
            broker=self.broker,
            settings=self.settings,
            login=self.login,
            outbox=self.outbox,
            shell=shell,
            fd=fd,
            peer=incoming.peer,
            local=incoming.local,
            ssl=incoming.tls,
            certificate_name=self.login.user_of(incoming),
            handshake_left_s=incoming.handshake_left_s(),
            message_size_max=self.message_size_max,
        )
        self.connections[connection.id] = connection
        return connection

    def connection_count(self) -> int:
        return len(self.connections)

    def activity(self) -> int:
        return int(self.outbox.bytes_received + self.outbox.bytes_sent)

    def metrics(self) -> list[Metric]:
        channels = [c for each in self.connections.values() for c in each.channels.values()]
        consumers = sum(len(channel.consumers) for channel in channels)
        publishers = sum(channel.codec.published > 0 for channel in channels)
        return [
            *message_metrics(AMQP, self.broker.counters.of(AMQP)),
            *size_metrics(AMQP, self.outbox.sizes),
            *client_gauges(AMQP, publishers=publishers, consumers=consumers),
        ]

    def gone(self, connection: Connection | None) -> None:
        """A connection's socket is closed."""
        if connection is not None:
            self.connections.pop(connection.id, None)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task of this edge."""
        self._tasks.spawn(work)

    def _on_alarms(self, alarms: frozenset[str]) -> None:
        for connection in list(self.connections.values()):
            connection.set_alarms(alarms)
        self._hang_ups.set(bool(alarms))

    def _blocked(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {}
        for connection in self.connections.values():
            shell = connection.shell
            if connection.is_blocked and isinstance(shell, SocketShell | TlsShell):
                found[shell.fileno()] = connection.eof
        return found
