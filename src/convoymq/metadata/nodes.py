"""Rules about nodes: joining, starting, leaving, and incarnations."""

from __future__ import annotations

from convoymq.metadata.commands import ForgetNode, Join, PutNode, RecordRecovery
from convoymq.metadata.queues import Queues
from convoymq.metadata.records import (
    JOIN_FOUNDER,
    JOIN_LEARNER,
    JOIN_WIPED,
    Change,
    ChangeKind,
    Joined,
    NodeRecord,
    QueueRecord,
    Recovery,
)
from convoymq.metadata.sessions import Sessions
from convoymq.metadata.tree import Tree
from convoymq.model.errors import PreconditionFailed, Refused
from convoymq.replication import versions as supported
from convoymq.routing.types import QueueType

METADATA_KIND = "metadata"
"""The kind of machine that every node must support."""
RECOVERIES_KEPT = 8
"""Recoveries from a lost majority that the tree remembers: the newest. Queues that an older one cut
short are not filled up by themselves any more."""
STARTS_UNSEEN = 1 << 16
"""So many times at most may a node have started and the tree not know of it: in what a lost
majority took with it, or with a data directory that is gone, out of the metadata group's reach."""
COUNTS_UNSEEN_SINCE = 3
"""The version of the metadata machine since which a lost directory counts as that many starts."""
RECOVERY_STEP = 1 << 22
"""Incarnations that begin between two recoveries from a lost majority are below the next multiple
of this step: 64 lost directories of a node number, or 1,024 recoveries, use no number up."""
STEPS_SINCE = 5
"""The version of the metadata machine since which a node joins above all incarnations that any node
had before the newest recovery."""
DROPS_TRANSIENT_SINCE = 3
"""The version since which transient queues go with their node, as exclusive ones always did."""


