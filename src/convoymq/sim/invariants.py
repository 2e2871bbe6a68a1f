"""Invariants of every Raft group, whatever fails; watched from outside, step by step.

| invariant | how it is watched |
|---|---|
| election safety | at most one node leads in a term, and in one of its incarnations only |
| founders | in term 1 nobody votes, and only the founder leads, where there is one |
| one vote a term | the votes on the wire, and requests for them: one a term, over restarts too |
| a void vote elects nobody | who lost its vote, and was taken in anew, may give another one |
| log matching | an entry of a term and index has one content and one predecessor, on every node |
| leader completeness | whoever starts to lead holds the last entry known to be committed |
| state machine safety | every replica applies the same entry at an index, without gaps |
| commit means majority | when an entry is first applied, a majority of voters has it on disk |
| commit rule | a leader commits up to entries of its own term only (thesis 3.6.2) |
| no committed entry is truncated | every truncation is compared with what is committed |
| lost logs do not vote | who lost its log, or left, votes only with all that was committed then |
| terms and votes last | a restarted node knows every term that it has answered in |
| storage keeps its word | what was reported written is there after a crash |
| equal states | replicas that applied the same index have the same hash, snapshots included |
| equal effects | every replica that applies an entry gives the same effects |
"""

from __future__ import annotations

import zlib

import msgspec

from convoymq.kernels.entries import Entry
from convoymq.replication.machine import Effect, Machine
from convoymq.shells.groups.replica import Replica
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.referee import GroupReferee
from convoymq.sim.trace import Trace
from convoymq.storage.log import GroupLog


