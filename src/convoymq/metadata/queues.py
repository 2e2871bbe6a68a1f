"""Rules about queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from convoymq.metadata.commands import (
    ChangeView,
    DeclareQueue,
    DeleteQueue,
    OwnerGone,
    SetMembers,
)
from convoymq.metadata.records import Change, ChangeKind, QueueRecord, Vhost
from convoymq.metadata.topics import PARTITION_TYPE, check_no_topic
from convoymq.metadata.topology import arguments_of
from convoymq.metadata.tree import Tree
from convoymq.model.errors import AccessRefused, PreconditionFailed
from convoymq.routing.types import QueueType, Removed


class Queues:
    """Changes queue records, and the topology with them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def declare(self, command: DeclareQueue, time_ms: int) -> dict[str, object]:
        """Records a queue with a new group. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        if not command.members:
            raise PreconditionFailed("a queue needs a node")
        check_no_topic(vhost, command.name)
        created = vhost.topology.declare_queue(
            command.name,
            QueueType(command.type),
            durable=command.durable,
            exclusive_owner=command.owner,
            auto_delete=command.auto_delete,
            arguments=arguments_of(command),
            user=command.user,
        )
        if created:
            record = QueueRecord(
                vhost=command.vhost,
                name=command.name,
                group=self._tree.next_group,
                type=QueueType(command.type),
                durable=command.durable,
                members=command.members,
                owner=command.owner,
                created_ms=time_ms,
                # Who starts again does not know whether it has led before.
                founder=(command.members[0], self._tree.incarnations.get(command.members[0], 0)),
                compatibility=command.compatibility,
                type_given=command.type_given,
            )
            self._tree.next_group += 1
            vhost.queues[command.name] = record
            self._tree.queue_index.put(record)
            self._tree.note(Change(ChangeKind.QUEUE_CREATED, record, vhost=command.vhost))
        record = vhost.queues[command.name]
        return {"created": created, "group": record.group}

    def delete(self, command: DeleteQueue) -> bool:
        """Deletes a queue. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        record = vhost.queues.get(command.name)
        if record is None or command.group not in (0, record.group):
            return False
        if record.type.value == PARTITION_TYPE:
            raise AccessRefused(
                f"queue '{command.name}' in vhost '{vhost.name}' is a partition: it goes with its "
                "topic"
            )
        vhost.topology.queue(command.name, command.owner if command.group == 0 else record.owner)
        self._remove_record(vhost, record)
        return True

    def set_members(self, command: SetMembers) -> bool:
        """Records the members of a queue's group. Raises NotFound."""
        vhost = self._tree.vhost(command.vhost)
        record = self._record_of(command)
        if record is None or not command.members:
            return False
        if command.config <= record.config:
            return False
        joined = {*record.joined, *command.members} - {
            member for member in record.members if member not in record.joined
        }
        changed = replace(
            record,
            members=command.members,
            config=command.config,
            joined=tuple(member for member in command.members if member in joined),
        )
        self._replace_record(vhost, changed)
        return True

    def change_view(self, command: ChangeView) -> bool:
        """Records the next view of a queue's ring. Raises NotFound."""
        vhost = self._tree.vhost(command.vhost)
        record = self._record_of(command)
        if record is None or record.group in self._tree.queue_index.successors:
            # Mirrors of a queue that is being migrated would not stand still.
            return False
        recorded = record.view.version if record.view is not None else 0
        members = command.view.nodes()
        if command.view.version != recorded + 1 or not members:
            return False
        self._replace_record(vhost, replace(record, view=command.view, members=members))
        return True

    def _record_of(self, command: SetMembers | ChangeView) -> QueueRecord | None:
        """Returns the queue or successor that a command is about, if it is still there."""
        record = self._tree.queue_index.by_group.get(command.group)
        names = (command.vhost, command.name)
        return record if record is not None and (record.vhost, record.name) == names else None

    def _replace_record(self, vhost: Vhost, changed: QueueRecord) -> None:
        vhost.replace_record(changed)
        self._tree.queue_index.put(changed)
        self._tree.note(Change(ChangeKind.QUEUE_MEMBERS, changed, vhost=vhost.name))

    def owner_gone(self, command: OwnerGone) -> int:
        """Deletes the exclusive queues of a connection."""
        return self.delete_all(self._tree.queue_index.owned_by(command.owner))

    def delete_where(self, condition: Callable[[QueueRecord], bool]) -> int:
        """Deletes queues, and returns how many."""
        return self.delete_all([record for record in self._tree.records() if condition(record)])

    def delete_all(self, found: Sequence[QueueRecord]) -> int:
        """Deletes queues in the order of their groups, and returns how many."""
        for record in sorted(found, key=lambda record: record.group):
            self._remove_record(self._tree.vhosts[record.vhost], record)
        return len(found)

    def undo_migration(self, vhost: Vhost, name: str) -> None:
        """Deletes the successor of a queue, if it has one."""
        successor = vhost.successors.pop(name, None)
        if successor is not None:
            self._tree.queue_index.drop(successor.record)
            self._tree.note(Change(ChangeKind.QUEUE_DELETED, successor.record, vhost=vhost.name))

    def undo_migrations_to(self, node: int) -> None:
        """Undoes the migrations to queues that a node has."""
        for vhost in self._tree.vhosts.values():
            for name, successor in sorted(vhost.successors.items()):
                if node in successor.record.members:
                    self.undo_migration(vhost, name)

    def _remove_record(self, vhost: Vhost, record: QueueRecord) -> Removed:
        self.undo_migration(vhost, record.name)
        removed = vhost.topology.delete_queue(record.name)
        del vhost.queues[record.name]
        self._tree.queue_index.drop(record)
        self._tree.note(Change(ChangeKind.QUEUE_DELETED, record, vhost=vhost.name))
        return removed
