"""Bugs of consensus, membership, links and storage."""

from __future__ import annotations

from typing import Any

from tests.sim.planted import parts
from tests.sim.planted.registry import late, plant

_core = late("convoymq.replication.raft.core:RaftCore")
_elections = late("convoymq.replication.raft.elections:Elections")
_lost_data = late("convoymq.replication.raft.lost_data:LostData")
_relay = late("convoymq.transport.relay:RelayTable")


@plant("a vote is given without looking at the candidate's log", "crash,isolate,break")
def vote_without_log_check() -> None:
    _core().log_is_up_to_date = lambda self, last_index, last_term: True


@plant("a vote is sent before it is on disk", "blackout,crash,slow,spike,isolate,suspect,transfer")
def vote_before_it_is_durable() -> None:
    core = _core()
    set_vote = core.set_vote

    def planted(self: Any, term: int, node: int) -> None:
        set_vote(self, term, node)
        self.durable_term, self.durable_vote = self.term, self.voted_for

    core.set_vote = planted


@plant(
    "a candidate asks for votes before its own is on disk",
    "blackout,crash,slow,spike,isolate,suspect,transfer",
)
def asks_before_its_vote_is_durable() -> None:
    from convoymq.replication.raft.types import VOTE

    elections = _elections()
    start = elections.start

    def planted(self: Any) -> None:
        start(self)
        log = self.core.log
        self.ask_voters((VOTE, self.core.term, log.last_index, log.last_term))

    elections.start = planted


@plant("a restarted node has forgotten for whom it voted", "crash,kill,isolate,suspect")
def vote_forgotten_at_restart() -> None:
    core = _core()
    start = core.start

    def planted(self: Any, *arguments: Any) -> None:
        if self.voted_for < 256:
            self.voted_for = self.durable_vote = self.log.voted_for = 0
        start(self, *arguments)

    core.start = planted


@plant("one vote is enough to lead", "isolate,partition")
def elected_without_majority() -> None:
    _elections().is_elected = lambda self: bool(self.votes)


@plant("entries of older terms are committed by counting copies", "isolate,crash,partition")
def older_term_committed_by_count() -> None:
    _core()._may_commit = lambda self, index: True


@plant("a follower acknowledges what is not on its disk yet", "crash,spike")
def acknowledged_before_disk() -> None:
    _core().ack_index = lambda self: self.match_index


@plant("the leader counts itself before its disk has the entry", "crash,spike")
def leader_counts_unwritten() -> None:
    _core()._own_match = lambda self: self.log.last_index


@plant("the WAL reports a flush without having synced", "crash,torn")
def flush_without_sync() -> None:
    from convoymq.sim.disk import SimFlusher

    complete = SimFlusher._complete

    def planted(self: Any, file: Any, token: Any, code: int) -> None:
        self.skips_sync = True
        complete(self, file, token, code)

    SimFlusher._complete = planted  # type: ignore[method-assign]


@plant("a pack is not synced before the WAL file goes", "crash,torn,blackout")
def pack_without_sync() -> None:
    from convoymq.sim.disk import SimDisk

    sync = SimDisk.sync

    def planted(self: Any, path: str = "") -> None:
        if path != "packs":
            sync(self, path)

    SimDisk.sync = planted  # type: ignore[method-assign]


@plant("an append that overlaps the log always truncates it", "break,loss")
def overlap_truncates() -> None:
    core = _core()
    on_append = core.on_append

    def planted(
        self: Any,
        node: int,
        term: int,
        previous: int,
        previous_term: int,
        commit: int,
        entries: Any,
    ) -> Any:
        log = self.log
        if entries and term == self.term and log.first_index <= entries[0].index <= log.last_index:
            log.truncate_from(entries[0].index)
        return on_append(self, node, term, previous, previous_term, commit, entries)

    core.on_append = planted


@plant("a follower takes the leader's commit index for entries that it has not compared")
def commit_beyond_match() -> None:
    core = _core()
    on_append = core.on_append

    def planted(
        self: Any,
        node: int,
        term: int,
        previous: int,
        previous_term: int,
        commit: int,
        entries: Any,
    ) -> Any:
        taken = on_append(self, node, term, previous, previous_term, commit, entries)
        if term == self.term:
            self.commit_index = max(self.commit_index, min(commit, self.log.last_index))
        return taken

    core.on_append = planted


@plant("a leader applies and delivers before a majority has the entry", "delay")
def delivered_before_commit() -> None:
    core = _core()
    append_own = core.append_own

    def planted(self: Any, entry: Any) -> None:
        append_own(self, entry)
        if self.term_start <= self.commit_index:
            self.commit_index = self.log.last_index

    core.append_own = planted


@plant("a replica that lost its log votes at once", "rot,wipe,crash,kill")
def lost_log_votes() -> None:
    core = _core()
    core.may_vote = lambda self, candidate: self.voted_for in (0, candidate, 0xFFFE)
    quarantine = _lost_data().quarantine

    def planted(self: Any, vote_lost: bool) -> None:
        quarantine(self, vote_lost)
        self.core.quarantined = self.core.lost_state = False

    _lost_data().quarantine = planted


@plant("a member that comes back votes before it has caught up", "membership,crash,isolate,kill")
def returned_member_votes() -> None:
    from convoymq.replication.raft.membership import Learner
    from convoymq.shells.groups.replica import Replica

    parts.changes().new_learner = lambda self, node, number=0, promote_at=0: Learner(
        node, 0, number
    )
    start = Replica.start

    def planted(self: Any, *, campaign: bool, new: bool) -> None:
        joins = self.core.members.learner(self.host.node) is not None
        start(self, campaign=campaign, new=new and not joins)

    Replica.start = planted  # type: ignore[method-assign]


@plant("a replica that is far behind is called live", "slow,spike,delay,freeze", unaided=True)
def live_however_far_behind() -> None:
    from convoymq.replication.raft.types import REPLICATE
    from convoymq.shells.groups.replica import Replica

    def planted(self: Any, node: int) -> bool:
        peer = self.core.progress.get(node)
        return node == self.host.node or (
            peer is not None and peer.connected and peer.state == REPLICATE
        )

    Replica.is_live = planted  # type: ignore[method-assign]


@plant("every node is taken for one with a live replica", "crash,membership", unaided=True)
def everybody_is_live() -> None:
    from convoymq.shells.groups.replica import Replica

    Replica.is_live = lambda self, node: True  # type: ignore[method-assign]


@plant("nobody is relayed to", "cutoff")
def nobody_is_relayed() -> None:
    _relay()._relays = lambda self, node: []


@plant("a relayed session goes on after it was broken", "cutoff,loss,break,stale,oneway")
def relayed_sessions_go_on() -> None:
    relay = _relay()
    stop = relay._stop

    def planted(self: Any, pair: Any) -> Any:
        own, theirs, received = pair.own, pair.theirs, pair.received
        done = stop(self, pair)
        pair.own, pair.theirs, pair.received = own, theirs, received
        return done

    relay._stop = planted
