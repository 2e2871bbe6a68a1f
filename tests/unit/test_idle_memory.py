"""A node gives memory back once when its work has ended."""

from __future__ import annotations

import pytest

from convoymq import idle_memory
from convoymq.idle_memory import REST_LOOKS, IdleMemory


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(idle_memory, "trim_malloc", lambda: done.append("heap"))
    monkeypatch.setattr(idle_memory, "release_code", lambda: done.append("code"))
    return done


def test_nothing_is_given_back_while_there_is_work(released: list[str]) -> None:
    memory = IdleMemory()
    for activity in range(10 * REST_LOOKS):
        memory.watch(activity)
    assert released == []


def test_memory_is_given_back_once_for_each_rest(released: list[str]) -> None:
    memory = IdleMemory()
    for _ in range(REST_LOOKS):
        memory.watch(7)
    assert released == []
    memory.watch(7)
    assert released == ["heap", "code"]
    for _ in range(10 * REST_LOOKS):
        memory.watch(7)
    assert released == ["heap", "code"]
    for _ in range(REST_LOOKS + 1):
        memory.watch(8)
    assert released == ["heap", "code"] * 2
