"""Heartbeats of one connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.codec import HEARTBEAT

if TYPE_CHECKING:
    from convoymq.edges.amqp091.connection import Connection

log = structlog.get_logger()


class Heartbeats:
    """Sends heartbeats, and notices a peer that sends nothing for two intervals."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._silent_ticks = 0
        self._seen_received = 0
        self._seen_sent = 0

    def start(self, interval_s: int) -> None:
        """Begins when the interval is agreed."""
        self._connection.later(interval_s / 2, self._first_beat)

    def _first_beat(self) -> None:
        """A heartbeat comes after the first half interval even when open-ok has just been sent."""
        self._seen_sent = self._connection.buffer.sent
        self._beat()

    def _beat(self) -> None:
        """Every half interval: send something when nothing was sent, and notice a silent peer."""
        connection = self._connection
        if connection.is_down:
            return
        buffer = connection.buffer
        output = buffer.sent + buffer.output_bytes
        if output == self._seen_sent and not buffer.output_bytes:
            buffer.send_frame(spec.FRAME_HEARTBEAT, 0, b"")
            # It counts as nothing sent: an idle connection has one every time.
            output += len(HEARTBEAT)
        self._seen_sent = output
        if buffer.received != self._seen_received or connection.is_paused:
            self._silent_ticks = 0
        else:
            self._silent_ticks += 1
        self._seen_received = buffer.received
        if self._silent_ticks >= 4:
            log.warning(
                "amqp.heartbeat_missed",
                connection=connection.name,
                timeout_s=connection.heartbeat_s,
            )
            connection.tear_down()
            return
        connection.later(connection.heartbeat_s / 2, self._beat)
