"""Sections about who clients are: the chain of backends, tokens of OAuth 2, a directory (LDAP)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from convoymq.model.config.keys import key
from convoymq.model.config.values import parse_words

INTERNAL, OAUTH2, LDAP, CACHE = "internal", "oauth2", "ldap", "cache"
_BACKENDS = {
    INTERNAL: INTERNAL,
    OAUTH2: OAUTH2,
    "oauth": OAUTH2,
    LDAP: LDAP,
    CACHE: CACHE,
    "rabbit_auth_backend_internal": INTERNAL,
    "rabbit_auth_backend_oauth2": OAUTH2,
    "rabbit_auth_backend_ldap": LDAP,
    "rabbit_auth_backend_cache": CACHE,
}
ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
    "HS256", "HS384", "HS512",
)  # fmt: skip


def _parse_backend(text: str) -> str:
    found = _BACKENDS.get(text)
    if found is None:
        raise ValueError(f"served are {INTERNAL}, {OAUTH2}, {LDAP} and {CACHE}")
    return found


def _parse_cached(text: str) -> str:
    found = _parse_backend(text)
    if found == CACHE:
        raise ValueError("a cache does not cache itself")
    return found


def _parse_algorithms(text: str) -> tuple[str, ...]:
    words = parse_words(text)
    for word in words:
        if word not in ALGORITHMS:
            raise ValueError(f"served are {', '.join(ALGORITHMS)}")
    return words


def parse_url(text: str) -> str:
    """Returns an address of the provider: with TLS, but on this machine. Raises ValueError."""
    parts = urlsplit(text)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or (parts.scheme != "https" and not (local and parts.scheme == "http")):
        raise ValueError("not an address that begins with https://")
    return text


class Link(NamedTuple):
    """One place of the chain."""

    login: str
    """Backend that knows the user."""
    rights: str
    """Backend that knows what the user may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Backends of users (`auth_backends.*`, `auth_cache.*`)."""

    backends: tuple[tuple[str, str], ...] = key(
        "auth_backends", (),
        """Who knows users and what they may, in the order of asking: `auth_backends.1 = oauth2`,
        `auth_backends.2 = internal`. `internal` are the users of the cluster, `oauth2` tokens,
        `ldap` a directory, `cache` the backend in `auth_cache.cached_backend`. The first that
        admits a client decides what it may; `auth_backends.N.authn` and `auth_backends.N.authz`
        name two for one place. None: `internal`. Set it alike on all nodes.""",
        parse=_parse_backend, type_name="backend", collects="auth_backends.", named=True,
    )  # fmt: skip
    cached: str = key(
        "auth_cache.cached_backend", "",
        "The backend that `cache` in the chain stands for.",
        parse=_parse_cached, type_name="backend",
    )  # fmt: skip
    cache_ttl_ms: int = key(
        "auth_cache.cache_ttl", 15_000,
        """Age at which a log-in that `cache` remembers is asked for again. The groups of a
        directory's users are read again at this age as well, with or without a cache.""",
        unit="ms", low=1_000, high=86_400_000,
    )  # fmt: skip
    cache_refusals: bool = key(
        "auth_cache.cache_refusals",
        False,
        "Whether `cache` remembers refusals too: fewer questions, but a new password waits.",
    )

    def chain(self) -> tuple[Link, ...]:
        """Returns the places of the chain in order. Raises ValueError."""
        places: dict[int, dict[str, str]] = {}
        for name, backend in self.backends:
            number, _, part = name.partition(".")
            if not number.isdigit() or part not in ("", "authn", "authz"):
                raise ValueError(f"unknown key auth_backends.{name}")
            places.setdefault(int(number), {})[part] = backend
        chain = []
        for place, parts in sorted(places.items()):
            if "" in parts and len(parts) > 1:
                raise ValueError(f"auth_backends.{place} excludes .authn and .authz")
            both = parts.get("", "")
            link = Link(parts.get("authn", both), parts.get("authz", both))
            if not all(link):
                raise ValueError(f"auth_backends.{place} needs both .authn and .authz")
            chain.append(link)
        return tuple(chain) or (Link(INTERNAL, INTERNAL),)

    def used(self) -> set[str]:
        """Returns the backends that are asked."""
        found = {name for link in self.chain() for name in link}
        return found - {CACHE} | ({self.cached} if CACHE in found else set())

    def resolved(self, name: str) -> str:
        """Returns the backend that a name stands for."""
        return self.cached if name == CACHE else name


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthConfig:
    """Tokens of OAuth 2 (`auth_oauth2.*`). Needs the extra `oauth`."""

    resource_server_id: str = key(
        "auth_oauth2.resource_server_id",
        "",
        "Name of this cluster at the provider: tokens name it as their audience (`aud`).",
    )
    scope_prefix: str | None = key(
        "auth_oauth2.scope_prefix", None,
        """What scopes for this cluster begin with; the rest of a token's scopes is passed over.
        None: the `resource_server_id` and a dot. May be empty.""",
        parse=str,
    )  # fmt: skip
    scope_aliases: tuple[tuple[str, str], ...] = key(
        "auth_oauth2.scope_aliases", (),
        """Scopes that stand for others: `auth_oauth2.scope_aliases.ALIAS = SCOPE SCOPE`, or
        `.N.alias` and `.N.scope`, for aliases with characters that a key cannot have.""",
        parse=str, type_name="scopes", collects="auth_oauth2.scope_aliases.", named=True,
    )  # fmt: skip
    additional_scopes_key: str = key(
        "auth_oauth2.additional_scopes_key", "",
        """Claims with more scopes, besides `scope`: paths such as `realm_access.roles`, separated
        by spaces.""",
    )  # fmt: skip
    scope_pattern_syntax: str = key(
        "auth_oauth2.scope_pattern_syntax",
        "wildcard",
        "How scopes name things: with `*`, or by expressions that match the whole name.",
        choices=("wildcard", "regex"),
    )
    preferred_username_claims: tuple[str, ...] = key(
        "auth_oauth2.preferred_username_claims", ("sub", "client_id"),
        "Claims that may hold the user's name; the first that a token has counts.",
        parse=parse_words, collects="auth_oauth2.preferred_username_claims.",
    )  # fmt: skip
    verify_aud: bool = key(
        "auth_oauth2.verify_aud",
        True,
        "Whether a token must be for this cluster. Without it any token of the provider will do.",
    )
    verify_iss: bool = key(
        "auth_oauth2.verify_iss", True,
        """Whether a token's issuer (`iss`) must be `auth_oauth2.issuer`, where that is set.
        RabbitMQ does not compare them.""",
    )  # fmt: skip
    require_exp: bool = key(
        "auth_oauth2.require_exp",
        True,
        "Whether a token must say when it expires. One without an end admits its client for ever.",
    )
    algorithms: tuple[str, ...] = key(
        "auth_oauth2.algorithms", (),
        """Algorithms of signatures that are accepted; `auth_oauth2.algorithms.N` for each. None:
        those with a public key that fit the key of the provider. `HS256` and its kin, where each
        reader of the key can make tokens, must be named. `none` is never accepted.""",
        parse=_parse_algorithms, type_name="words", collects="auth_oauth2.algorithms.",
    )  # fmt: skip
    issuer: str = key(
        "auth_oauth2.issuer",
        "",
        "Address of the provider, whose description names its keys. `https`, but for loopback.",
        parse=parse_url, type_name="address",
    )  # fmt: skip
    jwks_uri: str = key(
        "auth_oauth2.jwks_uri auth_oauth2.jwks_url",
        "",
        "Address of the provider's keys; empty: what the description of the issuer names.",
        parse=parse_url, type_name="address",
    )  # fmt: skip
    discovery_endpoint_path: str = key(
        "auth_oauth2.discovery_endpoint_path",
        ".well-known/openid-configuration",
        "Path of the provider's description, behind the issuer.",
    )
    signing_keys: tuple[tuple[str, str], ...] = key(
        "auth_oauth2.signing_keys", (),
        """Files of public keys or certificates, PEM, by their name in tokens (`kid`):
        `auth_oauth2.signing_keys.NAME = FILE`. Tokens with these need no provider.""",
        parse=str, type_name="path", collects="auth_oauth2.signing_keys.", named=True,
    )  # fmt: skip
    default_key: str = key(
        "auth_oauth2.default_key",
        "",
        "Name of the key of tokens that name none; empty: the only key, if there is one.",
    )
    keys_max_age_s: int = key(
        "auth_oauth2.keys_max_age", 3600,
        """Age at which the provider's keys are read again, so that a key that was taken back ends
        to count. A name of a key that is not known is asked for at once, at most every 10 s. Keys
        stay in use while the provider does not answer.""",
        unit="s", low=10, high=604_800,
    )  # fmt: skip
    timeout_ms: int = key(
        "auth_oauth2.timeout", 5_000,
        "Longest wait for an answer of the provider.",
        unit="ms", low=100, high=60_000,
    )  # fmt: skip
    cacertfile: str = key(
        "auth_oauth2.https.cacertfile",
        "",
        "Authorities that the provider's certificate is checked against, PEM; empty: the system's.",
        type_name="path",
    )
    verify: str = key(
        "auth_oauth2.https.verify auth_oauth2.https.peer_verification",
        "verify_peer",
        "Whether the provider's certificate is checked.",
        choices=("verify_none", "verify_peer"),
    )
    hostname_verification: str = key(
        "auth_oauth2.https.hostname_verification",
        "wildcard",
        "Whether the provider's certificate must be for its name.",
        choices=("wildcard", "none"),
    )

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Returns alias -> scopes. Raises ValueError."""
        found: dict[str, str] = {}
        numbered: dict[str, dict[str, str]] = {}
        for name, text in self.scope_aliases:
            number, dot, part = name.partition(".")
            if dot and number.isdigit() and part in ("alias", "scope"):
                numbered.setdefault(number, {})[part] = text
            else:
                found[name] = text
        for number, parts in numbered.items():
            if len(parts) != 2:
                raise ValueError(f"auth_oauth2.scope_aliases.{number} needs both .alias and .scope")
            found[parts["alias"]] = parts["scope"]
        return {alias: tuple(scopes.split()) for alias, scopes in found.items()}

    def check(self) -> None:
        """Raises ValueError for what lacks where tokens are used."""
        self.aliases()
        if self.verify_aud and not self.resource_server_id:
            raise ValueError(
                "auth_oauth2.resource_server_id must be set, or auth_oauth2.verify_aud = false"
            )
        if self.scope_prefix is None and not self.resource_server_id:
            raise ValueError("auth_oauth2.scope_prefix or .resource_server_id must be set")
        if not (self.issuer or self.jwks_uri or self.signing_keys):
            raise ValueError(
                "auth_oauth2.issuer, .jwks_uri or .signing_keys.NAME must be set: nothing says "
                "which keys sign tokens"
            )
        own = self.default_key in ("", *dict(self.signing_keys))
        if not (own or self.issuer or self.jwks_uri):
            raise ValueError("auth_oauth2.default_key is none of auth_oauth2.signing_keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class LdapConfig:
    """A directory (`auth_ldap.*`). Needs the extra `ldap`."""

    servers: tuple[str, ...] = key(
        "auth_ldap.servers", (),
        """Hosts of the directory, in the order of trying; `auth_ldap.servers.N` for each.""",
        parse=parse_words, type_name="words", collects="auth_ldap.servers.",
    )  # fmt: skip
    port: int = key("auth_ldap.port", 389, "Port of the directory.", low=1, high=65535)
    timeout_ms: int = key(
        "auth_ldap.timeout", 5_000,
        "Longest wait for the directory, to connect and for each answer.",
        unit="ms", low=100, high=60_000,
    )  # fmt: skip
    use_ssl: bool = key("auth_ldap.use_ssl", False, "TLS from the first byte.")
    use_starttls: bool = key(
        "auth_ldap.use_starttls", False, "TLS after the first request, on the plain port."
    )
    cacertfile: str = key(
        "auth_ldap.ssl_options.cacertfile",
        "",
        "Authorities for the directory's certificate, PEM; empty: the system's.",
        type_name="path",
    )
    verify: str = key(
        "auth_ldap.ssl_options.verify",
        "verify_peer",
        "Whether the directory's certificate is checked.",
        choices=("verify_none", "verify_peer"),
    )
    user_bind_pattern: str = key(
        "auth_ldap.user_bind_pattern", "",
        "Name by which a user binds, with `${username}`; empty: the user's DN.",
    )  # fmt: skip
    user_dn_pattern: str = key(
        "auth_ldap.user_dn_pattern",
        "${username}",
        "DN of a user, with `${username}`, where it is not looked up.",
    )
    dn_lookup_attribute: str = key(
        "auth_ldap.dn_lookup_attribute", "",
        """Attribute with the user's name, such as `uid`, by which the DN is looked up; empty: the
        pattern says it.""",
    )  # fmt: skip
    dn_lookup_base: str = key("auth_ldap.dn_lookup_base", "", "Where users are looked up.")
    dn_lookup_bind: str = key(
        "auth_ldap.dn_lookup_bind",
        "as_user",
        "As whom users are looked up; `auth_ldap.dn_lookup_bind.user_dn` names another.",
        choices=("as_user", "anon"),
    )
    dn_lookup_bind_user: str = key("auth_ldap.dn_lookup_bind.user_dn", "", "DN for looking up.")
    dn_lookup_bind_password: str = key(
        "auth_ldap.dn_lookup_bind.password", "", "Its password.", secret=True
    )
    other_bind: str = key(
        "auth_ldap.other_bind",
        "as_user",
        "As whom groups are read; `auth_ldap.other_bind.user_dn` names another.",
        choices=("as_user", "anon"),
    )
    other_bind_user: str = key("auth_ldap.other_bind.user_dn", "", "DN for reading groups.")
    other_bind_password: str = key(
        "auth_ldap.other_bind.password", "", "Its password.", secret=True
    )
    group_lookup_base: str = key(
        "auth_ldap.group_lookup_base", "",
        "Where the groups of a user are searched; needed for queries with groups.",
    )  # fmt: skip
    vhost_access: str = key(
        "auth_ldap.queries.vhost_access", "{constant, true}",
        "Query for virtual hosts, in RabbitMQ's language (docs/access.md).",
    )  # fmt: skip
    resource_access: str = key(
        "auth_ldap.queries.resource_access",
        "{constant, true}",
        "Query for queues and exchanges.",
    )
    topic_access: str = key(
        "auth_ldap.queries.topic_access",
        "{constant, true}",
        "Query for routing keys of topic exchanges.",
    )
    tags: str = key(
        "auth_ldap.queries.tags",
        "[{administrator, {constant, false}}]",
        "Queries for tags: a list of `{TAG, QUERY}`.",
    )

    def check(self) -> None:
        """Raises ValueError for what lacks where the directory is used."""
        if not self.servers:
            raise ValueError("auth_ldap.servers.1 must be set")
        if self.dn_lookup_attribute and not self.dn_lookup_base:
            raise ValueError("auth_ldap.dn_lookup_base must be set with .dn_lookup_attribute")
        if self.use_ssl and self.use_starttls:
            raise ValueError("auth_ldap.use_ssl excludes auth_ldap.use_starttls")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityConfig:
    """The sections together, for the parts of a node that use them."""

    auth: AuthConfig = field(default_factory=AuthConfig)
    oauth2: OAuthConfig = field(default_factory=OAuthConfig)
    ldap: LdapConfig = field(default_factory=LdapConfig)

    def check(self) -> None:
        """Raises ValueError for a combination that no single key can judge."""
        auth = self.auth
        chain = auth.chain()
        if any(CACHE in link for link in chain) and not auth.cached:
            raise ValueError("auth_cache.cached_backend must be set: the chain has a cache")
        for link in chain:
            login, rights = auth.resolved(link.login), auth.resolved(link.rights)
            if rights == OAUTH2 != login:
                raise ValueError("rights of oauth2 come from the token: it must be .authn as well")
        for name, section in ((OAUTH2, self.oauth2), (LDAP, self.ldap)):
            if name in auth.used():
                section.check()
