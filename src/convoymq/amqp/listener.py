"""Sockets of the AMQP edge: accepting, reading, writing, TLS.

Plain connections are read and written by the frame kernel when the event loop says that they are
ready; TLS goes through the loop's transports and hands bytes to the same scanner.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from convoymq.amqp.connection import Connection, Timer
from convoymq.amqp.settings import AmqpSettings
from convoymq.kernels.frames import ConnectionBuffer, Outbox
from convoymq.transport.listening import (
    ACCEPT_PAUSE_S,
    BACKLOG,
    Acceptor,
    HangUpWatch,
    addresses_of,
    descriptor_of,
    listen,
    plain_address,
)

log = structlog.get_logger()

PREFACE_BYTES = 8
"""Length of what every protocol on this port begins with."""
COLUMNAR_MAGIC = b"CNVY"
"""The columnar protocol begins with it (docs/formats/columnar-protocol.md)."""

#: Connection ids are unique in the process: they own exclusive queues.
_ids = itertools.count(1)

#: Serves a connection of another protocol: (what it began with, its id, peer, local address, TLS).
Door = Callable[[bytes, int, tuple[str, int], tuple[str, int], bool], asyncio.BaseProtocol]


class SocketShell:
    """A plain connection on the event loop. Implements `Shell`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, owner: Listener
    ) -> None:
        self.loop = loop
        self.sock = sock
        self.owner = owner
        self.fd = sock.fileno()
        self.connection: Connection | None = None
        self._reading = False
        self._writing = False
        self._closed = False
        self._head: bytes | None = b"" if owner.columnar is not None else None

    def set_reading(self, on: bool) -> None:
        """See `Shell`."""
        if self._closed or on == self._reading:
            return
        self._reading = on
        if on:
            run_input = self.owner.run_input
            if run_input is None:
                self.loop.add_reader(self.fd, self._readable)
            else:
                self.loop.add_reader(self.fd, run_input, self._readable)
        else:
            self.loop.remove_reader(self.fd)

    def want_write(self) -> None:
        """See `Shell`."""
        if not self._closed and not self._writing:
            self._writing = True
            self.loop.add_writer(self.fd, self._writable)

    def take_output(self, buffer: ConnectionBuffer) -> None:
        """See `Shell`: never asked, the wire has the descriptor."""

    def fileno(self) -> int:
        """Returns the socket's descriptor; -1 without one."""
        return -1 if self._closed else self.fd

    def close(self) -> None:
        """See `Shell`."""
        if self._closed:
            return
        self.set_reading(False)
        if self._writing:
            self.loop.remove_writer(self.fd)
        self._closed = True
        if self.connection is not None:
            self.connection.buffer.fd = -1
        with contextlib.suppress(OSError):
            # Unread input would turn the close into a reset that overtakes our last words.
            self.sock.shutdown(socket.SHUT_WR)
            self.sock.recv(65536)
        self.sock.close()
        self.owner.gone(self.connection)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self.loop.call_later(delay_s, call)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """See `Shell`."""
        self.owner.spawn(work)

    def _readable(self) -> None:
        connection = self.connection
        assert connection is not None
        if self._head is not None:
            self._read_head(connection)
            return
        try:
            count = connection.buffer.receive()
        except Exception:
            connection.failed()
            return
        if count > 0:
            return
        if count == 0:
            connection.eof()
        elif -count not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
            connection.input_failed(-count)

    def _read_head(self, connection: Connection) -> None:
        """The first bytes say whose connection this is; no byte more than the preface is read."""
        head = self._head
        assert head is not None
        try:
            data = self.sock.recv(PREFACE_BYTES - len(head))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            connection.input_failed(error.errno or errno.EIO)
            return
        if not data:
            connection.eof()
            return
        self._head = head = head + data
        if is_undecided(head):
            return
        self._head = None
        if not head.startswith(COLUMNAR_MAGIC):
            try:
                connection.buffer.feed(head)
            except Exception:
                connection.failed()
            return
        self.set_reading(False)
        self._closed = True
        self.owner.hand_over(connection, self.sock, head)

    def _writable(self) -> None:
        assert self.connection is not None
        self._writing = False
        self.loop.remove_writer(self.fd)
        self.connection.on_writable()


