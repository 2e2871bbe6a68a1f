"""Sizes of messages by range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.edge import SIZE_BOUNDS
from convoymq.kernels.message_sizes import BOUNDS, MessageSizes

EDGES = sorted({size + more for size in (0, *BOUNDS) for more in (0, 1)})


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, 1 << 40)))
def test_every_message_is_in_its_range(sizes: list[int]) -> None:
    counted = MessageSizes()
    for size in sizes:
        counted.add(size)
    assert counted.total == sum(sizes)
    expected = [sum(size <= bound for size in sizes) for bound in BOUNDS]
    assert counted.up_to() == [*expected, len(sizes)]


def test_the_bounds_that_dashboards_ask_for_are_those_of_the_kernel() -> None:
    assert [float(bound) for bound in SIZE_BOUNDS] == [*map(float, BOUNDS), float("inf")]
