"""Raft cores on logs in memory, joined by links that can break: no bytes, no machine."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from convoymq.replication.raft import types
from convoymq.replication.raft.core import ENTRY_MEMBERSHIP, RaftCore
from convoymq.replication.raft.membership import Membership


@dataclass
class Item:
    """An entry as the core sees it."""

    index: int
    term: int
    kind: int = 1
    data: bytes = b""
    size: int = 100


class MemoryLog:
    """A log with a disk that is slower than memory; `crash` loses what was not flushed."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.term = 0
        self.voted_for = 0
        self.first_index = 1
        self.snapshot_index = 0
        self.written_index = 0
        self.disk: list[Item] = []
        self.disk_vote = (0, 0)
        self._jobs: deque[tuple[str, Any]] = deque()

    @property
    def last_index(self) -> int:
        return len(self.items)

    @property
    def last_term(self) -> int:
        return self.items[-1].term if self.items else 0

    def term_at(self, index: int) -> int:
        if index == 0:
            return 0
        if not 1 <= index <= len(self.items):
            raise LookupError(index)
        return self.items[index - 1].term

    def append(self, entry: Item) -> None:
        assert entry.index == self.last_index + 1
        assert entry.term >= self.last_term
        self.items.append(entry)
        self._jobs.append(("append", entry))

    def truncate_from(self, index: int) -> None:
        del self.items[index - 1 :]
        self.written_index = min(self.written_index, index - 1)
        self._jobs.append(("truncate", index))

    def assume_vote(self, term: int, voted_for: int) -> None:
        assert self.term == 0
        self.term, self.voted_for = term, voted_for

    def save_vote(self, term: int, voted_for: int) -> None:
        marks = 256 <= self.voted_for < voted_for
        assert term > self.term or (term == self.term and self.voted_for in (0, voted_for)) or marks
        self.term, self.voted_for = term, voted_for
        self._jobs.append(("vote", (term, voted_for)))

    def flush(self, count: int, core: RaftCore) -> None:
        """Makes the next `count` writes durable, then tells the core."""
        votes = []
        for _ in range(min(count, len(self._jobs))):
            kind, what = self._jobs.popleft()
            if kind == "append":
                self.disk.append(what)
            elif kind == "truncate":
                del self.disk[what - 1 :]
            else:
                self.disk_vote = what
                votes.append(what)
        for term, voted_for in votes:
            core.on_vote_written(term, voted_for)
        same = 0
        for held, durable in zip(self.items, self.disk, strict=False):
            if held != durable:
                break
            same += 1
        if same > self.written_index:
            self.written_index = same
            core.on_written(same)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def crash(self) -> None:
        self.items = list(self.disk)
        self.written_index = len(self.items)
        self.term, self.voted_for = self.disk_vote
        self._jobs.clear()

    def wipe(self) -> None:
        """The entries are lost, durably; term and vote stay."""
        self.items, self.disk = [], []
        self.written_index = 0
        self._jobs = deque(job for job in self._jobs if job[0] == "vote")


