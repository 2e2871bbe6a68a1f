"""docs/tools.md names every command of the tools, and nothing as working that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, UPGRADE
from convoymq.cli.ctl.tools import commands_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()
OURS = {"list", "info"}
"""Of `convoy queues`, and not of the tools."""


def tables(tool: str) -> set[str]:
    """The commands in the first column of the table of a tool."""
    _, _, section = PAGE.partition(f"## `convoy {tool}`\n")
    section = section.partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}


@pytest.mark.parametrize("tool", [CTL, DIAGNOSTICS, QUEUES, UPGRADE])
def test_the_table_of_a_tool_has_its_commands(tool: str) -> None:
    shared = set(commands_of(CTL)) if tool == DIAGNOSTICS else set()
    missing = set(commands_of(tool)) - tables(tool) - shared
    assert not missing, f"docs/tools.md does not name {missing}"
    unknown = tables(tool) - set(commands_of(tool)) - OURS
    assert not unknown, f"`convoy {tool}` has no {unknown}"


@pytest.mark.parametrize("tool", [CTL, DIAGNOSTICS])
def test_what_is_missing_is_not_there(tool: str) -> None:
    _, _, section = PAGE.partition(f"## `convoy {tool}`\n")
    missing = section.partition("\n## ")[0].partition("\nMissing")[2]
    named = set(re.findall(r"`([a-z_]+)`", missing))
    assert missing
    assert not named & set(commands_of(tool)) - {"status"}
