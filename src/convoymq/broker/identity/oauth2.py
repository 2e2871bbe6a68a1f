"""Users with tokens of OAuth 2: signed JSON (JWT) whose claims name user and rights.

The token is the password, whatever the user name. Its rights last as long as itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.broker.identity.backend import Backend, Identity, NotAdmitted
from convoymq.broker.identity.provider_keys import ProviderKeys
from convoymq.broker.identity.scopes import Rights, TooManyScopes, scopes_of, tags_of
from convoymq.metadata.records import User
from convoymq.model.config import OAuthConfig

if TYPE_CHECKING:
    from jwt import PyJWK

TOKEN_BYTES_MAX = 64 << 10
SKEW_S = 60
"""Seconds that the provider's clock may be ahead, when a token counts from some time on (`nbf`)."""
_FITTING = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
    "oct": ("HS256", "HS384", "HS512"),
}
"""Type of a key -> algorithms. A token's header never chooses more than among these: a public key
is no secret of HS256."""
NAMELESS = "unknown"
"""Name of a user whose token has none of the claims."""


def _found(name: str, key: PyJWK | None) -> PyJWK:
    """Raises NotAdmitted when there is no key."""
    if key is not None:
        return key
    if name:
        raise NotAdmitted(f"the key {name[:64]!r} of the token is not known")
    raise NotAdmitted("the token names no key, and there is not one key only")


class OAuthBackend(Backend):
    """See the module text."""

    name = "oauth2"

    def __init__(self, config: OAuthConfig, keys: ProviderKeys) -> None:
        self._config = config
        self._keys = keys
        self._aliases = config.aliases()

    async def log_in(self, name: str, password: bytes) -> User | None:
        if password.count(b".") != 2 or not password.startswith(b"ey"):
            # No token, so a password for another backend.
            return None
        return self._user(await self._claims(password))

    async def renew(self, user: User, secret: bytes) -> User:
        renewed = self._user(await self._claims(secret))
        if renewed.name != user.name:
            raise NotAdmitted("Not allowed to change username on refreshed token")
        return renewed

    def present(self, user: User) -> User | None:
        return user if self._lasts(user) else None

    def opens(self, user: User, vhost: str) -> bool:
        return self._lasts(user) and self._rights(user).opens(vhost)

    def allows(self, user: User, vhost: str, permission: str, kind: str, name: str) -> bool:
        return self._lasts(user) and self._rights(user).allows(vhost, permission, name)

    def has_topic_rules(self, user: User, vhost: str) -> bool:
        return True

    def allows_key(self, user: User, vhost: str, permission: str, exchange: str, key: str) -> bool:
        return self._rights(user).allows_key(vhost, permission, exchange, key)

    @staticmethod
    def _lasts(user: User) -> bool:
        assert isinstance(user, Identity)
        return user.expires_s is None or time.time() < user.expires_s

    @staticmethod
    def _rights(user: User) -> Rights:
        assert isinstance(user, Identity)
        assert isinstance(user.rights, Rights)
        return user.rights

    async def _claims(self, token: bytes) -> Mapping[str, object]:
        """Returns what a token says, once its signature and claims are verified. Raises
        NotAdmitted."""
        import jwt

        if len(token) > TOKEN_BYTES_MAX:
            raise NotAdmitted(f"the token has {len(token)} bytes; at most {TOKEN_BYTES_MAX}")
        try:
            name = self._key_name(jwt.get_unverified_header(token))
            key = _found(name, await self._keys.find(name))
            try:
                return self._verified(token, key)
            except jwt.exceptions.InvalidSignatureError:
                if name:
                    raise
                # The only key of the provider may be another one by now.
                key = _found(name, await self._keys.find_new(name))
                return self._verified(token, key)
        except (jwt.exceptions.PyJWTError, ValueError, OverflowError) as error:
            raise NotAdmitted(f"the token is not valid: {error}") from None

    def _key_name(self, header: Mapping[str, object]) -> str:
        name = header.get("kid", self._config.default_key)
        if not isinstance(name, str):
            raise NotAdmitted("the name of the token's key is no text")
        return name

    def _verified(self, token: bytes, key: PyJWK) -> Mapping[str, object]:
        import jwt

        config = self._config
        fitting = _FITTING.get(key.key_type or "", ())
        wanted = config.algorithms or [each for each in fitting if not each.startswith("HS")]
        claims: dict[str, object] = jwt.decode(
            token,
            key.key,
            algorithms=[each for each in wanted if each in fitting],
            options={
                "require": ["exp"] if config.require_exp else [],
                "verify_aud": False, "verify_iat": False, "verify_exp": True, "verify_nbf": False,
                "verify_sub": False, "verify_jti": False,
            },
        )  # fmt: skip
        self._check(claims)
        return claims

    def _check(self, claims: Mapping[str, object]) -> None:
        """Raises NotAdmitted for a token that is not yet valid, or not for this cluster."""
        config = self._config
        begins = claims.get("nbf")
        if isinstance(begins, int | float) and begins > time.time() + SKEW_S:
            raise NotAdmitted(f"the token counts from {begins} on; this node's clock is behind")
        if config.verify_aud:
            given = claims.get("aud")
            audience = given.split() if isinstance(given, str) else given
            if not isinstance(audience, list) or config.resource_server_id not in audience:
                raise NotAdmitted(f"the token is for {audience}, not {config.resource_server_id}")
        if config.verify_iss and config.issuer:
            issuer = claims.get("iss")
            if not isinstance(issuer, str) or issuer.rstrip("/") != config.issuer.rstrip("/"):
                raise NotAdmitted(f"the token is of {issuer}, not of {config.issuer}")

    def _user(self, claims: Mapping[str, object]) -> Identity:
        config = self._config
        prefix = config.scope_prefix
        try:
            scopes = scopes_of(
                claims,
                prefix=f"{config.resource_server_id}." if prefix is None else prefix,
                aliases=self._aliases,
                additional=config.additional_scopes_key,
                resource_server=config.resource_server_id,
            )
        except TooManyScopes as error:
            raise NotAdmitted(error.text) from None
        names = (claims.get(claim) for claim in config.preferred_username_claims)
        expires = claims.get("exp")
        return Identity(
            name=next((name for name in names if isinstance(name, str) and name), NAMELESS),
            tags=tags_of(scopes),
            backend=self,
            rights=Rights(scopes, claims, config.scope_pattern_syntax),
            expires_s=float(expires) if isinstance(expires, int | float) else None,
        )
