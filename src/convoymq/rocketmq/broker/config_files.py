"""RocketMQ's files of tables: JSON under `config/`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from convoymq.model.errors import StorageFault, SyntaxFault
from convoymq.model.replaced_files import replace_file
from convoymq.rocketmq.remoting import json

T = TypeVar("T")

log = structlog.get_logger()


class ConfigFile:
    """One file. Its writers call `write` or `write_soon` when they changed something."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: Callable[[], object] | None = None

    def read(self, kind: type[T]) -> T | None:
        """Returns what the file holds, or what the copy `.bak` that RocketMQ leaves beside it holds
        where the file is missing or empty. Raises StorageFault."""
        for path in (self.path, self.path.with_name(self.path.name + ".bak")):
            try:
                content = path.read_bytes() if path.exists() else b""
                if content.strip():
                    return json.loads(content, kind)
            except (OSError, SyntaxFault) as error:
                raise StorageFault(f"{path}: cannot be read: {error}") from error
        return None

    def write(self, value: object) -> None:
        """Replaces the file. Raises StorageFault."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(value))
        except OSError as error:
            raise StorageFault(f"{self.path}: cannot be written: {error}") from error

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
