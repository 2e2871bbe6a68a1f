"""One test per rule of Raft that safety rests on; sections are of Ongaro's thesis."""

from __future__ import annotations

import pytest

from convoymq.model.errors import InvariantViolated, PeerError
from convoymq.replication.raft import types
from convoymq.replication.raft.membership import Learner, Membership, decode_membership
from convoymq.replication.raft.quorum import has_majority, quorum_index
from tests.unit.replication.support import Cluster, Item


def messages(cluster: Cluster, kind: int, sender: int) -> list[tuple[int, tuple[object, ...]]]:
    """(receiver, message) of that kind that a node has sent."""
    return [
        (b, what[1])
        for a, b, what in cluster.sent
        if a == sender and what[0] == "message" and what[1][0] == kind
    ]


def test_a_majority_elects_one_leader() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(2)
    assert leader.term == 1
    assert [cluster.cores[n].leader for n in (1, 2, 3)] == [2, 2, 2]


def test_a_founder_leads_the_first_term_without_asking_or_writing() -> None:
    cluster = Cluster(3, founder=2)
    leader = cluster.cores[2]
    assert (leader.role, leader.term) == (types.LEADER, 1)
    assert not messages(cluster, types.PRE_VOTE, 2) + messages(cluster, types.VOTE, 2)
    cluster.settle()
    assert leader.commit_index == 1
    assert [cluster.cores[n].leader for n in (1, 2, 3)] == [2, 2, 2]
    assert [log.disk_vote for log in cluster.logs.values()] == [(0, 0)] * 3


def test_nobody_votes_in_the_term_of_the_founder() -> None:
    cluster = Cluster(3, founder=2)
    cluster.cores[1].on_message(3, (types.VOTE, 1, 0, 0))
    cluster.drain(1)
    cluster.flush(1)
    assert messages(cluster, types.VOTE_REPLY, 1) == [(3, (types.VOTE_REPLY, 1, False))]


def test_a_founder_that_starts_again_does_not_lead_its_term_again() -> None:
    """What it sent may be with the others, and never reached its own disk."""
    cluster = Cluster(3, founder=2)
    sent = cluster.propose(2)
    assert sent is not None
    for _ in range(3):
        for other in (1, 3):
            while cluster.deliver(2, other) or cluster.deliver(other, 2):
                pass
            cluster.flush(other)
    assert sent in cluster.logs[1].disk
    assert not cluster.logs[2].disk
    cluster.crash(2)
    cluster.start(2)
    again = cluster.cores[2]
    assert (again.role, again.term, again.voted_for) == (types.FOLLOWER, 1, 2)
    for other in (1, 3):
        cluster.connect(2, other)
    cluster.settle()
    cluster.fire(1)
    cluster.settle()
    leader = cluster.leader
    assert leader is not None
    assert leader.term > 1
    assert sent in cluster.logs[2].items


@pytest.mark.parametrize("lost", [2, 3])
def test_a_member_that_lost_its_log_in_the_founders_term_says_so_after_a_restart(
    lost: int,
) -> None:
    cluster = Cluster(3, founder=2)
    cluster.settle()
    cluster.forget(lost)
    cluster.flush(lost)
    assert cluster.logs[lost].disk_vote == (0, types.LOST_STATE)
    cluster.crash(lost)
    # What is on its disk is known, as to a node that finds the group among its data.
    cluster.joined.discard(lost)
    cluster.lived.discard(lost)
    cluster.start(lost)
    again = cluster.cores[lost]
    assert again.lost_state
    assert again.role == types.FOLLOWER


def test_a_follower_replaces_a_founder_that_it_never_heard() -> None:
    cluster = Cluster(3, founder=2)
    cluster.crash(2)
    cluster.fire(1)
    cluster.settle()
    leader = cluster.leader
    assert leader is not None
    assert leader.term == 2


def test_an_idle_group_sends_nothing() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.spread_commit()
    cluster.sent.clear()
    cluster.settle()
    assert cluster.sent == []
    assert not cluster.timers


def test_a_vote_leaves_only_when_it_is_durable() -> None:
    """3.8: term and vote are on disk before the answer."""
    cluster = Cluster(3)
    cluster.settle()
    voter = cluster.cores[2]
    voter.on_message(1, (types.VOTE, 1, 0, 0))
    cluster.drain(2)
    assert not messages(cluster, types.VOTE_REPLY, 2)
    cluster.flush(2)
    assert messages(cluster, types.VOTE_REPLY, 2) == [(1, (types.VOTE_REPLY, 1, True))]


