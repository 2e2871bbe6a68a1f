"""Where a partition is cut, against trying every cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules.cuts import best_cut

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


def largest(weights: list[int], cuts: tuple[int, ...]) -> float:
    edges = (0, *cuts, len(weights))
    parts = [sum(weights[a:b]) for a, b in pairwise(edges)]
    return max(parts) / sum(weights)


@pytest.mark.parametrize(
    ("weights", "at", "share"),
    [
        ([1, 1], (1,), 0.5),
        ([1, 1, 1, 1], (2,), 0.5),
        ([1, 1, 1, 1, 4], (4,), 0.5),
        ([4.0, 4.5, 1.5], (1,), 0.6),
        ([0, 0, 5, 5, 0], (3,), 0.5),
        ([1, 8, 1], (1, 2), 0.8),
        ([8, 1, 1], (1,), 0.8),
        ([1, 1, 8], (2,), 0.8),
        ([0, 9, 0], (1, 2), 1.0),
        ([7], (), 1.0),
    ],
)
def test_known_loads_are_cut_where_it_helps(
    weights: list[float], at: tuple[int, ...], share: float
) -> None:
    cut = best_cut(weights, 9)
    assert (cut.at, round(cut.share, 6)) == (at, share)


@given(WEIGHTS)
@settings(max_examples=60)
def test_no_other_cut_leaves_a_smaller_largest_part(weights: list[int]) -> None:
    """Two parts; where one index carries more than half, three."""
    cut = best_cut(weights, 9)
    assert cut.share == pytest.approx(largest(weights, cut.at))
    inside = range(1, len(weights))
    every = [(), *((at,) for at in inside)]
    if cut.hot is None:
        assert 2 * max(weights) <= sum(weights)
        assert len(cut.at) == 1
    else:
        assert weights[cut.hot] == max(weights)
        assert cut.hot_share == pytest.approx(max(weights) / sum(weights))
        assert cut.hot_share > 0.5
        every += combinations(inside, 2)
    assert cut.share == pytest.approx(min(largest(weights, each) for each in every))


@given(WEIGHTS, st.integers(0, 2))
@settings(max_examples=60)
def test_a_cut_makes_no_more_partitions_than_there_is_room_for(
    weights: list[int], room: int
) -> None:
    cut = best_cut(weights, room)
    assert len(cut.at) <= room
    assert bool(cut.at) == (room > 0 and len(weights) > 1)
