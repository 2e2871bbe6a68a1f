# cython: annotation_typing=False
"""Connections between nodes: whole frames in and out, over TCP or TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Protocol

from convoymq.kernels.sockets import LinkReader, LinkWriter

HELLO_SIZE_MAX = 65_536
TLS_TURN = 262_144

RunInput = Callable[[Callable[[], None]], None]
"""Calls its argument."""


class Connection(Protocol):
    """A connection that carries frames, plain or TLS."""

    on_frames: Callable[[list[bytes]], None]
    on_lost: Callable[[str], None]
    reader: LinkReader
    writer: LinkWriter
    closed: bool
    totals: list[int] | None

    def flush(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class PlainConnection:
    """A TCP connection, read and written by the kernels when the loop says it is ready."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, run_input: RunInput | None
    ) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = loop
        self._run_input = run_input
        self._sock = sock
        self._fd = sock.fileno()
        self._writing = False
        self._reading = False
        self.reader = LinkReader(self._fd, HELLO_SIZE_MAX)
        self.writer = LinkWriter(self._fd)
        self.closed = False
        self.totals: list[int] | None = None
        self.on_frames: Callable[[list[bytes]], None] = ignore_frames
        self.on_lost: Callable[[str], None] = ignore_loss

    def resume(self) -> None:
        if not self.closed and not self._reading:
            self._reading = True
            if self._run_input is None:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.add_reader(self._fd, self._run_input, self._readable)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        frames: list[bytes] = []
        reason = ""
        try:
            if not self.reader.read(frames):
                reason = "closed by the other side"
        except OSError as error:
            reason = os.strerror(error.errno or 0)
        except ValueError as error:
            reason = str(error)
        if frames:
            self.on_frames(frames)
        if reason and not self.closed:
            self.on_lost(reason)

    def flush(self) -> None:
        if self.closed or self._writing:
            return
        try:
            if not self.writer.flush():
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
        except OSError as error:
            self._loop.call_soon(self._report, os.strerror(error.errno or 0))

    def _report(self, reason: str) -> None:
        if not self.closed:
            self.on_lost(reason)

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._fd)
        self.flush()

    def close(self) -> None:
        if self.closed:
            return
        self.pause()
        self.closed = True
        _count(self)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._sock.close()


class TlsConnection(asyncio.Protocol):
    """A TLS connection on the loop's own transport."""

    def __init__(self, on_made: Callable[[TlsConnection], None] | None = None) -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._full = False
        self.reader = LinkReader(-1, HELLO_SIZE_MAX)
        self.writer = LinkWriter(-1)
        self.closed = False
        self.totals: list[int] | None = None
        self.on_frames: Callable[[list[bytes]], None] = ignore_frames
        self.on_lost: Callable[[str], None] = ignore_loss

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        frames: list[bytes] = []
        reason = ""
        try:
            self.reader.feed(bytes(data), frames)
        except ValueError as error:
            reason = str(error)
        if frames:
            self.on_frames(frames)
        if reason and not self.closed:
            self.on_lost(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.on_lost(str(exc) if exc else "closed by the other side")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.flush()

    def flush(self) -> None:
        while not self.closed and not self._full and self._transport is not None:
            parts = self.writer.take(TLS_TURN)
            if not parts:
                return
            self._transport.writelines(parts)

    def pause(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            _count(self)
            if self._transport is not None:
                self._transport.close()


def _count(connection: Connection) -> None:
    """Adds what a closed connection carried to the sums of its links."""
    if connection.totals is not None:
        connection.totals[0] += connection.reader.bytes_in
        connection.totals[1] += connection.writer.bytes_out


def ignore_frames(_frames: list[bytes]) -> None:
    """Drops what still comes."""
    return


def ignore_loss(_reason: str) -> None:
    """Nobody asks."""
    return


def closer(connection: Connection) -> Callable[[str], None]:
    """Returns what closes the connection when it is lost."""
    return lambda _reason: connection.close()
