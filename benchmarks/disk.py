"""Waits until the disk is rested.

A disk that has just taken gigabytes may be slow for seconds (a rate limit, a cache that drains): a
flush takes thirty times as long. Then a case measures the case before it. So every case, of either
system, begins when a small flush takes about what it takes at best. Before cases that write as much
as the disk takes there is a pause: a rate limit lets small flushes through long before it lets
through gigabytes again.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

FLUSHES = 20
BLOCK = 4096
SLACK = 1.5
DEADLINE_S = 90.0
PAUSE_S = 0.5
REFILL_S = 20.0


class Disk:
    """The disk under a directory, and the best that it has shown."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "disk-probe"
        self._best = float("inf")

    def flush_ms(self) -> float:
        """Median time to overwrite and flush one block, in ms."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, bytes(BLOCK), 0)
            os.fsync(descriptor)
            times = []
            for _ in range(FLUSHES):
                began = time.perf_counter()
                os.pwrite(descriptor, os.urandom(BLOCK), 0)
                os.fdatasync(descriptor)
                times.append((time.perf_counter() - began) * 1000)
        finally:
            os.close(descriptor)
            self._path.unlink()
        found = statistics.median(times)
        self._best = min(self._best, found)
        return found

    def rest(self) -> float:
        """Waits until a flush takes at most half as long again as the best one so far, or for 90
        s. Returns the last time, in ms."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self.flush_ms()
            if found <= SLACK * self._best or time.monotonic() > deadline:
                return found
            time.sleep(PAUSE_S)

    def rest_long(self) -> None:
        """As `rest`, and for as long as a rate limit may need to forgive gigabytes: how much it
        would let through can't be seen from outside until it does not."""
        time.sleep(REFILL_S)
        self.rest()
