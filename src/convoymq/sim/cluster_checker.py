"""Watches the Raft groups of a simulated cluster: groups end, and a lost majority is given up."""

from __future__ import annotations

from collections.abc import Callable, Collection

from convoymq.kernels.entries import ENTRY_MEMBERSHIP, HEADER_SIZE, Entry
from convoymq.replication.raft.membership import decode_membership
from convoymq.shells.groups.replica import Replica
from convoymq.sim.invariants import GroupChecker
from convoymq.sim.referee import GroupReferee
from convoymq.sim.trace import Trace
from convoymq.storage.log import GroupLog


class ClusterChecker(GroupChecker):
    """Watches one Raft group, which may end, and remembers its configurations."""

    def __init__(self, group: int, referee: GroupReferee, hash_every: int, trace: Trace) -> None:
        super().__init__(group, referee, hash_every, trace)
        self.ended = False
        """The queue is deleted: copies go at any time."""
        self.memberships: dict[tuple[int, int], frozenset[int]] = {}
        """(index, term) -> nodes."""
        self.forcing: dict[int, int] = {}
        """Node -> where its log ended when an operator had it go on alone."""
        self.gone: set[int] = set()
        """Nodes whose disks were lost together. Acknowledgements of theirs may still arrive, and
        count until somebody goes on alone."""
        self.floor = 0
        """The last committed entry that a survivor of a lost majority held, with all before it, on
        its disk."""
        self.forced: dict[tuple[int, int], int] = {}
        """(index, term) -> node, of the entries by which one did."""
        self.on_recovered_alone: Callable[[ClusterChecker, int, GroupLog, int], None]

    def on_append(self, node: int, log: GroupLog, entry: Entry) -> None:
        if entry.kind == ENTRY_MEMBERSHIP:
            found = decode_membership(entry.data[HEADER_SIZE:])
            self.memberships[entry.index, entry.term] = frozenset(found.nodes)
            alone = found.voters == {node}
            if alone and log.term == entry.term and self.forcing.get(node) == log.last_index:
                del self.forcing[node]
                self.forced[entry.index, entry.term] = node
                for lost in self.gone:
                    self.promised.pop(lost, None)
                self.gone.clear()
                # Lost nodes may have been in that term, of which nobody is left who knows.
                self.entries = {at: seen for at, seen in self.entries.items() if at[0] < log.term}
        super().on_append(node, log, entry)

    def _on_leader(self, node: int, replica: Replica, term: int) -> None:
        if node in {n for (_, at), n in self.forced.items() if at == term}:
            # What it does not have is lost: that is seen when it commits its first entry.
            self.leaders[term] = node
            self.trace.add(f"node{node}", f"leads group {self.group} alone in term {term}")
            return
        super()._on_leader(node, replica, term)

    def _commits(self, node: int, replica: Replica, upto: int) -> None:
        seen = self.commit_seen.get(node, 0)
        log = replica.log
        for index, term in list(self.forced):
            # Who applies entry by entry has committed all of them together.
            reached = max(upto, replica.commit_index)
            if seen < index <= reached and log.term_at(index) == term:
                del self.forced[index, term]
                self.on_recovered_alone(self, node, log, index)
        super()._commits(node, replica, upto)

    def agrees_upto(self, log: GroupLog, limit: int) -> int:
        """Returns the last committed entry up to which a log has what was committed."""
        for index in range(log.first_index, min(self.commit_index, limit) + 1):
            if self.committed.get(index) != log.term_at(index):
                return index - 1
        known: int = max(limit, log.snapshot_index)
        return min(self.commit_index, known)

    def on_lost(self, nodes: Collection[int]) -> None:
        """The disks of these nodes are gone for good."""
        for node in nodes:
            self.logs.pop(node, None)
        self.gone.update(nodes)
        left = [self.agrees_upto(log, log.written_index) for log in self.logs.values()]
        self.floor = max(left, default=0)

    def rewind(self, index: int, term: int) -> None:
        """Forgets what was committed after an entry, because it is lost; a leader goes on in a term
        that may have been before."""
        for at in [at for at in self.committed if at > index]:
            del self.committed[at]
        self.commit_index = min(self.commit_index, index)
        for at in [at for at in self.hashes if at > index]:
            del self.hashes[at]
        for at in [at for at in self.effects if at > index]:
            del self.effects[at]
        self.leaders = {at: node for at, node in self.leaders.items() if at < term}
        self.led = {(node, at) for node, at in self.led if at < term}
        self.owed = {node: min(owed, index) for node, owed in self.owed.items()}

    def _check_majority(self, node: int, replica: Replica, term: int, index: int) -> None:
        if not self.ended:
            super()._check_majority(node, replica, term, index)

    def members_at(self, config: tuple[int, int], begins: frozenset[int]) -> frozenset[int] | None:
        """Returns the members at a committed index; `begins`: those that the group began with.

        A configuration that came in a snapshot has the snapshot's index.
        """
        _, index = config
        if index and index not in self.committed:
            return None
        found = [
            (at, nodes)
            for (at, term), nodes in self.memberships.items()
            if at <= index and self.committed.get(at) == term
        ]
        return max(found)[1] if found else begins
