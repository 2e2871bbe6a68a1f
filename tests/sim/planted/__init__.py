"""Known bugs, each a small patch of one rule, in a module for what it breaks.

`python -m tests.sim.planted` lists them. `python -m tests.sim.planted NAME…` plants each, runs
seeds from its recorded one on until one notices, and prints a row of the table in
docs/simulation.md:

- `--load NAME`: all bugs of a load;
- `--first S`, `--limit N`: other seeds;
- `--plain`: with the faults that seeds draw, not those that bring the bug out;
- `--record`: writes the seeds to `seeds.json`.

The cores run interpreted, because compiled classes cannot be patched.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from tests.sim.planted import (  # noqa: F401
    broker_acting,
    broker_group,
    classic,
    cluster,
    consensus,
    filters,
    links,
    migrations,
    mirrored,
    mixed,
    queues,
    recovery,
    ring,
    streams,
    transactions,
)
from tests.sim.planted.registry import PLANTS, Plant


def hunt(found: Plant, first: int, limit: int, *, focused: bool = True) -> tuple[int, str] | None:
    """Plants the bug and runs seeds; (seed that notices it, what was noticed), or None.

    The cores have been loaded from source, and stay as they are planted. `focused`: with the faults
    that bring the bug out.
    """
    from convoymq.sim.loads import run_seed
    from convoymq.sim.runner import muted, parse_faults

    faults = parse_faults(found.faults, found.load) if focused else None
    if found.unaided:
        from convoymq.sim import referee

        referee.check_invariants = lambda machine: None
    found.apply()
    with muted():
        for seed in range(first, first + limit):
            result = run_seed(seed, faults, load=found.load)
            if result.failure is not None:
                return seed, result.failure
    return None


def report(name: str, first: int, limit: int, focused: bool, answer: Connection) -> None:
    """Sends what `hunt` finds."""
    answer.send(hunt(PLANTS[name], first, limit, focused=focused))
