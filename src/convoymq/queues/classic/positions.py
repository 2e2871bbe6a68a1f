"""A set of positions, one bit each: which of a queue's messages are gone."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 15
"""Positions whose bits are kept together."""

_ALL = (1 << CHUNK) - 1


class PositionSet:
    """Positions that were added. Cost: a bit for each position near those; a range costs no more
    than its chunks."""

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}

    def copy(self) -> PositionSet:
        """Returns a set of its own with the same positions."""
        made = PositionSet()
        made._chunks = dict(self._chunks)
        return made

    def add(self, first: int, last: int) -> None:
        """Adds positions first … last."""
        for number, bits in _chunks(first, last):
            known = self._chunks.get(number, 0)
            if known != _ALL:
                known |= bits
                self._chunks[number] = _ALL if known == _ALL else known

    def count(self, first: int, last: int) -> int:
        """Returns how many of first … last are in the set."""
        return sum(
            (self._chunks.get(number, 0) & bits).bit_count()
            for number, bits in _chunks(first, last)
        )

    def within(self, position: int, count: int) -> list[tuple[int, int]]:
        """Returns the ranges (first, last) of `count` positions that are in the set, relative to
        the first of them."""
        bits = self._window(position, count)
        found: list[tuple[int, int]] = []
        at = 0
        while bits:
            skip = (bits & -bits).bit_length() - 1
            at += skip
            bits >>= skip
            length = (~bits & (bits + 1)).bit_length() - 1
            found.append((at, at + length - 1))
            at += length
            bits >>= length
        return found

    def first_missing(self, first: int, last: int) -> int | None:
        """Returns the lowest of first … last that is not in the set."""
        for number, bits in _chunks(first, last):
            rest = bits & ~self._chunks.get(number, 0)
            if rest:
                return number * CHUNK + (rest & -rest).bit_length() - 1
        return None

    def last_missing(self, first: int, last: int) -> int | None:
        """Returns the highest of first … last that is not in the set."""
        for number, bits in reversed(list(_chunks(first, last))):
            rest = bits & ~self._chunks.get(number, 0)
            if rest:
                return number * CHUNK + rest.bit_length() - 1
        return None

    def _window(self, position: int, count: int) -> int:
        found = 0
        for number, bits in _chunks(position, position + count - 1):
            part = self._chunks.get(number, 0) & bits
            shift = number * CHUNK - position
            found |= part << shift if shift >= 0 else part >> -shift
        return found


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields (chunk, its bits) of positions first … last."""
    for number in range(first // CHUNK, last // CHUNK + 1):
        low = max(first - number * CHUNK, 0)
        high = min(last - number * CHUNK, CHUNK - 1)
        yield number, ((1 << (high - low + 1)) - 1) << low
