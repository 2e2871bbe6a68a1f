"""Runs of unsettled deliveries are what a dictionary of them is."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead, following
from convoymq.edges.amqp10.unsettled import Run, Unsettled

LINKS: Any = ("a", "b")


def pairs(runs: list[Run]) -> list[tuple[int, Any, int]]:
    """Returns delivery id, link and message id of each delivery."""
    return [
        (following(run.first, each), run.link, run.message_id + each)
        for run in runs
        for each in range(run.count)
    ]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(LINKS), st.integers(1, 5), st.integers(0, 2)),
        st.tuples(st.just("take"), st.integers(-9, 40), st.integers(-2, 40), st.booleans()),
        st.tuples(st.just("end"), st.sampled_from(LINKS), st.just(0), st.just(0)),
        st.tuples(st.just("late"), st.sampled_from(LINKS), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


@given(st.sampled_from([0, WINDOW_MAX - 7, (1 << 31) - 7]), STEPS)
def test_they_are_a_dictionary(begin: int, steps: list[tuple[str, Any, int, Any]]) -> None:
    held = Unsettled()
    model: dict[int, tuple[Any, int]] = {}
    next_id, message_id = begin, 0
    for kind, what, count, more in steps:
        if kind == "add":
            message_id += more
            held.add(next_id, what, message_id, count)
            for each in range(count):
                model[following(next_id, each)] = what, message_id + each
            next_id, message_id = following(next_id, count), message_id + count
        elif kind == "late":
            before = following(next_id, -count)
            late = {n: at for n, at in model.items() if at[0] == what and ahead(n, before) < 0}
            found = held.take_before(before, what)
            assert sorted(pairs(found)) == sorted((n, *at) for n, at in late.items())
            for each in late:
                del model[each]
        elif kind == "take":
            first = following(begin, what)
            last = following(first, count)
            size = ahead(last, first) + 1
            ids = [following(first, each) for each in range(size)]
            found = held.take(first, last)
            assert pairs(found) == [(each, *model[each]) for each in ids if each in model]
            for each in ids:
                model.pop(each, None)
            if more and found:
                # A transaction gives them back, one by one.
                for id, link, message in pairs(found):
                    held.add(id, link, message)
                    model[id] = link, message
        else:
            ranges = held.take_of(what)
            ids = [each for first, last in ranges for each in range(first, last + 1)]
            assert sorted(ids) == sorted(m for link, m in model.values() if link == what)
            model = {id: entry for id, entry in model.items() if entry[0] != what}
        assert len(held) == len(model)


def test_a_range_that_began_long_ago_reaches_the_oldest_one() -> None:
    held = Unsettled()
    held.add(following(0, -1), LINKS[0], 7, 4)
    assert pairs(held.take(WINDOW_MAX - 100, 0)) == [(WINDOW_MAX, "a", 7), (0, "a", 8)]
    assert pairs(held.take(0, WINDOW_MAX >> 1)) == [(1, "a", 9), (2, "a", 10)]
    assert held.take(0, 9) == []


def test_neighbours_are_one_run() -> None:
    held = Unsettled()
    for each in range(1000):
        held.add(each, LINKS[0], 50 + each)
    (run,) = held.take(0, 999)
    assert (run.first, run.message_ids) == (0, (50, 1049))
