"""Configuration files of RocketMQ's roles: `key=value`, under RocketMQ's names.

A key that RocketMQ has and this broker has no use for (sizes of its thread pools, say) is passed
over and named in the log, so that a file that exists can be used as it is. A key that neither has
is refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from convoymq.model.config.keys import Key, Section
from convoymq.model.config.loading import FILE_SIZE_MAX, ConfigError, parse_text, value_of
from convoymq.model.near_names import hint

S = TypeVar("S", bound=Section)


def keys_of(kind: type[Section]) -> dict[str, tuple[str, Key]]:
    """Returns the keys of a section by name, with the fields that they set."""
    return {
        name: (field.name, field.metadata["key"])
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if "key" in field.metadata
        for name in field.metadata["key"].names
    }


def text_of(value: object) -> str:
    """Returns a value as a configuration file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def pairs_of(sections: Iterable[Section], *, shown: bool) -> list[tuple[str, str, str]]:
    """Returns (key, value, place) of sections, each key once.

    Args:
        shown: somebody reads them: secrets are left out.
    """
    found = {
        name: text_of(getattr(section, field.name))
        for section in sections
        for field in dataclasses.fields(section)  # type: ignore[arg-type]
        if "key" in field.metadata and (field.repr or not shown)
        for name in field.metadata["key"].names
    }
    return [(name, value, "settings") for name, value in found.items()]


def build(
    kind: type[S], pairs: Iterable[tuple[str, str, str]], unserved: Iterable[str]
) -> tuple[S, list[str]]:
    """Returns a section of (key, value, place), and the keys that were passed over.

    Args:
        unserved: keys of RocketMQ that have no meaning here.

    Raises:
        ConfigError: the text names key and place.
    """
    known = keys_of(kind)
    unserved = set(unserved)
    values: dict[str, object] = {}
    passed_over = []
    for name, text, where in pairs:
        if name in known:
            field, key = known[name]
            values[field] = value_of(key, name, text, where)
        elif name in unserved:
            passed_over.append(name)
        else:
            raise ConfigError(f"{where}: unknown key {name}{hint(name, (*known, *unserved))}")
    section = kind(**values)
    try:
        section.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return section, passed_over


def build_all(
    kinds: Sequence[type[Section]],
    pairs: Iterable[tuple[str, str, str]],
    unserved: Iterable[str],
) -> tuple[dict[type[Section], Section], list[str]]:
    """Returns a section of each kind, out of one list of keys; a key goes to all that have it.
    Else as `build`."""
    pairs = list(pairs)
    names = {kind: keys_of(kind).keys() for kind in kinds}
    known = set().union(*names.values())
    rest = [pair for pair in pairs if pair[0] not in known]
    first, *others = kinds
    sections: dict[type[Section], Section] = {
        kind: build(kind, [pair for pair in pairs if pair[0] in names[kind]], ())[0]
        for kind in others
    }
    own = [pair for pair in pairs if pair[0] in names[first]]
    section, passed_over = build(first, own + rest, unserved)
    return {first: section, **sections}, passed_over


def load(
    kind: type[S], path: str | Path | None, flags: Iterable[str], unserved: Iterable[str]
) -> tuple[S, list[str]]:
    """Returns a section: defaults < file < `key=value` flags; and the keys that were passed over.

    Raises:
        ConfigError: as `build`, or the file cannot be read.
    """
    return build(kind, read_pairs(path, flags), unserved)


def read_pairs(path: str | Path | None, flags: Iterable[str]) -> list[tuple[str, str, str]]:
    """Returns (key, value, place) of a file, then of flags. Raises ConfigError."""
    pairs: list[tuple[str, str, str]] = []
    if path is not None:
        file = Path(path)
        try:
            if file.stat().st_size > FILE_SIZE_MAX:
                raise ConfigError(f"{file}: larger than {FILE_SIZE_MAX} bytes")
            pairs += parse_text(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
    for flag in flags:
        pairs += parse_text(flag, "flag")
    return pairs
