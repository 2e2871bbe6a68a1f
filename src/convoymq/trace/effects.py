"""Effects of sinks and changes of sources, for the audit of a topic (checks A13 and A15).

A sink writes what it did with each message, a source what it published. Lines of JSON, in files of
one process each: `effects-*.jsonl` and `source-*.jsonl`, below one of the audit's directories.

| file    | fields                                                                              |
|---------|-------------------------------------------------------------------------------------|
| effects | topic, group, key, token (header x-order-token), applied, value, time_us            |
| source  | topic, key, value, time_us                                                          |

`value` is what the key has then, or a hash of it: any text that both sides compute alike.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType

EFFECTS_PATTERN = "effects-*.jsonl"
SOURCE_PATTERN = "source-*.jsonl"


class _Lines:
    """One file; its times rise."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._latest_us = 0

    def _write(self, fields: dict[str, object]) -> None:
        self._latest_us = max(time.time_ns() // 1000, self._latest_us + 1)
        self._file.write(json.dumps({**fields, "time_us": self._latest_us}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class EffectLog(_Lines):
    """Lines about what a sink does with the messages of a group. `name` is one of this process."""

    def __init__(self, directory: Path | str, name: str, topic: str, group: str) -> None:
        super().__init__(Path(directory) / f"effects-{name}.jsonl")
        self._origin = {"topic": topic, "group": group}

    def __enter__(self) -> EffectLog:
        return self

    def applied(self, key: str, token: str, value: str = "") -> None:
        """The effect of a message is in force; its key has this value now."""
        self._write({**self._origin, "key": key, "token": token, "applied": True, "value": value})

    def ignored(self, key: str, token: str) -> None:
        """A message was known already."""
        self._write({**self._origin, "key": key, "token": token, "applied": False, "value": ""})


class SourceLog(_Lines):
    """Lines about what a source publishes. `name` is one of this process."""

    def __init__(self, directory: Path | str, name: str, topic: str) -> None:
        super().__init__(Path(directory) / f"source-{name}.jsonl")
        self._topic = topic

    def __enter__(self) -> SourceLog:
        return self

    def changed(self, key: str, value: str) -> None:
        """A key has this value now."""
        self._write({"topic": self._topic, "key": key, "value": value})
