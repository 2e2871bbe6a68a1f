"""Links that go on in another session: what is kept for them, and what is known of publishes."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.link_claims import CLAIM, FENCED, TAGGED
from convoymq.queues.outcomes import CMD_GRANT, FLAG_SUSPEND, limit_of
from convoymq.queues.quorum import links
from convoymq.queues.quorum.consumers import TAKEN
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import EFFECT_ACTIVITY, EFFECT_APPLIED
from tests.unit.queues.quorum.support import Queue, deliveries, replies, restored, session_id

A = session_id(1)
B = session_id(2)
C = session_id(3)
KEY = bytes(range(16))
OTHER = bytes(16)
TIMEOUT_MS = 1_000


def made(timeout_ms: int = TIMEOUT_MS, **settings: Any) -> Queue:
    queue = Queue(**settings)
    queue.machine.set_version(QuorumMachine.VERSION)
    queue.log.configure(link_resume_timeout_ms=timeout_ms)
    queue.step()
    return queue


def attach(queue: Queue, session: int, *, resumes: bool = False, link: bytes = KEY) -> None:
    queue.log.checkout(session, 1, credited=True, link=link, resumes=resumes)


def grant(queue: Queue, session: int, limit: int) -> None:
    queue.log.command(session, CMD_GRANT, 1, body=limit_of(limit))


def attached(queue: Queue, session: int, messages: int = 5) -> None:
    """A link that holds messages."""
    queue.log.publish(session, [1] * messages)
    attach(queue, session)
    grant(queue, session, messages)
    assert len(deliveries(queue.step(), session, 1)) == messages


def answer(effects: list[Any], session: int) -> Any:
    return next(reply for _, _, reply in replies(effects, session) if reply is not None)


def ids(effects: list[Any], session: int) -> list[int]:
    return [message_id for message_id, _ in deliveries(effects, session, 1)]


def taken(effects: list[Any]) -> list[tuple[int, int]]:
    return [(e[1], e[2]) for e in effects if e[0] == EFFECT_ACTIVITY and e[3] == TAKEN]


def test_a_link_goes_on_where_its_lost_session_was() -> None:
    queue = made()
    attached(queue, A)
    queue.log.settle(A, 1, 1, 2)
    queue.log.session_down(A)
    queue.step()
    assert (queue.machine.backlog.unacked, queue.machine.backlog.stored()) == (3, 0)
    queue.log.publish(B, [1])
    attach(queue, B, resumes=True)
    grant(queue, B, 6)
    effects = queue.step()
    assert answer(effects, B) == [5, 0, 0, 3, 4]
    assert ids(effects, B) == [5], "what it holds already does not come again"
    assert not taken(effects)
    queue.log.settle(B, 1, 0, 5)
    queue.step()
    assert queue.machine.backlog.acked == 6


def test_without_a_map_of_its_own_a_link_gets_what_was_kept_again() -> None:
    queue = made()
    attached(queue, A)
    queue.log.session_down(A)
    queue.step()
    attach(queue, B)
    grant(queue, B, 9)
    effects = queue.step()
    assert answer(effects, B) == [0]
    assert ids(effects, B) == [0, 1, 2, 3, 4]


def test_when_the_time_is_over_the_messages_are_those_of_a_lost_consumer() -> None:
    queue = made()
    attached(queue, A)
    queue.log.session_down(A)
    queue.step()
    due_ms = queue.machine.next_due_ms()
    assert due_ms == queue.log.time_ms + TIMEOUT_MS
    queue.log.leader(batch.CMD_TICK)
    queue.step(TIMEOUT_MS - 1)
    assert queue.machine.backlog.unacked == 5
    queue.log.leader(batch.CMD_TICK)
    queue.step(1)
    assert (queue.machine.backlog.unacked, queue.machine.backlog.stored()) == (0, 5)
    attach(queue, B, resumes=True)
    grant(queue, B, 5)
    effects = queue.step()
    assert answer(effects, B) == [0]
    (delivered,) = [e for e in effects if e[0] == 2]
    assert delivered[8:10] == (1, 1), "they count as failed once"
    assert queue.machine.next_due_ms() is None


@pytest.mark.parametrize("timeout_ms", [0, TIMEOUT_MS])
def test_a_link_that_is_attached_elsewhere_is_taken(timeout_ms: int) -> None:
    queue = made(timeout_ms)
    attached(queue, A)
    attach(queue, B, resumes=True)
    effects = queue.step()
    assert answer(effects, B) == [5, 0, 4]
    assert taken(effects) == [(A, 1)]
    queue.log.settle(A, 1, 0, 4)
    queue.step()
    assert queue.machine.backlog.acked == 0, "the older one has nothing any more"
    queue.log.close(A)
    queue.step()
    assert queue.machine.backlog.unacked == 5


def test_a_link_of_a_queue_that_keeps_nothing_ends_with_its_session() -> None:
    queue = made(0)
    attached(queue, A)
    queue.log.session_down(A)
    queue.step()
    assert queue.machine.backlog.stored() == 5
    assert not queue.machine.links.receivers


def test_a_suspended_link_is_kept_while_its_session_goes_on() -> None:
    queue = made()
    attached(queue, A)
    queue.log.command(A, batch.CMD_CANCEL, 1, FLAG_SUSPEND)
    queue.step()
    assert (queue.machine.backlog.unacked, queue.machine.consumers.count) == (5, 0)
    queue.log.checkout(A, 2, credited=True, link=KEY, resumes=True)
    effects = queue.step()
    assert answer(effects, A) == [5, 0, 4]
    assert not taken(effects)


def test_a_closed_link_is_not_kept() -> None:
    queue = made()
    attached(queue, A)
    queue.log.cancel(A, 1)
    queue.step()
    assert queue.machine.backlog.unacked == 5, "who cancels may settle"
    queue.log.session_down(A)
    queue.step()
    assert queue.machine.backlog.stored() == 5


def test_a_silent_node_keeps_what_its_links_hold_for_their_time() -> None:
    queue = made(disconnect_timeout_ms=100)
    attached(queue, A)
    queue.log.node_down(1)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.step(100)
    assert queue.machine.backlog.unacked == 5
    queue.log.leader(batch.CMD_TICK)
    queue.step(TIMEOUT_MS)
    assert queue.machine.backlog.stored() == 5


def test_a_node_that_is_heard_again_keeps_its_links() -> None:
    queue = made(disconnect_timeout_ms=100)
    attached(queue, A)
    queue.log.node_down(1)
    queue.step()
    queue.log.leader(batch.CMD_TICK)
    queue.step(100)
    queue.log.node_up(1)
    queue.step()
    assert queue.machine.next_due_ms() is None
    queue.log.settle(A, 1, 0, 4)
    queue.step()
    assert queue.machine.backlog.acked == 5


def test_a_link_of_a_dead_node_goes_on_at_another() -> None:
    queue = made()
    attached(queue, A)
    queue.log.node_down(1, gone=True)
    queue.step()
    assert queue.machine.backlog.unacked == 5
    attach(queue, B, resumes=True)
    assert answer(queue.step(), B) == [5, 0, 4]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_the_single_active_one_goes_on_as_such(strict: bool, lost: bool) -> None:
    queue = made(single_active=True, single_active_strict=strict)
    attached(queue, A)
    queue.log.checkout(C, 1, credited=True)
    grant(queue, C, 9)
    queue.step()
    if lost:
        queue.log.session_down(A)
        queue.step()
    queue.log.publish(C, [1])
    attach(queue, B, resumes=True)
    grant(queue, B, 6)
    effects = queue.step()
    goes_on = strict or not lost
    assert ids(effects, B) == ([5] if goes_on else [])
    assert ids(effects, C) == ([] if goes_on else [0])


def test_the_next_one_becomes_active_when_the_kept_messages_go_back() -> None:
    queue = made(single_active=True)
    attached(queue, A)
    queue.log.checkout(C, 1, credited=True)
    grant(queue, C, 9)
    queue.log.session_down(A)
    assert not ids(queue.step(), C)
    queue.log.leader(batch.CMD_TICK)
    assert ids(queue.step(TIMEOUT_MS), C) == [0, 1, 2, 3, 4]


def test_ranges_beyond_what_a_client_is_told_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RANGES_MAX", 2)
    queue = made()
    attached(queue, A, 9)
    queue.log.settle(A, 1, 1, 1, 3, 3, 5, 6)
    queue.log.session_down(A)
    queue.step()
    attach(queue, B, resumes=True)
    effects = queue.step()
    assert answer(effects, B) == [9, 0, 0, 2, 2]
    assert (queue.machine.backlog.unacked, queue.machine.backlog.stored()) == (2, 3)


def test_a_snapshot_has_what_is_kept() -> None:
    queue = made(single_active=True)
    attached(queue, A)
    queue.log.session_down(A)
    queue.step()
    claim(queue, C, b"")
    epoch = answer(queue.step(), C)["epoch"]
    publish(queue, C, epoch, OTHER)
    queue.step()
    before = queue.machine.snapshot()
    restored(queue)
    assert queue.machine.snapshot() == before
    attach(queue, B, resumes=True)
    assert answer(queue.step(), B) == [5, 0, 4]
    claim(queue, B, OTHER)
    assert answer(queue.step(), B)["known"] == [0]


# Publishers


def claim(queue: Queue, session: int, tags: bytes, link: object = KEY) -> None:
    queue.log.reservation(session, CLAIM, link=link, tags=tags)


def publish(queue: Queue, session: int, epoch: int, tag: bytes) -> None:
    queue.log._target(session).name_next(KEY + tag, TAGGED | epoch)
    queue.log.publish(session, [1])


def tag(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_claim_tells_which_messages_have_come() -> None:
    queue = made()
    claim(queue, A, b"")
    epoch = answer(queue.step(), A)["epoch"]
    for number in (1, 2):
        publish(queue, A, epoch, tag(number))
    effects = queue.step()
    assert [e[3] for e in effects if e[0] == EFFECT_APPLIED] == [APPLIED_OK]
    assert queue.machine.backlog.stored() == 2
    claim(queue, B, tag(2) + tag(3))
    found = answer(queue.step(), B)
    assert found["known"] == [0]
    assert found["epoch"] > epoch


def test_a_message_that_comes_after_the_claim_is_refused() -> None:
    queue = made()
    claim(queue, A, b"")
    epoch = answer(queue.step(), A)["epoch"]
    claim(queue, B, tag(1))
    next_epoch = answer(queue.step(), B)["epoch"]
    publish(queue, A, epoch, tag(1))
    effects = queue.step()
    assert (APPLIED_REJECTED, FENCED) in [e[3:5] for e in effects if e[0] == EFFECT_APPLIED]
    publish(queue, B, next_epoch, tag(1))
    queue.step()
    assert queue.machine.backlog.stored() == 1


def test_two_claims_of_one_entry_are_two_epochs() -> None:
    queue = made()
    claim(queue, A, b"")
    claim(queue, B, b"")
    effects = queue.step()
    assert answer(effects, A)["epoch"] < answer(effects, B)["epoch"]


def test_a_link_without_a_claim_is_known_from_its_next_message_on() -> None:
    queue = made()
    claim(queue, A, b"")
    epoch = answer(queue.step(), A)["epoch"]
    claim(queue, C, b"", OTHER)
    queue.step(TIMEOUT_MS + 1)
    assert KEY not in queue.machine.links.publishers
    publish(queue, A, epoch, tag(1))
    queue.step()
    claim(queue, B, tag(1))
    assert answer(queue.step(), B)["known"] == [0]


def test_tags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TAGS_MAX", 2)
    monkeypatch.setattr(links, "TAGS_OF_ALL_MAX", 3)
    queue = made()
    for number in range(4):
        publish(queue, A, 1, tag(number))
    queue.step()
    assert [*queue.machine.links.publishers[KEY].tags] == [tag(2), tag(3)]
    for number in range(2):
        queue.log._target(A).name_next(OTHER + tag(number), TAGGED | 1)
        queue.log.publish(A, [1])
    queue.step()
    assert [*queue.machine.links.publishers] == [OTHER]


def test_tags_are_forgotten_with_the_time_of_links() -> None:
    queue = made()
    publish(queue, A, 1, tag(1))
    queue.step()
    claim(queue, B, tag(1))
    assert answer(queue.step(TIMEOUT_MS + 1), B)["known"] == []


@pytest.mark.parametrize(("link", "tags"), [(b"x", b""), (None, b""), (KEY, None)])
def test_a_malformed_claim_is_refused(link: object, tags: Any) -> None:
    queue = made()
    claim(queue, A, tags, link)
    assert (APPLIED_REJECTED, "malformed") in [e[1:] for e in replies(queue.step(), A)]


def test_an_older_version_knows_no_links() -> None:
    queue = Queue()
    queue.machine.set_version(5)
    assert not queue.machine.knows_setting("link_resume_timeout_ms")
    attach(queue, A)
    assert [reply for _, _, reply in replies(queue.step(), A)] == [None]
    claim(queue, A, b"")
    assert [status for _, status, _ in replies(queue.step(), A)] == [APPLIED_REJECTED]
