"""Tokens with a key in a file, and a backend that takes them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from convoymq.broker.identity.oauth2 import OAuthBackend
from convoymq.broker.identity.provider_keys import ProviderKeys
from convoymq.model.config import OAuthConfig


class Tokens:
    """Makes tokens of `sub`, for ten minutes and with all permissions."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.key = generate_private_key(SECP256R1())
        path = directory / "key.pem"
        public = self.key.public_key()
        path.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        config = OAuthConfig(
            **{
                "resource_server_id": "rabbitmq",
                "signing_keys": (("one", str(path)),),
                **settings,
            }
        )
        config.check()
        self.backend = OAuthBackend(config, ProviderKeys(config))

    def token(self, kid: str | None = "one", **claims: Any) -> bytes:
        made = {
            "sub": "ann",
            "aud": "rabbitmq",
            "exp": int(time.time()) + 600,
            "scope": "rabbitmq.configure:*/* rabbitmq.write:*/* rabbitmq.read:*/*",
        } | claims
        made = {name: value for name, value in made.items() if value is not None}
        headers = {"kid": kid} if kid else None
        return jwt.encode(made, self.key, "ES256", headers).encode()
