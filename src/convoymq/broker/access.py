"""Access control: logins, virtual hosts, permissions."""

from __future__ import annotations

import asyncio
from collections import Counter

from convoymq.broker.registry import ConnectionRegistry, Counters
from convoymq.metadata import access
from convoymq.metadata.machine import MetadataMachine, User
from convoymq.model.config import DefaultsConfig
from convoymq.model.late_imports import import_late
from convoymq.model.refusals import (
    exchange_subject,
    login_refused,
    permission_missing,
    queue_subject,
    topic_permission_missing,
    vhost_missing,
    vhost_refused,
)
from convoymq.routing.types import ExchangeType

AMQP = "amqp091"
AMQP_10 = "amqp10"
HTTP = "http"
COLUMNAR = "columnar"
"""Names of the protocols in `Access.logins`, and in `Counters.of`."""

OPERATOR = User(name="", tags=("administrator", "impersonator"))
"""User of requests through a node's administration socket and of the cluster's own connections: an
administrator without a user of the broker, whose permissions are not checked. Known by identity:
no name stands for it."""


class Access:
    """Answers from this node's copy of the tree."""

    def __init__(
        self,
        tree: MetadataMachine,
        settings: DefaultsConfig,
        connections: ConnectionRegistry,
        counters: Counters,
    ) -> None:
        self._tree = tree
        self._settings = settings
        self._connections = connections
        self._counters = counters
        self.logins: Counter[tuple[str, bool]] = Counter()
        """(protocol, let in) -> attempts since the node started, or somebody set them to none."""

    async def authenticate(
        self,
        user: str,
        password: bytes,
        peer_host: str,
        mechanism: str = "PLAIN",
        *,
        protocol: str = AMQP,
    ) -> User:
        """Returns the user when the password is right. Raises AccessRefused."""
        self._counters.auth_attempts += 1
        known = self._tree.users.get(user)
        good = False
        if known is not None and self._may_come_from(user, peer_host):
            if known.algorithm == access.ARGON2:
                good = await asyncio.get_running_loop().run_in_executor(
                    None, access.verify, password, known.password_hash, known.algorithm
                )
            else:
                good = access.verify(password, known.password_hash, known.algorithm)
        self.logins[protocol, good] += 1
        if not good or known is None:
            self._counters.auth_failed += 1
            raise login_refused(mechanism)
        self._counters.auth_succeeded += 1
        return known

    def external_user(self, name: str, *, protocol: str = AMQP) -> User:
        """Returns a user whose identity a certificate proved. Raises AccessRefused."""
        self._counters.auth_attempts += 1
        known = self._tree.users.get(name)
        self.logins[protocol, known is not None] += 1
        if known is None:
            self._counters.auth_failed += 1
            raise login_refused("EXTERNAL")
        self._counters.auth_succeeded += 1
        return known

    def _may_come_from(self, user: str, peer_host: str) -> bool:
        if user not in self._settings.loopback_users:
            return True
        import_late("ipaddress")
        import ipaddress

        try:
            address = ipaddress.ip_address(peer_host.split("%")[0])
        except ValueError:
            # A Unix socket or a name: only local peers have no address.
            return peer_host in ("", "localhost")
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def open_vhost(self, user: User, vhost: str) -> None:
        """Admits a connection to a virtual host. Raises NotAllowed."""
        if vhost not in self._tree.vhosts:
            raise vhost_missing(vhost)
        if user is not OPERATOR and (user.name, vhost) not in self._tree.permissions:
            raise vhost_refused(vhost, user.name)

    def check_permission(
        self, user: User, vhost: str, permission: str, kind: str, name: str
    ) -> None:
        """Raises AccessRefused unless the user may configure, write or read it."""
        if user is OPERATOR:
            return
        rules = self._tree.permissions.get((user.name, vhost))
        if kind == "exchange":
            name = name or access.DEFAULT_EXCHANGE_ALIAS
        if rules is not None:
            pattern = getattr(rules, permission)
            if access.allows(pattern, name):
                return
        subject = (exchange_subject if kind == "exchange" else queue_subject)(vhost, name)
        raise permission_missing(permission, subject, user.name)

    def has_topic_permissions(self, user: User, vhost: str) -> bool:
        """Returns whether `check_topic_permission` can refuse anything."""
        return (user.name, vhost) in self._tree.topic_permissions

    def check_topic_permission(
        self, user: User, vhost: str, permission: str, exchange: str, routing_key: str
    ) -> None:
        """Raises AccessRefused when a rule for this topic exchange does not cover the key."""
        rules = self._tree.topic_permissions.get((user.name, vhost))
        rule = rules.get(exchange) if rules else None
        if rule is None:
            return
        place = self._tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        if place.topology.exchange(exchange).rule is not ExchangeType.TOPIC:
            return
        pattern = rule.write if permission == "write" else rule.read
        if not access.topic_allows(pattern, routing_key, user=user.name, vhost=vhost):
            subject = exchange_subject(vhost, exchange)
            raise topic_permission_missing(permission, routing_key, subject, user.name)

    def close_revoked_connections(self) -> None:
        """Closes the connections whose virtual host or user is gone."""
        for connection in self._connections.all():
            user = connection.user.name
            if connection.vhost not in self._tree.vhosts:
                connection.close(f"vhost '{connection.vhost}' is deleted")
            elif connection.user is not OPERATOR and user not in self._tree.users:
                connection.close(f"user '{user}' is deleted")
