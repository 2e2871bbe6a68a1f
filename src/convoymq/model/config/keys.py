"""One key: its names, how its text becomes a value, bounds and meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from convoymq.model.config.values import (
    Listener,
    parse_address,
    parse_addresses,
    parse_bool,
    parse_bytes,
    parse_float,
    parse_int,
    parse_listener,
    parse_optional_int,
    parse_processes,
    parse_words,
)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    names: tuple[str, ...]
    parse: Callable[[str], object]
    type_name: str
    unit: str
    low: float | None
    high: float | None
    doc: str
    choices: tuple[str, ...]
    collects: str
    named: bool
    """True if its value has the names behind `collects` too: pairs of name and value."""

    @property
    def name(self) -> str:
        """Returns the first of its names."""
        return self.names[0]


class Section:
    """A part of the configuration: a frozen dataclass, some of whose fields have keys."""

    __slots__ = ()

    NAME: ClassVar[str]
    """Name in lists of the configuration; for sections of edges."""

    def listeners(self) -> tuple[Listener, ...]:
        """Returns what the section has the node listen for, without addresses too."""
        return ()

    def check(self) -> None:
        """Raises ValueError for a combination that no single key can judge."""


_BY_TYPE: dict[type, Callable[[str], object]] = {
    str: str,
    bool: parse_bool,
    int: parse_int,
    float: parse_float,
}
_LABELS: dict[Callable[[str], object], str] = {
    str: "text",
    parse_int: "number",
    parse_float: "number",
    parse_bool: "true or false",
    parse_bytes: "size",
    parse_optional_int: "number or none",
    parse_listener: "port, address or none",
    parse_addresses: "addresses",
    parse_address: "address",
    parse_words: "words",
    parse_processes: "number or auto",
}


def key(
    names: str,
    default: object,
    doc: str,
    *,
    parse: Callable[[str], object] | None = None,
    type_name: str = "",
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    collects: str = "",
    named: bool = False,
    secret: bool = False,
) -> Any:
    """Returns a field of a section, with its key in the metadata.

    Args:
        parse: what makes its value of text; None: the type of `default` says it.
    """
    parse = parse or _BY_TYPE[type(default)]
    unit = unit or ("bytes" if parse is parse_bytes else "")
    type_name = type_name or _LABELS[parse]
    doc = " ".join(doc.split())
    key = Key(
        tuple(names.split()), parse, type_name, unit, low, high, doc, choices, collects, named
    )
    return field(default=default, repr=not secret, metadata={"key": key})


def number_text(value: float | None) -> str:
    """Returns a bound as the reference shows it."""
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)
