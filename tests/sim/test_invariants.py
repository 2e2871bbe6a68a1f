"""The checker's own rules: what it lets pass, and what stops a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.kernels.entries import ENTRY_MEMBERSHIP, make_entry
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.raft.membership import Membership
from convoymq.sim import quorum
from convoymq.sim.cluster_checker import ClusterChecker
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.invariants import GroupChecker
from convoymq.sim.loads import run_seed
from convoymq.sim.referee import Referee
from convoymq.sim.trace import Trace


def checker() -> GroupChecker:
    return GroupChecker(1, Referee(1, {}), 1, Trace(lambda: 0))


def leader(term: int) -> Any:
    log = SimpleNamespace(first_index=1, last_index=0, snapshot_index=0, written_index=0)
    core = SimpleNamespace(term=term, commit_index=0, role=3)
    return SimpleNamespace(core=core, log=log, term=term, commit_index=0, is_leader=True)


def recovered(term: int, voted_for: int) -> Any:
    return SimpleNamespace(
        first_index=1,
        last_index=0,
        written_index=0,
        snapshot_index=0,
        term=term,
        voted_for=voted_for,
        damaged=None,
        era=0,
    )


def test_one_vote_a_term() -> None:
    group = checker()
    group.on_vote(1, 4, 3)
    with pytest.raises(InvariantBroken, match="votes for 3 and for 2 in term 4"):
        group.on_vote(1, 4, 2)


def test_term_1_belongs_to_the_founder() -> None:
    group = checker()
    group.founder = 1
    group.on_poll(1, leader(1))
    with pytest.raises(InvariantBroken, match="node 2 votes in term 1, which is that of 1"):
        group.on_vote(2, 1, 3)
    other = checker()
    other.founder = 1
    with pytest.raises(InvariantBroken, match="node 2 leads in term 1, which is that of 1"):
        other.on_poll(2, leader(1))


def test_a_term_is_led_in_one_life() -> None:
    group = checker()
    group.founder = 1
    group.on_recovered(1, recovered(0, 0))
    group.on_poll(1, leader(1))
    group.on_recovered(1, recovered(0, 0))
    with pytest.raises(
        InvariantBroken, match="leads in term 1, which it led in an earlier incarnation"
    ):
        group.on_poll(1, leader(1))


def test_a_log_that_a_snapshot_replaced_may_end_earlier() -> None:
    group = checker()
    before = recovered(1, 9)
    before.written_index = 9
    group.on_recovered(1, before)
    after = recovered(2, 0)
    with pytest.raises(InvariantBroken, match="node 1 had written 9, but is back with 0"):
        group.on_recovered(1, after)
    group.logs[1] = before
    after.era, after.snapshot_index = 1, 4
    with pytest.raises(InvariantBroken, match="is back with a snapshot of 4"):
        group.on_recovered(1, after)
    group.logs[1] = before
    group.commit_index = 4
    group.on_recovered(1, after)


def test_term_1_of_a_founder_is_known_without_the_disk_but_known() -> None:
    group = checker()
    group.founder = 1
    group.on_answer(2, 1)
    group.on_recovered(2, recovered(0, 0))
    unaware = leader(0)
    unaware.is_leader = False
    with pytest.raises(InvariantBroken, match="node 2 is back in term 0, but has answered in 1"):
        group.on_poll(2, unaware)
    group.on_answer(3, 2)
    with pytest.raises(InvariantBroken, match="node 3 is back in term 0, but has answered in 2"):
        group.on_recovered(3, recovered(0, 0))
    without = checker()
    without.on_answer(2, 1)
    with pytest.raises(InvariantBroken, match="node 2 is back in term 0, but has answered in 1"):
        without.on_recovered(2, recovered(0, 0))


@pytest.mark.parametrize("end", ["on_wiped", "on_removed"])
def test_who_was_taken_in_anew_may_vote_again_but_not_twice(end: str) -> None:
    group = checker()
    group.on_vote(1, 4, 3)
    getattr(group, end)(1)
    group.on_vote(1, 4, 2)
    group.on_poll(2, leader(4))
    with pytest.raises(InvariantBroken, match="votes for 2 and for 3"):
        group.on_vote(1, 4, 3)


def test_a_void_vote_elects_nobody() -> None:
    group = checker()
    group.on_vote(1, 4, 3)
    group.on_wiped(1)
    group.on_vote(1, 4, 2)
    with pytest.raises(InvariantBroken, match="node 3 leads in term 4, but a vote"):
        group.on_poll(3, leader(4))


def test_a_vote_that_elected_somebody_is_not_void() -> None:
    group = checker()
    group.on_vote(1, 4, 3)
    group.on_poll(3, leader(4))
    group.on_wiped(1)
    with pytest.raises(InvariantBroken, match="which 3 leads"):
        group.on_vote(1, 4, 2)


def test_who_asks_for_votes_remembers_it() -> None:
    group = checker()
    group.on_vote(3, 4, 3)
    with pytest.raises(InvariantBroken, match="node 3 is back in term 1"):
        group.on_recovered(3, recovered(1, 2))


@pytest.mark.parametrize(("index", "kept"), [(19, True), (20, True), (61, True), (62, False)])
def test_a_configuration_that_came_and_went_unseen_has_committed(index: int, kept: bool) -> None:
    """Alone from entry 20 on, a node commits all up to the promotion of another one at once."""
    group = checker()
    both = Membership(frozenset((1, 3)))
    alone = Membership(frozenset((3,)))
    core = SimpleNamespace(memberships=[(1, both), (20, alone), (62, both)])
    replica = SimpleNamespace(members=(1, 3), term=1, core=core)
    group.logs[3] = SimpleNamespace(
        written_index=62, first_index=1, snapshot_index=0, term_at=lambda at: 1
    )
    if kept:
        group._check_majority(3, replica, 1, index)
    else:
        with pytest.raises(InvariantBroken, match="only \\[3\\] of \\[1, 3\\]"):
            group._check_majority(3, replica, 1, index)


def test_a_replica_that_stops_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that fails before anything watches it: the others would go on in silence."""

    def fails(self: QuorumMachine, index: int, time_ms: int, data: bytes) -> None:
        raise ValueError("a bug in apply")

    class FailingMachine(QuorumMachine):
        apply = fails

    monkeypatch.setattr(quorum.QuorumLoad, "machine_class", FailingMachine)
    failure = run_seed(1).failure
    assert failure is not None
    assert "a bug in apply" in str(failure)


def test_an_acknowledgement_outlives_the_disk_until_somebody_goes_on_alone() -> None:
    group = ClusterChecker(1, Referee(1, {}), 1, Trace(lambda: 0))
    group.on_acknowledge(2, 3, 7)
    group.on_wiped(2)
    group.on_lost([2])
    assert group._had(2, 3, 7)
    group.forcing[1] = 7
    log = SimpleNamespace(term=4, last_index=7, last_term=3)
    body = Membership(frozenset((1,))).encode()
    group.on_append(1, log, make_entry(1, 8, 4, 0, ENTRY_MEMBERSHIP, body))
    assert group.forced == {(8, 4): 1}
    assert not group._had(2, 3, 7)