def test_one_vote_per_term_also_over_a_restart() -> None:
    """3.4."""
    cluster = Cluster(3)
    cluster.settle()
    cluster.cores[2].on_message(1, (types.VOTE, 1, 0, 0))
    cluster.drain(2)
    cluster.flush(2)
    cluster.crash(2)
    cluster.start(2)
    cluster.cores[2].on_message(3, (types.VOTE, 1, 0, 0))
    cluster.drain(2)
    cluster.flush(2)
    assert messages(cluster, types.VOTE_REPLY, 2)[-1] == (3, (types.VOTE_REPLY, 1, False))


def test_a_candidate_does_not_count_its_own_vote_before_it_is_durable() -> None:
    cluster = Cluster(3)
    cluster.settle()
    core = cluster.cores[1]
    core.elections.start()
    core.on_message(2, (types.VOTE_REPLY, 1, True))
    assert core.role == types.CANDIDATE
    cluster.drain(1)
    cluster.flush(1)
    assert core.role == types.LEADER


def test_a_candidate_asks_for_votes_only_when_its_own_is_durable() -> None:
    """3.8: term and vote are on disk before the request."""
    cluster = Cluster(3)
    cluster.settle()
    cluster.cores[1].elections.start()
    cluster.drain(1)
    assert not messages(cluster, types.VOTE, 1)
    cluster.flush(1)
    assert messages(cluster, types.VOTE, 1) == [
        (2, (types.VOTE, 1, 0, 0)),
        (3, (types.VOTE, 1, 0, 0)),
    ]


def test_a_candidate_that_stands_no_more_asks_for_no_votes() -> None:
    cluster = Cluster(3)
    cluster.settle()
    core = cluster.cores[1]
    core.elections.start()
    core.on_append(3, 1, 0, 0, 0, ())
    cluster.drain(1)
    cluster.flush(1)
    assert core.role == types.FOLLOWER
    assert not messages(cluster, types.VOTE, 1)


def test_a_vote_for_a_life_that_forgot_its_term_elects_nobody() -> None:
    """A candidate asks with an entry that its disk never gets, and stands in that term again."""
    cluster = Cluster(3)
    cluster.elect(1)
    item = cluster.propose(1)
    assert item is not None
    for node in (2, 3):
        cluster.deliver(1, node)
    cluster.flush(1)
    cluster.flush(2)
    cluster.deliver(2, 1)
    assert cluster.cores[1].commit_index == item.index
    stand = (types.TIMEOUT_NOW, cluster.cores[3].term)
    cluster.cores[3].on_message(1, stand)
    cluster.drain(3)
    cluster.deliver(3, 2)
    cluster.crash(3)
    cluster.start(3)
    assert cluster.logs[3].last_index < item.index
    cluster.connect(2, 3)
    cluster.cores[3].on_message(1, stand)
    cluster.drain(3)
    cluster.settle()
    assert cluster.cores[3].role != types.LEADER


@pytest.mark.parametrize(
    ("last_index", "last_term", "granted"),
    [(5, 1, False), (2, 2, True), (1, 2, False), (3, 2, True), (1, 3, True)],
)
def test_a_less_complete_log_gets_no_vote(last_index: int, last_term: int, granted: bool) -> None:
    """3.6.1: last terms are compared first, then lengths."""
    cluster = Cluster(3)
    cluster.preset(2, [1, 2], 2)
    cluster.cores[2].on_message(1, (types.VOTE, 9, last_index, last_term))
    cluster.drain(2)
    cluster.flush(2)
    assert messages(cluster, types.VOTE_REPLY, 2)[-1][1] == (types.VOTE_REPLY, 9, granted)


def test_a_pre_vote_changes_no_term_and_a_live_leader_is_not_disturbed() -> None:
    """9.6."""
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cores[3].elections.start_pre_vote()
    cluster.drain(3)
    cluster.settle()
    assert cluster.cores[1].role == types.LEADER
    assert [core.term for core in cluster.cores.values()] == [1, 1, 1]
    assert cluster.cores[3].leader == 1


def test_a_suspected_leader_is_replaced() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.crash(1)
    assert cluster.timers
    assert cluster.elect(2).term == 2
    assert cluster.cores[3].leader == 2


