"""Reports the state of this node to systemd, for units with `Type=notify` and a watchdog, or to the
supervisor of its machine.

Source: sd_notify(3), sd_watchdog_enabled(3). Without `NOTIFY_SOCKET` nothing is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping

import structlog

READY = "READY=1"
BEAT_S = 1.0
"""Time between two signs of life to a supervisor."""

_LOG = structlog.get_logger()


class ServiceManager:
    """The notification socket of a service manager.

    Args:
        environment: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` are taken out of it, so
            that processes that this one starts do not report in its name.
        channel: of a supervisor, in place of that socket.
    """

    def __init__(
        self,
        environment: MutableMapping[str, str] = os.environ,
        channel: socket.socket | None = None,
    ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        every_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        # A leading @ is systemd's way to write the null byte of an abstract address.
        self._channel = channel
        self._address = "\0" + address[1:] if address.startswith("@") else address
        wanted = every_us.isdigit() and pid == str(os.getpid())
        self.watchdog_s = int(every_us) / 1e6 if wanted else 0.0
        """Time after which the service manager takes a silent node for hung; 0 = never."""
        self._beat_s = BEAT_S if channel is not None else self.watchdog_s / 3
        self._next_s = 0.0

    def ready(self, status: str = "Clients are served") -> None:
        """Reports that clients are served."""
        self._send(f"{READY}\nSTATUS={status}")

    def starting(self, phase: str) -> None:
        """Reports a phase of the start for people."""
        self._send(f"STATUS={phase}")

    def stopping(self) -> None:
        """Reports the orderly end."""
        self._send("STOPPING=1\nSTATUS=Leaderships move to other nodes")

    def beat(self) -> None:
        """Feeds the watchdog when a third of its time is over.

        Called by the ticks of the event loop: a loop that hangs does not feed it.
        """
        if self._beat_s and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._beat_s
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        try:
            if self._channel is not None:
                self._channel.send(text.encode())
            if not self._address:
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(text.encode(), self._address)
        except OSError as error:
            _LOG.warning("node.not_notified", reason=str(error))
