"""Serial numbers of 32 bits (RFC 1982), pure."""

from __future__ import annotations

WINDOW_MAX = (1 << 32) - 1
"""Largest window, and the mask of a number."""
_HALF = 1 << 31


def following(number: int, count: int) -> int:
    """Returns the number that is `count` behind another."""
    return (number + count) & WINDOW_MAX


def ahead(number: int, other: int) -> int:
    """Returns how far a number is ahead of another; below 0, how far behind."""
    distance = (number - other) & WINDOW_MAX
    return distance if distance < _HALF else distance - (WINDOW_MAX + 1)
