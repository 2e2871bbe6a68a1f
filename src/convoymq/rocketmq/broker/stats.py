"""Counts of messages, in the groups in which `mqadmin statsAll` asks for them. Without I/O.

A number is kept as totals at times: of each 10 s for the last minute, of each 10 min for the last
hour, of each hour for the last day.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
TOPIC_PUT_SIZE = "TOPIC_PUT_SIZE"
GROUP_GET_NUMS = "GROUP_GET_NUMS"
GROUP_GET_SIZE = "GROUP_GET_SIZE"
BROKER_PUT_NUMS = "BROKER_PUT_NUMS"
BROKER_GET_NUMS = "BROKER_GET_NUMS"
BROKER_PUT_SIZE = "BROKER_PUT_SIZE"
BROKER_GET_SIZE = "BROKER_GET_SIZE"

_SPANS = ((10_000, 7), (600_000, 7), (3_600_000, 25))
"""Time between two samples, and how many are kept."""
KEYS_MAX = 100_000


@dataclass(slots=True)
class Snapshot:
    """Count of a span of time."""

    sum: int = 0
    tps: float = 0.0


@dataclass(slots=True)
class _Count:
    total: int = 0
    samples: tuple[deque[tuple[int, int]], ...] = field(
        default_factory=lambda: tuple(deque(maxlen=length) for _, length in _SPANS)
    )


class Stats:
    """See the module text."""

    def __init__(self, now_ms: Callable[[], int], cluster: str) -> None:
        self._now_ms = now_ms
        self._cluster = cluster
        self._counts: dict[tuple[str, str], _Count] = {}
        self._sampled = [0] * len(_SPANS)

    def stored(self, topic: str, count: int, size: int) -> None:
        """Counts messages that were stored."""
        self._add(TOPIC_PUT_NUMS, topic, count)
        self._add(TOPIC_PUT_SIZE, topic, size)
        self._add(BROKER_PUT_NUMS, self._cluster, count)
        self._add(BROKER_PUT_SIZE, self._cluster, size)

    def pulled(self, group: str, topic: str, count: int, size: int) -> None:
        """Counts messages that were handed out."""
        key = f"{topic}@{group}"
        self._add(GROUP_GET_NUMS, key, count)
        self._add(GROUP_GET_SIZE, key, size)
        self._add(BROKER_GET_NUMS, self._cluster, count)
        self._add(BROKER_GET_SIZE, self._cluster, size)

    def _add(self, name: str, key: str, number: int) -> None:
        found = self._counts.get((name, key))
        if found is None:
            if len(self._counts) >= KEYS_MAX:
                return
            found = self._counts[(name, key)] = _Count()
            for samples in found.samples:
                samples.append((self._now_ms(), 0))
        found.total += number

    def tick(self) -> None:
        """Takes samples that are due."""
        now_ms = self._now_ms()
        for i, (step_ms, _) in enumerate(_SPANS):
            if now_ms - self._sampled[i] >= step_ms:
                self._sampled[i] = now_ms
                for count in self._counts.values():
                    count.samples[i].append((now_ms, count.total))

    def total(self, name: str, key: str) -> int:
        """Returns what was counted since the start."""
        found = self._counts.get((name, key))
        return 0 if found is None else found.total

    def totals(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yields all totals; callers may take their time."""
        for names, found in list(self._counts.items()):
            yield names, found.total

    def spans(self, name: str, key: str) -> tuple[Snapshot, ...] | None:
        """Returns the last minute, hour and day; None: nothing was ever counted."""
        found = self._counts.get((name, key))
        if found is None:
            return None
        return tuple(self._span(found, samples) for samples in found.samples)

    def _span(self, count: _Count, samples: deque[tuple[int, int]]) -> Snapshot:
        at_ms, total = samples[0]
        made = count.total - total
        return Snapshot(made, made * 1000 / max(self._now_ms() - at_ms, 1))

    def tps(self, name: str, key: str) -> float:
        """Returns messages per second of the last minute."""
        spans = self.spans(name, key)
        return 0.0 if spans is None else spans[0].tps
