"""A real node's storage: opened, with its threads tied to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.kernels.flusher import (
    SYNC_DSYNC,
    SYNC_FDATASYNC,
    SYNC_FSYNC,
    SYNC_NONE,
    Flusher,
)
from convoymq.kernels.sockets import trim_malloc
from convoymq.storage.files import RealDirectory
from convoymq.storage.store import Storage
from convoymq.storage.threads import DiskPace, ThreadWorker

if TYPE_CHECKING:
    from convoymq.model.config import RaftConfig
    from convoymq.node.data_directory import DataDirectory


class StorageShell:
    """The threads of storage, tied to the loop: the WAL's flusher by its descriptor, the worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        method: str,
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


def open_storage(
    loop: asyncio.AbstractEventLoop,
    raft: RaftConfig,
    data: DataDirectory,
    on_answer: Callable[[], None],
    log: structlog.stdlib.BoundLogger,
) -> tuple[StorageShell, Storage]:
    """Returns the recovered storage of a node and its threads; damages and repairs are logged."""
    shell = StorageShell(loop, raft.wal_sync_method, on_answer, inline=raft.wal_inline_flush)
    storage = Storage(RealDirectory(data.path / "log"), shell.flusher, shell.worker, raft)
    wal = storage.wal
    storage.pace = DiskPace(
        shell.worker,
        logged=lambda: wal.bytes_written,
        pressed=lambda: storage.wal_files_waiting > 1,
    )
    storage.set_identity(data.cluster, data.identity.former)
    storage.may_pack = data.takes_packs
    report = storage.recover()
    storage.give_back = trim_malloc
    for damage in report.damages:
        log.error("storage.damaged", file=damage.file, offset=damage.offset,
                  group=damage.group, reason=damage.reason)  # fmt: skip
    for note in report.notes:
        log.warning("storage.repaired", note=note)
    if report.torn_tail is not None:
        log.info("storage.torn_tail", file=report.torn_tail[0], offset=report.torn_tail[1])
    log.info("storage.recovered", groups=report.groups, entries=report.entries)
    return shell, storage


_SYNC_METHODS = {
    "datasync": SYNC_FDATASYNC,
    "sync": SYNC_FSYNC,
    "o_sync": SYNC_DSYNC,
    "none": SYNC_NONE,
}
