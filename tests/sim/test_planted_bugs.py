"""The simulator notices every bug that `planted` can plant, within a bounded number of seeds."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.patience import PATIENCE_S
from tests.sim.planted import PLANTS, report

SEEDS_MAX = 100
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.sim.interpreted_world"])


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_caught(name: str) -> None:
    # With the faults that bring it out: which plain seeds do changes with all that takes time.
    answer, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=report, args=(name, SEEDS_MAX, sender))
    process.start()
    sender.close()
    try:
        assert answer.poll(PATIENCE_S), f"no answer in {PATIENCE_S} s"
        assert answer.recv() is not None, f"not noticed in {SEEDS_MAX} seeds"
    finally:
        process.kill()
        process.join()
