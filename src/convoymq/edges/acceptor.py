"""The AMQP port: accepts connections, reads their first bytes, and gives them to their edge.

    accepted ─▶ undecided ─▶ attached to a protocol, or its socket taken, by the edge
                    └──────▶ closed: too late, gone, or of no protocol

Connections count for the limit from when they are accepted. `transport.listening.Acceptor` does
the accepting itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.connections import connection_name
from convoymq.edges.edge import Certificate, Edge, RunInput
from convoymq.edges.prefaces import PREFACE_BYTES_MAX, Prefaces
from convoymq.model.tasks import Tasks
from convoymq.transport.listening import (
    ACCEPT_PAUSE_S,
    BACKLOG,
    Acceptor,
    SocketAddress,
    addresses_of,
    listen,
    plain_address,
)
from convoymq.transport.shared_sockets import SharedSockets

if TYPE_CHECKING:
    import ssl

log = structlog.get_logger()

CLOSE_READ_BYTES = 65536
PUBLISH_S = 0.1
"""Other processes of the machine know by then how many clients have left."""

connection_ids = itertools.count(1)


def close_socket(sock: socket.socket) -> None:
    """Closes a socket; what was written to it before still arrives."""
    with contextlib.suppress(OSError):
        # Unread input would turn the close into a reset that overtakes our last words.
        sock.shutdown(socket.SHUT_WR)
        sock.recv(CLOSE_READ_BYTES)
    sock.close()


def _address(found: SocketAddress) -> tuple[str, int]:
    return plain_address(str(found[0])), int(str(found[1]))


class _Undecided:
    """A connection whose protocol is not known yet; then its edge's `Incoming`."""

    inside = False

    def __init__(
        self, ports: SharedPorts, peer: SocketAddress, local: SocketAddress, tls: bool
    ) -> None:
        self.id = next(connection_ids)
        self.head = b""
        self.peer = _address(peer)
        self.local = _address(local)
        self.tls = tls
        self.certificate: Certificate | None = None
        self._ports = ports
        self._loop = loop = asyncio.get_running_loop()
        self._deadline = loop.time() + ports.handshake_timeout_s
        self._timer = loop.call_later(ports.handshake_timeout_s, self._too_late)
        ports.undecided.add(self)

    def handshake_left_s(self) -> float:
        """See `Incoming`."""
        return max(0.0, self._deadline - self._loop.time())

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """See `Incoming`."""
        raise NotImplementedError

    def take_socket(self) -> socket.socket | None:
        """See `Incoming`."""
        return None

    def close(self) -> None:
        """Ends the connection."""
        raise NotImplementedError

    def _too_late(self) -> None:
        name = connection_name(self.peer, self.local)
        log.warning("amqp.handshake_timeout", connection=name, state="header")
        self.close()

    def _forget(self) -> None:
        self._timer.cancel()
        self._ports.undecided.discard(self)

    def _decide(self) -> None:
        """Gives the connection away, or closes it."""
        edge = self._ports.prefaces.edge_of(self.head)
        if edge is None:
            self.close()
            return
        self._forget()
        edge.connect(self)


class _Plain(_Undecided):
    """A connection without TLS. Its socket is read here, so that an edge may read it itself."""

    def __init__(self, ports: SharedPorts, sock: socket.socket, peer: SocketAddress) -> None:
        super().__init__(ports, peer, sock.getsockname(), tls=False)
        self._sock = sock
        run_input = ports.run_input
        if run_input is None:
            self._loop.add_reader(sock.fileno(), self._readable)
        else:
            self._loop.add_reader(sock.fileno(), run_input, self._readable)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(PREFACE_BYTES_MAX - len(self.head))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.head += data
        if self._ports.prefaces.is_undecided(self.head):
            return
        self._loop.remove_reader(self._sock.fileno())
        self._decide()

    def close(self) -> None:
        """Ends the connection."""
        self._forget()
        self._loop.remove_reader(self._sock.fileno())
        close_socket(self._sock)

    def take_socket(self) -> socket.socket | None:
        """See `Incoming`."""
        return self._sock

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """See `Incoming`."""
        self._ports.spawn(self._adopt(protocol))

    async def _adopt(self, protocol: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, self._sock)
        except OSError as error:
            self._sock.close()
            lost = getattr(protocol, "connection_lost", None)
            if lost is not None:
                lost(error)


class _Tls(_Undecided):
    """A connection with TLS, which the event loop reads."""

    def __init__(self, ports: SharedPorts, transport: asyncio.Transport) -> None:
        peer, local = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        super().__init__(ports, peer, local, tls=True)
        self.certificate = transport.get_extra_info("peercert") or None
        self._transport = transport

    def feed(self, data: bytes) -> None:
        """Takes input."""
        self.head += data
        if not self._ports.prefaces.is_undecided(self.head):
            self._decide()

    def lost(self) -> None:
        """The connection has ended."""
        self._forget()

    def close(self) -> None:
        """Ends the connection."""
        self._forget()
        self._transport.close()
        self._loop.call_later(self._ports.close_timeout_s, self._transport.abort)

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """See `Incoming`."""
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)


