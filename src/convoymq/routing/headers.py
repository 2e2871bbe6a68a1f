"""The headers exchange: bindings that compare a message's headers with their own arguments.

    x-match      needs                 keys that start with `x-`
    all          every pair (default)  skipped
    any          one pair              skipped
    all-with-x   every pair            compared, but for x-match
    any-with-x   one pair              compared, but for x-match

A void argument asks only that the key is there. Without pairs, `all` matches everything and
`any` nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.refusals import invalid_match_type, invalid_match_value
from convoymq.model.tables import Field, Table, erlang_term

MATCH_ARGUMENT = "x-match"
_MODES = {b"all", b"any", b"all-with-x", b"any-with-x"}


def check_match_arguments(arguments: Table) -> None:
    """Refuses binding arguments with a wrong `x-match`.

    Raises:
        PreconditionFailed: it is unknown or not a string.
    """
    field = arguments.get(MATCH_ARGUMENT)
    if field is None:
        return
    if field.code != "S":
        raise invalid_match_type(field.type_name, erlang_term(field))
    if field.value not in _MODES:
        raise invalid_match_value(erlang_term(field))


@dataclass(frozen=True, slots=True)
class HeadersPattern:
    """The arguments of one binding, prepared for comparing."""

    needs_all: bool
    pairs: tuple[tuple[str, Field], ...]

    @classmethod
    def of(cls, arguments: Table) -> HeadersPattern:
        """Prepare arguments. A mode that `check_match_arguments` refuses matches nothing."""
        field = arguments.get(MATCH_ARGUMENT)
        mode = field.term() if field is not None else "all"
        if mode.encode() not in _MODES:
            return cls(False, ())
        with_x = mode.endswith("-with-x")
        pairs = tuple(
            (key, wanted)
            for key, wanted in arguments.items()
            if key != MATCH_ARGUMENT and (with_x or not key.startswith("x-"))
        )
        return cls(mode.startswith("all"), pairs)

    def matches(self, headers: Table) -> bool:
        """Returns whether a message with these headers takes this way."""
        found = (_is_met(wanted, headers.get(key)) for key, wanted in self.pairs)
        return all(found) if self.needs_all else any(found)


def _is_met(wanted: Field, given: Field | None) -> bool:
    return given is not None and (wanted.value is None or wanted.same_content(given))