def test_a_leader_without_a_majority_steps_down() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.disconnect(1, 2)
    assert 1 not in cluster.timers
    cluster.disconnect(1, 3)
    cluster.fire(1)
    assert cluster.cores[1].role == types.FOLLOWER
    assert cluster.cores[1].leader == 0


def test_a_leader_whose_linked_majority_does_not_answer_steps_down() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    leader.on_silent(2)
    cluster.drain(1)
    # The others are a majority still.
    assert 1 not in cluster.timers
    leader.on_silent(3)
    cluster.drain(1)
    cluster.fire(1)
    assert leader.role == types.FOLLOWER
    assert {to for to, message in messages(cluster, types.STEPPED_DOWN, 1)} == {2, 3}


def test_an_answer_ends_the_silence() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    for node in (2, 3):
        leader.on_silent(node)
    cluster.drain(1)
    assert 1 in cluster.timers
    cluster.settle()
    assert 1 not in cluster.timers
    assert not any(peer.silent for peer in leader.peers)
    assert leader.role == types.LEADER


def test_an_answer_without_progress_does_not_end_the_silence() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.settle()
    leader.on_silent(2)
    leader.on_append_reply(2, leader.term, leader.progress[2].match, 0)
    assert leader.progress[2].silent
    cluster.disconnect(1, 2)
    cluster.connect(1, 2)
    assert not leader.progress[2].silent


# A lost majority.


def lost(nodes: int = 3) -> Cluster:
    """Node 1 is all that is left, with what was committed."""
    cluster = Cluster(nodes)
    cluster.elect(1)
    cluster.propose(1)
    cluster.settle()
    cluster.spread_commit()
    for node in range(2, nodes + 1):
        cluster.crash(node)
    if 1 in cluster.timers:
        cluster.fire(1)
    return cluster


def test_the_survivor_of_a_lost_majority_goes_on_alone() -> None:
    cluster = lost()
    core = cluster.cores[1]
    term, end = core.term, cluster.logs[1].last_index
    assert core.role != types.LEADER
    assert core.changes.force(Membership(frozenset({1}))) is None
    # Not before its vote for itself is durable; a snapshot of what is applied names the old ones.
    assert core.role == types.CANDIDATE
    assert core.members_at(end).voters == {1, 2, 3}
    cluster.settle()
    assert core.role == types.LEADER
    assert core.term > term
    assert [item.kind for item in cluster.logs[1].items[end:]] == [2]
    assert core.members.voters == {1}
    assert core.commit_index == end + 1
    cluster.propose(1)
    cluster.settle()
    assert core.commit_index == end + 2


def test_a_restart_before_the_entry_is_durable_keeps_the_old_configuration() -> None:
    cluster = lost()
    assert cluster.cores[1].changes.force(Membership(frozenset({1}))) is None
    cluster.crash(1)
    cluster.start(1)
    assert cluster.cores[1].members.voters == {1, 2, 3}


def test_a_restart_after_it_keeps_the_new_one() -> None:
    cluster = lost()
    assert cluster.cores[1].changes.force(Membership(frozenset({1}))) is None
    cluster.settle()
    cluster.crash(1)
    cluster.start(1)
    assert cluster.cores[1].members.voters == {1}
    assert cluster.elect(1)


def test_a_forced_configuration_goes_when_somebody_else_leads() -> None:
    cluster = lost()
    core = cluster.cores[1]
    assert core.changes.force(Membership(frozenset({1}))) is None
    core.on_message(2, (types.VOTE, core.term + 5, 99, core.term))
    assert not core.changes.is_forced
    assert core.members.voters == {1, 2, 3}
    core.check_invariants()


def test_a_membership_is_not_forced_while_anybody_leads() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    alone = {node: Membership(frozenset({node})) for node in (1, 2)}
    assert leader.changes.force(alone[1]) == "this replica leads, with a majority"
    assert cluster.cores[2].changes.force(alone[2]) == "node 1 leads"
    assert leader.changes.force(alone[2]) == "the recovering replica must be the only voter"
    cluster.crash(1)
    # The others have not elected anybody yet, and can.
    reason = cluster.cores[2].changes.force(alone[2])
    assert reason == "a majority can be reached: an election may still succeed"
    assert not cluster.cores[2].changes.is_forced


