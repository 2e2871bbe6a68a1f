"""Listening sockets, on loopback."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from convoymq.transport import listening
from convoymq.transport.listening import Acceptor, addresses_of, has_ipv6, listen, plain_address
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.sockets import backlog_of

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="the system has no IPv6 loopback address")


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for sock in sockets:
        sock.close()


def connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=PATIENCE_S).close()


@needs_ipv6
def test_localhost_is_both_families_on_one_port(opened: list[socket.socket]) -> None:
    opened += listen("localhost", 0)
    assert [sock.getsockname()[0] for sock in opened] == ["127.0.0.1", "::1"]
    (port,) = {sock.getsockname()[1] for sock in opened}
    connect("127.0.0.1", port)
    connect("::1", port)


def test_localhost_is_ipv4_on_systems_without_the_other(
    opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "has_ipv6", lambda: False)
    assert addresses_of("localhost") == ("127.0.0.1",)
    opened += listen("localhost", 0)
    assert [sock.family for sock in opened] == [socket.AF_INET]


@needs_ipv6
def test_the_unspecified_address_of_ipv6_takes_both_families(opened: list[socket.socket]) -> None:
    opened += listen("::", 0)
    (sock,) = opened
    port = sock.getsockname()[1]
    connect("::1", port)
    connect("127.0.0.1", port)
    peers = []
    sock.setblocking(True)
    for _ in range(2):
        accepted, peer = sock.accept()
        accepted.close()
        peers.append(plain_address(peer[0]))
    assert sorted(peers) == ["127.0.0.1", "::1"]


@needs_ipv6
def test_a_single_address_of_ipv6_leaves_the_other_family_alone(
    opened: list[socket.socket],
) -> None:
    port = single_port()
    opened += listen("::1", port)
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port)


@needs_ipv6
@pytest.mark.parametrize("busy", ["127.0.0.1", "::1"])
def test_a_port_that_one_family_has_not_free_is_refused(
    opened: list[socket.socket], busy: str
) -> None:
    port = single_port()
    opened += listen(busy, port)
    with pytest.raises(OSError) as raised:
        listen("localhost", port)
    assert raised.value.errno == errno.EADDRINUSE
    other = "::1" if busy == "127.0.0.1" else "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        connect(other, port)


def test_the_backlog_is_the_systems(opened: list[socket.socket]) -> None:
    opened += listen("localhost", 0, 7)
    assert [backlog_of(sock) for sock in opened] == [7] * len(opened)


def test_mapped_addresses_are_shown_plainly() -> None:
    assert plain_address("::ffff:192.0.2.1") == "192.0.2.1"
    assert plain_address("2001:db8::1") == "2001:db8::1"


class Scarce:
    """A listening socket that fails first; by default, as no descriptor is left."""

    def __init__(self, listening: socket.socket, failures: int, number: int = errno.EMFILE) -> None:
        self._listening = listening
        self.failures = failures
        self._number = number

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._listening.accept()

    def fileno(self) -> int:
        return self._listening.fileno()

    def close(self) -> None:
        self._listening.close()


async def test_accepting_pauses_while_no_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "ACCEPT_PAUSE_S", 0.001)
    (sock,) = listen("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[socket.socket] = loop.create_future()
    failures: list[int | None] = []
    scarce: Any = Scarce(sock, 2)
    acceptor = Acceptor(
        loop,
        scarce,
        lambda made, _peer: accepted.set_result(made),
        lambda error: failures.append(error.errno),
    )
    with socket.create_connection(sock.getsockname(), timeout=PATIENCE_S):
        async with asyncio.timeout(PATIENCE_S):
            (await accepted).close()
    assert failures == [errno.EMFILE, errno.EMFILE]
    acceptor.close()


async def test_accepting_ends_also_during_a_pause() -> None:
    address = ("127.0.0.1", single_port())
    (sock,) = listen(*address)
    loop = asyncio.get_running_loop()
    paused: asyncio.Future[OSError] = loop.create_future()
    scarce: Any = Scarce(sock, 1)
    acceptor = Acceptor(loop, scarce, lambda made, _peer: made.close(), paused.set_result)
    with socket.create_connection(address, timeout=PATIENCE_S):
        async with asyncio.timeout(PATIENCE_S):
            await paused
        acceptor.close()
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        connect(*address)


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
async def test_a_connection_that_failed_while_it_waited_harms_nobody(number: int) -> None:
    (sock,) = listen("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[socket.socket] = loop.create_future()
    scarce: Any = Scarce(sock, 2, number)
    failures: list[OSError] = []
    acceptor = Acceptor(
        loop, scarce, lambda made, _peer: accepted.set_result(made), failures.append
    )
    with socket.create_connection(sock.getsockname(), timeout=PATIENCE_S):
        async with asyncio.timeout(PATIENCE_S):
            (await accepted).close()
    acceptor.close()
    assert failures == []
