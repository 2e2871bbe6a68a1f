"""Outputs of commands that succeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from convoymq.model.json import JsonObject


@dataclass(frozen=True, slots=True)
class Rows:
    """A list."""

    columns: Sequence[str]
    rows: Sequence[JsonObject]
    nulls: bool = False
    """In JSON, what is not there is null; RabbitMQ's tools print ""."""
    document: JsonObject | None = None
    """Printed as JSON instead of the list."""


@dataclass(frozen=True, slots=True)
class Text:
    """Lines; `document` is what JSON has instead of `{"message": text}`."""

    text: str
    document: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that is printed as it is, whatever the formatter."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A remark at the end, left out with `--quiet` and in JSON."""

    text: str


Output: TypeAlias = Rows | Text | Raw | Note | None
