"""Clusters whose machines have two nodes each: what a machine's end takes with it.

A cluster as in `cluster_world`, whose processes 1 found it and whose processes 2 join. Faults are
those of nodes, and of machines: all processes lose their power at one moment, with torn files, or
are cut off from the other machines together.

Checked beyond what every cluster checks: a declaration puts no two replicas into one zone while a
majority of the zones runs. A move of a replica that was begun ends, and leaves no second member on
the machine. The metadata group never has more voters than it should; a node that
gets a vote is the first voter of its zone; in the end every zone has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import ClassVar

from convoymq.broker.replica_moves import Step, is_complete, next_step
from convoymq.kernels.entries import ENTRY_MEMBERSHIP, HEADER_SIZE, Entry
from convoymq.metadata.commands import Command, DeclareQueue
from convoymq.metadata.members import OwnPlace
from convoymq.metadata.voters import takes_learners
from convoymq.model.machines import node_number
from convoymq.replication.raft.membership import NEVER, Membership, decode_membership
from convoymq.shells.groups.replica import Replica
from convoymq.sim.cluster_checker import ClusterChecker
from convoymq.sim.cluster_node import ClusterNode
from convoymq.sim.cluster_world import ClusterInjector, ClusterLoad, ClusterWorld
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import Plan, Variation
from convoymq.sim.group_node import GroupNode
from convoymq.storage.log import GroupLog

MACHINES = 3
PROCESSES = 2
KINDS = ("machine_crash", "machine_cut", "replica_move")
PLACED_BY_HAND = {"membership", "forget", "newcomer", "foreign_node", "lost_majority"}
"""Faults that change members by other rules, or the set of nodes."""


class VotersChecker(ClusterChecker):
    """Watches a group, and what each leader makes of its voters."""

    def __init__(self, world: MachineWorld, group: int, hash_every: int) -> None:
        super().__init__(group, world.referees[group], hash_every, world.trace)
        self._world = world

    def on_append(self, node: int, log: GroupLog, entry: Entry) -> None:
        if entry.kind == ENTRY_MEMBERSHIP and (entry.index, entry.term) not in self.memberships:
            members = decode_membership(entry.data[HEADER_SIZE:])
            self._world.check_voters(node, self.group, members)
        super().on_append(node, log, entry)


class MachineInjector(ClusterInjector):
    """Injects faults into a `MachineWorld`."""

    world: MachineWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {
            **super().moments(),
            "machine_crash": self._machine_crash,
            "machine_cut": self._machine_cut,
            "replica_move": self.world.move_replica,
        }

    def _machine(self) -> list[ClusterNode]:
        machine = self.world.scheduler.between(1, MACHINES)
        return [self.world.nodes[node_number(machine, k)] for k in range(1, PROCESSES + 1)]

    def _machine_crash(self) -> None:
        """A machine loses its power: all its WALs are torn at one moment."""
        nodes = self._machine()
        restart_us = self._outage_us()
        keep = self.world.scheduler.rng.choice((0.0, 0.1, 0.5, 0.9))
        self.world.trace.fault("machine_crash", nodes[0].name)
        for node in nodes:
            if node.alive:
                self.world.crash(node, restart_us=restart_us, keep=keep)

    def _machine_cut(self) -> None:
        here = [node.number for node in self._machine()]
        others = [number for number in sorted(self.world.nodes) if number not in here]
        pairs = [pair for a in here for b in others for pair in ((a, b), (b, a))]
        self._cut("machine_cut", pairs)


class MachineWorld(ClusterWorld):
    """See the module text."""

    injector_class = MachineInjector
    metadata_voters = 5
    _elected = False

    def _make_groups(self) -> None:
        super()._make_groups()
        self._sizes_rng = self.own_rng(0x51E)
        for process in range(2, PROCESSES + 1):
            for machine in self.founders:
                number = node_number(machine, process)
                self.nodes[number] = ClusterNode(self, number, self.founders)
        for machine in self.founders:
            for process in range(1, PROCESSES + 1):
                place = OwnPlace(f"machine{machine}", machine, process)
                self.nodes[node_number(machine, process)].place = place

    def _submit(
        self, node: ClusterNode, command: Command, then: Callable[[object], None] | None = None
    ) -> None:
        places = node.tree.places()
        if isinstance(command, DeclareQueue) and all(
            number in places and places[number].zone for number in self.nodes
        ):
            self._check_spread(command.members, node.running_nodes())
        super()._submit(node, command, then)

    def _check_spread(self, members: Sequence[int], running: Sequence[int]) -> None:
        running_zones = {self.nodes[number].place.zone for number in running}
        if 2 * len(running_zones) > MACHINES and self._crowded(members):
            raise InvariantBroken(f"replicas {members} share a zone, running are {running}")

    def _crowded(self, members: Collection[int]) -> bool:
        zones = Counter(self.nodes[number].place.zone for number in members)
        return max(zones.values()) > 1

    def _make_checker(self, group: int) -> ClusterChecker:
        return VotersChecker(self, group, self.plan.hash_every)

    def may_lose(self, number: int) -> bool:
        """Returns whether a node may lose its copies. While a vote goes from one node to another, a
        group of three has two voters, which bear no loss."""
        leaders = [self.leader_of(group) for group in (0, *self.groups)]
        voters = [len(found[1].core.members.voters) if found else 0 for found in leaders]
        return min(voters) >= MACHINES and super().may_lose(number)

    def move_replica(self) -> None:
        """Has the leader of a queue take the next step of a move between processes of a machine
        (`broker.replica_moves`), or begin one."""
        rng = self.scheduler.rng
        leading = self.leader_of(rng.choice(sorted(self.groups))) if self.groups else None
        if leading is None:
            return
        node, replica = leading
        members, group = replica.core.members, replica.group
        if members.stand_in is not None:
            self._move_on(node, replica)
            return
        source = rng.choice(sorted(members.voters))
        place = self.nodes[source].place
        target = node_number(place.machine, PROCESSES + 1 - place.process)
        if source == node.number and len(members.voters) > 1:
            return
        if target not in members.nodes and node.host.stand_in(group, target, source):
            self.trace.fault("replica_move", "world", f"group {group}: {source} to {target}")

    def _move_on(self, node: GroupNode, replica: Replica) -> None:
        """Has the leader of a queue take the next step of a move that was begun."""
        members, group = replica.core.members, replica.group
        assert members.stand_in is not None
        target, source = members.stand_in
        done = False
        step = next_step(members, complete=is_complete(replica, target))
        if step is Step.GIVE_VOTE:
            done = replica.changes.succeed(target, source)
        elif step is Step.REMOVE and source == node.number:
            done = node.host.transfer_leadership(group)
        elif step is Step.REMOVE:
            done = node.host.replace_member(group, source, 0 if members.leaving else target)
        if done:
            self.trace.fault("replica_move", "world", f"group {group}: {source}, {step.name}")

    def _more_arguments(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Returns the arguments that give each fourth queue one member."""
        single = self._sizes_rng.random() < 0.25 and arguments["x-queue-type"] == "quorum"
        return {"x-quorum-initial-group-size": 1} if single else {}

    def check_voters(self, leader: int, group: int, members: Membership) -> None:
        """Raises InvariantBroken when a leader has two nodes of a zone vote in a queue, which was
        not so before, or voters of the metadata that should not be."""
        if not group:
            self._check_seats(leader, members)
            return
        former = self.nodes[leader].host.groups[group].core.members.voters
        if self._crowded(members.voters) and not self._crowded(former) and not members.leaving:
            raise InvariantBroken(f"voters of group {group} share a zone: {members}")

    def _check_seats(self, leader: int, members: Membership) -> None:
        """Raises InvariantBroken when a leader has too many vote on the metadata, or two of one
        zone, after the number was right once."""
        coming = {each.node for each in members.learners if each.promote_at != NEVER}
        seats = members.voters | coming
        is_right = len(seats) <= MACHINES and not self._crowded(seats)
        if self._elected and not is_right:
            raise InvariantBroken(f"voters of the metadata are {sorted(seats)}: {members}")
        # Nodes that join before the version that knows zones get a vote.
        self._elected = is_right and takes_learners(self.nodes[leader].tree)

    def _unsettled(self, group: int) -> list[str]:
        moving = self.leader_of(group)
        if moving is not None and moving[1].core.members.stand_in is not None:
            self._move_on(*moving)
            return [f"a replica of group {group} moves: {moving[1].core.members}"]
        found = super()._unsettled(group)
        leading = self.leader_of(0)
        if not group and leading is not None:
            voters = leading[1].core.members.voters
            if len(voters) != MACHINES:
                found.append(f"voters of the metadata are {sorted(voters)}")
        return found


class MachineLoad(ClusterLoad):
    """Queues of a cluster of machines."""

    text = "three machines of two nodes each, which fail together"
    kinds: ClassVar[tuple[str, ...]] = (
        tuple(k for k in ClusterLoad.kinds if k not in PLACED_BY_HAND) + KINDS
    )
    world: MachineWorld
    world_class = MachineWorld

    def make_plan(self, seed: int, faults: object) -> Plan:
        """See `PlannedLoad`."""
        return replace(super().make_plan(seed, faults), nodes=MACHINES)  # type: ignore[arg-type]

    def vary(self, seed: int, share: float) -> Variation:
        found = super().vary(seed, share)
        more = Random(seed ^ 0x3AC)
        kinds = {kind for kind in KINDS if more.random() < 2 * share}
        return replace(found, kinds=(found.kinds & frozenset(self.kinds)) | kinds)
