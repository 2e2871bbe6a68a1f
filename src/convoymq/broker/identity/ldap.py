"""Users of a directory (LDAP): a bind proves the password, groups decide about rights.

The directory is asked at the log-in, in a thread, and again for the groups of users with open
connections when they are `max_age_s` old. While it does not answer, nobody logs in, and who is
connected keeps the rights that were read last.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

import ldap3
import structlog
from ldap3.core.exceptions import LDAPException, LDAPStartTLSError
from ldap3.utils.conv import escape_filter_chars
from ldap3.utils.dn import escape_rdn, parse_dn

from convoymq.broker.identity.backend import Backend, Identity, NotAdmitted
from convoymq.broker.identity.ldap_queries import Asked, Needs, filled, query, tag_queries
from convoymq.metadata.records import User
from convoymq.model.config import ConfigError, LdapConfig

log = structlog.get_logger()

T = TypeVar("T")
Scope: TypeAlias = Literal["BASE", "SUBTREE"]
GROUPS_MAX = 10_000
NESTING_MAX = 16
THREADS_MAX = 8
"""Questions to the directory at a time; others wait."""
_FULL = "the directory does not return all groups of the user"


@dataclass(slots=True)
class Membership:
    """Name and groups of a user in the directory."""

    dn: str
    groups: Mapping[tuple[str, bool], frozenset[str]]
    """(attribute that names members, through groups of groups) -> DNs, normalized."""
    read_at: float
    is_gone: bool = False


class LdapBackend(Backend):
    """See the module text. Raises ConfigError for queries and files that cannot be read."""

    name = "ldap"

    def __init__(self, config: LdapConfig, max_age_s: float) -> None:
        self._config = config
        self._max_age_s = max_age_s
        self._needs = Needs()
        self._queries = {
            each: self._parsed(each, query)
            for each in ("vhost_access", "resource_access", "topic_access")
        }
        self._tags = self._parsed("tags", tag_queries)
        if self._needs.attributes and not config.group_lookup_base:
            raise ConfigError("auth_ldap.group_lookup_base must be set: queries ask for groups")
        self._directory = _Directory(config, self._needs)
        self._places = asyncio.Semaphore(THREADS_MAX)

    def _parsed(self, name: str, parse: Callable[[str, Needs], T]) -> T:
        text: str = getattr(self._config, name)
        try:
            return parse(text, self._needs)
        except ValueError as error:
            raise ConfigError(f"auth_ldap.queries.{name} = {text}: {error}") from None

    async def log_in(self, name: str, password: bytes) -> User | None:
        # A directory takes an empty password for nobody's, and admits.
        if not name or not password:
            return None
        try:
            text = password.decode()
        except UnicodeDecodeError:
            return None
        return await self._user(name, lambda: self._directory.log_in(name, text))

    async def find(self, name: str) -> User | None:
        return await self._user(name, lambda: self._directory.find(name)) if name else None

    async def refresh(self, user: User) -> bool:
        rights = self._rights(user)
        if time.monotonic() - rights.read_at < self._max_age_s or not self._directory.may_look:
            return False
        try:
            found = await self._asked(lambda: self._directory.find(user.name))
        except NotAdmitted as error:
            # Asked again after the same time, with the rights that were read last.
            rights.read_at = time.monotonic()
            log.warning("identity.not_refreshed", backend=self.name, user=user.name,
                        reason=error.text)  # fmt: skip
            return False
        former = (rights.dn, rights.groups, rights.is_gone)
        rights.read_at = time.monotonic()
        rights.is_gone = found is None
        if found is not None:
            rights.dn, rights.groups = found.dn, found.groups
        return former != (rights.dn, rights.groups, rights.is_gone)

    def present(self, user: User) -> User | None:
        rights = self._rights(user)
        if rights.is_gone:
            return None
        tags = self._tags_of(user.name, rights)
        return user if tags == user.tags else replace(user, tags=tags)

    def opens(self, user: User, vhost: str) -> bool:
        return self._decided("vhost_access", user, vhost=vhost)

    def allows(self, user: User, vhost: str, permission: str, kind: str, name: str) -> bool:
        return self._decided(
            "resource_access", user, vhost=vhost, permission=permission, resource=kind, name=name
        )

    def has_topic_rules(self, user: User, vhost: str) -> bool:
        return self._config.topic_access != LdapConfig().topic_access

    def allows_key(self, user: User, vhost: str, permission: str, exchange: str, key: str) -> bool:
        return self._decided(
            "topic_access", user, vhost=vhost, permission=permission, resource="topic",
            name=exchange, routing_key=key,
        )  # fmt: skip

    # --- questions -----------------------------------------------------------------------------

    async def _user(self, name: str, ask: Callable[[], Membership | None]) -> User | None:
        found = await self._asked(ask)
        if found is None:
            return None
        return Identity(name=name, tags=self._tags_of(name, found), backend=self, rights=found)

    async def _asked(self, ask: Callable[[], Membership | None]) -> Membership | None:
        """Asks the directory in a thread. Raises NotAdmitted when it does not answer."""
        async with self._places:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, ask)
            except (LDAPException, OSError) as error:
                raise NotAdmitted(f"the directory does not answer: {error}") from None

    @staticmethod
    def _rights(user: User) -> Membership:
        assert isinstance(user, Identity)
        assert isinstance(user.rights, Membership)
        return user.rights

    def _decided(self, query: str, user: User, /, **facts: str) -> bool:
        rights = self._rights(user)
        return not rights.is_gone and self._queries[query](_asked(user.name, rights, facts))

    def _tags_of(self, name: str, rights: Membership) -> tuple[str, ...]:
        asked = _asked(name, rights, {})
        return tuple(tag for tag, decide in self._tags if decide(asked))


def _asked(name: str, rights: Membership, facts: Mapping[str, str]) -> Asked:
    def is_member(group: str, attribute: str, nested: bool) -> bool:
        return _normalized(group) in rights.groups.get((attribute, nested), ())

    return Asked({"username": name, "user_dn": rights.dn, **facts}, is_member, escape_rdn)


def _normalized(dn: str) -> str:
    """Returns a DN in a form that can be compared; one that is none stays as it is."""
    try:
        parts = parse_dn(dn)
    except LDAPException:
        return dn
    return ",".join(f"{name.strip()}={value.strip()}" for name, value, _ in parts).lower()


@contextlib.contextmanager
def _closing(connection: ldap3.Connection) -> Iterator[ldap3.Connection]:
    """Closes a connection; as its own context it would stay as it was before."""
    try:
        yield connection
    finally:
        with contextlib.suppress(LDAPException):
            connection.unbind()


class _Tls(ldap3.Tls):
    """TLS by a context of Python's, which looks at the name in the certificate as well. ldap3 does
    that itself, after the handshake, and leaves the socket open when the name is a wrong one."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context

    def wrap_socket(self, connection: ldap3.Connection, do_handshake: bool = False) -> None:
        """Replaces the connection's socket by one with TLS. Raises OSError."""
        connection.socket = self._context.wrap_socket(
            connection.socket,
            do_handshake_on_connect=do_handshake,
            server_hostname=connection.server.host,
        )