class _TlsProtocol(asyncio.Protocol):
    """Feeds a `_Tls` until the protocol of its edge takes over."""

    def __init__(self, ports: SharedPorts) -> None:
        self._ports = ports
        self._connection: _Tls | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        if not self._ports.has_room():
            transport.close()
            return
        self._connection = _Tls(self._ports, transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.feed(bytes(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connection.lost()


class SharedPorts:
    """The listening addresses on which the first bytes of a connection say what it speaks.

    Args:
        edges: they get the connections that begin with their prefaces.
        connections_max: more connections are closed at once.
        handshake_timeout_s: for the first bytes, and what the edge's own handshake then has left.
        close_timeout_s: how long a TLS connection that is closed may take for its last bytes.
        backlog: connections that the system accepts ahead of the process.
        run_input: calls what reads a connection, in place of the loop.
        shared: the listening sockets, where the processes of a machine share them.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        *,
        connections_max: int = 65535,
        handshake_timeout_s: float = 10.0,
        close_timeout_s: float = 5.0,
        backlog: int = BACKLOG,
        run_input: RunInput | None = None,
        shared: SharedSockets | None = None,
    ) -> None:
        self.prefaces = Prefaces(edges)
        self.undecided: set[_Undecided] = set()
        self.handshake_timeout_s = handshake_timeout_s
        self.close_timeout_s = close_timeout_s
        self.run_input = run_input
        self.refused_connections = 0
        self.sockets: list[socket.socket] = []
        """Sockets that listen."""
        self._edges = tuple(edges)
        self._connections_max = connections_max
        self._backlog = backlog
        self._shared = shared
        self._tls_handshakes = 0
        self._acceptors: list[Acceptor] = []
        self._tasks = Tasks()
        self._publishing: asyncio.TimerHandle | None = None
        self._stopping = False
        self._addresses: list[tuple[str, int, ssl.SSLContext | None]] = []

    def add(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Adds an address on which `open` listens."""
        self._addresses.append((host, port, tls))

    async def open(self) -> None:
        """Listens on all addresses. Raises OSError, and listens on none, when one cannot be
        bound."""
        try:
            for host, port, tls in self._addresses:
                await self.listen(host, port, tls)
        except OSError:
            self.close()
            raise

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listens on one more address. Port 0 takes any free one; returns which.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        if self._shared is None:
            sockets = listen(host, port, self._backlog)
            may_accept = None
        else:
            sockets = self._shared.open(host, port, self._backlog, self._count())
            may_accept = self._may_accept
            self._publish()
        self.sockets += sockets
        port = sockets[0].getsockname()[1]
        accepted = self._accepted if tls is None else partial(self._accepted_tls, tls)
        for sock in sockets:
            self._acceptors.append(Acceptor(loop, sock, accepted, _not_accepted, may_accept))
        for address in addresses_of(host):
            log.info("amqp.listening", host=address, port=port, tls=tls is not None)
        return port

    def _may_accept(self) -> bool:
        assert self._shared is not None
        return self._shared.may_accept(self._count())

    def _publish(self) -> None:
        """Keeps telling the machine's other processes how many clients this one has."""
        assert self._shared is not None
        if self._publishing is not None:
            self._publishing.cancel()
        self._shared.keep_open(self._count())
        loop = asyncio.get_running_loop()
        self._publishing = loop.call_later(PUBLISH_S, self._publish)

    def stop(self) -> None:
        """Accepts no more for ever, and closes what is undecided."""
        self._stopping = True
        self.close()

    def close(self) -> None:
        """Accepts no more until `open`, and closes what is undecided."""
        self.sockets = []
        acceptors, self._acceptors = self._acceptors, []
        for acceptor in acceptors:
            acceptor.close()
        if self._publishing is not None:
            self._publishing.cancel()
        if self._shared is not None:
            self._shared.close()
        for connection in list(self.undecided):
            connection.close()

    def has_room(self) -> bool:
        """Returns whether one more connection may come in; counts the refused."""
        if self._stopping or self._clients() >= self._connections_max:
            self.refused_connections += 1
            log.warning("amqp.connection_limit", limit=self._connections_max)
            return False
        return True

    def _clients(self) -> int:
        return len(self.undecided) + sum(edge.connection_count() for edge in self._edges)

    def _count(self) -> int:
        return self._clients() + self._tls_handshakes

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task of this object."""
        self._tasks.spawn(work)

    def _accepted(self, sock: socket.socket, peer: SocketAddress) -> None:
        if not self.has_room():
            sock.close()
            return
        sock.setblocking(False)
        try:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _Plain(self, sock, peer)
        except OSError:
            sock.close()

    def _accepted_tls(self, tls: ssl.SSLContext, sock: socket.socket, _peer: SocketAddress) -> None:
        sock.setblocking(False)
        self._tasks.spawn(self._handshake(tls, sock))

    async def _handshake(self, tls: ssl.SSLContext, sock: socket.socket) -> None:
        self._tls_handshakes += 1
        try:
            # A client that does not complete it gets no other answer than the end.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: _TlsProtocol(self),
                    sock,
                    ssl=tls,
                    ssl_handshake_timeout=self.handshake_timeout_s,
                )
        finally:
            self._tls_handshakes -= 1


def _not_accepted(error: OSError) -> None:
    log.error("amqp.accept_failed", error=str(error), pause_s=ACCEPT_PAUSE_S)
