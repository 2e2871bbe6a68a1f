"""Sockets of the HTTP endpoints, and what they say of the release that is imitated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from convoymq.amqp.handshake import server_properties
from convoymq.management.server import ManagementServer
from convoymq.model.compatibility import COMPATIBLE_PRODUCT, COMPATIBLE_VERSION
from convoymq.transport.listening import has_ipv6
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
