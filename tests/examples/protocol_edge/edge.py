"""A line protocol on the AMQP port.

client                       server
LINES
LOGIN user password vhost    READY
PUBLISH q text               OK         when the message is safe
GET q                        text, or EMPTY
anything else                ERROR why
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from convoymq.broker.facade import Broker
from convoymq.broker.records import User
from convoymq.edges.connections import ClientConnection
from convoymq.edges.edge import Edge, Incoming, NodeParts
from convoymq.edges.permissions import Permissions
from convoymq.edges.sasl import Credentials, Login, LoginConfig
from convoymq.kernels.batch import record as record_of
from convoymq.messages.amqp091 import NO_PROPERTIES
from convoymq.messages.record import content_of, names_of, read_record
from convoymq.model.errors import BrokerError, Misuse
from convoymq.queues.interface import ClientEvents, GetResult, PublishOutcome, QueueClient
from tests.examples.protocol_edge.config import LineConfig

PREFACE = b"LINES\n"
LINES_MAX = 100


def open_edge(parts: NodeParts) -> LineEdge:
    """Makes the edge as the node's configuration wants it."""
    config = parts.config
    return LineEdge(parts.broker, config.of(LineConfig), config.of(LoginConfig))


class LineEdge(Edge):
    """All connections of the protocol on one node."""

    prefaces = (PREFACE,)

    def content(self, text: bytes) -> tuple[bytes, int]:
        """Returns a message as queues keep it, and the bytes of its body."""
        return content_of(NO_PROPERTIES, text), len(text)

    def __init__(self, broker: Broker, config: LineConfig, login: LoginConfig) -> None:
        self.broker = broker
        self.config = config
        self.login = Login(broker.access, login, "lines")
        self.connections: set[LineConnection] = set()

    def connect(self, incoming: Incoming) -> None:
        """See `Edge`."""
        incoming.attach(LineConnection(self, incoming))

    def connection_count(self) -> int:
        """See `Edge`."""
        return len(self.connections)

    async def stop(self) -> None:
        """See `Edge`."""
        for connection in list(self.connections):
            connection.close("the node stops")


class LineConnection(asyncio.Protocol, ClientConnection, ClientEvents):
    """One connection: answers a line before it looks at the next one."""

    def __init__(self, edge: LineEdge, incoming: Incoming) -> None:
        self.begin(incoming.id, incoming.peer, incoming.local, incoming.tls)
        self.broker = edge.broker
        self.permissions = Permissions(self)
        self._edge = edge
        self._handshake_left_s = incoming.handshake_left_s()
        self._input = incoming.head.removeprefix(edge.prefaces[0])
        self._clients: dict[str, QueueClient] = {}
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(maxsize=LINES_MAX)
        self._answer: asyncio.Future[str] | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: Any = transport
        self._edge.connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        *lines, self._input = (self._input + data).split(b"\n")
        try:
            for line in lines:
                self._lines.put_nowait(line)
        except asyncio.QueueFull:
            self.close("too many lines at once")
        if len(self._input) > self._edge.config.line_max:
            self.close("the line is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._task.cancel()
        self._edge.connections.discard(self)
        self.broker.connections.remove(self)
        for client in self._clients.values():
            client.close()

    # What operators and the node ask of every connection.

    def close(self, reason: str) -> None:
        self._say(f"ERROR {reason}")
        self._transport.close()

    def sessions(self) -> list[int]:
        return [client.session for client in self._clients.values()]

    def info(self) -> dict[str, Any]:
        return self.row(protocol="lines", state="running")

    # The protocol.

    def _say(self, line: str) -> None:
        self._transport.write(line.encode() + b"\n")

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(self._handshake_left_s):
                await self._log_in(await self._lines.get())
        except (BrokerError, TimeoutError) as error:
            self.close(error.text if isinstance(error, BrokerError) else "nobody logged in")
            return
        self._say("READY")
        while True:
            line = await self._lines.get()
            try:
                self._say(await self._carry_out(line))
            except BrokerError as error:
                self._say(f"ERROR {error.text}")

    async def _log_in(self, line: bytes) -> None:
        match line.decode().split(" "):
            case ["LOGIN", name, password, vhost]:
                broker = self.broker
                given = Credentials(name, password.encode())
                user = await self._edge.login.user(given, self.peer[0])
                broker.access.open_vhost(user, vhost)
                await broker.limits.open_connection(name, vhost, lambda: self._opened(user, vhost))
            case _:
                raise Misuse("LOGIN user password vhost")

    def _opened(self, user: User, vhost: str) -> None:
        self.user, self.vhost = user, vhost
        self.broker.connections.add(self)

    async def _carry_out(self, line: bytes) -> str:
        match line.rstrip(b"\r").split(b" ", 2):
            case [b"PUBLISH", queue, text]:
                name = queue.decode()
                self.broker.alarms.check()
                self.permissions.check("write", "exchange", "")
                content, size = self._edge.content(text)
                self._client(name).target.publish([names_of("", name), content], size, 1)
                return await self._answered()
            case [b"GET", queue]:
                name = queue.decode()
                self.permissions.check("read", "queue", name)
                self._client(name).get(no_ack=True)
                return await self._answered()
            case _:
                raise Misuse("PUBLISH queue text, or GET queue")

    def _client(self, name: str) -> QueueClient:
        client = self._clients.get(name)
        if client is None:
            queue = self.broker.queue_admin.find_queue(self.vhost, name)
            client = self._clients[name] = queue.client(self.broker.new_session(), self)
        return client

    async def _answered(self) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    # What queues tell.

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        self._tell("OK" if outcome else "ERROR the queue refused the message")

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        if result.error is not None:
            self._tell(f"ERROR {result.error}")
        elif result.block is None:
            self._tell("EMPTY")
        else:
            found = record_of(result.block, result.command, result.record)
            self._tell(read_record(found).body.decode(errors="replace"))

    def _tell(self, answer: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
