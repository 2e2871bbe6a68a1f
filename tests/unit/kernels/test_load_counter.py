"""Counters of load by logical partition, against naive twins."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.load_counter import HOT_MAX, KEY_BYTES_MAX, KEY_SLOTS, LoadCounter
from convoymq.topics.rules.hashing import logical_partition
from tests.unit.kernels.records import record_of

LOGICAL = 16


def command_of(records: list[bytes]) -> tuple[bytes, int]:
    """A batch with one ENQUEUE, and where that begins."""
    target = batch.PublishTarget(batch.CommandBuilder(), 1 << 56, None)
    for number, each in enumerate(records):
        target.publish([each], len(each), number + 1)
    target.builder.discard_unsent()
    (command,) = target.applied(target.seq)
    data = command.chunk.data
    assert data is not None
    return data, command.offset


def floats(packed: bytes) -> list[float]:
    return list(array("f", packed))


class Twin:
    """What a counter of a range knows, as plainly as it can be said."""

    def __init__(self, lo: int, hi: int, seed: int) -> None:
        self.lo, self.hi, self.seed = lo, hi, seed
        self.messages = self.bytes = 0
        self.by_lp: dict[int, list[float]] = {lp: [0.0, 0.0] for lp in range(lo, hi)}
        self.keys: dict[int, Counter[bytes]] = {}

    def count(self, records: list[tuple[bytes, bytes]]) -> None:
        for key, record in records:
            self.messages += 1
            self.bytes += len(record)
            lp = logical_partition(key, LOGICAL, self.seed)
            if lp in self.by_lp:
                self.by_lp[lp][0] += 1
                self.by_lp[lp][1] += len(record)
            if lp in self.keys:
                self.keys[lp][key] += 1

    def fade(self, factor: float) -> None:
        self.by_lp = {lp: [each * factor for each in both] for lp, both in self.by_lp.items()}


STEPS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 30), min_size=1, max_size=20),
        st.floats(0.25, 1.0),
        st.frozensets(st.integers(0, LOGICAL - 1), max_size=3),
    ),
    max_size=12,
)


@given(lo=st.integers(0, 8), width=st.integers(1, 8), seed=st.integers(0, 3), steps=STEPS)
def test_it_counts_as_the_naive_model_does(
    lo: int, width: int, seed: int, steps: list[list[int] | float | frozenset[int]]
) -> None:
    """Keys beyond the slots are in a test of their own."""
    counter, twin = LoadCounter(lo, lo + width, LOGICAL, seed), Twin(lo, lo + width, seed)
    for step in steps:
        if isinstance(step, float):
            counter.fade(step)
            twin.fade(step)
        elif isinstance(step, frozenset):
            counter.watch(step)
            if set(step) != twin.keys.keys():
                twin.keys = {lp: Counter() for lp in step}
        else:
            keys = [f"k{number}".encode() for number in step]
            made = [(key, record_of("t", key.decode(), b"x" * len(step))) for key in keys]
            data, command = command_of([record for _, record in made])
            counter.count(data, command, 1, len(made) - 1)
            counter.count(data, command, 0, 1)
            twin.count(made)
    assert (counter.messages, counter.size) == (twin.messages, twin.bytes)
    messages, sizes = counter.loads()
    assert floats(messages) == pytest.approx([both[0] for both in twin.by_lp.values()])
    assert floats(sizes) == pytest.approx([both[1] for both in twin.by_lp.values()], rel=1e-5)
    inside = {lp: keys for lp, keys in twin.keys.items() if lp in twin.by_lp}
    found = {lp: dict(rows) for lp, rows in counter.top_keys().items() if lp in inside}
    assert found == {lp: dict(keys) for lp, keys in inside.items()}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=300))
def test_the_largest_keys_have_a_place_and_no_count_is_too_small(numbers: list[int]) -> None:
    counter = LoadCounter(0, 1, 1, 0)
    counter.watch([0])
    true = Counter(f"k{number}".encode() for number in numbers)
    for number in numbers:
        data, command = command_of([record_of("t", f"k{number}", b"")])
        counter.count(data, command, 0, 1)
    (rows,) = counter.top_keys().values()
    assert len(rows) == min(KEY_SLOTS, len(true))
    assert [count for _, count in rows] == sorted((count for _, count in rows), reverse=True)
    assert all(count >= true[key] for key, count in rows)
    assert sum(count for _, count in rows) == len(numbers)
    kept = {key for key, _ in rows}
    # What comes more often than in one of sixteen messages has a place.
    assert {key for key, count in true.items() if count > len(numbers) / KEY_SLOTS} <= kept


def test_of_a_long_key_the_beginning_is_kept() -> None:
    counter = LoadCounter(0, 1, 1, 0)
    counter.watch([0])
    keys = ["a" * 200 + end for end in ("x", "y")] + ["a" * 64]
    data, command = command_of([record_of("t", key, b"") for key in keys])
    counter.count(data, command, 0, 3)
    assert counter.top_keys() == {0: [(b"a" * KEY_BYTES_MAX, 1)] * 3}


def test_so_many_logical_partitions_are_watched_and_no_more() -> None:
    counter = LoadCounter(0, 20, 20, 0)
    counter.watch(range(20))
    assert counter.hot == list(range(HOT_MAX))
    counter.watch([19])
    assert counter.top_keys() == {19: []}
    counter.watch([])
    assert counter.top_keys() == {}


def test_what_is_no_range_or_no_command_is_refused() -> None:
    for lo, hi, logical in ((0, 0, 1), (3, 2, 8), (0, 65_537, 65_537), (-1, 2, 8), (0, 1, 0)):
        with pytest.raises((ValueError, OverflowError)):
            LoadCounter(lo, hi, logical, 0)
    counter = LoadCounter(0, 1, 1, 0)
    data, command = command_of([record_of("t", "k", b"")])
    with pytest.raises(ValueError):
        counter.count(data, command, 0, 2)
    with pytest.raises(ValueError):
        counter.fade(1.5)
