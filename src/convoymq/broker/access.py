"""Access control: logins, virtual hosts, permissions."""

from __future__ import annotations

import time
from collections import Counter

import structlog

from convoymq.broker.identity.backend import Backend, Identity, NotAdmitted
from convoymq.broker.identity.chain import Chain
from convoymq.broker.registry import ConnectionHandle, ConnectionRegistry, Counters
from convoymq.metadata import access
from convoymq.metadata.machine import MetadataMachine, User
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import NotAllowed
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
from convoymq.model.tasks import Tasks
from convoymq.routing.types import ExchangeType

log = structlog.get_logger()

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
    """Answers from this node's copy of the tree, and from the backends of users."""

    operator = OPERATOR
    """User of connections that the node made to itself."""

    def __init__(
        self,
        tree: MetadataMachine,
        settings: DefaultsConfig,
        connections: ConnectionRegistry,
        counters: Counters,
        chain: Chain,
        tasks: Tasks,
    ) -> None:
        self._tree = tree
        self._settings = settings
        self._connections = connections
        self._counters = counters
        self._chain = chain
        self._tasks = tasks
        self._refreshing = False
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
        known = await self._chain.log_in(user, password)
        if known is not None and not self._may_come_from(known.name, peer_host):
            known = None
        return self._counted(known, mechanism, protocol)

    async def external_user(self, name: str, *, protocol: str = AMQP) -> User:
        """Returns a user whose identity a certificate proved. Raises AccessRefused."""
        return self._counted(await self._chain.find(name), "EXTERNAL", protocol)

    def _counted(self, user: User | None, mechanism: str, protocol: str) -> User:
        self._counters.auth_attempts += 1
        self.logins[protocol, user is not None] += 1
        if user is None:
            self._counters.auth_failed += 1
            raise login_refused(mechanism)
        self._counters.auth_succeeded += 1
        return user

    async def renew(self, user: User, secret: bytes) -> User:
        """Returns a user with the rights of a new secret. Raises NotAllowed."""
        try:
            return await self._backend(user).renew(user, secret)
        except NotAdmitted as error:
            log.warning("identity.refused", backend=self._backend(user).name, user=user.name,
                        reason=error.text)  # fmt: skip
            raise NotAllowed("New secret was refused by one of the backends") from None

    def present(self, user: User) -> User | None:
        """Returns a user who has logged in as it is now; None when it is no longer admitted."""
        return self._backend(user).present(user)

    def _backend(self, user: User) -> Backend:
        return user.backend if isinstance(user, Identity) else self._chain.internal

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
        if user is not OPERATOR and not self._backend(user).opens(user, vhost):
            raise vhost_refused(vhost, user.name)

    def vhosts_of(self, user: User) -> set[str]:
        """Returns the virtual hosts that a user may open."""
        backend = self._backend(user)
        return {vhost for vhost in self._tree.vhosts if backend.opens(user, vhost)}

    def check_permission(
        self, user: User, vhost: str, permission: str, kind: str, name: str
    ) -> None:
        """Raises AccessRefused unless the user may configure, write or read it."""
        if user is OPERATOR:
            return
        if kind == "exchange":
            name = name or access.DEFAULT_EXCHANGE_ALIAS
        if not self._backend(user).allows(user, vhost, permission, kind, name):
            subject = (exchange_subject if kind == "exchange" else queue_subject)(vhost, name)
            raise permission_missing(permission, subject, user.name)

    def has_topic_permissions(self, user: User, vhost: str) -> bool:
        """Returns whether `check_topic_permission` can refuse anything."""
        return self._backend(user).has_topic_rules(user, vhost)

    def check_topic_permission(
        self, user: User, vhost: str, permission: str, exchange: str, routing_key: str
    ) -> None:
        """Raises AccessRefused when a rule for this topic exchange does not cover the key."""
        backend = self._backend(user)
        if backend.allows_key(user, vhost, permission, exchange, routing_key):
            return
        place = self._tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        if place.topology.exchange(exchange).rule is ExchangeType.TOPIC:
            subject = exchange_subject(vhost, exchange)
            raise topic_permission_missing(permission, routing_key, subject, user.name)

    # --- what changes while connections are open ------------------------------------------------

    def tick(self) -> None:
        """Closes the connections of users whose credentials have expired, and begins to read
        rights that are old again."""
        if self._chain.is_internal:
            return
        if not self._refreshing:
            self._refreshing = True
            self._tasks.spawn(self._refresh())
        now_s = time.time()
        for connection in self._connections.all():
            user = connection.user
            ends_s = user.expires_s if isinstance(user, Identity) else None
            if ends_s is not None and ends_s <= now_s:
                log.warning("identity.expired", connection=connection.name, user=user.name)
                connection.expire()

    async def _refresh(self) -> None:
        try:
            users = {id(found.user): found.user for found in self._connections.all()}
            for user in users.values():
                if await self._backend(user).refresh(user):
                    for connection in self._connections.all():
                        if connection.user is user:
                            self._follow_rights(connection)
        finally:
            self._refreshing = False

    def _follow_rights(self, connection: ConnectionHandle) -> None:
        """Lets a connection ask for its permissions again, unless its user is gone."""
        if self.present(connection.user) is None:
            connection.close(f"user '{connection.user.name}' is deleted")
        elif not self._backend(connection.user).opens(connection.user, connection.vhost):
            connection.close(vhost_refused(connection.vhost, connection.user.name).text)
        else:
            connection.check_access()

    def close_revoked_connections(self) -> None:
        """Closes the connections whose virtual host or user is gone."""
        for connection in self._connections.all():
            user = connection.user.name
            if connection.vhost not in self._tree.vhosts:
                connection.close(f"vhost '{connection.vhost}' is deleted")
            elif connection.user is not OPERATOR and self.present(connection.user) is None:
                connection.close(f"user '{user}' is deleted")