class Nodes:
    """Changes nodes, incarnations and what ends with them."""

    def __init__(self, tree: Tree, queues: Queues, sessions: Sessions) -> None:
        self._tree = tree
        self._queues = queues
        self._sessions = sessions

    def join(self, command: Join) -> dict[str, object]:
        """Lets a node with an empty log in, and says as what."""
        node = command.id
        if not supported.is_supported(command.supports, METADATA_KIND, self._tree.version):
            raise PreconditionFailed(
                f"node {node} cannot join: its release does not support version "
                f"{self._tree.version} of the metadata machine, which is in force"
            )
        if command.reachable and self._tree.directories.get(node, "") not in (
            "",
            command.directory,
        ):
            raise PreconditionFailed(
                f"node {node} cannot join: another process with this number is running"
            )
        if node in self._tree.forgotten:
            records = self._tree.queue_index.by_group.values()
            held = any(node in record.members for record in records)
            if held or node in command.members:
                # Groups that count on its former data must have let go of it.
                raise PreconditionFailed(
                    f"node {node} cannot join yet: groups still have the node that was removed"
                )
            self._tree.forgotten.discard(node)
        known = self._tree.joins.get(node)
        if known is None or known.directory != command.directory:
            known = None
        elif command.incarnation < known.asked:
            raise PreconditionFailed(f"node {node} was started again since it asked to join")
        if known is None or known.asked != command.incarnation:
            # Votes and entries that a member once promised to keep are gone.
            role = JOIN_WIPED if node in self._tree.incarnations else JOIN_FOUNDER
            known = Joined(
                directory=command.directory,
                asked=command.incarnation,
                granted=max(command.incarnation, self._next_incarnation(command)),
                role=role if node in command.members else JOIN_LEARNER,
            )
            self._tree.joins[node] = known
            self._tree.directories[node] = command.directory
            self._begin_incarnation(node, known.granted)
        role = known.role if node in command.members else JOIN_LEARNER
        self._tree.note(Change(ChangeKind.NODE, node=node))
        return {
            "role": role,
            "members": sorted(command.members),
            "groups": self._tree.next_group - 1,
            "incarnation": known.granted,
            "cluster_id": self._tree.cluster_id,
        }

    def _next_incarnation(self, command: Join) -> int:
        """Returns an incarnation above all that a node ever had: queues may have heard of later
        ones than the tree, and never take sessions of an earlier one."""
        first = self._recovery_count() * RECOVERY_STEP + 1
        if self._tree.version < STEPS_SINCE:
            first = 1
        last = self._tree.incarnations.get(command.id)
        if last is None:
            # A recovered tree may have lost the only record of the node.
            return first
        is_counted = self._tree.directories.get(command.id) == command.directory
        unseen = 1 if is_counted or self._tree.version < COUNTS_UNSEEN_SINCE else STARTS_UNSEEN
        return max(first, last + unseen)

    def _is_recorded(self, command: RecordRecovery) -> bool:
        return any(row["cluster_id"] == command.cluster_id for row in self._tree.recoveries)

    def _recovery_count(self) -> int:
        """Returns how many recoveries the cluster went through."""
        recoveries = self._tree.recoveries
        return recoveries[-1].get("number", len(recoveries)) if recoveries else 0

    def put(self, command: PutNode) -> bool:
        """Records a node that has started. Raises PreconditionFailed."""
        if command.id in self._tree.forgotten:
            raise PreconditionFailed(f"node {command.id} was removed from the cluster")
        admitted = self._tree.directories.get(command.id, command.directory)
        if admitted != command.directory:
            raise PreconditionFailed(
                f"node {command.id} has another data directory: {admitted or 'unnamed'}"
            )
        if command.incarnation < self._tree.incarnations.get(command.id, 0):
            return False
        known = self._tree.nodes.get(command.id)
        self._tree.directories[command.id] = command.directory
        self._tree.nodes[command.id] = NodeRecord(
            id=command.id,
            name=command.name,
            incarnation=command.incarnation,
            addresses=dict(command.addresses),
            release=command.release,
            supports=dict(command.supports),
            zone=command.zone,
            machine=command.machine or command.id,
            process=command.process,
        )
        if known is None or command.incarnation > known.incarnation:
            self._begin_incarnation(command.id, command.incarnation)
            self._queues.delete_where(
                lambda record: (
                    record.type is QueueType.CLASSIC
                    and record.view is None
                    and record.home == command.id
                    and (not record.durable or record.owner is not None)
                    and _incarnation(record) != command.incarnation
                )
            )
        self._tree.note(Change(ChangeKind.NODE, node=command.id))
        return True

    def forget(self, command: ForgetNode) -> bool:
        """Removes a node; what only that node has is lost."""
        return self._remove(command.id)

    def _remove(self, node: int) -> bool:
        if self._tree.nodes.pop(node, None) is None:
            return False
        self._tree.forgotten.add(node)
        self._tree.directories.pop(node, None)
        self._tree.joins.pop(node, None)
        self._sessions.drop(node, 1 << 32)
        self._queues.undo_migrations_to(node)
        # What only that node has is lost.
        self._queues.delete_where(lambda record: record.members == (node,))
        self._tree.note(Change(ChangeKind.NODE_FORGOTTEN, node=node))
        return True

    def record_recovery(self, command: RecordRecovery) -> bool:
        """Records that a lost majority was recovered from. Raises PreconditionFailed."""
        # A tree that lost its first entries got the new id when the survivor made them again.
        is_new = self._tree.cluster_id == command.cluster_id
        if is_new and (self._tree.version < STEPS_SINCE or self._is_recorded(command)):
            return False
        if not is_new and command.former_id != self._tree.cluster_id:
            raise PreconditionFailed(
                f"the cluster has the id {self._tree.cluster_id}, not {command.former_id}"
            )
        self._tree.cluster_id = command.cluster_id
        for node in command.lost_nodes:
            # Nobody knows how often it was started since this log was cut off.
            self._tree.incarnations[node] = self._tree.incarnations.get(node, 0) + STARTS_UNSEEN
            self._remove(node)
        recovery = Recovery(
            cluster_id=command.cluster_id,
            former_id=command.former_id,
            lost_nodes=list(command.lost_nodes),
            time_ms=command.time_ms,
            groups=list(command.groups),
        )
        if self._tree.version >= STEPS_SINCE:
            recovery["number"] = self._recovery_count() + 1
        self._tree.recoveries.append(recovery)
        del self._tree.recoveries[:-RECOVERIES_KEPT]
        return self._tree.changed(True)

    def gone(self, node: int) -> None:
        """Deletes the exclusive and transient queues of a node that is known to have stopped."""
        # What they held is gone with it: their names get free, and no message waits for them.
        self._queues.delete_all(self.lost_with(node))

    def lost_with(self, node: int) -> list[QueueRecord]:
        """Returns the queues that `gone` deletes. The transient ones stayed before version 3."""
        found = self._tree.queue_index.fleeting_at(node)
        with_transient = self._tree.version >= DROPS_TRANSIENT_SINCE
        return [record for record in found if record.owner is not None or with_transient]

    def refusal_of(self, node: int, incarnation: int) -> Refused | None:
        """Says why commands of a node's incarnation are not heard any more, or None."""
        if node in self._tree.forgotten:
            return PreconditionFailed(f"node {node} was removed from the cluster")
        known = self._tree.incarnations.get(node, 0)
        if incarnation < known:
            return PreconditionFailed(
                f"node {node} has a later incarnation: {known}, this is {incarnation}"
            )
        return None

    def _begin_incarnation(self, node: int, incarnation: int) -> None:
        """Ends what earlier incarnations of a node left behind."""
        self._tree.incarnations[node] = incarnation
        self._sessions.drop(node, incarnation)


def _incarnation(record: QueueRecord) -> int:
    """Incarnation of the node at which an exclusive queue was declared; -1 for others."""
    return int(record.owner.split(".")[1]) if record.owner is not None else -1
