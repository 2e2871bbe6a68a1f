"""Passwords and permissions: hashes, their verification, and the matching of resource names.

Pure but for the salt of a new hash, which the caller may hand in. Two kinds of hashes are
understood. New users get RabbitMQ's salted SHA-256, base64 of four salt bytes followed by
SHA-256(salt + password), so that definitions can be moved between brokers in both directions.
The other one is argon2id, for users that are put with such a hash.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from functools import lru_cache
from typing import TYPE_CHECKING

from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import compile_pattern, escaped

if TYPE_CHECKING:
    from argon2 import PasswordHasher

SHA256 = "rabbit_password_hashing_sha256"
ARGON2 = "convoy_password_hashing_argon2id"
ALGORITHMS = (SHA256, ARGON2)
SALT_BYTES = 4

DEFAULT_EXCHANGE_ALIAS = "amq.default"
"""Name of the default exchange, whose own name is empty, when permissions are matched."""


def hash_sha256(password: bytes, salt: bytes | None = None) -> str:
    """Returns RabbitMQ's form of a password hash, base64."""
    chosen = os.urandom(SALT_BYTES) if salt is None else salt
    assert len(chosen) == SALT_BYTES
    return base64.b64encode(chosen + hashlib.sha256(chosen + password).digest()).decode()


def is_known_hash(password_hash: str, algorithm: str) -> bool:
    """Returns whether `verify` can judge this hash: the check before a hash is stored."""
    if algorithm == SHA256:
        try:
            return len(base64.b64decode(password_hash, validate=True)) == SALT_BYTES + 32
        except (binascii.Error, ValueError):
            return False
    return algorithm == ARGON2 and password_hash.startswith("$argon2")


def verify(password: bytes, password_hash: str, algorithm: str) -> bool:
    """Returns whether the password belongs to the hash. An empty hash fits no password.

    Cost: tens of milliseconds for argon2id; call it off the loop.
    """
    if not password_hash:
        return False
    if algorithm == ARGON2:
        from argon2.exceptions import Argon2Error, InvalidHashError

        try:
            return bool(_argon2().verify(password_hash, password))
        except (Argon2Error, InvalidHashError):
            return False
    if algorithm != SHA256 or not is_known_hash(password_hash, algorithm):
        return False
    raw = base64.b64decode(password_hash)
    expected = hashlib.sha256(raw[:SALT_BYTES] + password).digest()
    return hmac.compare_digest(expected, raw[SALT_BYTES:])


def pattern_error(pattern: str) -> str | None:
    """Returns why a permission pattern is not acceptable, or None."""
    try:
        compile_pattern(pattern)
    except PreconditionFailed as error:
        return error.text
    return None


def allows(pattern: str, name: str) -> bool:
    """Returns whether a permission pattern covers a queue or exchange name.

    The expression is searched for, not anchored; the empty pattern covers the empty name only.
    """
    return _covers(pattern, name)


def topic_allows(pattern: str, routing_key: str, *, user: str, vhost: str) -> bool:
    """Returns whether a topic permission covers a routing key; `{username}` and `{vhost}` are
    replaced."""
    expanded = pattern.replace("{username}", escaped(user)).replace("{vhost}", escaped(vhost))
    return _covers(expanded, routing_key)


def _covers(pattern: str, text: str) -> bool:
    try:
        return compile_pattern(pattern or "^$").search(text)
    except PreconditionFailed:
        # A pattern that cannot be read covers nothing: refuse rather than admit.
        return False


@lru_cache(maxsize=1)
def _argon2() -> PasswordHasher:
    # Imported late: its C extension costs memory on nodes whose users have SHA-256 hashes.
    from argon2 import PasswordHasher

    return PasswordHasher()
