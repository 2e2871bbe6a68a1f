"""Deliveries of the quorum queue's machine: who gets how much, and how messages come back."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch
from convoymq.replication.machine import (
    EFFECT_DELIVER,
    EFFECT_NOTE,
)
from tests.unit.queues.quorum.support import (
    A,
    B,
    C,
    Queue,
)


def test_one_consumer_takes_whole_runs() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 500)
    queue.log.publish(A, [1] * 1000)
    delivered = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert [(e[3], e[6], e[7]) for e in delivered] == [(0, 0, 500)]
    queue.log.settle(B, 1, 0, 249)
    delivered = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert [(e[3], e[6], e[7]) for e in delivered] == [(500, 500, 250)]


def test_a_small_queue_is_dealt_message_by_message() -> None:
    queue = Queue()
    for session in (A, B, C):
        queue.log.checkout(session, 1, 100)
    queue.log.publish(A, [1] * 7)
    queue.step()
    held = [queue.machine.deliveries.holds(s, 1) for s in (A, B, C)]
    assert [[run[2] for _, run in h] for h in held] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_large_queue_is_dealt_in_turns_that_shrink() -> None:
    queue = Queue()
    for session in (A, B):
        queue.log.checkout(session, 1, 5000)
    queue.log.publish(A, [1] * 3200)
    turns = [e[7] for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert turns[0] == 100
    assert turns == sorted(turns, reverse=True)
    assert turns[-30:] == [1] * 30
    held = [sum(r[3] for _, r in queue.machine.deliveries.holds(s, 1)) for s in (A, B)]
    assert abs(held[0] - held[1]) <= 100


def turns(queue: Queue) -> list[int]:
    return [e[7] for e in queue.step() if e[0] == EFFECT_DELIVER]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_busy_consumers_that_settle_many_at_once_get_as_many_at_once(version: int) -> None:
    queue = Queue()
    queue.machine.set_version(version)
    for session in (A, B, C):
        queue.log.checkout(session, 1, 1000)
    queue.log.publish(A, [1] * 90)
    assert turns(queue) == [1] * 90
    for session in (A, B, C):
        queue.log.settle(session, 1, 0, 9)
    queue.step()
    # They hold 20 each, and have settled 10 each with one command.
    queue.log.publish(A, [1] * 35)
    assert turns(queue) == ([10, 10, 10, 5] if version >= 2 else [1] * 35)
    copy = type(queue.machine)()
    copy.restore(queue.machine.snapshot())
    assert copy.state_hash() == queue.machine.state_hash()
    packed = {len(packed) for session in copy._pack()["sessions"] for packed in session[3]}  # type: ignore[attr-defined]
    assert packed == {{1: 10, 2: 11, 3: 13}[version]}


def test_consumers_that_hold_little_get_message_by_message() -> None:
    """However many one of them has settled at once, and however many another one holds."""
    queue = Queue()
    queue.machine.set_version(2)
    queue.log.checkout(A, 1, 1000)
    queue.log.publish(A, [1] * 100)
    queue.step()
    queue.log.settle(A, 1, 0, 99)
    queue.step()
    for session in (B, C):
        queue.log.checkout(session, 1, 1000)
    queue.log.publish(A, [1] * 5)
    assert turns(queue) == [1] * 5
    # A hoards; B and C settle one by one.
    queue.log.credit(B, 1, 0)
    queue.log.credit(C, 1, 0)
    queue.log.publish(A, [1] * 900)
    queue.step()
    for session in (B, C):
        queue.log.settle(session, 1, 0, 0)
        queue.log.credit(session, 1, 1000)
    queue.log.credit(A, 1, 0)
    queue.step()
    queue.log.publish(A, [1] * 8)
    assert turns(queue) == [1] * 8


def quick_consumers(settled_after_ms: int = 1) -> Queue:
    """Two consumers that hold nothing, and have settled 8 each with one command three times, so
    long after their last turn."""
    queue = Queue()
    queue.machine.set_version(3)
    for session in (A, B):
        queue.log.checkout(session, 1, 1000)
    for k in range(3):
        queue.log.publish(A, [1] * 16)
        queue.step()
        for session in (A, B):
            queue.log.settle(session, 1, 8 * k, 8 * k + 7)
        queue.step(settled_after_ms)
    return queue


def dealt(queue: Queue) -> list[tuple[int, int]]:
    """(session, messages) of each delivery of a step."""
    return [(e[1], e[7]) for e in queue.step() if e[0] == EFFECT_DELIVER]


def test_who_settles_quickly_is_given_what_it_settles_at_once() -> None:
    """Twice as many each time, and never more than completes its batch."""
    queue = quick_consumers()
    queue.log.publish(A, [1] * 20)
    assert dealt(queue) == [(A, 8), (B, 8), (A, 4)]


def test_who_settles_slowly_is_given_one_by_one() -> None:
    queue = quick_consumers(settled_after_ms=101)
    queue.log.publish(A, [1] * 4)
    assert dealt(queue) == [(A, 1), (B, 1), (A, 1), (B, 1)]


def test_a_turn_goes_on_when_messages_come_until_the_batch_is_complete() -> None:
    """So it is settled as a whole, and not in pieces with the next turns of all others between."""
    queue = quick_consumers()
    queue.log.publish(A, [1] * 3)
    assert dealt(queue) == [(A, 3)]
    copy = type(queue.machine)()
    copy.restore(queue.machine.snapshot())
    assert copy.consumers.service_queue() == [(A, 1), (B, 1)]
    queue.log.publish(A, [1] * 11)
    assert dealt(queue) == [(A, 5), (B, 6)]
    queue.log.publish(A, [1] * 3)
    assert dealt(queue) == [(B, 2), (A, 1)]


def test_who_holds_messages_for_long_is_given_one_by_one() -> None:
    """However quick it was before: it may be stuck."""
    queue = quick_consumers()
    queue.log.publish(A, [1] * 2)
    assert dealt(queue) == [(A, 2)]
    queue.step(100)
    queue.log.publish(A, [1] * 4)
    # A has not settled its two for 101 ms; B holds nothing.
    assert dealt(queue) == [(A, 1), (B, 3)]


def test_a_slow_settle_halves_the_turn() -> None:
    queue = quick_consumers()
    queue.log.publish(A, [1] * 16)
    assert turns(queue) == [8, 8]
    for session in (A, B):
        queue.log.settle(session, 1, 24, 31)
    queue.step(101)
    queue.log.publish(A, [1] * 8)
    assert dealt(queue) == [(A, 4), (B, 4)]


@pytest.mark.parametrize(
    ("cause", "counts"),
    [
        ("nack", (1, 0)),
        ("reject", (1, 1)),
        ("close", (1, 1)),
        ("down", (1, 1)),
        ("timeout", (1, 0)),
        ("gone", (1, 1)),
        ("restarted", (1, 1)),
    ],
)
def test_counts_by_cause(cause: str, counts: tuple[int, int]) -> None:
    queue = Queue()
    log = queue.log
    log.checkout(B, 1)
    log.publish(A, [1])
    queue.step()
    if cause in ("nack", "reject"):
        log.credit(B, 1, 0)
        log.return_(B, 1, 0, 0, failed=cause == "reject")
    elif cause == "close":
        log.close(B)
    elif cause == "down":
        log.session_down(B)
    elif cause == "timeout":
        log.node_down(2)
        queue.step()
        log.leader(batch.CMD_TICK)
    elif cause == "gone":
        log.node_down(2, gone=True)
    else:
        log.node_up(2, incarnation=2)
    queue.step(60_000)
    assert [run[5:7] for run in queue.machine.backlog.returned.runs()] == [counts]


def test_what_goes_over_the_limit_is_noted_and_counted() -> None:
    queue = Queue(delivery_limit=0)
    queue.log.checkout(B, 1)
    queue.log.publish(A, [1, 1])
    queue.log.return_(B, 1, 0, 1, failed=True)
    notes = [e[1:] for e in queue.step() if e[0] == EFFECT_NOTE]
    assert notes == [("quorum.delivery_limit", {"count": 2})]
    assert queue.machine.totals()["dropped_delivery_limit"] == 2


def test_discarded_messages_are_gone() -> None:
    queue = Queue()
    queue.log.checkout(B, 1)
    queue.log.publish(A, [3, 3, 3])
    queue.log.discard(B, 1, 0, 1)
    queue.step()
    assert queue.machine.backlog.dropped["rejected"] == 2
    assert queue.machine.totals()["unacked_bytes"] == 3


def test_settling_what_is_not_held_is_ignored() -> None:
    queue = Queue()
    queue.log.checkout(B, 1)
    queue.log.publish(A, [1] * 3)
    queue.log.settle(B, 1, 1, 1)
    queue.log.settle(B, 1, 0, 50)
    queue.log.settle(B, 9, 0, 0)
    queue.step()
    assert queue.machine.backlog.acked == 3
