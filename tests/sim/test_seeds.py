"""A few hundred seeds of the simulator, within a bounded time; and every seed that failed once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from convoymq.sim.engine import Result
from convoymq.sim.loads import run_seed
from convoymq.sim.registry import DEFAULT, LOADS
from convoymq.sim.runner import replay_command

REGRESSIONS = json.loads((Path(__file__).parent / "regressions" / "seeds.json").read_text())
SEEDS = int(os.environ.get("CONVOY_SIM_SEEDS", "40"))
BLOCK_SECONDS_MAX = 3.0
"""A block ends early on a slow machine: fewer seeds, not a longer test."""
BLOCKS = [(load, 0) for load in sorted(LOADS) if load != "topics"] + [(DEFAULT, 1)]
"""Loads, and thousands of seeds."""


def assert_kept(result: Result, load: str) -> None:
    """Fails with the end of the trace and the command that shows it again."""
    if result.failure is not None:
        tail = "\n".join(result.tail[-40:])
        replay = replay_command(result.seed, f" --load {load}")
        pytest.fail(f"{tail}\n{result.detail}\nreplay: {replay}", pytrace=False)


@pytest.mark.parametrize(("load", "block"), BLOCKS)
def test_seeds(load: str, block: int) -> None:
    started = time.monotonic()
    for seed in range(block * 1000 + 1, block * 1000 + 1 + SEEDS):
        assert_kept(run_seed(seed, load=load), load)
        if time.monotonic() - started > BLOCK_SECONDS_MAX:
            break


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"seed{case['seed']}", marks=[pytest.mark.long] if case.get("long") else []
        )
        for case in REGRESSIONS
    ],
)
def test_regressions(case: dict[str, object]) -> None:
    seed = case["seed"]
    assert isinstance(seed, int)
    faults = case.get("faults")
    assert faults is None or isinstance(faults, list)
    load = case.get("load", DEFAULT)
    assert isinstance(load, str)
    assert_kept(run_seed(seed, faults, load=load), load)