class TlsShell(asyncio.Protocol):
    """A TLS connection on the event loop. Implements `Shell`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Listener) -> None:
        self.loop = loop
        self.owner = owner
        self.connection: Connection | None = None
        self.transport: asyncio.Transport | None = None
        self._full = False
        self._head: bytes | None = b"" if owner.columnar is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        if not self.owner.has_room():
            transport.close()
            return
        certificate = transport.get_extra_info("peercert")
        self.connection = self.owner.connect(
            self,
            -1,
            transport.get_extra_info("peername"),
            transport.get_extra_info("sockname"),
            certificate_name=certificate_user(certificate, self.owner.settings.cert_login_from)
            if certificate
            else None,
            ssl=True,
        )

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.connection is None:
            return
        if self._head is not None:
            data = self._head + bytes(data)
            if is_undecided(data):
                self._head = data
                return
            self._head = None
            if data.startswith(COLUMNAR_MAGIC):
                self._hand_over(data)
                return
        try:
            self.connection.buffer.feed(bytes(data))
        except Exception:
            self.connection.failed()

    def _hand_over(self, data: bytes) -> None:
        connection, self.connection = self.connection, None
        transport, self.transport = self.transport, None
        assert connection is not None
        assert transport is not None
        protocol = self.owner.leave(connection, data)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`."""
        if self.connection is not None:
            self.connection.eof()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.connection is not None:
            self.connection.lost()
            self.owner.gone(self.connection)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._full = True

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._full = False
        if self.connection is not None:
            self.connection.on_output()

    def set_reading(self, on: bool) -> None:
        """See `Shell`."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def want_write(self) -> None:
        """See `Shell`: the transport does that."""

    def fileno(self) -> int:
        """Returns the socket's descriptor; -1 without one."""
        return descriptor_of(self.transport)

    def take_output(self, buffer: ConnectionBuffer) -> None:
        """See `Shell`."""
        if self.transport is not None and not self._full and buffer.output_bytes:
            self.transport.write(buffer.take_output())

    def close(self) -> None:
        """See `Shell`."""
        if self.transport is None:
            return
        if self.connection is not None and not self.transport.is_closing():
            data = self.connection.buffer.take_output()
            if data:
                self.transport.write(data)
        self.transport.close()
        self.loop.call_later(self.owner.settings.close_timeout_s, self.transport.abort)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self.loop.call_later(delay_s, call)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """See `Shell`."""
        self.owner.spawn(work)


def is_undecided(head: bytes) -> bool:
    """Whether more bytes are needed to tell the columnar protocol from others."""
    return len(head) < PREFACE_BYTES and head[:4] == COLUMNAR_MAGIC[: len(head)]


_ATTRIBUTES = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}


def certificate_user(certificate: dict[str, Any], source: str) -> str | None:
    """The user that a verified peer certificate (as `ssl` decodes it) stands for.

    `source` is `common_name`, or `distinguished_name`: the subject as RFC 4514 writes it.
    """
    subject = certificate.get("subject", ())
    if source == "common_name":
        names = [str(value) for part in subject for key, value in part if key == "commonName"]
        return names[0] if names else None
    parts = [
        "+".join(f"{_ATTRIBUTES.get(key, key)}={_escaped(str(value))}" for key, value in part)
        for part in reversed(subject)
    ]
    return ",".join(parts) or None


def _escaped(value: str) -> str:
    text = "".join("\\" + char if char in '\\,+"<>;' else char for char in value)
    if text[:1] in ("#", " "):
        text = "\\" + text
    return text[:-1] + "\\ " if text.endswith(" ") and len(value) > 1 else text


