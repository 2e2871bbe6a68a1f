"""Sockets of the HTTP endpoints, and what they say of the release that is imitated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from convoymq.edges.amqp091.handshake import server_properties
from convoymq.edges.http import http_server
from convoymq.edges.http.server import ManagementServer
from convoymq.model.compatibility import COMPATIBLE_PRODUCT, COMPATIBLE_VERSION
from convoymq.transport.listening import has_ipv6
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
@pytest.mark.parametrize("left", [b"", HALF, b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_connections_without_a_request_keep_nobody_out(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """Many connections of one address, which nobody has to log in for: nothing is sent, half a
    request, or a whole one whose connection stays open. Others are answered meanwhile."""
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
