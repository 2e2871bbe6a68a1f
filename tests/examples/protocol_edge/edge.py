"""A line protocol on the AMQP port.

    client             server
    LINES              READY
    PUBLISH q text     OK         when the message is safe
    GET q              text, or EMPTY
    anything else      ERROR why

Who connects is `guest`, which may do so on the node's own machine only.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

from convoymq.broker.facade import Broker
from convoymq.edges.edge import Edge, Incoming, NodeParts
from convoymq.kernels.batch import record as record_of
from convoymq.kernels.content import content_parts, split_record
from convoymq.model.errors import BrokerError, Misuse
from convoymq.queues.interface import ClientEvents, GetResult, QueueClient

PREFACE = b"LINES\n"
LINE_BYTES_MAX = 4096
BASIC = 60


def open_edge(parts: NodeParts) -> LineEdge:
    """Makes the edge."""
    return LineEdge(parts.broker)


def record(queue: str, body: bytes) -> bytes:
    """Returns a message as queues keep it: exchange, routing key, AMQP's content frames."""
    key = queue.encode()
    header = struct.pack(">BHIHHQH", 2, 0, 14, BASIC, 0, len(body), 0)
    frames = header + b"\xce" + struct.pack(">BHI", 3, 0, len(body)) + body + b"\xce"
    return b"\0" + bytes((len(key),)) + key + frames


class LineEdge(Edge):
    """All connections of the protocol on one node."""

    prefaces = (PREFACE,)

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
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


class LineConnection(asyncio.Protocol, ClientEvents):
    """One connection: answers a line before it looks at the next one."""

    def __init__(self, edge: LineEdge, incoming: Incoming) -> None:
        self.id = incoming.id
        self.name = f"{incoming.peer[0]}:{incoming.peer[1]}"
        self.vhost = "/"
        self.user: Any = None
        self._edge = edge
        self._broker = edge.broker
        self._peer = incoming.peer[0]
        self._input = incoming.head.removeprefix(PREFACE)
        self._clients: dict[str, QueueClient] = {}
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(maxsize=LINE_BYTES_MAX)
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
        if len(self._input) > LINE_BYTES_MAX:
            self.close("the line is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._task.cancel()
        self._edge.connections.discard(self)
        self._broker.connections.remove(self)
        for client in self._clients.values():
            client.close()

    # What operators and the node ask of every connection.

    def close(self, reason: str) -> None:
        self._say(f"ERROR {reason}")
        self._transport.close()

    def sessions(self) -> list[int]:
        return [client.session for client in self._clients.values()]

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "user": self.user.name, "vhost": self.vhost, "protocol": "lines"}

    def channel_infos(self) -> list[dict[str, Any]]:
        return []

    def consumer_infos(self) -> list[dict[str, Any]]:
        return []

    # The protocol.

    def _say(self, line: str) -> None:
        self._transport.write(line.encode() + b"\n")

    async def _serve(self) -> None:
        try:
            self.user = await self._broker.access.authenticate("guest", b"guest", self._peer)
            self._broker.access.open_vhost(self.user, self.vhost)
        except BrokerError as error:
            self.close(error.text)
            return
        self._broker.connections.add(self)
        self._say("READY")
        while True:
            line = await self._lines.get()
            try:
                self._say(await self._carry_out(line))
            except BrokerError as error:
                self._say(f"ERROR {error.text}")

    async def _carry_out(self, line: bytes) -> str:
        match line.rstrip(b"\r").split(b" ", 2):
            case [b"PUBLISH", queue, text]:
                name = queue.decode()
                self._check("write", "exchange", "")
                client = self._client(name)
                client.target.publish([record(name, text)], len(text), 1)
                return await self._answered()
            case [b"GET", queue]:
                name = queue.decode()
                self._check("read", "queue", name)
                self._client(name).get(no_ack=True)
                return await self._answered()
            case _:
                raise Misuse("PUBLISH queue text, or GET queue")

    def _check(self, permission: str, kind: str, name: str) -> None:
        self._broker.access.check_permission(self.user, self.vhost, permission, kind, name)

    def _client(self, name: str) -> QueueClient:
        client = self._clients.get(name)
        if client is None:
            queue = self._broker.queue_admin.find_queue(self.vhost, name)
            client = self._clients[name] = queue.client(self._broker.new_session(), self)
        return client

    async def _answered(self) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    # What queues tell.

    def on_published(self, client: QueueClient, tags: Sequence[int], ok: bool) -> None:
        self._tell("OK" if ok else "ERROR the queue refused the message")

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        if result.error is not None:
            self._tell(f"ERROR {result.error}")
        elif result.block is None:
            self._tell("EMPTY")
        else:
            found = record_of(result.block, result.command, result.record)
            self._tell(content_parts(split_record(found)[1])[1].decode(errors="replace"))

    def _tell(self, answer: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
