"""`make replication`: drives all ways through all schedules, and writes docs/replication.md anew.

    python -m benchmarks.replication                    all of it
    python -m benchmarks.replication --seeds 5 --no-real --faults kill,freeze --ways quorum
    python -m benchmarks.replication --page             only the page, from docs/replication.json

What was not run keeps the figures that it had. The exit code is 1 when a promise broke.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.replication import page, real, simulated
from benchmarks.replication.faults import Fault, faults_of
from benchmarks.replication.ways import Way, broken_promises, ways_of
from benchmarks.report import machine
from convoymq import __version__

SEEDS = 5
RUNS = 1


def simulate(fault: Fault, way: Way, seed: int) -> dict[str, Any]:
    """One seed: its counts, and under `failure` the promise that the referee saw broken."""
    ledger, failure = simulated.run(way.simulate(fault), seed)
    return ledger.counts(fault) | {"failure": failure}


def _simulate(work: tuple[str, str, int]) -> dict[str, Any]:
    fault, way, seed = work
    return simulate(faults_of([fault])[0], ways_of([way])[0], seed)


def run_simulated(
    faults: Sequence[Fault], ways: Sequence[Way], seeds: int, jobs: int, kept: dict[str, Any]
) -> list[str]:
    """Runs seeds of each; returns what broke."""
    broken: list[str] = []
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        for fault in faults:
            for way in ways:
                work = [(fault.name, way.name, seed) for seed in range(1, seeds + 1)]
                runs = list(pool.map(_simulate, work))
                kept["runs"][f"{fault.name}/{way.name}/simulated"] = page.summary(runs)
                page.store(kept)
                for seed, run in enumerate(runs, 1):
                    where = f"{fault.name}, {way.name}, seed {seed}"
                    broken += broken_promises(way, fault, run, where)
                print(f"simulated {fault.name}/{way.name}: {page.brief(runs)}", flush=True)
    return broken


def run_real(
    faults: Sequence[Fault], ways: Sequence[Way], runs: int, kept: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Runs real nodes; returns what broke, and what was skipped."""
    broken: list[str] = []
    skipped: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        library = real.build_slow_sync(Path(directory))
        for fault in faults:
            needs_library = any(step.action == "slow" for step in fault.steps)
            if not fault.is_real:
                skipped.append(f"{fault.name}: needs the simulator, see the page")
                continue
            if needs_library and library is None:
                skipped.append(f"{fault.name}: needs a C compiler, and LD_PRELOAD for itself")
                continue
            for way in ways:
                chosen = library if needs_library else None
                counted = [way.run(fault, chosen).counts(fault) for _ in range(runs)]
                kept["runs"][f"{fault.name}/{way.name}/real"] = page.summary(counted)
                page.store(kept)
                for number, run in enumerate(counted, 1):
                    where = f"{fault.name}, {way.name}, real run {number}"
                    broken += broken_promises(way, fault, run, where)
                print(f"real {fault.name}/{way.name}: {page.brief(counted)}", flush=True)
    return broken, skipped


def main(arguments: Sequence[str]) -> int:
    """See the module text."""
    parser = argparse.ArgumentParser(prog="make replication", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the simulator; 0 = none")
    parser.add_argument("--runs", type=int, default=RUNS, help="with real processes; 0 = none")
    parser.add_argument("--no-real", action="store_true", help="the simulator only")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the simulator")
    parser.add_argument("--faults", default="", help="names, with commas; none = all")
    parser.add_argument("--ways", default="", help="names, with commas; none = all")
    parser.add_argument("--page", action="store_true", help="runs nothing")
    chosen = parser.parse_args(arguments)
    faults, ways = (
        faults_of([n for n in chosen.faults.split(",") if n]),
        ways_of([n for n in chosen.ways.split(",") if n]),
    )
    kept = page.load()
    broken: list[str] = []
    skipped: list[str] = []
    if not chosen.page:
        about = kept.setdefault("about", {})
        about |= machine({"convoy": __version__})
        about["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        if chosen.seeds:
            broken += run_simulated(faults, ways, chosen.seeds, chosen.jobs, kept)
        else:
            skipped.append("the simulator: no seeds")
        if chosen.runs and not chosen.no_real:
            failed, left_out = run_real(faults, ways, chosen.runs, kept)
            broken += failed
            skipped += left_out
        else:
            skipped.append("real processes")
        page.store(kept)
    page.write(kept)
    for line in skipped:
        print(f"skipped: {line}")
    for line in broken:
        print(f"promise broken: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