def test_a_majority_that_is_linked_and_never_elects_counts_as_lost() -> None:
    cluster = lost()
    # They run, and have nothing: as after their disks were replaced.
    for node in (2, 3):
        cluster.forget(node)
        cluster.connect(1, node)
    core = cluster.cores[1]
    for _ in range(20):
        cluster.settle()
        if 1 in cluster.timers:
            cluster.fire(1)
    assert core.role != types.LEADER
    assert core.changes.force(Membership(frozenset({1}))) is None
    cluster.settle()
    assert core.role == types.LEADER


def test_a_replica_that_lost_its_own_data_is_no_survivor() -> None:
    cluster = lost()
    cluster.cores[1].lost_data.quarantine(False)
    reason = cluster.cores[1].changes.force(Membership(frozenset({1})))
    assert reason == "this replica has lost its own data"


def test_an_acknowledgement_leaves_only_when_the_entries_are_durable() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    cluster.sent.clear()
    assert cluster.deliver(1, 2)
    replies = [what for a, _, what in cluster.sent if a == 2 and what[0] == "reply"]
    assert all(what[2] < leader.log.last_index for what in replies)
    cluster.flush(2)
    assert cluster.sent[-1][2][:3] == ("reply", 1, leader.log.last_index)


def test_the_leader_counts_itself_only_when_its_disk_has_the_entry() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    item = cluster.propose(1)
    assert item is not None
    cluster.deliver(1, 2)
    cluster.flush(2)
    cluster.deliver(2, 1)
    assert leader.commit_index < item.index
    cluster.flush(1)
    assert leader.commit_index == item.index


def test_followers_may_commit_before_the_leaders_disk_is_done() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    item = cluster.propose(1)
    assert item is not None
    for node in (2, 3):
        cluster.deliver(1, node)
        cluster.flush(node)
        cluster.deliver(node, 1)
    assert leader.log.written_index < item.index == leader.commit_index


def test_an_entry_of_an_older_term_is_not_committed_by_count() -> None:
    """3.6.2 and figure 3.7: it becomes committed with the first entry of the own term."""
    cluster = Cluster(3)
    for node in (1, 2, 3):
        cluster.preset(node, [1], 1)
    core = cluster.cores[1]
    core.elections.start()
    cluster.drain(1)
    cluster.flush(1)
    core.on_message(2, (types.VOTE_REPLY, core.term, True))
    assert core.role == types.LEADER
    core.on_append_reply(2, core.term, 1, 0)
    core.on_append_reply(3, core.term, 1, 0)
    assert core.commit_index == 0
    cluster.drain(1)
    core.on_append_reply(2, core.term, 2, 0)
    core.on_append_reply(3, core.term, 2, 0)
    assert core.commit_index == 2


def test_conflicting_entries_are_replaced_by_the_leaders() -> None:
    """3.5: the follower's log is made equal, never the leader's."""
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.disconnect(1, 2)
    cluster.disconnect(1, 3)
    for _ in range(3):
        cluster.propose(1)
    cluster.flush(1)
    stale = list(cluster.logs[1].items)
    cluster.elect(2)
    cluster.propose(2)
    cluster.settle()
    cluster.connect(1, 2)
    cluster.settle()
    assert cluster.logs[1].items == cluster.logs[2].items != stale


def test_a_committed_entry_is_never_truncated() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.propose(1)
    cluster.settle()
    cluster.spread_commit()
    follower = cluster.cores[2]
    last = follower.log.last_index
    with pytest.raises(InvariantViolated, match="committed"):
        follower.on_append(3, 9, last - 1, 1, 0, [Item(last, 9)])


def test_two_leaders_of_one_term_stop_the_replica() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    with pytest.raises(InvariantViolated, match="both lead"):
        cluster.cores[1].on_append(2, 1, 0, 0, 0, [])


def test_entries_that_do_not_follow_each_other_are_the_peers_fault() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    last = cluster.logs[2].last_index
    with pytest.raises(PeerError):
        cluster.cores[2].on_append(1, 1, last, 1, 0, [Item(last + 2, 1)])
    with pytest.raises(PeerError):
        cluster.cores[2].on_message(1, (types.VOTE, "x"))


def test_appends_are_pipelined_within_the_window() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    for _ in range(30):
        cluster.propose(1)
    peer = leader.progress[2]
    assert peer.in_flight_bytes >= peer.window_bytes
    assert peer.next_index <= leader.log.last_index
    cluster.settle()
    assert peer.match == leader.log.last_index
    assert peer.in_flight_bytes == 0


