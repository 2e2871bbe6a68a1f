"""One connection with many requests under way, driven by one thread.

Requests are sent at once; their answers come to callbacks inside of `poll`. When the connection is
lost every request that has no answer gets None, and the next `poll` connects to the next server.
Nothing is sent twice here: the caller knows what bears it.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
from collections.abc import Callable, Mapping

from convoymq.client import errors
from convoymq.client.config import ClientConfig
from convoymq.client.link import Link
from convoymq.model.columnar import Frame, Op

CONNECT_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 5.0
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 1.0

Done = Callable[[Frame | None], None]
"""Gets the answer, which may be an error's; None: the connection was lost before it came."""


class Pipeline:
    """See the module text. All but `wake` is for one thread.

    Attributes:
        refusal: why a server refused the login, if that is for good.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._addresses = config.addresses()
        self._at = random.randrange(len(self._addresses)) if config.spread else 0
        self._link: Link | None = None
        self._under_way: dict[int, Done] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._wake_lock = threading.Lock()
        self._failures = 0
        self._connect_at = 0.0
        self.refusal: errors.ClientError | None = None

    @property
    def is_connected(self) -> bool:
        """Returns whether a request can be sent."""
        return self._link is not None

    @property
    def under_way(self) -> int:
        """Returns how many requests have no answer yet."""
        return len(self._under_way)

    @property
    def frame_max(self) -> int:
        """Returns the bytes of the largest request that the server takes; 0 without one."""
        return 0 if self._link is None else self._link.frame_max

    def wake(self) -> None:
        """Ends a `poll` of another thread."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.write(self._wake, b"w")

    def send(
        self,
        op: Op,
        fields: Mapping[str, object],
        done: Done,
        payload: bytes | memoryview = b"",
    ) -> None:
        """Sends a request. Without a connection `done` gets None at once."""
        link = self._link
        if link is None:
            done(None)
            return
        try:
            number = link.post(op, fields, payload, time.monotonic() + SEND_TIMEOUT_S)
        except (OSError, errors.ClientError):
            self.drop()
            done(None)
            return
        self._under_way[number] = done

    def poll(self, timeout_s: float) -> None:
        """Connects if that is due, then takes answers until there are some, or `wake` is called, or
        the time is over."""
        now = time.monotonic()
        if self._link is None and now >= self._connect_at:
            self._connect(now)
        link = self._link
        if link is None:
            timeout_s = min(timeout_s, max(0.0, self._connect_at - time.monotonic()))
        waiting: list[int | Link] = [self._woken] if link is None else [self._woken, link]
        if link is not None and link.has_bytes:
            timeout_s = 0.0
        ready, _, _ = select.select(waiting, [], [], max(0.0, timeout_s))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if link is not None and (link in ready or link.has_bytes):
            self._take(link)

    def _take(self, link: Link) -> None:
        try:
            frames = link.take()
        except (OSError, errors.ClientError):
            self.drop()
            return
        for frame in frames:
            done = self._under_way.pop(frame.correlation, None)
            if done is not None:
                done(frame)

    def _connect(self, now: float) -> None:
        address = self._addresses[self._at]
        try:
            self._link = Link(self._config, address, now + CONNECT_TIMEOUT_S)
        except (errors.AccessRefused, errors.PreconditionFailed) as error:
            self.refusal = error
        except (OSError, errors.ClientError):
            self._put_off()
        else:
            self._failures = 0

    def _put_off(self) -> None:
        """The next try is at the next server; after each round it waits longer."""
        self._at = (self._at + 1) % len(self._addresses)
        self._failures += 1
        rounds = self._failures // len(self._addresses)
        pause = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(rounds, 10))
        self._connect_at = time.monotonic() + pause

    def drop(self) -> None:
        """Gives the connection up and turns to the next server."""
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        self._put_off()
        lost, self._under_way = self._under_way, {}
        for done in lost.values():
            done(None)

    def close(self) -> None:
        """Closes the connection for good."""
        self.drop()
        with self._wake_lock:
            os.close(self._woken)
            os.close(self._wake)
            self._wake = -1
