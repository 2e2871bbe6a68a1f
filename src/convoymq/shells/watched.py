# cython: annotation_typing=False
"""A queue that this node has clients of, but no copy: its commands go to the leader."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Never, Protocol

from convoymq.kernels.batch import CommandBuilder
from convoymq.shells.effect_sink import EffectSink
from convoymq.shells.forwarding import Forwarding


class Shell(Protocol):
    """Runs the queues of a node that are led by one of several members."""

    watched: dict[int, Watched]
    forwarding: Forwarding
    reachable: set[int]
    """Nodes that can be reached."""
    active: set[int]
    """Groups that are to be ticked."""
    now: int

    def ask_leader(self, node: int, group: int, *, wanted: bool) -> None:
        """Asks a member which node leads; `wanted`: commands wait for it."""


class Watched:
    """A group without a copy here."""

    __slots__ = (
        "asked_at", "builder", "group", "host", "late", "leader", "members", "sink", "term", "turn",
        "wanted",
    )  # fmt: skip

    def __init__(
        self, host: Shell, group: int, members: Sequence[int], sink: EffectSink[Never]
    ) -> None:
        self.host = host
        self.group = group
        self.members = tuple(members)
        self.sink = sink
        self.builder: CommandBuilder = CommandBuilder()
        self.leader = 0
        self.term = 0
        self.asked_at = 0
        self.turn = 0
        #: Commands wait for a leader.
        self.wanted = False
        #: Commands for the leader that wait for room: (node, term, frame).
        self.late: deque[tuple[int, int, bytes]] = deque()

    def on_room(self, node: int) -> None:
        """The node takes bulk again."""
        if self.host.watched.get(self.group) is self:
            self.host.forwarding.send_late(self, node, self.leader, self.term)

    def on_lost(self, _node: int) -> None:
        """The node is away."""
        self.late.clear()

    def on_leader_is(self, node: int, term: int, leader: int) -> None:
        """Hears who leads; 0 = the node that says so does not any more."""
        if leader == 0:
            if node == self.leader:
                # It got commands, and does not lead any more.
                self.forget_leader()
            return
        if term < self.term or (leader, term) == (self.leader, self.term):
            return
        self.term = term
        if leader not in self.host.reachable:
            # The one that told may not have noticed yet, and later nobody has to tell.
            self.forget_leader()
            return
        self.leader = leader
        self.wanted = False
        self.sink.on_leader(self.group, leader, term)

    def forget_leader(self) -> None:
        """The leader is not known (any more); the ticks ask for it."""
        self.host.active.add(self.group)
        if self.leader:
            self.leader = 0
            self.sink.on_leader(self.group, None, self.term)

    def ask_leader(self) -> None:
        """Asks the members in turn who leads."""
        host = self.host
        near = [n for n in self.members if n in host.reachable]
        host.active.add(self.group)
        self.asked_at = host.now
        if near:
            self.turn += 1
            node = near[self.turn % len(near)]
            host.ask_leader(node, self.group, wanted=self.wanted)
