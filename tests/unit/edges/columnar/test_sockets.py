"""The edge behind real ports: both protocols on one port, with and without TLS, and the client
library on the other side."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from convoymq.client import Client, ClientConfig, TlsConfig, errors
from convoymq.edges.acceptor import SharedPorts
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.kernels.connection_buffer import Outbox
from convoymq.model.columnar import PREFACE
from tests.patience import PATIENCE_S
from tests.unit.edges.columnar.support import Rig, values_frame

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
VALUES = [b"%06d" % i * 100 for i in range(5000)]
AMQP = b"AMQP\x00\x00\x09\x01"


def amqp_edge(rig: Rig) -> AmqpEdge:
    outbox = Outbox(lambda: asyncio.get_running_loop().call_soon(outbox.flush))
    return AmqpEdge(broker=rig.broker, settings=AmqpConfig(), outbox=outbox)


def on_listener(
    tmp_path: Path,
    loop: str,
    work: Callable[[int], Any],
    tls: ssl.SSLContext | None = None,
) -> Any:
    """What blocking `work(port)` returns; it runs beside a listener with a stream `s`."""

    async def run() -> Any:
        async with Rig(tmp_path) as rig:
            amqp = amqp_edge(rig)
            ports = SharedPorts([amqp, rig.edge])
            port = await ports.listen("localhost", 0, tls)
            rig.stream("s", VALUES)
            await rig.queue("q")
            try:
                return await asyncio.to_thread(work, port)
            finally:
                ports.stop()
                await rig.edge.stop()
                await amqp.stop()
                assert not amqp.connections

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(run())


def config(port: int, **more: Any) -> ClientConfig:
    return ClientConfig((f"127.0.0.1:{port}",), **{"timeout": PATIENCE_S, **more})


def use(port: int, **more: Any) -> list[bytes]:
    """Everything that a client does, once."""
    with Client(config(port, **more)) as client:
        assert [row.name for row in client.metadata(types=["quorum"])] == ["q"]
        assert client.produce(values_frame(VALUES), queue="q").count == len(VALUES)
        result = client.fetch("s", 0)
        assert result.high == len(VALUES)
        with pytest.raises(errors.NotFound):
            client.fetch("none", 0)
    return [bytes(value) for value in values_of_frame(result.frame)]


def values_of_frame(frame: Any) -> list[bytes]:
    from convoymq.kernels.columns import VALUE

    _, ends, data = frame.buffers(VALUE)
    bounds = ends.cast("i")
    return [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(frame.rows)]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(made)
    return made


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_plain_connection(tmp_path: Path, loop: str) -> None:
    assert on_listener(tmp_path, loop, use) == VALUES


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_with_tls(
    tmp_path: Path, loop: str, server_tls: ssl.SSLContext, ca_file: str
) -> None:
    def work(port: int) -> list[bytes]:
        return use(port, tls=TlsConfig(ca_file=ca_file))

    assert on_listener(tmp_path, loop, work, server_tls) == VALUES


def test_a_certificate_of_an_unknown_client_is_refused(
    tmp_path: Path, server_tls: ssl.SSLContext
) -> None:
    def work(port: int) -> None:
        with (
            Client(config(port, timeout=0.5, tls=TlsConfig())) as client,
            pytest.raises(errors.Unavailable, match="certificate"),
        ):
            client.metadata()
        with Client(config(port, tls=TlsConfig(verify=False))) as client:
            assert client.metadata(types=["quorum"])

    on_listener(tmp_path, "asyncio", work, server_tls)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_first_bytes_may_come_in_pieces(tmp_path: Path, loop: str, step: int) -> None:
    def work(port: int) -> None:
        for head, expected in ((PREFACE, PREFACE), (AMQP, b"\x01")):
            with socket.create_connection(("127.0.0.1", port), 10) as raw:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, len(head), step):
                    raw.sendall(head[at : at + step])
                answer = b""
                while len(answer) < len(expected):
                    answer += raw.recv(len(expected) - len(answer))
                assert answer == expected

    on_listener(tmp_path, loop, work)


@pytest.mark.parametrize("head", [b"C", b"CNV", b"CNVY\x00", b"AMQ", b"GET / HT"])
def test_half_a_greeting_is_dropped_with_its_connection(tmp_path: Path, head: bytes) -> None:
    def work(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(head)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(100):
                pass

    on_listener(tmp_path, "uvloop", work)


def test_amqp_is_told_apart_by_a_client_of_the_other_protocol(tmp_path: Path) -> None:
    """A broker without this protocol answers with AMQP's header."""

    async def run() -> None:
        async with Rig(tmp_path) as rig:
            amqp = amqp_edge(rig)
            ports = SharedPorts([amqp])
            port = await ports.listen("localhost", 0)

            def work() -> None:
                with (
                    Client(config(port)) as client,
                    pytest.raises(errors.ProtocolError, match="does not speak"),
                ):
                    client.metadata()

            await asyncio.to_thread(work)
            ports.stop()
            await amqp.stop()

    asyncio.run(run())
