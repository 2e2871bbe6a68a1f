"""Sockets of the HTTP endpoints, and what they say of the release that is imitated."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from convoymq.edges.amqp091.handshake import server_properties
from convoymq.edges.http import http_server
from convoymq.edges.http.server import ManagementServer
from convoymq.model.compatibility import COMPATIBLE_PRODUCT, COMPATIBLE_VERSION
from convoymq.model.config import Address
from convoymq.model.errors import InvariantViolated
from convoymq.transport.listening import has_ipv6
from convoymq.transport.shared_sockets import ClientCounts, TurnSockets, bind
from tests.loop_faults import loop_faults
from tests.patience import PATIENCE_S
from tests.sockets import backlog_of
from tests.unit.queues.fake_cluster import FakeCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=1) as made:
        yield made


@pytest.fixture
async def server(cluster: FakeCluster) -> AsyncIterator[ManagementServer]:
    made = ManagementServer(
        cluster.nodes[1].broker, [("localhost", 0)], [("localhost", 0)], backlog=9
    )
    await made.start()
    yield made
    await made.stop()


async def test_every_protocol_announces_the_same_version(server: ManagementServer) -> None:
    announced = server_properties("test").to_plain()
    assert (announced["product"], announced["version"]) == (COMPATIBLE_PRODUCT, COMPATIBLE_VERSION)
    api, metrics = server.ports
    async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
        overview = (await browser.get(f"http://127.0.0.1:{api}/api/overview")).json()
        definitions = (await browser.get(f"http://127.0.0.1:{api}/api/definitions")).json()
        text = (await browser.get(f"http://127.0.0.1:{metrics}/metrics")).text
    assert overview["rabbitmq_version"] == overview["management_version"] == COMPATIBLE_VERSION
    assert definitions["rabbitmq_version"] == COMPATIBLE_VERSION
    assert f'rabbitmq_version="{COMPATIBLE_VERSION}"' in text


@pytest.mark.skipif(not has_ipv6(), reason="the system has no IPv6 loopback address")
async def test_clients_of_both_families_are_answered(server: ManagementServer) -> None:
    async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
        for host in ("[::1]", "127.0.0.1"):
            answer = await browser.get(f"http://{host}:{server.ports[0]}/api/vhosts/%2F")
            assert answer.json()["name"] == "/"


async def test_the_backlog_is_the_configured_one_before_and_while_it_serves(
    server: ManagementServer,
) -> None:
    sockets = [sock for listener in server._listeners for sock in listener._sockets]
    assert {backlog_of(sock) for sock in sockets} == {9}
    async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
        for port in server.ports:
            await browser.get(f"http://127.0.0.1:{port}/")
    assert {backlog_of(sock) for sock in sockets} == {9}


HALF = b"GET /api/whoami HTTP/1.1\r\nhost: x\r\n"
LOGIN = b"authorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n\r\n"
WHOLE = HALF + LOGIN


async def answer_of(port: int, text: bytes, host: str = "127.0.0.1") -> bytes:
    """The first bytes of an answer to a client of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    writer.write(text)
    async with asyncio.timeout(PATIENCE_S):
        found = await reader.read(64)
    writer.close()
    return found


@pytest.mark.provokes("management.crowded")
@pytest.mark.parametrize(
    "left",
    [
        b"",
        HALF,
        b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n",
        HALF + b"authorization: Basic Z3Vlc3Q6d3Jvbmc=\r\n\r\nG",
    ],
)
async def test_connections_without_a_request_keep_nobody_out(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """Many connections of one address, which nobody has to log in for: nothing is sent, half a
    request, a whole one whose connection stays open, or one with a wrong password, whose refusal
    takes its time. Others are answered meanwhile."""
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 40)
    monkeypatch.setattr(http_server, "WAITING_MAX", 20)
    server = ManagementServer(cluster.nodes[1].broker, [("127.0.0.1", 0)])
    await server.start()
    (port,) = server.ports
    assert await answer_of(port, WHOLE) == await answer_of(port, WHOLE, "127.0.0.2")
    # Slow, but not greedy.
    reader, slow = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    slow.write(HALF)
    writers = []
    try:
        with capture_logs() as logs:
            for _ in range(60):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(left)
                writers.append(writer)
            for host in ("127.0.0.1", "127.0.0.2"):
                assert (await answer_of(port, WHOLE, host)).startswith(b"HTTP/1.1 200")
        slow.write(LOGIN)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read(64)).startswith(b"HTTP/1.1 200")
        told = [row for row in logs if row["event"] == "management.crowded"]
        assert [row["peer"] for row in told] == ["127.0.0.1"]
    finally:
        for writer in (*writers, slow):
            writer.close()
        await server.stop()


