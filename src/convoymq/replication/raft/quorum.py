# cython: annotation_typing=False
"""Arithmetic of majorities."""

from __future__ import annotations

from collections.abc import Iterable


def majority(voters: int) -> int:
    """Returns how many of so many voters decide."""
    return voters // 2 + 1


def quorum_index(matches: list[int]) -> int:
    """Returns the highest index that a majority has reached; `matches` holds one index per voter.

    The list is sorted in place. An empty one has reached nothing.
    """
    count = len(matches)
    if count == 0:
        return 0
    matches.sort()
    return matches[(count - 1) // 2]


def has_majority(present: Iterable[int], voters: frozenset[int]) -> bool:
    """Returns whether the nodes present include a majority of the voters."""
    return len(voters.intersection(present)) >= majority(len(voters))
