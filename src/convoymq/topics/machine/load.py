"""Load of a partition, as its leader measures it while somebody asks (section 13.1).

Counting begins with the first question and ends when none came for a while: a topic that does not
scale by itself pays nothing. Messages are counted by `kernels.load_counter`; here its totals are
remembered a few times a unit, so that means over 2, 5, 10 and 20 units are differences of totals.
The weights of logical partitions fade with a time constant of five units.

Memory: SAMPLES_MAX totals, each with a number per group, and the counter's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from convoymq.kernels.load_counter import LoadCounter
from convoymq.topics.machine.group_machine import FIRST_OFFSET, PartitionGroupMachine
from convoymq.topics.machine.reads import messages_end

WINDOWS = (2, 5, 10, 20)
"""Units."""
SAMPLES_A_UNIT = 4
SAMPLES_MAX = WINDOWS[-1] * SAMPLES_A_UNIT + 2
FADE_UNITS = 5.0
DRAIN_UNITS = 5
IDLE_UNITS = 5
IDLE_MS_MIN = 10_000
"""Shortest time without a question after which counting ends."""
Means = tuple[float, float, float, float]
"""Per second, over the last 2, 5, 10 and 20 units."""


class LoadQuestion(NamedTuple):
    """Question for the load of a partition."""

    unit_ms: int
    logical: int
    """Logical partitions of the topic."""
    seed: int
    """Of the hash of its keys."""
    with_weights: bool = False
    hot: list[int] = []  # noqa: RUF012 - the default of a tuple's field; nobody changes it
    """Logical partitions whose largest keys are asked for."""


class GroupLag(NamedTuple):
    """Lag of a group in a partition."""

    messages: int
    seconds: float
    """Age of the first message that is not acknowledged, as near as an index range says it."""
    drain_rate: float
    """Messages per second that its owner consumed over 5 units; below 0: not known, because it had
    not enough to do all the time."""


class LoadReport(NamedTuple):
    """Answer to a question."""

    known_ms: int
    """Time over which it was measured."""
    byte_rates: Means
    message_rates: Means
    is_replicated: bool
    """All replicas are up to date."""
    groups: dict[str, GroupLag]
    lp_messages: bytes = b""
    """By logical partition of the range, floats of 4 bytes; empty when not asked for."""
    lp_bytes: bytes = b""
    top_keys: dict[int, list[tuple[bytes, int]]] = {}  # noqa: RUF012 - as above
    """By logical partition, its largest keys and about how many messages each had."""


class _Sample(NamedTuple):
    time_ms: int
    messages: int
    bytes: int
    acked: Mapping[str, int]
    behind_ms: Mapping[str, float]


class LoadMeter:
    """See the module text. One for a replica that leads, while somebody asks."""

    def __init__(
        self, machine: PartitionGroupMachine, logical: int, seed: int, now_ms: int
    ) -> None:
        state = machine.state
        self.counter = LoadCounter(state.lo, state.hi, logical, seed)
        self.machine = machine
        self.asked_ms = now_ms
        self.unit_ms = 0
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._samples.append(self._sample(now_ms))
        machine.load = self.counter

    def close(self) -> None:
        """Counts no more."""
        if self.machine.load is self.counter:
            self.machine.load = None

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether nobody asked for a while."""
        return now_ms - self.asked_ms > max(IDLE_MS_MIN, IDLE_UNITS * self.unit_ms)

    def report(self, question: LoadQuestion, now_ms: int, *, is_replicated: bool) -> LoadReport:
        """Returns the load at a time, and takes a sample when one is due."""
        self.asked_ms, self.unit_ms = now_ms, question.unit_ms
        now = self._sample(now_ms)
        since_ms = now_ms - self._samples[-1].time_ms
        if since_ms * SAMPLES_A_UNIT >= self.unit_ms:
            self.counter.fade(math.exp(-since_ms / (FADE_UNITS * self.unit_ms)))
            self._samples.append(now)
        self.counter.watch(question.hot)
        messages, sizes = self.counter.loads() if question.with_weights else (b"", b"")
        return LoadReport(
            now_ms - self._samples[0].time_ms,
            self._means(now, now.bytes, [each.bytes for each in self._samples]),
            self._means(now, now.messages, [each.messages for each in self._samples]),
            is_replicated,
            {
                name: GroupLag(self._lag(name), behind / 1000, self._drain_rate(name, now))
                for name, behind in now.behind_ms.items()
            },
            messages,
            sizes,
            self.counter.top_keys(),
        )

    # --- rates -----------------------------------------------------------------------------

    def _means(self, now: _Sample, total: int, totals: Iterable[int]) -> Means:
        times = [each.time_ms for each in self._samples]
        known = list(totals)
        two, five, ten, twenty = (
            mean_since(times, known, now.time_ms, total, units * self.unit_ms) for units in WINDOWS
        )
        return two, five, ten, twenty

    # --- groups ----------------------------------------------------------------------------

    def _sample(self, now_ms: int) -> _Sample:
        state = self.machine.state
        acked: dict[str, int] = {}
        behind: dict[str, float] = {}
        for name, own in state.groups.items():
            cursor = own.cursor
            acked[name] = cursor.watermark + sum(cursor.ends) - sum(cursor.starts)
            behind[name] = self._behind_ms(cursor.watermark, now_ms)
        return _Sample(now_ms, self.counter.messages, self.counter.size, acked, behind)

    def _lag(self, name: str) -> int:
        state = self.machine.state
        cursor = state.groups[name].cursor
        above = sum(cursor.ends) - sum(cursor.starts)
        return max(0, messages_end(state) - max(cursor.watermark, FIRST_OFFSET) - above)

    def _behind_ms(self, watermark: int, now_ms: int) -> float:
        machine = self.machine
        offset = max(watermark - FIRST_OFFSET, machine.first)
        if offset >= machine.next:
            return 0.0
        return max(0.0, now_ms - machine.chunks.times[machine.chunks.find(offset)])

    def _drain_rate(self, name: str, now: _Sample) -> float:
        """Returns what the owner consumes while it never waits for messages; -1: not known."""
        window_ms = DRAIN_UNITS * self.unit_ms
        within = [each for each in self._samples if now.time_ms - each.time_ms <= window_ms]
        if not within or now.time_ms - within[0].time_ms < window_ms // 2:
            return -1.0
        if any(each.behind_ms.get(name, 0.0) < self.unit_ms for each in (*within, now)):
            return -1.0
        acked = now.acked[name] - within[0].acked[name]
        return max(0, acked) * 1000 / (now.time_ms - within[0].time_ms)


def mean_since(
    times: list[int], totals: list[int], now_ms: int, total: int, window_ms: int
) -> float:
    """Returns a mean rate per second: over a window, or since the first time if that is later.
    Between two times the total is taken to have grown evenly."""
    begin_ms = max(now_ms - window_ms, times[0])
    if begin_ms >= now_ms:
        return 0.0
    times, totals = [*times, now_ms], [*totals, total]
    after = next(at for at, time_ms in enumerate(times) if time_ms >= begin_ms)
    before = float(totals[after])
    if times[after] > begin_ms:
        share = (times[after] - begin_ms) / (times[after] - times[after - 1])
        before -= (totals[after] - totals[after - 1]) * share
    return (total - before) * 1000 / (now_ms - begin_ms)
