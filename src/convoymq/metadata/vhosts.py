"""Rules about virtual hosts."""

from __future__ import annotations

from convoymq.metadata.commands import DeleteVhost, PutVhost
from convoymq.metadata.queues import Queues
from convoymq.metadata.records import Change, ChangeKind, Vhost
from convoymq.metadata.tree import Tree
from convoymq.routing.topology import Topology


class Vhosts:
    """Changes virtual hosts."""

    def __init__(self, tree: Tree, queues: Queues) -> None:
        self._tree = tree
        self._queues = queues

    def put(self, command: PutVhost) -> bool:
        """Creates a virtual host or changes its properties."""
        vhost = self._tree.vhosts.get(command.name)
        created = vhost is None
        if vhost is None:
            vhost = self._tree.vhosts[command.name] = Vhost(command.name, Topology(command.name))
        vhost.description = command.description
        vhost.tags = command.tags
        vhost.default_queue_type = command.default_queue_type
        vhost.compatibility = command.compatibility
        self._tree.changed(True, command.name)
        return created

    def delete(self, command: DeleteVhost) -> bool:
        """Deletes a virtual host with all in it."""
        name = command.name
        if name not in self._tree.vhosts:
            return False
        self._queues.delete_where(lambda record: record.vhost == name)
        for topic in sorted(self._tree.vhosts[name].topics):
            self._tree.note(Change(ChangeKind.TOPIC, vhost=name, topic=topic))
        del self._tree.vhosts[name]
        for table in (self._tree.permissions, self._tree.topic_permissions):
            for key in [key for key in table if key[1] == name]:
                del table[key]
        return self._tree.changed(True, name)
