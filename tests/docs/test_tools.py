"""docs/tools.md names every command of the tools, and nothing as working that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tool_processes import ToolProcesses

CTL, DIAGNOSTICS, QUEUES, UPGRADE = "ctl", "diagnostics", "queues", "upgrade"

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()
OURS = {"list", "info"}
"""Of `convoy queues`, and not of the tools."""


def tables(tool: str) -> set[str]:
    """The commands in the first column of the table of a tool."""
    _, _, section = PAGE.partition(f"## `convoy {tool}`\n")
    section = section.partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The commands that each tool lists."""
    found = {}
    with ToolProcesses(tmp_path_factory.mktemp("tools"), {}) as tools:
        for tool in (CTL, DIAGNOSTICS, QUEUES, UPGRADE):
            ended = tools.run(tool, "help")
            assert (ended.code, ended.err) == (0, "")
            found[tool] = set(re.findall(r"^   ([a-z_]+) +\S", ended.out, re.MULTILINE))
            assert found[tool]
    return found


@pytest.mark.parametrize("tool", [CTL, DIAGNOSTICS, QUEUES, UPGRADE])
def test_the_table_of_a_tool_has_its_commands(commands: dict[str, set[str]], tool: str) -> None:
    shared = commands[CTL] if tool == DIAGNOSTICS else set()
    missing = commands[tool] - tables(tool) - shared
    assert not missing, f"docs/tools.md does not name {missing}"
    unknown = tables(tool) - commands[tool] - OURS
    assert not unknown, f"`convoy {tool}` has no {unknown}"
