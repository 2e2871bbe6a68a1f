"""Values of settings: one check for policies (JSON), one for arguments (fields of AMQP tables)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from convoymq.model.durations import duration_ms
from convoymq.model.tables import INTEGER_CODES, Field, Table

Setting: TypeAlias = bool | int | str | tuple[str, ...]
"""The value of a setting."""
Check = Callable[[Field, Table], "str | None"]
"""Returns the reason to refuse an argument, as an Erlang term, or None."""

COUNT_MAX = (1 << 63) - 1


def unacceptable(field: Field) -> str:
    """Returns the reason to refuse an argument of another type."""
    return f"{{unacceptable_type,{field.type_name}}}"


class Values:
    """Values that a setting may have; these are any."""

    range_text = ""
    """Range that the refusal of a policy names."""

    def accepts(self, value: object) -> bool:
        """Returns whether a policy may have a value."""
        return True

    def refusal(self, field: Field, arguments: Table) -> str | None:
        """See `Check`."""
        return None

    def number(self, value: object) -> int | None:
        """Returns a value as machines have it; None for one of another type."""
        return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Integers(Values):
    """Whole numbers, from 0 or 1 for arguments."""

    low: int = 0
    high: int = COUNT_MAX
    above: str = "value_too_large"
    """Reason for an argument above `high`."""
    range_text: str = ""

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def refusal(self, field: Field, arguments: Table) -> str | None:
        number = field.value
        if field.code not in INTEGER_CODES or not isinstance(number, int):
            return f'"expected integer, got {field.type_name}"'
        if number < 0:
            return f"{{value_negative,{number}}}"
        if number < self.low:
            return f"{{value_zero,{number}}}"
        return f"{{{self.above},{number}}}" if number > self.high else None


class Version(Integers):
    """Version of the files of classic queues: RabbitMQ has one left."""

    ONLY = 2

    def accepts(self, value: object) -> bool:
        return type(value) is int and value == self.ONLY

    def refusal(self, field: Field, arguments: Table) -> str | None:
        reason = Integers.refusal(self, field, arguments)
        if reason is None and field.value != self.ONLY:
            return f"\"unsupported queue version '{field.term()}'\""
        return reason


class Boolean(Values):
    """True or false."""

    def refusal(self, field: Field, arguments: Table) -> str | None:
        return None if field.code == "t" else unacceptable(field)


class Text(Values):
    """Any text."""

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def refusal(self, field: Field, arguments: Table) -> str | None:
        return None if field.code == "S" else unacceptable(field)


class Name(Text):
    """A text that is not empty."""

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and bool(value)


class DeadLetterKey(Text):
    """A routing key, which needs an exchange beside it."""

    def refusal(self, field: Field, arguments: Table) -> str | None:
        if field.code == "S" and "x-dead-letter-exchange" not in arguments:
            return "routing_key_but_no_dlx_defined"
        return Text.refusal(self, field, arguments)


class Words(Text):
    """One of some words; machines have its place among them.

    Args:
        reason: reason for an argument with another word.
    """

    def __init__(self, reason: str, *words: str) -> None:
        self._reason = reason
        self._places = {word: place for place, word in enumerate(words)}

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and value in self._places

    def refusal(self, field: Field, arguments: Table) -> str | None:
        if field.code != "S":
            return unacceptable(field)
        return None if field.term() in self._places else self._reason

    def number(self, value: object) -> int | None:
        return self._places.get(value) if isinstance(value, str) else None


class Ages(Text):
    """Durations as text, such as `7D`; machines have them in ms."""

    def accepts(self, value: object) -> bool:
        return self.number(value) is not None

    def refusal(self, field: Field, arguments: Table) -> str | None:
        if field.code != "S":
            return unacceptable(field)
        return None if self.accepts(field.term()) else "invalid_max_age"

    def number(self, value: object) -> int | None:
        return duration_ms(value) if isinstance(value, str) else None
