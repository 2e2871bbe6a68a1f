"""The chain of backends: asked in order, the first that admits a client decides what it may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from convoymq.broker.identity.backend import Backend, NotAdmitted
from convoymq.broker.identity.cached import CachedBackend
from convoymq.broker.identity.internal import InternalBackend
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.records import User
from convoymq.model.config import ConfigError, IdentityConfig

log = structlog.get_logger()


class Chain:
    """The backends of a node.

    Args:
        links: (who knows the user, who knows what it may).
    """

    def __init__(self, internal: Backend, links: Sequence[tuple[Backend, Backend]]) -> None:
        self.internal = internal
        self._links = links
        self.is_internal = all(each is internal for link in links for each in link)
        """No user has credentials that expire, or rights that are read elsewhere."""

    async def log_in(self, name: str, password: bytes) -> User | None:
        """Returns the user whose password or token it is; None when nobody admits it."""
        return await self._first(name, lambda backend: backend.log_in(name, password))

    async def find(self, name: str) -> User | None:
        """Returns a user for whom a certificate vouches; None when nobody knows it."""
        return await self._first(name, lambda backend: backend.find(name))

    async def _first(
        self, name: str, ask: Callable[[Backend], Awaitable[User | None]]
    ) -> User | None:
        for login, rights in self._links:
            try:
                user = await ask(login)
                if user is not None and rights is not login:
                    user = await rights.find(user.name)
                if user is not None:
                    return user
            except NotAdmitted as error:
                log.warning(
                    "identity.refused", backend=login.name, user=name[:255], reason=error.text
                )
        return None


def make_chain(tree: MetadataMachine, config: IdentityConfig) -> Chain:
    """Returns the chain that a configuration describes. Raises ConfigError when a library lacks."""
    internal = InternalBackend(tree)
    made: dict[str, Backend] = {internal.name: internal}

    def backend(name: str) -> Backend:
        if name not in made:
            made[name] = _make(name, config, backend)
        return made[name]

    links = [(backend(link.login), backend(link.rights)) for link in config.auth.chain()]
    return Chain(internal, links)


def _make(name: str, config: IdentityConfig, backend: Callable[[str], Backend]) -> Backend:
    auth = config.auth
    try:
        match name:
            case "oauth2":
                from convoymq.broker.identity.oauth2 import OAuthBackend
                from convoymq.broker.identity.provider_keys import ProviderKeys

                return OAuthBackend(config.oauth2, ProviderKeys(config.oauth2))
            case "ldap":
                from convoymq.broker.identity.ldap import LdapBackend

                return LdapBackend(config.ldap, max_age_s=auth.cache_ttl_ms / 1000)
            case _:
                ttl_s = auth.cache_ttl_ms / 1000
                return CachedBackend(backend(auth.cached), ttl_s, refusals=auth.cache_refusals)
    except ImportError as error:
        extra = name.rstrip("2")
        raise ConfigError(
            f"auth_backends: {name} needs {error.name}: pip install 'convoymq[{extra}]'"
        ) from None
