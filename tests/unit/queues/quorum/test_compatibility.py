"""A quorum queue that follows RabbitMQ 4.1, and leases that are renewed (ADR 0086)."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.model.compatibility import COMPATIBILITY, RELEASE_4_1, RELEASES, TYPE_GIVEN
from convoymq.model.tables import Table
from convoymq.queues.driver import group_driver_of
from convoymq.queues.quorum.deliveries import FLAG_FAILED, FLAG_UNTRIED
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.settings import machine_settings, settings_of_release
from convoymq.replication.machine import EFFECT_DELIVER, EFFECT_UNUSED
from tests.unit.queues.quorum.support import A, B, Queue, places, replies

NEWEST = QuorumMachine.VERSION


def following(release: str, version: int = NEWEST, **settings: int) -> Queue:
    queue = Queue(**settings_of_release(release), **settings)
    if version > 1:
        queue.machine.set_version(version)
    return queue


def give_back(queue: Queue, message_id: int, flags: int) -> list[tuple[int, int, int]]:
    """(message id, acquired, failed) of what comes again."""
    queue.log.ranges(B, batch.CMD_RETURN, 1, [message_id, message_id], flags)
    return [(e[3], e[8], e[9]) for e in queue.step() if e[0] == EFFECT_DELIVER]


@pytest.mark.parametrize("version", [1, NEWEST])
@pytest.mark.parametrize("release", RELEASES)
def test_what_counts_by_release(release: str, version: int) -> None:
    queue = following(release, version)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    nack = int(release == RELEASE_4_1)
    assert give_back(queue, 0, 0) == [(1, 1, nack)]
    assert give_back(queue, 1, FLAG_FAILED) == [(2, 2, nack + 1)]
    assert give_back(queue, 2, FLAG_UNTRIED) == [(3, 3, nack + 1)]


def test_a_message_leaves_after_twenty_nacks() -> None:
    queue = following(RELEASE_4_1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    for message_id in range(20):
        assert give_back(queue, message_id, 0) == [(message_id + 1, message_id + 1, message_id + 1)]
    assert give_back(queue, 20, 0) == []
    assert queue.machine.backlog.dropped["delivery_limit"] == 1


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flags", [0, FLAG_FAILED, FLAG_UNTRIED])
def test_where_messages_go_without_a_limit(release: str, flags: int) -> None:
    queue = following(release, delivery_limit=-1)
    queue.log.checkout(B, 1, 1)
    for _ in range(3):
        queue.log.publish(A, [1])
        queue.step()
    queue.log.ranges(B, batch.CMD_RETURN, 1, [0, 0], flags)
    first = places(queue, queue.step(), B)
    to_the_tail = release == RELEASE_4_1 or flags != FLAG_FAILED
    assert first == [2] if to_the_tail else first == [1]


def test_retries_wait_although_there_is_no_limit() -> None:
    queue = following(RELEASE_4_1, delivery_limit=-1)
    queue.log.configure(delayed_retry=1, delayed_retry_min_ms=50, delayed_retry_max_ms=50)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    assert give_back(queue, 0, FLAG_FAILED) == []
    assert queue.machine.waiting.messages == 1
    queue.log.leader(batch.CMD_TICK)
    assert [e[9] for e in queue.step(60) if e[0] == EFFECT_DELIVER] == [1]


def test_messages_of_a_lost_node_count() -> None:
    queue = following(RELEASE_4_1, disconnect_timeout_ms=100)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.node_down(2)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.step(200)
    queue.log.checkout(A, 1, 1)
    assert [(e[8], e[9]) for e in queue.step() if e[0] == EFFECT_DELIVER] == [(1, 1)]


def test_two_classes_begin_with_the_version_that_has_priorities() -> None:
    queue = following(RELEASE_4_1, version=1)
    assert not queue.machine.backlog.two_classes
    queue.machine.set_version(2)
    assert queue.machine.backlog.two_classes


def test_turns_count_while_one_class_has_the_queue() -> None:
    queue = following(RELEASE_4_1)
    queue.log.publish(A, [1, 1])
    queue.log.checkout(B, 1, 2)
    queue.step()
    assert queue.machine.backlog.order.turn == 2
    for level in (1, 9, 9):
        queue.log.publish_as(A, 1, level)
    queue.step()
    queue.log.settle(B, 1, 0, 1)
    # The normal one is older, and it is its turn.
    assert places(queue, queue.step(), B) == [2, 2]
    assert queue.machine.backlog.order.turn == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_snapshot_keeps_what_the_queue_was_made_with(release: str) -> None:
    queue = following(release)
    queue.log.publish(A, [1])
    queue.step()
    restored = QuorumMachine()
    restored.restore(queue.machine.snapshot())
    assert restored.backlog.counts_returns == (release == RELEASE_4_1)
    assert restored.backlog.two_classes == (release == RELEASE_4_1)
    assert restored.state_hash() == queue.machine.state_hash()


def test_a_queue_without_a_recorded_release_follows_4_3() -> None:
    arguments = Table.of({"x-queue-type": "quorum"})
    made = group_driver_of("quorum").make_machine(arguments, "")
    assert made.settings == QuorumMachine().settings
    assert machine_settings({})["two_priority_classes"] == 0


@pytest.mark.parametrize("mode", [None, "strict", "two-classes"])
def test_the_priority_mode_says_otherwise(mode: str | None) -> None:
    settings: dict[str, Any] = {COMPATIBILITY: RELEASE_4_1, TYPE_GIVEN: True}
    if mode is not None:
        settings["priority-mode"] = mode
    assert machine_settings(settings)["two_priority_classes"] == int(mode != "strict")


# Leases.


def lease(version: int = NEWEST) -> Queue:
    queue = Queue()
    queue.machine.set_version(version)
    queue.log.configure(expires_ms=1_000)
    queue.step()
    return queue


def renewed(queue: Queue, after_ms: int) -> list[tuple[int, int, Any]]:
    queue.log.reservation(A, "renew")
    return replies(queue.step(after_ms), A)


def is_unused(queue: Queue, after_ms: int) -> bool:
    queue.log.leader(batch.CMD_TICK)
    return any(e[0] == EFFECT_UNUSED for e in queue.step(after_ms))


def test_declaring_again_begins_the_lease_anew() -> None:
    queue = lease()
    for _ in range(3):
        assert renewed(queue, 900)[0][1:] == (0, {})
    assert not is_unused(queue, 900)
    assert is_unused(queue, 200)


def test_what_has_expired_is_not_renewed() -> None:
    queue = lease()
    assert renewed(queue, 1_000)[0][1:] == (1, "expired")
    assert is_unused(queue, 1)


def test_a_consumer_keeps_what_would_have_expired() -> None:
    queue = lease()
    queue.log.checkout(B, 1)
    queue.step()
    assert renewed(queue, 5_000)[0][1:] == (0, {})


def test_version_3_does_not_know_the_question() -> None:
    queue = lease(version=3)
    assert renewed(queue, 900)[0][1] == 1
    assert is_unused(queue, 200)
