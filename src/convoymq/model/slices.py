"""Long loops in slices: thousands of rows are made while the event loop goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

SLICE_NS = 5_000_000
"""A loop runs for so long before others get their turn."""

Item = TypeVar("Item")


async def in_slices(items: Iterable[Item], slice_ns: int | None = None) -> AsyncIterator[Item]:
    """Yields the items, and gives the event loop a turn after each slice of time.

    What the items stand for may be gone by the time that they come.
    """
    slice_ns = slice_ns or SLICE_NS
    until = time.monotonic_ns() + slice_ns
    for item in items:
        if time.monotonic_ns() >= until:
            await asyncio.sleep(0)
            until = time.monotonic_ns() + slice_ns
        yield item
