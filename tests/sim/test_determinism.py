"""The same seed gives the same run: in one process, in another, compiled and interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from convoymq.sim.engine import Result
from convoymq.sim.loads import run_seed
from tests.patience import PATIENCE_S

SEEDS = (2, 3, 6)

PROGRAM = """
import sys
if sys.argv[1] == "interpreted":
    from convoymq.sim.interpreted import use_source
    use_source()
from convoymq.sim.loads import run_seed
for seed in map(int, sys.argv[2:]):
    result = run_seed(seed)
    print(seed, result.events, f"{result.digest:08x}", result.workload)
"""


@cache
def run_here(seed: int) -> Result:
    """Runs a seed in this process, once for all tests."""
    return run_seed(seed)


def run_elsewhere(mode: str, hash_seed: str) -> str:
    """Runs the seeds in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, *map(str, SEEDS)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout


def test_same_seed_same_run() -> None:
    for seed in SEEDS:
        first, second = run_here(seed), run_seed(seed)
        assert (first.digest, first.events) == (second.digest, second.events)


def test_other_process_other_hashes_interpreted() -> None:
    here = "".join(
        f"{seed} {result.events} {result.digest:08x} {result.workload}\n"
        for seed, result in ((seed, run_here(seed)) for seed in SEEDS)
    )
    assert run_elsewhere("compiled", "1") == here
    assert run_elsewhere("interpreted", "2") == here
