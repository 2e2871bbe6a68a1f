"""Credit as an absolute limit, and what consumers say of messages that they give back."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.outcomes import (
    CMD_GRANT,
    CMD_MODIFY,
    FLAG_DRAIN,
    FLAG_FAILED,
    FLAG_REJECTED,
    FLAG_UNDELIVERABLE,
    limit_of,
    pack_modified,
)
from convoymq.queues.quorum.dead_letters import AT_LEAST_ONCE
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.notes import AVOIDED_MAX
from convoymq.replication.machine import (
    EFFECT_ACTIVITY,
    EFFECT_APPLIED,
    EFFECT_DEAD_LETTERS,
    EFFECT_DELIVER,
)
from tests.unit.queues.quorum.support import Queue, deliveries, restored, session_id

A = session_id(1)
B = session_id(2)
C = session_id(3)


def made(**settings: Any) -> Queue:
    """A queue at the newest version."""
    queue = Queue(**settings)
    queue.machine.set_version(QuorumMachine.VERSION)
    return queue


def grant(queue: Queue, session: int, number: int, limit: int, *, drain: bool = False) -> None:
    flags = FLAG_DRAIN if drain else 0
    queue.log.command(session, CMD_GRANT, number, flags, body=limit_of(limit))


def modify(
    queue: Queue,
    session: int,
    number: int,
    *ranges: int,
    flags: int = 0,
    due_ms: int = 0,
    annotations: bytes = b"",
) -> None:
    body = pack_modified(ranges, due_ms, annotations)
    queue.log.command(session, CMD_MODIFY, number, flags, len(ranges) // 2, body)


def ids(effects: list[Any], session: int, number: int) -> list[int]:
    return [message_id for message_id, _ in deliveries(effects, session, number)]


def reply(effects: list[Any], session: int) -> Any:
    return next(e[4] for e in effects if e[0] == EFFECT_APPLIED and e[1] == session and e[4])


def said(effects: list[Any], session: int) -> list[tuple[int, bytes]]:
    """(message id, annotations) of deliveries to a session."""
    return [
        (e[3] + k, b"".join(e[10:]))
        for e in effects
        if e[0] == EFFECT_DELIVER and e[1] == session
        for k in range(e[7])
    ]


def left(effects: list[Any]) -> list[tuple[str, int, bytes]]:
    """(reason, messages, annotations) of what left."""
    return [(e[2], e[6], e[7]) for e in effects if e[0] == EFFECT_DEAD_LETTERS]


# ---------------------------------------------------------------- credit


def test_a_credited_consumer_gets_what_was_granted_and_settling_grants_nothing() -> None:
    queue = made()
    queue.log.publish(A, [1] * 10)
    queue.log.checkout(B, 1, credited=True)
    assert ids(queue.step(), B, 1) == []
    grant(queue, B, 1, 3)
    effects = queue.step()
    assert ids(effects, B, 1) == [0, 1, 2]
    assert reply(effects, B) == [3, 7]
    queue.log.settle(B, 1, 0, 2)
    assert ids(queue.step(), B, 1) == []
    grant(queue, B, 1, 3)
    assert ids(queue.step(), B, 1) == [], "the limit counts from the start"
    grant(queue, B, 1, 4)
    assert ids(queue.step(), B, 1) == [3]
    grant(queue, B, 1, 2)
    queue.log.publish(A, [1])
    assert ids(queue.step(), B, 1) == []


def test_a_drain_gives_what_is_there_and_its_answer_comes_behind() -> None:
    queue = made()
    queue.log.publish(A, [1] * 2)
    queue.log.checkout(B, 1, credited=True)
    grant(queue, B, 1, 10, drain=True)
    effects = queue.step()
    kinds = [e for e in effects if e[0] == EFFECT_DELIVER or e[4:] == ([2, 0],)]
    assert [e[0] for e in kinds] == [EFFECT_DELIVER, EFFECT_APPLIED]
    queue.log.publish(A, [1] * 3)
    assert ids(queue.step(), B, 1) == [], "a drained grant is over"
    grant(queue, B, 1, 3)
    effects = queue.step()
    assert ids(effects, B, 1) == [2]
    assert reply(effects, B) == [3, 2]


def test_credit_is_kept_by_a_snapshot_and_by_priorities() -> None:
    queue = made()
    queue.log.checkout(B, 1, credited=True)
    queue.log.checkout(C, 1, credited=True, priority=5)
    grant(queue, B, 1, 5)
    grant(queue, C, 1, 2)
    queue.step()
    restored(queue)
    queue.log.publish(A, [1] * 4)
    effects = queue.step()
    assert ids(effects, C, 1) == [0, 1]
    assert ids(effects, B, 1) == [0, 1]


def test_an_inactive_consumer_is_drained_at_once_and_clients_hear_who_is_active() -> None:
    queue = made(single_active=1)
    queue.log.publish(A, [1] * 3)
    queue.log.checkout(B, 1, credited=True)
    queue.log.checkout(C, 1, credited=True)
    effects = queue.step()
    assert [e[1:] for e in effects if e[0] == EFFECT_ACTIVITY] == [
        (B, 1, False), (B, 1, True), (C, 1, False),
    ]  # fmt: skip
    grant(queue, C, 1, 9, drain=True)
    assert [e[4] for e in queue.step() if e[0] == EFFECT_APPLIED and e[4]] == [[0, 0]]
    queue.log.cancel(B, 1)
    effects = queue.step()
    assert [e[1:] for e in effects if e[0] == EFFECT_ACTIVITY] == [(C, 1, True)]
    assert ids(effects, C, 1) == [], "its credit was drained"


def test_older_versions_know_no_credit() -> None:
    queue = Queue()
    queue.machine.set_version(5)
    queue.log.publish(A, [1])
    queue.log.checkout(B, 1, credited=True)
    assert ids(queue.step(), B, 1) == [0]
    types = queue.machine.command_types(5)
    assert not types[CMD_GRANT // 8] >> CMD_GRANT % 8 & 1
    newest = queue.machine.command_types(6)
    assert newest[CMD_MODIFY // 8] >> CMD_MODIFY % 8 & 1


# ---------------------------------------------------------------- modifications


def held_by_b(count: int = 1, **settings: Any) -> Queue:
    queue = made(**settings)
    queue.log.publish(A, [4] * count)
    queue.log.checkout(B, 1, 100)
    queue.step()
    return queue


def test_annotations_are_kept_through_redelivery_and_snapshot() -> None:
    queue = held_by_b(3)
    modify(queue, B, 1, 1, 1, annotations=b"one")
    effects = queue.step()
    assert said(effects, B) == [(3, b"one")]
    restored(queue)
    queue.machine.resend(2)
    again = [*queue.machine.effects]
    queue.machine.effects.clear()
    assert said(again, B) == [(0, b""), (2, b""), (3, b"one")]
    queue.log.return_(B, 1, 0, 3)
    assert said(queue.step(), B) == [(4, b""), (5, b""), (6, b"one")]
    modify(queue, B, 1, 6, 6, annotations=b"two")
    assert said(queue.step(), B) == [(7, b"two")]
    queue.log.settle(B, 1, 4, 7)
    queue.step()
    assert not queue.machine.backlog.notes.by_place, "a note outlives its message"


def test_failed_modifications_count_and_reach_the_limit_with_their_annotations() -> None:
    queue = held_by_b(delivery_limit=1)
    modify(queue, B, 1, 0, 0, flags=FLAG_FAILED, annotations=b"x")
    (delivered,) = [e for e in queue.step() if e[0] == EFFECT_DELIVER]
    assert delivered[8:] == (1, 1, b"x")
    modify(queue, B, 1, 1, 1, flags=FLAG_FAILED)
    assert left(queue.step()) == [("delivery_limit", 1, b"x")]


def test_a_due_time_is_a_retry_delay() -> None:
    queue = held_by_b(2)
    due = queue.log.time_ms + 500
    modify(queue, B, 1, 0, 0, due_ms=due)
    assert ids(queue.step(), B, 1) == []
    modify(queue, B, 1, 1, 1, due_ms=1)
    assert ids(queue.step(), B, 1) == [2], "a time in the past is now"
    queue.log.leader(batch.CMD_TICK)
    assert ids(queue.step(600), B, 1) == [3]


def test_an_undeliverable_message_goes_to_another_consumer_only() -> None:
    queue = held_by_b(2)
    queue.log.checkout(C, 1, 1)
    modify(queue, B, 1, 0, 0, flags=FLAG_UNDELIVERABLE)
    effects = queue.step()
    assert ids(effects, C, 1) == [0]
    assert ids(effects, B, 1) == []
    modify(queue, B, 1, 1, 1, flags=FLAG_UNDELIVERABLE)
    effects = queue.step()
    assert not ids(effects, C, 1) and not ids(effects, B, 1)  # noqa: PT018
    restored(queue)
    queue.log.publish(A, [1])
    assert ids(queue.step(), B, 1) == [2], "what is avoided holds nothing up"
    queue.log.settle(C, 1, 0, 0)
    assert ids(queue.step(), C, 1) == [1]


def test_a_message_that_nobody_may_get_leaves_as_rejected() -> None:
    queue = held_by_b()
    queue.log.checkout(C, 1, 1)
    modify(queue, B, 1, 0, 0, flags=FLAG_UNDELIVERABLE, annotations=b"b")
    assert ids(queue.step(), C, 1) == [0]
    modify(queue, C, 1, 0, 0, flags=FLAG_UNDELIVERABLE)
    assert left(queue.step()) == [("rejected", 1, b"b")]
    assert not queue.machine.backlog.notes.by_place


@pytest.mark.parametrize("leaver", [B, C])
def test_a_consumer_that_leaves_decides_what_is_avoided(leaver: int) -> None:
    queue = held_by_b()
    queue.log.checkout(C, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    modify(queue, B, 1, 1, 1, 0, 0, flags=FLAG_UNDELIVERABLE)
    queue.step()
    queue.log.close(leaver)
    effects = queue.step()
    if leaver == C:
        assert [each[:2] for each in left(effects)] == [("rejected", 1)] * 2
    else:
        assert not left(effects)


def test_the_error_of_a_rejection_is_on_the_dead_letter_until_it_is_published() -> None:
    queue = held_by_b(3, dead_letters=AT_LEAST_ONCE)
    modify(queue, B, 1, 0, 1, flags=FLAG_REJECTED, annotations=b"why")
    assert left(queue.step()) == [("rejected", 2, b"why")]
    restored(queue)
    letters = queue.machine.dead_letters.letters(0, 9)
    assert [(each[4], each[6]) for each in letters] == [(2, b"why")]
    queue.log.leader(batch.CMD_SETTLE, body=batch.pack_ranges([0, 1]))
    queue.log.builder.add(batch.CMD_SETTLE, 0, 0, 0, 1, 0, batch.pack_ranges([0, 1]))
    queue.step()
    assert not queue.machine.backlog.notes.by_place


def test_so_many_are_avoided_and_more_leave() -> None:
    queue = held_by_b(0)
    queue.log.checkout(C, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.publish(A, [1] * (AVOIDED_MAX + 5))
    queue.log.credit(B, 1, 2000)
    queue.step()
    last = queue.machine.consumers.position(B, 1) - 1
    modify(queue, B, 1, 0, last, flags=FLAG_UNDELIVERABLE)
    effects = queue.step()
    avoided = queue.machine.backlog.notes.avoided.messages
    assert avoided <= AVOIDED_MAX
    assert avoided + sum(each[1] for each in left(effects)) >= last
    queue.log.command(A, batch.CMD_PURGE)
    queue.step()
    assert not queue.machine.backlog.notes.avoided.messages


def test_a_full_queue_drops_what_is_avoided_at_last() -> None:
    queue = held_by_b(3)
    queue.log.checkout(C, 1, 1)
    modify(queue, B, 1, 0, 2, flags=FLAG_UNDELIVERABLE)
    queue.step()
    queue.log.configure(max_length=1)
    queue.step()
    assert queue.machine.backlog.notes.avoided.messages == 1
