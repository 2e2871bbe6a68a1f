"""Clocks of this machine."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.node.loop_clock import LoopClock
from convoymq.transport.clocks import until_beat, wall_and_boot_ms
from convoymq.transport.cluster_clock import ClusterClock

WALL_NS = 1_767_225_600_000_000_000
BOOT_NS = 5_000_000_000


class Machine:
    """Clocks of a machine whose scheduler has the process wait once, before a look at a clock."""

    def __init__(self, wait_before: int, wait_ms: int) -> None:
        self.passed_ns = 0
        self.looks = -1
        self.wait_before = wait_before
        self.wait_ms = wait_ms

    def _look(self) -> int:
        self.looks += 1
        if self.looks == self.wait_before:
            self.passed_ns += self.wait_ms * 1_000_000
        return self.passed_ns

    def wall_ns(self) -> int:
        return WALL_NS + self._look()

    def boot_ns(self, _clock: int = 0) -> int:
        return BOOT_NS + self._look()


@given(st.integers(0, 20), st.integers(1, 2000), st.booleans())
def test_a_node_that_waits_for_the_processor_keeps_its_clock(
    wait_before: int, wait_ms: int, linked: bool
) -> None:
    """Whichever two looks at clocks the wait comes between."""
    machine = Machine(wait_before, wait_ms)
    with closing(asyncio.new_event_loop()) as loop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", machine.wall_ns)
        patch.setattr(time, "monotonic_ns", machine.boot_ns)
        patch.setattr(time, "clock_gettime_ns", machine.boot_ns)
        clock = LoopClock(loop)
        if linked:
            clock.cluster = ClusterClock()
            clock.cluster.heard(2, WALL_NS // 1_000_000, BOOT_NS // 1_000_000)
        clock.settle()
        wall_ms, boot_ms = wall_and_boot_ms()
        machine.wait_before = -1
        assert clock.now_us() == machine.wall_ns() // 1000
        assert clock.now_ms() == machine.wall_ns() // 1_000_000
    assert wall_ms - boot_ms == (WALL_NS - BOOT_NS) // 1_000_000


@given(st.floats(0, 1e6), st.sampled_from((0.1, 0.25, 1.0)))
def test_timers_of_a_period_go_off_at_its_multiples(now_s: float, period_s: float) -> None:
    delay = until_beat(now_s, period_s)
    assert period_s / 2 <= delay <= 1.5 * period_s + 1e-9
    beats = (now_s + delay) / period_s
    assert beats == pytest.approx(round(beats), abs=1e-6)


def test_a_timer_that_went_off_early_waits_for_the_next_multiple() -> None:
    assert until_beat(0.9996, 0.1) == pytest.approx(0.1004)
    assert until_beat(1.0004, 0.1) == pytest.approx(0.0996)
