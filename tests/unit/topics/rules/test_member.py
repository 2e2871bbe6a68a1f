"""A member with a window, against the real state machine of a partition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convoymq.topics.rules import commands as c
from convoymq.topics.rules import share as share_module
from convoymq.topics.rules.answers import GroupView, ParkAnswer, ParkedEntry
from convoymq.topics.rules.heartbeats import Leases
from convoymq.topics.rules.member import (
    Fetched,
    GroupMember,
    HandOutParked,
)
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send
from tests.unit.topics.rules.member_world import RETRIES, RETRY_MS, World, answer_all


def test_the_window_is_filled_in_order_and_opens_when_acknowledgements_are_in_force() -> None:
    world = World([b"a", b"b", b"a", b"c", b"d"], window=3)
    assert world.hand == [1, 2, 3]
    world.acknowledge(0)
    assert world.hand == [2, 3]
    world.answer()
    assert world.hand == [2, 3, 4]
    assert world.machine.groups["g"].cursor.watermark == 2


def test_acknowledgements_gather_while_one_is_under_way() -> None:
    world = World([b"a"] * 6)
    for _ in range(4):
        world.acknowledge(0)
    assert [r.command.ranges for r in world.sent if isinstance(r.command, c.AckRanges)] == [(1, 1)]
    world.answer()
    assert [r.command.ranges for r in world.sent if isinstance(r.command, c.AckRanges)] == [(2, 4)]


def test_a_returned_message_comes_again_and_nothing_new_of_its_key_before() -> None:
    world = World([b"a", b"b", b"a", b"b"], window=2)
    world.give_back(0)
    assert world.hand == [2, 4]
    world.wait(RETRY_MS)
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [4, 1]
    world.acknowledge(1)
    assert world.hand == [4]
    answer_all(world)
    assert world.hand == [4, 3]


def test_messages_behind_a_returned_one_may_be_acknowledged_and_nothing_new_comes_before() -> None:
    world = World([b"a"] * 4, window=3)
    world.give_back(0)
    assert world.hand == [2, 3]
    world.acknowledge(0)
    answer_all(world)
    assert world.machine.groups["g"].cursor.pack() == [1, 2, 3]
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == []
    world.wait(RETRY_MS)
    assert world.hand == [1]
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [4]


def test_what_is_returned_in_any_order_comes_again_in_order() -> None:
    world = World([b"a"] * 4, window=3)
    for at in (1, 1, 0):
        world.give_back(at)
        world.wait(RETRY_MS)
    again: list[int] = []
    while world.hand:
        assert len(world.hand) == 1
        again += world.hand
        world.acknowledge(0)
        answer_all(world)
        world.wait(RETRY_MS)
    assert again == [1, 2, 3, 4]


@pytest.mark.parametrize("bound", ["HELD_BACK_MAX", "HELD_BACK_BYTES_MAX"])
def test_messages_behind_others_of_their_key_are_bounded(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """At the bound nothing more is taken from the partition; it goes on when there is room."""
    keys = [b"a"] * 6 + [b"b"]
    monkeypatch.setattr(share_module, bound, 7)
    assert World(keys, one_of_key=True).hand == [1, 7], "one below the bound"
    monkeypatch.setattr(share_module, bound, 4)
    world = World(keys, one_of_key=True)
    assert world.hand == [1]
    share = world.member.held[3]
    assert share.held_back in (4, 5)
    # Batches have three messages, and one byte for each.
    assert share.order is not None
    assert share.order.batches_bytes == 6
    seen = []
    while world.hand:
        seen += world.hand
        while world.hand:
            world.acknowledge(0)
        answer_all(world)
    assert sorted(seen) == [1, 2, 3, 4, 5, 6, 7]
    assert [n for n in seen if n < 7] == [1, 2, 3, 4, 5, 6]
    assert share.order.batches_bytes == 0
    assert not share.order.batches


def test_a_rejected_message_does_not_come_behind_later_ones_of_its_key() -> None:
    """Six messages of one key and a large window: the first is rejected, parked and resumed."""
    world = World([b"a"] * 6, window=50, one_of_key=True)
    done = []
    world.give_back(0, final=True)
    answer_all(world)
    assert not world.hand, "they are parked behind the first"
    world.machine.apply(c.ResumeParked("g", b"a"))
    world.take_view()
    while world.parked_hand:
        done.append(world.parked_hand[0].entry.offset)
        world.finish_parked(ok=True)
        answer_all(world)
    assert done == [1, 2, 3, 4, 5, 6]


def test_a_client_that_asks_for_it_has_one_message_of_a_key_at_a_time() -> None:
    world = World([b"a", b"a", b"b", b"a", b"c"], one_of_key=True)
    assert world.hand == [1, 3, 5]
    world.acknowledge(0)
    assert world.hand == [3, 5]
    answer_all(world)
    assert world.hand == [3, 5, 2]
    world.give_back(2)
    world.wait(RETRY_MS)
    assert world.hand == [3, 5, 2]
    while world.hand:
        world.acknowledge(0)
        answer_all(world)
    assert world.machine.groups["g"].cursor.watermark == 6
    assert not world.member.held[3].keys


@pytest.mark.parametrize("one_of_key", [False, True])
def test_what_a_filter_does_not_want_uses_no_credit_and_holds_no_key_up(one_of_key: bool) -> None:
    unwanted = {1, 3, 4, 7}
    world = World([b"a", b"b", b"a", b"a", b"b", b"a", b"b"], one_of_key=one_of_key, limit=1)
    got: list[int] = []

    def pass_over() -> None:
        while unwanted & {*world.hand}:
            offset = min(unwanted & {*world.hand})
            world.hand.remove(offset)
            world.member.pass_over(3, world.epoch, offset, offset, world.now)
            world.run()
            answer_all(world)

    for limit in (1, 2, 3):
        world.member.set_limit(limit, world.now)
        world.run()
        pass_over()
        assert (len(world.hand), world.member.given) == (1, limit)
        got += world.hand
        world.acknowledge(0)
        answer_all(world)
        pass_over()
    assert got == [2, 5, 6]
    world.member.set_limit(4, world.now)
    world.run()
    pass_over()
    assert (world.member.given, world.machine.groups["g"].cursor.watermark) == (3, 8)


def test_messages_without_a_key_wait_for_none() -> None:
    world = World([b"", b"a", b"", b"a", b""], window=4, one_of_key=True)
    assert world.hand == [1, 2, 3, 5]
    world.acknowledge(2)
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [2, 5]
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [5, 4]


def test_what_fails_again_is_parked_with_what_comes_behind_it() -> None:
    world = World([b"a", b"a", b"b"], window=1)
    for _ in range(RETRIES + 1):
        assert world.hand == [1]
        world.give_back(0)
        if world.hand == [3]:
            world.acknowledge(0)
        world.wait(RETRY_MS)
        answer_all(world)
    parked = world.machine.groups["g"].parked.keys[b"a"]
    assert [entry.offset for entry in parked.entries] == [1, 2]
    assert world.acked == {3}
    assert not world.hand


def test_a_rejected_message_is_parked_at_once_and_comes_again_when_its_key_resumes() -> None:
    world = World([b"a", b"a"], window=1)
    world.give_back(0, final=True)
    answer_all(world)
    assert not world.hand
    world.machine.apply(c.ResumeParked("g", b"a"))
    world.now += 30_000
    world.lease()
    assert [head.entry.offset for head in world.parked_hand] == [1]
    world.finish_parked(ok=True)
    answer_all(world)
    assert [head.entry.offset for head in world.parked_hand] == [2]
    world.finish_parked(ok=True)
    answer_all(world)
    assert not world.machine.groups["g"].parked.keys
    assert not world.member.held[3].keys


def test_a_view_from_before_an_answer_brings_nothing_back() -> None:
    """The message was made done; the view that arrives behind the answer was made before."""
    member = GroupMember("g", "m", lambda key: 0, window=10)
    head = ParkedEntry(0, 1, 3, b"1")

    def fetched(at: int, version: int, parked: dict[bytes, ParkedEntry | None]) -> list[Any]:
        member.step(at)
        (fetch,) = (a for a in member.take_actions() if isinstance(a, Fetch))
        view = GroupView((1,), parked, version)
        member.on_fetched(fetch, Fetched(Code.OK, [], 2, view), at)
        return member.take_actions()

    member.on_leases(Leases("m", 0, 1, {3: 1}, frozenset()), 0)
    (given,) = (a for a in fetched(1, 1, {b"a": head}) if isinstance(a, HandOutParked))
    member.on_parked_done(3, 1, given.key, 2, ok=True)
    (done,) = (a for a in member.take_actions() if isinstance(a, Send))
    # Repeated: the first answer was lost, and an operator has resumed another key meanwhile.
    member.on_answer(done, ParkAnswer(Code.NOT_PARKED, live=True, version=4), 3)
    later = fetched(500, 3, {b"a": head, b"b": None})
    assert not [a for a in later if isinstance(a, HandOutParked)]
    assert member.held[3].park_versions.known == 3


def test_what_was_parked_behind_another_comes_for_the_first_time() -> None:
    world = World([b"a"] * 3, one_of_key=True)
    world.give_back(0, final=True)
    answer_all(world)
    world.machine.apply(c.ResumeParked("g", b"a"))
    world.take_view()
    firsts = []
    for ok in (True, False, False, True, True):
        answer_all(world)
        world.wait(RETRY_MS)
        firsts.append((world.parked_hand[0].entry.offset, world.parked_hand[0].first))
        world.finish_parked(ok=ok)
        if not ok and firsts[-1][1] is False:
            answer_all(world)
            world.machine.apply(c.ResumeParked("g", b"a"))
            world.take_view()
    assert firsts == [(1, False), (2, True), (2, False), (2, False), (3, True)]


def test_a_head_that_fails_again_waits_for_the_next_resume() -> None:
    world = World([b"a"])
    world.give_back(0, final=True)
    answer_all(world)
    world.machine.apply(c.ResumeParked("g", b"a"))
    world.lease()
    for _ in range(RETRIES + 1):
        world.finish_parked(ok=False)
        world.wait(RETRY_MS)
    answer_all(world)
    assert not world.machine.groups["g"].parked.keys[b"a"].resuming
    assert not world.parked_hand


def test_a_revoked_lease_ends_when_the_client_has_settled_what_it_has() -> None:
    world = World([b"a"] * 4, window=2)
    world.tell({3: 1}, 3)
    world.acknowledge(0)
    world.acknowledge(0)
    assert not world.hand
    assert 3 in world.member.held
    world.wait(3_000)
    answer_all(world)
    assert not world.member.held
    world.wait(1)
    assert world.heartbeats[-1].heartbeat.released == {3: 1}


def test_a_lease_that_is_revoked_while_a_message_is_parked_ends_behind_the_answer() -> None:
    world = World([b"a"] * 3, window=2, one_of_key=True)
    world.give_back(0, final=True)
    world.tell({3: 1}, 3)
    assert 3 in world.member.held
    answer_all(world)
    world.wait(1)
    assert not world.member.held
    assert world.heartbeats[-1].heartbeat.released == {3: 1}


def test_a_client_that_settles_nothing_keeps_a_revoked_lease_no_longer_than_a_lease() -> None:
    world = World([b"a"] * 4, window=2)
    world.tell({3: 1}, 3)
    world.wait(10_000)
    assert not world.member.held
    world.acknowledge(0)
    assert not world.sent


def test_a_client_that_is_gone_gives_everything_back_at_once() -> None:
    world = World([b"a"] * 4, window=3)
    world.acknowledge(0)
    world.member.abandon(world.now)
    world.run()
    assert 3 in world.member.held, "its acknowledgement is under way"
    answer_all(world)
    assert not world.member.held
    beat = world.heartbeats[-1].heartbeat
    assert (beat.leaves, dict(beat.released)) == (True, {3: 1})
    world.tell({})
    assert world.member.is_gone


def test_what_a_client_has_of_a_lease_that_is_over_takes_room_until_it_is_settled() -> None:
    world = World([b"a", b"b", b"c", b"d"], window=3)
    assert world.hand == [1, 2, 3]
    world.tell({})
    former, world.hand = world.hand, []
    world.lease()
    assert world.hand == []
    world.member.on_returned(3, 1, 1, 1, world.now, final=False)
    world.run()
    assert world.hand == [1]
    world.member.on_acknowledged(3, 1, 2, 3, world.now)
    world.run()
    assert world.hand == former
    assert not world.member.has_left(3, 1)


def test_nothing_is_handed_out_when_the_lease_may_be_over() -> None:
    world = World([b"a"] * 4, window=1)
    world.now += 9_000
    world.acknowledge(0)
    answer_all(world)
    assert not world.hand
    world.tell({3: 1})
    assert world.hand == [2]


def test_a_fenced_member_forgets_what_it_had() -> None:
    world = World([b"a"] * 4, window=2)
    world.machine.apply(c.Lease("g", 1, 2, "other"))
    world.acknowledge(0)
    world.answer()
    assert not world.member.held


def test_a_member_that_is_fenced_when_it_fetches_gives_up_what_it_has() -> None:
    """It may have fetched what its group goes on without, and hands none of it out."""
    world = World([b"a"] * 4, window=1)
    assert world.member.held[3].buffered
    world.machine.apply(c.Trim(3))
    world.machine.apply(c.AcceptLoss("g"))
    share = world.member.held[3]
    assert share.asked is not None
    world.member.on_fetched(share.asked, Fetched(world.machine.check_fetch("g", 1, 1)), world.now)
    world.run()
    assert not world.member.held
    assert world.heartbeats[-1].heartbeat.released == {3: 1}
    world.settle_former()
    world.lease()
    assert world.hand == [3]


STEPS = st.lists(
    st.tuples(st.sampled_from("aaaarjwswlvp"), st.integers(0, 50)), min_size=5, max_size=80
)


@given(
    st.lists(st.sampled_from([b"x", b"y", b"z", b""]), min_size=1, max_size=25),
    STEPS,
    st.integers(1, 8),
    st.booleans(),
)
@example([b"x"] * 3, [("a", 0), ("s", 0), ("a", 1), ("s", 0), ("l", 0)], 2, False)
def test_every_message_is_acknowledged_or_parked_in_order(
    keys: list[bytes], steps: list[tuple[str, int]], window: int, one_of_key: bool
) -> None:
    world = World(keys, window, one_of_key=one_of_key)
    for step, number in steps:
        _take_step(world, step, number)
    for _ in range(500):
        world.wait(RETRY_MS)
        if world.hand:
            world.acknowledge(0)
        if world.parked_hand:
            world.finish_parked(ok=True)
        answer_all(world)
        if world.now % 3_000 < RETRY_MS:
            world.tell({3: world.epoch})
    own = world.machine.groups["g"]
    assert own.cursor.watermark == len(keys) + 1
    share = world.member.held[3]
    assert not share.in_window
    assert all(slow.parked and slow.head is None for slow in share.keys.values())


def _take_step(world: World, step: str, number: int) -> None:
    if step == "a" and world.hand:
        world.acknowledge(number % len(world.hand))
    elif step == "r" and world.hand:
        world.give_back(number % len(world.hand))
    elif step == "j" and world.hand:
        world.give_back(number % len(world.hand), final=True)
    elif step == "s" and world.sent:
        world.answer()
    elif step == "w":
        world.wait(number)
    elif step == "p" and world.parked_hand:
        world.finish_parked(ok=number % 2 == 0)
    elif step == "v":
        parked = sorted(world.machine.groups["g"].parked.keys)
        if parked:
            world.machine.apply(c.ResumeParked("g", parked[number % len(parked)]))
    elif step == "l":
        world.lose_lease()


def test_a_returned_message_of_a_weak_topic_holds_nothing_else() -> None:
    """It comes again, and is to be parked in the end: a copy goes to the retry exchange."""
    world = World([b"a", b"a", b"b", b"a"], window=2, holds_keys=False)
    world.give_back(0)
    assert world.hand == [2, 3]
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [3, 4]
    world.wait(RETRY_MS)
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [4, 1]
    world.give_back(1)
    (park,) = world.sent
    assert isinstance(park.command, c.Park)
    assert (park.command.offset, park.command.key, park.command.follow) == (1, b"a", False)
    world.sent.clear()
    # Nothing could be stored: it is asked for again, and then it is done.
    world.member.on_answer(park, ParkAnswer(Code.PARK_FULL), world.now)
    world.wait(RETRY_MS)
    (again,) = world.sent
    world.sent.clear()
    world.machine.apply(c.AckRanges("g", 1, world.epoch, (1, 1)))
    world.member.on_answer(again, ParkAnswer(Code.OK, live=True, version=-1), world.now)
    world.run()
    world.acknowledge(0)
    answer_all(world)
    assert world.machine.groups["g"].cursor.watermark == 5
    assert not world.member.held[3].keys


@pytest.mark.parametrize("one_of_key", [False, True])
def test_credit_counts_from_the_start_and_settling_grants_nothing(one_of_key: bool) -> None:
    world = World([b"a", b"b", b"a", b"c", b"d"], one_of_key=one_of_key, limit=0)
    assert (world.hand, world.member.ready) == ([], 5)
    world.member.set_limit(2, world.now)
    world.run()
    assert world.hand == [1, 2]
    world.acknowledge(0)
    answer_all(world)
    assert world.hand == [2]
    world.give_back(0)
    world.wait(RETRY_MS)
    assert (world.hand, world.member.given) == ([], 2)
    world.member.set_limit(3, world.now)
    world.run()
    assert (len(world.hand), world.member.given) == (1, 3)
    world.member.set_limit(100, world.now)
    world.run()
    assert world.member.given == 5 + 1, "one came twice"
