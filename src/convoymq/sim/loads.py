"""Loads: what a run simulates, how its nodes are made, and by what it is judged.

A new load is a module with a class that implements `Load`, and a line in `registry.LOADS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from importlib import import_module
from typing import ClassVar

from convoymq.sim.engine import Result, Simulation, run_simulation
from convoymq.sim.registry import DEFAULT, LOADS


class Load(ABC):
    """Load of one run: an object is made for each seed."""

    text: ClassVar[str]
    """The load in one line."""
    kinds: ClassVar[tuple[str, ...]]
    """Faults that the load knows; `docs/simulation.md` says what each does."""

    @abstractmethod
    def make_world(
        self, seed: int, faults: Collection[str] | None, sink: Callable[[str], None] | None
    ) -> Simulation:
        """Returns the world of a seed.

        Args:
            faults: kinds of faults in place of those that the seed draws.
            sink: called with each line of the trace.
        """


def load_class(name: str) -> type[Load]:
    """Returns the class of a load. Raises SystemExit for an unknown name."""
    if name not in LOADS:
        raise SystemExit(f"unknown load {name}; there are: {', '.join(LOADS)}")
    module, _, found = LOADS[name].partition(":")
    made: type[Load] = getattr(import_module(module), found)
    return made


def run_seed(
    seed: int,
    faults: Collection[str] | None = None,
    sink: Callable[[str], None] | None = None,
    *,
    load: str = DEFAULT,
) -> Result:
    """Runs one seed of a load; a failure is in the result, with the tail of the trace."""
    return run_simulation(load_class(load)().make_world(seed, faults, sink))
