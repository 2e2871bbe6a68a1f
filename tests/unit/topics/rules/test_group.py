"""Commands of a group: each names what it expects, and changes nothing when it is late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.rules.group import (
    Advance,
    Expire,
    Grant,
    GroupCommand,
    GroupState,
    Join,
    Kept,
    Leave,
    Release,
    Seek,
    Skip,
)


def group(*members: str) -> GroupState:
    state = GroupState.first("g", 3, {1: 7})
    for member in members:
        assert state.apply(Join(member), latest=5)
    return state


def test_a_group_advances_by_one_and_only_from_where_it_is() -> None:
    state = group()
    assert not state.apply(Advance(1, 2, 3), latest=5)
    assert not state.apply(Advance(1, 3, 5), latest=5)
    assert state.apply(Advance(1, 3, 4), latest=5)
    assert not state.apply(Advance(1, 3, 4), latest=5)
    assert state.cv == 4


def test_a_group_does_not_advance_past_what_is_published() -> None:
    assert not group().apply(Advance(1, 3, 4), latest=3)


def test_a_partition_has_one_owner_and_epochs_rise() -> None:
    state = group("a", "b")
    assert state.apply(Grant(1, "a", 1, expect=0), 5)
    assert not state.apply(Grant(1, "b", 1, expect=1), 5)
    assert not state.apply(Release(1, epoch=9), 5)
    assert state.apply(Release(1, epoch=1), 5)
    assert not state.apply(Grant(1, "b", 1, expect=0), 5)
    assert state.apply(Grant(1, "b", 1, expect=1), 5)
    assert state.lease_epochs == {1: 2}


def test_a_member_that_owns_something_does_not_leave() -> None:
    state = group("a")
    state.apply(Grant(1, "a", 1, expect=0), 5)
    assert not state.apply(Leave("a"), 5)
    state.apply(Release(1, 1), 5)
    assert state.apply(Leave("a"), 5)


def test_nothing_is_granted_after_a_seek_before_the_former_owners_are_gone() -> None:
    state = group("a")
    state.apply(Grant(1, "a", 1, expect=0), 5)
    assert state.apply(Seek(1, 2, {4: 0}), 5)
    assert (state.cv, state.start_version, state.group_epoch) == (2, 2, 2)
    assert not state.apply(Grant(4, "a", 2, expect=0), 5)
    state.apply(Release(1, 1, expired=True), 5)
    assert state.apply(Grant(4, "a", 2, expect=0), 5)


def test_a_seek_names_the_group_epoch_and_a_version_that_can_be_read() -> None:
    state = group()
    assert not state.apply(Seek(2, 2, {}), 5)
    assert not state.apply(Seek(1, 6, {}), 5)
    assert not state.apply(Seek(1, 2, {}), 5, Kept(oldest=3))
    assert not state.apply(Seek(1, 2, {7: 1}), 5, Kept(deleted={7: 1}))
    assert not state.apply(Advance(2, 3, 4), 5)


COMMANDS = st.one_of(
    st.builds(Join, st.sampled_from("ab")),
    st.builds(Leave, st.sampled_from("ab")),
    st.builds(
        Grant, st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 2)
    ),
    st.builds(Release, st.integers(0, 2), st.integers(1, 3)),
    st.builds(Advance, st.integers(1, 2), st.integers(0, 4), st.integers(0, 5)),
    st.builds(Seek, st.integers(1, 2), st.integers(0, 5), st.just({})),
    st.builds(Expire, st.integers(0, 2)),
)


def test_a_group_without_members_expires_and_its_next_member_brings_it_back() -> None:
    state = GroupState.first("g", 3, {}, time_ms=5)
    assert not state.apply(Expire(4), 5), "somebody was there meanwhile"
    assert state.apply(Expire(5), 5)
    assert not state.apply(Expire(5), 5)
    assert state.apply(Join("a"), 5, Kept(whole=3), 8)
    assert not state.expired
    assert not state.apply(Expire(5), 5), "it has a member"
    assert state.apply(Leave("a"), 5, time_ms=9)
    assert state.idle_since_ms == 9
    assert not state.apply(Expire(5), 5)
    assert state.apply(Expire(9), 5)


def test_a_group_that_lost_data_waits_for_an_operator() -> None:
    state = GroupState.first("g", 3, {}, time_ms=5)
    kept = Kept(oldest=4, whole=4, deleted={0: 1})
    assert not state.has_lost_data(kept), "what it holds is not deleted"
    assert state.apply(Expire(5), 5)
    assert state.has_lost_data(kept)
    assert not state.apply(Join("a"), 5, kept, 8)
    assert not state.apply(Advance(1, 3, 4), 5, kept, 8), "what is deleted is not drained"
    assert not state.apply(Seek(1, 3, {}), 5, kept, 8)
    assert not state.apply(Seek(1, 4, {0: 1}), 5, kept, 8)
    assert state.apply(Seek(1, 4, {2: 1}), 5, kept, 8)
    assert (state.expired, state.idle_since_ms) == (False, 8)
    assert state.apply(Join("a"), 5, kept, 9)


def test_what_is_deleted_is_not_skipped() -> None:
    """Nobody would ever read it late, so its record would never end."""
    state = GroupState.first("g", 0, {})
    assert not state.apply(Skip(0, 1, 9), 5, Kept(deleted={0: 1}), 8)
    assert (state.skipped, state.losses) == (set(), [])
    assert state.apply(Skip(0, 1, 9), 5, Kept(), 8)
    assert state.skipped == {0}


@given(st.lists(COMMANDS, max_size=40))
def test_versions_step_by_one_and_leases_never_overlap(commands: list[GroupCommand]) -> None:
    state = group("a", "b")
    granted: dict[int, int] = {}
    for command in commands:
        cv, owners = state.cv, dict(state.owners)
        changed = state.apply(command, latest=4)
        state.check_invariants()
        if not isinstance(command, Seek):
            assert state.cv - cv == int(changed and isinstance(command, Advance))
        if isinstance(command, Grant) and changed:
            assert command.pid not in owners
            assert state.owners[command.pid].epoch > granted.get(command.pid, 0)
            granted[command.pid] = state.owners[command.pid].epoch
        assert GroupState.restore(state.snapshot()).state_hash() == state.state_hash()
