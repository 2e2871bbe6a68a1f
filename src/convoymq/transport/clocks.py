"""Clocks of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOKS = 3
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def wall_ms() -> int:
    """Returns the time of this machine's wall clock."""
    return time.time_ns() // 1_000_000


def since_boot_ns() -> int:
    """A clock that nobody sets and that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime_ns(_BOOT_CLOCK)


def since_boot_ms() -> int:
    """As `since_boot_ns`, in ms."""
    return since_boot_ns() // 1_000_000


def lead_ns(clock: Callable[[], int], other: Callable[[], int]) -> int:
    """Returns how far a clock is ahead of another one. A process that has to wait for the processor
    between the two looks sees too little, never too much: the largest of some counts."""
    return max(clock() - other() for _ in range(LOOKS))


def wall_and_boot_ms() -> tuple[int, int]:
    """Returns the wall clock and the time since boot, both of the same moment."""
    lead = lead_ns(time.time_ns, since_boot_ns)
    boot = since_boot_ns()
    return (boot + lead) // 1_000_000, boot // 1_000_000


def until_beat(now_s: float, period_s: float) -> float:
    """Returns how long it is to the next multiple of a period, in seconds: timers of the same
    period go off together, and a process that rests wakes up once for all of them."""
    left = period_s - now_s % period_s
    # A timer that went off early must not do so twice.
    return left if left > period_s / 2 else left + period_s
