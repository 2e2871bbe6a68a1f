# cython: annotation_typing=False
"""Serial numbers of 32 bits (RFC 1982), pure."""

from __future__ import annotations

WINDOW_MAX = (1 << 32) - 1
"""Largest window, and the mask of a number."""
_HALF = 1 << 31
_BYTES_AHEAD = 4 << 20
"""Of messages of one link that are under way."""


def following(number: int, count: int) -> int:
    """Returns the number that is `count` behind another."""
    return (number + count) & WINDOW_MAX


def ahead(number: int, other: int) -> int:
    """Returns how far a number is ahead of another; below 0, how far behind."""
    distance = (number - other) & WINDOW_MAX
    return distance if distance < _HALF else distance - (WINDOW_MAX + 1)


def messages_ahead(least: int, most: int, size: int) -> int:
    """Returns how many messages of a link may be under way: the more the smaller they are.

    Args:
        least: holds for messages of any size, unless `most` is less.
        size: bytes of the latest ones; 0: there were none.
    """
    return min(most, max(least, _BYTES_AHEAD // size)) if size else min(most, least)
