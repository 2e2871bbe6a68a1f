"""Settings of a stream's machine, from the effective settings of its queue."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.model.durations import duration_ms
from convoymq.queues.stream.machine import NO_LIMIT, SEGMENT_BYTES_DEFAULT


def machine_settings(settings: Mapping[str, object]) -> dict[str, int]:
    """Returns all settings of the machine, by those of the queue (keys of policies). What they do
    not mention has its default."""
    age = settings.get("max-age")
    return {
        "max_age_ms": (duration_ms(age) if isinstance(age, str) else None) or NO_LIMIT,
        "max_bytes": _number(settings, "max-length-bytes", NO_LIMIT),
        "segment_bytes": _number(settings, "stream-max-segment-size-bytes", SEGMENT_BYTES_DEFAULT),
    }


def _number(settings: Mapping[str, object], key: str, default: int) -> int:
    value = settings.get(key)
    return value if isinstance(value, int) else default
