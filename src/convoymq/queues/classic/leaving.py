"""Messages that have left a classic queue, until the shell has published them to the dead-letter
exchange (ADR 0055)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from convoymq.messages.deaths import OVER_LENGTH
from convoymq.queues.classic.runs import Run
from convoymq.queues.dead_letter_publisher import AT_MOST_ONCE_NAME, DISABLED_NAME

RUNS_MAX = 100_000
BYTES_MAX = 64 << 20
"""A queue whose targets cannot keep up has at most so much waiting because it was too long: what
comes beyond is lost. What is rejected or expires was in the queue, and needs no more room here."""


_NOTHING: deque[tuple[Run, str]] = deque()
"""Runs of the queues that nothing leaves."""


class Leaving:
    """Runs with their reasons, oldest first, and the counts of all that left."""

    __slots__ = ("bytes", "count", "left", "lost", "runs")

    def __init__(self) -> None:
        self.runs = _NOTHING
        self.count = 0
        """Messages that wait."""
        self.bytes = 0
        self.left: Counter[tuple[str, str]] = Counter()
        """(strategy, reason) -> messages that left, whatever became of them."""
        self.lost = 0
        """Messages for which there was no room, since the shell last looked."""

    def add(self, run: Run, reason: str, *, dead_letters: bool) -> bool:
        """Counts a run that is in no other place any more; whether it waits here. If not, it is to
        be forgotten. `dead_letters`: the queue has a dead-letter exchange."""
        self.left[AT_MOST_ONCE_NAME if dead_letters else DISABLED_NAME, reason] += run.count
        if not dead_letters:
            return False
        if reason == OVER_LENGTH and (len(self.runs) >= RUNS_MAX or self.bytes >= BYTES_MAX):
            self.lost += run.count
            return False
        if self.runs is _NOTHING:
            self.runs = deque()
        self.runs.append((run, reason))
        self.count += run.count
        self.bytes += run.body_bytes()
        return True

    def take(self, limit: int) -> tuple[Run, str]:
        """Returns the oldest run, at most `limit` messages of it, and why it left. The caller tells
        the machine to forget them when it has published them."""
        assert limit > 0
        run, reason = self.runs[0]
        if run.count <= limit:
            self.runs.popleft()
        else:
            self.runs[0] = (run.cut(limit, run.count - limit), reason)
            run = run.cut(0, limit)
        self.count -= run.count
        self.bytes = self.bytes - run.body_bytes() if self.runs else 0
        return run, reason

    def __iter__(self) -> Iterator[Run]:
        return (run for run, _ in self.runs)
