"""Durations as RabbitMQ's stream arguments write them: `7D`, `1h`.

Units are years (365 days), months (30 days), days, hours, minutes and seconds: Y M D h m s.
"""

from __future__ import annotations

import re

_DURATION = re.compile(r"([0-9]{1,12})([YMDhms])")
_DAY_MS = 24 * 3600 * 1000
UNIT_MS = {
    "Y": 365 * _DAY_MS,
    "M": 30 * _DAY_MS,
    "D": _DAY_MS,
    "h": 3600 * 1000,
    "m": 60 * 1000,
    "s": 1000,
}


def duration_ms(text: str) -> int | None:
    """Milliseconds of a duration such as `7D`; None when it is none, or zero."""
    found = _DURATION.fullmatch(text)
    if found is None or int(found[1]) == 0:
        return None
    return int(found[1]) * UNIT_MS[found[2]]
