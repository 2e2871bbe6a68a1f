"""The quorum queue's machine: sessions and their answers, basic.get, nodes that come and go,
versions. Its parts have tests of their own names."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch
from convoymq.model.errors import UnsupportedVersion
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import (
    EFFECT_APPLIED,
    EFFECT_DELIVER,
    EFFECT_GAP,
    EFFECT_TIMER,
)
from tests.unit.queues.quorum.support import (
    A,
    B,
    Queue,
    apply,
    deliveries,
    replies,
    session_id,
    single,
)


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


def test_get_is_refused_with_single_active_consumer() -> None:
    queue = single()
    queue.log.get(A)
    assert replies(queue.step(), A) == [(2, 1, "single_active")]


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


def test_a_newer_machine_version_is_refused() -> None:
    newer = QuorumMachine.VERSION + 1
    with pytest.raises(UnsupportedVersion, match=f"version {newer}"):
        QuorumMachine().set_version(newer)
