from __future__ import annotations

import asyncio

import pytest

from convoymq.rocketmq.special.polls import ANY_QUEUE, Polls

pytestmark = pytest.mark.asyncio


async def waiting(polls: Polls, *places: tuple[str, str, int]) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(polls.wait(*place, 60)) for place in places]
    await asyncio.sleep(0)
    return tasks


async def ended(tasks: list[asyncio.Task[bool]]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_a_message_wakes_the_first_of_each_kind() -> None:
    polls = Polls(10, 10)
    tasks = await waiting(
        polls, ("t", "g", ANY_QUEUE), ("t", "g", ANY_QUEUE), ("t", "g", 1), ("t", "h", ANY_QUEUE)
    )
    assert polls.groups("t") == ["g", "h"]
    polls.wake("t", "g", 1)
    assert await ended(tasks) == [True, False, True, False]
    polls.wake_all()
    assert await ended(tasks) == [True] * 4
    assert polls.count == 0
    assert polls.groups("t") == []


async def test_a_message_that_came_back_wakes_a_pop_from_any_queue() -> None:
    polls = Polls(10, 10)
    tasks = await waiting(polls, ("t", "g", 3), ("t", "g", 5))
    polls.wake_any("t", "g")
    polls.wake_any("t", "nobody")
    assert await ended(tasks) == [True, False]
    polls.wake_any("t", "g")
    assert await ended(tasks) == [True, True]


async def test_waits_are_bounded() -> None:
    polls = Polls(2, 3)
    tasks = await waiting(polls, ("t", "g", 0), ("t", "g", 0), ("t", "h", 0))
    assert polls.is_full("t", "g", 0)
    assert polls.is_full("u", "g", 0)
    polls.wake("t", "h", 0)
    await ended(tasks)
    assert not polls.is_full("u", "g", 0)
    assert polls.is_full("t", "g", 0)
    assert not await polls.wait("u", "g", 0, 0.01)
    polls.wake_all()
    await ended(tasks)
