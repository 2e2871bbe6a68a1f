"""What a planted bug is, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convoymq.sim.registry import DEFAULT

PLANTS: dict[str, Plant] = {}


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug, in words and as a patch."""

    name: str
    text: str
    apply: Callable[[], None]
    faults: str | None
    """Faults that bring it out, for the test; the table in the docs is made without."""
    load: str = DEFAULT
    """What the simulator is to do (`registry.LOADS`)."""
    unaided: bool = False
    """The machine does not check its own invariants: only what watches it from outside notices."""
    first: int = 1
    """The first seed of the test: not far before one that notices, where that is rare."""


def plant(
    text: str,
    faults: str | None = None,
    load: str = DEFAULT,
    *,
    unaided: bool = False,
    first: int = 1,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a patch under its function's name."""

    def register(apply: Callable[[], None]) -> Callable[[], None]:
        PLANTS[apply.__name__] = Plant(apply.__name__, text, apply, faults, load, unaided, first)
        return apply

    return register
