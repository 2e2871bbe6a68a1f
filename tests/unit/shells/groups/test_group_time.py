"""The time of a group's entries, over clocks that jump."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from convoymq.shells.groups.group_time import GroupTime

HOUR_MS = 3_600_000


class Clock:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.wall = 1_000 * HOUR_MS
        self.passed = 0

    def now_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> int:
        return self.passed

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        raise NotImplementedError

    def random(self) -> float:
        raise NotImplementedError

    def go_on(self, ms: int) -> None:
        self.wall += ms
        self.passed += ms


def test_it_is_the_wall_clock_when_that_goes_right() -> None:
    clock = Clock()
    time = GroupTime(clock)
    for ms in (0, 1, 999, HOUR_MS):
        clock.go_on(ms)
        assert time.now_ms() == clock.wall
        assert time.delay_ms(clock.wall + 500) == 500
        assert time.delay_ms(clock.wall - 500) == 0


def test_a_clock_that_is_set_back_slows_time_down_until_it_has_caught_up() -> None:
    clock = Clock()
    time = GroupTime(clock)
    start = time.now_ms()
    clock.wall -= HOUR_MS
    for ms in range(1, 1001):
        clock.go_on(1)
        assert time.now_ms() == start + ms // 2
    assert time.delay_ms(start + 1_500) == 2_000
    clock.go_on(2_000)
    assert time.now_ms() == start + 1_500
    clock.go_on(2 * HOUR_MS)
    assert time.now_ms() == clock.wall


def test_a_log_that_is_ahead_counts_as_a_clock_that_was_set_back() -> None:
    clock = Clock()
    time = GroupTime(clock)
    ahead = clock.wall + HOUR_MS
    time.heard(ahead)
    time.heard(ahead - 1)
    clock.go_on(100)
    assert time.now_ms() == ahead + 50


@given(
    st.lists(
        st.tuples(st.integers(0, 5_000), st.integers(-20_000, 20_000), st.booleans()), max_size=40
    )
)
def test_it_never_falls_and_never_stands_still(steps: list[tuple[int, int, bool]]) -> None:
    clock = Clock()
    time = GroupTime(clock)
    last = time.now_ms()
    for passed, jump, looked in steps:
        clock.go_on(passed)
        clock.wall += jump
        if looked:
            # An entry tells the time, whatever this node would have said.
            time.heard(clock.wall + jump)
        now = time.now_ms()
        assert now >= max(last if looked else last + passed // 2, clock.wall)
        delay = time.delay_ms(now + 1_000)
        assert 1_000 <= delay <= 2_000
        last = now
    clock.go_on(10_000)
    assert time.now_ms() >= last + 5_000
