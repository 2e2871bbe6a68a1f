"""The retry table of a producer, answer by answer."""

from __future__ import annotations

import pytest

from convoymq.topics.rules.answers import ProduceAnswer
from convoymq.topics.rules.producer import Failed, RefreshRoute, SendRequest, Stored, TopicProducer
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Route, Span

OLD = Route(0, 4, (Span(0, 4, 0),))
NEW = Route(1, 4, (Span(0, 2, 1), Span(2, 4, 2)))


def producer(**options: int) -> TopicProducer:
    return TopicProducer(7, 1, OLD, timeout_ms=100, **options)  # type: ignore[arg-type]


def sent(of: TopicProducer) -> list[tuple[int, int, int]]:
    """(partition, sequence, base) of the requests that are to be sent."""
    actions = of.take_actions()
    return [(a.pid, a.request.seq, a.request.base) for a in actions if isinstance(a, SendRequest)]


def test_three_requests_are_in_flight_and_sequences_are_contiguous() -> None:
    made = producer()
    for _ in range(5):
        made.send(0, b"k", 0)
    assert sent(made) == [(0, 1, 1), (0, 2, 1), (0, 3, 1)]
    made.on_answer(1, ProduceAnswer(Code.OK, 1), 1)
    assert made.take_actions()[0] == Stored(0, 1)


def test_an_answer_stands_for_all_before_it() -> None:
    made = producer()
    for _ in range(3):
        made.send(0, b"k", 0)
    made.take_actions()
    made.on_answer(3, ProduceAnswer(Code.DUPLICATE), 1)
    assert made.take_actions() == [Stored(0, 3)]
    assert made.idle


def test_closed_goes_to_the_targets_at_once_and_refreshes_once() -> None:
    made = producer()
    for lp in (0, 0, 3):
        made.send(lp, b"k", 0)
    made.take_actions()
    closed = ProduceAnswer(Code.CLOSED, to_version=1, targets=NEW.spans)
    made.on_answer(1, closed, 1)
    actions = made.take_actions()
    assert actions.count(RefreshRoute()) == 1
    assert [(a.pid, a.request.seq) for a in actions if isinstance(a, SendRequest)] == [
        (1, 1),
        (1, 2),
    ]
    made.on_answer(2, closed, 1)
    assert made.take_actions() == []
    made.on_answer(3, closed, 1)
    assert sent(made) == [(2, 1, 1)]


def test_a_close_that_the_route_does_not_explain_waits_for_another_route() -> None:
    made = producer()
    made.send(0, b"k", 0)
    made.take_actions()
    made.on_answer(1, ProduceAnswer(Code.CLOSED, to_version=0, targets=NEW.spans), 1)
    assert made.take_actions() == [RefreshRoute()]
    made.on_route(NEW, 5)
    assert sent(made) == [(1, 1, 1)]


def test_not_open_backs_off_at_the_same_target_and_asks_again_after_a_while() -> None:
    made = producer()
    made.send(0, b"k", 0)
    now, asked = 0, 0
    for ticket in range(1, 5):
        actions = made.take_actions()
        asked += actions.count(RefreshRoute())
        made.on_answer(ticket, ProduceAnswer(Code.NOT_OPEN), now)
        assert made.due_ms() is not None
        now += 60
        made.tick(now)
    assert asked + made.take_actions().count(RefreshRoute()) == 1


@pytest.mark.parametrize("code", [Code.WRONG_RANGE, Code.STALE_ROUTE])
def test_a_wrong_route_is_refreshed_before_anything_is_sent(code: Code) -> None:
    made = producer()
    made.send(0, b"k", 0)
    made.take_actions()
    made.on_answer(1, ProduceAnswer(code), 1)
    assert made.take_actions() == [RefreshRoute()]
    made.on_route(NEW, 3)
    assert sent(made) == [(1, 1, 1)]


def test_no_answer_sends_again_with_the_same_sequences() -> None:
    made = producer()
    for _ in range(2):
        made.send(0, b"k", 0)
    made.take_actions()
    made.tick(99)
    assert made.take_actions() == []
    made.tick(100)
    assert sent(made) == [(0, 1, 1), (0, 2, 1)]


def test_out_of_sequence_begins_at_the_first_unacknowledged() -> None:
    made = producer()
    for _ in range(3):
        made.send(0, b"k", 0)
    made.take_actions()
    made.on_answer(2, ProduceAnswer(Code.OUT_OF_SEQ, expected=1), 1)
    made.tick(10)
    assert sent(made) == [(0, 1, 1), (0, 2, 1), (0, 3, 1)]


def test_a_broker_that_forgot_what_it_acknowledged_fails_the_logical_partition() -> None:
    made = producer()
    for _ in range(2):
        made.send(0, b"k", 0)
    made.on_answer(1, ProduceAnswer(Code.OK, 1), 1)
    made.take_actions()
    made.on_answer(2, ProduceAnswer(Code.OUT_OF_SEQ, expected=1), 2)
    assert made.take_actions() == [Failed(0, 2, Code.OUT_OF_SEQ)]


@pytest.mark.parametrize("code", [Code.PRODUCER_FENCED, Code.BAD_HASH])
def test_what_cannot_be_sent_fails_with_all_later_ones(code: Code) -> None:
    made = producer()
    made.send(0, b"k", 0)
    made.take_actions()
    made.on_answer(1, ProduceAnswer(code), 1)
    made.send(0, b"k", 2)
    assert made.take_actions() == [Failed(0, 1, code), Failed(0, 2, code)]


def test_what_was_not_sent_yet_is_dropped_when_it_comes_again_or_is_stored() -> None:
    made = producer()
    for _ in range(3):
        made.send(0, b"k", 0)
    made.take_actions()
    assert not made.is_stale(2)
    made.on_answer(1, ProduceAnswer(Code.NOT_OPEN), 1)
    made.tick(10)
    assert sent(made) == [(0, 1, 1), (0, 2, 1), (0, 3, 1)]
    # Of the first round.
    assert [made.is_stale(ticket) for ticket in (1, 2, 3, 4, 5, 6)] == [True] * 3 + [False] * 3
    made.on_answer(5, ProduceAnswer(Code.OK), 11)
    assert [made.is_stale(ticket) for ticket in (4, 5, 6)] == [True, True, False]
    made.fail(0, Code.BAD_HASH)
    assert made.is_stale(6)


def test_messages_that_are_sent_together_have_one_outcome() -> None:
    """Sequences have no gaps, and it is their number that is bounded."""
    made = producer(in_flight_max=10)
    sequences = [made.send(0, b"", 0, count=count) for count in (4, 1, 5, 3)]
    assert sequences == [1, 5, 6, 11]
    assert sent(made) == [(0, 1, 1), (0, 5, 1), (0, 6, 1)]
    made.on_answer(1, ProduceAnswer(Code.OK, 1), 1)
    assert made.take_actions()[0] == Stored(0, 4)
    made.on_answer(3, ProduceAnswer(Code.NOT_LEADER), 2)
    made.on_answer(2, ProduceAnswer(Code.OK, 5), 2)
    assert made.take_actions()[0] == Stored(0, 5)
    made.tick(100)
    assert sent(made) == [(0, 6, 6), (0, 11, 6)]
    made.fail(0, Code.BAD_HASH)
    assert made.take_actions() == [Failed(0, 6, Code.BAD_HASH)]
    for wrong in (0, 11):
        with pytest.raises(AssertionError):
            made.send(1, b"", 0, count=wrong)
