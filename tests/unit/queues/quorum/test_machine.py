"""Rules of the quorum queue's machine, one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.kernels.trace import TraceRows
from convoymq.model import trace as words
from convoymq.model.errors import UnsupportedVersion
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import (
    EFFECT_APPLIED,
    EFFECT_DELIVER,
    EFFECT_GAP,
    EFFECT_NOTE,
    EFFECT_TIMER,
    NEVER,
)
from tests.unit.queues.quorum.support import Log, apply, deliveries, session_id

A, B, C = session_id(1), session_id(2), session_id(3)


class Queue:
    """A machine and its log."""

    def __init__(self, **settings: Any) -> None:
        self.machine = QuorumMachine(settings)
        self.log = Log()

    def step(self, after_ms: int = 1) -> list[Any]:
        effects = apply(self.machine, self.log.seal(after_ms))
        check_invariants(self.machine)
        return effects

    def status(self) -> dict[int, str]:
        return {c["session"]: c["activity_status"] for c in self.machine.consumers.infos()}


def replies(effects: list[Any], session: int) -> list[tuple[int, int, Any]]:
    """Answers to a session's commands, without that to OPEN."""
    return [e[2:] for e in effects if e[0] == EFFECT_APPLIED and e[1] == session and e[2] > 1]


# ------------------------------------------------------------------- sessions


def test_plain_commands_of_an_entry_are_answered_once() -> None:
    queue = Queue()
    queue.log.publish(A, [1, 1])
    queue.log.settle(A, 1, 0, 0)
    queue.log.publish(A, [1])
    assert queue.step() == [(EFFECT_APPLIED, A, 4, 0, None)]


def test_an_answer_with_content_is_not_overtaken() -> None:
    queue = Queue()
    queue.log.publish(A, [1])
    queue.log.command(A, batch.CMD_PURGE)
    queue.log.publish(A, [1])
    assert [e[2:] for e in queue.step()] == [(2, 0, None), (3, 0, 1), (4, 0, None)]


def test_a_repeated_command_is_answered_but_not_applied() -> None:
    queue = Queue()
    queue.log.publish(A, [1, 1])
    entry = queue.log.seal()
    apply(queue.machine, entry)
    assert apply(queue.machine, entry) == [(EFFECT_APPLIED, A, 2, 0, None)]
    assert queue.machine.backlog.ready() == 2


def test_a_repeated_question_gets_its_answer_again() -> None:
    queue = Queue()
    queue.log.publish(A, [1, 1])
    queue.log.command(A, batch.CMD_PURGE)
    entry = queue.log.seal()
    apply(queue.machine, entry)
    assert (EFFECT_APPLIED, A, 3, 0, 2) in apply(queue.machine, entry)


def test_a_gap_is_reported_once_an_entry() -> None:
    queue = Queue()
    queue.log.publish(A, [1])
    queue.step()
    queue.log.publish(A, [1])
    queue.log.command(A, batch.CMD_PURGE)
    queue.log.seal()
    queue.log.publish(A, [1])
    queue.log.command(A, batch.CMD_PURGE)
    assert queue.step() == [(EFFECT_GAP, A, 2)]
    assert queue.machine.backlog.ready() == 1


def test_an_unknown_session_must_start_at_one() -> None:
    queue = Queue()
    queue.log.publish(A, [1])
    queue.log.seal()
    queue.log.publish(A, [1])
    assert queue.step() == [(EFFECT_GAP, A, 0)]
    assert queue.machine.session_nodes() == frozenset()


def test_a_stray_repeat_does_not_revive_a_closed_session() -> None:
    queue = Queue()
    queue.log.publish(A, [1])
    first = queue.log.seal()
    apply(queue.machine, first)
    queue.log.close(A)
    queue.step()
    assert apply(queue.machine, first) == [(EFFECT_GAP, A, 0)]
    assert queue.machine.backlog.ready() == 1
    assert queue.machine.sessions == {}


# ------------------------------------------------------------------- delivery


def test_a_subscription_is_answered_before_its_first_delivery() -> None:
    queue = Queue()
    queue.log.publish(A, [1] * 3)
    queue.log.checkout(B, 1)
    kinds = [e[:2] for e in queue.step()]
    # The second of B's answers is the subscription's.
    assert kinds == [
        (EFFECT_APPLIED, A),
        (EFFECT_APPLIED, B),
        (EFFECT_APPLIED, B),
        (EFFECT_DELIVER, B),
    ]


