"""Time limits, lengths and priorities of the machine (ADR 0043)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.quorum.levels import due_of, level_of, mark_of
from convoymq.replication.machine import (
    EFFECT_DELIVER,
    EFFECT_REFUSING,
    EFFECT_TIMER,
    EFFECT_UNUSED,
)
from tests.unit.queues.quorum.support import (
    A,
    B,
    Queue,
    apply,
    deliveries,
    expand,
    places,
    replies,
    restored,
    second,
)


def dues(effects: list[Any]) -> list[int]:
    return [effect[1] for effect in effects if effect[0] == EFFECT_TIMER]


def refusing(effects: list[Any]) -> list[bool]:
    return [effect[1] for effect in effects if effect[0] == EFFECT_REFUSING]


def test_marks_hold_level_and_due_time() -> None:
    assert mark_of(4, 0) == 0
    for level in range(32):
        mark = mark_of(level, 1_700_000_000_000)
        assert (level_of(mark), due_of(mark)) == (level, 1_700_000_000_000)
        assert mark < 1 << 64


# Time limits.


def test_a_queue_ttl_drops_what_nobody_took_in_time() -> None:
    queue = second(message_ttl_ms=100)
    queue.log.publish(A, [5, 5])
    effects = queue.step()
    due = queue.log.time_ms + 100
    assert dues(effects) == [due]
    assert queue.machine.next_due_ms() == due
    queue.log.leader(batch.CMD_TICK)
    queue.step(99)
    assert queue.machine.backlog.ready() == 2
    queue.log.leader(batch.CMD_TICK)
    queue.step(1)
    assert queue.machine.backlog.ready() == 0
    assert queue.machine.totals()["dropped_expired"] == 2
    assert queue.machine.next_due_ms() is None


def test_the_lower_of_queue_ttl_and_expiration_counts() -> None:
    queue = second(message_ttl_ms=100)
    for expiration in ("50", "200", None):
        queue.log.publish_as(A, 1, expiration=expiration)
    queue.step()
    now = queue.log.time_ms
    found = [due_of(run[7]) - now for run in queue.machine.backlog.fresh.runs()]
    assert found == [50, 100, 100]


def test_a_new_ttl_leaves_what_is_in_the_queue() -> None:
    queue = second(message_ttl_ms=100)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.configure(message_ttl_ms=-1)
    queue.step()
    queue.log.publish(A, [1])
    queue.step(10)
    queue.log.leader(batch.CMD_TICK)
    queue.step(10_000)
    assert queue.machine.backlog.ready() == 1


def test_ttl_0_reaches_only_a_consumer_that_waits() -> None:
    queue = second(message_ttl_ms=0)
    queue.log.checkout(A, 1, 1)
    queue.log.publish(B, [1, 1])
    effects = queue.step()
    assert len(places(queue, effects, A)) == 1
    queue.log.leader(batch.CMD_TICK)
    queue.step(1)
    assert queue.machine.backlog.ready() == 0
    assert queue.machine.totals()["dropped_expired"] == 1


def test_what_is_held_does_not_expire_and_what_comes_back_late_does() -> None:
    queue = second(message_ttl_ms=100)
    queue.log.publish(B, [1, 1])
    queue.log.checkout(A, 1, 2)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.step(1_000)
    assert queue.machine.backlog.unacked == 2
    restored(queue)
    queue.log.credit(A, 1, 0)
    queue.log.return_(A, 1, 0, 0, failed=True)
    queue.step()
    assert queue.machine.totals()["dropped_expired"] == 1
    assert queue.machine.backlog.ready() == 0


def test_a_return_keeps_the_time() -> None:
    queue = second(message_ttl_ms=100)
    queue.log.publish(B, [1])
    queue.step()
    due = queue.log.time_ms + 100
    queue.log.checkout(A, 1, 1)
    queue.step(50)
    queue.log.credit(A, 1, 0)
    queue.log.return_(A, 1, 0, 0)
    effects = queue.step()
    assert dues(effects) == [due]
    restored(queue)
    queue.log.leader(batch.CMD_TICK)
    queue.step(50)
    assert queue.machine.backlog.ready() == 0


def test_an_expired_message_behind_a_live_one_stays() -> None:
    queue = second()
    queue.log.publish(A, [1])
    queue.log.publish_as(A, 1, expiration="10")
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    effects = queue.step(100)
    assert queue.machine.backlog.ready() == 2
    assert dues(effects) == []
    queue.log.get(B, settled=True)
    effects = queue.step()
    # What was behind the head that was taken has expired and is gone with it.
    assert replies(effects, B)[-1][-1] == [0, 0]
    assert queue.machine.totals()["dropped_expired"] == 1


def test_each_level_has_a_head_of_its_own() -> None:
    queue = second()
    queue.log.publish_as(A, 1, priority=9)
    queue.log.publish_as(A, 1, priority=4, expiration="10")
    queue.log.publish_as(A, 1, priority=1, expiration="20")
    effects = queue.step()
    assert dues(effects) == [queue.log.time_ms + 10]
    queue.log.leader(batch.CMD_TICK)
    queue.step(10)
    assert queue.machine.backlog.ready() == 2
    queue.log.leader(batch.CMD_TICK)
    queue.step(10)
    assert queue.machine.backlog.ready() == 1


def test_an_expired_run_is_not_handed_out_behind_a_live_one() -> None:
    queue = second()
    queue.log.publish(A, [1])
    queue.log.publish_as(A, 1, expiration="10")
    queue.log.publish(A, [1])
    queue.step()
    queue.log.checkout(B, 1, 10)
    effects = queue.step(100)
    assert len(places(queue, effects, B)) == 2


def test_a_reservation_takes_nothing_that_has_expired() -> None:
    queue = second()
    queue.log.publish(A, [1])
    queue.log.publish_as(A, 1, expiration="10")
    queue.log.publish(A, [1])
    queue.step()
    queue.log.reservation(B, "open", owner="x", ttl_ms=10_000)
    effects = queue.step(100)
    epoch = replies(effects, B)[-1][-1]["epoch"]
    queue.log.reservation(B, "take", epoch=epoch, fencing_token=1, max=10)
    effects = queue.step()
    assert replies(effects, B)[-1][-1]["next"] == 2


def test_version_1_looks_at_no_attribute() -> None:
    queue = Queue()
    queue.log.publish_as(A, 1, priority=9, expiration="1")
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.step(1_000)
    assert [run[7] for run in queue.machine.backlog.fresh.runs()] == [0]
    assert b"attributes" not in queue.machine.snapshot()
    queue.machine.set_version(2)
    restored(queue)
    queue.log.publish_as(A, 1, priority=9, expiration="1")
    queue.step()
    assert queue.machine.backlog.levels.messages == 1


# An unused queue.


def test_an_unused_queue_is_to_be_deleted_again_and_again() -> None:
    queue = second(expires_ms=1_000)
    began = queue.log.time_ms
    assert queue.machine.next_due_ms() == began + 1_000
    queue.log.leader(batch.CMD_TICK)
    assert (EFFECT_UNUSED,) not in queue.step(999)
    queue.log.leader(batch.CMD_TICK)
    effects = queue.step(1)
    assert (EFFECT_UNUSED,) in effects
    assert dues(effects) == [queue.log.time_ms + 5_000]
    queue.log.leader(batch.CMD_TICK)
    assert (EFFECT_UNUSED,) in queue.step(5_000)


def test_a_consumer_or_a_get_keeps_an_unused_queue_and_a_publish_does_not() -> None:
    queue = second(expires_ms=1_000)
    queue.log.checkout(A, 1)
    queue.step()
    assert queue.machine.next_due_ms() is None
    queue.log.cancel(A, 1)
    effects = queue.step(5_000)
    assert dues(effects) == [queue.log.time_ms + 1_000]
    queue.log.get(B)
    effects = queue.step(500)
    due = queue.log.time_ms + 1_000
    assert dues(effects) == [due]
    queue.log.publish(B, [1])
    assert dues(queue.step(100)) == []
    assert queue.machine.next_due_ms() == due
    restored(queue)
    assert queue.machine.next_due_ms() == due


# Lengths.


def test_drop_head_drops_what_would_be_next() -> None:
    queue = second(max_length=3)
    for _ in range(5):
        queue.log.publish(A, [1])
        queue.step()
    assert queue.machine.backlog.ready() == 3
    assert [run[0] for run in queue.machine.backlog.fresh.runs()] == [4, 5, 6]
    assert queue.machine.totals()["dropped_maxlen"] == 2


def test_a_consumer_is_served_before_the_length_is_looked_at() -> None:
    queue = second(max_length=0)
    queue.log.checkout(B, 1, 2)
    queue.log.publish(A, [1, 1, 1])
    effects = queue.step()
    assert len(places(queue, effects, B)) == 2
    assert queue.machine.totals()["dropped_maxlen"] == 1


def test_what_comes_back_counts_and_goes_first() -> None:
    queue = second(max_length=2)
    queue.log.publish(A, [1, 1])
    queue.log.checkout(B, 1, 2)
    queue.step()
    queue.log.publish(A, [1, 1])
    queue.log.credit(B, 1, 0)
    queue.step()
    queue.log.return_(B, 1, 0, 0)
    queue.step()
    assert queue.machine.backlog.returned.messages == 0
    assert queue.machine.backlog.fresh.messages == 2


@pytest.mark.parametrize(("sizes", "limit", "left"), [([10] * 5, 25, 2), ([30], 25, 0)])
def test_bytes_are_kept_within_their_limit(sizes: list[int], limit: int, left: int) -> None:
    queue = second(max_length_bytes=limit)
    queue.log.publish(A, sizes)
    queue.step()
    assert queue.machine.backlog.ready() == left
    assert queue.machine.backlog.ready_bytes() <= limit


def test_a_lower_limit_acts_at_once() -> None:
    queue = second()
    queue.log.publish(A, [1] * 10)
    queue.step()
    queue.log.configure(max_length=4)
    queue.step()
    assert queue.machine.backlog.ready() == 4


def test_reject_publish_says_when_it_begins_and_ends() -> None:
    queue = second(max_length=10, reject_publish=1)
    queue.log.publish(A, [1] * 10)
    assert refusing(queue.step()) == []
    queue.log.publish(A, [1])
    assert refusing(queue.step()) == [True]
    restored(queue)
    # What is under way is accepted.
    queue.log.publish(A, [1])
    assert refusing(queue.step()) == []
    assert queue.machine.backlog.ready() == 12
    queue.log.checkout(B, 1, 3)
    assert refusing(queue.step()) == []
    queue.log.credit(B, 1, 4)
    assert refusing(queue.step()) == [False]
    assert queue.machine.backlog.ready() == 8


def test_without_the_limit_nobody_is_refused() -> None:
    for changed in ({"reject_publish": -1}, {"max_length": -1}, {"max_length": 100}):
        queue = second(max_length=1, reject_publish=1)
        queue.log.publish(A, [1] * 3)
        assert refusing(queue.step()) == [True]
        queue.log.configure(**changed)
        assert refusing(queue.step()) == [False]


# Priorities.


def test_levels_are_served_from_the_highest_and_what_came_back_first() -> None:
    queue = second()
    for priority in (0, None, 31, 4, 200, 5):
        queue.log.publish_as(A, 1, priority=priority)
        queue.step()
    # Entries: 1 = 0, 2 = none, 3 = 31, 4 = 4, 5 = 200, 6 = 5.
    queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    restored(queue)
    queue.log.checkout(B, 1, 10)
    assert places(queue, queue.step(), B) == [3, 5, 6, 2, 4, 1]


def test_drop_head_drops_the_highest_level_first() -> None:
    queue = second(max_length=1)
    queue.log.publish_as(A, 1, priority=9)
    queue.log.publish_as(A, 1, priority=1)
    queue.step()
    assert [level_of(run[7]) for run in queue.machine.backlog.ready_runs()] == [1]


def test_what_goes_to_the_tail_loses_its_priority_and_keeps_its_time() -> None:
    queue = second(delivery_limit=-1)
    queue.log.publish_as(A, 1, priority=9, expiration="1000")
    queue.step()
    due = queue.log.time_ms + 1_000
    queue.log.publish_as(A, 1, priority=None)
    queue.step()
    queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    (run,) = queue.machine.backlog.requeued.runs()
    assert (level_of(run[7]), due_of(run[7])) == (4, due)
    queue.log.checkout(B, 1, 10)
    assert places(queue, queue.step(), B) == [3, 2]


def test_purge_empties_all_levels() -> None:
    queue = second()
    for priority in (0, 4, 9):
        queue.log.publish_as(A, 1, priority=priority)
    queue.step()
    queue.log.command(B, batch.CMD_PURGE)
    assert replies(queue.step(), B)[-1][-1] == 3
    assert queue.machine.backlog.ready() == 0


def test_memory_per_message_is_bounded() -> None:
    for settings, priority in (({}, None), ({"message_ttl_ms": 10_000_000}, None), ({}, 9)):
        queue = second(**settings)
        for _ in range(2_000):
            queue.log.publish_as(A, 1, priority=priority)
            apply(queue.machine, queue.log.seal())
        packed = sum(len(f.pack()) for f in queue.machine.backlog.levels.fifos())
        packed += len(queue.machine.backlog.fresh.pack())
        assert packed <= 2_000 * (32 if settings or priority else 24) + 8


# Looking ahead.


@pytest.mark.parametrize("delivery_limit", [-1, 20])
@pytest.mark.parametrize("seed", range(20))
def test_what_would_be_delivered_next_is_known_before(seed: int, delivery_limit: int) -> None:
    """With priorities, and messages that came back to the front or to the tail."""
    rng = Random(seed)
    queue = second(delivery_limit=delivery_limit)
    held: list[int] = []
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            priority = rng.choice((None, None, 0, 4, 9, 31))
            queue.log.publish_as(A, 8, priority)
        if rng.random() < 0.6:
            queue.log.get(B)
        if held and rng.random() < 0.5:
            taken = held.pop(rng.randrange(len(held)))
            queue.log.return_(B, 0, taken, taken, failed=rng.random() < 0.3)
        held += [message_id for message_id, _ in deliveries(queue.step(), B, 0)]
    expected = expand(queue.machine.backlog.in_order())
    assert len(expected) == queue.machine.backlog.ready()
    given: list[tuple[int, int, int]] = []
    queue.log.checkout(A, 1, 1_000)
    for effect in queue.step():
        if effect[0] == EFFECT_DELIVER:
            given += [(effect[4], effect[5], effect[6] + i) for i in range(effect[7])]
    assert given == expected
