"""The simulator notices every bug that `planted` can plant, within a bounded number of seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sim.planted import PLANTS

SEEDS_MAX = 100


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_caught(name: str) -> None:
    command = [sys.executable, "-m", "tests.sim.planted", name, f"--limit={SEEDS_MAX}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
