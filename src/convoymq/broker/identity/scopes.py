"""Scopes of tokens: what a token's claims let its holder do (pure).

`read:VHOST/NAME`, `write:VHOST/NAME/KEY`, `configure:…`: patterns in which `*` stands for any text
and `%XX` for a byte; or, with the syntax `regex`, expressions that match the whole name. A scope
with three parts lets use these routing keys of topic exchanges. `{vhost}` is the virtual host that
is asked for, `{CLAIM}` a claim of the token. `tag:administrator` gives a tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, unquote

from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import Pattern, compile_pattern, escaped

SCOPES_MAX = 2048
EXPRESSION_CHARACTERS_MAX = 2048
VHOSTS_REMEMBERED = 64
TAG_PREFIX = "tag:"
PERMISSIONS = ("configure", "write", "read")
PARTY_TOKEN_PATH = "authorization.permissions.scopes"
"""Path to the scopes in requesting-party tokens of Keycloak."""

Claims = Mapping[str, object]


class TooManyScopes(PreconditionFailed):
    """A token has more scopes than are read."""


def scopes_of(
    claims: Claims,
    *,
    prefix: str,
    aliases: Mapping[str, Sequence[str]],
    additional: str = "",
    resource_server: str = "",
) -> tuple[str, ...]:
    """Returns the scopes of a token for this cluster, without the prefix. Raises TooManyScopes.

    Args:
        additional: paths of further claims with scopes, separated by spaces.
        resource_server: key below which a claim may have scopes for several servers.
    """
    found = _texts(claims.get("scope"), resource_server)
    for path in (PARTY_TOKEN_PATH, *additional.split()):
        found += _at(claims, path.split("."), resource_server)
    for scope in list(found):
        found += aliases.get(scope, ())
    own = {each.removeprefix(prefix) for each in found if each.startswith(prefix)}
    if len(own) > SCOPES_MAX:
        raise TooManyScopes(f"the token has {len(own)} scopes; at most {SCOPES_MAX} are read")
    return tuple(sorted(own))


def _at(value: object, path: Sequence[str], resource_server: str) -> list[str]:
    """Returns the scopes at a path, through lists as well."""
    if not path:
        return _texts(value, resource_server)
    if isinstance(value, list):
        return [scope for each in value for scope in _at(each, path, resource_server)]
    if isinstance(value, Mapping):
        return _at(value.get(path[0]), path[1:], resource_server)
    return []


def _texts(value: object, resource_server: str) -> list[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return [each for each in value if isinstance(each, str)]
    if isinstance(value, Mapping) and resource_server:
        return [f"{resource_server}.{each}" for each in _texts(value.get(resource_server), "")]
    return []


def tags_of(scopes: Iterable[str]) -> tuple[str, ...]:
    """Returns the tags that scopes give."""
    return tuple(each.removeprefix(TAG_PREFIX) for each in scopes if each.startswith(TAG_PREFIX))


class _Rule(NamedTuple):
    permission: str
    vhost: Pattern
    name: Pattern
    key: Pattern | None


@dataclass(slots=True)
class Rights:
    """Rights that scopes give.

    Args:
        syntax: `wildcard` or `regex`.
    """

    scopes: tuple[str, ...]
    claims: Claims
    syntax: str = "wildcard"
    _rules: dict[str, tuple[_Rule, ...]] = field(default_factory=dict)
    """By virtual host, because `{vhost}` differs."""

    def opens(self, vhost: str) -> bool:
        """Returns whether any permission is for the virtual host."""
        return bool(self._of(vhost))

    def allows(self, vhost: str, permission: str, name: str) -> bool:
        """Returns whether a scope covers a queue or exchange."""
        return any(
            rule.permission == permission and rule.name.search(name) for rule in self._of(vhost)
        )

    def allows_key(self, vhost: str, permission: str, exchange: str, key: str) -> bool:
        """Returns whether a scope with a part for routing keys covers one."""
        return any(
            rule.permission == permission
            and rule.key is not None
            and rule.name.search(exchange)
            and rule.key.search(key)
            for rule in self._of(vhost)
        )

    def _of(self, vhost: str) -> tuple[_Rule, ...]:
        """Returns the rules that are about a virtual host."""
        known = self._rules.get(vhost)
        if known is None:
            if len(self._rules) >= VHOSTS_REMEMBERED:
                self._rules.clear()
            rules = (self._rule(scope, vhost) for scope in self.scopes)
            known = tuple(rule for rule in rules if rule is not None and rule.vhost.search(vhost))
            self._rules[vhost] = known
        return known

    def _rule(self, scope: str, vhost: str) -> _Rule | None:
        permission, _, patterns = self._filled(scope, vhost).partition(":")
        parts = patterns.split("/")
        if permission not in PERMISSIONS or len(parts) not in (2, 3):
            return None
        try:
            compiled = [self._compiled(part) for part in parts]
        except (PreconditionFailed, UnicodeDecodeError):
            # A pattern that cannot be read covers nothing.
            return None
        return _Rule(permission, compiled[0], compiled[1], compiled[2] if compiled[2:] else None)

    def _filled(self, scope: str, vhost: str) -> str:
        """Replaces `{vhost}` and `{CLAIM}`; braces that do not close leave nothing."""
        text, rest = "", scope
        while "{" in rest:
            before, _, rest = rest.partition("{")
            name, closed, rest = rest.partition("}")
            if not closed:
                return ""
            claim = vhost if name == "vhost" else self.claims.get(name)
            value = claim if isinstance(claim, str) else name
            # What the value has of patterns stands for itself: users choose some claims.
            text += before + (escaped(value) if self.syntax == "regex" else quote(value, safe=""))
        return text + rest

    def _compiled(self, part: str) -> Pattern:
        if self.syntax == "regex":
            return _expression(part)
        parts = part.replace("+", " ").split("*")
        texts = (escaped(unquote(text, errors="strict")) for text in parts)
        return compile_pattern("^(?s:" + ".*".join(texts) + ")$")


_NOT_SERVED = ("(?i", "(?m", "(?s", "(?x", "(?U", "(?-", "(?#", "(*")


def _expression(part: str) -> Pattern:
    """Returns an expression that matches whole names. Raises PreconditionFailed."""
    if len(part) > EXPRESSION_CHARACTERS_MAX or any(each in part for each in _NOT_SERVED):
        raise PreconditionFailed("not an expression of a scope")
    return compile_pattern(f"^(?:{part})$")
