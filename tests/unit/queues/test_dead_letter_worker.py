"""The worker that moves dead letters at least once: every way that a move can go wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.queues.dead_letter_worker import (
    BYTES_MAX,
    FAST_MS,
    RETRY_FIRST_MS,
    WINDOW_FIRST,
    WINDOW_MAX,
    DeadLetterWorker,
)

TIMEOUT_MS = 5_000


def worker(prefetch: int = 32) -> DeadLetterWorker:
    return DeadLetterWorker(prefetch, TIMEOUT_MS)


def test_a_message_is_settled_when_every_queue_has_confirmed_it() -> None:
    moving = worker()
    moving.take(7, 1, 0)
    assert moving.due(0) == [(7, 1)]
    assert moving.routed(7, 1, [1, 2], 100, 0) == [1, 2]
    moving.answered(7, 7, 1, True, 1)
    assert moving.take_settled() == []
    moving.answered(7, 7, 2, True, 2)
    assert moving.take_settled() == [7, 7]
    assert moving.take_settled() == []
    assert len(moving) == 0


def test_no_more_than_the_prefetch_is_under_way() -> None:
    moving = worker(2)
    moving.take(0, 1, 0)
    moving.take(1, 1, 0)
    assert moving.room == 0
    moving.routed(0, 1, [1], 100, 0)
    moving.answered(0, 0, 1, True, 0)
    assert moving.room == 1
    assert moving.next_number == 2


def test_without_a_route_it_waits_longer_and_longer_up_to_the_time_out() -> None:
    moving = worker()
    moving.take(0, 1, 0)
    now, pauses = 0, []
    for _ in range(6):
        assert moving.due(now) == [(0, 1)]
        assert moving.routed(0, 1, [], 100, now) == []
        assert moving.due(now) == []
        due = moving.next_due_ms()
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == [RETRY_FIRST_MS, 2000, 4000, TIMEOUT_MS, TIMEOUT_MS, TIMEOUT_MS]
    assert moving.routed(0, 1, [3], 100, now) == [3]


def test_a_queue_that_refuses_is_tried_again_alone() -> None:
    """Full targets, and those that are deleted under way: who has confirmed gets it once."""
    moving = worker()
    moving.take(0, 1, 0)
    moving.routed(0, 1, [1, 2, 3], 100, 0)
    moving.answered(0, 0, 1, True, 1)
    moving.answered(0, 0, 2, False, 1)
    assert moving.due(1) == []
    moving.answered(0, 0, 3, True, 2)
    assert moving.take_settled() == []
    assert moving.next_due_ms() == 2 + RETRY_FIRST_MS
    assert moving.routed(0, 1, [1, 2, 3], 100, 2000) == [2]
    moving.answered(0, 0, 2, True, 2001)
    assert moving.take_settled() == [0, 0]


def test_a_route_that_vanishes_after_one_confirm_is_not_waited_for() -> None:
    moving = worker()
    moving.take(0, 1, 0)
    moving.routed(0, 1, [1, 2], 100, 0)
    moving.answered(0, 0, 1, True, 1)
    assert moving.due(TIMEOUT_MS) == [(0, 1)]
    assert moving.routed(0, 1, [], 100, TIMEOUT_MS) == []
    assert moving.take_settled() == [0, 0]


def test_a_route_that_vanishes_before_any_confirm_is_waited_for() -> None:
    moving = worker()
    moving.take(0, 1, 0)
    moving.routed(0, 1, [1], 100, 0)
    assert moving.routed(0, 1, [], 100, TIMEOUT_MS) == []
    assert moving.take_settled() == []
    assert moving.routed(0, 1, [2], 100, TIMEOUT_MS + RETRY_FIRST_MS) == [2]


def test_a_queue_that_does_not_answer_is_waited_for_and_gets_it_once() -> None:
    """Its client sends again by itself; after the time-out new routes count."""
    moving = worker()
    moving.take(0, 1, 0)
    moving.routed(0, 1, [1], 100, 0)
    assert moving.due(TIMEOUT_MS - 1) == []
    assert moving.due(TIMEOUT_MS) == [(0, 1)]
    assert moving.routed(0, 1, [1, 2], 100, TIMEOUT_MS) == [2]
    moving.answered(0, 0, 2, True, TIMEOUT_MS)
    assert moving.take_settled() == []
    moving.answered(0, 0, 1, True, TIMEOUT_MS)
    assert moving.take_settled() == [0, 0]


def test_an_answer_for_what_was_dropped_means_nothing() -> None:
    moving = worker()
    for number in range(4):
        moving.take(number, 1, 0)
        moving.routed(number, 1, [1], 100, 0)
    moving.forget_below(3)
    moving.answered(0, 0, 1, True, 1)
    moving.answered(3, 3, 1, True, 1)
    assert moving.take_settled() == [3, 3]
    moving.forget_below(10)
    assert moving.next_number == 10


def test_what_cannot_be_read_or_goes_round_by_itself() -> None:
    moving = worker()
    moving.take(0, 1, 0)
    moving.take(1, 1, 0)
    moving.failed(0, 1, 0)
    moving.dropped(1, 1)
    assert moving.take_settled() == [1, 1]
    assert moving.due(RETRY_FIRST_MS) == [(0, 1)]


def test_parts_of_a_run_go_their_own_ways() -> None:
    moving = worker(10)
    moving.take(0, 10, 0)
    assert moving.routed(0, 4, [1], 400, 0) == [1]
    assert moving.routed(4, 2, [2], 200, 0) == [2]
    moving.failed(6, 1, 0)
    moving.dropped(7, 2)
    assert moving.due(0) == [(9, 1)]
    assert moving.take_settled() == [7, 8]
    assert moving.bytes == 600
    assert moving.answered(1, 2, 1, True, 1) == 2
    assert moving.answered(3, 5, 2, True, 1) == 2, "of two it was not asked"
    assert moving.answered(3, 3, 1, False, 1) == 1
    assert moving.bytes == 100
    assert moving.take_settled() == [1, 2, 4, 5]
    assert list(moving.missing(0, 12)) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert (len(moving), moving.room) == (4, 6)
    moving.gone(3, 4)
    assert (len(moving), moving.bytes) == (2, 100)
    assert moving.answered(0, 9, 1, True, 2) == 1
    assert (moving.take_settled(), moving.bytes) == ([0, 0], 0)
    assert list(moving.missing(9, 1)) == []


def test_what_is_done_is_told_in_ranges() -> None:
    moving = worker(20)
    moving.take(0, 20, 0)
    for first, count in ((8, 2), (5, 1), (1, 3)):
        moving.dropped(first, count)
    assert moving.take_settled() == [1, 3, 5, 5, 8, 9]


def confirm_all(moving: DeadLetterWorker, now: int, took_ms: int, count: int | None = None) -> None:
    """Takes what there is room for, and has it confirmed."""
    first, count = moving.next_number, moving.room if count is None else count
    moving.take(first, count, now)
    moving.routed(first, count, [1], 0, now)
    moving.answered(first, first + count - 1, 1, True, now + took_ms)


def test_without_a_prefetch_the_window_follows_the_targets() -> None:
    moving = worker(0)
    windows = []
    for _ in range(9):
        windows.append(moving.window)
        confirm_all(moving, 0, FAST_MS)
    assert windows == [32, 64, 128, 256, 512, 1024, 2048, WINDOW_MAX, WINDOW_MAX]
    moving.take(moving.next_number, 1, 0)
    moving.routed(moving.next_number - 1, 1, [1], 0, 0)
    moving.answered(moving.next_number - 1, moving.next_number - 1, 1, False, 0)
    assert moving.window == WINDOW_FIRST
    assert moving.room == WINDOW_FIRST - 1


def test_the_window_does_not_grow_without_need_or_for_slow_targets() -> None:
    moving = worker(0)
    confirm_all(moving, 0, FAST_MS + 1)
    assert moving.window == WINDOW_FIRST
    confirm_all(moving, 0, 0, count=1)
    assert moving.window == 2 * WINDOW_FIRST, "it was used up before"
    confirm_all(moving, 0, 0, count=2 * WINDOW_FIRST - 1)
    assert moving.window == 2 * WINDOW_FIRST
    exact = worker(5)
    for _ in range(3):
        confirm_all(exact, 0, 0)
    assert exact.window == 5


def test_the_window_grows_once_for_all_that_was_taken_before() -> None:
    moving = worker(0)
    moving.take(0, 32, 0)
    moving.routed(0, 32, [1], 0, 0)
    moving.answered(0, 0, 1, True, 0)
    assert moving.window == 64
    moving.take(32, moving.room, 0)
    moving.answered(1, 31, 1, True, 0)
    assert moving.window == 64


def test_bytes_under_way_are_bounded_unless_there_is_a_prefetch() -> None:
    """What is under way already is looked at nevertheless when its time is over."""
    for prefetch in (0, 64):
        moving = worker(prefetch)
        confirm_all(moving, 0, 0)
        moving.take(moving.next_number, 40, 0)
        first = moving.next_number - 40
        moving.routed(first, 33, [1], BYTES_MAX, 0)
        assert moving.is_full == (not prefetch)
        waiting = [(first + 33, 7)]
        assert moving.due(0) == ([] if moving.is_full else waiting)
        assert moving.next_due_ms() == (TIMEOUT_MS if moving.is_full else 0)
        assert (first, 33) in moving.due(TIMEOUT_MS)
        moving.answered(first, first, 1, True, 0)
        assert not moving.is_full
        assert moving.due(0) == waiting


@given(st.data())
def test_at_least_once_whatever_the_targets_do(data: st.DataObject) -> None:
    """A naive model of three targets, message by message: one is settled only when, at its last
    routing, every queue of the route had it; and all are settled once all queues confirm."""
    moving = worker(data.draw(st.sampled_from([0, 4])))
    has: dict[int, set[int]] = {}
    routes: dict[int, list[int]] = {}
    waiting: list[tuple[int, int]] = []
    settled: list[int] = []
    now, number, total = 0, 0, data.draw(st.integers(1, 12))

    def publish(first: int, count: int, route: list[int]) -> None:
        groups = moving.routed(first, count, route, 100 * count, now)
        for due in range(first, first + count):
            routes[due] = route
            for group in groups:
                assert group not in has[due], "a queue gets it again that has confirmed it"
                assert (due, group) not in waiting, "a queue gets it while it is about to confirm"
                waiting.append((due, group))

    def done_already() -> set[int]:
        gone = list(moving.missing(0, number))
        ranges = zip(gone[::2], gone[1::2], strict=True)
        return {n for first, last in ranges for n in range(first, last + 1)}

    def step(route: list[int], answers: list[bool], together: int) -> None:
        nonlocal number
        while moving.room and number < total:
            count = min(moving.room, total - number, together)
            moving.take(number, count, now)
            has.update({n: set() for n in range(number, number + count)})
            number += count
        for first, count in moving.due(now):
            part = min(count, together)
            publish(first, part, route)
            if part < count:
                publish(first + part, count - part, route[:1])
        for ok in answers:
            if not waiting:
                break
            who, group = waiting.pop(0)
            last = who
            while (last + 1, group) in waiting and last - who + 1 < together:
                last += 1
                waiting.remove((last, group))
            if ok:
                for each in range(who, last + 1):
                    has[each].add(group)
            here = len(set(range(who, last + 1)) - done_already())
            assert moving.answered(who, last, group, ok, now) == here
        found = moving.take_settled()
        for first, last in zip(found[::2], found[1::2], strict=True):
            for done in range(first, last + 1):
                assert has[done], "settled, and nobody has it"
                assert set(routes[done]) <= has[done], "settled, and a queue of its route lacks it"
                assert done not in settled
                settled.append(done)
        assert done_already() == set(settled)
        assert len(moving) == number - len(settled)
        assert moving.bytes <= 100 * len(moving)

    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.sampled_from([0, 10, 1000, TIMEOUT_MS]))
        route = data.draw(st.lists(st.integers(1, 3), unique=True))
        together = data.draw(st.integers(1, 4))
        step(route, data.draw(st.lists(st.booleans(), max_size=6)), together)
    for _ in range(60):
        now += TIMEOUT_MS
        step([1, 2], [True] * 20, 3)
    assert sorted(settled) == list(range(total))
    assert moving.bytes == 0
