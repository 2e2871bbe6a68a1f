"""Majorities: arithmetic without any knowledge of Raft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def majority(count: int) -> int:
    """The smallest number of `count` members that is more than half."""
    return count // 2 + 1


def committed(matches: Iterable[int]) -> int:
    """The highest index that a majority has, given each voter's; 0 without voters."""
    ordered = sorted(matches, reverse=True)
    return ordered[majority(len(ordered)) - 1] if ordered else 0


def has_majority(voters: Sequence[int], agreeing: Iterable[int]) -> bool:
    """True when more than half of the voters agree."""
    return len(set(agreeing) & set(voters)) >= majority(len(voters))
