"""Tokens of OAuth 2 that keys in files verify; tests/faults/test_oauth2.py has a provider."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker.identity.backend import Identity, NotAdmitted
from convoymq.broker.identity.cached import CachedBackend
from convoymq.broker.identity.provider_keys import key_in_file, keys_in
from convoymq.model.config import ConfigError, OAuthConfig
from tests.unit.broker.identity.tokens import Tokens


@pytest.mark.parametrize(
    ("settings", "claims", "name"),
    [
        ({}, {}, "ann"),
        ({}, {"sub": None, "client_id": "app"}, "app"),
        ({}, {"sub": None}, "unknown"),
        ({"preferred_username_claims": ("user_name", "sub")}, {"user_name": "Ann"}, "Ann"),
        ({"verify_aud": False}, {"aud": "another"}, "ann"),
        ({"require_exp": False}, {"exp": None}, "ann"),
        ({}, {"aud": "x rabbitmq"}, "ann"),
        ({}, {"aud": ["x", "rabbitmq"]}, "ann"),
        ({"issuer": "https://here/"}, {"iss": "https://here"}, "ann"),
        ({"issuer": "https://here", "verify_iss": False}, {"iss": "https://there"}, "ann"),
    ],
)
async def test_claims_name_the_user(
    tmp_path: Path, settings: dict[str, Any], claims: dict[str, Any], name: str
) -> None:
    tokens = Tokens(tmp_path, **settings)
    user = await tokens.backend.log_in("", tokens.token(**claims))
    assert user is not None
    assert user.name == name


async def test_rights_end_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(tmp_path)
    user = await tokens.backend.log_in("", tokens.token())
    assert isinstance(user, Identity)
    backend = tokens.backend
    assert backend.opens(user, "/")
    assert backend.allows(user, "/", "read", "queue", "q")
    assert backend.present(user) is user
    assert user.expires_s is not None
    monkeypatch.setattr(time, "time", lambda: user.expires_s)
    assert not backend.opens(user, "/")
    assert not backend.allows(user, "/", "read", "queue", "q")
    assert backend.present(user) is None


async def test_a_password_is_left_to_other_backends(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    for password in (b"", b"secret", b"a.b.c", b"ey.x"):
        assert await tokens.backend.log_in("ann", password) is None


async def test_a_token_without_a_key_name_is_of_the_only_key_or_the_default(
    tmp_path: Path,
) -> None:
    tokens = Tokens(tmp_path)
    assert await tokens.backend.log_in("", tokens.token(kid=None)) is not None
    file = str(tmp_path / "key.pem")
    two = (("one", file), ("two", file))
    tokens = Tokens(tmp_path, signing_keys=two)
    with pytest.raises(NotAdmitted, match="names no key"):
        await tokens.backend.log_in("", tokens.token(kid=None))
    tokens = Tokens(tmp_path, signing_keys=two, default_key="one")
    assert await tokens.backend.log_in("", tokens.token(kid=None)) is not None


async def test_only_configured_algorithms_count(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, algorithms=("RS256", "HS256"))
    with pytest.raises(NotAdmitted, match="alg"):
        await tokens.backend.log_in("", tokens.token())


async def test_a_cached_token_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(tmp_path)
    cached = CachedBackend(tokens.backend, 3600, refusals=True)
    token = tokens.token()
    user = await cached.log_in("", token)
    assert await cached.log_in("", token) is user
    stale = tokens.token(aud="another")
    for _ in range(2):
        with pytest.raises(NotAdmitted, match="is for"):
            await cached.log_in("", stale)
    expires_s = int(time.time()) + 601
    monkeypatch.setattr(time, "time", lambda: expires_s)
    assert await cached.log_in("", token) is None


def test_a_set_of_keys_passes_over_what_it_cannot_use() -> None:
    good = {"kty": "oct", "kid": "a", "k": "AAAA", "alg": "HS256"}
    rows = [7, {"kty": "no", "kid": "x"}, {**good, "use": "enc", "kid": "b"}, good]
    assert list(keys_in({"keys": rows})) == ["a"]
    for document in ({}, {"keys": 7}, {"keys": [{"kty": "oct", "k": "AAAA"}]}):
        with pytest.raises(ValueError, match="no key with a name"):
            keys_in(document)


@pytest.mark.parametrize("content", ["", "x", "-----BEGIN CERTIFICATE-----\nAAAA"])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.pem"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"auth_oauth2.signing_keys.k = .*bad.pem"):
        key_in_file("k", str(path))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "resource_server_id must be set"),
        ({"verify_aud": False}, "scope_prefix"),
        ({"resource_server_id": "r"}, "which keys sign tokens"),
        (
            {"resource_server_id": "r", "signing_keys": (("a", "f"),), "default_key": "b"},
            "default_key is none",
        ),
        ({"scope_aliases": (("1.alias", "x"),)}, "needs both"),
    ],
)
def test_what_lacks_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OAuthConfig(**settings).check()
