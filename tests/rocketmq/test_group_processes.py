"""A broker group in processes: its master is killed under load and returns; all is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def test_a_group_that_loses_its_master_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Sends, timed messages, transactions with an end and without one, and consumers: the slave
    acts, what is due leaves through another broker, and the master takes over what happened.

    RocketMQ's slave refuses ends of transactions, and its master delivers again what had escaped.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo_groups.py"), "--seconds", "1",
         "--directory", str(tmp_path)],
        capture_output=True, text=True, timeout=20 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "lost                       0\n" in done.stdout
    assert "doubled                    0\n" in done.stdout
    assert "n-1: acting" in done.stdout
    assert "n-0: master" in done.stdout
