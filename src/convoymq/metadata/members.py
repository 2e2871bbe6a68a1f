"""Keeps groups, tree and links in step when nodes come and go.

Nothing here remembers a plan. `ForgetNode` puts a node on the tree's list of forgotten ones; from
then on whoever leads a group that still has it takes it out, and the record of each queue follows
the members that its group has committed. So it does not matter who dies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import structlog

from convoymq.metadata.commands import PutNode, SetMembers
from convoymq.metadata.machine import Change, ChangeKind, QueueRecord
from convoymq.metadata.placement import spread
from convoymq.metadata.replicas import Host, Replica
from convoymq.metadata.snapshot import ZONES_VERSION
from convoymq.metadata.store import MetadataStore
from convoymq.metadata.voters import MetadataVoters, takes_learners
from convoymq.model.errors import BrokerError, EntryGone, NotFound, PreconditionFailed
from convoymq.replication.raft.membership import Membership
from convoymq.routing.queue_types import PlacementKind

log = structlog.get_logger()

TICKS_SETTLED = 50
"""A replica that lost its data leaves its group and comes back at once: that is not recorded."""
ANSWER_MS = 5000
SHORT_TICKS = 10
"""So often it is looked whether a recovered group that is too small can be filled up."""


class OwnPlace(NamedTuple):
    """Zone and machine of a node, as `PutNode` says them."""

    zone: str
    machine: int
    process: int


NOWHERE = OwnPlace("", 0, 1)


class LinkTable(Protocol):
    """Interface of `transport.links.Links` that the membership manager needs."""

    forgotten: set[int]

    def forget(self, node: int) -> None:
        """Drops and refuses a node."""

    def remember(self, node: int) -> None:
        """Takes it again."""


class Brokerage(Protocol):
    """Interface of `broker.facade.Broker` that the membership manager needs."""

    node_id: int

    def placement_nodes(self) -> list[int]:
        """Nodes that may get replicas."""

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""

    def group_size_of(self, record: QueueRecord) -> int:
        """Returns how many members a queue began with, or would have."""


class MembershipManager:
    """One per node; call `tick` a few times a second."""

    def __init__(
        self,
        broker: Brokerage,
        host: Host,
        store: MetadataStore,
        links: LinkTable,
        on_removed: Callable[[], None],
        directory: str = "",
        place: OwnPlace = NOWHERE,
        voters: MetadataVoters | None = None,
    ) -> None:
        """
        Args:
            voters: decides who votes in the metadata group; None: all members do.
            on_removed: called when this node itself is no part of the cluster any more.
            directory: id of this node's data directory; "" = it has none.
            place: where this node is.
        """
        self._broker = broker
        self._host = host
        self._store = store
        self._tree = store.tree
        self._links = links
        self._on_removed = on_removed
        self._directory = directory
        self._place = place
        self._voters = voters
        self._placing = False
        self._open: dict[int, int] = {}
        """Groups that may not be in step, and for how many ticks they have been so."""
        self._short: set[int] = set()
        """Recovered groups that were too small when they were looked at last."""
        self._ticks = 0
        self._asked: set[int] = set()
        self._removals: set[tuple[int, int]] = set()
        """(group, node): removed at an operator's request, which is recorded at once."""
        self._host.on_membership_changed = self._on_membership
        store.watch(self._on_change)
        self._open_all()

    # -- what happens ---------------------------------------------------------------------------

    def _on_membership(self, group: int, _members: Membership) -> None:
        self._open.setdefault(group, 0)

    def on_removal(self, group: int, node: int) -> None:
        """Takes note that this node, as leader, removes a member because an operator asked for
        it."""
        self._removals.add((group, node))

    def _on_change(self, change: Change) -> None:
        joined = change.kind is ChangeKind.NODE and self._tree.recoveries
        if joined or change.kind in (ChangeKind.NODE_FORGOTTEN, ChangeKind.RESTORED):
            self._open_all()

    def _open_all(self) -> None:
        for group in self._host.groups:
            self._open.setdefault(group, 0)

    def tick(self) -> None:
        """Does what is due for links and groups."""
        forgotten = self._tree.forgotten
        for node in forgotten - self._links.forgotten:
            if node != self._broker.node_id:
                log.info("cluster.node_forgotten", node=self._broker.node_id, peer=node)
                self._links.forget(node)
        for node in self._links.forgotten - forgotten:
            self._links.remember(node)
        if self._broker.node_id in forgotten:
            log.error("cluster.removed", node=self._broker.node_id,
                      reason="this node was removed from the cluster")  # fmt: skip
            self._on_removed()
            return
        holder = self._tree.directories.get(self._broker.node_id, self._directory)
        if self._directory and holder != self._directory:
            log.error("cluster.replaced", node=self._broker.node_id, directory=holder,
                      reason="another data directory has this node's number now")  # fmt: skip
            self._on_removed()
            return
        self._admit()
        self._record_place()
        if self._voters is not None:
            self._voters.tick()
        self._ticks += 1
        if self._short and self._ticks % SHORT_TICKS == 0:
            # A node may have become free, or this one may lead by now.
            for group in self._short:
                self._open.setdefault(group, 0)
            self._short.clear()
        if not self._open:
            return
        records = self._tree.queue_index.by_group
        recovered = self._recovered()
        load: dict[int, int] | None = None
        for group, ticks in list(self._open.items()):
            replica, record = self._host.replica(group), records.get(group)
            if replica is None or (group and record is None):
                del self._open[group]
                continue
            stale = sorted(replica.core.members.nodes & forgotten)
            recorded = set(record.members) if record is not None else None
            if not stale and recorded in (None, replica.core.members.nodes):
                if replica.core.members_index <= replica.core.commit_index:
                    del self._open[group]
                    size = len(replica.core.members.nodes)
                    if record is None or group not in recovered:
                        continue
                    if size >= self._broker.group_size_of(record):
                        continue
                    self._short.add(group)
                    if replica.is_leader:
                        if load is None:
                            load = _replicas(records.values())
                        self._restore_member(replica, record, load)
                continue
            self._open[group] = ticks + 1
            if not replica.is_leader:
                continue
            if not stale:
                assert record is not None
                self._record_members(replica, record, ticks)
                continue
            by = 0
            if record is not None:
                if load is None:
                    load = _replicas(records.values())
                by = self._substitute(record, replica.core.members.nodes, load)
            if self._host.replace_member(group, stale[0], by) and by and load is not None:
                load[by] = load.get(by, 0) + 1

    # -- groups -----------------------------------------------------------------------------------

    def _recovered(self) -> set[int]:
        """Groups that lost members with their majority: nodes that come later take their places."""
        return {
            row["group"]
            for recovery in self._tree.recoveries
            for row in recovery["groups"]
            if row["outcome"] == "recover"
        }

    def _restore_member(self, replica: Replica, record: QueueRecord, load: dict[int, int]) -> None:
        """Adds a member to a recovered group that is smaller than it should be."""
        node = self._substitute(record, replica.core.members.nodes, load)
        if node and self._host.add_member(record.group, node):
            load[node] = load.get(node, 0) + 1
            # One at a time: the next when this one is recorded.
            self._open[record.group] = 0

    def _admit(self) -> None:
        """Leading the tree's group, takes in who was let in and is no member yet: when it came,
        another change may have been under way, or another node may have led."""
        replica = self._host.replica(0)
        if replica is None or not replica.is_leader:
            return
        core = replica.core
        for node in sorted(self._tree.directories.keys() - core.members.nodes):
            if node not in core.changes.rejoining and self._broker.is_up(node):
                learns = self._voters is not None and takes_learners(self._tree)
                self._host.add_member(0, node, voter=not learns)
                return

    def _record_place(self) -> None:
        """Records zone and process of this node when the version of the tree that has them came
        into force after its start."""
        record = self._tree.nodes.get(self._broker.node_id)
        if record is None or self._placing or self._tree.version < ZONES_VERSION:
            return
        zone, machine, process = self._place
        machine = machine or record.id
        if (record.zone, record.machine, record.process) == (zone, machine, process):
            return

        def done(_reply: object, _error: BrokerError | None) -> None:
            self._placing = False

        self._placing = True
        command = PutNode(
            id=record.id,
            name=record.name,
            incarnation=record.incarnation,
            addresses=record.addresses,
            directory=self._tree.directories[record.id],
            release=record.release,
            supports=record.supports,
            zone=zone,
            machine=machine,
            process=process,
        )
        self._store.submit(command, done, ANSWER_MS)

    def _substitute(
        self, record: QueueRecord, members: Collection[int], load: dict[int, int]
    ) -> int:
        """Returns a running node that takes the place of a forgotten one; 0 = none is free or
        needed."""
        forgotten = self._tree.forgotten
        left = [node for node in members if node not in forgotten]
        free = [
            node
            for node in self._broker.placement_nodes()
            if node not in members
            and node in self._tree.nodes
            # One with an older release may not know the rules that the group has in force.
            and not self._host.member_refusal(record.group, node)
        ]
        if not free or len(left) >= self._broker.group_size_of(record):
            return 0
        (found,) = spread(free, self._tree.places(), members=left, replicas=load)
        return found

    def _record_members(self, replica: Replica, record: QueueRecord, ticks: int) -> None:
        core = replica.core
        if core.members_index > core.commit_index or record.group in self._asked:
            return
        nodes = core.members.nodes
        gone = set(record.members) - nodes - self._tree.forgotten
        gone_on_request = {node for node in gone if (record.group, node) in self._removals}
        gone -= gone_on_request
        if gone and (ticks < TICKS_SETTLED or gone & core.changes.rejoining.keys()):
            return
        members = [n for n in record.members if n in nodes]
        members += sorted(nodes - set(members))
        if tuple(members) == record.members:
            return
        self._asked.add(record.group)
        command = SetMembers(
            vhost=record.vhost,
            name=record.name,
            group=record.group,
            members=tuple(members),
            config=config_of(replica),
        )

        def done(_reply: object, error: BrokerError | None) -> None:
            self._asked.discard(record.group)
            self._removals -= {(record.group, node) for node in gone_on_request}
            if error is not None:
                log.warning("cluster.members_not_recorded", group=record.group, reason=error.text)

        self._store.submit(command, done, ANSWER_MS)

    # -- administration ---------------------------------------------------------------------------

    def check_forget(self, node: int, *, force: bool = False) -> None:
        """Refuses to forget a node that is needed. `ForgetNode` then removes it from the cluster
        for ever, and groups let go of it in the background.

        Args:
            force: even when it can be reached, and even when queues go with it that only it has.

        Raises:
            NotFound: there is no such node.
            PreconditionFailed: it runs, or has the only replica of a queue, or is this one, or
                another node is still being removed.
        """
        tree = self._tree
        if node not in tree.nodes:
            raise NotFound(f"node {node} is not a member of the cluster")
        if node == self._broker.node_id:
            raise PreconditionFailed("a node cannot forget itself: ask another one")
        leaving = tree.forgotten & self._host.groups[0].core.members.nodes
        if leaving:
            # Two removals at once can leave the metadata group without a majority.
            raise PreconditionFailed(f"node {min(leaving)} is still being removed: wait for it")
        if not force and self._broker.is_up(node):
            raise PreconditionFailed(f"node {node} is running: stop it first")
        if not force:
            for record in tree.records():
                if record.placement is PlacementKind.RAFT and record.members == (node,):
                    raise PreconditionFailed(
                        f"node {node} has the only replica of queue '{record.name}'"
                    )

    def groups_with(self, node: int) -> int:
        """Returns how many groups still have that node, as far as this node knows."""
        found = {record.group for record in self._tree.records() if node in record.members}
        return len(found) + (node in self._host.groups[0].core.members.nodes)


def config_of(replica: Replica) -> tuple[int, int]:
    """Returns the term and index of the membership entry in force at a replica: later ones compare
    greater."""
    index, log = replica.core.members_index, replica.log
    try:
        return log.term_at(index), index
    except EntryGone:
        # It lies before the log: in a snapshot, whose term is not below its own.
        return log.snapshot_term, index


def _replicas(records: Collection[QueueRecord]) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in records:
        for node in record.members:
            found[node] = found.get(node, 0) + 1
    return found
