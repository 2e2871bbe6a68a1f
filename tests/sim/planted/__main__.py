"""`python -m tests.sim.planted`: see the package."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from tests.sim.planted import PLANTS
from tests.sim.planted.processes import find_seed
from tests.sim.planted.registry import record_seed


def main() -> int:
    """See the package; 1 when a bug was not noticed."""
    parser = ArgumentParser(prog="python -m tests.sim.planted")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--load", default="")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    names = options.names + [name for name, each in PLANTS.items() if each.load == options.load]
    if not names:
        for each in PLANTS.values():
            print(f"{each.name:32} {each.text}")
    missed = 0
    for name in names:
        planted = PLANTS[name]
        first = options.first or (1 if options.plain else planted.seed)
        found = find_seed(name, first, options.limit, focused=not options.plain)
        if found is None:
            missed += 1
            print(f"| `{name}` | {planted.text} | not in {options.limit} seeds from {first} on | |")
            continue
        seed, failure = found
        print(f"| `{name}` | {planted.text} | {seed} | {failure[:160]} |", flush=True)
        if options.record:
            record_seed(name, seed)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
