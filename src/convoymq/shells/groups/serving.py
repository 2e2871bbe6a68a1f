# cython: annotation_typing=False
"""Serving of this node's clients: by the leader, as soon as this replica follows it closely.

A replica that is behind for long, or has no log, lets the leader serve them meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.replication.raft.types import LEADER

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica

LEADER_IS = 32
"""Kind of a RAFT message outside the core: (kind, term, leader or 0). Term 0 asks."""
BEHIND = 33
"""Kind of a RAFT message outside the core: (kind, term, 1 = this replica is so far behind that the
leader should serve its clients, 0 = not any more). From a leader: the same of the replica that it
is sent to."""


class Serving:
    """Leader that serves the node, as one replica knows it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.group = replica.group
        #: (leader, term) whose first entry is applied here, and that clients know.
        self.established = (0, 0)
        #: (leader, term) that clients here are served by although this replica is behind.
        self.serving = (0, 0)
        #: Since when it has not caught up with a new leader, ms; -1 = it is not looked at.
        self.follows_since = -1
        #: Follower: until when it lags, as the leader said last, ms.
        self.lags_until = 0
        #: Without a log: how often it asked for the leader, and whether commands wait for one.
        self._asked = 0
        self.wanted = False

    def is_told(self) -> bool:
        """Returns whether clients here know the present leader."""
        present = (self.core.leader, self.core.term)
        return present in (self.established, self.serving)

    def leader_of_clients(self) -> tuple[int, int]:
        """Returns (leader, term) as clients here know them; (0, 0) = they know none."""
        core = self.core
        if not core.leader:
            return self.serving
        if self.is_told():
            return (core.leader, core.term)
        return (0, 0)

    def is_cut_off(self) -> bool:
        """Has it no log, and hears of no leader before it was taken in anew or wiped?"""
        replica = self.replica
        return self.core.lost_state or replica.faulty != ""

    def _ask_leader(self, now: int) -> bool:
        """Asks the others in turn who leads, as a node without a replica does; True while it is
        to be looked after."""
        replica = self.replica
        host = self.host
        if self.serving[0]:
            return True
        if self.follows_since < 0:
            self.follows_since = now
        if now - self.follows_since >= host.config.lag_ms:
            self.follows_since = now
            near = sorted((self.core.members.nodes - {host.node}) & host.reachable)
            if near:
                self._asked += 1
                node = near[self._asked % len(near)]
                replica.send_raft(node, (LEADER_IS, 0, int(self.wanted)))
        return True

    def on_leader_is(self, sender: int, message: Sequence[int]) -> None:
        """Hears who leads, from a node that was asked or that does not lead any more."""
        replica = self.replica
        core = self.core
        if core.leader or not self.is_cut_off() or len(message) != 3:
            return
        _, term, leader = message
        if not leader:
            if sender == self.serving[0]:
                self.lose_leader()
            return
        if term < self.serving[1] or (leader, term) == self.serving:
            return
        if leader == self.host.node or leader not in self.host.reachable:
            # Whoever said so has not noticed yet.
            return
        self.serving = (leader, term)
        self.wanted = False
        replica.send_raft(leader, (BEHIND, term, 1))
        replica.sink.on_leader(self.group, leader, term)

    def lose_leader(self) -> None:
        """The leader that served the clients here does not lead any more."""
        replica = self.replica
        self.serving = (0, 0)
        self.follows_since = -1
        self.host.active.add(self.group)
        replica.sink.on_leader(self.group, None, self.core.term)

    def watch(self, now: int) -> bool:
        """Follower: has the leader serve the clients here when catching up takes long; False when
        there is nothing to watch."""
        replica = self.replica
        core = self.core
        leader = core.leader
        if not leader and self.is_cut_off():
            return self._ask_leader(now)
        if not leader or self.is_told():
            return False
        if self.follows_since < 0:
            self.follows_since = now
        if now - self.follows_since >= self.host.config.lag_ms and leader in core.connected:
            self.serving = (leader, core.term)
            replica.send_raft(leader, (BEHIND, core.term, 1))
            replica.sink.on_leader(self.group, leader, core.term)
            return False
        return True

    def establish(self) -> None:
        """All that is older than the term is applied: the leader may be told about and served."""
        replica = self.replica
        core = self.core
        if not core.leader or self.established == (core.leader, core.term):
            return
        assert core.term >= self.established[1], "a leader of an older term"
        self.established = (core.leader, core.term)
        if self.serving[0]:
            # Clients here know the leader.
            self.serving = (0, 0)
            replica.send_raft(core.leader, (BEHIND, core.term, 0))
            return
        if core.role == LEADER:
            self.greet()
        if core.leader in core.connected or core.leader == self.host.node:
            replica.sink.on_leader(self.group, core.leader, core.term)

    def greet(self) -> None:
        """A new leader tells session nodes without a replica, and looks after sessions' nodes."""
        replica = self.replica
        core = self.core
        for node in sorted(replica.machine.session_nodes()):
            if node not in core.members.nodes:
                replica.send_raft(node, (LEADER_IS, core.term, self.host.node))
            replica.propose_state_of(node)
        if replica.machine.next_due_ms() is not None:
            # The machine says its due times again.
            replica.propose(batch.CMD_TICK)
        self.host.active.add(self.group)
        replica.versions.propose()
