"""What a member knows of its partition, answer by answer."""

from __future__ import annotations

import pytest

from convoymq.topics.answers import FetchAnswer, GroupView, ParkAnswer, ParkedEntry, Record
from convoymq.topics.commands import Park
from convoymq.topics.consumer import Fetch, GroupConsumer, Handle, Request
from convoymq.topics.heartbeats import Leases
from convoymq.topics.refusals import Code

HEAD = ParkedEntry(0, 1, 3, b"m1")


def record(offset: int, key: bytes) -> Record:
    return Record(offset, 0, key, 7, 1, offset, b"m%d" % offset)


def fetched(member: GroupConsumer, *records: Record, view: GroupView | None = None) -> None:
    """The fetch that is due is answered."""
    (fetch,) = (action for action in member.take_actions() if isinstance(action, Fetch))
    last = records[-1].offset + 1 if records else fetch.offset
    member.on_fetched(fetch, FetchAnswer(Code.OK, records, last, view), 1)


def fail_until_parked(member: GroupConsumer) -> tuple[list[Handle], Request]:
    """The handler fails each time; returns its calls and the request to park the message."""
    handles: list[Handle] = []
    now_ms = 2
    while True:
        actions = member.take_actions()
        parks = [a for a in actions if isinstance(a, Request) and isinstance(a.command, Park)]
        if parks:
            return handles, parks[0]
        (handle,) = (action for action in actions if isinstance(action, Handle))
        handles.append(handle)
        now_ms += 10
        member.on_handled(handle, False, now_ms)
        member.step(now_ms + 10)


def test_a_park_that_changed_nothing_does_not_hide_what_did() -> None:
    """An operator resumes one key while a message of another one expires: the refusal carries the
    version of the resumption, which only a view tells."""
    member = GroupConsumer("g", "m", len, lanes=2, retries=1, retry_ms=5)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    parked_before = GroupView((1,), {b"a": None}, 1)
    fetched(member, record(2, b"bb"), view=parked_before)
    _, park = fail_until_parked(member)
    member.on_answer(park, ParkAnswer(Code.DUPLICATE, live=True, version=2), 50)
    held = member.held[3]
    assert held.park_versions.known == 1
    resumed = GroupView((3,), {b"a": HEAD}, 2)
    member.on_fetched(
        Fetch(3, 1, 1, held.next_offset, 1, 1), FetchAnswer(Code.OK, (), 3, resumed), 60
    )
    handles = [a for a in member.take_actions() if isinstance(a, Handle)]
    assert [handle.record for handle in handles] == [HEAD]


def test_a_park_that_is_in_force_is_a_step_of_the_version() -> None:
    member = GroupConsumer("g", "m", len, lanes=2, retries=1, retry_ms=5)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    fetched(member, record(1, b"a"), record(2, b"a"), view=GroupView((1,), {}, 0))
    handles, park = fail_until_parked(member)
    assert [handle.record.offset for handle in handles] == [1, 1]
    member.on_answer(park, ParkAnswer(Code.OK, version=1), 50)
    held = member.held[3]
    assert (held.park_versions.known, held.parked) == (1, {b"a": None})
    follow = [a.command for a in member.take_actions() if isinstance(a, Request)]
    assert [(c.offset, c.follow) for c in follow if isinstance(c, Park)] == [(2, True)]


def test_a_view_from_before_an_answer_brings_nothing_back() -> None:
    """The message was made done, and later ones of its key as well; the view was made before."""
    member = GroupConsumer("g", "m", len, lanes=2)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    fetched(member, view=GroupView((1,), {b"a": HEAD}, 1))
    (handle,) = (a for a in member.take_actions() if isinstance(a, Handle))
    member.on_handled(handle, True, 2)
    actions = member.take_actions()
    (done,) = (a for a in actions if isinstance(a, Request))
    # Repeated: the first answer was lost, and an operator has resumed another key meanwhile.
    member.on_answer(done, ParkAnswer(Code.NOT_PARKED, live=True, version=4), 3)
    held = member.held[3]
    assert (held.park_versions.known, held.parked) == (1, {})
    late = GroupView((1,), {b"a": HEAD, b"b": None}, 3)
    member.on_fetched(Fetch(3, 1, 1, held.next_offset, 1, 1), FetchAnswer(Code.OK, (), 2, late), 4)
    assert not [a for a in member.take_actions() if isinstance(a, Handle)]
    assert (held.park_versions.known, held.parked) == (3, {b"b": None})


@pytest.mark.parametrize(
    ("now", "again"),
    [
        ({}, None),
        ({b"a": None}, None),
        ({b"a": ParkedEntry(0, 1, 3, b"replaced")}, b"replaced"),
        ({b"a": ParkedEntry(0, 2, 3, b"m2")}, b"m2"),
    ],
    ids=["skipped", "parked again", "replaced", "skipped, and another one follows"],
)
def test_what_failed_is_tried_again_as_the_head_is_by_then(
    now: dict[bytes, ParkedEntry | None], again: bytes | None
) -> None:
    member = GroupConsumer("g", "m", len, lanes=2, retries=3, retry_ms=5)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    fetched(member, view=GroupView((1,), {b"a": HEAD}, 1))
    (handle,) = (a for a in member.take_actions() if isinstance(a, Handle))
    member.on_handled(handle, False, 2)
    held = member.held[3]
    member.on_fetched(
        Fetch(3, 1, 1, held.next_offset, 1, 1),
        FetchAnswer(Code.OK, (), 2, GroupView((1,), now, 2)),
        3,
    )
    member.step(20)
    handles = [a.record.message for a in member.take_actions() if isinstance(a, Handle)]
    assert handles == ([] if again is None else [again])
    assert held.busy == bool(handles)


def test_a_member_that_is_fenced_when_it_fetches_gives_up_what_waits_in_its_lanes() -> None:
    """It may have fetched what its group goes on without."""
    member = GroupConsumer("g", "m", len, lanes=1, retries=1, retry_ms=5)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    fetched(member, record(1, b"a"), record(2, b"b"), view=GroupView((1,), {}, 0))
    actions = member.take_actions()
    (handle,) = (action for action in actions if isinstance(action, Handle))
    (fetch,) = (action for action in actions if isinstance(action, Fetch))
    member.on_fetched(fetch, FetchAnswer(Code.LEASE_FENCED), 5)
    member.on_handled(handle, True, 6)
    later = member.take_actions()
    assert not any(isinstance(action, Handle | Request) for action in later)
    assert not member.held


def test_a_message_without_an_outcome_holds_its_lane_only_in_a_weak_topic() -> None:
    """Messages are begun in their order, whatever their keys; what fails too often is parked by
    who carries that out, and nothing waits behind it."""
    member = GroupConsumer("g", "m", len, lanes=2, retries=0, holds_keys=False)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    records = [record(n, b"a") for n in range(1, 6)]
    fetched(member, *records, view=GroupView((1,), {}, 0))
    first, second = (a for a in member.take_actions() if isinstance(a, Handle))
    assert (first.record, second.record) == (records[0], records[1])
    member.on_handled(second, False, 2)
    (park,) = (a for a in member.take_actions() if isinstance(a, Request))
    assert isinstance(park.command, Park)
    member.on_answer(park, ParkAnswer(Code.OK, live=True, version=-1), 3)
    (third,) = (a for a in member.take_actions() if isinstance(a, Handle))
    assert third.record == records[2]
    # What the application has not begun with comes first again.
    member.on_unhandled(third, 4)
    (again,) = (a for a in member.take_actions() if isinstance(a, Handle))
    assert again.record == records[2]
    assert member.held[3].queued == 4
