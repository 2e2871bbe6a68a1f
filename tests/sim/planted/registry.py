"""What a planted bug is, and where it is registered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from convoymq.sim.registry import DEFAULT

Patch = Callable[[], None]
PLANTS: dict[str, Plant] = {}
SEEDS = Path(__file__).parent / "seeds.json"
"""Name of a bug -> a seed that notices it; 1 where it has none. `--record` writes it."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug, in words and as a patch."""

    name: str
    text: str
    apply: Patch
    faults: str | None
    """Faults that bring it out, for the test; the table in the docs is made without."""
    load: str = DEFAULT
    """What the simulator is to do (`registry.LOADS`)."""
    unaided: bool = False
    """The machine does not check its own invariants: only what watches it from outside notices."""

    @property
    def seed(self) -> int:
        """Returns the recorded seed that notices the bug."""
        return recorded_seeds().get(self.name, 1)


def late(place: str) -> Callable[[], Any]:
    """Returns a function that imports a class (`module:Class`) or module: a bug is planted into
    what runs from source then."""
    module, _, name = place.partition(":")

    def imported() -> Any:
        found = import_module(module)
        return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")

    return imported


def recorded_seeds() -> dict[str, int]:
    """Returns the recorded seeds by the names of bugs."""
    return dict(json.loads(SEEDS.read_text()))


def record_seed(name: str, seed: int) -> None:
    """Records a seed that notices a bug; forgets those of bugs that are no more."""
    seeds = {**recorded_seeds(), name: seed}
    kept = {each: seeds[each] for each in sorted(seeds) if each in PLANTS and seeds[each] != 1}
    SEEDS.write_text(json.dumps(kept, indent=1) + "\n")


def plant(
    text: str, faults: str | None = None, load: str = DEFAULT, *, unaided: bool = False
) -> Callable[[Patch], Patch]:
    """Registers a patch under its function's name."""

    def register(apply: Patch) -> Patch:
        PLANTS[apply.__name__] = Plant(apply.__name__, text, apply, faults, load, unaided)
        return apply

    return register


def planting(load: str) -> Callable[..., Callable[[Patch], Patch]]:
    """Returns `plant` for bugs of one load."""
    return partial(plant, load=load)