class GroupChecker:
    """Watches one Raft group on all nodes.

    Args:
        hash_every: state hashes are compared at indexes that this divides.
    """

    def __init__(self, group: int, referee: GroupReferee, hash_every: int, trace: Trace) -> None:
        self.group = group
        self.trace = trace
        self.referee = referee
        self.hash_every = hash_every
        self.founder = 0
        """The node that leads term 1 without an election."""
        self.led: set[tuple[int, int]] = set()
        """(node, term) that nodes led in incarnations that are over."""
        self.leaders: dict[int, int] = {}
        """Term -> node."""
        self.entries: dict[tuple[int, int], tuple[int, int]] = {}
        """(term, index) -> (CRC, previous term)."""
        self.committed: dict[int, int] = {}
        """Index -> term."""
        self.commit_index = 0
        self.commit_seen: dict[int, int] = {}
        """Node -> how far its commit index was looked at."""
        self.polled_commits: dict[int, int] = {}
        self.polled: dict[int, tuple[int, int, int]] = {}
        """Node -> term, commit index and role as they were looked at last."""
        self.hashes: dict[int, tuple[int, int]] = {}
        """Entry -> (machine version, hash of the state)."""
        self.effects: dict[int, int] = {}
        """Index -> CRC of what the entry's effects were."""
        self.votes: dict[tuple[int, int], int] = {}
        """(node, term) -> candidate. Who asks for votes has voted for itself."""
        self.former: set[tuple[int, int]] = set()
        """Votes that were given in incarnations whose data are gone."""
        self.void: set[tuple[int, int]] = set()
        """(term, candidate): who voted for it in a former incarnation has voted otherwise."""
        self.answered: dict[int, int] = {}
        """Node -> highest term that it has answered in."""
        self.terms: dict[int, int] = {}
        """Node -> term in its present incarnation."""
        self.configurations: list[frozenset[int]] = []
        self.logs: dict[int, GroupLog] = {}
        """Node -> its log, also of the last incarnation of a node that is down."""
        self.excused: set[int] = set()
        """Nodes whose disk lost what it had written: wiped, or damaged."""
        self.promised: dict[int, tuple[int, int]] = {}
        """Node -> term and index of the last acknowledgement that it sent."""
        self.owed: dict[int, int] = {}
        """Node -> what was committed when it lost its log, or let go of it."""

    def fail(self, text: str) -> None:
        """Stops the run."""
        raise InvariantBroken(f"group {self.group}: {text}")

    # The log.

    def on_append(self, node: int, log: GroupLog, entry: Entry) -> None:
        """A node appends an entry."""
        index, term = entry.index, entry.term
        previous = log.last_term if log.last_index else 0
        seen = (zlib.crc32(entry.data), previous)
        known = self.entries.setdefault((term, index), seen)
        if known != seen:
            what = "content" if known[0] != seen[0] else "predecessor"
            self.fail(f"entry {index} of term {term} has another {what} on node {node}")

    def on_truncate(self, node: int, log: GroupLog, index: int) -> None:
        """A node drops its entries from `index` on."""
        self.trace.add(
            f"node{node}", f"truncates group {self.group} from {index}, it ends at {log.last_index}"
        )
        for at in range(max(index, log.first_index), log.last_index + 1):
            committed = self.committed.get(at)
            if committed is None:
                break
            if committed == log.term_at(at):
                self.fail(f"node {node} truncates {at} of term {committed}, which is committed")

    def on_apply(
        self, node: int, replica: Replica | None, index: int, term: int, data: bytes
    ) -> None:
        """A node applies an entry."""
        if replica is not None:
            self._commits(node, replica, index)
        known = self.committed.get(index)
        if known is None:
            self.fail(f"node {node} applies {index}, which is not committed")
        elif known != term:
            self.fail(f"node {node} applies {index} of term {term}, but {known} is committed")
        content = self.entries.get((term, index))
        if content is not None and content[0] != zlib.crc32(data):
            self.fail(f"node {node} applies another content of entry {index} than was appended")

    def _commits(self, node: int, replica: Replica, upto: int) -> None:
        """A node holds everything up to `upto` for committed."""
        seen = self.commit_seen.get(node, 0)
        if upto <= seen:
            return
        self.commit_seen[node] = upto
        log = replica.log
        for index in range(max(seen + 1, log.first_index), upto + 1):
            if index > log.last_index:
                self.fail(f"node {node} commits {index}, its log ends at {log.last_index}")
            term = log.term_at(index)
            known = self.committed.get(index)
            if known is None:
                self.committed[index] = term
                self.commit_index = max(self.commit_index, index)
                self._check_majority(node, replica, term, index)
            elif known != term:
                self.fail(f"node {node} commits {index} of term {term}, others that of {known}")

    def _check_majority(self, node: int, replica: Replica, term: int, index: int) -> None:
        voters = frozenset(replica.members)
        if not self.configurations or self.configurations[-1] != voters:
            self.configurations.append(voters)
        having = {other for other in self.promised if self._had(other, replica.term, index)}
        for other, log in self.logs.items():
            held = log.written_index >= index >= log.first_index and log.term_at(index) == term
            if held or log.snapshot_index >= index:
                having.add(other)
        # Since it was looked at last, this node may have seen some come and go.
        known = replica.core.memberships
        since = max((at for at, _ in known if at <= index), default=0)
        own = [members.voters for at, members in known if at >= since]
        for candidate in [*self.configurations[-3:], *own]:
            if 2 * len(candidate & having) > len(candidate):
                return
        self.fail(
            f"node {node} commits {index} of term {term}, which only {sorted(having)} of"
            f" {sorted(voters)} have on disk"
        )

    def _had(self, node: int, term: int, index: int) -> bool:
        """Returns whether the node had the entry, and its disk lost it: one lost copy breaks no
        promise."""
        promised = self.promised.get(node, (0, 0))
        return node in self.excused and promised[0] == term and promised[1] >= index

    # Roles and terms.

    def on_poll(self, node: int, replica: Replica) -> None:
        """After a node did something."""
        core = replica.core
        seen = (core.term, core.commit_index, core.role)
        if self.polled.get(node) == seen:
            return
        term = replica.term
        begins = node not in self.polled and node not in self.excused
        if begins and term < self.answered.get(node, 0):
            self._fell(node, term)
        self.polled[node] = seen
        last = self.terms.get(node, 0)
        if term != last:
            if term < last:
                self.fail(f"the term of node {node} fell from {last} to {term}")
            self.terms[node] = term
        commit = replica.commit_index
        self._commits(node, replica, commit)
        if commit > self.polled_commits.get(node, 0):
            self.polled_commits[node] = commit
            if replica.is_leader and self.leaders.get(term) == node:
                own = replica.log.term_at(commit)
                if own != term:
                    self.fail(f"leader {node} of term {term} commits {commit} of term {own}")
        if replica.is_leader:
            if (node, term) in self.led:
                self.fail(
                    f"node {node} leads in term {term}, which it led in an earlier incarnation"
                )
            if self.leaders.get(term) != node:
                self._on_leader(node, replica, term)

    def _on_leader(self, node: int, replica: Replica, term: int) -> None:
        other = self.leaders.get(term)
        if other is not None:
            self.fail(f"nodes {other} and {node} both lead in term {term}")
        if term == 1 and self.founder not in (0, node):
            self.fail(f"node {node} leads in term 1, which is that of {self.founder}")
        if (term, node) in self.void:
            self.fail(f"node {node} leads in term {term}, but a vote for it was given anew")
        self.leaders[term] = node
        self.trace.add(f"node{node}", f"leads group {self.group} in term {term}")
        last = self.commit_index
        if not last:
            return
        known = self.committed[last]
        log = replica.log
        if known > term:
            return
        if log.last_index < last:
            self.fail(
                f"node {node} leads in term {term} without entry {last} of term {known}, which is"
                f" committed (its log ends at {log.last_index})"
            )
        if last >= log.first_index and log.term_at(last) != known:
            self.fail(
                f"node {node} leads in term {term} with entry {last} of term {log.term_at(last)},"
                f" but that of term {known} is committed"
            )

    def on_vote(self, node: int, term: int, candidate: int) -> None:
        """A node sends a vote (not a pre-vote) for a candidate, or asks for some as one."""
        if term == 1 and self.founder:
            self.fail(f"node {node} votes in term 1, which is that of {self.founder}")
        owed = self.owed.get(node, 0)
        if owed:
            self._check_owed(node, term, owed)
        known = self.votes.setdefault((node, term), candidate)
        if known != candidate:
            if (node, term) not in self.former:
                self.fail(f"node {node} votes for {known} and for {candidate} in term {term}")
            if self.leaders.get(term) == known:
                self.fail(f"node {node} votes for {candidate} in term {term}, which {known} leads")
            # The entry that took it in is on a majority's disks, and not in the first one's log.
            self.void.add((term, known))
            self.votes[node, term] = candidate
        self.former.discard((node, term))
        self.on_answer(node, term)

    def _check_owed(self, node: int, term: int, owed: int) -> None:
        log = self.logs.get(node)
        if log is None or log.written_index < owed:
            self.fail(
                f"node {node} votes in term {term} with a log up to"
                f" {log.written_index if log is not None else 0}, but lost what went up to {owed}"
            )
        elif owed >= log.first_index and log.term_at(owed) != self.committed[owed]:
            self.fail(f"node {node} votes in term {term} with another entry {owed}")
        del self.owed[node]

    def on_acknowledge(self, node: int, term: int, index: int) -> None:
        """A node tells a leader that it has everything up to an entry."""
        self.promised[node] = max(self.promised.get(node, (0, 0)), (term, index))
        # A promise about older entries does not depend on the term being remembered.
        if (term, index) in self.entries:
            self.on_answer(node, term)

    def on_answer(self, node: int, term: int) -> None:
        """A node sends an answer of a term."""
        if term > self.answered.get(node, 0):
            self.answered[node] = term

    # Starts and losses.

    def on_recovered(self, node: int, log: GroupLog) -> None:
        """A node has read its log from disk."""
        old = self.logs.get(node)
        self.logs[node] = log
        self.terms[node] = log.term
        self.commit_seen[node] = 0
        self.polled_commits[node] = 0
        self.polled.pop(node, None)
        self.led.update((node, term) for term, leader in self.leaders.items() if leader == node)
        self.trace.add(
            f"node{node}",
            f"group {self.group}: log {log.first_index}..{log.last_index}, term {log.term}, vote"
            f" {log.voted_for}, snapshot {log.snapshot_index}, damage {log.damaged}",
        )
        if log.damaged is not None:
            self.excused.add(node)
        if node in self.excused:
            return
        # That a founder has term 1 is not on this disk: the node knows it before it does anything,
        # see `on_poll`.
        known = max(log.term, 1) if self.founder else log.term
        if known < self.answered.get(node, 0):
            self._fell(node, log.term)
        vote = self.votes.get((node, log.term))
        if vote is not None and log.voted_for != vote and (node, log.term) not in self.former:
            self.fail(
                f"node {node} has forgotten its vote of term {log.term} for {vote}"
                f" (knows {log.voted_for})"
            )
        if old is None:
            return
        if log.era > old.era:
            # The leader's snapshot was on the disk before the memory followed it.
            if log.snapshot_index > self.commit_index:
                self.fail(f"node {node} is back with a snapshot of {log.snapshot_index}")
            return
        written = old.written_index
        if log.last_index < written:
            self.fail(f"node {node} had written {written}, but is back with {log.last_index}")
        if written >= max(log.first_index, old.first_index) and (
            log.term_at(written) != old.term_at(written)
        ):
            self.fail(f"node {node} is back with another entry {written} than it had written")

    def _fell(self, node: int, term: int) -> None:
        self.fail(f"node {node} is back in term {term}, but has answered in {self.answered[node]}")

    def on_wiped(self, node: int) -> None:
        """A node's disk was replaced. It votes when it is taken in anew, and has caught up."""
        self.owed[node] = self.commit_index
        self.former.update(key for key in self.votes if key[0] == node)
        self.terms.pop(node, None)
        self.answered.pop(node, None)
        self.excused.add(node)

    def on_removed(self, node: int) -> None:
        """A node deletes its replica: it promises nothing any more."""
        self.owed[node] = self.commit_index
        self.promised.pop(node, None)
        self.logs.pop(node, None)
        self.terms.pop(node, None)
        self.answered.pop(node, None)
        self.commit_seen.pop(node, None)
        self.former.update(key for key in self.votes if key[0] == node)

    # States.

    def on_state(self, node: int, machine: Machine, index: int, *, restored: bool = False) -> None:
        """A machine is at `index`."""
        if index % self.hash_every and not restored:
            return
        found = (machine.version, machine.state_hash())
        known = self.hashes.get(index)
        if restored:
            # An entry that raises the version may lie between `index` and the snapshot.
            if known is None or known[0] != found[0]:
                return
        elif known is None:
            known = self.hashes[index] = found
        if known != found:
            self.fail(f"the state of node {node} at entry {index} differs from that of others")

    def on_effects(self, node: int, index: int, effects: list[Effect]) -> None:
        """A machine applied the entry at `index`."""
        found = zlib.crc32(msgspec.msgpack.encode(effects))
        if self.effects.setdefault(index, found) != found:
            self.fail(f"node {node} gives other effects for entry {index}: {effects}")


def observe_log(checker: GroupChecker, node: int, log: GroupLog) -> None:
    """Has the checker hear of every change of a node's log."""
    append, truncate = log.append, log.truncate_from

    def watched_append(entry: Entry) -> None:
        checker.on_append(node, log, entry)
        append(entry)

    def watched_truncate(index: int) -> None:
        checker.on_truncate(node, log, index)
        truncate(index)

    log.append = watched_append  # type: ignore[method-assign]
    log.truncate_from = watched_truncate  # type: ignore[method-assign]