def test_only_one_change_of_members_at_a_time() -> None:
    """4.1, with the correction: none before an entry of the own term is committed."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    assert cluster.propose(1, leader.members.without(3)) is not None
    assert leader.changes.refusal_of(leader.members.without(2)) is not None
    cluster.settle()
    assert leader.members.voters == {1, 2}
    assert leader.changes.refusal_of(Membership(frozenset({3, 4}))) is not None


def test_nobody_is_removed_while_those_left_could_not_commit_it() -> None:
    """The new configuration counts at once: without a majority of logs in it nobody could be
    elected, not even to undo it."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    cluster.settle()
    cluster.forget(3)
    for leaves in (1, 2):
        refusal = leader.changes.refusal_of(leader.members.without(leaves))
        assert refusal == "too few of the voters that are left could commit it"
    assert leader.changes.refusal_of(leader.members.without(3)) is None
    cluster.connect(1, 3)
    cluster.settle()
    cluster.retry()
    cluster.settle()
    assert leader.members.voters == {1, 2, 3}
    assert leader.changes.refusal_of(leader.members.without(2)) is None
    # Who leaves must leave somebody who may vote.
    leader.progress[2].voteless = True
    assert leader.changes.refusal_of(leader.members.without(1)) is not None
    assert leader.changes.refusal_of(leader.members.without(3)) is None


def test_a_new_member_gets_its_vote_when_it_has_caught_up() -> None:
    """4.2.1."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    for _ in range(10):
        cluster.propose(1)
    cluster.settle()
    cluster.propose(1, leader.members.with_learner(Learner(4, leader.log.last_index)))
    assert 4 not in leader.members.voters
    cluster.start(4)
    for node in (1, 2, 3):
        cluster.connect(node, 4)
    cluster.settle()
    assert leader.members.voters == {1, 2, 3, 4}
    assert cluster.logs[4].items == cluster.logs[1].items


def test_a_removed_leader_steps_down_and_names_an_heir() -> None:
    """4.2.2."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1, leader.members.without(1))
    cluster.settle()
    assert cluster.cores[1].role == types.FOLLOWER
    assert cluster.leader is not None
    assert cluster.leader.node in (2, 3)


def test_leadership_is_transferred_without_a_wait() -> None:
    """3.10."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    assert leader.transfer(3) is None
    cluster.drain(1)
    assert cluster.propose(1) is None
    cluster.settle()
    assert cluster.cores[3].role == types.LEADER
    assert cluster.cores[1].leader == 3


def test_a_replica_that_lost_its_log_does_not_vote_before_it_caught_up() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.disconnect(1, 3)
    cluster.disconnect(2, 3)
    cluster.propose(1)
    cluster.settle()
    core = cluster.cores[2]
    core.lost_data.quarantine(False)
    cluster.drain(2)
    cluster.flush(2)
    cluster.crash(1)
    cluster.logs[2].wipe()
    core.lost_data.on_log_lost()
    cluster.drain(2)
    cluster.connect(2, 3)
    cluster.settle()
    for node in (3, 2, 3):
        cluster.fire(node)
        cluster.settle()
    assert cluster.leader is None
    cluster.start(1)
    cluster.connect(1, 2)
    cluster.connect(1, 3)
    cluster.elect(1)
    cluster.settle()
    assert not core.quarantined
    assert cluster.logs[2].items == cluster.logs[1].items


def test_the_quarantine_lasts_over_a_restart() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cores[2].lost_data.quarantine(False)
    cluster.drain(2)
    cluster.flush(2)
    cluster.logs[2].wipe()
    cluster.crash(2)
    cluster.start(2)
    assert cluster.cores[2].quarantined
    cluster.cores[2].on_message(3, (types.VOTE, 9, 5, 5))
    cluster.drain(2)
    cluster.flush(2)
    assert messages(cluster, types.VOTE_REPLY, 2)[-1][1] == (types.VOTE_REPLY, 9, False)


def test_a_replica_that_lost_everything_is_removed_and_taken_in_anew() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    cluster.settle()
    cluster.crash(2)
    cluster.logs[2] = type(cluster.logs[2])()
    cluster.start(2)
    core = cluster.cores[2]
    core.lost_data.quarantine(True)
    core.lost_data.on_log_lost()
    cluster.drain(2)
    cluster.connect(2, 3)
    core.on_message(3, (types.VOTE, 9, 50, 8))
    assert core.term == 0
    cluster.connect(1, 2)
    cluster.settle()
    cluster.retry()
    cluster.settle()
    assert not core.lost_state
    assert leader.members.voters == {1, 2, 3}
    changes = [
        decode_membership(item.data[48:]) for item in cluster.logs[1].items if item.kind == 2
    ]
    assert frozenset({1, 3}) in [found.voters for found in changes]
    assert cluster.logs[2].items == cluster.logs[1].items


def test_a_replica_whose_vote_in_the_leader_s_term_is_known_is_taken_in_too() -> None:
    """The mark of the loss may not contradict that vote, so it begins a term of its own, which the
    leader does not know of."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1)
    cluster.settle()
    cluster.crash(2)
    old = cluster.logs[2]
    cluster.logs[2] = type(old)()
    cluster.logs[2].term, cluster.logs[2].voted_for = cluster.logs[2].disk_vote = (1, 1)
    cluster.start(2)
    core = cluster.cores[2]
    core.lost_data.quarantine(True)
    assert core.term == leader.term + 1
    core.lost_data.on_log_lost()
    cluster.drain(2)
    cluster.connect(1, 2)
    # The leader learns of that term from what it sends next, and has to be elected again.
    for _ in range(5):
        cluster.settle()
        cluster.retry()
        cluster.settle()
        for node in sorted(cluster.timers):
            cluster.fire(node)
            cluster.settle()
    assert not core.lost_state
    assert core.members.voters == {1, 2, 3}
    assert cluster.logs[2].items == cluster.logs[1].items


