"""Rules about queues that migrate to another type (ADR 0128).

| state      | the tree has                        | entered by                                   |
|------------|-------------------------------------|----------------------------------------------|
| none       | the queue                           |                                              |
| migrating  | the queue, and its successor        | BeginMigration                               |
| switched   | the successor, under the queue's    | EndMigration, `switched`                     |
|            | name and with its bindings          |                                              |
| undone     | the queue                           | EndMigration; the end of the queue, or of a  |
|            |                                     | node that has the successor                  |

A migration is named by the group of its successor, and groups are never given out twice: an end
that comes late, of a migration that was undone, finds another successor or none and changes
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from convoymq.metadata.commands import BeginMigration, EndMigration
from convoymq.metadata.queues import Queues
from convoymq.metadata.records import Change, ChangeKind, QueueRecord, Successor
from convoymq.metadata.topology import arguments_of
from convoymq.metadata.tree import Tree
from convoymq.model.errors import PreconditionFailed
from convoymq.model.refusals import missing, queue_subject
from convoymq.routing.types import QueueType


class Migrations:
    """Changes successors, and records of queues with them."""

    def __init__(self, tree: Tree, queues: Queues) -> None:
        self._tree = tree
        self._queues = queues

    def begin(self, command: BeginMigration, time_ms: int) -> dict[str, object]:
        """Records a successor with a new group. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        subject = queue_subject(command.vhost, command.name)
        record = vhost.queues.get(command.name)
        if record is None or record.group != command.group:
            raise missing(subject)
        if command.name in vhost.successors:
            raise PreconditionFailed(f"{subject} is being migrated already", subject=subject)
        if record.view is not None:
            raise PreconditionFailed(f"{subject} has mirrors", subject=subject)
        if not command.members:
            raise PreconditionFailed("a queue needs a node")
        declared = vhost.topology.find_queue(command.name)
        assert declared is not None
        home = command.members[0]
        made = QueueRecord(
            vhost=command.vhost,
            name=command.name,
            group=self._tree.next_group,
            type=QueueType(command.type),
            durable=record.durable,
            members=command.members,
            owner=None,
            created_ms=time_ms,
            founder=(home, self._tree.incarnations.get(home, 0)),
            compatibility=record.compatibility,
            type_given=True,
            predecessor=record.group,
        )
        self._tree.next_group += 1
        queue = replace(declared, type=made.type, arguments=arguments_of(command))
        vhost.successors[command.name] = Successor(record=made, declared=queue)
        self._tree.queue_index.put(made)
        self._tree.note(Change(ChangeKind.QUEUE_CREATED, made, vhost=vhost.name))
        return {"group": made.group}

    def end(self, command: EndMigration) -> bool:
        """Ends a migration; False when it is none any more. Raises NotFound."""
        vhost = self._tree.vhost(command.vhost)
        successor = vhost.successors.get(command.name)
        record = vhost.queues.get(command.name)
        if successor is None or successor.record.group != command.successor or record is None:
            return False
        if record.group != command.group:
            return False
        if not command.switched:
            self._queues.undo_migration(vhost, command.name)
            return True
        del vhost.successors[command.name]
        vhost.topology.replace_queue(successor.declared)
        vhost.queues[command.name] = successor.record
        self._tree.queue_index.drop(record)
        self._tree.note(Change(ChangeKind.QUEUE_DELETED, record, vhost=vhost.name))
        self._tree.note(Change(ChangeKind.QUEUE_CREATED, successor.record, vhost=vhost.name))
        return True
