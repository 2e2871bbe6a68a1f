"""Samples of one object's numbers: the latest, the one before, and a short history.

The owner of an object sends its numbers when they have changed, once a second at most. A sample
therefore holds until the next one, and an object without a recent sample has a rate of 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

STEP_MS = 1000
FRESH_STEPS = 2.5
"""Age of a sample beyond which its object has not changed since."""
TIERS = ((1000, 60), (60_000, 60), (3_600_000, 24))
"""(step in ms, number of samples) of a history."""
BESIDE = 3
"""Samples kept beside these: a range of so many steps has one at either end, begins up to a step
before now, and needs one that is older."""

Numbers: TypeAlias = Callable[[bytes], Mapping[str, float]]
"""Reads the numbers of a sample."""


class Track:
    """The samples of one object. `before`: what `data` was a step earlier. `step_ms`: time between
    two samples of an object that changes all the time."""

    __slots__ = ("before", "before_ms", "data", "history", "stamp_ms", "step_ms")

    def __init__(self, data: bytes, now_ms: int, step_ms: int = STEP_MS) -> None:
        self.data = self.before = data
        self.stamp_ms = self.before_ms = now_ms
        self.step_ms = step_ms
        self.history: History | None = None

    def put(self, data: bytes, now_ms: int) -> None:
        """Takes a sample."""
        step_ms = self.step_ms
        if now_ms - self.stamp_ms >= step_ms * 0.9:
            # Until a step ago nothing had changed.
            self.before, self.before_ms = self.data, max(self.stamp_ms, now_ms - step_ms)
        elif now_ms - self.before_ms >= step_ms * 1.9:
            self.before, self.before_ms = self.data, self.stamp_ms
        self.data, self.stamp_ms = data, now_ms
        if self.history is not None:
            self.history.add(now_ms, data)

    def remember(self) -> None:
        """Begins a history."""
        self.history = History()
        self.history.add(self.stamp_ms, self.data)


class History:
    """Samples of the last minute, hour and day: of each second, minute and hour the last one."""

    __slots__ = ("_tiers",)

    def __init__(self) -> None:
        self._tiers: tuple[deque[tuple[int, bytes]], ...] = tuple(
            deque(maxlen=size + BESIDE) for _, size in TIERS
        )

    def add(self, now_ms: int, data: bytes) -> None:
        """Takes a sample, which is not older than the others."""
        for (step_ms, _), tier in zip(TIERS, self._tiers, strict=True):
            if tier and tier[-1][0] // step_ms == now_ms // step_ms:
                tier[-1] = (now_ms, data)
            else:
                tier.append((now_ms, data))

    def samples(self) -> list[tuple[int, bytes]]:
        """Returns (time, sample), the oldest first."""
        return sorted(dict(item for tier in self._tiers for item in tier).items())


class Series(NamedTuple):
    """Numbers of one object over time."""

    track: Track
    numbers: Numbers

    def rates(self, now_ms: int, *, falls: bool) -> dict[str, float]:
        """Returns the rates per second. A counter that fell began anew; `falls`: the numbers are no
        counters."""
        track = self.track
        took_ms = track.stamp_ms - track.before_ms
        if now_ms - track.stamp_ms > FRESH_STEPS * track.step_ms or took_ms <= 0:
            return {}
        before = self.numbers(track.before)
        return {
            name: (value - before[name] if falls else max(0.0, value - before[name]))
            * 1000
            / took_ms
            for name, value in self.numbers(track.data).items()
            if name in before
        }

    def samples(self) -> list[tuple[int, Mapping[str, float]]]:
        """Returns (time, numbers) of the history, the oldest first."""
        history = self.track.history
        found = history.samples() if history is not None else []
        return [(at_ms, self.numbers(data)) for at_ms, data in found]