def returning_member() -> Cluster:
    """Node 3 has helped to commit that node 4 belongs to the group, has left, has forgotten
    everything, and is added again; node 2 was away and follows a configuration with 1, 2, 3."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.spread_commit()
    cluster.disconnect(1, 2)
    cluster.disconnect(3, 2)
    cluster.propose(1, leader.members.with_learner(leader.changes.new_learner(4)))
    cluster.start(4)
    cluster.connect(1, 4)
    cluster.connect(3, 4)
    cluster.settle()
    assert leader.members.voters == {1, 2, 3, 4}
    cluster.propose(1)
    cluster.settle()
    cluster.propose(1, leader.members.without(3))
    cluster.settle()
    cluster.spread_commit()
    assert leader.commit_index == leader.log.last_index
    cluster.forget(3)
    cluster.propose(1, leader.members.with_learner(leader.changes.new_learner(3)))
    cluster.settle()
    return cluster


def stand(cluster: Cluster, node: int) -> None:
    """That node tries to be elected, several times."""
    for _ in range(5):
        if node in cluster.timers:
            cluster.fire(node)
            cluster.settle()


def test_a_member_that_comes_back_does_not_vote_before_it_is_taken_in() -> None:
    """4.1 rests on votes that last: of two majorities one may meet only in a former life."""
    cluster = returning_member()
    cluster.connect(2, 3)
    stand(cluster, 2)
    assert set(cluster.leaders.values()) == {1}


def test_a_member_that_comes_back_does_not_vote_before_it_has_caught_up() -> None:
    cluster = returning_member()
    core = cluster.cores[3]
    cluster.connect(1, 3)
    while core.lost_state:
        assert (
            cluster.deliver(3, 1)
            or cluster.deliver(1, 3)
            or cluster.deliver(1, 4)
            or (cluster.deliver(4, 1))
        )
        for node in (1, 3, 4):
            cluster.flush(node)
    assert core.quarantined
    assert not core.log.last_index
    cluster.disconnect(1, 3)
    cluster.connect(2, 3)
    cluster.crash(3)
    cluster.start(3)
    assert cluster.cores[3].quarantined
    cluster.connect(2, 3)
    stand(cluster, 2)
    assert set(cluster.leaders.values()) == {1}


def test_a_member_that_comes_back_votes_when_it_is_a_voter_also_after_a_restart() -> None:
    cluster = returning_member()
    leader = cluster.cores[1]
    cluster.connect(1, 3)
    for _ in range(5):
        cluster.settle()
        cluster.retry()
    assert leader.members.voters == {1, 2, 3, 4}
    assert cluster.logs[3].voted_for == types.WITHHELD
    assert cluster.logs[3].items == cluster.logs[1].items
    cluster.crash(3)
    cluster.start(3)
    core = cluster.cores[3]
    assert not core.quarantined
    core.on_message(4, (types.VOTE, core.term, 99, core.term))
    core.on_message(4, (types.VOTE, core.term + 1, 99, core.term + 1))
    cluster.drain(3)
    cluster.flush(3)
    granted = [message[2] for _, message in messages(cluster, types.VOTE_REPLY, 3)]
    assert granted[-2:] == [False, True]


def test_a_learner_without_a_vote_of_its_own_is_not_promoted() -> None:
    """Else a group of two could not elect anybody when the leader restarts now."""
    cluster = returning_member()
    leader = cluster.cores[1]
    end = leader.log.last_index
    leader.on_append_reply(3, leader.term, end, 0, voteless=True)
    assert leader.changes.proposal() is None
    leader.on_append_reply(3, leader.term, end, 0)
    assert leader.members_due
    found = leader.changes.proposal()
    assert found is not None
    assert 3 in found.voters


def test_who_is_no_member_is_not_taken_in_for_the_asking() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.propose(1, leader.members.without(3))
    cluster.settle()
    cluster.forget(3)
    cluster.connect(1, 3)
    cluster.settle()
    assert leader.members.nodes == {1, 2}
    assert cluster.cores[3].lost_state


def test_quorum_arithmetic() -> None:
    assert quorum_index([]) == 0
    assert quorum_index([7]) == 7
    assert quorum_index([7, 5]) == 5
    assert quorum_index([1, 9, 4]) == 4
    assert quorum_index([1, 9, 4, 8]) == 4
    assert has_majority({1, 2}, frozenset({1, 2, 3}))
    assert not has_majority({1, 2, 9}, frozenset({1, 2, 3, 4}))


def test_membership_survives_encoding_and_padding() -> None:
    members = Membership(frozenset({3, 1}), (Learner(2, 9, 77),))
    assert decode_membership(members.encode() + bytes(5)) == members
    with pytest.raises(PeerError):
        decode_membership(members.encode()[:-1])


def pace(cluster: Cluster, leader: int, *awaited: int) -> list[int]:
    """Who is deferred."""
    core = cluster.cores[leader]
    core.choose_pace(frozenset(awaited))
    return [peer.node for peer in core.peers if peer.is_deferred]


def test_as_many_as_a_majority_needs_get_entries_at_once() -> None:
    three, five = Cluster(3), Cluster(5)
    three.elect(2)
    five.elect(4)
    three.spread_commit()
    five.spread_commit()
    assert pace(three, 2) == [1]
    assert pace(five, 4) == [2, 3]
    # Who is waited for counts towards the majority first.
    assert pace(three, 2, 1) == [3]
    assert pace(five, 4, 3) == [1, 2]
    assert pace(five, 4, 1, 2, 3, 5) == []


def test_who_is_behind_or_away_is_not_counted_on() -> None:
    cluster = Cluster(3)
    core = cluster.elect(1)
    cluster.spread_commit()
    assert pace(cluster, 1) == [3]
    core.progress[2].match -= 1
    assert pace(cluster, 1) == [2]
    core.progress[2].probe(1)
    assert pace(cluster, 1) == []
    core.progress[2].state = types.REPLICATE
    core.progress[2].connected = False
    assert pace(cluster, 1) == []


def test_a_question_from_a_later_term_makes_a_follower_ask_for_its_leader() -> None:
    """A late frame of a leader that has lost its log since can make a follower trust it."""
    cluster = Cluster(3)
    leader = cluster.elect(2)
    cluster.settle()
    follower = cluster.cores[1]
    assert 1 not in cluster.timers
    follower.on_message(3, (types.PRE_VOTE, leader.term + 1, 0, 0))
    cluster.drain(1)
    assert 1 not in cluster.timers
    follower.on_message(3, (types.PRE_VOTE, leader.term + 2, 0, 0))
    cluster.drain(1)
    assert follower.term == leader.term
    assert 1 in cluster.timers
    cluster.fire(1)
    assert (
        2,
        (types.PRE_VOTE, leader.term + 1, follower.log.last_index, follower.log.last_term),
    ) in (messages(cluster, types.PRE_VOTE, 1))
    # The leader lives: nothing changes.
    cluster.settle()
    assert (follower.leader, follower.term) == (2, leader.term)
