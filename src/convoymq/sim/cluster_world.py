"""A simulated cluster whose metadata group is simulated too: nodes found, join, are forgotten and
come back; queues are declared and deleted by name; members follow the tree.

What holds for every group and queue holds here as well (`invariants`, `referee`); beyond it:

- all replicas of the tree are equal by index, and follow the naive model (`metadata_referee`);
- nodes of different clusters never link, and nobody is let in but through the log;
- a group is only ever opened as the queue to which its number was given;
- in the quiet phase every node serves, records are what the groups have committed, and nobody
  keeps data of a queue that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import ClassVar

from convoymq.metadata.commands import Command, DeclareQueue, DeleteQueue, ForgetNode
from convoymq.metadata.formation import Joined
from convoymq.metadata.machine import QueueRecord
from convoymq.metadata.placement import CLIENT_LOCAL
from convoymq.model.compatibility import RELEASES
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table
from convoymq.queues.driver import group_driver_of
from convoymq.replication.machine import Effect
from convoymq.replication.raft.membership import NEVER, Membership
from convoymq.sim.clients import Channel, ClientConfig
from convoymq.sim.clock import Process
from convoymq.sim.cluster_checker import ClusterChecker
from convoymq.sim.cluster_node import ClusterNode
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import KINDS, Variation
from convoymq.sim.group_faults import GroupInjector
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupLoad, GroupWorld
from convoymq.sim.lost_majority import Disaster, Operator
from convoymq.sim.metadata_referee import KnownQueue, MetadataReferee
from convoymq.sim.nodes import SimNode
from convoymq.sim.referee import IndexedMachine, Referee
from convoymq.sim.streams import StreamChannel, StreamReferee
from convoymq.sim.world import ChannelKind
from convoymq.storage.log import GroupLog

NAMES = ("a", "b", "c")
FOREIGN_NODE = 99
NODES_LEFT_MIN = 3
NEWCOMERS_MAX = 2
STREAM_SHARE = 0.2
DECLARE_MS = 2000
GROUP_SIZE = 3
LOSING = {"wipe", "rot", "rot_page", "lose_wal_file", "forget", "lost_majority"}
"""Faults that take copies: groups have three voters then, so that a majority survives the loss."""


Entered = tuple[int, bytes, list[Effect]]
"""Index, bytes and effects of a committed entry."""


CLUSTER = ("forget", "newcomer", "foreign_node", "false_death")
LOSSES = ("lost_majority",)
CHURN_SHARE = 0.15


class ClusterInjector(GroupInjector):
    """Injects faults into a `ClusterWorld`."""

    world: ClusterWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {
            **super().moments(),
            "forget": self.world.forget,
            "newcomer": self.world.bring_newcomer,
            "foreign_node": self.world.bring_foreigner,
            "lost_majority": self.world.lose_majority,
            "false_death": self._false_death,
        }

    def _false_death(self) -> None:
        """Some nodes are told that a node is gone for certain, and it lives."""
        node = self._node()
        if node is not None:
            others = [n for n in sorted(self.world.network.receivers) if n != node.number]
            told = [n for n in others if self.world.scheduler.chance(0.5)]
            self.world.trace.fault("false_death", node.name, f"told to {told}")
            for other in told:
                self.world.network.declare_dead(other, node.number)


class ClusterWorld(GroupWorld):
    """A cluster under test, with its metadata group."""

    injector_class = ClusterInjector
    metadata_voters = 0
    """Nodes that vote in the metadata group; 0: all of them."""
    nodes: dict[int, ClusterNode]
    checkers: dict[int, ClusterChecker]
    """Of groups that are deleted, too."""

    def _make_groups(self) -> None:
        plan = self.plan
        self.checkers = {}
        self.foreign_nodes: dict[int, ClusterNode] = {}
        self.groups: dict[int, KnownQueue] = {}
        """Queues that are not deleted."""
        founders = tuple(range(1, plan.nodes + 1))
        self.nodes = {number: ClusterNode(self, number, founders) for number in founders}
        self.founders = founders
        self._release_rng = self.own_rng(0xC0417)
        self.metadata = MetadataReferee(self._on_created, self._on_deleted, self._members_at)
        self.referees[0] = self.metadata
        self._watch_group(0, founder=0)
        self.served: set[tuple[int, int]] = set()
        """(node, incarnation) of all that have served; sessions are numbered by it."""
        self.lost: set[int] = set()
        """Nodes whose copies are gone, and not rebuilt yet."""
        self.forgetting: set[int] = set()
        """Nodes that are to be forgotten; nobody knows whether it came to that."""
        self.damaged: set[int] = set()
        """Nodes of whose files a bit was flipped."""
        self.disaster: Disaster | None = None
        self.recovered_groups: set[int] = set()
        self.history: dict[int, list[Entered]] = {}
        """Group -> what was committed, where some of it may be lost."""
        self.trace.add("world", f"founders {founders} faults {' '.join(sorted(plan.faults))}")

    def _watch_group(self, group: int, founder: int) -> None:
        checker = self.checkers[group] = self._make_checker(group)
        checker.founder = founder
        checker.on_recovered_alone = self._on_recovered_alone

    def _make_checker(self, group: int) -> ClusterChecker:
        return ClusterChecker(group, self.referees[group], self.plan.hash_every, self.trace)

    def new_id(self) -> str:
        """32 random hex digits."""
        return f"{self.scheduler.rng.getrandbits(128):032x}"

    def group_numbers(self) -> list[int]:
        """Groups whose members may be changed, ascending."""
        return sorted(self.groups)

    # What the log of the tree says.

    def _on_created(self, queue: KnownQueue) -> None:
        group = queue.group
        self.referees[group] = self._new_referee(queue)
        self._watch_group(group, founder=queue.members[0])
        self.groups[group] = queue
        self.trace.add("world", f"queue {queue.name} is group {group} on {queue.members}")

    def _new_referee(self, queue: KnownQueue) -> Referee | StreamReferee:
        kind = queue.arguments.get("x-queue-type")
        assert kind is not None
        if kind.term() == "stream":
            return StreamReferee(queue.group)
        driver = group_driver_of("quorum")
        settings = driver.make_machine(queue.arguments, queue.compatibility).settings
        settings["disconnect_timeout_ms"] = self.plan.settings["disconnect_timeout_ms"]
        return Referee(queue.group, settings, clients=True)

    def _on_deleted(self, queue: KnownQueue) -> None:
        del self.groups[queue.group]
        self.checkers[queue.group].ended = True
        self.trace.add("world", f"queue {queue.name}, group {queue.group}, is deleted")

    def _members_at(self, group: int, config: tuple[int, int]) -> frozenset[int] | None:
        checker = self.checkers[group]
        found: frozenset[int] | None = checker.members_at(
            config, frozenset(self.metadata.by_group[group].members)
        )
        return found

    # What nodes report.

    def poll(self, node: SimNode) -> None:
        """After a node did something: looks at its replicas."""
        if not self._is_foreign(node):
            super().poll(node)

    def on_applied(
        self,
        node: GroupNode,
        group: int,
        machine: IndexedMachine,
        data: bytes,
        effects: list[Effect],
    ) -> None:
        """A replica applied an entry of commands."""
        if not self._is_foreign(node):
            super().on_applied(node, group, machine, data, effects)

    def on_restored(self, node: GroupNode, group: int, machine: IndexedMachine) -> None:
        """A replica took its state from a snapshot."""
        if not self._is_foreign(node):
            super().on_restored(node, group, machine)

    def _on_frame_sent(self, source: int, target: int, data: bytes) -> None:
        if source not in self.foreign_nodes:
            super()._on_frame_sent(source, target, data)

    def _is_foreign(self, node: SimNode) -> bool:
        return node.number in self.foreign_nodes

    def on_linked(self, node: ClusterNode, peer: int, cluster: str) -> None:
        """HELLO went well."""
        clusters = {node.linked_as.cluster, cluster} - {""}
        if len(clusters) > 1 or node.is_foreign != (peer in self.foreign_nodes):
            raise InvariantBroken(f"{node.name} and node {peer} link: {clusters}")

    def node_of(self, number: int) -> ClusterNode:
        """Any node, also of another cluster."""
        found = self.nodes.get(number)
        return found if found is not None else self.foreign_nodes[number]

    def on_open(self, node: ClusterNode, record: QueueRecord) -> None:
        """A node opens its replica of a queue."""
        known = self.metadata.by_group.get(record.group)
        if known is None or known.name != record.name:
            raise InvariantBroken(f"{node.name} opens {record}, but the log says {known}")

    def on_log_removed(self, node: ClusterNode, group: int) -> None:
        """A node deletes its replica."""
        known = self.metadata.by_group.get(group)
        here = known is not None and not known.deleted and node.number in known.members
        # Who is behind follows older records, one after the other.
        if known is not None and here and node.number not in known.out_ever:
            raise InvariantBroken(f"{node.name} deletes its replica of {known}")

    def on_serving(self, node: ClusterNode) -> None:
        """A node takes part as a broker, in an incarnation that was not before."""
        served = (node.number, node.incarnation)
        if served in self.served:
            raise InvariantBroken(
                f"{node.name} is back in incarnation {node.incarnation}, which was"
            )
        self.served.add(served)

    def on_joined(self, node: ClusterNode, joined: Joined) -> None:
        """A node was told that it is let in."""
        if node.is_foreign:
            raise InvariantBroken(f"{node.name} joins")
        directory = node.identity.directory
        if (node.number, directory, joined.incarnation) not in self.metadata.joins:
            raise InvariantBroken(f"{node.name} is let in with {joined}: not by the log")
        if joined.cluster != self.metadata.cluster_id:
            raise InvariantBroken(f"{node.name} joins {joined.cluster}: not this cluster")

    def on_node_failed(self, node: ClusterNode, text: str) -> None:
        """A node refuses to start."""
        if self.recovering and not node.identity.cluster:
            # Some nodes it sees have the new id of the cluster by now, some have not.
            self.trace.add(node.name, f"ends: {text}")
            self.scheduler.after(0, None, self._restart, node, node.process)
            return
        raise InvariantBroken(f"{node.name} refuses to start: {text}")

    def _restart(self, node: ClusterNode, process: Process) -> None:
        if process.alive:
            self.crash(node, restart_us=500_000, keep=1.0, refuses=True)

    def on_removed(self, node: ClusterNode, process: Process) -> None:
        """A node heard that it is no part of the cluster, and ends. Perhaps it comes back, with
        nothing."""
        if not process.alive:
            return
        if node.number not in self.metadata.forgotten and not node.is_foreign:
            known = self.nodes[node.number].tree.directories.get(node.number)
            if known == node.identity.directory:
                raise InvariantBroken(f"{node.name} is sent away, but nobody forgot it")
        self.trace.add(node.name, "is removed")
        self._take_down(node)
        self._wipe_and_start(node)

    def _take_down(self, node: ClusterNode) -> None:
        node.removed = True
        if node.process.alive:
            node.process.alive = False
            self.network.stop(node.number, refuses=True)
            node.disk.lose_power(lambda: True)
        self.channels = [c for c in self.channels if c.node != node.number]

    def _wipe_and_start(self, node: ClusterNode) -> None:
        self.trace.faults["readmitted"] += 1
        node.disk.wipe()
        self._on_wiped(node)
        self.scheduler.after(self.scheduler.between(1000, 2_000_000), None, self._start, node)

    def _on_wiped(self, node: SimNode) -> None:
        assert isinstance(node, ClusterNode)
        node.removed = False
        node.wipe()
        for checker in self.checkers.values():
            checker.on_wiped(node.number)
        self.lost.add(node.number)

    # Channels and queues.

    def _serving(self) -> list[ClusterNode]:
        # A damaged tree is rebuilt: meanwhile there is no virtual host to serve.
        return [n for n in self.nodes.values() if n.is_serving and n.tree.vhosts]

    def _keep_channels(self) -> None:
        churn = self.plan.churn and not self.quiet
        pause_us = (300, 3_000) if churn else (5_000, 60_000)
        self.scheduler.after(self.scheduler.between(*pause_us), None, self._keep_channels)
        self._end_channels()
        for node in self._serving():
            for record in sorted(node.tree.records(), key=lambda record: record.group):
                group = record.group
                mine = [c for c in self.channels if c.node == node.number and c.group == group]
                if len(mine) < self.plan.channels_max and self.scheduler.chance(0.3):
                    assert node.local is not None
                    node.local.open(record)
                    if self.checkers[group].ended:
                        continue
                    self._open_channel(node, group, bool(mine))
                    return

    def _more_arguments(self, _arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Returns further arguments of a queue."""
        return {}

    def channel_kind(self, group: int) -> ChannelKind:
        is_stream = isinstance(self.referees[group], StreamReferee)
        return StreamChannel if is_stream else Channel

    def _administrate(self) -> None:
        """A client declares or deletes a queue."""
        if self.quiet:
            return
        self.scheduler.after(self.scheduler.skewed(5_000, 800_000), None, self._administrate)
        serving = self._serving()
        if not serving:
            return
        rng = self.scheduler.rng
        node = rng.choice(serving)
        name = NAMES[0] if self.plan.churn else rng.choice(NAMES)
        if self.scheduler.chance(0.3) and len(self.groups) > 1:
            # The last queue stays.
            record = node.tree.vhosts["/"].queues.get(name)
            group = record.group if record is not None and self.scheduler.chance(0.5) else 0
            self._submit(node, DeleteQueue(vhost="/", name=name, group=group))
            return
        arguments: dict[str, object] = {"x-queue-type": "quorum"}
        if self.scheduler.chance(STREAM_SHARE):
            arguments["x-queue-type"] = "stream"
        else:
            arguments["x-delivery-limit"] = rng.choice((-1, 2, 20))
            if self.scheduler.chance(0.25):
                arguments["x-single-active-consumer"] = True
        if self.scheduler.chance(0.5):
            arguments["x-queue-leader-locator"] = "balanced"
        arguments.update(self._more_arguments(arguments))
        table = Table.of(arguments)
        members = node.placement.members_for(table, node.running_nodes(), CLIENT_LOCAL)
        if len(members) < NODES_LEFT_MIN and self.plan.faults & LOSING:
            return
        self._submit(
            node,
            DeclareQueue(
                vhost="/",
                name=name,
                members=members,
                durable=True,
                arguments=table.encoded,
                compatibility=self._release_rng.choice(RELEASES),
            ),
        )

    def delete_queue(self, node: ClusterNode, name: str, group: int) -> None:
        """An administrator deletes a queue of which nothing is left."""
        self._submit(node, DeleteQueue(vhost="/", name=name, group=group))

    def _submit(
        self, node: ClusterNode, command: Command, then: Callable[[object], None] | None = None
    ) -> None:
        def done(reply: object, error: BrokerError | None) -> None:
            self.trace.add(node.name, f"{type(command).__name__} -> {error or reply}")
            if error is None and then is not None:
                then(reply)

        assert node.store is not None
        node.store.submit(command, done, DECLARE_MS)

    # Faults.

    def bring_foreigner(self) -> None:
        """A node of another cluster tries to link."""
        if not self.foreign_nodes and self.metadata.cluster_id:
            self.trace.fault("foreign_node", "world")
            node = ClusterNode(self, FOREIGN_NODE, (FOREIGN_NODE,), is_foreign=True)
            self.foreign_nodes[FOREIGN_NODE] = node
            self._start(node)

    def bring_newcomer(self) -> None:
        """A fresh node joins."""
        number = len(self.nodes) + 1
        if number > self.plan.nodes + NEWCOMERS_MAX or not self.metadata.cluster_id:
            return
        self.trace.fault("newcomer", "world", f"node {number}")
        node = self.nodes[number] = ClusterNode(self, number, self.founders)
        self._start(node)

    def forget(self) -> None:
        """A node is removed from the cluster."""
        serving = self._serving()
        known = [n for n in self.nodes if any(n in other.tree.nodes for other in serving)]
        candidates = [n for n in known if self.may_lose(n) and n not in self.metadata.forgotten]
        if len(known) - len(self.metadata.forgotten) <= NODES_LEFT_MIN or not candidates:
            return
        victim = self.scheduler.rng.choice(candidates)
        asked = [node for node in serving if node.number != victim]
        if not asked:
            return
        node = self.scheduler.rng.choice(asked)
        self.trace.fault("forget", f"node{victim}")
        self.lost.add(victim)
        self.forgetting.add(victim)
        self._submit(node, ForgetNode(id=victim), lambda _reply: self.forgetting.discard(victim))

    def may_lose(self, number: int) -> bool:
        """Returns whether no other node's copies are missing."""
        for other in sorted(self.lost):
            if self._is_rebuilt(other):
                self.lost.discard(other)
                logs = self.nodes[other].storage.logs
                for group, checker in self.checkers.items():
                    if other not in self.damaged:
                        checker.excused.discard(other)
                    if group not in logs:
                        checker.logs.pop(other, None)
        return self._is_founded() and not (self.lost | self.damaged) - {number}

    def _is_founded(self) -> bool:
        # A founder that is emptied before the cluster lives is beyond repair, by design.
        return bool(self.metadata.cluster_id) and all(
            node.saved is not None and node.saved.founding is None for node in self.nodes.values()
        )

    def excuse(self, number: int) -> None:
        """Allows the disk of a node to lose what was promised."""
        super().excuse(number)
        # Nobody knows when damage is found: this node stays the one that may lose more.
        self.damaged.add(number)

    def _is_rebuilt(self, number: int) -> bool:
        """Returns whether a node that lost its copies has them again, where it is to have some."""
        node = self.nodes[number]
        if not node.is_serving or number in self.forgetting | self.metadata.forgotten:
            return False
        for group in (0, *self.groups):
            leading = self.leader_of(group)
            if leading is None:
                return False
            members = leading[1].core.members
            replica = node.host.groups.get(group)
            if number not in members.nodes and group and replica is None:
                continue
            checker = self.checkers[group]
            if (
                not self._has_vote(group, number, members)
                or replica is None
                or replica.core.quarantined
                or replica.log.written_index < checker.commit_index
            ):
                return False
        return True

    def _has_vote(self, group: int, number: int, members: Membership) -> bool:
        """Returns whether a member votes, or is one that shall not."""
        if self.metadata_voters:
            learner = members.learner(number)
            return learner is None or learner.promote_at >= NEVER
        return number in members.voters

    # A lost majority.

    def lose_majority(self) -> None:
        """Loses the disks of so many nodes at once that the rest is no majority of the tree's."""
        leading = self.leader_of(0)
        if leading is None or self.disaster is not None or not self._is_founded():
            return
        self.may_lose(0)
        members = leading[1].core.members
        here = {n for n, node in self.nodes.items() if node.saved and node.identity.cluster}
        settled = leading[1].core.members_index <= leading[1].commit_index
        if self.lost or self.forgetting or self.metadata.forgotten or not settled:
            return
        if members.voters != here or members.nodes != here:
            return
        rng = self.scheduler.rng
        survivors = frozenset(rng.sample(sorted(here), rng.randint(1, len(here) // 2)))
        # Founders that are all emptied may found another cluster before they see a survivor: the
        # operator's steps forbid to start them then (docs/operations.md).
        if survivors & self.damaged or not survivors & set(self.founders):
            return
        gone = sorted(set(self.nodes) - survivors)
        self.trace.fault("lost_majority", "world", f"{sorted(survivors)} of {sorted(here)} left")
        stay = self.scheduler.chance(0.5)
        for number in gone:
            self.damaged.discard(number)
            self.crash(
                self.nodes[number],
                restart_us=self.scheduler.skewed(1000, 8_000_000),
                keep=0.0,
                wipe=True,
            )
        for number in sorted(survivors):
            if self.nodes[number].alive and not stay:
                self.crash(
                    self.nodes[number], restart_us=self.scheduler.skewed(1000, 2_000_000), keep=0.5
                )
        for group in (0, *self.groups):
            checker = self.checkers[group]
            checker.on_lost(gone)
            self.trace.add("world", f"group {group}: nobody may lose up to {checker.floor}")
        self.disaster = Disaster(survivors, self.metadata.cluster_id)
        Operator(self, self.disaster)

    def on_forced(self, node: ClusterNode, group: int, last_index: int) -> None:
        """A replica is told to go on alone."""
        if self.disaster is None or node.number not in self.disaster.survivors:
            raise InvariantBroken(f"{node.name} goes on alone in group {group}, without need")
        checker = self.checkers[group]
        checker.forcing[node.number] = last_index

    def _on_recovered_alone(
        self, checker: ClusterChecker, node: int, log: GroupLog, index: int
    ) -> None:
        """The first entry of a recovered leader is committed: what it did not have is lost."""
        group = checker.group
        last = checker.agrees_upto(log, index - 1)
        lost = checker.commit_index - last
        self.trace.add(f"node{node}", f"group {group} goes on after {last}, {lost} entries lost")
        self.trace.faults["entries_lost"] += lost
        if last < checker.floor:
            checker.fail(f"node {node} goes on after {last}, a survivor had {checker.floor}")
        self.recovered_groups.add(group)
        checker.rewind(last, log.term_at(index))
        history = self.history[group] = [e for e in self.history.get(group, []) if e[0] <= last]
        if group == 0:
            self._rewind_tree(history)
        else:
            self._rewind_queue(group, history)

    def _rewind_tree(self, history: list[Entered]) -> None:
        fresh = self.metadata = MetadataReferee(_ignore, _ignore, None)
        for entry in history:
            fresh.on_entry(*entry)
        fresh.go_on(self._on_created, self._on_deleted, self._members_at)
        self.referees[0] = self.checkers[0].referee = fresh
        self.groups = {q.group: q for q in fresh.queues.values()}
        for group in [g for g in self.checkers if g and g not in fresh.by_group]:
            # Its number may be given out again.
            del self.checkers[group], self.referees[group]
            self.history.pop(group, None)
        for group, checker in self.checkers.items():
            checker.ended = group > 0 and group not in self.groups

    def _rewind_queue(self, group: int, history: list[Entered]) -> None:
        former = self.referees[group]
        fresh = self._new_referee(self.metadata.by_group[group])
        if isinstance(fresh, Referee):
            assert isinstance(former, Referee)
            fresh.received = former.received
            last = history[-1][0] if history else 0
            since = former.model.since.items()
            fresh.model.since = {version: at for version, at in since if at <= last}
        for entry in history:
            fresh.on_entry(*entry)
        if isinstance(fresh, Referee) and isinstance(former, Referee):
            fresh.received = {
                (session, consumer, message_id)
                for session, consumer, message_id in former.received
                if message_id < len(fresh.handed.get((session, consumer), ()))
            }
        self.referees[group] = self.checkers[group].referee = fresh
        for channel in self.channels:
            if isinstance(channel, Channel) and channel.group == group:
                channel.on_rewound(fresh)

    def _follow(self, group: int, index: int, data: bytes, effects: list[Effect]) -> None:
        if "lost_majority" in self.plan.faults:
            self.history.setdefault(group, []).append((index, data, effects))
        super()._follow(group, index, data, effects)

    @property
    def recovering(self) -> bool:
        """Returns whether a majority is lost, and not every node has the new id."""
        return self.disaster is not None

    def on_recovered(self, disaster: Disaster) -> None:
        """An operator is done."""
        assert disaster is self.disaster
        self.disaster = None
        self.trace.add("world", f"recovered as {self.metadata.cluster_id}")

    def change_membership(self, group: int) -> None:
        """An administrator has the leader of a queue change its members."""
        leading = self.leader_of(group)
        if leading is None:
            return
        node, replica = self.nodes[leading[0].number], leading[1]
        if not node.is_serving:
            return
        members = set(replica.core.members.nodes)
        if self.lost or replica.core.members_index > replica.commit_index:
            return
        rng = self.scheduler.rng
        outside = sorted(set(node.tree.nodes) - members)
        joins = rng.choice(outside) if outside else 0
        least = NODES_LEFT_MIN if self.plan.faults & LOSING else 1
        leaves = rng.choice(sorted(members)) if len(replica.core.members.voters) > least else 0
        if not joins and not leaves:
            return
        if joins and (not leaves or self.scheduler.chance(0.4)):
            done = node.host.add_member(group, joins)
            leaves = 0
        else:
            done = node.host.replace_member(group, leaves, joins)
        if done:
            self.trace.fault("membership", "world", f"group {group}: +{joins} -{leaves}")

    # The end.

    def _empty_forgotten(self) -> None:
        """An administrator starts forgotten nodes with nothing."""
        for node in self.nodes.values():
            stays = node.alive and node.saved is not None and node.identity.cluster
            if node.number in self.metadata.forgotten and not node.removed and stays:
                # It may never hear it: nobody links with it.
                self._take_down(node)
                self._wipe_and_start(node)

    def _unfinished(self) -> list[str]:
        self._end_channels()
        self._empty_forgotten()
        found: list[str] = []
        metadata = self.metadata
        if self.disaster is not None:
            return ["the recovery of a lost majority"]
        for node in self.nodes.values():
            if node.number in metadata.forgotten and node.alive and node.local is not None:
                found.append(f"{node.name} was forgotten and serves")
            elif not node.is_serving:
                found.append(f"{node.name} does not serve")
        if found:
            return found
        found += self._waiting_channels()
        for group in (0, *self.groups):
            waits = self.referees[group].waits_for()
            if waits:
                found.append(waits)
            found += self._unsettled(group)
        size = min(GROUP_SIZE, len(self.nodes))
        for group in sorted(self.recovered_groups & self.groups.keys()):
            members = self.groups[group].members
            if len(members) < size:
                found.append(f"group {group} was recovered, and has only {members}")
        for node in self.nodes.values():
            wanted = {q.group for q in self.groups.values() if node.number in q.members}
            kept = set(node.storage.logs) - {0}
            if kept != wanted:
                found.append(f"{node.name} has data of groups {kept}, not of {wanted}")
        return found

    def _unsettled(self, group: int) -> list[str]:
        leading = self.leader_of(group)
        if leading is None:
            return [f"group {group} has no leader"]
        leader = leading[1]
        members = leader.core.members
        wanted = set(self.groups[group].members) if group else set(self.nodes)
        votes = {number for number in wanted if self._has_vote(group, number, members)}
        if votes != wanted or set(members.nodes) != wanted:
            return [f"members of {group} are {members}, not {sorted(wanted)}"]
        here = [self.nodes[n].host.groups.get(group) for n in sorted(wanted)]
        replicas = [replica for replica in here if replica is not None]
        if len(replicas) < len(here):
            return [f"group {group} is not open everywhere"]
        states = {(r.last_applied, r.log.last_index) for r in replicas}
        if len(states) > 1:
            return [f"replicas of {group} are at {sorted(states)}"]
        return []

    def _final_checks(self) -> None:
        for group in (0, *self.groups):
            self._check_equal(
                group, [n for n, node in self.nodes.items() if group in node.host.groups]
            )


def _ignore(_queue: KnownQueue) -> None:
    """The books already have it."""


class ClusterLoad(GroupLoad):
    """Queues by the metadata group."""

    text = "the metadata group says which queues and members there are"
    kinds: ClassVar[tuple[str, ...]] = KINDS + CLUSTER + LOSSES
    world: ClusterWorld
    world_class = ClusterWorld

    def vary(self, seed: int, share: float) -> Variation:
        more = Random(seed ^ 0xC1)
        kinds = {kind for kind in CLUSTER if more.random() < share}
        overtake = more.random() < 0.5
        churn = more.random() < CHURN_SHARE
        losses = Random(seed ^ 0x1055)
        kinds |= {kind for kind in LOSSES if losses.random() < share}
        return Variation(kinds=frozenset(kinds), overtake=overtake, churn=churn)

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """See `GroupLoad`: late acknowledgements and fixed bodies are about quorum queues."""
        return replace(clients, late_chance=0.0, body_fixed=-1)
