"""RocketMQ's files of tables: JSON under `config/`, and other files that are replaced as a
whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from convoymq.model.errors import StorageFault, SyntaxFault
from convoymq.rocketmq.remoting import json
from convoymq.storage.types import Directory

T = TypeVar("T")

log = structlog.get_logger()


class ConfigFile:
    """One file. Its writers call `write` or `write_soon` when they changed something."""

    def __init__(self, directory: Directory, name: str) -> None:
        self.name = name
        self._directory = directory
        self._parent = name.rpartition("/")[0]
        self._content: Callable[[], object] | None = None

    def read(self, kind: type[T]) -> T | None:
        """Returns what the file holds, or what the copy `.bak` that RocketMQ leaves beside it holds
        where the file is missing or empty. Raises StorageFault."""
        for name in (self.name, self.name + ".bak"):
            try:
                content = self._content_of(name)
                if content.strip():
                    return json.loads(content, kind)
            except (OSError, SyntaxFault) as error:
                raise StorageFault(f"{name}: cannot be read: {error}") from error
        return None

    def read_bytes(self) -> bytes:
        """Returns what the file holds; nothing where it is missing. Raises OSError."""
        return self._content_of(self.name)

    def _content_of(self, name: str) -> bytes:
        if not self._directory.exists(name):
            return b""
        file = self._directory.open(name)
        return file.pread(file.size(), 0)

    def write(self, value: object) -> None:
        """Replaces the file. Raises StorageFault."""
        try:
            self.write_bytes(json.dumps(value))
        except OSError as error:
            raise StorageFault(f"{self.name}: cannot be written: {error}") from error

    def write_bytes(self, content: bytes) -> None:
        """Replaces the file: after a crash it is the old or the new one, and the new one once this
        returns. Raises OSError."""
        directory, fresh = self._directory, self.name + ".new"
        directory.make(self._parent)
        file = directory.open(fresh, create=True)
        file.truncate(0)
        file.pwrite([content], 0)
        file.sync()
        directory.rename(fresh, self.name)
        directory.sync(self._parent)

    def write_soon(self, content: Callable[[], object]) -> None:
        """Replaces the file at the end of this turn of the event loop, once for all changes of the
        turn. A failure is logged, and the next `flush` tries again."""
        if self._content is None:
            asyncio.get_running_loop().call_soon(self.flush)
        self._content = content

    def flush(self) -> None:
        """Writes what waits."""
        if self._content is None:
            return
        try:
            self.write(self._content())
            self._content = None
        except StorageFault as error:
            log.error("rocketmq.not_persisted", reason=error.text)
