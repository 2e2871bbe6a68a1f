"""Dials the other nodes, as long as there is no connection to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

from convoymq.model.config import Address
from convoymq.transport.connections import Connection, PlainConnection, TlsConnection
from convoymq.transport.handshake import CODE_SELF, Handshake, LinkRefused

if TYPE_CHECKING:
    from convoymq.transport.links import Links
    from convoymq.transport.peer import Peer

HANDSHAKE_S = 3.0
CONNECT_S = 1.0
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 0.5
RESOLVE_S = 10.0


class Dial:
    """One address that is dialled until it turns out to be this node."""

    __slots__ = ("address", "last_error", "node", "wake")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.node = address.node
        self.last_error = ""
        self.wake = asyncio.Event()


class Dialler:
    """All addresses that one node dials."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.dials: dict[str, Dial] = {}

    def add(self, address: Address) -> None:
        """Starts dialling an address, unless that is done already or it is this node's own."""
        links = self.links
        key = f"{address.host}:{address.port}"
        known = key in self.dials or self.is_own(address)
        if known or not links.running or len(self.dials) >= 2 * links.config.peers_max:
            return
        dial = self.dials[key] = Dial(address)
        links.tasks.create_task(self._dial_forever(dial))

    def is_own(self, address: Address) -> bool:
        links = self.links
        own = (f"{links.address.host}:{links.address.port}", links.config.advertise)
        return address.node == links.node_id or f"{address.host}:{address.port}" in own

    def wake(self, peer: Peer) -> None:
        """Dials a node anew at once."""
        for dial in self.dials.values():
            if dial.node == peer.node:
                dial.wake.set()

    async def _dial_forever(self, dial: Dial) -> None:
        links = self.links
        backoff = BACKOFF_MIN_S
        while links.running:
            peer = self._peer_of(dial)
            # A forgotten node is not dialled before it has come by itself, with nothing.
            wanted = dial.node not in links.forgotten or (peer is not None and peer.inward)
            if wanted and (peer is None or peer.outward is None):
                connection, shake, error = await self._dial(dial)
                if shake is not None and connection is not None:
                    if await links.attach_outward(dial, connection, shake):
                        backoff = BACKOFF_MIN_S
                elif error == CODE_SELF:
                    links.lists_itself |= dial.address in links.config.peers
                    return
                if error and error != dial.last_error:
                    refused = error.startswith("refused by")
                    (links.log.error if refused else links.log.info)(
                        "link.dial_failed", address=str(dial.address), reason=error
                    )
                dial.last_error = error
            else:
                backoff = BACKOFF_MAX_S
            dial.wake.clear()
            peer = self._peer_of(dial)
            # Whoever loses a connection that stands wakes this dial.
            stands = peer is not None and peer.outward is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dial.wake.wait(), None if stands else backoff)
                backoff = BACKOFF_MIN_S / 2
            backoff = min(backoff * 2, BACKOFF_MAX_S)

    def _peer_of(self, dial: Dial) -> Peer | None:
        return self.links.peers.get(dial.node) if dial.node else None

    async def _dial(self, dial: Dial) -> tuple[Connection | None, Handshake | None, str]:
        """One attempt: (connection, finished handshake, "") or (None, None, reason)."""
        links = self.links
        connection: Connection | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._connect(dial.address)
            async with asyncio.timeout(HANDSHAKE_S):
                shake = await self._shake(connection)
        except TimeoutError:
            if connection is not None:
                connection.close()
            return None, None, "no answer"
        except OSError as error:
            peer = links.peers.get(dial.node)
            if peer is not None and not peer.up:
                links.look_for(peer)
            return None, None, os.strerror(error.errno) if error.errno else str(error)
        except LinkRefused as error:
            assert connection is not None
            if error.code == CODE_SELF:
                connection.close()
                return None, None, CODE_SELF
            if error.told:
                connection.close()
                links.admission.on_told(error)
            else:
                links.admission.refuse(connection, error, str(dial.address))
            return None, None, error.text
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        return connection, shake, ""

    async def _connect(self, address: Address) -> Connection:
        links = self.links
        if links.contexts is not None:
            _, connection = await links.loop.create_connection(
                TlsConnection, address.host, address.port, ssl=links.contexts[1], server_hostname=""
            )
            return connection
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host = address.host
        if family == socket.AF_INET and not host.replace(".", "").isdigit():
            found = await links.loop.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
            family, host = found[0][0], str(found[0][4][0])
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            await links.loop.sock_connect(sock, (host, address.port))
        except BaseException:
            sock.close()
            raise
        return PlainConnection(links.loop, sock, links.run_input)

    async def _shake(self, connection: Connection) -> Handshake:
        links = self.links
        shake = links.admission.handshake(True)
        finished: asyncio.Future[Handshake] = links.loop.create_future()

        def fail(error: Exception) -> None:
            if not finished.done():
                finished.set_exception(error)

        def frames(received: list[bytes]) -> None:
            for data in received:
                try:
                    answer = shake.receive(data)
                    if shake.done and shake.peer is not None:
                        links.admission.judge(shake.peer)
                except LinkRefused as error:
                    fail(error)
                    return
                if answer is not None:
                    connection.writer.send(answer)
                    connection.flush()
                if shake.done and not finished.done():
                    finished.set_result(shake)

        def lost(reason: str) -> None:
            connection.close()
            fail(OSError(reason))

        connection.on_frames, connection.on_lost = frames, lost
        connection.writer.send(shake.begin())
        connection.flush()
        connection.resume()
        return await finished

    async def resolve_forever(self) -> None:
        """Dials what the DNS name of the cluster stands for."""
        links = self.links
        while True:
            try:
                found = await links.loop.getaddrinfo(
                    links.config.dns_name, links.address.port, type=socket.SOCK_STREAM
                )
                for entry in found[: links.config.peers_max]:
                    self.add(Address(str(entry[4][0]), links.address.port))
            except OSError as error:
                links.log.warning(
                    "link.resolve_failed", name=links.config.dns_name, reason=str(error)
                )
            pause = RESOLVE_S if links.connected() else RESOLVE_S / 10
            await asyncio.sleep(pause)
