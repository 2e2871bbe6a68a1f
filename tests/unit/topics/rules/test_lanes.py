"""A member with key lanes: handlers in threads, a window for each partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import GroupView, ParkAnswer, ParkedEntry
from convoymq.topics.rules.heartbeats import Leases
from convoymq.topics.rules.member import Fetched, GroupMember, HandOut, HandOutParked, Lanes
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send
from tests.unit.topics.rules.member_world import RETRIES, RETRY_MS, Keys, World, answer_all

DRAIN_MS = 1_000
LANES = Lanes(ahead=100, ahead_bytes=1_000)
HEAD = ParkedEntry(0, 1, 3, b"m1")


def lanes(
    keys: Sequence[bytes], number: int = 3, rules: Lanes = LANES, *, holds_keys: bool = True
) -> World:
    return World(
        keys,
        number,
        one_of_key=holds_keys,
        holds_keys=holds_keys,
        lanes=rules,
        drain_ms=DRAIN_MS,
    )


def test_a_slow_key_holds_up_no_other() -> None:
    world = lanes([b"a", b"a", b"b", b"b", b"c"])
    assert world.hand == [1, 3, 5]
    world.acknowledge(1)
    answer_all(world)
    assert world.hand == [1, 5, 4]
    assert [n for n in range(1, 6) if n in world.machine.groups["g"].cursor] == [3]


def test_each_partition_has_its_own_window() -> None:
    member = GroupMember("g", "m", len, window=2, one_of_key=True, lanes=LANES)
    member.on_leases(Leases("m", 0, 1, {3: 1, 4: 1}, frozenset()), 0)
    for fetch in [action for action in member.take_actions() if isinstance(action, Fetch)]:
        batch = Keys(1, [b"a", b"b", b"c"])
        member.on_fetched(fetch, Fetched(Code.OK, [batch], 4, GroupView((1,), {}, 0)), 1)
    given_out = [a for a in member.take_actions() if isinstance(a, HandOut)]
    assert [(a.pid, a.first, a.end) for a in given_out] == [(3, 1, 3), (4, 1, 3)]


def test_the_window_counts_messages_and_bytes() -> None:
    by_messages = lanes([b"a"] * 9, rules=replace(LANES, ahead=2))
    share = by_messages.member.held[3]
    assert share.in_window + share.buffered + share.held_back == 2
    by_bytes = lanes([b"a"] * 9, rules=replace(LANES, ahead_bytes=4))
    share = by_bytes.member.held[3]
    # Three came at once, twice, and each of them counts as a byte.
    assert (share.bytes_ahead, share.next_offset) == (6, 7)
    for _ in range(3):
        by_bytes.acknowledge(0)
        answer_all(by_bytes)
    assert (share.bytes_ahead, share.next_offset) == (6, 10)


def test_a_message_that_is_not_begun_is_handed_out_again() -> None:
    world = lanes([b"a", b"a", b"b"])
    for _ in range(RETRIES + 2):
        world.give_back(world.hand.index(1), unused=True)
        assert sorted(world.hand) == [1, 3]
    assert not world.sent


def test_what_is_not_begun_is_given_back_with_a_revoked_lease() -> None:
    world = lanes([b"a", b"b"])
    world.tell({3: 1}, 3)
    world.acknowledge(0)
    world.answer()
    assert 3 in world.member.held
    world.give_back(0, unused=True)
    world.wait(1)
    assert 3 not in world.member.held
    assert world.heartbeats[-1].heartbeat.released == {3: 1}


def test_a_handler_that_hangs_keeps_a_revoked_lease_for_a_bounded_time() -> None:
    world = lanes([b"a"])
    world.tell({3: 1}, 3)
    assert world.member.due_ms(world.now) <= world.now + DRAIN_MS
    world.wait(DRAIN_MS - 1)
    assert 3 in world.member.held
    world.wait(1)
    assert 3 not in world.member.held
    assert world.heartbeats[-1].heartbeat.released == {3: 1}
    # It comes back at last; nothing of it counts.
    world.acknowledge(0)
    assert not world.sent


def test_a_lease_that_ended_counts_as_held_until_its_handlers_have_finished() -> None:
    """Else a key could be handled twice at once, by two threads of this member."""
    world = lanes([b"a", b"b"])
    world.tell({})
    former, world.hand = world.hand, []
    world.lease()
    assert 3 not in world.member.held
    world.wait(3_000)
    assert world.heartbeats[-1].heartbeat.held == {3: 1}
    assert world.heartbeats[-1].heartbeat.released == {}
    for offset in former:
        assert not world.hand
        world.member.on_acknowledged(3, 1, offset, offset, world.now)
    world.wait(3_000)
    assert world.heartbeats[-1].heartbeat.held == {}
    world.tell({3: 2})
    assert world.hand == former


def test_a_member_that_never_parks_tries_for_ever() -> None:
    world = lanes([b"a", b"", b""])
    world.member.retries = -1
    world.acknowledge(2)
    for _ in range(20):
        world.give_back(0)
        world.give_back(0)
        world.wait(RETRY_MS)
        assert sorted(world.hand) == [1, 2]
    answer_all(world)
    assert not world.machine.groups["g"].parked.keys


def test_a_retry_is_for_the_first_message_alone() -> None:
    world = lanes([b"a", b"a", b"a"])
    for _ in range(RETRIES + 1):
        world.give_back(0)
        world.wait(RETRY_MS)
    answer_all(world)
    parked = world.machine.groups["g"].parked
    assert [entry.offset for entry in parked.keys[b"a"].entries] == [1, 2, 3]
    world.machine.apply(c.ResumeParked("g", b"a", once=True))
    world.machine.restore(world.machine.snapshot())
    world.take_view()
    assert [each.entry.offset for each in world.parked_hand] == [1]
    world.finish_parked(ok=True)
    answer_all(world)
    parked = world.machine.groups["g"].parked
    assert not world.parked_hand
    assert [entry.offset for entry in parked.keys[b"a"].entries] == [2, 3]
    assert not parked.keys[b"a"].resuming


# --- answer by answer ----------------------------------------------------------------------


def fetched(
    member: GroupMember, at: int, view: GroupView | None, *keys: bytes, first: int = 1
) -> list[Any]:
    """Answers the fetch under way; returns what the member asks for then."""
    asked = member.held[3].asked
    assert asked is not None
    batches = [Keys(first, keys)] if keys else []
    member.on_fetched(asked, Fetched(Code.OK, batches, first + len(keys), view), at)
    return member.take_actions()


def leased(number: int = 2, retries: int = 1) -> GroupMember:
    member = GroupMember(
        "g", "m", len, window=number, retries=retries, retry_ms=5, one_of_key=True, lanes=LANES
    )
    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    return member


def park_of(member: GroupMember) -> Send:
    """Has the message in hand fail until it is to be parked."""
    for now in (2, 20):
        member.on_returned(3, 1, 2, 2, now)
        member.step(now + 5)
    (park,) = (a for a in member.take_actions() if isinstance(a, Send))
    return park


def test_a_park_that_changed_nothing_does_not_hide_what_did() -> None:
    """An operator resumes one key while a message of another one expires: the refusal carries the
    version of the resumption, which only a view tells."""
    member = leased()
    fetched(member, 1, GroupView((1,), {b"a": None}, 1), b"bb", first=2)
    park = park_of(member)
    member.on_answer(park, ParkAnswer(Code.DUPLICATE, live=True, version=2), 50)
    assert member.held[3].park_versions.known == 1
    member.step(60)
    later = fetched(member, 60, GroupView((3,), {b"a": HEAD}, 2))
    assert [a.entry for a in later if isinstance(a, HandOutParked)] == [HEAD]


def test_a_park_that_is_in_force_is_a_step_of_the_version() -> None:
    member = leased()
    fetched(member, 1, GroupView((1,), {}, 0), b"a", b"a", first=2)
    park = park_of(member)
    member.on_answer(park, ParkAnswer(Code.OK, version=1), 50)
    share = member.held[3]
    assert (share.park_versions.known, share.keys[b"a"].parked) == (1, True)
    follow = [a.command for a in member.take_actions() if isinstance(a, Send)]
    assert [(p.offset, p.follow) for p in follow if isinstance(p, c.Park)] == [(3, True)]


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
    member = leased(retries=3)
    (head,) = (
        a
        for a in fetched(member, 1, GroupView((1,), {b"a": HEAD}, 1))
        if isinstance(a, HandOutParked)
    )
    assert head.entry == HEAD
    member.on_parked_done(3, 1, b"a", 10)
    member.step(11)
    heads = fetched(member, 12, GroupView((1,), now, 2))
    member.step(30)
    heads += member.take_actions()
    messages = [a.entry.message for a in heads if isinstance(a, HandOutParked)]
    assert messages == ([] if again is None else [again])
    assert bool(member.held[3].in_hand) == bool(messages)


def test_a_message_without_an_outcome_holds_its_lane_only_in_a_weak_topic() -> None:
    world = lanes([b"a"] * 5, 2, holds_keys=False)
    world.member.retries = 0
    assert world.hand == [1, 2]
    world.give_back(1)
    (park,) = world.sent
    assert isinstance(park.command, c.Park)
    world.sent.clear()
    assert world.hand == [1, 3]
    world.machine.apply(c.AckRanges("g", 1, 1, (2, 2)))
    world.member.on_answer(park, ParkAnswer(Code.OK, live=True, version=-1), world.now)
    world.run()
    # What the application has not begun with comes first again.
    world.give_back(1, unused=True)
    assert world.hand == [1, 3]


def test_messages_without_a_key_go_to_whichever_lane_is_free() -> None:
    world = lanes([b""] * 5)
    world.member.retries = 0
    assert world.hand == [1, 2, 3]
    # The second one failed for good: it is parked when the first one has an outcome.
    world.give_back(1)
    world.acknowledge(1)
    answer_all(world)
    assert (world.hand, world.sent) == ([1], [])
    world.acknowledge(0)
    answer_all(world)
    parked = world.machine.groups["g"].parked.keys[b""]
    assert [entry.offset for entry in parked.entries] == [2, 4, 5]


def test_a_message_without_a_key_that_fails_holds_up_no_other() -> None:
    world = lanes([b""] * 4, 2)
    world.give_back(0)
    assert world.hand == [2, 3]
    world.acknowledge(0)
    world.wait(RETRY_MS)
    answer_all(world)
    assert sorted(world.hand) == [1, 3]


STEPS = st.lists(
    st.tuples(st.sampled_from("hhhhfuapqrwl"), st.integers(0, 50)), min_size=5, max_size=80
)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([b"", b"", b"a", b"bb"]), min_size=1, max_size=25),
    STEPS,
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_every_message_ends_and_none_is_parked_out_of_order(
    keys: list[bytes], steps: list[tuple[str, int]], number: int, ahead: int
) -> None:
    """Handlers fail or are not called, answers come late, keys resume, the lease changes."""
    world = lanes(keys, number, Lanes(ahead, 20))
    for step, count in steps:
        take_step(world, step, count)
    for _ in range(300):
        for step in "ahpw":
            take_step(world, step, 0)
        world.tell({3: world.epoch})
    assert world.machine.groups["g"].cursor.watermark == len(keys) + 1
    assert not world.member.held[3].in_window


def take_step(world: World, step: str, number: int) -> None:
    if step in "hfu" and world.hand:
        at = number % len(world.hand)
        if step == "h":
            world.acknowledge(at)
        else:
            world.give_back(at, unused=step == "u")
    elif step == "a" and world.sent:
        world.answer(number % len(world.sent))
    elif step in "pq" and world.parked_hand:
        world.finish_parked(ok=step == "p" and number % 2 == 0, unused=step == "q")
    elif step == "r":
        parked = sorted(world.machine.groups["g"].parked.keys)
        if parked:
            world.machine.apply(c.ResumeParked("g", parked[number % len(parked)]))
    elif step == "w":
        world.wait(number)
    elif step == "l":
        world.lose_lease()
