"""Trace of a run: a rolling hash of all that happened, and the last lines in full."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable

TAIL_LINES = 400


class Trace:
    """Collects lines. `digest` is equal for equal runs.

    Args:
        now_us: the simulated time.
        sink: called with every line as well (printing a run while it happens).
    """

    def __init__(
        self, now_us: Callable[[], int], sink: Callable[[str], None] | None = None
    ) -> None:
        self._now_us = now_us
        self._sink = sink
        self.digest = 0
        self.lines = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.faults: Counter[str] = Counter()

    def add(self, where: str, text: str) -> None:
        """One line: where (node, client, network …) and what."""
        line = f"{self._now_us() / 1e6:12.6f} {where:<8} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.lines += 1
        self.tail.append(line)
        if self._sink is not None:
            self._sink(line)

    def fault(self, kind: str, where: str, text: str = "") -> None:
        """A fault was injected: counted by kind."""
        self.faults[kind] += 1
        self.add(where, f"FAULT {kind} {text}".rstrip())
