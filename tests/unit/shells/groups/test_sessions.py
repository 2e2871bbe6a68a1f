"""Session numbers never meet a live one, also after millions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import ResourceExhausted
from convoymq.shells.groups.sessions import SessionNumbers

BASE = 3 << 56 | 9 << 24


def test_numbers_carry_node_and_incarnation() -> None:
    numbers = SessionNumbers(3, 9, list)
    assert [numbers(), numbers()] == [BASE | 1, BASE | 2]


@given(st.lists(st.booleans(), max_size=400), st.randoms(use_true_random=False))
def test_a_live_session_is_never_numbered_again(steps: list[bool], random: object) -> None:
    live: list[int] = []
    numbers = SessionNumbers(3, 9, lambda: live, counter_max=16)
    for opens in steps:
        if opens and len(live) < 16:
            number = numbers()
            assert number not in live
            assert BASE < number <= BASE | 16
            live.append(number)
        elif live:
            live.remove(random.choice(live))  # type: ignore[attr-defined]


def test_none_left_is_an_error_until_one_ends() -> None:
    live = [BASE | n for n in range(1, 5)]
    numbers = SessionNumbers(3, 9, lambda: live, counter_max=4)
    for _ in range(4):
        numbers()
    with pytest.raises(ResourceExhausted, match="all session numbers"):
        numbers()
    live.remove(BASE | 2)
    assert numbers() == BASE | 2
