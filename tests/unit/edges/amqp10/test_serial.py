"""Serial numbers wrap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.serial import ahead, following

NUMBERS = st.integers(0, (1 << 32) - 1)
STEPS = st.integers(0, (1 << 31) - 1)


@given(NUMBERS, STEPS)
def test_a_number_is_as_far_ahead_as_it_was_moved(number: int, step: int) -> None:
    moved = following(number, step)
    assert ahead(moved, number) == step
    assert ahead(number, moved) == -step


def test_numbers_wrap() -> None:
    assert following(0xFFFFFFFF, 1) == 0
    assert ahead(0, 0xFFFFFFFF) == 1