def test_one_consumer_takes_whole_runs() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 500)
    queue.log.publish(A, [1] * 1000)
    delivered = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert [(e[3], e[6], e[7]) for e in delivered] == [(0, 0, 500)]
    queue.log.settle(B, 1, 0, 249)
    delivered = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert [(e[3], e[6], e[7]) for e in delivered] == [(500, 500, 250)]


def test_prefetch_zero_has_a_window_of_2000() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 0)
    queue.log.publish(A, [1] * 2001)
    queue.step()
    assert queue.machine.backlog.unacked == 2000


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


def test_a_lower_priority_gets_what_the_higher_has_no_credit_for() -> None:
    queue = Queue()
    queue.log.checkout(A, 1, 2)
    queue.log.checkout(B, 1, 3, priority=5)
    queue.log.publish(C, [1] * 4)
    effects = queue.step()
    assert [i for _, i in deliveries(effects, B, 1)] == [1, 1, 1]
    assert [i for i, _ in deliveries(effects, A, 1)] == [0]


def test_credit_replaces_the_window() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1] * 5)
    queue.step()
    queue.log.credit(B, 1, 3)
    assert len(deliveries(queue.step(), B, 1)) == 2
    queue.log.credit(B, 1, 0)
    queue.log.settle(B, 1, 0, 2)
    assert deliveries(queue.step(), B, 1) == []


def test_get_takes_one_and_says_what_is_left() -> None:
    queue = Queue()
    queue.log.publish(A, [1] * 3)
    queue.log.get(B)
    queue.log.get(B, settled=True)
    effects = queue.step()
    assert replies(effects, B) == [(2, 0, [0, 2]), (3, 0, [1, 1])]
    assert deliveries(effects, B, 0) == [(0, 1), (1, 1)]
    assert (queue.machine.backlog.unacked, queue.machine.backlog.acked) == (1, 1)
    queue.log.settle(B, 0, 0, 0)
    queue.log.get(B)
    queue.log.get(B)
    assert replies(queue.step(), B)[-1] == (6, 0, [])


def test_an_exclusive_consumer_is_alone_when_honoured() -> None:
    queue = Queue(exclusive_honoured=True)
    queue.log.checkout(A, 1, exclusive=True)
    queue.log.checkout(B, 1)
    assert replies(queue.step(), B) == [(2, 1, "exclusive")]
    queue.log.cancel(A, 1)
    queue.log.checkout(B, 2)
    queue.log.checkout(A, 2, exclusive=True)
    effects = queue.step()
    assert replies(effects, B) == [(3, 0, None)]
    assert replies(effects, A)[-1] == (4, 1, "exclusive")


def test_the_exclusive_flag_is_ignored_by_default() -> None:
    queue = Queue()
    queue.log.checkout(A, 1, exclusive=True)
    queue.log.checkout(B, 1, exclusive=True)
    assert replies(queue.step(), B) == [(2, 0, None)]


# -------------------------------------------------------- returns and limits


def test_returned_messages_come_before_fresh_in_the_order_of_return() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 3)
    queue.log.publish(A, [1] * 5)
    queue.step()
    queue.log.credit(B, 1, 0)
    queue.log.return_(B, 1, 2, 2)
    queue.log.return_(B, 1, 0, 0)
    queue.log.credit(B, 1, 10)
    sent = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert [(e[6], e[8]) for e in sent] == [(2, 1), (0, 1), (3, 0)]


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
    assert [run[5:] for run in queue.machine.backlog.returned.runs()] == [counts]


def test_a_message_is_handed_out_limit_plus_one_times() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [7])
    handed = len(deliveries(queue.step(), B, 1))
    for i in range(30):
        queue.log.return_(B, 1, i, i, failed=True)
        handed += len(deliveries(queue.step(), B, 1))
    assert handed == 21
    assert queue.machine.backlog.dropped == {"delivery_limit": 1, "rejected": 0}


def test_without_a_limit_nothing_is_dropped() -> None:
    queue = Queue(delivery_limit=-1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [7])
    for i in range(40):
        queue.log.return_(B, 1, i, i, failed=True)
    queue.step()
    assert queue.machine.backlog.unacked == 1


