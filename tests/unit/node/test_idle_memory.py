"""A node gives memory back when its work has ended, and seldom while there is any."""

from __future__ import annotations

import pytest

from convoymq.node import idle_memory
from convoymq.node.idle_memory import REST_LOOKS, WORK_LOOKS, WORK_LOOKS_EVERY, IdleMemory


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(idle_memory, "trim_malloc", lambda: done.append("heap"))
    monkeypatch.setattr(idle_memory, "release_code", lambda: done.append("code"))
    return done


def test_while_there_is_work_memory_is_given_back_seldom(released: list[str]) -> None:
    memory = IdleMemory()
    looks = []
    for look in range(1, 2 * WORK_LOOKS_EVERY + WORK_LOOKS + 1):
        memory.watch(look)
        if released:
            looks.append(look)
            released.clear()
    assert looks == [WORK_LOOKS + k * WORK_LOOKS_EVERY for k in range(3)]


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
