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
BLOCKS = 4
SEEDS_PER_BLOCK = int(os.environ.get("CONVOY_SIM_SEEDS", "160")) // BLOCKS
BLOCK_SECONDS_MAX = 3.0
"""A block ends early on a slow machine: fewer seeds, not a longer test."""


def assert_kept(result: Result) -> None:
    """Fails with the end of the trace and the command that shows it again."""
    if result.failure is not None:
        tail = "\n".join(result.tail[-40:])
        pytest.fail(
            f"{tail}\n{result.detail}\nreplay: {replay_command(result.seed, '')}", pytrace=False
        )


@pytest.mark.parametrize("block", range(BLOCKS))
def test_seeds(block: int) -> None:
    started = time.monotonic()
    for seed in range(block * 1000 + 1, block * 1000 + 1 + SEEDS_PER_BLOCK):
        assert_kept(run_seed(seed))
        if time.monotonic() - started > BLOCK_SECONDS_MAX:
            break


@pytest.mark.parametrize("block", range(BLOCKS // 2))
@pytest.mark.parametrize("load", sorted(set(LOADS) - {DEFAULT, "topics"}))
def test_seeds_of_other_loads(load: str, block: int) -> None:
    started = time.monotonic()
    for seed in range(block * 1000 + 1, block * 1000 + 1 + SEEDS_PER_BLOCK):
        result = run_seed(seed, load=load)
        if result.failure is not None:
            tail = "\n".join(result.tail[-40:])
            replay = replay_command(seed, f" --load {load}")
            pytest.fail(f"{tail}\n{result.detail}\nreplay: {replay}", pytrace=False)
        if time.monotonic() - started > BLOCK_SECONDS_MAX:
            break


@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: f"seed{case['seed']}")
def test_regressions(case: dict[str, object]) -> None:
    seed = case["seed"]
    assert isinstance(seed, int)
    faults = case.get("faults")
    assert faults is None or isinstance(faults, list)
    load = case.get("load", DEFAULT)
    assert isinstance(load, str)
    assert_kept(run_seed(seed, faults, load=load))