def test_what_goes_over_the_limit_is_noted_and_counted() -> None:
    queue = Queue(delivery_limit=0)
    queue.log.checkout(B, 1)
    queue.log.publish(A, [1, 1])
    queue.log.return_(B, 1, 0, 1, failed=True)
    notes = [e[1:] for e in queue.step() if e[0] == EFFECT_NOTE]
    assert notes == [("quorum.delivery_limit", {"count": 2})]
    assert queue.machine.totals()["dropped_delivery_limit"] == 2


def places(queue: Queue, effects: list[Any], session: int) -> list[int]:
    """Entries of what a consumer gets."""
    return [index for _, index in deliveries(effects, session, 1)]


def test_without_a_limit_what_a_client_gives_back_goes_to_the_tail() -> None:
    queue = Queue(delivery_limit=-1)
    queue.log.checkout(B, 1, 1)
    for _ in range(3):
        queue.log.publish(A, [1])
        queue.step()
    queue.log.return_(B, 1, 0, 0)
    queue.log.publish(A, [1])
    effects = queue.step()
    for i in range(1, 4):
        queue.log.settle(B, 1, i, i)
        effects += queue.step()
    # Behind what was there, ahead of what came after it.
    assert places(queue, effects, B) == [2, 3, 1, 4]
    again = next(e for e in effects if e[0] == EFFECT_DELIVER and e[4] == 1)
    assert again[8:10] == (1, 0)
    assert queue.machine.totals()["redelivered"] == 1


@pytest.mark.parametrize("how", ["reject", "close", "timeout"])
def test_without_a_limit_other_returns_keep_their_place(how: str) -> None:
    queue = Queue(delivery_limit=-1, disconnect_timeout_ms=10)
    queue.log.checkout(B, 1, 1)
    queue.log.checkout(C, 1, 1)
    queue.log.credit(C, 1, 0)
    queue.log.publish(A, [1, 1])
    queue.step()
    if how == "reject":
        queue.log.return_(B, 1, 0, 0, failed=True)
        effects = queue.step()
        assert [e[6] for e in effects if e[0] == EFFECT_DELIVER] == [0]
        return
    if how == "close":
        queue.log.close(B)
    else:
        queue.log.node_down(2)
        queue.step()
        queue.log.leader(batch.CMD_TICK)
        queue.step(10)
    queue.log.credit(C, 1, 1)
    effects = queue.step()
    assert [e[6] for e in effects if e[0] == EFFECT_DELIVER] == [0]


def test_what_went_to_the_tail_is_in_a_snapshot_in_live_ranges_and_purged() -> None:
    queue = Queue(delivery_limit=-1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.publish(A, [1])
    queue.log.return_(B, 1, 0, 0)
    queue.step()
    machine = queue.machine
    assert list(machine.live_ranges()) == [(1, 2)]
    assert machine.totals()["returned_ready"] == 1
    other = QuorumMachine()
    other.restore(machine.snapshot())
    assert other.snapshot() == machine.snapshot()
    check_invariants(other)
    assert len(machine.state_snapshot()) == 2
    queue.log.command(A, batch.CMD_PURGE)
    assert replies(queue.step(), A)[-1][2] == 1
    assert machine.backlog.ready() == 0


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


def test_purge_drops_what_waits_and_keeps_what_is_out() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 2)
    queue.log.publish(A, [1] * 5)
    queue.log.command(A, batch.CMD_PURGE)
    assert replies(queue.step(), A)[-1] == (3, 0, 3)
    assert (queue.machine.backlog.ready(), queue.machine.backlog.unacked) == (0, 2)


def test_bytes_of_unequal_messages_add_up() -> None:
    queue = Queue()
    queue.log.publish(A, [5, 100, 1, 1])
    queue.log.checkout(B, 1, 1)
    queue.step()
    totals = queue.machine.totals()
    assert totals["ready_bytes"] + totals["unacked_bytes"] == 107
    queue.log.settle(B, 1, 0, 0)
    queue.log.return_(B, 1, 1, 1)
    queue.log.command(A, batch.CMD_PURGE)
    queue.step()
    totals = queue.machine.totals()
    assert totals["ready_bytes"] == 0


# ------------------------------------------------- consumers, nodes, deletion


