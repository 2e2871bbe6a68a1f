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


def until_beat(now_s: float, period_s: float) -> float:
    """Returns how long it is to the next multiple of a period, in seconds: timers of the same
    period go off together, and a process that rests wakes up once for all of them."""
    left = period_s - now_s % period_s
    # A timer that went off early must not do so twice.
    return left if left > period_s / 2 else left + period_s
