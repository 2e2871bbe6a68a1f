"""Names that were probably meant: for refusals of names that are not known."""

from __future__ import annotations

from collections.abc import Iterable

NEAR_MAX = 3
"""Names that a hint has at most."""
CANDIDATES_MAX = 20_000
BESIDE = 0.1
"""Ratios below that of the nearest name at which a name is left out."""


def near_names(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns the known names that are like this one, the nearest first; case does not count."""
    import difflib  # who makes no mistake never needs it

    wanted, length = name.lower(), len(name)
    by_lower: dict[str, str] = {}
    for each in known:
        # What is much longer or shorter is never near.
        if abs(len(each) - length) <= max(3, length):
            by_lower.setdefault(each.lower(), each)
        if len(by_lower) >= CANDIDATES_MAX:
            break
    found = difflib.get_close_matches(wanted, by_lower, NEAR_MAX, cutoff)
    alike = {each: difflib.SequenceMatcher(None, each, wanted).ratio() for each in found}
    return [by_lower[each] for each in found if alike[each] > alike[found[0]] - BESIDE]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the question with the nearest names; "" when nothing is near."""
    near = near_names(name, known, cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""


def hint(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the end of a message that asks so; "" when nothing is near."""
    asked = did_you_mean(name, known, cutoff)
    return f"; {asked}" if asked else ""
