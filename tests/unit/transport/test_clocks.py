"""Clocks of this machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.transport.clocks import until_beat


@given(st.floats(0, 1e6), st.sampled_from((0.1, 0.25, 1.0)))
def test_timers_of_a_period_go_off_at_its_multiples(now_s: float, period_s: float) -> None:
    delay = until_beat(now_s, period_s)
    assert period_s / 2 <= delay <= 1.5 * period_s + 1e-9
    beats = (now_s + delay) / period_s
    assert beats == pytest.approx(round(beats), abs=1e-6)


def test_a_timer_that_went_off_early_waits_for_the_next_multiple() -> None:
    assert until_beat(0.9996, 0.1) == pytest.approx(0.1004)
    assert until_beat(1.0004, 0.1) == pytest.approx(0.0996)
