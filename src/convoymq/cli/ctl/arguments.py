"""Command lines as RabbitMQ's tools take them: switches may stand anywhere, and all that
is wrong is reported together; `argparse` ends at the first wrong value (ADR 0194)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from convoymq.cli.ctl.failures import Misused

Values = dict[str, "str | int | float | bool"]


@dataclass(frozen=True, slots=True)
class Switch:
    """An option. Without `parse` it is a flag."""

    name: str
    parse: Callable[[str], str | int | float] | None = None
    short: str = ""
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Returns its name in `Parsed.values`."""
        return self.name.replace("-", "_")

    @property
    def usage(self) -> str:
        """Returns its form in usage texts."""
        return f"[--{self.name}]" if self.parse is None else f"[--{self.name} <{self.name}>]"


FORMATTERS = ("table", "pretty_table", "json", "csv")

COMMON = (
    Switch("node", str, "n"),
    Switch("quiet", short="q"),
    Switch("silent", short="s"),
    Switch("formatter", str, choices=FORMATTERS),
    # What `convoy` calls it everywhere else.
    Switch("format", str, choices=FORMATTERS),
    Switch("no-table-headers"),
    Switch("timeout", int, "t"),
    Switch("data", str),
    Switch("url", str),
    Switch("user", str),
    Switch("script-name", str),
    Switch("help", short="h"),
    Switch("version", short="V"),
)
"""Switches of every command."""
VHOST = Switch("vhost", str, "p")


@dataclass(slots=True)
class Parsed:
    """A command line taken apart. Switches that the command does not have are in `unknown`."""

    words: list[str] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    unknown: list[tuple[str, str]] = field(default_factory=list)


def parse(arguments: Sequence[str], switches: Iterable[Switch]) -> Parsed:
    """Takes a command line apart; `--` ends the switches."""
    by_name = {f"--{each.name}": each for each in switches}
    by_name |= {f"-{each.short}": each for each in by_name.values() if each.short}
    made = Parsed()
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            made.words += left
            break
        if not word.startswith("-") or word == "-" or _is_number(word):
            made.words.append(word)
            continue
        name, equals, given = word.partition("=")
        switch = by_name.get(name)
        if switch is None:
            made.unknown.append((name, given))
        elif switch.parse is None:
            made.values[switch.key] = True
        elif not equals and not left:
            made.unknown.append((name, ""))
        else:
            text = given if equals else left.pop(0)
            try:
                value = switch.parse(text)
            except ValueError:
                made.unknown.append((name, text))
                continue
            if switch.choices and value not in switch.choices:
                made.unknown.append((name, text))
            made.values[switch.key] = value
    return made


_NOT_SHOWN = (
    # A launcher adds it.
    (re.compile(r"--script-name[ =]\S+ ?"), ""),
    (re.compile(r"(--user[ =][^\s:]*):\S*"), r"\1:…"),
    (re.compile(r"(://[^\s:/@]*):\S*@"), r"\1:…@"),
)


def shown(arguments: Sequence[str]) -> str:
    """Returns a command line for its user: without the passwords of log-ins."""
    text = " ".join(arguments)
    for pattern, instead in _NOT_SHOWN:
        text = pattern.sub(instead, text)
    return text


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdecimal()


def bind(names: Sequence[str], words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the arguments by name, and those of a last name that takes any number.

    `name` must be given, `name?` may be, `name*` takes all that are left. Raises Misused.
    """
    bound: dict[str, str] = {}
    left = list(words)
    for name in names:
        if name.endswith("*"):
            return bound, left
        if left:
            bound[name.removesuffix("?")] = left.pop(0)
        elif not name.endswith("?"):
            raise Misused("not enough arguments.")
    if left:
        raise Misused("too many arguments.")
    return bound, []


def usage_of(names: Sequence[str]) -> list[str]:
    """Returns the form of arguments in usage texts."""
    shown = []
    for name in names:
        plain = name.rstrip("?*")
        if name.endswith("*"):
            shown.append(f"[<{plain}>, ...]")
        else:
            shown.append(f"[<{plain}>]" if name.endswith("?") else f"<{plain}>")
    return shown
