"""A cluster of Raft groups that the world itself places: who is a member, and what watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

import msgspec

from convoymq.kernels import batch, link_frames
from convoymq.kernels.entries import Entry
from convoymq.model.errors import InvariantViolated
from convoymq.queues.driver import GroupOptions
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.group_queue import GroupQueue
from convoymq.replication.machine import Effect
from convoymq.replication.raft.types import VOTE, VOTE_REPLY
from convoymq.shells.groups.replica import Replica
from convoymq.sim.clients import ChannelReferee
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import KINDS, Plan, PlannedLoad
from convoymq.sim.group_faults import GroupInjector
from convoymq.sim.group_node import FIRST_INCARNATION, GroupNode
from convoymq.sim.invariants import GroupChecker
from convoymq.sim.nodes import SimNode
from convoymq.sim.referee import GroupReferee, IndexedMachine, Referee
from convoymq.sim.relays import RelayBook
from convoymq.sim.world import ChannelKind, World

COMMANDS = {
    getattr(batch, name): name[4:].lower() for name in dir(batch) if name.startswith("CMD_")
}


@dataclass(slots=True)
class GroupPlace:
    """Places of a group's replicas, as the metadata would have them."""

    members: set[int]
    """Nodes that are to have a replica."""
    began: dict[int, tuple[frozenset[int], bool]]
    """Node -> (members that its replica began with, whether it joined a group that existed)."""
    hint: int
    settings: dict[str, int]
    founder: tuple[int, int] = (0, 0)
    """Member that leads the first term without an election; (0, 0) = nobody."""
    leaving: set[int] = field(default_factory=set)
    """Nodes that have a replica until their removal is committed."""

    def has_replica(self, node: int) -> bool:
        """Returns True until the removal of the node is committed."""
        return node in self.members or node in self.leaving


class GroupLoad(PlannedLoad):
    """A load whose groups the world places; a subclass says what a group is."""

    kinds: ClassVar[tuple[str, ...]] = KINDS
    machine_class: Callable[[Mapping[str, int]], IndexedMachine]
    """Makes the machine of a replica from a group's settings."""
    world: GroupWorld

    # A group.

    def begin(self, world: GroupWorld) -> None:
        """Begins, before there is a node or group."""
        self.world = world

    def make_referee(self, group: int, settings: dict[str, int]) -> GroupReferee:
        """Returns the referee of a group; may change the group's settings."""
        raise NotImplementedError("the world makes groups itself")

    def make_queue(self, node: GroupNode, parts: GroupOptions) -> GroupQueue:
        """Returns the handle of a group on a node."""
        raise NotImplementedError("groups of this load have no handles")

    def channel_kind(self, group: int) -> ChannelKind:
        """Returns what makes a channel into a group."""
        raise NotImplementedError("groups of this load have no channels")

    def configure(self, group: int, queue: GroupQueue) -> None:
        """Gives a handle the policy of its group, where there is one."""

    def start(self) -> None:
        """Starts what acts on the groups, once all nodes run."""

    def unfinished(self) -> list[str]:
        """Returns what has not come to its end, beyond what every load waits for."""
        return []


