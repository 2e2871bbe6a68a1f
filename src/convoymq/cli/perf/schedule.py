"""Rates of a load over time."""

from __future__ import annotations

from collections.abc import Sequence


class Schedule:
    """Steps of (messages a second, seconds), one after the other and again from the first. Raises
    ValueError."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        if not steps or any(rate < 0 or seconds <= 0 for rate, seconds in steps):
            raise ValueError("a rate is at least 0 and lasts longer than 0 s")
        self._steps = tuple(steps)
        self._seconds = sum(seconds for _, seconds in steps)
        self._messages = sum(rate * seconds for rate, seconds in steps)
        if not self._messages:
            raise ValueError("one rate at least is more than 0")

    def due(self, elapsed_s: float) -> float:
        """Returns how many messages are due after so long."""
        rounds, left = divmod(elapsed_s, self._seconds)
        messages = rounds * self._messages
        for rate, seconds in self._steps:
            messages += rate * min(left, seconds)
            left -= seconds
            if left <= 0:
                break
        return messages

    def at(self, messages: float) -> float:
        """Returns the time at which so many messages have become due, in seconds."""
        rounds, left = divmod(messages, self._messages)
        elapsed_s = rounds * self._seconds
        for rate, seconds in self._steps:
            if left < rate * seconds:
                return elapsed_s + left / rate
            left -= rate * seconds
            elapsed_s += seconds
        return elapsed_s


def steps_in(texts: Sequence[str]) -> list[tuple[float, float]]:
    """Reads texts `RATE:SECONDS`. Raises ValueError."""
    steps = []
    for text in texts:
        rate, _, seconds = text.partition(":")
        try:
            steps.append((float(rate), float(seconds)))
        except ValueError:
            raise ValueError(f"--variable-rate takes RATE:SECONDS, not {text!r}") from None
    return steps
