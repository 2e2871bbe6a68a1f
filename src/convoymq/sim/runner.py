"""Runs seeds and prints the results."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Collection, Iterator

import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from convoymq.sim.engine import Result
from convoymq.sim.loads import load_class, run_seed
from convoymq.sim.registry import DEFAULT

TAIL_SHOWN = 60


def parse_faults(text: str | None, load: str = DEFAULT) -> frozenset[str] | None:
    """Kinds of faults from a comma separated list. Raises SystemExit for unknown ones."""
    if text is None:
        return None
    known = load_class(load).kinds
    chosen = frozenset(kind for kind in text.split(",") if kind and kind != "none")
    unknown = chosen - set(known)
    if unknown:
        raise SystemExit(f"unknown faults {sorted(unknown)}; there are: {', '.join(known)}")
    return chosen


def replay_command(seed: int, options: str) -> str:
    """Returns the command that runs a seed again."""
    return f"python -m convoymq.sim --seed {seed}{options}"


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """The trace says it all: what nodes log meanwhile is not printed."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@muted()
def run_one(
    seed: int,
    faults: Collection[str] | None,
    options: str,
    *,
    show_all: bool,
    load: str = DEFAULT,
) -> int:
    """Runs one seed and prints its trace; 1 when it failed."""
    result = run_seed(seed, faults, print if show_all else None, load=load)
    if not show_all:
        print("\n".join(result.tail))
    print(result.detail)
    print(
        f"seed {seed}: {result.failure or 'all promises kept'};"
        f" {result.events} events in {result.simulated_us / 1e6:.1f} simulated seconds,"
        f" trace {result.digest:08x}, {result.workload}, faults {dict(result.faults)}"
    )
    return int(result.failure is not None)


def _results(
    first: int, count: int, faults: Collection[str] | None, jobs: int, load: str
) -> Iterator[Result]:
    if jobs <= 1:
        for seed in range(first, first + count):
            yield _run((seed, faults, load))
        return
    # Forked: the children run the code that is loaded here, compiled or not.
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        work = ((seed, faults, load) for seed in range(first, first + count))
        yield from pool.imap_unordered(_run, work, chunksize=4)


def _run(work: tuple[int, Collection[str] | None, str]) -> Result:
    seed, faults, load = work
    return run_seed(seed, faults, load=load)


@muted()
def run_many(
    first: int,
    count: int,
    faults: Collection[str] | None,
    options: str,
    *,
    jobs: int,
    keep_going: bool,
    load: str = DEFAULT,
) -> int:
    """Runs seeds and prints a table; 1 when one failed."""
    console = Console(soft_wrap=True)
    started = time.perf_counter()
    totals: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    simulated_us = 0
    events = 0
    done = 0
    failed: list[Result] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=count)
        for result in _results(first, count, faults, jobs, load):
            progress.advance(task)
            done += 1
            simulated_us += result.simulated_us
            events += result.events
            totals.update(result.workload)
            injected.update(result.faults)
            if result.failure is not None:
                failed.append(result)
                console.print(f"seed {result.seed} failed: {result.failure}", markup=False)
                console.print(f"  replay: {replay_command(result.seed, options)}", markup=False)
                if not keep_going:
                    console.print("\n".join(result.tail[-TAIL_SHOWN:]), markup=False)
                    console.print(result.detail, markup=False)
                    break
    seconds = time.perf_counter() - started
    table = Table(title="Simulation", show_header=False)
    table.add_row("seeds", f"{done:,} ({first} to {first + done - 1})")
    table.add_row("seeds per second", f"{done / seconds:.1f}")
    table.add_row("simulated", f"{simulated_us / 3.6e9:.2f} hours, {events:,} events")
    for name, number in totals.items():
        table.add_row(name, f"{number:,}")
    for kind, number in sorted(injected.items()):
        table.add_row(f"fault: {kind}", f"{number:,}")
    table.add_row("failed", ", ".join(str(r.seed) for r in failed) or "none")
    console.print(table)
    return int(bool(failed))
