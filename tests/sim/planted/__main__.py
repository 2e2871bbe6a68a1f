"""`python -m tests.sim.planted`: see the package."""

from __future__ import annotations

import sys

from convoymq.sim.interpreted import use_source
from tests.sim.planted import PLANTS, hunt


def main(arguments: list[str]) -> int:
    """See the package; 1 when the bug was not noticed."""
    names = [a for a in arguments if not a.startswith("--")]
    options = dict(a[2:].split("=") for a in arguments if a.startswith("--") and "=" in a)
    if not names:
        for found in PLANTS.values():
            print(f"{found.name:32} {found.text}")
        return 0
    found = PLANTS[names[0]]
    own = str(found.first if "--focused" in arguments else 1)
    first, limit = int(options.get("first", own)), int(options.get("limit", "200"))
    use_source()
    caught = hunt(found, first, limit, focused="--focused" in arguments)
    if caught is None:
        print(f"| `{found.name}` | {found.text} | not in {limit} seeds | |")
        return 1
    print(f"| `{found.name}` | {found.text} | {caught[0]} | {caught[1][:160]} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
