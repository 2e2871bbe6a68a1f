"""Start of a consumer: the argument `x-stream-offset`. Source: RabbitMQ's streams."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from convoymq.model.durations import duration_ms
from convoymq.model.tables import INTEGER_CODES, Field, erlang_term

_SECOND_MS = 1000
TIME_MS_MAX = (1 << 63) - 1
"""Latest time: a question to another node has 64 bits for it."""


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
    """Returns the start that the argument asks for, or the reason to refuse it as an Erlang term.
    Without it: next."""
    if field is None:
        return StartAt(Start.NEXT)
    value = field.value
    if field.code == "T":
        assert isinstance(value, int)
        return _at(value * _SECOND_MS)
    if field.code in INTEGER_CODES:
        assert isinstance(value, int)
        return StartAt(Start.OFFSET, value) if value >= 0 else _refusal(field)
    if field.code != "S":
        return _refusal(field)
    text = field.term()
    if text in ("first", "last", "next"):
        return StartAt(Start(text))
    age_ms = duration_ms(text)
    return _refusal(field) if age_ms is None else _at(now_ms - age_ms)


def _at(time_ms: int) -> StartAt:
    return StartAt(Start.TIMESTAMP, min(max(time_ms, 0), TIME_MS_MAX))


def _refusal(field: Field) -> str:
    return f"{{invalid_stream_offset_arg,{{{field.type_name},{erlang_term(field)}}}}}"
