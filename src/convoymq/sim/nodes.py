"""A simulated node, whatever it runs: its disk, its clock's error and its incarnation outlive its
processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.queues.interface import Queue
from convoymq.sim.clock import NodeClock, Process
from convoymq.sim.disk import SimDisk
from convoymq.sim.network import NodeTransport, Receiver
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.sim.world import World

FIRST_INCARNATION = 30_000_000


class SimNode(ABC):
    """One node of a world."""

    queues: Mapping[int, Queue]
    """Handles by group."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"node{number}"
        self.disk = SimDisk()
        self.disk.owner = number
        self.slow = [0]
        self.process = Process(self.name)
        self.process.alive = False
        self.incarnation = FIRST_INCARNATION
        self.wall_offset_ms = 0
        self._sessions = 0
        self._round_due = False

    @property
    def alive(self) -> bool:
        """Returns whether it runs."""
        return self.process.alive

    def start(self) -> None:
        """Starts, or starts again: recovers and joins. A crash may come in the middle."""
        world = self.world
        self._begin_incarnation()
        self.process = Process(self.name, self.wall_offset_ms)
        world.trace.add(self.name, f"start {self.incarnation}")
        self.clock = NodeClock(world.scheduler, self.process)
        self._sessions = 0
        self._round_due = False
        self.disk.refused = False
        receiver = self._open()
        world.network.start(self.number, receiver)
        self.wake()

    def _begin_incarnation(self) -> None:
        self.incarnation += 1

    @abstractmethod
    def _open(self) -> Receiver:
        """Opens what the node has on its disk; returns what the network tells."""

    def _make_transport(self) -> Transport:
        return NodeTransport(self.world.network, self.number, self.process)

    def new_session(self) -> int:
        """Numbers a session of this node."""
        self._sessions += 1
        return self.number << 56 | self.incarnation << 24 | self._sessions

    def may_link(self, peer: Receiver) -> bool:
        """Returns whether HELLO with another running node ends well."""
        return True

    # Rounds.

    def wake(self) -> None:
        """Schedules the end of a round, because there is something to do. As in production what
        runs here says so, and not every input is something to do."""
        if not self._round_due:
            self._round_due = True
            delay_us = self.world.scheduler.between(0, self.world.plan.round_us_max)
            self.world.scheduler.after(delay_us, self.process, self._end_round)

    def _end_round(self) -> None:
        self._round_due = False
        self.end_of_round()
        self.world.poll(self)

    @abstractmethod
    def end_of_round(self) -> None:
        """Does what gathered in this round."""
