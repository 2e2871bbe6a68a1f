"""Containment: who fails, who goes on, and what passes through."""

from __future__ import annotations

import pytest

from convoymq.model.errors import InvariantViolated
from convoymq.model.rounds import run_each


def test_the_others_go_on_when_one_member_fails() -> None:
    done: list[int] = []
    failed: list[tuple[int, str]] = []

    def step(member: int) -> None:
        if member == 2:
            raise KeyError(member)
        done.append(member)

    run_each((1, 2, 3), step, lambda member, error: failed.append((member, str(error))))
    assert done == [1, 3]
    assert failed == [(2, "2")]


def test_the_others_go_on_when_a_member_cannot_be_stopped() -> None:
    done: list[int] = []

    def step(member: int) -> None:
        if member < 3:
            raise KeyError(member)
        done.append(member)

    def fail(member: int, error: Exception) -> None:
        raise OSError(f"{member} goes on") from error

    with pytest.raises(OSError, match="2 goes on"):
        run_each((1, 2, 3), step, fail)
    assert done == [3]


@pytest.mark.parametrize("where", ["step", "fail"])
def test_a_violated_invariant_is_not_contained(where: str) -> None:
    def step(member: int) -> None:
        raise InvariantViolated("broken") if where == "step" else KeyError(member)

    def fail(member: int, error: Exception) -> None:
        raise InvariantViolated("broken")

    with pytest.raises(InvariantViolated):
        run_each((1, 2), step, fail)
