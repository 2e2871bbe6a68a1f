"""Keys and values by namespace, which a name server keeps in a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from convoymq.model.errors import StorageFault
from convoymq.model.replaced_files import replace_file
from convoymq.rocketmq.remoting import json

ORDER_TOPICS = "ORDER_TOPIC_CONFIG"


class _Stored(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)


class KeyValueStore:
    """See the module text. Every change is in the file when a call returns.

    Raises:
        StorageFault: the file is there and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        try:
            content = path.read_bytes() if path.exists() else b""
            if content:
                self._table = json.loads(content, _Stored).config_table
        except Exception as error:
            raise StorageFault(f"{path}: cannot be read: {error}") from error

    def get(self, namespace: str, name: str) -> str | None:
        """Returns a value."""
        return self._table.get(namespace, {}).get(name)

    def list(self, namespace: str) -> dict[str, str] | None:
        """Returns all of a namespace."""
        return self._table.get(namespace)

    def put(self, namespace: str, name: str, value: str) -> None:
        """Enters a value. Raises StorageFault."""
        self._table.setdefault(namespace, {})[name] = value
        self._write()

    def delete(self, namespace: str, name: str) -> None:
        """Takes a value away. Raises StorageFault."""
        values = self._table.get(namespace)
        if values is not None and values.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(_Stored(self._table)))
        except OSError as error:
            raise StorageFault(f"{self._path}: cannot be written: {error}") from error
