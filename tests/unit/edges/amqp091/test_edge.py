"""The edge behind a real port on loopback, and a real client library."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest
import trustme

from convoymq.broker.access import AMQP
from convoymq.edges.acceptor import SharedPorts
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.kernels.connection_buffer import Outbox
from convoymq.transport import listening
from convoymq.transport.listening import has_ipv6
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.sockets import backlog_of
from tests.unit.edges.amqp091.fakes import FakeBroker


class Edge:
    """An edge and its port, whose rounds are driven by the loop."""

    def __init__(
        self,
        broker: FakeBroker,
        host: str = "localhost",
        ssl_context: ssl.SSLContext | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        self.broker = broker
        self.outbox = Outbox(self.schedule)
        made: Any = broker
        self.amqp = AmqpEdge(broker=made, settings=AmqpConfig(), outbox=self.outbox)
        self.ports = SharedPorts([self.amqp], **options)
        self.host = host
        self.port = port
        self.scheduled = False
        self._ssl_context = ssl_context

    async def start(self) -> None:
        await self.amqp.start()
        self.port = await self.ports.listen(self.host, self.port, self._ssl_context)

    async def stop(self) -> None:
        self.ports.stop()
        await self.amqp.stop()

    def schedule(self) -> None:
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self.round)

    def round(self) -> None:
        self.scheduled = False
        for queue in list(self.broker.queues.values()):
            queue.builder.on_first = self.schedule
            if queue.round():
                self.schedule()
        self.outbox.flush()

    async def run(self, work: Callable[[int], Any]) -> Any:
        """Run blocking client code beside the loop; queues are served meanwhile."""
        task = asyncio.create_task(asyncio.to_thread(work, self.port))
        while not task.done():
            self.schedule()
            await asyncio.wait([task], timeout=0.002)
        return task.result()


@pytest.fixture
async def edge(broker: FakeBroker) -> AsyncIterator[Edge]:
    made = Edge(broker)
    await made.start()
    yield made
    await made.stop()
    assert not made.amqp.connections
    assert not made.ports.undecided


def parameters(port: int, **options: Any) -> pika.ConnectionParameters:
    return pika.ConnectionParameters("127.0.0.1", port, **options)


def exchange_messages(port: int, **options: Any) -> list[bytes]:
    """Publish with confirms, consume with acknowledgements."""
    connection = pika.BlockingConnection(parameters(port, **options))
    channel = connection.channel()
    channel.queue_declare("q")
    channel.confirm_delivery()
    bodies = [b"%06d" % index + bytes(index * 13 % 9000) for index in range(300)]
    bodies.append(bytes(range(256)) * 3000)
    for body in bodies:
        channel.basic_publish("", "q", body, mandatory=True)
    channel.basic_qos(prefetch_count=50)
    got = []
    for method, _, body in channel.consume("q", inactivity_timeout=PATIENCE_S):
        assert method is not None
        got.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(got) == len(bodies):
            break
    channel.cancel()
    connection.close()
    assert got == bodies
    return got


async def test_pika_publishes_and_consumes(edge: Edge, broker: FakeBroker) -> None:
    await edge.run(exchange_messages)
    assert broker.counters.of(AMQP).published == 301
    assert broker.counters.of(AMQP).delivered == 301
    assert broker.counters.of(AMQP).acknowledged == 301
    assert edge.outbox.bytes_received > 1_300_000


async def test_messages_without_confirms_count_while_their_channel_is_open(
    edge: Edge, broker: FakeBroker
) -> None:
    def publish(port: int) -> None:
        with pika.BlockingConnection(parameters(port)) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            for _ in range(3):
                channel.basic_publish("", "q", b"body")
            channel.queue_declare("q", passive=True)
            assert broker.counters.as_dict()["published"] == 3
            channel.basic_publish("", "q", b"body")
            channel.queue_declare("q", passive=True)
            received = [row for row in edge.amqp.metrics() if row[1].endswith("received_total")]
            assert [row[3] for row in received] == [4]

    await edge.run(publish)
    counters = broker.counters.of(AMQP)
    assert counters.published == 4
    assert not counters.counting


async def test_pika_over_tls(broker: FakeBroker) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)
    edge = Edge(broker, ssl_context=server)
    await edge.start()
    options = pika.SSLOptions(client, "127.0.0.1")
    await edge.run(lambda port: exchange_messages(port, ssl_options=options))
    await edge.stop()


@pytest.mark.skipif(not has_ipv6(), reason="the system has no IPv6 loopback address")
@pytest.mark.parametrize("host", ["localhost", "::"])
async def test_clients_of_both_families_come_in(broker: FakeBroker, host: str) -> None:
    edge = Edge(broker, host=host, port=single_port())
    await edge.start()
    names = []

    def work(port: int) -> None:
        for address in ("127.0.0.1", "::1"):
            connection = pika.BlockingConnection(pika.ConnectionParameters(address, port))
            names.append(broker.open[-1].name)
            connection.close()

    await edge.run(work)
    local = edge.port
    assert re.fullmatch(rf"127\.0\.0\.1:\d+ -> 127\.0\.0\.1:{local}", names[0])
    assert re.fullmatch(rf"\[::1\]:\d+ -> \[::1\]:{local}", names[1])
    await edge.stop()
    for address in ("127.0.0.1", "::1"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, local), timeout=PATIENCE_S)


@pytest.mark.parametrize("tls", [False, True])
async def test_the_backlog_is_the_configured_one(broker: FakeBroker, tls: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
    edge = Edge(broker, backlog=9, ssl_context=context)
    await edge.start()
    sockets = edge.ports.sockets
    assert [backlog_of(sock) for sock in sockets] == [9] * len(sockets)
    await edge.stop()


async def test_a_client_that_still_writes_gets_its_close_ok(edge: Edge) -> None:
    close_ok = codec.method_frame(0, spec.ConnectionCloseOk())
    pipelined = spec.PROTOCOL_HEADER + b"".join(
        codec.method_frame(0, method)
        for method in (
            spec.ConnectionStartOk(response=b"\0guest\0guest"),
            spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=0),
            spec.ConnectionOpen(),
            spec.ConnectionClose(reply_code=200, reply_text="bye"),
        )
    )

    def work(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(pipelined)
            # Closed at once, the socket would answer one of these with a reset.
            while not select.select([sock], [], [], 0)[0] or close_ok not in (
                data := sock.recv(65536, socket.MSG_PEEK)
            ):
                sock.sendall(codec.method_frame(1, spec.BasicQos()) * 100)
            for _ in range(100):
                sock.sendall(codec.method_frame(1, spec.BasicQos()) * 100)
            return data

    assert (await edge.run(work)).endswith(close_ok)


async def test_pika_sees_errors_as_rabbitmq_sends_them(edge: Edge) -> None:
    def work(port: int) -> None:
        with pytest.raises(pika.exceptions.ProbableAuthenticationError, match="403"):
            pika.BlockingConnection(
                parameters(port, credentials=pika.PlainCredentials("guest", "no"))
            )
        connection = pika.BlockingConnection(parameters(port))
        channel = connection.channel()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as info:
            channel.queue_declare("missing", passive=True)
        assert info.value.reply_code == 404
        assert info.value.reply_text == "NOT_FOUND - no queue 'missing' in vhost '/'"
        channel = connection.channel()
        channel.queue_declare("", exclusive=True)
        connection.close()

    await edge.run(work)


async def test_stop_tells_clients_why(broker: FakeBroker) -> None:
    edge = Edge(broker, port=single_port())
    await edge.start()
    connected = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(port: int) -> tuple[int, str]:
        connection = pika.BlockingConnection(parameters(port))
        loop.call_soon_threadsafe(connected.set)
        try:
            while True:
                connection.process_data_events(1)
        except pika.exceptions.ConnectionClosedByBroker as error:
            return error.reply_code, error.reply_text

    async def stop() -> None:
        await connected.wait()
        await edge.stop()

    stopping = asyncio.create_task(stop())
    assert await edge.run(work) == (
        320,
        "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
    )
    await stopping
    assert not edge.amqp.connections
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE_S)


@pytest.mark.provokes("amqp.connection_limit")
async def test_connection_limit_closes_the_newcomer(broker: FakeBroker) -> None:
    edge = Edge(broker, connections_max=1)
    await edge.start()

    def work(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as first:
            first.sendall(spec.PROTOCOL_HEADER)
            assert first.recv(7)
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as second:
                return second.recv(1)

    assert await edge.run(work) == b""
    assert edge.ports.refused_connections == 1
    await edge.stop()


async def test_an_unknown_client_gets_the_protocol_header(edge: Edge) -> None:
    def work(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            data = b""
            while more := sock.recv(100):
                data += more
            return data

    assert await edge.run(work) == spec.PROTOCOL_HEADER


async def test_silent_clients_are_dropped(broker: FakeBroker) -> None:
    edge = Edge(broker, handshake_timeout_s=0.05)
    await edge.start()

    def work(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            return sock.recv(1)

    assert await edge.run(work) == b""
    await edge.stop()


@pytest.mark.provokes("amqp.closed_without_close")
async def test_client_that_vanishes_gives_everything_back(edge: Edge, broker: FakeBroker) -> None:
    pipelined = (
        spec.PROTOCOL_HEADER
        + b"".join(
            codec.method_frame(0, method)
            for method in (
                spec.ConnectionStartOk(response=b"\0guest\0guest"),
                spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=0),
                spec.ConnectionOpen(),
            )
        )
        + codec.method_frame(1, spec.ChannelOpen())
        + codec.method_frame(1, spec.QueueDeclare(queue="q"))
        + codec.content_frames(
            1, spec.BasicPublish(routing_key="q"), spec.Properties(), b"x", frame_bytes_max=4096
        )
        + codec.method_frame(1, spec.QueueDeclare(queue="other"))
        + codec.method_frame(1, spec.BasicConsume(queue="q", consumer_tag="t"))
    )

    def work(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(pipelined)
            data = b""
            while codec.method_frame(1, spec.BasicDeliver())[7:11] not in data:
                data += sock.recv(4096)

    await edge.run(work)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not broker.closed and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    assert broker.closed
    assert len(broker.queues["q"].ready) == 1


@pytest.mark.parametrize("begins", ["before", "after"])
async def test_the_end_of_a_blocked_client_is_noticed(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """Its socket still holds what was published, so no read would say that it is gone. The alarm
    begins before or after the listener does."""
    monkeypatch.setattr(listening, "HANG_UP_CHECK_S", 0.01)
    edge = Edge(broker)
    if begins == "after":
        await edge.start()
    broker.alarms.effective = frozenset({"memory"})
    for heard in broker.alarms.listeners:
        heard(broker.alarms.effective)
    if begins == "before":
        await edge.start()
    publish = codec.content_frames(
        1, spec.BasicPublish(routing_key="q"), spec.Properties(), b"x", frame_bytes_max=4096
    )
    opening = spec.PROTOCOL_HEADER + b"".join(
        codec.method_frame(channel, method)
        for channel, method in (
            (0, spec.ConnectionStartOk(response=b"\0guest\0guest")),
            (0, spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=0)),
            (0, spec.ConnectionOpen()),
            (1, spec.ChannelOpen()),
        )
    )

    def connect(port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        sock.sendall(opening + publish)
        return sock

    with await edge.run(connect) as stays, await edge.run(connect) as goes:
        async with asyncio.timeout(PATIENCE_S):
            while [each.is_blocked for each in edge.amqp.connections.values()] != [True, True]:
                await asyncio.sleep(0.01)
            for sock in (stays, goes):
                sock.sendall(publish)
            goes.close()
            while len(edge.amqp.connections) > 1:
                await asyncio.sleep(0.01)
        assert [each.is_blocked for each in edge.amqp.connections.values()] == [True]
    await edge.stop()
