"""The threads of a real node's storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from convoymq.kernels.flusher import (
    SYNC_DSYNC,
    SYNC_FDATASYNC,
    SYNC_FSYNC,
    SYNC_NONE,
    Flusher,
)
from convoymq.storage.threads import ThreadWorker
from convoymq.storage.types import SyncMethod


class StorageShell:
    """The threads of storage, tied to the loop: the WAL's flusher by its descriptor, the worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        method: SyncMethod,
        on_answer: Callable[[], None],
        *,
        inline: bool,
    ) -> None:
        self._loop = loop
        self._on_answer = on_answer
        self.flusher = Flusher(_SYNC_METHODS[method], inline)
        self.worker = ThreadWorker(self._post)
        loop.add_reader(self.flusher.fileno(), self._readable)

    def _readable(self) -> None:
        self.flusher.on_readable()
        self._on_answer()

    def _post(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._run, call)

    def _run(self, call: Callable[[], None]) -> None:
        call()
        self._on_answer()

    def close(self) -> None:
        """Ends the threads."""
        self._loop.remove_reader(self.flusher.fileno())
        self.flusher.close()
        self.worker.close()


_SYNC_METHODS = {
    SyncMethod.FDATASYNC: SYNC_FDATASYNC,
    SyncMethod.FSYNC: SYNC_FSYNC,
    SyncMethod.O_DSYNC: SYNC_DSYNC,
    SyncMethod.NONE: SYNC_NONE,
}
