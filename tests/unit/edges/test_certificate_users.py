"""Which user a client certificate stands for."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.certificate_users import certificate_user

CERTIFICATE: Any = {
    "subject": (
        (("countryName", "DE"),),
        (("organizationName", "A, B"),),
        (("commonName", "app"),),
    ),
    "subjectAltName": (
        ("DNS", "app.example"),
        ("IP Address", "10.0.0.1"),
        ("DNS", "second.example"),
        ("email", "app@example"),
        ("URI", "spiffe://example/app"),
    ),
}
"""As `ssl` decodes it."""


@pytest.mark.parametrize(
    ("source", "kind", "index", "user"),
    [
        ("common_name", "dns", 0, "app"),
        ("distinguished_name", "dns", 0, "CN=app,O=A\\, B,C=DE"),
        ("subject_alternative_name", "dns", 0, "app.example"),
        ("subject_alternative_name", "dns", 1, "second.example"),
        ("subject_alternative_name", "dns", 2, None),
        ("subject_alternative_name", "ip", 0, "10.0.0.1"),
        ("subject_alternative_name", "email", 0, "app@example"),
        ("subject_alternative_name", "uri", 0, "spiffe://example/app"),
    ],
)
def test_the_user_is_in_the_part_that_was_chosen(
    source: str, kind: str, index: int, user: str | None
) -> None:
    assert certificate_user(CERTIFICATE, source, kind, index) == user


def test_a_certificate_without_that_part_stands_for_nobody() -> None:
    for source in ("common_name", "distinguished_name", "subject_alternative_name"):
        assert certificate_user({}, source) is None
