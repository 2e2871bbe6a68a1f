"""What a member knows of its partition, answer by answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.answers import (
    AckAnswer,
    FetchAnswer,
    GroupView,
    ParkAnswer,
    ParkedEntry,
    Record,
)
from convoymq.topics.commands import Ack, Lease, Open, OpenCursor, Park, Produce, ResumeParked
from convoymq.topics.consumer import Fetch, GroupConsumer, Handle, Request
from convoymq.topics.heartbeats import Leases
from convoymq.topics.partition import PartitionMachine
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


def test_messages_without_a_key_go_to_whichever_lane_is_free() -> None:
    member = GroupConsumer("g", "m", len, lanes=3, retries=0)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    records = [record(n, b"") for n in range(1, 6)]
    fetched(member, *records, view=GroupView((1,), {}, 0))
    handles = [a for a in member.take_actions() if isinstance(a, Handle)]
    assert [handle.record for handle in handles] == records[:3]
    # The second one failed for good: it is parked when the first one has an outcome.
    member.on_handled(handles[1], False, 2)
    member.on_handled(handles[2], True, 3)
    (ack,) = (a for a in member.take_actions() if isinstance(a, Request))
    assert isinstance(ack.command, Ack)
    member.on_answer(ack, AckAnswer(Code.OK), 4)
    assert not [a for a in member.take_actions() if isinstance(a, Handle | Request)]
    member.on_handled(handles[0], True, 5)
    (ack,) = (a for a in member.take_actions() if isinstance(a, Request))
    member.on_answer(ack, AckAnswer(Code.OK), 6)
    (park,) = (a for a in member.take_actions() if isinstance(a, Request))
    assert isinstance(park.command, Park)
    assert (park.command.offset, park.command.follow) == (2, False)
    member.on_answer(park, ParkAnswer(Code.OK, version=1), 7)
    (behind,) = (a for a in member.take_actions() if isinstance(a, Request))
    assert isinstance(behind.command, Park)
    assert (behind.command.offset, behind.command.follow) == (4, True)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"", b"", b"a", b"bb"]), min_size=1, max_size=25),
    st.lists(st.tuples(st.sampled_from("hhhhfuarvw"), st.integers(0, 50)), max_size=120),
    st.integers(1, 4),
)
def test_every_message_ends_and_none_is_parked_out_of_order(
    keys: list[bytes], steps: list[tuple[str, int]], lanes: int
) -> None:
    """Against a partition: handlers fail or are not called, answers come late, keys resume."""
    machine = PartitionMachine(3, 0, 8, 0)
    machine.apply(Open("creation", 0, 1))
    machine.apply(OpenCursor("g", 1))
    for key in keys:
        machine.apply(Produce(1, 1, 0, 0, key))
    machine.apply(Lease("g", 1, 1, "m"))
    member = GroupConsumer("g", "m", len, lanes=lanes, retries=1, retry_ms=5)
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    now = 0
    handles: list[Handle] = []
    requests: list[Request] = []
    fetches: list[Fetch] = []

    def take() -> None:
        for action in member.take_actions():
            match action:
                case Fetch():
                    fetches.append(action)
                case Handle():
                    running = [each.key for each in handles if each.key]
                    assert action.key not in running
                    handles.append(action)
                case Request():
                    known = [each.number for each in requests]
                    if action.number not in known:
                        requests.append(action)

    def answer(at: int) -> None:
        request = requests.pop(at)
        outcome = machine.apply(request.command)
        machine.check_invariants()
        assert outcome.code is not Code.DUPLICATE, request
        member.on_answer(request, outcome, now)

    def fetch() -> None:
        asked = fetches.pop(0)
        fetches.clear()
        own = machine.groups["g"]
        first = max(asked.offset, own.cursor.watermark, 1)
        end = min(first + 3, len(keys) + 1)
        view = (
            machine.view("g") if asked.offset < 0 or asked.park_version < own.park_version else None
        )
        rows = tuple(record(n, keys[n - 1]) for n in range(first, end) if n not in own.cursor)
        member.on_fetched(asked, FetchAnswer(Code.OK, rows, max(first, end), view), now)

    for step, number in [*steps, *[(each, 0) for _ in range(300) for each in "wvahw"]]:
        take()
        if step in "hf" and handles:
            member.on_handled(handles.pop(number % len(handles)), step == "h", now)
        elif step == "u" and handles:
            member.on_unhandled(handles.pop(number % len(handles)), now)
        elif step == "a" and requests:
            answer(number % len(requests))
        elif step == "r":
            parked = sorted(machine.groups["g"].parked.keys)
            if parked:
                machine.apply(ResumeParked("g", parked[number % len(parked)]))
        elif step == "v" and fetches:
            fetch()
        elif step == "w":
            now += 10
            member.on_leases(Leases("m", now, 1, {3: 1}, frozenset()), now)
            member.step(now)
    assert machine.groups["g"].cursor.watermark == len(keys) + 1
    assert not member.held[3].busy
