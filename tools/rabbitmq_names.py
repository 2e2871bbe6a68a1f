"""Writes docs/rabbitmq.md: every command, HTTP path and metric of RabbitMQ, and what is here.

rabbitmq_names.toml has RabbitMQ's names, and how those that differ do, or why others are absent.
Our own tables say what there is. A name without a place here and without a reason, and a reason for
an absence that has ended, are faults.

    .venv/bin/python -m tools.rabbitmq_names > docs/rabbitmq.md
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from convoymq.cli.ctl.tools import commands_of
from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.metric_families import CLUSTER
from convoymq.edges.http.metric_help import HELP

SOURCE = Path(__file__).with_suffix(".toml")
SAME, DIFFERS, ABSENT = "same", "differs", "absent"
IN_CELL = 8
"""Names in a row of names that are the same."""

TITLES = {
    "commands.ctl": "`rabbitmqctl` (`convoy ctl`)",
    "commands.diagnostics": "`rabbitmq-diagnostics` (`convoy diagnostics`)",
    "commands.queues": "`rabbitmq-queues` (`convoy queues`)",
    "commands.streams": "`rabbitmq-streams`",
    "commands.upgrade": "`rabbitmq-upgrade` (`convoy upgrade`)",
    "commands.plugins": "`rabbitmq-plugins`",
    "paths": "Paths below `/api`",
    "metrics": "Metrics",
}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one kind in RabbitMQ, and what is said of them."""

    names: tuple[str, ...]
    differs: Mapping[str, str]
    absent: Mapping[str, str]

    @classmethod
    def of(cls, table: Mapping[str, Any], shared: Mapping[str, Any]) -> Self:
        """Makes it of a table of the file, and of the notes that several tables share."""
        names = tuple(table["names"].split())
        own = {name for kind in (DIFFERS, ABSENT) for name in _split(table.get(kind, {}))}
        found: list[dict[str, str]] = []
        for kind in (DIFFERS, ABSENT):
            notes = dict(table.get(kind, {}))
            for group, text in shared.get(kind, {}).items():
                ours = [name for name in group.split() if name in names and name not in own]
                if ours:
                    notes[" ".join(ours)] = text
            found.append(notes)
        return cls(names, *found)

    def faults(self, here: frozenset[str]) -> list[str]:
        """Returns what is wrong when `here` are the names that there are here."""
        said = [name for notes in (self.differs, self.absent) for name in _split(notes)]
        absent = {*_split(self.absent)}
        return [
            *(f"{name} is said to be absent" for name in sorted(absent & here)),
            *(f"{name} is absent without a reason" for name in self.names
              if name not in here and name not in absent),
            *(f"{name} is no name of RabbitMQ" for name in said if name not in self.names),
            *(f"{name} stands there twice" for name in {*said} if said.count(name) > 1),
        ]  # fmt: skip

    def rows(self) -> list[str]:
        """Returns the rows of a table."""
        told = {*_split(self.differs), *_split(self.absent)}
        same = [name for name in self.names if name not in told]
        rows = [
            f"| {_cell(same[at : at + IN_CELL])} | {SAME} | |"
            for at in range(0, len(same), IN_CELL)
        ]
        for state, notes in ((DIFFERS, self.differs), (ABSENT, self.absent)):
            rows += [
                f"| {_cell(group.split())} | {state} | {why} |" for group, why in notes.items()
            ]
        return rows


def _split(notes: Mapping[str, str]) -> list[str]:
    return [name for names in notes for name in names.split()]


def _cell(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rabbitmq_names() -> dict[str, Names]:
    """Returns the names by the title of their table."""
    tables = _source()
    commands = tables["commands"]
    return {
        title: Names.of(commands[tool], commands) if tool else Names.of(tables[title], {})
        for title in TITLES
        for tool in [title.partition("commands.")[2]]
    }


def _source() -> dict[str, Any]:
    return tomllib.loads(SOURCE.read_text())


def names_here(title: str) -> frozenset[str]:
    """Returns the names that there are here, for a table; of paths with the names of RabbitMQ's
    places."""
    if title == "metrics":
        samples = (each for family in CLUSTER.values() for each in family.values())
        cluster = {f"rabbitmq_cluster_{sample.name}" for each in samples for sample in each}
        return frozenset(HELP) | cluster
    if title != "paths":
        return frozenset(commands_of(title.removeprefix("commands.")))
    patterns = {re.sub(r"\{\w+\}", "{}", "/".join(route.segments)) for route in ROUTES}
    paths = rabbitmq_names()["paths"].names
    return frozenset(path for path in paths if re.sub(r"\{\w+\}", "{}", path) in patterns)


def page() -> str:
    """Returns the page."""
    texts = _source()
    parts = [texts["intro"]]
    for title, names in rabbitmq_names().items():
        if title == "paths":
            parts.append(f"\n{texts['rabbitmqadmin']}")
        rows = "\n".join(names.rows())
        parts.append(
            f"\n## {TITLES[title]}\n\n| names | here | how, or why |\n|---|---|---|\n{rows}\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
