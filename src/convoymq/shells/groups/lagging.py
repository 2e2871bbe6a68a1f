# cython: annotation_typing=False
"""A leader's view of replicas that are behind: it serves the clients of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq.replication.raft.types import LEADER
from convoymq.shells.groups.serving import BEHIND

if TYPE_CHECKING:
    from convoymq.replication.raft.progress import Progress
    from convoymq.shells.groups.replica import Replica

LAG_TOLD_EVERY = 4
LAG_BELIEVED_FOR = 10
"""In `lag_ms`: how often a leader says that a replica lags, and for how long that believes it."""


class LaggingReplicas:
    """Replicas of one group that are behind."""

    __slots__ = ("behind_nodes", "core", "host", "lagging_nodes", "replica", "sending_for")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        #: Nodes whose replica says that it is behind.
        self.behind_nodes: set[int] = set()
        #: Nodes whose log has been behind for long.
        self.lagging_nodes: set[int] = set()
        #: Nodes with sessions for which this leader sends, their replica being away or behind.
        self.sending_for: set[int] = set()

    def on_behind(self, sender: int, message: Sequence[int]) -> None:
        """Leader: takes over for a node whose replica is behind, or leaves it to that again.
        Follower: hears of the leader that it lags, or does not any more."""
        replica = self.replica
        core = self.core
        if sender == core.leader and message[1] == core.term and len(message) == 3:
            for_ms = LAG_BELIEVED_FOR * self.host.config.lag_ms
            replica.serving.lags_until = (
                self.host.clock.monotonic_ms() + for_ms if message[2] else 0
            )
            return
        if core.role != LEADER or message[1] != core.term or len(message) != 3:
            return
        if not message[2]:
            self.behind_nodes.discard(sender)
        elif sender in core.members.nodes:
            self.behind_nodes.add(sender)
            if sender in replica.machine.session_nodes():
                self.resend_for(sender)

    def watch_log_of(self, peer: Progress, now: int) -> None:
        """Leader: does the follower have by now what was committed a while ago?"""
        replica = self.replica
        if peer.match >= peer.goal:
            peer.goal = self.core.commit_index
            peer.goal_ms = now
            if peer.node in self.lagging_nodes:
                self.lagging_nodes.discard(peer.node)
                replica.send_raft(peer.node, (BEHIND, self.core.term, 0))
        elif now - peer.goal_ms >= self.host.config.lag_ms:
            self.lagging_nodes.add(peer.node)
            if now - peer.lag_told_ms >= LAG_TOLD_EVERY * self.host.config.lag_ms:
                # Its clients know this leader; who reads there should, too.
                peer.lag_told_ms = now
                replica.send_raft(peer.node, (BEHIND, self.core.term, 1))

    def resend_for(self, node: int) -> None:
        """Takes over the sending for a node whose replica does not do it."""
        replica = self.replica
        if self.core.role != LEADER or replica.is_live(node):
            return
        self.sending_for.add(node)
        replica.machine.resend(node)
        if replica.machine.effects:
            replica.applying.carry_out()

    def watch(self) -> bool:
        """Leader: takes over the sending for nodes whose replica fell away; True while it does."""
        replica = self.replica
        for node in replica.machine.session_nodes():
            if replica.is_live(node):
                self.sending_for.discard(node)
            elif node in self.host.reachable and node not in self.sending_for:
                self.resend_for(node)
        return bool(self.sending_for)
