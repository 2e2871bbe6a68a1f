"""Rules about policies, operator policies and limits."""

from __future__ import annotations

from convoymq.metadata.commands import DeletePolicy, PutPolicy, PutUserLimit, PutVhostLimit
from convoymq.metadata.records import Change, ChangeKind
from convoymq.metadata.tree import Tree
from convoymq.model.errors import NotFound
from convoymq.routing.policies import Policy


class PolicyRules:
    """Changes policies and limits."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def put(self, command: PutPolicy) -> bool:
        """Sets a policy; whether it is new. Raises NotFound."""
        policy = Policy(
            name=command.name,
            pattern=command.pattern,
            definition=dict(sorted(command.definition.items())),
            apply_to=command.apply_to,
            priority=command.priority,
        )
        policies = self._tree.vhost(command.vhost).policies
        created = policies.put(policy, operator=command.operator)
        self._tree.note(Change(ChangeKind.POLICIES, vhost=command.vhost))
        return created

    def delete(self, command: DeletePolicy) -> bool:
        """Removes a policy. Raises NotFound."""
        policies = self._tree.vhost(command.vhost).policies
        gone = policies.delete(command.name, operator=command.operator)
        if gone:
            self._tree.note(Change(ChangeKind.POLICIES, vhost=command.vhost))
        return gone

    def put_vhost_limit(self, command: PutVhostLimit) -> bool:
        """Sets or removes a limit; False when there was none to remove. Raises NotFound."""
        limits = self._tree.vhost(command.vhost).limits
        if command.value is None:
            return self._tree.changed(limits.pop(command.name, None) is not None, command.vhost)
        limits[command.name] = command.value
        return self._tree.changed(True, command.vhost)

    def put_user_limit(self, command: PutUserLimit) -> bool:
        """Sets or removes a limit; False when there was none to remove. Raises NotFound."""
        if command.user not in self._tree.users:
            raise NotFound(f"user '{command.user}' not found")
        limits = self._tree.user_limits.setdefault(command.user, {})
        if command.value is not None:
            limits[command.name] = command.value
            return self._tree.changed(True)
        gone = limits.pop(command.name, None) is not None
        if not limits:
            del self._tree.user_limits[command.user]
        return self._tree.changed(gone)
