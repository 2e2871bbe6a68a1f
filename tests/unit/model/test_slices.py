"""Long loops let others have their turn."""

from __future__ import annotations

import asyncio

import pytest

from convoymq.model import slices


async def test_others_run_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_NS", 0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    assert [item async for item in slices.in_slices(range(50))] == list(range(50))
    task.cancel()
    assert turns >= 40


async def test_a_short_loop_takes_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_NS", 1 << 62)
    ran = False

    async def other() -> None:
        nonlocal ran
        ran = True

    task = asyncio.ensure_future(other())
    assert [item async for item in slices.in_slices("abc")] == ["a", "b", "c"]
    assert not ran
    await task
