"""Where a consumer begins: the argument `x-stream-offset`. Source: RabbitMQ's streams."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from convoymq.model.durations import duration_ms
from convoymq.model.tables import INTEGER_CODES, Field

_SECOND_MS = 1000


class Start(Enum):
    """Kinds of places to begin at."""

    FIRST = "first"
    LAST = "last"
    NEXT = "next"
    OFFSET = "offset"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class StartAt:
    """`value`: an offset, or a time in ms since the epoch; 0 for the named places."""

    kind: Start
    value: int = 0


def parse_start(field: Field | None, now_ms: int) -> StartAt | str:
    """What the argument says, or the reason to refuse it as an Erlang term. Without it: next."""
    if field is None:
        return StartAt(Start.NEXT)
    value = field.value
    if field.code == "T":
        assert isinstance(value, int)
        return StartAt(Start.TIMESTAMP, value * _SECOND_MS)
    if field.code in INTEGER_CODES:
        assert isinstance(value, int)
        return StartAt(Start.OFFSET, value) if value >= 0 else f"{{value_negative,{value}}}"
    if field.code != "S":
        return f"{{unacceptable_type,{field.type_name}}}"
    text = field.term()
    if text in ("first", "last", "next"):
        return StartAt(Start(text))
    age_ms = duration_ms(text)
    return "invalid_offset_arg" if age_ms is None else StartAt(Start.TIMESTAMP, now_ms - age_ms)
