"""Rates of a load over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.cli.perf.schedule import Schedule, steps_in

STEPS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), min_size=1, max_size=5)


def test_steps_follow_each_other_and_begin_again() -> None:
    schedule = Schedule(steps_in(["100:2", "0:1", "10:1"]))
    assert [schedule.due(each) for each in (0, 1, 2, 2.5, 3, 4, 5)] == [
        0, 100, 200, 200, 200, 210, 310,
    ]  # fmt: skip
    assert [schedule.at(each) for each in (0, 100, 199, 200, 205, 210)] == [0, 1, 1.99, 3, 3.5, 4]


@given(STEPS.filter(lambda steps: any(rate for rate, _ in steps)), st.integers(0, 10_000))
def test_a_message_is_due_when_it_says(steps: list[tuple[float, float]], message: int) -> None:
    schedule = Schedule(steps)
    assert schedule.due(schedule.at(message)) == pytest.approx(message, abs=1e-6)


@pytest.mark.parametrize("texts", [["0:1"], ["-1:1", "5:1"], ["5:0"], ["5"], ["x:1"], ["1:x"]])
def test_what_is_no_rate_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="rate"):
        Schedule(steps_in(texts))
