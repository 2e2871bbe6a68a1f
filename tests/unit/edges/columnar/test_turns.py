"""Turns of the loop and the budget of bytes: fair, bounded, safe against who gives up."""

from __future__ import annotations

import asyncio
import time

from convoymq.edges.columnar.turns import QUIET_FACTOR, Budget, Slice, Turns


async def test_there_is_one_turn_a_round_for_those_who_waited_longest() -> None:
    turns = Turns(0.001)
    seen: list[str] = []

    async def worker(name: str) -> None:
        for _ in range(3):
            await turns.turn()
            seen.append(name)

    rounds = 0

    def count() -> None:
        nonlocal rounds
        rounds += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    await asyncio.gather(worker("a"), worker("b"), worker("c"))
    assert seen == ["a", "b", "c"] * 3
    assert rounds >= len(seen), "others had a round each"


async def test_who_gives_up_waiting_does_not_stop_the_others() -> None:
    turns = Turns(0.001)
    first = asyncio.ensure_future(turns.turn())
    second = asyncio.ensure_future(turns.turn())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert turns.given == 1


async def test_a_slice_asks_for_a_turn_only_when_its_time_is_over() -> None:
    turns = Turns(60.0)
    slice_ = Slice(turns)
    for _ in range(100):
        await slice_.check()
    assert turns.given == 1
    turns = Turns(0.0)
    slice_ = Slice(turns)
    for _ in range(10):
        await slice_.check()
        while time.perf_counter() < slice_._until:
            pass
    assert turns.given == 10


async def test_turns_are_apart_while_others_are_active() -> None:
    count = 0
    turns = Turns(0.001, 60.0, lambda: count)
    for _ in range(3):
        await turns.turn()
    count = 1
    waiting = asyncio.ensure_future(turns.turn())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "it rests for a minute"
    waiting.cancel()


async def test_turns_are_longer_while_nobody_else_is_active() -> None:
    count = 0
    turns = Turns(0.001, 0.0, lambda: count)
    await turns.turn()
    assert turns.turn_s == 0.001 * QUIET_FACTOR
    assert not turns.others_active()
    count = 1
    assert turns.others_active()
    await turns.turn()
    assert turns.turn_s == 0.001


async def test_the_budget_serves_in_order_and_never_exceeds_its_limit() -> None:
    budget = Budget(100)
    assert await budget.take(60) == 60
    large = asyncio.ensure_future(budget.take(50))
    small = asyncio.ensure_future(budget.take(10))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done(), "it may not overtake"
    budget.give_back(60)
    assert await large == 50
    assert await small == 10
    assert budget.used == 60


async def test_more_than_the_whole_budget_counts_as_the_whole() -> None:
    budget = Budget(100)
    assert await budget.take(1000) == 100
    waiting = asyncio.ensure_future(budget.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give_back(100)
    assert await waiting == 1


async def test_a_wait_for_the_budget_that_is_given_up_costs_nothing() -> None:
    budget = Budget(100)
    await budget.take(100)
    first, second = (asyncio.ensure_future(budget.take(size)) for size in (80, 20))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    budget.give_back(100)
    assert await second == 20
    third = asyncio.ensure_future(budget.take(90))
    await asyncio.sleep(0)
    budget.give_back(20)
    # Served and cancelled in the same round.
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert budget.used == 0