@pytest.mark.parametrize(
    "length",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    ],
)
async def test_a_request_with_two_lengths_is_refused(
    server: ManagementServer, length: bytes
) -> None:
    begin = b"POST /api/definitions HTTP/1.1\r\nhost: x\r\n"
    for port in server.ports:
        found = await answer_of(port, begin + length + LOGIN + b"0\r\n\r\n" + WHOLE)
        assert found.startswith(b"HTTP/1.1 400")
    begin = b"POST /api/definitions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    assert (await answer_of(server.ports[0], begin + LOGIN)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "head",
    [
        WHOLE.replace(b"\r\n", b"\n"),
        HALF.replace(b"\r\n", b"\n", 1) + LOGIN,
        HALF + b"x: y\n" + LOGIN,
        HALF + b"x: y\n\n" + WHOLE,
        b"\n" + WHOLE,
        HALF + b"transfer-encoding: chunked\r\n" + LOGIN + b"0\r\nx: y\n\n",
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 16])
async def test_a_line_that_ends_without_carriage_return_is_refused(
    server: ManagementServer, head: bytes, step: int
) -> None:
    """A proxy in front may see another end of the head, and so another request behind it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
    answer = b""
    # What is sent behind the answer resets the connection.
    with contextlib.suppress(ConnectionError):
        for at in range(0, len(head), step):
            writer.write(head[at : at + step])
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400") or (step == 1 and not answer)
    assert answer.count(b"HTTP/1.1") <= 1


async def test_lines_that_end_as_they_should_are_read_byte_by_byte(
    server: ManagementServer,
) -> None:
    """Bodies may hold what heads may not."""
    body = b'{"a":\n\n"b"}\n'
    put = HALF.replace(b"GET /api/whoami", b"PUT /api/vhosts/new")
    text = put + b"content-length: %d\r\n" % len(body) + LOGIN + body + WHOLE
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
    for byte in text:
        writer.write(bytes((byte,)))
        await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 201")
        assert b'"name": "guest"' in await reader.readuntil(b"}")
    writer.close()


async def test_a_body_that_breaks_off_behind_its_answer_is_no_fault_of_the_node(
    server: ManagementServer,
) -> None:
    """The answer has begun: there is no other to give, and nothing to log."""
    faults = loop_faults()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
    writer.write(b"POST /none HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readuntil(b'Not Found"}')).startswith(b"HTTP/1.1 404")
        writer.write(b"no chunk\r\n")
        await reader.read()
    writer.close()
    assert not faults


async def test_a_violated_invariant_in_a_request_ends_the_process(
    cluster: FakeCluster, server: ManagementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one request with 500, as if the others could go on."""
    faults = loop_faults()

    async def violated() -> None:
        raise InvariantViolated("a test says so")

    monkeypatch.setattr(cluster.nodes[1].broker.cluster, "nodes", violated)
    async with httpx.AsyncClient(auth=("guest", "guest")) as browser:
        await browser.get(f"http://127.0.0.1:{server.ports[0]}/api/nodes")
    assert [type(error) for error in faults] == [InvariantViolated]


async def test_processes_of_a_machine_follow_each_other_on_its_port(cluster: FakeCluster) -> None:
    """Each of two servers serves in turn; a client is refused at no time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    bound, counts = bind([address]), ClientCounts(2)

    def make(process: int) -> ManagementServer:
        turns = TurnSockets(bound, counts, process)
        where = [(address.host, address.port)]
        return ManagementServer(cluster.nodes[1].broker, where, turns=turns)

    servers = [make(1), make(2), make(1)]
    for server in servers[:2]:
        await server.start()
    url = f"http://{address}/api/vhosts/%2F"
    for leaving, following in ((0, 1), (1, 2)):
        async with httpx.AsyncClient(auth=("guest", "guest"), timeout=PATIENCE_S) as browser:
            assert (await browser.get(url)).status_code == 200
            await servers[leaving].stop()
        async with httpx.AsyncClient(auth=("guest", "guest"), timeout=PATIENCE_S) as browser:
            assert (await browser.get(url)).status_code == 200
        turns = servers[following]._turns
        assert turns is not None
        assert turns.serves
        if leaving == 0:
            await servers[2].start()
    await servers[2].stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))
    for sockets in bound.values():
        for sock in sockets:
            sock.close()
