"""RocketMQ's files of tables: JSON under `config/`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from convoymq.model.errors import StorageFault, SyntaxFault
from convoymq.model.replaced_files import replace_file
from convoymq.rocketmq.remoting import json

T = TypeVar("T")


class ConfigFile:
    """One file. Its writers call `write` when they changed something."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
