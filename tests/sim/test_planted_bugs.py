"""The simulator notices every bug that `planted` can plant, within a bounded number of seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sim.planted import PLANTS

SEEDS_MAX = 100


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_caught(name: str) -> None:
    # With the faults that bring it out: which plain seeds do changes with all that takes time.
    command = [sys.executable, "-m", "tests.sim.planted", name, "--focused"]
    command.append(f"--limit={SEEDS_MAX}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
