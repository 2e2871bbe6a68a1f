"""Section of the configuration of the line protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig(Section):
    """The line protocol."""

    NAME: ClassVar[str] = "lines"

    line_max: int = key(
        "lines.line_max",
        4096,
        "Longest line of a client.",
        parse=parse_bytes,
        unit="bytes",
        low=16,
        high=1 << 20,
    )


SECTION = LineConfig
