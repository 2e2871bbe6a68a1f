"""Interface of the ends of a shovel, and the connection below them.

A method that waits raises `EndFailed` when its broker refuses something or its connection breaks.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from convoymq.broker.shovel_uris import ShovelUri
from convoymq.messages.amqp091 import Properties

CONNECT_S = 30.0
CLOSE_S = 1.0
BUFFER_BYTES = 1 << 20
READ_BYTES = 1 << 16

Inside = Callable[[bytes], socket.socket]
"""Connects to this node's own edge of a protocol, whose header it sends."""


class EndFailed(Exception):
    """Tells why an end cannot go on."""


class Message(NamedTuple):
    """A message as AMQP 0-9-1 knows it."""

    tag: int
    """Of the delivery."""
    exchange: str
    routing_key: str
    properties: Properties
    body: bytes
    sections: bytes = b""
    """Of AMQP 1.0; empty: it came by 0-9-1."""


class Confirm(NamedTuple):
    """Outcome of messages at the destination."""

    sequence: int
    multiple: bool
    accepted: bool


class Peer(Protocol):
    """Connection of an end."""

    blocked: bool
    """The broker takes no messages for now."""

    async def close(self) -> None:
        """Ends the connection: what was sent before is read by the broker."""


class Source(Protocol):
    """Source of the messages of a shovel."""

    @property
    def peer(self) -> Peer:
        """Returns the connection."""

    async def open(self) -> int | None:
        """Prepares to consume, and returns how many messages are ready; None: nobody knows."""

    async def consume(self) -> None:
        """Begins to consume."""

    async def next(self) -> Message:
        """Returns the next message."""

    def settle(self, tags: Collection[int], *, accepted: bool) -> None:
        """Settles messages, or gives them back."""


class Destination(Protocol):
    """Destination of the messages of a shovel."""

    sequence: int
    """Number of the next message in confirms."""

    @property
    def peer(self) -> Peer:
        """Returns the connection."""

    async def open(self) -> None:
        """Prepares to publish."""

    async def publish(self, message: Message) -> None:
        """Sends a message."""

    async def outcome(self) -> Confirm:
        """Returns the next confirm; without confirms, none comes."""


class Wire:
    """Bytes to and from a broker. A watch ends a connection that is silent for too long."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False

    @classmethod
    async def open(cls, uri: ShovelUri, header: bytes, inside: Inside) -> Wire:
        """Connects, and sends the first bytes. Raises EndFailed."""
        limit_s = uri.number("connection_timeout", int(CONNECT_S * 1000)) / 1000 or None
        try:
            async with asyncio.timeout(limit_s):
                if not uri.host:
                    sock = inside(header)
                    reader, writer = await asyncio.open_unix_connection(sock=sock)
                    return cls(reader, writer)
                tls = _tls(uri) if uri.tls else None
                name = (uri.options.get("server_name_indication") or uri.host) if tls else None
                reader, writer = await asyncio.open_connection(
                    uri.host, uri.port, ssl=tls, server_hostname=name
                )
        except TimeoutError:
            raise EndFailed(f"{uri.host}:{uri.port}: no connection in time") from None
        except (OSError, ValueError) as error:
            place = f"{uri.host}:{uri.port}" if uri.host else "own cluster"
            raise EndFailed(f"{place}: {getattr(error, 'strerror', None) or error}") from error
        writer.transport.set_write_buffer_limits(BUFFER_BYTES)
        writer.write(header)
        return cls(reader, writer)

    def watch(self, beat: bytes, every_s: float, silence_s: float) -> None:
        """Sends a sign of life again and again, and ends the connection when none comes.

        Args:
            every_s, silence_s: 0: not at all.
        """
        if silence_s and self._loop.time() - self._heard_s > silence_s:
            self._silent = True
            self._writer.transport.abort()
            return
        if every_s:
            self._writer.write(beat)
        step_s = min(each for each in (every_s, silence_s, 3600.0) if each)
        self._timer = self._loop.call_later(step_s, self.watch, beat, every_s, silence_s)

    async def read(self, count: int) -> bytes:
        """Returns that many bytes. Raises EndFailed."""
        try:
            data = await self._reader.readexactly(count)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost() from error
        self._heard_s = self._loop.time()
        return data

    async def read_some(self) -> bytes:
        """Returns what has come, at least a byte. Raises EndFailed."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise self._lost() from error
        if not data:
            raise self._lost()
        self._heard_s = self._loop.time()
        return data

    def _lost(self) -> EndFailed:
        reason = "it was silent for too long" if self._silent else "it was closed"
        return EndFailed(f"connection lost: {reason}")

    def write(self, data: bytes) -> None:
        """Writes without waiting; a broken connection shows when it is read."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Waits until there is room for more output. Raises EndFailed."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise EndFailed("connection lost: it was closed") from error

    async def close(self) -> None:
        """Writes what is left, within a bounded time, and closes."""
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def _tls(uri: ShovelUri) -> ssl.SSLContext:
    """Returns the context of a connection. Raises OSError, ValueError."""
    from convoymq.transport.tls import client_context

    options = uri.options
    verified = options.get("verify", "verify_none") == "verify_peer"
    context = client_context(
        certificate=options.get("certfile", ""),
        key=options.get("keyfile", ""),
        password=options.get("password", ""),
        authorities=options.get("cacertfile", ""),
        verify=ssl.CERT_REQUIRED if verified else ssl.CERT_NONE,
    )
    if verified and not options.get("cacertfile"):
        context.load_default_certs()
    context.check_hostname = verified and options.get("server_name_indication") != "disable"
    return context
