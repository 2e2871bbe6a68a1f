"""The check of all invariants of the quorum queue's machine finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from convoymq.queues.quorum.consumers import UP, WAITING
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.quorum.support import A, B, Queue


def forget_a_message(machine: QuorumMachine) -> None:
    machine.backlog.fresh.take(1)


def count_twice(machine: QuorumMachine) -> None:
    machine.backlog.published += 1


def settle_what_is_held(machine: QuorumMachine) -> None:
    machine.backlog.settle(1, 10)


def serve_without_credit(machine: QuorumMachine) -> None:
    consumer = machine.sessions[B].consumers[1]
    assert consumer.state == UP
    machine.consumers.restore_queue([consumer])


def wait_for_nobody(machine: QuorumMachine) -> None:
    machine.sessions[B].consumers[1].state = WAITING


def put_into_two_places(machine: QuorumMachine) -> None:
    (_, run), *_ = machine.deliveries.holds(B, 1)
    machine.backlog.returned.push(*run)
    machine.backlog.published += run[3]


@pytest.mark.parametrize(
    "damage",
    [
        forget_a_message,
        count_twice,
        settle_what_is_held,
        serve_without_credit,
        wait_for_nobody,
        put_into_two_places,
    ],
)
def test_damage_is_found(damage: Callable[[QuorumMachine], None]) -> None:
    queue = Queue()
    queue.log.checkout(B, 1, 2)
    queue.log.publish(A, [10] * 5)
    queue.step()
    damage(queue.machine)
    with pytest.raises(AssertionError):
        check_invariants(queue.machine)
