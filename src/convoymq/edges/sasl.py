"""Log-in of clients, for every protocol: SASL mechanisms, passwords, certificates. Sans IO but for
the question to the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from convoymq.edges.certificate_users import certificate_user
from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_words
from convoymq.model.errors import CommandFault, SyntaxFault

if TYPE_CHECKING:
    from convoymq.broker.access import Access
    from convoymq.broker.records import User
    from convoymq.edges.edge import Incoming

EXTERNAL = "EXTERNAL"


class _Inside(str):
    """Type of `INSIDE`, which is known by its identity."""

    __slots__ = ()


INSIDE = _Inside()
"""Name in the certificate, so to speak, of a connection that the node made to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginConfig(Section):
    """Log-in of clients."""

    NAME: ClassVar[str] = "login"
    mechanisms: tuple[str, ...] = key(
        "auth_mechanisms", ("PLAIN", "AMQPLAIN", "ANONYMOUS"),
        """SASL mechanisms offered to clients: `PLAIN`, `AMQPLAIN`, `ANONYMOUS` (as guest, from
        where guest may come), `EXTERNAL` (by TLS certificate, on connections that have one).
        `auth_mechanisms.N` for single ones.""",
        parse=parse_words, collects="auth_mechanisms.",
    )  # fmt: skip
    cert_login_from: str = key(
        "ssl_cert_login_from",
        "distinguished_name",
        "Which part of a client's certificate is its user name for `EXTERNAL`.",
        choices=("distinguished_name", "common_name", "subject_alternative_name"),
    )
    cert_login_san_type: str = key(
        "ssl_cert_login_san_type",
        "dns",
        "With `subject_alternative_name`: which kind of names counts.",
        choices=("dns", "ip", "email", "uri"),
    )
    cert_login_san_index: int = key(
        "ssl_cert_login_san_index", 0,
        "Which of the names of that kind is the user's, counted from 0.",
        low=0, high=100,
    )  # fmt: skip
    anonymous_user: str = "guest"
    """User of ANONYMOUS; loopback rules apply."""
    anonymous_password: str = "guest"
    failed_login_delay_s: float = 3.0
    """Silence after a refused log-in, which slows guessing down."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Name and password that a client presents. `password` None: the name is vouched for by a
    certificate."""

    user: str
    password: bytes | None


Reader = Callable[[bytes], Credentials]
"""Reads the response of a SASL mechanism. Raises SyntaxFault."""


class Login:
    """Log-in of one protocol's clients.

    Args:
        protocol: its name in `Access.logins`.
        readers: mechanisms that only this protocol has.
    """

    def __init__(
        self,
        access: Access,
        config: LoginConfig,
        protocol: str,
        readers: Mapping[str, Reader] | None = None,
    ) -> None:
        self.config = config
        self._access = access
        self._protocol = protocol
        anonymous = Credentials(config.anonymous_user, config.anonymous_password.encode())
        self._readers: dict[str, Reader] = {
            "PLAIN": plain,
            "ANONYMOUS": lambda _response: anonymous,
            **(readers or {}),
        }

    def user_of(self, incoming: Incoming) -> str | None:
        """Returns the user that a connection's verified certificate stands for."""
        if incoming.inside:
            return INSIDE
        certificate = incoming.certificate
        if not certificate:
            return None
        config = self.config
        return certificate_user(
            certificate,
            config.cert_login_from,
            config.cert_login_san_type,
            config.cert_login_san_index,
        )

    def mechanisms(self, certificate_name: str | None) -> tuple[str, ...]:
        """Returns the mechanisms that are offered to a connection, in the configured order."""
        if certificate_name is INSIDE:
            return EXTERNAL, "PLAIN"
        served = {*self._readers, *((EXTERNAL,) if certificate_name is not None else ())}
        return tuple(name for name in self.config.mechanisms if name in served)

    def credentials(
        self, mechanism: str, response: bytes, certificate_name: str | None
    ) -> Credentials:
        """Reads a client's SASL response.

        Raises:
            CommandFault: the mechanism was not offered.
            SyntaxFault: the response is not what the mechanism asks for.
        """
        if mechanism not in self.mechanisms(certificate_name):
            raise CommandFault(f"unknown authentication mechanism '{mechanism}'")
        if mechanism == EXTERNAL:
            assert certificate_name is not None
            return Credentials(certificate_name, None)
        return self._readers[mechanism](response)

    async def user(self, credentials: Credentials, peer_host: str) -> User:
        """Returns the user whose credentials they are. Raises AccessRefused."""
        if credentials.user is INSIDE:
            return self._access.operator
        if credentials.password is None:
            return await self._access.external_user(credentials.user, protocol=self._protocol)
        return await self._access.authenticate(
            credentials.user, credentials.password, peer_host, protocol=self._protocol
        )

    async def renew(self, user: User, secret: bytes) -> User:
        """Returns a user with the rights of a new secret, as soon as it opens the virtual host.
        Raises NotAllowed."""
        return await self._access.renew(user, secret)


def plain(response: bytes) -> Credentials:
    """Reads the response of PLAIN (RFC 4616). Raises SyntaxFault."""
    parts = response.split(b"\x00")
    if len(parts) != 3:
        raise SyntaxFault("PLAIN response is not authzid NUL user NUL password")
    return Credentials(user_name(parts[1]), parts[2])


def user_name(data: bytes) -> str:
    """Returns a user's name as text. Raises SyntaxFault."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SyntaxFault("user name is not UTF-8") from error
