"""Clocks of this process, in milliseconds."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """Returns milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """Returns milliseconds of a clock that never jumps."""
    return time.monotonic_ns() // 1_000_000