def test_a_cancelled_consumer_may_still_settle() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 2)
    queue.log.publish(A, [1] * 4)
    queue.log.cancel(B, 1)
    queue.log.settle(B, 1, 0, 0)
    queue.step()
    assert queue.status() == {B: "cancelled"}
    assert (queue.machine.consumers.count, queue.machine.backlog.unacked) == (0, 1)
    queue.log.settle(B, 1, 1, 1)
    queue.step()
    assert queue.status() == {}
    assert queue.machine.backlog.acked == 2


def test_a_suspected_node_gets_nothing_until_it_is_up() -> None:
    queue = Queue()
    queue.log.checkout(B, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.node_down(2)
    queue.log.publish(A, [1])
    effects = queue.step()
    assert deliveries(effects, B, 1) == []
    assert [e[1] for e in effects if e[0] == EFFECT_TIMER] == [queue.log.time_ms + 60_000]
    assert queue.status() == {B: "suspected_down"}
    assert queue.machine.backlog.unacked == 1
    queue.log.node_up(2)
    assert [i for i, _ in deliveries(queue.step(), B, 1)] == [1]
    assert queue.machine.next_due_ms() is None


def test_messages_of_a_lost_node_return_once_at_the_time_limit() -> None:
    queue = Queue(disconnect_timeout_ms=100)
    queue.log.checkout(B, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.node_down(2)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    assert [e[0] for e in queue.step(99)] == [EFFECT_TIMER]
    assert queue.machine.backlog.ready() == 0
    queue.log.leader(batch.CMD_TICK)
    assert queue.step() == []
    assert queue.machine.backlog.ready() == 1


def test_a_restarted_nodes_old_sessions_end() -> None:
    queue = Queue()
    old, new = session_id(2, 1, 5), session_id(2, 1, 6)
    queue.log.checkout(old, 1)
    queue.log.publish(old, [1])
    queue.step()
    queue.log.node_down(2)
    queue.log.node_up(2, incarnation=6)
    queue.log.checkout(new, 1)
    effects = queue.step()
    assert [i for i, _ in deliveries(effects, new, 1)] == [0]
    assert list(queue.machine.sessions) == [new]


# ----------------------------------------------------- single active consumer


def single() -> Queue:
    return Queue(single_active=True)


def test_the_best_waiting_consumer_takes_over() -> None:
    queue = single()
    queue.log.checkout(A, 1)
    queue.log.checkout(B, 1)
    queue.log.checkout(C, 1)
    queue.step()
    assert queue.status() == {A: "single_active", B: "waiting", C: "waiting"}
    queue.log.close(A)
    queue.step()
    assert queue.status() == {B: "single_active", C: "waiting"}


def test_a_higher_priority_swaps_at_once_when_nothing_is_out() -> None:
    queue = single()
    queue.log.checkout(A, 1)
    queue.log.checkout(B, 1, priority=1)
    queue.step()
    assert queue.status() == {A: "waiting", B: "single_active"}


def test_a_higher_priority_waits_for_the_last_settle() -> None:
    queue = single()
    queue.log.checkout(A, 1)
    queue.log.publish(C, [1, 1])
    queue.log.checkout(B, 1, priority=1)
    queue.log.publish(C, [1])
    queue.step()
    assert queue.status() == {A: "quiescing", B: "waiting"}
    assert queue.machine.backlog.ready() == 1
    queue.log.settle(A, 1, 0, 0)
    assert deliveries(queue.step(), B, 1) == []
    queue.log.settle(A, 1, 1, 1)
    assert len(deliveries(queue.step(), B, 1)) == 1
    assert queue.status() == {A: "waiting", B: "single_active"}


def test_quiescing_ends_when_the_contender_goes() -> None:
    queue = single()
    queue.log.checkout(A, 1)
    queue.log.publish(C, [1])
    queue.log.checkout(B, 1, priority=1)
    queue.log.publish(C, [1])
    queue.log.cancel(B, 1)
    effects = queue.step()
    assert queue.status() == {A: "single_active"}
    assert len(deliveries(effects, A, 1)) == 2


def in_turn(queue: Queue) -> None:
    """Two consumers with prefetch 1; the first has the first of two messages."""
    queue.log.checkout(A, 1, 1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(C, [1])
    queue.log.publish(C, [1])
    queue.step()
    assert queue.machine.backlog.unacked == 1


@pytest.mark.parametrize("how", ["settled", "returned", "session ends"])
def test_a_cancelled_active_consumer_is_followed_when_it_holds_nothing(how: str) -> None:
    queue = single()
    in_turn(queue)
    queue.log.cancel(A, 1)
    assert deliveries(queue.step(), B, 1) == []
    assert queue.status() == {A: "cancelled", B: "waiting"}
    if how == "settled":
        queue.log.settle(A, 1, 0, 0)
    elif how == "returned":
        queue.log.return_(A, 1, 0, 0)
    else:
        queue.log.close(A)
    effects = queue.step()
    (given,) = [e for e in effects if e[0] == EFFECT_DELIVER]
    assert (given[1], given[8]) == (B, int(how != "settled"))
    assert queue.status()[B] == "single_active"


def test_a_suspected_active_consumer_is_followed_when_its_messages_are_back() -> None:
    queue = Queue(single_active=True, disconnect_timeout_ms=100)
    in_turn(queue)
    queue.log.node_down(1)
    assert deliveries(queue.step(), B, 1) == []
    assert queue.status() == {A: "suspected_down", B: "waiting"}
    queue.log.leader(batch.CMD_TICK)
    effects = queue.step(100)
    (given,) = [e for e in effects if e[0] == EFFECT_DELIVER]
    assert (given[1], given[6], given[8]) == (B, 0, 1), "the first message, again"
    queue.log.node_up(1)
    queue.log.settle(A, 1, 0, 0)
    queue.step()
    assert queue.status() == {A: "waiting", B: "single_active"}


def test_a_suspected_active_consumer_goes_on_when_its_node_is_back() -> None:
    queue = single()
    in_turn(queue)
    queue.log.node_down(1)
    queue.step()
    queue.log.node_up(1)
    queue.log.settle(A, 1, 0, 0)
    assert [i for i, _ in deliveries(queue.step(), A, 1)] == [1]
    assert queue.status() == {A: "single_active", B: "waiting"}


def test_a_suspected_active_consumer_without_messages_is_followed_at_once() -> None:
    queue = single()
    queue.log.checkout(A, 1, 1)
    queue.log.checkout(B, 1, 1)
    queue.log.node_down(1)
    queue.log.publish(C, [1])
    assert len(deliveries(queue.step(), B, 1)) == 1


def test_a_suspected_active_consumer_that_settles_late_is_followed() -> None:
    queue = single()
    in_turn(queue)
    queue.log.node_down(1)
    queue.log.settle(A, 1, 0, 0)
    assert len(deliveries(queue.step(), B, 1)) == 1
    assert queue.status() == {A: "suspected_down", B: "single_active"}


def test_who_is_followed_later_is_in_a_snapshot() -> None:
    queue = single()
    in_turn(queue)
    queue.log.cancel(A, 1)
    queue.step()
    other = QuorumMachine()
    other.restore(queue.machine.snapshot())
    check_invariants(other)
    queue.log.settle(A, 1, 0, 0)
    entry = queue.log.seal()
    assert apply(other, entry) == apply(queue.machine, entry)
    assert other.snapshot() == queue.machine.snapshot()


def test_without_strictness_the_next_consumer_begins_at_once() -> None:
    """RabbitMQ's rule: what the old one holds is settled or comes back later."""
    queue = Queue(single_active=True, single_active_strict=False)
    in_turn(queue)
    queue.log.node_down(1)
    assert len(deliveries(queue.step(), B, 1)) == 1
    assert queue.status() == {A: "suspected_down", B: "single_active"}
    assert queue.machine.backlog.unacked == 2
    queue.log.node_up(1)
    queue.step()
    assert queue.status() == {A: "waiting", B: "single_active"}
    queue.log.settle(A, 1, 0, 0)
    queue.log.publish(C, [1])
    queue.log.cancel(B, 1)
    assert len(deliveries(queue.step(), A, 1)) == 1
    assert queue.status() == {A: "single_active", B: "cancelled"}


def test_a_suspected_consumer_is_not_activated() -> None:
    queue = single()
    queue.log.checkout(A, 1)
    queue.log.checkout(B, 1, priority=5)
    queue.log.checkout(C, 1)
    queue.log.node_down(2)
    queue.log.close(A)
    queue.step()
    assert queue.status() == {B: "suspected_down", C: "single_active"}
    queue.log.node_up(2)
    queue.step()
    assert queue.status() == {B: "single_active", C: "waiting"}


def test_a_node_that_is_back_keeps_its_new_consumer_s_place() -> None:
    """The active consumer was one of its former process. Found by the simulator, seed 9916479."""
    queue = single()
    old, new = session_id(1, 1, 5), session_id(1, 1, 6)
    queue.log.publish(C, [1])
    queue.log.checkout(old, 1)
    queue.step()
    queue.log.node_down(1)
    queue.log.checkout(new, 1)
    queue.log.checkout(B, 1)
    queue.step()
    assert queue.status() == {old: "suspected_down", new: "suspected_down", B: "waiting"}
    queue.log.node_up(1, incarnation=6)
    assert [i for i, _ in deliveries(queue.step(), new, 1)] == [0]
    assert queue.status() == {new: "single_active", B: "waiting"}


def test_a_node_that_is_gone_activates_none_of_its_consumers_as_it_goes() -> None:
    """Its sessions end one by one, and one with a higher priority comes later. Found by the
    simulator, seed 5005605."""
    queue = single()
    first, second = session_id(2), session_id(2, 2)
    queue.log.publish(first, [1])
    queue.log.checkout(second, 1, priority=1)
    queue.log.settle(second, 1, 0, 0)
    queue.log.node_down(2)
    queue.log.checkout(A, 1)
    queue.log.checkout(C, 1)
    queue.step()
    assert queue.status() == {second: "suspected_down", A: "single_active", C: "waiting"}
    queue.log.node_down(2, gone=True)
    queue.step()
    assert queue.status() == {A: "single_active", C: "waiting"}


def test_get_is_refused_with_single_active_consumer() -> None:
    queue = single()
    queue.log.get(A)
    assert replies(queue.step(), A) == [(2, 1, "single_active")]


# ---------------------------------------------------------------- what it costs


def test_a_plain_backlog_costs_well_under_four_bytes_a_message() -> None:
    queue = Queue()
    for _ in range(100):
        queue.log.publish(A, [1] * 50)
        queue.step()
    assert queue.machine.memory_bytes() / queue.machine.backlog.ready() <= 0.5


def test_live_ranges_name_what_is_needed() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 1)
    for _ in range(6):
        queue.log.publish(A, [1])
        queue.step()
    assert list(queue.machine.live_ranges()) == [(1, 6)]
    assert queue.machine.oldest_live() == 1
    queue.log.credit(B, 1, 3)
    queue.log.settle(B, 1, 1, 2)
    queue.step()
    assert list(queue.machine.live_ranges()) == [(1, 1), (4, 6)]
    assert queue.machine.oldest_live() == 1
    queue.log.settle(B, 1, 0, 0)
    queue.step()
    assert queue.machine.oldest_live() == 4
    queue.log.credit(B, 1, 6)
    queue.log.settle(B, 1, 3, 5)
    queue.step()
    assert list(queue.machine.live_ranges()) == []
    assert queue.machine.oldest_live() == NEVER


def test_a_damaged_snapshot_is_refused() -> None:
    machine = QuorumMachine()
    good = machine.snapshot()
    for bad in (b"", b"\xc1", good[:-1], good.replace(b"\xa6format\x03", b"\xa6format\x09")):
        with pytest.raises(ValueError, match=r"."):
            QuorumMachine().restore(bad)


def test_a_newer_machine_version_is_refused() -> None:
    newer = QuorumMachine.VERSION + 1
    with pytest.raises(UnsupportedVersion, match=f"version {newer}"):
        QuorumMachine().set_version(newer)


def test_a_snapshot_of_another_format_is_refused() -> None:
    known = msgspec.msgpack.decode(QuorumMachine().snapshot())
    known["format"] = 2
    with pytest.raises(ValueError, match="format 2 is not known"):
        QuorumMachine().restore(msgspec.msgpack.encode(known))


def test_a_producers_repeat_is_in_the_trace() -> None:
    queue = Queue()
    rows = queue.machine.trace = TraceRows()
    for _ in range(2):
        queue.log.command(A, batch.CMD_PRODUCER, count=1, body=bytes(8) + b"p")
        queue.log.publish(A, [1, 1])
        queue.step()
    assert queue.machine.totals()["duplicates"] == 2
    count, data = rows.take()
    columns = memoryview(data).cast("q")
    kinds = list(columns[words.ROW_COLUMNS.index("kind") * count :][:count])
    reasons = list(columns[words.ROW_COLUMNS.index("reason") * count :][:count])
    assert (kinds, reasons) == ([words.PUBLISHED] * 2, [0, words.DUPLICATE])
