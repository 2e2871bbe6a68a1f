"""What a coordinator makes of the heartbeats of members."""

from __future__ import annotations

import pytest

from convoymq.topics.answers import Answer
from convoymq.topics.commands import Lease, OpenCursor
from convoymq.topics.coordinator import Coordinator, Propose
from convoymq.topics.group import Grant, GroupState, Join, Release, Seek
from convoymq.topics.heartbeats import Heartbeat
from convoymq.topics.lineage import Lineage
from convoymq.topics.refusals import Code
from convoymq.topics.routes import first_route


@pytest.mark.parametrize(("seen", "released"), [(1, False), (2, True)])
def test_a_lease_from_before_a_seek_ends_when_its_member_has_heard_of_the_seek(
    seen: int, released: bool
) -> None:
    """A heartbeat that was sent before the member was told of its lease may come after the seek."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0), Seek(1, 0, {})):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 1)), 0)
    coordinator.on_heartbeat(Heartbeat("m", 5, seen, {}, {}), 10)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert (Release(0, 1) in proposed) is released


@pytest.mark.parametrize("held", [{}, {0: 1}])
def test_a_lease_that_its_partition_has_fenced_is_told_as_revoked(held: dict[int, int]) -> None:
    """Also to a member that has not heard of it: nobody else would ever release it."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0)):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 1)), 0)
    coordinator.on_answer(0, OpenCursor("g", 1), Answer(Code.OK), 1)
    coordinator.on_answer(0, Lease("g", 1, 1, "m"), Answer(Code.LEASE_FENCED), 2)
    answer = coordinator.answer_to(Heartbeat("m", 5, 1, held, {}))
    assert (answer.leases, answer.revoked) == ({0: 1}, frozenset({0}))


def test_a_lease_of_a_lost_partition_is_told_no_more_and_ends_in_time() -> None:
    """Until then its owner may hand out what it has, and the group stays."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0)):
        assert state.apply(command, latest=0)
    lineage = Lineage.first(first_route(4, 1))
    coordinator = Coordinator(state, lineage, 0, lost=(0,), ttl_ms=100, margin_ms=10)
    assert coordinator.answer_to(Heartbeat("m", 5, 1, {0: 1}, {})).leases == {}
    for now_ms in (10, 60, 119):
        coordinator.on_heartbeat(Heartbeat("m", now_ms, 1, {0: 1}, {}), now_ms)
        assert not coordinator.is_drained(0)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert proposed == []
    coordinator.on_heartbeat(Heartbeat("m", 120, 1, {0: 1}, {}), 120)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert proposed == [Release(0, 1, expired=True)]
    assert state.apply(proposed[0], latest=0)
    assert coordinator.is_drained(0)
