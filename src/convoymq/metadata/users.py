"""Rules about users and permissions."""

from __future__ import annotations

from convoymq.metadata.commands import (
    DeletePermission,
    DeleteTopicPermission,
    DeleteUser,
    PutPermission,
    PutTopicPermission,
    PutUser,
)
from convoymq.metadata.records import PermissionSet, TopicPermission, User
from convoymq.metadata.tree import Tree


class Users:
    """Changes users, permissions and topic permissions."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def put(self, command: PutUser) -> bool:
        """Creates a user or replaces it."""
        created = command.name not in self._tree.users
        self._tree.users[command.name] = User(
            name=command.name,
            password_hash=command.password_hash,
            algorithm=command.algorithm,
            tags=command.tags,
        )
        self._tree.changed(True)
        return created

    def delete(self, command: DeleteUser) -> bool:
        """Deletes a user with its permissions."""
        if self._tree.users.pop(command.name, None) is None:
            return False
        for table in (self._tree.permissions, self._tree.topic_permissions):
            for key in [key for key in table if key[0] == command.name]:
                del table[key]
        self._tree.user_limits.pop(command.name, None)
        return self._tree.changed(True)

    def put_permission(self, command: PutPermission | PutTopicPermission) -> bool:
        """Sets the permissions, or those of one topic exchange. Raises NotFound."""
        self._tree.check_access(command.user, command.vhost)
        key = (command.user, command.vhost)
        if isinstance(command, PutPermission):
            created = key not in self._tree.permissions
            self._tree.permissions[key] = PermissionSet(
                configure=command.configure, write=command.write, read=command.read
            )
        else:
            rules = self._tree.topic_permissions.setdefault(key, {})
            created = command.exchange not in rules
            rules[command.exchange] = TopicPermission(write=command.write, read=command.read)
        self._tree.changed(True, command.vhost)
        return created

    def delete_permission(self, command: DeletePermission) -> bool:
        """Deletes the permissions in a virtual host."""
        gone = self._tree.permissions.pop((command.user, command.vhost), None)
        return self._tree.changed(gone is not None, command.vhost)

    def delete_topic_permission(self, command: DeleteTopicPermission) -> bool:
        """Deletes the rules of one topic exchange, or of all."""
        key = (command.user, command.vhost)
        rules = self._tree.topic_permissions.get(key)
        if rules is None:
            return False
        if command.exchange is None:
            del self._tree.topic_permissions[key]
            return self._tree.changed(True, command.vhost)
        gone = rules.pop(command.exchange, None) is not None
        if not rules:
            del self._tree.topic_permissions[key]
        return self._tree.changed(gone, command.vhost)
