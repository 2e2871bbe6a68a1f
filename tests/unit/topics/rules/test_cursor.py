"""A cursor against a set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.rules.cursor import Cursor


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 12))
def test_a_cursor_is_a_set_with_a_contiguous_beginning(offsets: list[int], begin: int) -> None:
    cursor, naive = Cursor(begin), set(range(begin))
    for offset in offsets:
        assert cursor.ack(offset) == (offset not in naive)
        naive.add(offset)
        cursor.check_invariants()
        assert cursor.watermark == next(n for n in range(100) if n not in naive)
    assert [n for n in range(40) if n in cursor] == sorted(naive)
    assert Cursor.load(cursor.pack()).pack() == cursor.pack()


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 25))
def test_advancing_takes_in_what_it_reaches(offsets: list[int], watermark: int) -> None:
    cursor = Cursor()
    for offset in offsets:
        cursor.ack(offset)
    cursor.advance(watermark)
    naive = {*offsets, *range(watermark)}
    cursor.check_invariants()
    assert cursor.watermark == next(n for n in range(100) if n not in naive)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=20))
def test_a_range_counts_as_its_offsets(ranges: list[tuple[int, int]]) -> None:
    cursor, naive = Cursor(2), Cursor(2)
    for first, length in ranges:
        cursor.ack_range(first, first + length)
        if first <= naive.watermark:
            naive.advance(first + length)
        for offset in range(first, first + length):
            naive.ack(offset)
        cursor.check_invariants()
        assert cursor.pack() == naive.pack()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=20),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_what_is_missing_are_the_runs_between(
    ranges: list[tuple[int, int]], first: int, end: int
) -> None:
    cursor = Cursor(2)
    for start, length in ranges:
        cursor.ack_range(start, start + length)
    missing = [n for low, high in cursor.missing(first, end) for n in range(low, high)]
    assert missing == [n for n in range(first, end) if n not in cursor]
