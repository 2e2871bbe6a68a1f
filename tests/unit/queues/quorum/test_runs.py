"""Packed runs against lists of messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.queues.quorum.runs import SPARE_WORDS_MAX, CheckedOut, Fifo, Run

Message = tuple[int, int, int, int, int]
"""(index, offset, record, acquired, delivered)"""


def spread(run: Run) -> list[Message]:
    index, offset, first, count, _, acquired, delivered = run
    return [(index, offset, first + k, acquired, delivered) for k in range(count)]


pushes = st.tuples(
    st.just("push"),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(1, 400),
    st.integers(0, 1000),
    st.integers(0, 2),
    st.integers(0, 2),
)


@settings(deadline=None)
@given(
    st.booleans(),
    st.lists(st.one_of(pushes, st.tuples(st.just("take"), st.integers(1, 500))), max_size=80),
)
def test_fifo_equals_a_list(counted: bool, steps: list[tuple[object, ...]]) -> None:
    fifo = Fifo(counted)
    naive: list[Message] = []
    size = 0
    for step in steps:
        if step[0] == "push":
            index, offset, first, count, amount, acquired, delivered = step[1:]
            if not counted:
                acquired = delivered = 0
            run = (index, offset, first, count, amount, acquired, delivered)
            fifo.push(*run)  # type: ignore[arg-type]
            naive += spread(run)  # type: ignore[arg-type]
            size += amount  # type: ignore[operator]
        elif naive:
            taken = fifo.take(step[1])  # type: ignore[arg-type]
            size -= taken[4]
            assert spread(taken) == naive[: taken[3]]
            assert 0 < taken[3] <= step[1]  # type: ignore[operator]
            del naive[: taken[3]]
        assert [m for run in fifo.runs() for m in spread(run)] == naive
        assert (fifo.messages, fifo.size) == (len(naive), size)
        copy = Fifo(counted)
        copy.unpack(fifo.pack())
        assert copy.runs() == fifo.runs()
        assert (copy.messages, copy.size) == (fifo.messages, fifo.size)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 100)), max_size=40),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=60),
)
def test_checked_out_equals_a_dict(
    adds: list[tuple[int, int, int]], removes: list[tuple[int, int]]
) -> None:
    held = CheckedOut()
    naive: dict[int, Message] = {}
    next_id = 0
    for i, (skip, count, size) in enumerate(adds):
        next_id += skip
        run = (i // 3, 0, next_id, count, size, 0, 0)
        held.add(next_id, *run)
        naive.update({next_id + k: m for k, m in enumerate(spread(run))})
        next_id += count
    total = held.size
    assert total == sum(size for _, _, size in adds)
    for first, more in removes:
        removed = held.remove(first, first + more)
        wanted = [naive.pop(i) for i in range(first, first + more + 1) if i in naive]
        assert [m for run in removed for m in spread(run)] == wanted
        total -= sum(run[4] for run in removed)
        assert (held.messages, held.size) == (len(naive), total)
        assert {first + k: m for first, run in held.held() for k, m in enumerate(spread(run))} == (
            naive
        )
        copy = CheckedOut()
        copy.unpack(held.pack())
        assert copy.held() == held.held()
    assert sum(run[4] for run in held.remove_all()) == total


def test_returned_neighbours_join_only_with_equal_counts() -> None:
    fifo = Fifo(True)
    fifo.push(1, 0, 0, 1, 5, 1, 0)
    fifo.push(1, 0, 1, 1, 5, 1, 0)
    fifo.push(1, 0, 2, 1, 5, 2, 0)
    fifo.push(2, 0, 3, 1, 5, 2, 0)
    assert fifo.runs() == [(1, 0, 0, 2, 10, 1, 0), (1, 0, 2, 1, 5, 2, 0), (2, 0, 3, 1, 5, 2, 0)]


def test_words_are_given_back_after_a_drain() -> None:
    fifo = Fifo(False)
    for index in range(10_000):
        fifo.push(index, 48, 0, 1, 1, 0, 0)
    assert fifo.memory_bytes() <= 10_000 * 24 * 9 / 8 + 1000
    while fifo.messages:
        fifo.take(7)
    assert fifo.memory_bytes() <= 8 * SPARE_WORDS_MAX


def test_damaged_packs_are_refused() -> None:
    for damaged in (b"1234567", bytes(23), bytes(24)):
        with pytest.raises(ValueError, match="packed runs"):
            Fifo(False).unpack(damaged)
    with pytest.raises(ValueError, match="packed runs"):
        CheckedOut().unpack(bytes(40))
