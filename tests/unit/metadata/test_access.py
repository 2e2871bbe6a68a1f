"""Password hashes and permission patterns."""

from __future__ import annotations

import base64
import hashlib

import pytest
from argon2 import PasswordHasher

from convoymq.metadata import access
from convoymq.model import patterns


def test_a_sha256_hash_has_the_form_of_other_brokers() -> None:
    salt = b"\x01\x02\x03\x04"
    made = access.hash_sha256(b"secret", salt)
    assert base64.b64decode(made) == salt + hashlib.sha256(salt + b"secret").digest()
    assert access.verify(b"secret", made, access.SHA256)
    assert not access.verify(b"Secret", made, access.SHA256)


def test_an_argon2_hash_verifies_its_password_only() -> None:
    made = PasswordHasher().hash(b"secret")
    assert access.is_known_hash(made, access.ARGON2)
    assert access.verify(b"secret", made, access.ARGON2)
    assert not access.verify(b"other", made, access.ARGON2)


@pytest.mark.parametrize(
    ("stored", "algorithm"),
    [("", access.SHA256), ("!!", access.SHA256), ("AAAA", access.SHA256), ("x", access.ARGON2),
     ("AAAA", "unknown")],
)  # fmt: skip
def test_a_damaged_or_empty_hash_fits_no_password(stored: str, algorithm: str) -> None:
    assert not access.verify(b"", stored, algorithm)
    assert not access.is_known_hash(stored, algorithm)


def test_patterns_are_searched_and_the_empty_one_covers_the_empty_name_only() -> None:
    assert access.allows(".*", "anything")
    assert access.allows("order", "my-orders")
    assert not access.allows("^order$", "orders")
    assert access.allows("", "")
    assert not access.allows("", "queue")


def test_an_unreadable_pattern_covers_nothing() -> None:
    assert access.pattern_error("(") is not None
    assert access.pattern_error("a" * (patterns.LENGTH_MAX + 1)) is not None
    assert access.pattern_error("a" * patterns.LENGTH_MAX) is None
    assert not access.allows("(", "(")
    assert access.pattern_error(r"(a)\1") == "invalid escape sequence: \\1"
    assert not access.allows(r"(a)\1", "aa")


def test_topic_patterns_know_the_user_and_the_vhost() -> None:
    pattern = "^{username}\\.{vhost}\\."
    assert access.topic_allows(pattern, "a.b.v.rest", user="a.b", vhost="v")
    assert not access.topic_allows(pattern, "axb.v.rest", user="a.b", vhost="v")
    assert access.topic_allows(pattern, "ü $.x y.rest", user="ü $", vhost="x y")
