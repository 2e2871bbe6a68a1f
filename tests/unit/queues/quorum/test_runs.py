"""Packed runs against lists of messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.queues.quorum.runs import SPARE_WORDS_MAX, CheckedOut, Fifo, Run

Message = tuple[int, int, int, int, int, int]
"""(index, offset, record, acquired, delivered, mark)"""


def spread(run: Run) -> list[Message]:
    index, offset, first, count, _, acquired, delivered, mark = run
    return [(index, offset, first + k, acquired, delivered, mark) for k in range(count)]


pushes = st.tuples(
    st.just("push"),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(1, 400),
    st.integers(0, 1000),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from((0, 0, 0, 1, 7 << 40)),
)


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
            index, offset, first, count, amount, acquired, delivered, mark = step[1:]
            if not counted:
                acquired = delivered = 0
            run = (index, offset, first, count, amount, acquired, delivered, mark)
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
        assert fifo.head_mark() == (naive[0][5] if naive else 0)
        copy = Fifo(counted)
        copy.unpack(fifo.pack())
        assert copy.pack() == fifo.pack()
        assert copy.runs() == fifo.runs()
        assert (copy.messages, copy.size) == (fifo.messages, fifo.size)


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
        run = (i // 3, 0, next_id, count, size, 0, 0, 1 << 45 if i % 5 == 4 else 0)
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
        assert copy.pack() == held.pack()
        assert copy.held() == held.held()
    assert sum(run[4] for run in held.remove_all()) == total


def test_returned_neighbours_join_only_with_equal_counts() -> None:
    fifo = Fifo(True)
    fifo.push(1, 0, 0, 1, 5, 1, 0)
    fifo.push(1, 0, 1, 1, 5, 1, 0)
    fifo.push(1, 0, 2, 1, 5, 2, 0)
    fifo.push(2, 0, 3, 1, 5, 2, 0)
    fifo.push(2, 0, 4, 1, 5, 2, 0, 9)
    fifo.push(2, 0, 5, 1, 5, 2, 0, 9)
    assert fifo.runs() == [
        (1, 0, 0, 2, 10, 1, 0, 0),
        (1, 0, 2, 1, 5, 2, 0, 0),
        (2, 0, 3, 1, 5, 2, 0, 0),
        (2, 0, 4, 2, 10, 2, 0, 9),
    ]


def test_marks_cost_a_word_until_the_queue_is_empty() -> None:
    fifo = Fifo(False)
    for index in range(1_000):
        fifo.push(index, 48, 0, 1, 1, 0, 0)
    assert len(fifo.pack()) == 24_000
    fifo.push(1_000, 48, 0, 1, 1, 0, 0, 5)
    assert len(fifo.pack()) == 1_001 * 32 + 8
    assert fifo.memory_bytes() <= 1_001 * 32 * 9 / 8 + 1_000
    while fifo.messages:
        fifo.take(7)
    fifo.push(1, 48, 0, 1, 1, 0, 0)
    assert len(fifo.pack()) == 24


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


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 99)), max_size=30),
    st.tuples(st.integers(0, 70), st.integers(0, 3), st.integers(0, 12)),
    st.integers(1, 40),
    st.integers(1, 12),
)
def test_runs_from_a_place_hold_what_lies_there_and_behind(
    pushes: list[tuple[int, int, int]], place: tuple[int, int, int], limit: int, runs_max: int
) -> None:
    fifo = Fifo(False)
    index, offset, record = 1, 0, 0
    for step, count, size in pushes:
        if step == 1:
            offset, record = offset + 1, 0
        elif step == 2:
            index, offset, record = index + 1, 0, 0
        fifo.push(index, offset, record, count, size, 0, 0)
        record += count + 1
    listed = fifo.runs_from(*place, limit, runs_max)
    behind = [run for run in fifo.runs() if (run[0], run[1], run[2] + run[3] - 1) >= place]
    assert listed == behind[: len(listed)]
    wanted = [m for run in behind for m in spread(run) if m[:3] >= place]
    got = [m for run in listed for m in spread(run) if m[:3] >= place]
    assert got == wanted[: len(got)]
    assert len(got) >= min(limit, len(wanted)) or len(listed) == runs_max


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 3)), max_size=30),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 12),
)
def test_what_lies_between_ids_is_cut_to_them(
    adds: list[tuple[int, int, int]], first: int, more: int, runs_max: int
) -> None:
    held = CheckedOut()
    by_id: dict[int, Message] = {}
    sizes = 0
    message_id = 0
    for i, (count, size, gap) in enumerate(adds):
        message_id += gap
        run = (i, 0, 5, count, size, 1, 0, i % 2)
        held.add(message_id, *run)
        by_id |= {message_id + k: m for k, m in enumerate(spread(run))}
        message_id += count
        sizes += size
    found = held.between(first, first + more, runs_max)
    got = {start + k: m for start, run in found for k, m in enumerate(spread(run))}
    wanted = {i: m for i, m in by_id.items() if first <= i < first + more}
    assert got == wanted or (len(found) == runs_max and got.items() <= wanted.items())
    if len(found) < runs_max:
        everything = held.between(0, first, 1000) + found + held.between(first + more, 1000, 1000)
        assert sum(run[4] for _, run in everything) == sizes


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 60), st.integers(0, 12))
def test_messages_move_from_a_queue_under_ids(counts: list[int], limit: int, runs_max: int) -> None:
    fifo, held = Fifo(False), CheckedOut()
    for i, count in enumerate(counts):
        fifo.push(i, 0, 0, count, 10 * count, 0, 0, 3 if i == 4 else 0)
    before = [m for run in fifo.runs() for m in spread(run)]
    taken, moved, _ = held.take_from(fifo, 7, limit, runs_max)
    assert taken == min(limit, sum(counts[:runs_max]))
    assert moved == held.run_count() <= runs_max
    got = {start + k: m for start, run in held.held() for k, m in enumerate(spread(run))}
    assert got == dict(enumerate(before[:taken], 7))
    assert [m for run in fifo.runs() for m in spread(run)] == before[taken:]
    assert (held.size, fifo.size) == (10 * taken, 10 * (len(before) - taken))


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 30), st.integers(1, 5)),
        max_size=20,
        unique_by=lambda run: run[:3],
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 36)),
    st.integers(1, 12),
)
def test_runs_after_a_place_come_in_the_order_of_the_log(
    pushes: list[tuple[int, int, int, int]], place: tuple[int, int, int], runs_max: int
) -> None:
    fifo = Fifo(True)
    for i, (index, offset, first, count) in enumerate(pushes):
        fifo.push(index, offset, first * 10, count, count, 1 + i % 3, i % 2)
    behind = [run for run in fifo.runs() if (run[0], run[1], run[2] + run[3] - 1) >= place]
    assert fifo.runs_after(*place, runs_max) == sorted(behind)[:runs_max]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 3)), max_size=20),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_dropping_the_oldest_equals_removing_them(
    adds: list[tuple[int, int, int]], lasts: list[int]
) -> None:
    held, other = CheckedOut(), CheckedOut()
    message_id = 0
    for i, (count, size, gap) in enumerate(adds):
        message_id += gap
        for one in (held, other):
            one.add(message_id, i, 0, 5, count, size, 1, 0, i // 4)
        message_id += count
    for last in lasts:
        removed = other.remove(0, last)
        gone = (sum(run[3] for run in removed), sum(run[4] for run in removed))
        assert held.drop_oldest(last) == gone
        assert held.held() == other.held()
        assert (held.messages, held.size) == (other.messages, other.size)
        assert held.pack() == other.pack()
