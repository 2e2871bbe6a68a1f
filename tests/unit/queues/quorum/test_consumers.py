"""Consumers of the quorum queue's machine: windows, priorities, exclusive and single active
consumers, suspected nodes."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch
from convoymq.replication.machine import (
    EFFECT_DELIVER,
    EFFECT_TIMER,
)
from tests.unit.queues.quorum.support import (
    A,
    B,
    C,
    Queue,
    deliveries,
    in_turn,
    replies,
    session_id,
    single,
)


def test_prefetch_zero_has_a_window_of_2000() -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 0)
    queue.log.publish(A, [1] * 2001)
    queue.step()
    assert queue.machine.backlog.unacked == 2000


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
