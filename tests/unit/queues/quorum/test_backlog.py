"""The backlog of the quorum queue's machine: order, delivery limit, purge, live ranges, memory."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch
from convoymq.replication.machine import (
    EFFECT_DELIVER,
    NEVER,
)
from tests.unit.queues.quorum.support import (
    A,
    B,
    C,
    Queue,
    deliveries,
    places,
    replies,
)


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
