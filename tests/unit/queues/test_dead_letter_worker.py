"""The worker that moves dead letters at least once: every way that a move can go wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.queues.dead_letter_worker import RETRY_FIRST_MS, DeadLetterWorker, ranges_of

TIMEOUT_MS = 5_000


def worker(prefetch: int = 32) -> DeadLetterWorker:
    return DeadLetterWorker(prefetch, TIMEOUT_MS)


def test_a_message_is_settled_when_every_queue_has_confirmed_it() -> None:
    moving = worker()
    moving.take(7, 0)
    assert moving.due(0) == [7]
    assert moving.routed(7, [1, 2], 0) == [1, 2]
    moving.answered(7, 1, True, 1)
    assert moving.take_settled() == []
    moving.answered(7, 2, True, 2)
    assert moving.take_settled() == [7, 7]
    assert moving.take_settled() == []
    assert len(moving) == 0


def test_no_more_than_the_prefetch_is_under_way() -> None:
    moving = worker(2)
    moving.take(0, 0)
    moving.take(1, 0)
    assert moving.room == 0
    moving.routed(0, [1], 0)
    moving.answered(0, 1, True, 0)
    assert moving.room == 1
    assert moving.next_number == 2


def test_without_a_route_it_waits_longer_and_longer_up_to_the_time_out() -> None:
    moving = worker()
    moving.take(0, 0)
    now, pauses = 0, []
    for _ in range(6):
        assert moving.due(now) == [0]
        assert moving.routed(0, [], now) == []
        assert moving.due(now) == []
        due = moving.next_due_ms()
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == [RETRY_FIRST_MS, 2000, 4000, TIMEOUT_MS, TIMEOUT_MS, TIMEOUT_MS]
    assert moving.routed(0, [3], now) == [3]


def test_a_queue_that_refuses_is_tried_again_alone() -> None:
    """Full targets, and those that are deleted under way: who has confirmed gets it once."""
    moving = worker()
    moving.take(0, 0)
    moving.routed(0, [1, 2, 3], 0)
    moving.answered(0, 1, True, 1)
    moving.answered(0, 2, False, 1)
    assert moving.due(1) == []
    moving.answered(0, 3, True, 2)
    assert moving.take_settled() == []
    assert moving.next_due_ms() == 2 + RETRY_FIRST_MS
    assert moving.routed(0, [1, 2, 3], 2000) == [2]
    moving.answered(0, 2, True, 2001)
    assert moving.take_settled() == [0, 0]


def test_a_route_that_vanishes_after_one_confirm_is_not_waited_for() -> None:
    moving = worker()
    moving.take(0, 0)
    moving.routed(0, [1, 2], 0)
    moving.answered(0, 1, True, 1)
    assert moving.due(TIMEOUT_MS) == [0]
    assert moving.routed(0, [], TIMEOUT_MS) == []
    assert moving.take_settled() == [0, 0]


def test_a_route_that_vanishes_before_any_confirm_is_waited_for() -> None:
    moving = worker()
    moving.take(0, 0)
    moving.routed(0, [1], 0)
    assert moving.routed(0, [], TIMEOUT_MS) == []
    assert moving.take_settled() == []
    assert moving.routed(0, [2], TIMEOUT_MS + RETRY_FIRST_MS) == [2]


def test_a_queue_that_does_not_answer_is_waited_for_and_gets_it_once() -> None:
    """Its client sends again by itself; after the time-out new routes count."""
    moving = worker()
    moving.take(0, 0)
    moving.routed(0, [1], 0)
    assert moving.due(TIMEOUT_MS - 1) == []
    assert moving.due(TIMEOUT_MS) == [0]
    assert moving.routed(0, [1, 2], TIMEOUT_MS) == [2]
    moving.answered(0, 2, True, TIMEOUT_MS)
    assert moving.take_settled() == []
    moving.answered(0, 1, True, TIMEOUT_MS)
    assert moving.take_settled() == [0, 0]


def test_an_answer_for_what_was_dropped_means_nothing() -> None:
    moving = worker()
    for number in range(4):
        moving.take(number, 0)
        moving.routed(number, [1], 0)
    moving.forget_below(3)
    moving.answered(0, 1, True, 1)
    moving.answered(3, 1, True, 1)
    assert moving.take_settled() == [3, 3]
    moving.forget_below(10)
    assert moving.next_number == 10


def test_what_cannot_be_read_or_goes_round_by_itself() -> None:
    moving = worker()
    moving.take(0, 0)
    moving.take(1, 0)
    moving.failed(0, 0)
    moving.dropped(1)
    assert moving.take_settled() == [1, 1]
    assert moving.due(RETRY_FIRST_MS) == [0]


def test_numbers_become_ranges() -> None:
    assert ranges_of([]) == []
    assert ranges_of([5, 1, 2, 3, 9, 8]) == [1, 3, 5, 5, 8, 9]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_at_least_once_whatever_the_targets_do(data: st.DataObject) -> None:
    """A naive model of three targets: a message is settled only when, at its last routing, every
    queue of the route had it; and all are settled once all queues confirm."""
    moving = worker(4)
    has: dict[int, set[int]] = {}
    routes: dict[int, list[int]] = {}
    waiting: list[tuple[int, int]] = []
    settled: list[int] = []
    now, number, total = 0, 0, data.draw(st.integers(1, 12))

    def step(route: list[int], answers: list[bool]) -> None:
        nonlocal number
        while moving.room and number < total:
            moving.take(number, now)
            has[number] = set()
            number += 1
        for due in moving.due(now):
            routes[due] = route
            for group in moving.routed(due, route, now):
                assert group not in has[due], "a queue gets it again that has confirmed it"
                assert (due, group) not in waiting, "a queue gets it while it is about to confirm"
                waiting.append((due, group))
        for ok in answers:
            if not waiting:
                break
            who, group = waiting.pop(0)
            if ok:
                has[who].add(group)
            moving.answered(who, group, ok, now)
        found = moving.take_settled()
        for first, last in zip(found[::2], found[1::2], strict=True):
            for done in range(first, last + 1):
                assert has[done], "settled, and nobody has it"
                assert set(routes[done]) <= has[done], "settled, and a queue of its route lacks it"
                assert done not in settled
                settled.append(done)

    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.sampled_from([0, 10, 1000, TIMEOUT_MS]))
        route = data.draw(st.lists(st.integers(1, 3), unique=True))
        step(route, data.draw(st.lists(st.booleans(), max_size=6)))
    for _ in range(60):
        now += TIMEOUT_MS
        step([1, 2], [True] * 20)
    assert sorted(settled) == list(range(total))
