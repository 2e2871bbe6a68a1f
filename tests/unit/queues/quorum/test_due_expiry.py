"""Expiry by due time: what has expired leaves wherever it stands (ADR 0043)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.backlog import FRONT, ORIGINAL, TAIL
from convoymq.queues.quorum.due_expiry import (
    SCANNED_RUNS_MAX,
    SEGMENT_RUNS,
    SWEEP_MS,
    SWEEP_RUNS_MAX,
    SegmentedFifo,
    cut_expired,
)
from convoymq.queues.quorum.levels import mark_of
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.runs import Fifo
from convoymq.queues.quorum.settings import machine_settings
from convoymq.replication.machine import EFFECT_DEAD_LETTERS
from tests.unit.queues.quorum.support import A, B, Queue, apply
from tests.unit.queues.quorum.test_groups import record_in
from tests.unit.queues.quorum.test_limits import dues, restored, second

SPARE_BYTES = SEGMENT_RUNS * 32 // 8 + 512
"""Of the segment that takes more."""


def tick(queue: Queue, after_ms: int) -> list[Any]:
    queue.log.leader(batch.CMD_TICK)
    return queue.step(after_ms)


def expired(queue: Queue) -> int:
    return queue.machine.totals()["dropped_expired"]


def test_a_message_leaves_behind_one_that_lives() -> None:
    for by_due in (0, 1):
        queue = second(expire_by_due=by_due, dead_letters=1)
        queue.log.publish_as(A, 10)
        queue.log.publish_as(A, 20, expiration="500")
        queue.log.publish_as(A, 30)
        effects = queue.step()
        due = queue.log.time_ms + 500
        assert dues(effects) == ([due] if by_due else [])
        assert (queue.machine.next_due_ms() == due) == bool(by_due)
        tick(queue, 499)
        assert queue.machine.totals()["ready"] == 3
        effects = tick(queue, 1)
        left = [effect[2] for effect in effects if effect[0] == EFFECT_DEAD_LETTERS]
        assert left == ["expired"] * by_due
        totals = queue.machine.totals()
        assert (totals["ready"], totals["ready_bytes"]) == ((2, 40) if by_due else (3, 60))
        assert queue.machine.next_due_ms() is None
        restored(queue)


def test_the_entries_of_what_left_are_live_no_more() -> None:
    queue = second(expire_by_due=1)
    for i in range(100):
        queue.log.publish_as(A, 1, expiration=None if i % 10 == 0 else "200")
        queue.step()
    assert [high - low for low, high in queue.machine.live_ranges()] == [99]
    tick(queue, 200)
    kept = [index for low, high in queue.machine.live_ranges() for index in range(low, high + 1)]
    assert len(kept) == queue.machine.backlog.ready() == 10
    assert kept == queue.machine.backlog.fresh.indexes()


def test_what_comes_back_behind_a_tick_of_its_time_is_looked_for_again() -> None:
    queue = second(expire_by_due=1)
    queue.log.publish_as(A, 1)
    queue.log.publish_as(A, 1, expiration="500")
    assert len(dues(queue.step())) == 1
    queue.log.checkout(B, 1, 2)
    queue.step()
    queue.log.credit(B, 1, 0)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.log.return_(B, 1, 0, 1)
    effects = queue.step(500)
    assert dues(effects)[-1] == queue.log.time_ms + 1
    assert queue.machine.totals()["ready"] == 2
    tick(queue, 1)
    assert (expired(queue), queue.machine.totals()["ready"]) == (1, 1)


@pytest.mark.parametrize("position", [0, ORIGINAL, FRONT, TAIL])
def test_what_came_back_leaves_as_well(position: int) -> None:
    queue = second(expire_by_due=1, requeue_position=position)
    queue.log.checkout(B, 1, 2)
    for expiration, priority in ((None, 9), ("300", 9), (None, None), ("300", 3)):
        queue.log.publish_as(A, 1, expiration=expiration, priority=priority)
    queue.step()
    queue.log.credit(B, 1, 0)
    queue.log.return_(B, 1, 0, 1)
    queue.step()
    assert queue.machine.totals()["ready"] == 4
    restored(queue)
    tick(queue, 300)
    assert (expired(queue), queue.machine.totals()["ready"]) == (2, 2)


def test_what_is_blocked_in_a_group_leaves_and_its_head_stays() -> None:
    queue = second(expire_by_due=1)
    for group, text in ((b"a", None), (b"a", "300"), (b"b", "300"), (b"b", "300"), (b"b", None)):
        record, flags = record_in(group, 10, None, text)
        queue.log._target(A).publish([record], 10, 0, flags)
    queue.step()
    assert queue.machine.backlog.groups.messages == 3
    tick(queue, 300)
    assert expired(queue) == 3
    # The last one of b has made its way to its place.
    assert queue.machine.backlog.groups.messages == 0
    assert queue.machine.backlog.ready() == 2
    restored(queue)


def test_what_somebody_holds_does_not_leave() -> None:
    queue = second(expire_by_due=1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish_as(A, 1, expiration="300")
    queue.step()
    tick(queue, 1_000)
    assert (expired(queue), queue.machine.backlog.unacked) == (0, 1)


def test_the_turn_of_the_tail_does_not_come_nearer() -> None:
    queue = second(expire_by_due=1, requeue_position=TAIL)
    for text in (None, "300", None, None):
        queue.log.publish_as(A, 1, expiration=text)
        queue.step()
    queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    first = queue.log.entries[-1].index
    for text in ("300", None):
        queue.log.publish_as(A, 1, expiration=text)
        queue.step()
    assert queue.machine.backlog.ahead() == 3
    tick(queue, 300)
    assert expired(queue) == 2
    assert queue.machine.backlog.ahead() == 2
    order = [run[0] for run in queue.machine.backlog.in_order()]
    assert order[2] < order[0] < order[1] < first < order[3], "two, what came back, one"


def test_work_of_an_entry_is_bounded_and_goes_on() -> None:
    queue = Queue()
    queue.machine.set_version(2)
    queue.log.configure(expire_by_due=1)
    apply(queue.machine, queue.log.seal())
    queue.log.publish_as(A, 1)
    messages = 2 * SWEEP_RUNS_MAX + 10
    for i in range(messages):
        # Each of another time: a run of its own.
        queue.log.publish_as(A, 1, expiration=str(100_000 + i % 7))
    apply(queue.machine, queue.log.seal())
    assert queue.machine.memory_bytes() <= 32 * messages + SPARE_BYTES
    gone = []
    for after_ms in (200_000, 1, 1, 1):
        queue.log.leader(batch.CMD_TICK)
        apply(queue.machine, queue.log.seal(after_ms))
        gone.append(expired(queue))
        waits = queue.machine.next_due_ms()
        assert (waits is not None and waits <= queue.log.time_ms) == (gone[-1] < messages)
    assert gone == [SWEEP_RUNS_MAX, 2 * SWEEP_RUNS_MAX, messages, messages]
    restored(queue)


def test_sweeps_keep_a_distance() -> None:
    queue = second(expire_by_due=1)
    queue.log.publish_as(A, 1)
    for i in range(20):
        queue.log.publish_as(A, 1, expiration=str(1_000 + 10 * i))
    queue.step()
    seen = []
    for _ in range(130):
        tick(queue, 10)
        seen.append(expired(queue))
    steps = [i for i in range(1, len(seen)) if seen[i] > seen[i - 1]]
    assert len(steps) <= 4
    assert all(later - one >= SWEEP_MS // 10 for one, later in pairwise(steps))
    assert seen[-1] == 20


def test_the_policy_acts_on_what_is_there_and_back() -> None:
    queue = second()
    queue.log.publish_as(A, 1)
    for priority in (None, 9, 0):
        queue.log.publish_as(A, 1, priority=9)
        queue.log.publish_as(A, 1, priority=priority, expiration="100")
        queue.log.publish_as(A, 1, priority=0)
    queue.step()
    tick(queue, 500)
    assert expired(queue) == 0
    before = queue.machine.backlog.ready()
    queue.log.configure(expire_by_due=1)
    effects = queue.step()
    assert dues(effects), "nobody looks"
    tick(queue, 1)
    assert expired(queue) == 3
    queue.log.configure(expire_by_due=0)
    queue.step()
    assert queue.machine.backlog.ready() == before - 3
    queue.log.publish_as(A, 1, expiration="100")
    queue.step()
    tick(queue, 500)
    assert expired(queue) == 3
    restored(queue)


def test_a_large_container_is_looked_at_when_it_is_smaller() -> None:
    queue = second(expire_by_due=1)
    queue.log.publish_as(A, 1)
    queue.step()
    returned = queue.machine.backlog.returned
    for i in range(SCANNED_RUNS_MAX + 1):
        mark = mark_of(4, 2_000_000 if i else 0)
        returned.push(1, 1 << 20, 2 * i, 1, 1, 1, 0, mark)
    expiry = queue.machine.backlog.expiry
    assert expiry is not None
    expiry.begin()
    assert expiry.sweep(3_000_000) == []
    assert expiry.wanted_ms == 3_001_000
    returned.take(1)
    assert len(expiry.sweep(3_001_000)) == SWEEP_RUNS_MAX


def test_keys_of_users_become_the_setting() -> None:
    assert machine_settings({"message-expiry": "due"})["expire_by_due"] == 1
    assert machine_settings({"message-expiry": "head"})["expire_by_due"] == 0
    assert machine_settings({})["expire_by_due"] == 0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(1, 5), st.sampled_from((0, 0, 1, 5, 9, 50))),
        st.tuples(st.just("take"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("expire"), st.integers(1, 3), st.integers(1, 20)),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(steps, st.integers(1, 4))
def test_segments_are_as_one_fifo(taken: list[tuple[str, int, int]], runs: int) -> None:
    """The same runs in one FIFO, from which those that have expired are cut."""
    module = "convoymq.queues.quorum.due_expiry.SEGMENT_RUNS"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, runs)
        plain, segmented = Fifo(False), SegmentedFifo()
        for number, (kind, count, due) in enumerate(taken):
            if kind == "push":
                for fifo in (plain, segmented):
                    fifo.push(number, 0, 0, count, 3 * count, 0, 0, mark_of(4, due))
            elif kind == "take" and plain.messages:
                assert segmented.head_place() == plain.head_place()
                assert segmented.head_mark() == plain.head_mark()
                assert segmented.head_amount() == plain.head_amount()
                assert segmented.take(count) == plain.take(count)
            elif kind == "expire":
                found = segmented.take_expired(due, count)
                expected, first = cut_expired(plain, due, count)
                assert found == expected
                assert segmented.first_due_ms() == first
            assert segmented.runs() == plain.runs()
            assert (segmented.messages, segmented.size) == (plain.messages, plain.size)
            assert segmented.run_count() == plain.run_count()
            assert segmented.indexes() == plain.indexes()
            if plain.messages:
                assert segmented.first_index() == plain.first_index()
                assert segmented.last_index() == plain.last_index()
            for place, room in ((0, 100), (number // 2, 3), (number, 1)):
                asked = (place, 0, 1, room, 4)
                assert segmented.runs_from(*asked) == plain.runs_from(*asked)
            again = SegmentedFifo()
            again.unpack(segmented.pack())
            assert again.runs() == segmented.runs()
            assert again.pack() == segmented.pack()
            spans = [i for low, high in again.spans() for i in range(low, high + 1)]
            assert spans == sorted(set(plain.indexes()))


def test_a_segment_is_closed_without_spare_room() -> None:
    fifo = SegmentedFifo()
    for i in range(10 * SEGMENT_RUNS):
        fifo.push(i, 0, 0, 1, 1, 0, 0, mark_of(4, 1_000))
    assert fifo.memory_bytes() <= 32 * fifo.messages + SPARE_BYTES


def test_a_replica_from_a_snapshot_decides_alike() -> None:
    queue = second(expire_by_due=1)
    copy = QuorumMachine()
    for i in range(300):
        queue.log.publish_as(A, 1, expiration=str(50 + 37 * i % 400) if i % 5 else None)
        effects = queue.step(3)
        if i == 100:
            copy.restore(queue.machine.snapshot())
        elif i > 100:
            assert apply(copy, queue.log.entries[-1]) == effects
            assert copy.snapshot() == queue.machine.snapshot()
    assert expired(queue) > 100
