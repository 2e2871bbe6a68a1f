"""Users of the cluster: this node's copy of the tree decides."""

from __future__ import annotations

import asyncio

from convoymq.broker.identity.backend import Backend
from convoymq.metadata import access
from convoymq.metadata.machine import MetadataMachine, User


class InternalBackend(Backend):
    """See the module text."""

    name = "internal"

    def __init__(self, tree: MetadataMachine) -> None:
        self._tree = tree

    async def log_in(self, name: str, password: bytes) -> User | None:
        known = self._tree.users.get(name)
        if known is None:
            return None
        stored = (password, known.password_hash, known.algorithm)
        if known.algorithm == access.ARGON2:
            loop = asyncio.get_running_loop()
            good = await loop.run_in_executor(None, access.verify, *stored)
        else:
            good = access.verify(*stored)
        return known if good else None

    async def find(self, name: str) -> User | None:
        return self._tree.users.get(name)

    def present(self, user: User) -> User | None:
        return self._tree.users.get(user.name)

    def opens(self, user: User, vhost: str) -> bool:
        return (user.name, vhost) in self._tree.permissions

    def allows(self, user: User, vhost: str, permission: str, kind: str, name: str) -> bool:
        rules = self._tree.permissions.get((user.name, vhost))
        return rules is not None and access.allows(getattr(rules, permission), name)

    def has_topic_rules(self, user: User, vhost: str) -> bool:
        return (user.name, vhost) in self._tree.topic_permissions

    def allows_key(self, user: User, vhost: str, permission: str, exchange: str, key: str) -> bool:
        rules = self._tree.topic_permissions.get((user.name, vhost))
        rule = rules.get(exchange) if rules else None
        if rule is None:
            return True
        pattern = rule.write if permission == "write" else rule.read
        return access.topic_allows(pattern, key, user=user.name, vhost=vhost)
