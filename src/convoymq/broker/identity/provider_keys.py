"""Keys that sign tokens: from files, and from the provider.

The provider is asked off the event loop, by one request at a time: for a key that is not known, at
most every `RETRY_S`, and when its keys are old. While it does not answer, or answers with rubbish,
the keys that it gave before stay in use.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import HTTPRedirectHandler, HTTPSHandler, build_opener

import structlog

from convoymq.model.config import ConfigError, OAuthConfig
from convoymq.model.config.identity_sections import parse_url

if TYPE_CHECKING:
    from jwt import PyJWK

log = structlog.get_logger()

RETRY_S = 10.0
ANSWER_BYTES_MAX = 1 << 20
KEYS_MAX = 256


class _NoRedirects(HTTPRedirectHandler):
    """Refuses to follow: what is configured is the address of the keys."""

    def redirect_request(self, *_args: object) -> None:
        return None


class ProviderKeys:
    """The keys of a provider by name. Raises ConfigError for a file that cannot be used."""

    def __init__(self, config: OAuthConfig) -> None:
        self._config = config
        self._own = {name: key_in_file(name, path) for name, path in config.signing_keys}
        self._fetched: dict[str, PyJWK] = {}
        self._fetched_at = self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._address = config.jwks_uri
        self._opener = build_opener(_NoRedirects, HTTPSHandler(context=_tls(config)))

    async def find(self, name: str) -> PyJWK | None:
        """Returns the key of that name; None = the provider has none, as far as it answers. A
        token without a name ("") is of the only key, if there is one."""
        found = self._known(name)
        has_provider = bool(self._config.issuer or self._config.jwks_uri)
        is_old = time.monotonic() - self._fetched_at > self._config.keys_max_age_s
        if not has_provider or (found is not None and (name in self._own or not is_old)):
            return found
        self._begin_asking()
        return await self.find_new(name) if found is None else found

    async def find_new(self, name: str) -> PyJWK | None:
        """Returns the key of that name after the provider was asked, if it may be asked again."""
        if self._config.issuer or self._config.jwks_uri:
            self._begin_asking()
        if self._asking is not None:
            await asyncio.shield(self._asking)
        return self._known(name)

    def _begin_asking(self) -> None:
        if time.monotonic() - self._asked_at >= RETRY_S and self._asking is None:
            self._asked_at = time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def _known(self, name: str) -> PyJWK | None:
        if not name:
            every = self._fetched | self._own
            return next(iter(every.values())) if len(every) == 1 else None
        return self._own.get(name) or self._fetched.get(name)

    async def _ask(self) -> None:
        try:
            keys = await asyncio.get_running_loop().run_in_executor(None, self._fetch)
        except (OSError, ValueError) as error:
            log.warning("identity.keys_not_fetched", provider=self._provider, reason=str(error))
        else:
            self._fetched, self._fetched_at = keys, time.monotonic()
            log.info("identity.keys_fetched", provider=self._provider, keys=sorted(keys))
        finally:
            self._asking = None

    @property
    def _provider(self) -> str:
        return self._config.jwks_uri or self._config.issuer

    def _fetch(self) -> dict[str, PyJWK]:
        """Asks the provider; in a thread. Raises OSError, ValueError."""
        if not self._address:
            config = self._config
            path = config.discovery_endpoint_path.lstrip("/")
            described = self._get(f"{config.issuer.rstrip('/')}/{path}")
            address = described.get("jwks_uri")
            if not isinstance(address, str):
                raise ValueError("the provider's description has no jwks_uri")
            self._address = parse_url(address)
        return keys_in(self._get(self._address))

    def _get(self, address: str) -> Mapping[str, object]:
        with self._opener.open(address, timeout=self._config.timeout_ms / 1000) as answer:
            body = answer.read(ANSWER_BYTES_MAX + 1)
        if len(body) > ANSWER_BYTES_MAX:
            raise ValueError(f"{address} answered with more than {ANSWER_BYTES_MAX} bytes")
        found = json.loads(body)
        if not isinstance(found, dict):
            raise ValueError(f"{address} did not answer with a JSON object")
        return found


def keys_in(document: Mapping[str, object]) -> dict[str, PyJWK]:
    """Returns the keys of a set (RFC 7517) for signatures, by name. Raises ValueError: none is."""
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    rows, found = document.get("keys"), {}
    for row in rows[:KEYS_MAX] if isinstance(rows, list) else ():
        if not isinstance(row, dict) or row.get("use", "sig") != "sig":
            continue
        try:
            key = PyJWK.from_dict(row)
        except (PyJWTError, ValueError, TypeError):
            # A kind of key that nothing here verifies with; the others count.
            continue
        if key.key_id:
            found[str(key.key_id)] = key
    if not found:
        raise ValueError("the provider's answer has no key with a name (kid)")
    return found


def key_in_file(name: str, path: str) -> PyJWK:
    """Returns the public key in a PEM file, or that of a certificate. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from cryptography.x509 import load_pem_x509_certificate
    from jwt import PyJWK
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    try:
        data = Path(path).read_bytes()
        key: object
        if b"BEGIN CERTIFICATE" in data:
            key = load_pem_x509_certificate(data).public_key()
        else:
            key = load_pem_public_key(data)
        match key:
            case RSAPublicKey():
                return PyJWK.from_dict(RSAAlgorithm.to_jwk(key, as_dict=True))
            case EllipticCurvePublicKey():
                return PyJWK.from_dict(ECAlgorithm.to_jwk(key, as_dict=True))
            case Ed25519PublicKey() | Ed448PublicKey():
                return PyJWK.from_dict(OKPAlgorithm.to_jwk(key, as_dict=True))
        raise ValueError("not a key for signatures")
    except Exception as error:
        raise ConfigError(f"auth_oauth2.signing_keys.{name} = {path}: {error}") from None


def _tls(config: OAuthConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.cacertfile or None)
    if config.verify == "verify_none" or config.hostname_verification == "none":
        context.check_hostname = False
    if config.verify == "verify_none":
        context.verify_mode = ssl.CERT_NONE
    return context
