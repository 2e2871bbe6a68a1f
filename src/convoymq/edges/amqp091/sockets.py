"""Sockets of AMQP connections: reading, writing, TLS.

Plain connections are read and written by the frame kernel when the event loop says that they are
ready; TLS goes through the loop's transports and hands bytes to the same scanner.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from convoymq.edges.acceptor import close_socket
from convoymq.edges.amqp091.connection import Connection
from convoymq.edges.edge import Incoming
from convoymq.kernels.connection_buffer import ConnectionBuffer
from convoymq.model.clock import Timer
from convoymq.transport.listening import descriptor_of

if TYPE_CHECKING:
    from convoymq.edges.amqp091.edge import AmqpEdge


class SocketShell:
    """A plain connection on the event loop. Implements `Shell`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, owner: AmqpEdge
    ) -> None:
        self.loop = loop
        self.sock = sock
        self.owner = owner
        self.fd = sock.fileno()
        self.connection: Connection | None = None
        self._reading = False
        self._writing = False
        self._closed = False

    def begin(self, head: bytes) -> None:
        """Reads from now on, after what was read before."""
        assert self.connection is not None
        self.set_reading(True)
        try:
            self.connection.buffer.feed(head)
        except Exception:
            self.connection.failed()

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
        """See `Shell`: never asked, the buffer has the descriptor."""

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
        close_socket(self.sock)
        self.owner.gone(self.connection)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self.loop.call_later(delay_s, call)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """See `Shell`."""
        self.owner.spawn(work)

    def _readable(self) -> None:
        connection = self.connection
        assert connection is not None
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

    def _writable(self) -> None:
        assert self.connection is not None
        self._writing = False
        self.loop.remove_writer(self.fd)
        self.connection.on_writable()


class TlsShell(asyncio.Protocol):
    """A TLS connection on the event loop. Implements `Shell`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, owner: AmqpEdge, incoming: Incoming
    ) -> None:
        self.loop = loop
        self.owner = owner
        self.transport: asyncio.Transport | None = None
        self.connection = owner.open_connection(self, -1, incoming)
        self._head = incoming.head
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self.data_received(self._head)

    def data_received(self, data: bytes) -> None:
        try:
            self.connection.buffer.feed(bytes(data))
        except Exception:
            self.connection.failed()

    def eof_received(self) -> bool:
        self.connection.eof()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost()
        self.owner.gone(self.connection)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
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
        if not self.transport.is_closing():
            data = self.connection.buffer.take_output()
            if data:
                self.transport.write(data)
        self.transport.close()
        self.loop.call_later(self.owner.settings.close_timeout_s, self.transport.abort)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self.loop.call_later(delay_s, call)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """See `Shell`."""
        self.owner.spawn(work)
