"""docs/simulation.md names every load of the simulator and every kind of fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convoymq.sim.loads import load_class
from convoymq.sim.registry import LOADS

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()


@pytest.mark.parametrize("load", LOADS)
def test_a_load_and_its_faults_have_a_row(load: str) -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", rows))
    assert load in named
    assert set(load_class(load).kinds) <= named
