"""A bridge that ends at any step, and begins again: a model of both sides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.bridge.pump import BridgeStopped, Item, Pump


class Crash(Exception):
    """The bridge is killed."""


class Faults:
    """Before and after every effect something may happen."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng = rng
        self._rate = rate

    def may(self) -> None:
        if self._rng.random() < self._rate:
            raise Crash if self._rng.random() < 0.5 else Unavailable("nobody answers")


class Log:
    """A queue that is read: what is done is remembered, all else is not."""

    def __init__(self, count: int, window: int, faults: Faults) -> None:
        self._items = [Item(Key("b", "t", 0, at), at) for at in range(count)]
        self._window = window
        self._faults = faults
        self.offset = 0
        self.dead: dict[Key, int] = {}

    async def next(self) -> Sequence[Item[int]]:
        self._faults.may()
        return self._items[self.offset : self.offset + self._window]

    async def done(self, items: Sequence[Item[int]]) -> None:
        self._faults.may()
        self.offset = items[-1].key.offset + 1
        self._faults.may()

    async def dead_letter(self, item: Item[int], reason: str) -> None:
        self._faults.may()
        self.dead[item.key] = item.message
        self._faults.may()


class Sequences:
    """A target that drops what is not above the last sequence, as quorum queues do."""

    def __init__(self, refused: set[int], faults: Faults, lanes: int = 1) -> None:
        self.stored: list[list[int]] = [[] for _ in range(lanes)]
        self._refused = refused
        self._faults = faults

    def lanes(self, items: Sequence[Item[int]]) -> Sequence[Sequence[Item[int]]]:
        count = len(self.stored)
        lanes = [[i for i in items if i.message % count == lane] for lane in range(count)]
        return [lane for lane in lanes if lane]

    async def store(self, items: Sequence[Item[int]]) -> tuple[int, str | None]:
        for at, item in enumerate(items):
            self._faults.may()
            await asyncio.sleep(0)
            if item.message in self._refused:
                return at, "too large"
            lane = self.stored[item.message % len(self.stored)]
            if not lane or lane[-1] < item.message:
                lane.append(item.message)
            self._faults.may()
        return len(items), None


def pump(source: Log, sink: Sequences, *, dead_letters: bool = True) -> Pump[int]:
    return Pump("bridge", source, sink, dead_letters=dead_letters, retry_ms=0)


@pytest.mark.parametrize("seed", range(40))
def test_each_message_is_moved_once_and_in_order_through_any_crash(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(rng, rng.choice([0.0, 0.02, 0.05]))
    count = 40
    refused = set(rng.sample(range(count), rng.choice([0, 3, 10])))
    source = Log(count, rng.choice([1, 4, 10]), faults)
    sink = Sequences(refused, faults, rng.choice([1, 3]))

    async def life() -> None:
        running = pump(source, sink)
        while source.offset < count:
            await running.step()

    while source.offset < count:
        try:
            asyncio.run(life())
        except Crash:
            continue
    lanes = len(sink.stored)
    for lane, stored in enumerate(sink.stored):
        assert stored == [x for x in range(count) if x % lanes == lane and x not in refused]
    assert set(source.dead.values()) == refused


@pytest.mark.provokes("rocketmq.bridge_waits", "rocketmq.bridge_goes_on")
def test_what_cannot_be_reached_is_tried_again() -> None:
    source, sink = (
        Log(3, 2, Faults(random.Random(0), 0.0)),
        Sequences(set(), Faults(random.Random(0), 0.0)),
    )
    failures = [Unavailable("nobody answers")] * 3
    store = sink.store

    async def failing(items: Sequence[Item[int]]) -> tuple[int, str | None]:
        if failures:
            raise failures.pop()
        return await store(items)

    sink.store = failing  # type: ignore[method-assign]
    asyncio.run(pump(source, sink).step())
    assert (sink.stored, source.offset) == ([[0, 1]], 2)


@pytest.mark.provokes("rocketmq.bridge_refused")
def test_a_refused_message_ends_the_bridge_where_nothing_keeps_it() -> None:
    quiet = Faults(random.Random(0), 0.0)
    source, sink = Log(3, 3, quiet), Sequences({1}, quiet)
    with pytest.raises(BridgeStopped, match="b:t:0:1 is refused: too large"):
        asyncio.run(pump(source, sink, dead_letters=False).step())
    assert (sink.stored, source.offset, source.dead) == ([[0]], 0, {})