class Listener:
    """One listening address. The outbox is shared with all listeners of the node; whoever ends the
    node's rounds flushes it."""

    def __init__(
        self,
        *,
        broker: Any,
        settings: AmqpSettings,
        outbox: Outbox,
        host: str = "localhost",
        port: int = 5672,
        backlog: int = BACKLOG,
        ssl_context: ssl.SSLContext | None = None,
        count: Callable[[], int] | None = None,
        columnar: Door | None = None,
        run_input: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`count` says how many connections there are of those that `connections_max` bounds;
        without it, those of this listener. `columnar` serves connections that begin with that
        protocol's preface; without it they are strangers. `run_input` calls what reads a
        connection, in place of the loop."""
        self.run_input = run_input
        self.broker = broker
        self.columnar = columnar
        self.settings = settings
        self.outbox = outbox
        self.host = host
        self.port = port
        self.connections: dict[int, Connection] = {}
        self.refused_connections = 0
        self._ssl = ssl_context
        self._count = count if count is not None else lambda: len(self.connections)
        self._backlog = backlog
        self._servers: list[asyncio.Server] = []
        self._acceptors: list[Acceptor] = []
        self._sockets: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._hang_ups = HangUpWatch(self._blocked)

    async def start(self) -> None:
        """Listen. Port 0 takes any free one; `port` says which.

        Raises:
            OSError: the address cannot be bound.
        """
        self._loop = loop = asyncio.get_running_loop()
        self._sockets = listen(self.host, self.port, self._backlog)
        self.port = self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            if self._ssl is None:
                self._acceptors.append(Acceptor(loop, sock, self._accepted, _not_accepted))
                continue
            self._servers.append(
                await loop.create_server(
                    lambda: TlsShell(loop, self),
                    sock=sock,
                    backlog=self._backlog,
                    ssl=self._ssl,
                    ssl_handshake_timeout=self.settings.handshake_timeout_s,
                )
            )
        self.broker.on_alarms.append(self._on_alarms)
        self._on_alarms(self.broker.alarms)
        for host in addresses_of(self.host):
            log.info("amqp.listening", host=host, port=self.port, tls=self._ssl is not None)

    async def stop(
        self, reason: str = "broker forced connection closure with reason 'shutdown'"
    ) -> None:
        """Close all connections with 320, wait a bounded time for their answers, and end."""
        self._stopping = True
        self._stop_accepting()
        if self._on_alarms in self.broker.on_alarms:
            self.broker.on_alarms.remove(self._on_alarms)
        self._hang_ups.set(False)
        for connection in list(self.connections.values()):
            connection.close(reason)
        self.outbox.flush()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.close_timeout_s
        while self.connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
            self.outbox.flush()
        for connection in list(self.connections.values()):
            connection.lost()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.settings.close_timeout_s)
        for task in self._tasks:
            task.cancel()

    def has_room(self) -> bool:
        """Whether one more connection may come in; counts the refused."""
        if self._stopping or self._count() >= self.settings.connections_max:
            self.refused_connections += 1
            log.warning("amqp.connection_limit", limit=self.settings.connections_max)
            return False
        return True

    def connect(
        self,
        shell: SocketShell | TlsShell,
        fd: int,
        peer: Any,
        local: Any,
        *,
        ssl: bool = False,
        certificate_name: str | None = None,
    ) -> Connection:
        """Make a connection for an accepted socket."""
        connection = Connection(
            id=next(_ids),
            broker=self.broker,
            settings=self.settings,
            outbox=self.outbox,
            shell=shell,
            fd=fd,
            peer=(plain_address(str(peer[0])), int(peer[1])),
            local=(plain_address(str(local[0])), int(local[1])),
            ssl=ssl,
            certificate_name=certificate_name,
        )
        self.connections[connection.id] = connection
        return connection

    def leave(self, connection: Connection, head: bytes) -> asyncio.BaseProtocol:
        """The connection turned out to be of the columnar protocol; returns who serves it."""
        assert self.columnar is not None
        connection.hand_over()
        self.gone(connection)
        return self.columnar(head, connection.id, connection.peer, connection.local, connection.ssl)

    def hand_over(self, connection: Connection, sock: socket.socket, head: bytes) -> None:
        """Give a plain socket to who serves the columnar protocol."""
        protocol = self.leave(connection, head)

        async def adopt() -> None:
            assert self._loop is not None
            try:
                await self._loop.connect_accepted_socket(lambda: protocol, sock)
            except OSError as error:
                sock.close()
                protocol.connection_lost(error)

        self.spawn(adopt())

    def gone(self, connection: Connection | None) -> None:
        """A connection's socket is closed."""
        if connection is not None:
            self.connections.pop(connection.id, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in a task that this listener owns; an error in it is logged."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("amqp.task_failed", exc_info=task.exception())

    def _on_alarms(self, alarms: frozenset[str]) -> None:
        for connection in list(self.connections.values()):
            connection.set_alarms(alarms)
        self._hang_ups.set(bool(alarms))

    def _blocked(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {}
        for connection in self.connections.values():
            shell = connection.shell
            if connection.is_blocked and isinstance(shell, SocketShell | TlsShell):
                found[shell.fileno()] = connection.eof
        return found

    def _stop_accepting(self) -> None:
        self._sockets = []
        acceptors, self._acceptors = self._acceptors, []
        servers, self._servers = self._servers, []
        for acceptor in acceptors:
            acceptor.close()
        for server in servers:
            server.close()

    def _accepted(self, sock: socket.socket, peer: Any) -> None:
        loop = self._loop
        assert loop is not None
        if not self.has_room():
            sock.close()
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        shell = SocketShell(loop, sock, self)
        try:
            shell.connection = self.connect(shell, sock.fileno(), peer, sock.getsockname())
        except OSError:
            sock.close()
            return
        shell.set_reading(True)


def _not_accepted(error: OSError) -> None:
    log.error("amqp.accept_failed", error=str(error), pause_s=ACCEPT_PAUSE_S)
