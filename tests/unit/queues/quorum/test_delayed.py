"""Messages that wait for a time, on the machine alone."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.amqp091 import _spec as spec
from convoymq.kernels import batch
from convoymq.model.tables import Field, Table
from convoymq.queues.quorum import delayed
from convoymq.queues.quorum.delayed import BAD_CANCEL, CANCEL_SCHEDULED
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER, EFFECT_TIMER
from tests.unit.kernels.columns_reference import Message
from tests.unit.queues.quorum.support import Log, apply, session_id

A, B = session_id(1), session_id(2)
SIZE = 10


class Queue:
    """A machine of version 2, its log, and the effects of the last entry."""

    def __init__(self, version: int = 2, **settings: int) -> None:
        self.machine, self.log = QuorumMachine(), Log()
        self.machine.set_version(version)
        self.effects: list[Any] = []
        if settings:
            self.log.configure(**settings)
            self.step()

    def publish(self, when: int | None = None, *, at: int | None = None, **properties: Any) -> None:
        """A message with `x-delay`, or `x-deliver-at`."""
        fields = []
        if when is not None:
            fields.append(("x-delay", Field("l", when)))
        if at is not None:
            fields.append(("x-deliver-at", Field("l", at)))
        headers = Table.from_fields(fields)
        record = Message("", "q", spec.Properties(headers=headers, **properties), bytes(SIZE))
        flags = (
            8 | (4 if "expiration" in properties else 0) | (2 if "priority" in properties else 0)
        )
        self.log._target(A).publish([record.record()], SIZE, 0, flags)

    def step(self, after_ms: int = 1) -> Any:
        entry = self.log.seal(after_ms)
        self.effects = apply(self.machine, entry)
        check_invariants(self.machine)
        return entry

    def tick(self, after_ms: int) -> None:
        self.log.leader(batch.CMD_TICK)
        self.step(after_ms)

    def given(self) -> list[tuple[int, int, int]]:
        """(entry, record, acquired) of what the last entry handed out."""
        return [
            (e[4], e[6] + k, e[8])
            for e in self.effects
            if e[0] == EFFECT_DELIVER
            for k in range(e[7])
        ]

    def timers(self) -> list[int]:
        return [e[1] for e in self.effects if e[0] == EFFECT_TIMER]

    def answers(self) -> list[tuple[int, Any]]:
        return [(e[3], e[4]) for e in self.effects if e[0] == EFFECT_APPLIED and e[4] is not None]

    def cancel(self, *messages: Any) -> tuple[int, Any]:
        self.log.reservation(B, CANCEL_SCHEDULED, messages=list(messages))
        self.step()
        return self.answers()[-1]


def restored(machine: QuorumMachine) -> QuorumMachine:
    copy = QuorumMachine()
    copy.restore(machine.snapshot())
    assert copy.snapshot() == machine.snapshot()
    check_invariants(copy)
    return copy


def test_a_message_is_ready_with_the_first_entry_at_its_time() -> None:
    queue = Queue()
    queue.log.checkout(B, 1)
    queue.publish(50)
    entry = queue.step()
    assert not queue.given()
    assert queue.timers() == [entry.time_ms + 50]
    assert queue.machine.next_due_ms() == entry.time_ms + 50
    totals = queue.machine.totals()
    assert (totals["ready"], totals["delayed"], totals["delayed_bytes"]) == (0, 1, SIZE)
    queue.tick(49)
    assert not queue.given()
    queue.machine = restored(queue.machine)
    queue.tick(1)
    assert queue.given() == [(entry.index, 0, 0)]
    assert queue.machine.totals()["delayed"] == 0


def test_an_entry_without_a_tick_lets_them_go_too() -> None:
    queue = Queue()
    queue.publish(5)
    queue.step()
    queue.log.checkout(B, 1)
    queue.step(5)
    assert len(queue.given()) == 1


def test_what_is_due_goes_by_time_then_by_the_log_and_behind_what_is_ready() -> None:
    queue = Queue()
    for delay in (30, 20, 30, 10):
        queue.publish(delay)
    first = queue.step().index
    queue.publish()
    queue.log.publish(A, [SIZE])
    queue.step()
    queue.tick(40)
    queue.log.checkout(B, 1, 100)
    queue.step()
    assert [row[:2] for row in queue.given()] == [
        (first + 1, 0), (first + 1, 1), (first, 3), (first, 1), (first, 0), (first, 2)
    ]  # fmt: skip


def test_deliver_at_is_a_time_and_the_past_is_now() -> None:
    queue = Queue()
    queue.publish(at=queue.log.time_ms + 100)
    queue.publish(at=queue.log.time_ms)
    queue.publish(-5)
    queue.publish(0)
    queue.publish(at=-1)
    queue.step(10)
    assert queue.machine.totals()["ready"] == 4
    queue.tick(90)
    assert queue.machine.totals()["ready"] == 5


def test_huge_numbers_are_bounded() -> None:
    queue = Queue()
    for number in ((1 << 63) - 1, -(1 << 63)):
        queue.publish(number)
        queue.publish(at=number)
    queue.step()
    assert queue.machine.totals()["delayed"] == 2
    queue.machine = restored(queue.machine)


def test_a_priority_above_the_default_comes_in_front() -> None:
    queue = Queue()
    queue.log.publish(A, [SIZE])
    queue.publish(10, priority=9)
    queue.publish(10, priority=0)
    index = queue.step().index
    queue.tick(10)
    queue.log.checkout(B, 1, 100)
    queue.step()
    assert [row[:2] for row in queue.given()] == [(index, 1), (index, 0), (index, 2)]


def test_the_time_limit_counts_from_publishing() -> None:
    queue = Queue(dead_letters=0)
    queue.publish(50, expiration="20")
    queue.publish(50, expiration="80")
    queue.step()
    queue.tick(30)
    assert queue.machine.totals()["delayed"] == 2
    queue.tick(20)
    totals = queue.machine.totals()
    assert (totals["dropped_expired"], totals["ready"], totals["delayed"]) == (1, 1, 0)
    queue.tick(30)
    assert queue.machine.totals()["dropped_expired"] == 2


def test_what_waits_counts_toward_the_length_and_goes_last() -> None:
    queue = Queue(max_length=3)
    for delay in (40, 30, 50):
        queue.publish(delay)
    queue.log.publish(A, [SIZE])
    queue.step()
    assert queue.machine.totals()["dropped_maxlen"] == 1
    assert queue.machine.totals()["delayed"] == 3
    queue.log.configure(max_length=1)
    queue.step()
    assert [due for due, _ in queue.machine.waiting.rows()] == [queue.log.time_ms - 1 + 50]
    queue = Queue(max_length=1, reject_publish=1)
    queue.publish(10)
    queue.publish(10)
    queue.step()
    assert queue.machine.backlog.refusing


def test_purge_drops_what_waits_and_counts_it() -> None:
    queue = Queue()
    queue.publish(10)
    queue.log.publish(A, [SIZE])
    queue.step()
    queue.log.command(B, batch.CMD_PURGE)
    queue.step()
    assert queue.answers() == [(APPLIED_OK, 2)]
    queue.tick(20)
    assert queue.machine.totals()["ready"] == queue.machine.totals()["delayed"] == 0


def test_a_queue_with_waiting_messages_is_not_empty() -> None:
    queue = Queue()
    queue.publish(10)
    queue.step()
    queue.log.reservation(B, "delete_check", if_empty=True)
    queue.step()
    assert queue.answers() == [(APPLIED_REJECTED, "not_empty")]


def test_cancel_drops_the_messages_that_it_names() -> None:
    queue = Queue()
    for _ in range(5):
        queue.publish(100)
    entry = queue.step()
    ((due, run),) = queue.machine.waiting.rows()
    offset = run[1]
    names = [[due, entry.index, offset, record] for record in (2, 4, 4, 7)]
    assert queue.cancel(*names) == (APPLIED_OK, {"cancelled": 2})
    assert queue.cancel([due + 1, entry.index, offset, 0]) == (APPLIED_OK, {"cancelled": 0})
    assert queue.cancel([0, 0, 0, 0], [1 << 62, 0, 0, 0]) == (APPLIED_OK, {"cancelled": 0})
    totals = queue.machine.totals()
    assert (totals["delayed"], totals["purged"], totals["delayed_bytes"]) == (3, 2, 3 * SIZE)
    queue.log.checkout(B, 1)
    queue.step(100)
    assert [row[1] for row in queue.given()] == [0, 1, 3]
    assert queue.cancel([due, entry.index, offset, 0]) == (APPLIED_OK, {"cancelled": 0})


@pytest.mark.parametrize("named", [None, 1, [1], [[1, 2, 3]], [[1, 2, 3, -1]], [[1, 2, 3, "4"]]])
def test_a_malformed_cancel_is_refused(named: object) -> None:
    queue = Queue()
    queue.log.reservation(B, CANCEL_SCHEDULED, messages=named)
    queue.step()
    assert queue.answers() == [(APPLIED_REJECTED, BAD_CANCEL)]


def test_many_that_are_due_at_once_become_ready_over_several_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delayed, "FIRE_RUNS_MAX", 3)
    queue = Queue()
    for delay in range(10, 18):
        queue.publish(delay)
    queue.step()
    for ready in (3, 6, 8):
        queue.log.leader(batch.CMD_TICK)
        queue.effects = apply(queue.machine, queue.log.seal(20))
        assert queue.machine.totals()["ready"] == ready
        if ready < 8:
            # The leader goes on at once.
            assert queue.timers()[0] < queue.machine.time_ms


def test_version_1_serves_at_once_and_its_snapshot_has_nothing_new() -> None:
    queue = Queue(version=1)
    queue.publish(1000)
    queue.step()
    assert queue.machine.totals()["ready"] == 1
    assert b"delayed" not in queue.machine.snapshot()


def test_repeats_of_a_named_producer_do_not_wait_again() -> None:
    queue = Queue()
    target = queue.log._target(A)
    for first in (1, 1):
        for i in range(3):
            record = Message("", "q", spec.Properties(headers=Table.of({"x-delay": 9})), b"")
            target.name_next(b"p", first + i)
            target.publish([record.record()], 0, 0, 8)
        queue.step()
    assert queue.machine.totals()["delayed"] == 3


def test_a_million_that_wait_cost_less_than_64_bytes_each() -> None:
    """Checked on a part of it, in a random order of times."""
    waiting = QuorumMachine().backlog.waiting
    count = 100_000
    for i in range(count):
        waiting.add(1 + i * 7919 % count, (i + 1, 48, 0, 1, 10, 0, 0, 0))
    assert waiting.memory_bytes() <= 64 * count
    due = [at for at, _ in waiting.rows()]
    assert due == sorted(due)
    assert len(waiting.take_due(count // 2, count)) == count // 2


# --- delayed retry -------------------------------------------------------------------------------


def held(queue: Queue, count: int = 1) -> None:
    queue.log.publish(A, [SIZE] * count)
    queue.log.checkout(B, 1)
    queue.step()
    assert len(queue.given()) == count


@pytest.mark.parametrize(
    ("kind", "failed", "waits"),
    [(0, True, False), (1, True, True), (1, False, True), (2, True, True), (2, False, False),
     (3, True, False), (3, False, True)],
)  # fmt: skip
def test_what_comes_back_waits_by_its_kind(kind: int, failed: bool, waits: bool) -> None:
    queue = Queue(delayed_retry=kind, delayed_retry_min_ms=10, delayed_retry_max_ms=10)
    held(queue)
    queue.log.return_(B, 1, 0, 0, failed=failed)
    queue.step()
    assert queue.machine.totals()["delayed"] == int(waits)
    assert bool(queue.given()) != waits
    queue.machine = restored(queue.machine)
    queue.tick(10)
    assert bool(queue.given()) == waits


def test_the_delay_grows_with_the_failures_up_to_the_most_and_the_limit_comes_first() -> None:
    queue = Queue(
        delayed_retry=2, delayed_retry_min_ms=10, delayed_retry_max_ms=25, delivery_limit=3
    )
    held(queue)
    for number, delay in enumerate((10, 20, 25)):
        queue.log.return_(B, 1, number, number, failed=True)
        entry = queue.step()
        assert queue.timers() == [entry.time_ms + delay]
        queue.tick(delay - 1)
        assert not queue.given()
        queue.tick(1)
        assert [row[2] for row in queue.given()] == [number + 1]
    queue.log.return_(B, 1, 3, 3, failed=True)
    queue.step()
    totals = queue.machine.totals()
    assert (totals["dropped_delivery_limit"], totals["delayed"]) == (1, 0)


def test_a_retry_comes_before_what_was_never_delivered() -> None:
    queue = Queue(delayed_retry=1, delayed_retry_min_ms=10, delayed_retry_max_ms=10)
    held(queue)
    queue.log.credit(B, 1, 1)
    queue.log.return_(B, 1, 0, 0)
    queue.log.credit(B, 1, 0)
    queue.log.publish(A, [SIZE])
    queue.step()
    queue.tick(10)
    queue.log.credit(B, 1, 1)
    queue.step()
    assert [row[2] for row in queue.given()] == [1]


def test_a_lost_consumer_has_its_messages_wait() -> None:
    queue = Queue(delayed_retry=2, delayed_retry_min_ms=10, delayed_retry_max_ms=10)
    held(queue, 3)
    queue.log.close(B)
    queue.step()
    assert queue.machine.totals()["delayed"] == 3
    assert list(queue.machine.live_ranges())


def test_an_unlimited_queue_requeues_without_delay() -> None:
    queue = Queue(
        delayed_retry=1, delayed_retry_min_ms=10, delayed_retry_max_ms=10, delivery_limit=-1
    )
    held(queue, 1)
    queue.log.return_(B, 1, 0, 0)
    queue.step()
    assert len(queue.given()) == 1
