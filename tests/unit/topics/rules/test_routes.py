"""Route versions: cover, look-up, the first one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules.refusals import BadTopic, UnknownPartition
from convoymq.topics.rules.routes import LOGICAL_MAX, Route, Span, check_invariants, first_route
from tests.unit.topics.rules.histories import History, histories


@given(logical=st.integers(1, 3000), part=st.floats(0, 1))
@settings(max_examples=60)
def test_the_first_route_covers_all_by_nearly_equal_ranges(logical: int, part: float) -> None:
    partitions = max(1, round(logical * part))
    route = first_route(logical, partitions)
    assert (route.version, route.pids) == (0, tuple(range(partitions)))
    widths = {span.width for span in route.spans}
    assert max(widths) - min(widths) <= 1
    assert sum(span.width for span in route.spans) == logical


@pytest.mark.parametrize(
    ("logical", "partitions"), [(0, 1), (LOGICAL_MAX + 1, 1), (8, 0), (8, 9), (8, -1)]
)
def test_a_topic_of_impossible_size_is_refused(logical: int, partitions: int) -> None:
    with pytest.raises(BadTopic, match="1 to"):
        first_route(logical, partitions)


def test_the_largest_topic_has_a_partition_for_each_logical_one() -> None:
    route = first_route(LOGICAL_MAX, LOGICAL_MAX)
    assert route.pid_of(LOGICAL_MAX - 1) == LOGICAL_MAX - 1


@given(histories())
@settings(max_examples=60)
def test_every_version_gives_each_logical_partition_its_owner(history: History) -> None:
    """I1 and I2, against the model: versions are consecutive, and each covers all once."""
    assert [route.version for route in history.routes] == list(range(len(history.routes)))
    for route, owners in zip(history.routes, history.naive.owners, strict=True):
        check_invariants(route)
        assert [route.pid_of(lp) for lp in range(route.logical)] == owners
        for span in route.spans:
            assert route.span_of(span.pid) == span
            assert {lp for lp in range(route.logical) if lp in span} == {
                lp for lp, pid in enumerate(owners) if pid == span.pid
            }


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span(0, 3, 0),),
        (Span(1, 4, 0),),
        (Span(0, 2, 0), Span(3, 4, 1)),
        (Span(0, 3, 0), Span(2, 4, 1)),
        (Span(0, 2, 0), Span(2, 2, 1), Span(2, 4, 2)),
        (Span(2, 4, 0), Span(0, 2, 1)),
        (Span(0, 2, 0), Span(2, 4, 0)),
        (Span(0, 5, 0),),
    ],
)
def test_a_route_that_does_not_cover_once_is_found(spans: tuple[Span, ...]) -> None:
    with pytest.raises(InvariantViolated):
        check_invariants(Route(0, 4, spans))


def test_an_unknown_partition_is_refused_with_the_version() -> None:
    with pytest.raises(UnknownPartition, match="no partition 7 in version 0"):
        first_route(4, 2).span_of(7)


@given(a=st.tuples(st.integers(0, 6), st.integers(1, 4)), lo=st.integers(0, 6))
@settings(max_examples=60)
def test_spans_overlap_when_they_share_a_logical_partition(a: tuple[int, int], lo: int) -> None:
    span = Span(a[0], a[0] + a[1], 0)
    assert span.overlaps(lo, lo + 2) == bool({lo, lo + 1} & set(range(span.lo, span.hi)))
