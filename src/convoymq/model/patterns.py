"""Regular expressions that users hand in: permissions, filters of lists, health checks.

They are matched by RE2 (docs/adr/0028-linear-expressions-and-bounded-bodies.md), in time linear in
expression and text, so none of them can hold a node up. What would need backtracking is not
served: look-ahead and look-behind, back references, atomic groups and possessive repetition.
`\\d`, `\\w`, `\\s` and `\\b` mean ASCII; `$` is the end of the text only.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Protocol

from convoymq.model.errors import PreconditionFailed

if TYPE_CHECKING:
    import re2

LENGTH_MAX = 4096
"""Characters of an expression."""
PROGRAM_BYTES_MAX = 256 << 10
"""Most bytes of a compiled expression; it bounds the time of a match too: 4 ms for 255 bytes."""
CACHED_MAX = 1024


class Pattern(Protocol):
    """A compiled expression."""

    def search(self, text: str) -> bool:
        """Returns whether the expression matches somewhere in `text`."""


class _Always:
    def search(self, text: str) -> bool:
        return True


class _Empty:
    def search(self, text: str) -> bool:
        return not text


#: What nearly all permissions are; a node that knows no others does not load the engine.
_SIMPLE: dict[str, Pattern] = {".*": _Always(), "^.*$": _Always(), "^$": _Empty()}


class _Expression:
    __slots__ = ("_compiled",)

    def __init__(self, compiled: re2._Regexp) -> None:
        self._compiled = compiled

    def search(self, text: str) -> bool:
        data = text.encode("utf-8", "replace")
        return self._compiled.search(data) is not None


def compile_pattern(text: str, *, ignore_case: bool = False) -> Pattern:
    """Returns the compiled expression.

    Raises:
        PreconditionFailed: it is malformed, too large, or of a kind that is not served.
    """
    if len(text) > LENGTH_MAX:
        raise PreconditionFailed(
            f"pattern of {len(text)} characters, at most {LENGTH_MAX} are allowed"
        )
    return _compiled(text, ignore_case)


def escaped(text: str) -> str:
    """Returns an expression that matches `text` itself."""
    return "".join(each if each.isalnum() or each == "_" else _quoted(each) for each in text)


def _quoted(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


@lru_cache(maxsize=CACHED_MAX)
def _compiled(text: str, ignore_case: bool) -> Pattern:
    simple = _SIMPLE.get(text)
    if simple is not None:
        return simple
    import re2

    try:
        return _Expression(re2.compile(text.encode(), _options(ignore_case)))
    except UnicodeEncodeError:
        raise PreconditionFailed("not Unicode text") from None
    except re2.error as error:
        raise PreconditionFailed(_reason(error)) from None


@cache
def _options(ignore_case: bool) -> re2.Options:
    import re2

    options = re2.Options()
    options.case_sensitive = not ignore_case
    options.max_mem = PROGRAM_BYTES_MAX
    options.log_errors = False
    return options


def _reason(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
