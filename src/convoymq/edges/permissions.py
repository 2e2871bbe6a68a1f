"""Permissions of a connection's user: looked up once, and again when the tree changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.broker.records import User

DEFAULT_EXCHANGE_RESOURCE = "amq.default"
GRANTED_MAX = 4096
"""Permissions that one object remembers."""


class Asking(Protocol):
    """A connection, whose user and virtual host may not be known yet."""

    broker: Broker
    user: User
    vhost: str


class Permissions:
    """The permissions that were granted to a connection, or to one channel of it."""

    def __init__(self, connection: Asking) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._granted: set[tuple[str, str, str]] = set()
        self._version = 0

    def check(self, permission: str, kind: str, name: str) -> None:
        """Raises AccessRefused unless the user may; what was granted is remembered for a while."""
        value = self._broker.route_versions.of(self._connection.vhost).value
        if value != self._version:
            self._version = value
            self._granted.clear()
        key = (permission, kind, name)
        if key in self._granted:
            return
        if kind == "exchange" and not name:
            name = DEFAULT_EXCHANGE_RESOURCE
        connection = self._connection
        self._broker.access.check_permission(
            connection.user, connection.vhost, permission, kind, name
        )
        if len(self._granted) >= GRANTED_MAX:
            self._granted.clear()
        self._granted.add(key)

    def check_topic(self, permission: str, exchange: str, routing_key: str) -> None:
        """Raises AccessRefused unless the user may, where there are topic permissions."""
        connection = self._connection
        if self._broker.access.has_topic_permissions(connection.user, connection.vhost):
            self._broker.access.check_topic_permission(
                connection.user, connection.vhost, permission, exchange, routing_key
            )

    def depend_on_keys(self) -> bool:
        """Returns whether the user may use some routing keys and not others."""
        connection = self._connection
        return bool(self._broker.access.has_topic_permissions(connection.user, connection.vhost))

    def forget(self) -> None:
        """Asks for every permission again."""
        self._granted.clear()
