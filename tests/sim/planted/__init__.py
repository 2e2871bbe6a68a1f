"""Known bugs, each a small patch of one rule, in a module for what it breaks.

`python -m tests.sim.planted NAME [--first=S] [--limit=N] [--focused]` plants one, runs seeds until
one of them notices, and prints a row of the table in docs/simulation.md; without a name it lists
them.
The cores run interpreted, because compiled classes cannot be patched.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from tests.sim.planted import (  # noqa: F401
    classic,
    cluster,
    consensus,
    migrations,
    mirrored,
    mixed,
    queues,
    ring,
    streams,
)
from tests.sim.planted.registry import PLANTS, Plant


def hunt(found: Plant, first: int, limit: int, *, focused: bool) -> tuple[int, str] | None:
    """Plants the bug and runs seeds; (seeds needed, what was noticed), or None.

    The cores have been loaded from source, and stay as they are planted.
    """
    from convoymq.sim.loads import run_seed
    from convoymq.sim.runner import mute, parse_faults

    mute()
    faults = parse_faults(found.faults, found.load) if focused else None
    if found.unaided:
        from convoymq.sim import referee

        referee.check_invariants = lambda machine: None
    found.apply()
    for seed in range(first, first + limit):
        result = run_seed(seed, faults, load=found.load)
        if result.failure is not None:
            return seed - first + 1, result.failure
    return None


def report(name: str, limit: int, answer: Connection) -> None:
    """Sends what `hunt` finds with the faults that bring the bug out."""
    found = PLANTS[name]
    answer.send(hunt(found, found.first, limit, focused=True))
