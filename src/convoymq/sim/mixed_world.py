"""Clusters whose nodes run two releases: all end with the later one, not all begin with it.

A seed upgrades either to the present release, from one whose quorum queue has the version before
its own, or from the present release to the next one. The next release is synthetic. The next
version of its quorum queue has one new command (MARK, which leaders propose), one changed rule
(TICK counts as activity of the queue) and one new field of the snapshot (the number of marks).
During the run nodes are upgraded one by one: the process is killed and comes back with the later
release; what is left is upgraded when everything heals.

Checked beyond what every run checks: a replica of the earlier release never meets a version that it
does not support (it would stop, which ends the run), replicas of both releases have equal states at
equal indexes, and in the end the later version is in force everywhere.

Source: ADR 0016.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from convoymq.queues.quorum.machine import COMMAND_TYPES, QuorumMachine
from convoymq.replication.versions import command_table
from convoymq.sim.engine import NotLive
from convoymq.sim.group_node import GroupNode, watch
from convoymq.sim.group_world import GroupWorld
from convoymq.sim.quorum import QuorumLoad
from convoymq.sim.referee import Referee

PRESENT = QuorumMachine.VERSION
NEXT = PRESENT + 1
MARK = 200
FIRST_UPGRADE_US = 200_000
DOWN_US_MAX = 500_000

_KNOWN = [kind for kind in range(256) if COMMAND_TYPES[PRESENT][kind >> 3] >> (kind & 7) & 1]
_TABLES = {**COMMAND_TYPES, NEXT: command_table([*_KNOWN, MARK])}


class FormerMachine(QuorumMachine):
    """The quorum queue's machine of a release that does not know its newest version."""

    VERSION = PRESENT - 1


class NextMachine(QuorumMachine):
    """The quorum queue's machine of the next release."""

    VERSION = NEXT

    def __init__(self, settings: Mapping[str, int]) -> None:
        self.marks = 0
        super().__init__(settings)

    def command_types(self, version: int) -> bytes:
        """See `Machine`."""
        return _TABLES[version]

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == MARK and self.version >= NEXT:
            self.marks += 1
            return
        super()._leader_command(kind, flags, count, arg, data, offset)

    def _tick(self) -> None:
        super()._tick()
        if self.version >= NEXT:
            self.last_active_ms = self.time_ms

    def snapshot(self) -> bytes:
        """Returns the state; with the number of marks in the next version."""
        state = super().snapshot()
        if self.version < NEXT:
            return state
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(state), "marks": self.marks})

    def restore(self, state: bytes) -> None:
        """Replaces the state."""
        self.marks = msgspec.msgpack.decode(state).get("marks", 0)
        super().restore(state)


class MixedNode(GroupNode):
    """A node that runs one of two releases."""

    world: MixedWorld

    def __init__(self, world: GroupWorld, number: int) -> None:
        super().__init__(world, number)
        self.is_upgraded = False

    @property
    def machine_class(self) -> type[QuorumMachine]:
        """Returns the machine of the release that this node runs."""
        return self.world.later if self.is_upgraded else self.world.earlier

    def make_machine(self, settings: Mapping[str, int], group: int) -> QuorumMachine:
        """Returns the machine of the release that this node runs."""
        return watch(self.machine_class, self, group, settings)

    def supports_of(self, peer: int) -> dict[str, tuple[int, int]]:
        """Returns what a running node's HELLO says of its machine versions."""
        machine = self.world.nodes[peer].machine_class
        return {"quorum": (machine.OLDEST_VERSION, machine.VERSION)}

    def _tick_queues(self) -> None:
        super()._tick_queues()
        for replica in self.host.groups.values():
            if replica.is_leader and replica.machine.version >= NEXT:
                replica.propose(MARK)


class MixedWorld(GroupWorld):
    """See the module text."""

    node_class = MixedNode
    nodes: dict[int, MixedNode]
    earlier: type[QuorumMachine] = QuorumMachine
    later: type[QuorumMachine] = NextMachine

    def _make_groups(self) -> None:
        if self.plan.seed % 2:
            self.earlier, self.later = FormerMachine, QuorumMachine
        super()._make_groups()
        for referee in self.referees.values():
            assert isinstance(referee, Referee)
            referee.model.without_effect = frozenset({MARK})
        for node in self.nodes.values():
            # Some clusters begin with a part of the nodes upgraded.
            if self.scheduler.chance(0.25):
                node.is_upgraded = True

    def _start_care(self) -> None:
        super()._start_care()
        self._upgrade_later()

    def _upgrade_later(self) -> None:
        delay_us = self.scheduler.between(FIRST_UPGRADE_US, self.plan.duration_us // 2)
        self.scheduler.after(delay_us, None, self._upgrade_some)

    def _upgrade_some(self) -> None:
        waiting = [n for n in self.nodes.values() if n.alive and not n.is_upgraded]
        if waiting and not self.quiet:
            self._upgrade(self.scheduler.rng.choice(waiting))
            self._upgrade_later()

    def _upgrade(self, node: MixedNode) -> None:
        self.trace.fault("upgrade", node.name)
        node.is_upgraded = True
        self.crash(node, restart_us=self.scheduler.skewed(1_000, DOWN_US_MAX), keep=1.0)

    def _heal(self) -> None:
        super()._heal()
        for node in self.nodes.values():
            if not node.is_upgraded:
                if node.alive:
                    self._upgrade(node)
                node.is_upgraded = True

    def _final_checks(self) -> None:
        super()._final_checks()
        for group, place in self.places.items():
            for number in sorted(place.members):
                machine = self.nodes[number].host.groups[group].machine
                if machine.version != self.later.VERSION:
                    raise NotLive(f"group {group} on node {number} has version {machine.version}")

    def _unfinished(self) -> list[str]:
        waiting = super()._unfinished()
        for number, node in self.nodes.items():
            for group, replica in node.host.groups.items() if node.alive else ():
                if replica.machine.version != self.later.VERSION:
                    waiting.append(f"group {group} has an older version on node {number}")
        return waiting


class MixedLoad(QuorumLoad):
    """Quorum queues on nodes of two releases."""

    text = "quorum queues on nodes of two releases, which are upgraded on the way"
    world_class = MixedWorld
