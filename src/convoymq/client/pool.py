"""One client per process and configuration, for code that is called over and over (Spark tasks)."""

from __future__ import annotations

import os
import threading

from convoymq.client.client import Client
from convoymq.client.config import ClientConfig

_lock = threading.Lock()
_clients: dict[tuple[int, ClientConfig], Client] = {}


def client(config: ClientConfig) -> Client:
    """Returns this process's client for the configuration; a fork gets its own."""
    pid = os.getpid()
    with _lock:
        found = _clients.get((pid, config))
        if found is None:
            for key in [key for key in _clients if key[0] != pid]:
                # The parent's: its socket is not ours to speak on.
                _clients.pop(key).abandon()
            found = _clients[pid, config] = Client(config)
        return found


def _after_fork() -> None:
    # A thread of the parent may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