class GroupWorld(World):
    """A cluster of groups under test."""

    injector_class = GroupInjector
    node_class: type[GroupNode] = GroupNode
    nodes: Mapping[int, GroupNode]
    checkers: Mapping[int, GroupChecker]

    load: GroupLoad

    def __init__(
        self, plan: Plan, load: PlannedLoad, sink: Callable[[str], None] | None = None
    ) -> None:
        self.places: dict[int, GroupPlace] = {}
        """Places of the groups that the world itself places."""
        self.referees: dict[int, GroupReferee] = {}
        super().__init__(plan, load, sink)

    def _make_world(self) -> None:
        self.network.on_frame_sent = self._on_frame_sent
        self.relay_book = RelayBook(self) if self.plan.network.relays else None
        self.load.begin(self)
        self._make_groups()

    def _make_groups(self) -> None:
        plan = self.plan
        self.nodes = {n: self.node_class(self, n) for n in range(1, plan.nodes + 1)}
        rng = self.scheduler.rng
        checkers: dict[int, GroupChecker] = {}
        self.checkers = checkers
        for group in range(1, plan.groups + 1):
            size = plan.nodes if plan.nodes == 3 or rng.random() < 0.5 else 3
            members = set(rng.sample(sorted(self.nodes), size))
            settings = dict(plan.settings)
            began = dict.fromkeys(sorted(members), (frozenset(members), False))
            hint = rng.choice(sorted(members))
            # Some groups begin with an election, as the tree's does.
            founder = (hint, FIRST_INCARNATION) if group % 4 else (0, 0)
            self.places[group] = GroupPlace(members, began, hint, settings, founder)
            self.referees[group] = self.load.make_referee(group, settings)
            checkers[group] = GroupChecker(group, self.referees[group], plan.hash_every, self.trace)
            self.checkers[group].founder = founder[0]
        self.trace.add("world", f"nodes {plan.nodes} faults {' '.join(sorted(plan.faults))}")
        for group, place in self.places.items():
            self.trace.add("world", f"group {group} on {sorted(place.members)} {place.settings}")

    def _start_care(self) -> None:
        super()._start_care()
        self.scheduler.after(0, None, self._administrate)
        self.load.start()

    def groups_of(self, node: SimNode) -> Iterable[int]:
        return self.places

    def channel_kind(self, group: int) -> ChannelKind:
        return self.load.channel_kind(group)

    def referee_of(self, group: int) -> ChannelReferee:
        return cast(ChannelReferee, self.referees[group])

    def _on_wiped(self, node: SimNode) -> None:
        assert isinstance(node, GroupNode)
        node.wiped = {g for g, place in self.places.items() if place.has_replica(node.number)}
        for checker in self.checkers.values():
            checker.on_wiped(node.number)

    def replicas_of(self, group: int) -> list[tuple[GroupNode, Replica]]:
        """Returns the replicas of a group on nodes that run, where they can be read."""
        return [
            (node, node.host.groups[group])
            for node in self.nodes.values()
            if node.alive and group in node.host.groups and not node.host.groups[group].faulty
        ]

    # What nodes report.

    def poll(self, node: SimNode) -> None:
        """After a node did something: looks at its replicas."""
        super().poll(node)
        assert isinstance(node, GroupNode)
        for group, replica in node.host.stopped.items():
            raise InvariantBroken(f"group {group} stops on {node.name}: {replica.stopped}")
        for group, replica in node.host.groups.items():
            self.checkers[group].on_poll(node.number, replica)

    def on_applied(
        self,
        node: GroupNode,
        group: int,
        machine: IndexedMachine,
        data: bytes,
        effects: list[Effect],
    ) -> None:
        """A replica applied an entry of commands."""
        try:
            self._on_applied(node, group, machine, data, effects)
        except (Exception, InvariantViolated) as error:
            # The replica stops for whatever comes out of an apply: `poll` raises it.
            self.broken = self.broken or error
            raise

    def _on_applied(
        self,
        node: GroupNode,
        group: int,
        machine: IndexedMachine,
        data: bytes,
        effects: list[Effect],
    ) -> None:
        entry = Entry(data)
        checker = self.checkers[group]
        checker.on_apply(node.number, node.host.replica(group), entry.index, entry.term, data)
        checker.on_effects(node.number, entry.index, effects)
        # Only now: what was lost may have been struck from the books a moment ago.
        referee = self.referees[group]
        if entry.index > referee.index:
            self.trace.add(
                node.name, f"group {group} entry {entry.index}: {summary(data)} -> {len(effects)}"
            )
            if isinstance(referee, Referee):
                referee.on_version(entry.index, machine.version)
            self._follow(group, entry.index, data, effects)
            referee.check_machine(machine)
        checker.on_state(node.number, machine, entry.index)

    def _follow(self, group: int, index: int, data: bytes, effects: list[Effect]) -> None:
        """An entry is applied for the first time."""
        self.referees[group].on_entry(index, data, effects)

    def on_restored(self, node: GroupNode, group: int, machine: IndexedMachine) -> None:
        """A replica took its state from a snapshot."""
        try:
            self.checkers[group].on_state(node.number, machine, machine.index, restored=True)
        except (Exception, InvariantViolated) as error:
            self.broken = self.broken or error
            raise

    def _on_frame_sent(self, source: int, target: int, data: bytes) -> None:
        kind = data[4]
        if kind == link_frames.FRAME_APPEND_REPLY:
            _, _, _, group, term, match, rejected, _ = link_frames.frame_header(data)
            if not rejected:
                self.checkers[group].on_acknowledge(source, term, match)
        elif kind == link_frames.FRAME_RAFT:
            group = link_frames.frame_header(data)[3]
            message = msgspec.msgpack.decode(data[link_frames.HEADER_SIZE :])
            if message[0] == VOTE_REPLY and message[2]:
                self.checkers[group].on_vote(source, message[1], target)
            elif message[0] == VOTE:
                self.checkers[group].on_vote(source, message[1], source)

    def group_numbers(self) -> list[int]:
        """Groups whose members may be changed, ascending."""
        return sorted(self.places)

    def leads(self, node: SimNode) -> list[int]:
        """Groups that this node believes to lead."""
        if not node.alive:
            return []
        assert isinstance(node, GroupNode)
        return [g for g, replica in node.host.groups.items() if replica.is_leader]

    # Faults that need to know more.

    def may_lose(self, number: int) -> bool:
        """Returns whether no other node has lost anything that it has not got back."""
        return not any(
            other != number for checker in self.checkers.values() for other in checker.excused
        )

    def excuse(self, number: int) -> None:
        """Allows the disk of a node to lose what was promised."""
        for checker in self.checkers.values():
            checker.excused.add(number)

    def leader_of(self, group: int) -> tuple[GroupNode, Replica] | None:
        """Returns the running node that leads in the highest term, and its replica."""
        found: tuple[GroupNode, Replica] | None = None
        for node in self.nodes.values():
            replica = node.host.groups.get(group) if node.alive else None
            if (
                replica is not None
                and replica.is_leader
                and (found is None or replica.term > found[1].term)
            ):
                found = (node, replica)
        return found

    def change_membership(self, group: int) -> None:
        """Decides to add or remove a member; `_administrate` has it done."""
        place = self.places[group]
        rng = self.scheduler.rng
        outside = [n for n in self.nodes if n not in place.members]
        leading = self.leader_of(group)
        if place.leaving or leading is None:
            return
        least = 1
        if self.plan.faults & {"wipe", "rot", "rot_page", "lose_wal_file"}:
            # A majority must survive the loss of one: never fewer than three voters.
            least = 3
            if set(leading[1].members) != place.members:
                return
        leaves = joins = 0
        if outside and (len(place.members) <= least or self.scheduler.chance(0.5)):
            joins = rng.choice(outside)
        if len(place.members) > least and (not joins or self.scheduler.chance(0.4)):
            leaves = rng.choice(sorted(place.members))
        if not joins and not leaves:
            return
        self.trace.fault("membership", "world", f"group {group}: +{joins} -{leaves}")
        if leaves:
            place.members.discard(leaves)
            place.leaving.add(leaves)
        if joins:
            self._join(group, joins, frozenset(leading[1].members))
        if joins and leaves:
            self.trace.faults["member_replaced"] += 1

    def _join(self, group: int, number: int, members: frozenset[int]) -> None:
        """A node becomes a member: for the first time, or again with the disk that it has."""
        place = self.places[group]
        node = self.nodes[number]
        if number in place.began:
            self.trace.faults["member_returned"] += 1
        place.members.add(number)
        place.began[number] = (members, True)
        self.scheduler.after(
            self.scheduler.skewed(0, 500_000), node.process, self._open_joined, node, group
        )
        self._tell_members(group)

    def _open_joined(self, node: GroupNode, group: int) -> None:
        # It may have left again by now.
        if self.places[group].has_replica(node.number):
            node.open_group(group)

    def _close_left(self, node: GroupNode, group: int) -> None:
        # It may have come back before it was told that it had left.
        if not self.places[group].has_replica(node.number):
            node.close_group(group)

    def _tell_members(self, group: int) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.members_changed(group)

    def _administrate(self) -> None:
        """Does the work of the metadata's owner: asks leaders until groups are where they should
        be."""
        self.scheduler.after(100_000, None, self._administrate)
        for group, place in self.places.items():
            leading = self.leader_of(group)
            if leading is None:
                continue
            node, replica = leading
            present = set(replica.members) | set(replica.learners)
            missing = sorted(place.members - present)
            leaving = sorted(place.leaving & present)
            if missing and leaving and set(replica.members) != set(leaving):
                node.host.replace_member(group, leaving[0], missing[0])
            elif missing:
                node.host.add_member(group, missing[0])
            elif leaving:
                node.host.remove_member(group, leaving[0])
            if replica.core.members_index <= replica.commit_index:
                gone = place.leaving - present
                for number in sorted(gone):
                    place.leaving.discard(number)
                    other = self.nodes[number]
                    delay_us = self.scheduler.skewed(0, 2_000_000)
                    self.scheduler.after(delay_us, other.process, self._close_left, other, group)
                if gone:
                    self._tell_members(group)

    # The end.

    def _unfinished(self) -> list[str]:
        if any(not node.alive for node in self.nodes.values()):
            return super()._unfinished()
        found = self._waiting_channels() + self.load.unfinished()
        for group, referee in self.referees.items():
            place = self.places[group]
            waits = referee.waits_for()
            if waits:
                found.append(waits)
            if place.leaving:
                found.append(f"{place.leaving} did not leave group {group}")
            members = [self.nodes[n].host.groups.get(group) for n in sorted(place.members)]
            replicas = [replica for replica in members if replica is not None]
            if len(replicas) < len(members):
                found.append(f"group {group} is not open everywhere")
                continue
            if any(set(r.members) != place.members for r in replicas):
                found.append(f"voters of {group} are not {sorted(place.members)}")
            states = {(r.last_applied, r.log.last_index) for r in replicas}
            if len(states) > 1:
                found.append(f"replicas of {group} are at {sorted(states)}")
            if sum(r.is_leader for r in replicas) != 1:
                found.append(f"group {group} has no single leader")
            else:
                found += self._left_behind(group, next(r for r in replicas if r.is_leader))
        return found

    def _left_behind(self, group: int, replica: Replica) -> list[str]:
        """Sessions that the queue has and no client."""
        machine = replica.machine
        assert isinstance(machine, GroupMachine)
        return [
            f"session {session:x} in group {group} to end"
            for session in machine.sessions
            if not self.nodes[session >> 56].queues[group].has_session(session)
        ]

    def _final_checks(self) -> None:
        for group, place in self.places.items():
            self._check_equal(group, sorted(place.members))

    def _check_equal(self, group: int, members: Iterable[int]) -> None:
        """The replicas of these nodes are in the same state."""
        hashes = {
            number: self.nodes[number].host.groups[group].machine.state_hash() for number in members
        }
        if len(set(hashes.values())) > 1:
            self.checkers[group].fail(f"states differ at the end: {hashes}")


def summary(data: bytes) -> str:
    """Returns the commands of an entry, in short."""
    parts = []
    for kind, _flags, session, seq, count, arg, _offset, _length in batch.commands(data):
        name = COMMANDS.get(kind, str(kind))
        who = (
            f"{session >> 56}.{session >> 24 & 0xFF}.{session & 0xFFFFFF}#{seq}" if session else ""
        )
        parts.append(f"{name}({who} {count} {arg})")
    return " ".join(parts)
