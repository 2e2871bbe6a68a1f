"""The replicated tree as rings need it: one copy, which a node reads and writes, late, while it
reaches a majority of the nodes. Proposals and answers may be lost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from random import Random

from convoymq.metadata.commands import ChangeView, DeclareQueue, PutVhost
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.records import QueueRecord
from convoymq.model.errors import PreconditionFailed, Unavailable
from convoymq.replication.ring.views import RingView, check_view
from convoymq.routing.types import QueueType
from convoymq.shells.ring.shell import Answer
from convoymq.sim.clock import Process
from convoymq.sim.hosted.node import HostedNode
from convoymq.sim.world import World

RECORD_US_MAX = (20_000, 200_000, 1_000_000)
"""Longest way of a proposal into the tree, of its answer, and of a record to a node."""
LOST = 0.1
"""Share of proposals, and of answers, that are lost."""
RETRY_US = 100_000


class LateWorld(World):
    """A cluster whose nodes hear late of its tree."""

    record_us_max: int
    """One of `RECORD_US_MAX`."""

    def has_majority(self, node: int) -> bool:
        """Returns whether a node reaches more than half of all."""
        members, network = self.voters(), self.network
        reached = [
            peer
            for peer in members
            if peer == node
            or (
                network.is_connected(node, peer)
                and not network.is_cut(node, peer)
                and not network.is_cut(peer, node)
            )
        ]
        return 2 * len(reached) > len(members)

    def voters(self) -> Collection[int]:
        """Returns the nodes of the cluster."""
        return self.nodes

    def _later(
        self, process: Process | None, call: Callable[..., object], *arguments: object
    ) -> None:
        delay_us = self.scheduler.between(100, self.record_us_max)
        self.scheduler.after(delay_us, process, call, *arguments)


class TreeWorld(LateWorld):
    """A cluster whose nodes follow a tree."""

    nodes: dict[int, HostedNode]

    def _make_tree(self, draw: Random) -> None:
        self.record_us_max = draw.choice(RECORD_US_MAX)
        self.tree = MetadataMachine()
        self.tree.set_version(MetadataMachine.VERSION)
        self.tree.carry_out(PutVhost(name="/"), 0)

    def _declare(self, name: str, home: int, *, durable: bool = True) -> QueueRecord:
        command = DeclareQueue(
            vhost="/", name=name, members=(home,), type=QueueType.CLASSIC.value, durable=durable
        )
        self.tree.carry_out(command, 0)
        return self.tree.vhosts["/"].queues[name]

    @abstractmethod
    def on_recorded(self, group: int, view: RingView) -> None:
        """The tree has the next view of a queue."""

    def on_opened(self, node: HostedNode) -> None:
        """A node runs: it hears what the tree has."""
        for group in self.tree.queue_index.by_group:
            self.scheduler.after(0, node.process, self.tell, node, group)

    def propose(self, node: HostedNode, command: ChangeView, answer: Answer) -> None:
        """A node's proposal is on its way."""
        try:
            check_view(command.view)
        except ValueError as error:
            answer(None, PreconditionFailed(str(error)))
            return
        self._later(None, self._record, node, node.process, command, answer)

    def _record(
        self, node: HostedNode, process: Process, command: ChangeView, answer: Answer
    ) -> None:
        if process.alive and not self.has_majority(node.number):
            self.scheduler.after(RETRY_US, None, self._record, node, process, command, answer)
            return
        # Of a process that is gone the command may have left the node.
        if self.scheduler.chance(LOST if process.alive else 0.5):
            self._later(process, answer, None, Unavailable("no answer in time"))
            return
        recorded = self.tree.carry_out(command, 0)
        if recorded:
            self.trace.add("tree", f"{command.name} {command.view}")
            self.on_recorded(command.group, command.view)
            for each in self.nodes.values():
                self._later(each.process, self.tell, each, command.group)
        if self.scheduler.chance(LOST):
            self._later(process, answer, None, Unavailable("no answer in time"))
        else:
            self._later(process, answer, recorded, None)

    def tell(self, node: HostedNode, group: int) -> None:
        """A node applies what the tree has of a queue now."""
        if not self.has_majority(node.number):
            self.scheduler.after(RETRY_US, node.process, self.tell, node, group)
            return
        node.take_record(self.tree.queue_index.by_group[group])
        self.poll(node)

    def read_tree(self, node: HostedNode, answer: Answer) -> None:
        """A node reads the tree through its log."""
        self._later(node.process, self._read, node, answer)

    def _read(self, node: HostedNode, answer: Answer) -> None:
        if not self.has_majority(node.number):
            self.scheduler.after(RETRY_US, node.process, self._read, node, answer)
            return
        for group in list(self.tree.queue_index.by_group):
            self.tell(node, group)
        answer(True, None)