class _Directory:
    """Requests to the directory, which wait for its answers: called in threads."""

    def __init__(self, config: LdapConfig, needs: Needs) -> None:
        self._config = config
        self._needs = needs
        self._timeout_s = config.timeout_ms / 1000
        self._tls = None
        if config.use_ssl or config.use_starttls:
            try:
                context = ssl.create_default_context(cafile=config.cacertfile or None)
            except OSError as error:
                raise ConfigError(
                    f"auth_ldap.ssl_options.cacertfile = {config.cacertfile}: {error}"
                ) from None
            if config.verify != "verify_peer":
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._tls = _Tls(context)
        self.may_look = bool(config.other_bind_user) or config.other_bind == "anon"
        """True if users can be read without their passwords."""

    def log_in(self, name: str, password: str) -> Membership | None:
        """Returns what the directory says of a user; None when the password is wrong."""
        config, facts = self._config, {"username": name}
        dn = filled(config.user_dn_pattern, facts, escape_rdn)
        by_user = config.dn_lookup_bind == "as_user" and not config.dn_lookup_bind_user
        if config.dn_lookup_attribute and not by_user:
            found = self._look_up(name)
            if found is None:
                return None
            dn = found
        login = filled(config.user_bind_pattern, facts | {"user_dn": dn}, escape_rdn) or dn
        own = self._bound(login, password)
        if own is None:
            return None
        with _closing(own):
            if config.dn_lookup_attribute and by_user:
                found = self._search_user(own, name)
                if found is None:
                    return None
                dn = found
            if not self.may_look:
                return self._membership(own, dn)
        return self._read_groups(dn)

    def find(self, name: str) -> Membership | None:
        """Returns what the directory says of a user without its password; None when there is no
        such user, or users must read their own."""
        if not self.may_look:
            return None
        config = self._config
        if config.dn_lookup_attribute:
            dn = self._look_up(name)
        else:
            dn = filled(config.user_dn_pattern, {"username": name}, escape_rdn)
            with _closing(self._other()) as connection:
                if not self._search(connection, dn, "(objectClass=*)", ldap3.BASE):
                    dn = None
        return None if dn is None else self._read_groups(dn)

    def _look_up(self, name: str) -> str | None:
        config = self._config
        user, password = config.dn_lookup_bind_user, config.dn_lookup_bind_password
        if not user and config.dn_lookup_bind == "as_user":
            user, password = config.other_bind_user, config.other_bind_password
        bound = self._required(user, password, "auth_ldap.dn_lookup_bind")
        with _closing(bound) as connection:
            return self._search_user(connection, name)

    def _search_user(self, connection: ldap3.Connection, name: str) -> str | None:
        config = self._config
        wanted = f"({config.dn_lookup_attribute}={escape_filter_chars(name)})"
        found = self._search(connection, config.dn_lookup_base, wanted, ldap3.SUBTREE)
        return found[0] if len(found) == 1 else None

    def _read_groups(self, dn: str) -> Membership:
        with _closing(self._other()) as connection:
            return self._membership(connection, dn)

    def _membership(self, connection: ldap3.Connection, dn: str) -> Membership:
        groups: dict[tuple[str, bool], frozenset[str]] = {}
        for attribute in self._needs.attributes:
            direct = self._groups(connection, attribute, [dn])
            groups[attribute, False] = frozenset(map(_normalized, direct))
            if self._needs.nested:
                groups[attribute, True] = self._nested(connection, attribute, direct)
        return Membership(dn, groups, time.monotonic())

    def _nested(
        self, connection: ldap3.Connection, attribute: str, direct: list[str]
    ) -> frozenset[str]:
        """Returns groups with the groups that they are members of."""
        found, fresh = {_normalized(dn) for dn in direct}, direct
        for _ in range(NESTING_MAX):
            if not fresh:
                break
            outer = self._groups(connection, attribute, fresh)
            fresh = [dn for dn in outer if _normalized(dn) not in found]
            found.update(map(_normalized, fresh))
        return frozenset(found)

    def _groups(
        self, connection: ldap3.Connection, attribute: str, members: Iterable[str]
    ) -> list[str]:
        parts = "".join(f"({attribute}={escape_filter_chars(dn)})" for dn in members)
        base = self._config.group_lookup_base
        found = self._search(connection, base, f"(|{parts})", ldap3.SUBTREE)
        if len(found) > GROUPS_MAX:
            raise NotAdmitted(_FULL)
        return found

    def _search(
        self, connection: ldap3.Connection, base: str, wanted: str, scope: Scope
    ) -> list[str]:
        """Returns the DNs of what is found. Raises NotAdmitted when that is not all."""
        connection.search(base, wanted, scope, attributes=ldap3.NO_ATTRIBUTES)
        result = connection.result["description"]
        if result == "sizeLimitExceeded":
            raise NotAdmitted(_FULL)
        if result not in ("success", "noSuchObject"):
            raise NotAdmitted(f"the directory refuses to search {base}: {result}")
        entries = connection.response or ()
        return [each["dn"] for each in entries if each["type"] == "searchResEntry"]

    def _other(self) -> ldap3.Connection:
        config = self._config
        return self._required(
            config.other_bind_user, config.other_bind_password, "auth_ldap.other_bind"
        )

    def _required(self, user: str, password: str, key: str) -> ldap3.Connection:
        connection = self._bound(user, password)
        if connection is None:
            raise NotAdmitted(f"the directory refuses {key}")
        return connection

    def _bound(self, user: str, password: str) -> ldap3.Connection | None:
        """Returns a connection that is bound, anonymously without a user; None when the directory
        refuses. Raises LDAPException when no server answers."""
        failed: LDAPException | None = None
        for host in self._config.servers:
            connection = self._connection(host, user, password)
            try:
                if self._config.use_starttls:
                    connection.open()
                    if not connection.start_tls():
                        raise LDAPStartTLSError("the directory does not begin TLS")
                if connection.bind():
                    return connection
                connection.unbind()
                return None
            except LDAPException as error:
                failed = error
                with contextlib.suppress(LDAPException):
                    connection.unbind()
        assert failed is not None
        raise failed

    def _connection(self, host: str, user: str, password: str) -> ldap3.Connection:
        # A server of its own, because one remembers that it did not answer.
        server = ldap3.Server(
            host, port=self._config.port, use_ssl=self._config.use_ssl, tls=self._tls,
            get_info=ldap3.NONE, connect_timeout=self._timeout_s,
        )  # fmt: skip
        return ldap3.Connection(
            server, user or None, password or None,
            authentication=ldap3.SIMPLE if user else ldap3.ANONYMOUS,
            receive_timeout=math.ceil(self._timeout_s), auto_referrals=False,
        )  # fmt: skip
