"""Sockets of the byte stream between a master and its slaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from convoymq.model.errors import BrokerError
from convoymq.replication.group.master import Link, Master
from convoymq.replication.group.slave import Slave

OUTPUT_BYTES_MAX = 1 << 20
"""Of what a slave has not read yet; the rest waits in the log."""


class SlaveLink(asyncio.Protocol):
    """A slave's connection to this master.

    Args:
        heard: called after bytes of the slave.
        closed: called at the end.
    """

    def __init__(
        self,
        master: Master,
        now_ms: Callable[[], int],
        heard: Callable[[SlaveLink], None],
        closed: Callable[[SlaveLink], None],
    ) -> None:
        self.link: Link | None = None
        self.host = ""
        self._master = master
        self._now_ms = now_ms
        self._heard = heard
        self._closed = closed
        self._is_paused = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(OUTPUT_BYTES_MAX)
        self.host = str((transport.get_extra_info("peername") or ("",))[0])
        self.link = self._master.on_connected(self.host, self._now_ms())
        if self.link is None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.link is not None:
            self._master.on_closed(self.link)
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.link is not None:
            self._master.on_data(self.link, data, self._now_ms())
            self._heard(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: a slow slave holds up itself."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_paused = False
        self.pump()

    def pump(self) -> None:
        """Sends further blocks of the log, as far as there is room."""
        transport, link = self._transport, self.link
        while link is not None and transport is not None and not self._is_paused:
            parts = self._master.next_block(link, self._now_ms())
            if not parts:
                return
            transport.writelines(parts)

    def abort(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.abort()


class MasterLink(asyncio.Protocol):
    """A slave's connection to its master.

    Args:
        received: called after bytes of the master.
        closed: called at the end, with its reason.
    """

    def __init__(
        self,
        slave: Slave,
        now_ms: Callable[[], int],
        received: Callable[[], None],
        closed: Callable[[MasterLink, str], None],
    ) -> None:
        self._slave = slave
        self._now_ms = now_ms
        self._received = received
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._reason = "the master closed the connection"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._slave.on_connected(self._now_ms()))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if exc is not None:
            self._reason = str(exc)
        self._closed(self, self._reason)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._slave.on_data(data, self._now_ms())
        except (BrokerError, OSError) as error:
            self.end(str(error))
            return
        self._received()

    def report(self) -> None:
        """Sends the report that is due."""
        data = self._slave.report(self._now_ms())
        if data is not None and self._transport is not None:
            self._transport.write(data)

    def hold(self, *, is_held: bool) -> None:
        """Stops reading, or goes on."""
        if self._transport is not None and not self._transport.is_closing():
            if is_held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def end(self, reason: str) -> None:
        """Ends the connection."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()
