"""Clocks of this machine."""

from __future__ import annotations

import time

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def wall_ms() -> int:
    """Returns the time of this machine's wall clock."""
    return time.time_ns() // 1_000_000


def since_boot_ms() -> int:
    """A clock that nobody sets and that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000
