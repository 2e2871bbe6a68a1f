"""Shares, cuts, delays, and the JSON of offsets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.spark import offsets
from convoymq.spark.errors import SourceError
from convoymq.spark.offsets import Positions
from convoymq.spark.options import Limits
from convoymq.spark.planning import TriggerDelay, allowed_rows, share, split

backlogs = st.dictionaries(st.text(max_size=3), st.integers(0, 10_000), max_size=8)


@given(limit=st.integers(1, 20_000), backlog=backlogs)
def test_shares_take_the_limit_and_no_backlog_twice(limit: int, backlog: dict[str, int]) -> None:
    shares = share(limit, backlog)
    assert sum(shares.values()) == min(limit, sum(backlog.values()))
    assert all(0 <= shares[key] <= backlog[key] for key in backlog)


def test_shares_are_in_proportion() -> None:
    assert share(10, {"a": 300, "b": 100, "c": 0}) == {"a": 8, "b": 2, "c": 0}
    assert share(1, {"a": 5, "b": 6}) == {"a": 0, "b": 1}


ranges = st.lists(
    st.tuples(st.text(max_size=2), st.integers(0, 100), st.integers(0, 300)), max_size=6
).map(lambda found: [(key, start, start + rows) for key, start, rows in found])


@given(
    given_ranges=ranges,
    partitions_min=st.none() | st.integers(1, 50),
    records_max=st.none() | st.integers(1, 100),
)
def test_parts_cover_the_ranges_once(
    given_ranges: list[tuple[str, int, int]], partitions_min: int | None, records_max: int | None
) -> None:
    parts = split(given_ranges, partitions_min, records_max)
    rows = [(key, i) for key, start, end in given_ranges for i in range(start, end)]
    assert [(key, i) for key, start, end in parts for i in range(start, end)] == rows
    assert all(end > start for _, start, end in parts)
    if records_max is not None:
        assert all(end - start <= records_max for _, start, end in parts)
    if partitions_min is not None:
        assert len(parts) >= min(partitions_min, len(rows))


def test_the_largest_range_is_cut_first() -> None:
    parts = split([("a", 0, 900), ("b", 0, 100)], 4, None)
    assert parts == [("a", 0, 300), ("a", 300, 600), ("a", 600, 900), ("b", 0, 100)]


@pytest.mark.parametrize(
    ("limits", "rows", "expected"),
    [
        (Limits(), 1000, 1000),
        (Limits(rows_max=10), 1000, 10),
        (Limits(bytes_max=5_000), 1000, 50),
        (Limits(bytes_max=1), 1000, 1),
        (Limits(rows_max=10, bytes_max=500), 1000, 5),
        (Limits(bytes_max=1_000_000), 1000, 1000),
    ],
)
def test_limits_of_rows_and_bytes(limits: Limits, rows: int, expected: int) -> None:
    assert allowed_rows(limits, rows, rows * 100) == expected


def test_small_batches_wait_but_not_the_first_and_not_for_ever() -> None:
    delay = TriggerDelay(Limits(rows_min=100, delay_max_ms=1000))
    assert not delay.holds(5, 10_000)
    assert delay.holds(5, 10_500)
    assert not delay.holds(100, 10_600)
    assert delay.holds(99, 11_599)
    assert not delay.holds(99, 11_600)
    assert not TriggerDelay(Limits()).holds(1, 0)


@given(
    ends=st.dictionaries(st.tuples(st.text(), st.just(0)), st.integers(0, 1 << 62), max_size=5),
    groups=st.dictionaries(st.text(), st.integers(1, 99), max_size=3),
)
def test_equal_positions_have_equal_text(
    ends: dict[tuple[str, int], int], groups: dict[str, int]
) -> None:
    made = Positions(ends=ends, groups=groups, starts=ends)
    turned = Positions(
        ends=dict(reversed(ends.items())),
        groups=dict(reversed(groups.items())),
        starts=dict(reversed(ends.items())),
    )
    text = json.dumps(made.to_json())
    assert json.dumps(turned.to_json()) == text
    back = offsets.parse(json.loads(text))
    assert (back.ends, back.groups, back.starts) == (ends, groups, ends)


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"v": 2, "p": {}},
        {"v": 1},
        {"v": 1, "p": {"s": 5}},
        {"v": 1, "p": {"s": {"0": -1}}},
        {"v": 1, "p": {"s": {"0": True}}},
        {"v": 1, "p": {"s": {"x": 1}}},
        {"v": 1, "p": {}, "g": []},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises(SourceError, match="checkpoint"):
        offsets.parse(damaged)