class Cluster:
    """Cores of one group, their links, their disks, and what must hold of them."""

    def __init__(
        self,
        nodes: int,
        seed: int = 0,
        core_class: type[RaftCore] = RaftCore,
        automatic: bool = True,
        founder: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.core_class = core_class
        self.automatic = automatic
        self.members = Membership(frozenset(range(1, nodes + 1)))
        self.logs = {n: MemoryLog() for n in self.members.voters}
        self.cores: dict[int, RaftCore] = {}
        self.links: dict[tuple[int, int], deque[tuple[Any, ...]]] = {}
        self.connected: dict[int, set[int]] = {n: set() for n in self.members.voters}
        self.timers: set[int] = set()
        self.leaders: dict[int, int] = {}
        self.committed: list[Item] = []
        self.sent: list[tuple[int, int, tuple[Any, ...]]] = []
        self.incarnation = 100
        #: Leads term 1 without an election, in its first life.
        self.founder = founder
        self.lived: set[int] = set()
        #: Nodes that may have been members before the life that their disk knows.
        self.joined: set[int] = set()
        for node in sorted(self.members.voters):
            self.start(node)
        for a in self.members.voters:
            for b in self.members.voters:
                if a < b:
                    self.connect(a, b)

    def start(self, node: int) -> None:
        self.incarnation += 1
        self.connected.setdefault(node, set())
        log: Any = self.logs.setdefault(node, MemoryLog())
        core = self.core_class(
            node,
            7,
            log,
            self.members,
            self.connected[node],
            self.random.random,
            150,
            1000,
            self.incarnation,
        )
        self.cores[node] = core
        found = [
            (item.index, _members(item)) for item in log.items if item.kind == ENTRY_MEMBERSHIP
        ]
        if self.founder and node in self.members.voters and node not in self.joined:
            core.found(self.founder, node == self.founder and node not in self.lived)
        self.lived.add(node)
        core.start(found)
        if node in self.joined and not log.items and not log.term:
            core.lost_data.quarantine(True)
            core.lost_data.on_log_lost()
        self.drain(node)

    def forget(self, node: int) -> None:
        """The node has left: its log and its vote are gone. It may be added again."""
        if node in self.cores:
            self.crash(node)
        self.logs[node] = MemoryLog()
        self.joined.add(node)
        self.start(node)

    def preset(self, node: int, terms: list[int], term: int) -> None:
        """Restarts a node with entries of these terms on its disk."""
        self.crash(node)
        log = self.logs[node] = MemoryLog()
        log.disk = [Item(at + 1, of) for at, of in enumerate(terms)]
        log.disk_vote = (term, 0)
        log.crash()
        self.start(node)

    def connect(self, a: int, b: int) -> None:
        if a not in self.cores or b not in self.cores or b in self.connected[a]:
            return
        for one, other in ((a, b), (b, a)):
            self.links[one, other] = deque()
            self.connected[one].add(other)
        for one, other in ((a, b), (b, a)):
            core = self.cores[one]
            core.on_reachable(other)
            if core.role == types.LEADER:
                peer = core.progress.get(other)
                if peer is not None:
                    self.send_append(core, peer, probe=True)
            self.drain(one)

    def disconnect(self, a: int, b: int) -> None:
        for one, other in ((a, b), (b, a)):
            if other in self.connected[one]:
                self.links.pop((one, other), None)
                self.connected[one].discard(other)
                self.cores[one].on_suspected(other)
                self.drain(one)

    def crash(self, node: int) -> None:
        self.timers.discard(node)
        for other in list(self.connected[node]):
            self.links.pop((node, other), None)
            self.links.pop((other, node), None)
            self.connected[other].discard(node)
            self.cores[other].on_suspected(node)
            self.drain(other)
        self.connected[node].clear()
        del self.cores[node]
        self.logs[node].crash()

    def send(self, a: int, b: int, what: tuple[Any, ...]) -> None:
        self.sent.append((a, b, what))
        if (a, b) in self.links:
            self.links[a, b].append(what)

    def drain(self, node: int) -> None:
        core = self.cores[node]
        while core.effects:
            effects, core.effects = core.effects, []
            for effect in effects:
                if isinstance(effect, types.Send):
                    self.send(node, effect.node, ("message", effect.message))
                elif isinstance(effect, types.Arm):
                    self.timers.add(node)
                elif isinstance(effect, types.Disarm):
                    self.timers.discard(node)
                elif isinstance(effect, types.Lead) and core.role == types.LEADER:
                    assert self.leaders.setdefault(core.term, node) == node, "two leaders"
                    log = self.logs[node]
                    kind, data = 0, b""
                    if core.changes.is_forced:
                        kind, data = ENTRY_MEMBERSHIP, bytes(48) + core.members.encode()
                    core.append_own(Item(log.last_index + 1, core.term, kind, data))
        self.work(node)

    def work(self, node: int) -> None:
        """What a shell does at the end of a round."""
        core = self.cores[node]
        if core.role == types.LEADER:
            for peer in core.peers:
                while peer.next_index <= self.logs[node].last_index and peer.may_send():
                    self.send_append(core, peer)
            members = core.changes.proposal() if core.members_due else None
            if members is not None:
                self.propose(node, members)
        else:
            index = core.take_reply()
            if index >= 0:
                reply = (core.term, index, 0, False, core.quarantined)
                self.send(node, core.leader, ("reply", *reply))
        self.check(node)

    def send_append(self, core: RaftCore, peer: Any, probe: bool = False) -> None:
        log = self.logs[core.node]
        previous = peer.next_index - 1
        items = [] if probe else log.items[previous : previous + 3]
        what = (core.term, previous, log.term_at(previous), core.commit_index, items)
        peer.sent(previous + len(items), 100 * len(items))
        self.send(core.node, peer.node, ("append", *what))

    def propose(self, node: int, members: Membership | None = None) -> Item | None:
        core = self.cores.get(node)
        if core is None or core.role != types.LEADER or core.transfer_target:
            return None
        kind, data = 1, b""
        if members is not None:
            reason = core.changes.refusal_of(members)
            if reason is not None:
                return None
            kind, data = ENTRY_MEMBERSHIP, bytes(48) + members.encode()
        item = Item(self.logs[node].last_index + 1, core.term, kind, data)
        core.append_own(item)
        self.work(node)
        return item

    def deliver(self, a: int, b: int) -> bool:
        queue = self.links.get((a, b))
        if not queue:
            return False
        what = queue.popleft()
        core = self.cores[b]
        if what[0] == "message":
            core.on_message(a, what[1])
            if core.role == types.LEADER and core.progress.get(a) is not None:
                peer = core.progress[a]
                if peer.may_send() and not peer.waiting:
                    self.send_append(core, peer, probe=True)
        elif what[0] == "append":
            if not core.lost_state and not core.on_append(a, *what[1:]):
                reject = (core.term, core.reject_hint, what[2], core.quarantined)
                self.send(b, a, ("reply", *reject))
        elif what[0] == "reply":
            core.on_append_reply(a, *what[1:])
        elif not core.on_commit(a, *what[1:]):
            self.send(b, a, ("reply", core.term, 0, 1, False))
        self.drain(b)
        return True

    def flush(self, node: int, count: int = 1000) -> None:
        if node in self.cores:
            self.logs[node].flush(count, self.cores[node])
            self.drain(node)

    def fire(self, node: int) -> None:
        self.timers.discard(node)
        self.cores[node].elections.on_timer()
        self.drain(node)

    def retry(self) -> None:
        """The shell's answer to appends that stay unanswered."""
        for core in self.cores.values():
            if core.role == types.LEADER:
                for peer in core.peers:
                    if peer.connected and peer.state != types.SNAPSHOT:
                        self.send_append(core, peer, probe=True)

    def settle(self) -> None:
        """Everything under way arrives and is written; no timer runs out."""
        busy = True
        while busy:
            busy = False
            for node in sorted(self.cores):
                if self.logs[node].waiting:
                    self.flush(node)
                    busy = True
            for a, b in sorted(self.links):
                while self.deliver(a, b):
                    busy = True

    def elect(self, node: int) -> RaftCore:
        """Makes that node the leader by its timer, all else being quiet."""
        self.settle()
        core = self.cores[node]
        for _ in range(3):
            # The first try may only teach it the current term.
            if core.role != types.LEADER:
                self.fire(node)
                self.settle()
        assert core.role == types.LEADER
        return core

    def spread_commit(self) -> None:
        for node, core in list(self.cores.items()):
            if core.role == types.LEADER:
                for peer in core.peers:
                    self.send(node, peer.node, ("commit", core.term, core.commit_index))
        self.settle()

    def check(self, node: int) -> None:
        """The five properties of figure 3 of the Raft paper, as far as they show here."""
        core = self.cores[node]
        core.check_invariants()
        log = self.logs[node]
        upto = core.commit_index
        for item in log.items[len(self.committed) : upto]:
            self.committed.append(item)
        shared = min(upto, len(self.committed))
        assert log.items[:shared] == self.committed[:shared], "a committed entry differs"
        if core.role == types.LEADER:
            known = [item for item in self.committed if item.term < core.term]
            assert log.items[: len(known)] == known, "a leader lacks a committed entry"

    @property
    def leader(self) -> RaftCore | None:
        found = [core for core in self.cores.values() if core.role == types.LEADER]
        return max(found, key=lambda core: core.term, default=None)


def _members(item: Item) -> Membership:
    from convoymq.replication.raft.membership import decode_membership

    return decode_membership(item.data[48:])
