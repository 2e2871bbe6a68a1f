"""The client for programs without an event loop. It tries again what has no answer."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.client.client import RocketClient

T = TypeVar("T")

RETRY_S = 0.1


class Blocking:
    """A `RocketClient` on a loop of its own; threads call it one after the other.

    Args:
        tls: of all connections; None: none.
        timeout_s: a call is tried again for so long.
    """

    def __init__(
        self, name_servers: str, group: str, account: tuple[str, str] | None = None, *,
        tls: ssl.SSLContext | None = None, timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        self.client = RocketClient(name_servers, group, account, tls)
        self.timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._lock = threading.Lock()

    def call(
        self, work: Callable[[RocketClient], Awaitable[T]], *, timeout_s: float | None = None
    ) -> T:
        """Returns the outcome of `work`, which is tried again while something does not answer: a
        master that goes away is replaced within seconds.

        Raises:
            Unavailable: nothing answered in time.
        """
        due_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            return self._runner.run(self._tried(work, due_s))

    async def _tried(self, work: Callable[[RocketClient], Awaitable[T]], due_s: float) -> T:
        while True:
            try:
                return await work(self.client)
            except Unavailable:
                if time.monotonic() >= due_s:
                    raise
                await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._runner.run(self.client.stop())
            self._runner.close()
