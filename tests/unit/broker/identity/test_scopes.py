"""Scopes of tokens: RabbitMQ's patterns, aliases, variables."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.broker.identity.scopes import SCOPES_MAX, Rights, TooManyScopes, scopes_of, tags_of


def scopes(claims: dict[str, Any], **more: Any) -> tuple[str, ...]:
    options: dict[str, Any] = {"prefix": "rabbitmq.", "aliases": {}, "resource_server": "rabbitmq"}
    return scopes_of(claims, **(options | more))


@pytest.mark.parametrize(
    ("scope", "vhost", "name", "allowed"),
    [
        ("read:*/*", "/", "orders", True),
        ("read:%2F/*", "/", "orders", True),
        ("read:%2F/orders", "/", "orders", True),
        ("read:%2F/orders", "/", "orders2", False),
        ("read:%2F/orders", "other", "orders", False),
        ("read:*/o*s", "/", "orders", True),
        ("read:*/o*s", "/", "order", False),
        ("read:*/a%2Ab", "/", "a*b", True),
        ("read:*/a%2Ab", "/", "axb", False),
        ("read:*/a.b", "/", "axb", False),
        ("read:*/a+b", "/", "a b", True),
        ("write:*/*", "/", "orders", False),
        ("read:*/orders/key", "/", "orders", True),
        ("read:*", "/", "orders", False),
        ("read:*/*/*/*", "/", "orders", False),
        ("read:*/%FF", "/", "orders", False),
        ("delete:*/*", "/", "orders", False),
        ("read:{vhost}/*", "/", "orders", True),
        ("read:*/{sub}-*", "/", "al/ice*-q", True),
        ("read:*/{sub}-*", "/", "al/iceX-q", False),
        ("read:*/{nothing}", "/", "nothing", True),
        ("read:*/{open", "/", "open", False),
    ],
)
def test_wildcards(scope: str, vhost: str, name: str, allowed: bool) -> None:
    rights = Rights((scope,), {"sub": "al/ice*"})
    assert rights.allows(vhost, "read", name) is allowed


def test_a_virtual_host_opens_for_any_permission() -> None:
    rights = Rights(("write:team/*", "tag:administrator"), {})
    assert (rights.opens("team"), rights.opens("/")) == (True, False)


def test_routing_keys_need_a_scope_with_three_parts() -> None:
    rights = Rights(("write:*/*", "write:%2F/logs/eu.*", "read:*/logs/*"), {})
    assert rights.allows_key("/", "write", "logs", "eu.news")
    assert not rights.allows_key("/", "write", "logs", "us.news")
    assert not rights.allows_key("/", "write", "other", "eu.news")
    assert rights.allows_key("other", "read", "logs", "anything")


@pytest.mark.parametrize(
    ("part", "name", "allowed"),
    [
        ("o.*s", "orders", True),
        ("order", "orders", False),
        ("{sub}", "a.b", True),
        ("{sub}", "axb", False),
        ("(?i)ORDERS", "orders", False),
        ("(", "orders", False),
        ("a" * 3000, "a" * 3000, False),
    ],
)
def test_expressions_match_whole_names(part: str, name: str, allowed: bool) -> None:
    rights = Rights((f"read:.*/{part}",), {"sub": "a.b"}, "regex")
    assert rights.allows("/", "read", name) is allowed


@pytest.mark.parametrize(
    ("claims", "more", "found"),
    [
        ({"scope": "rabbitmq.read:*/* openid other.x"}, {}, ("read:*/*",)),
        ({"scope": ["rabbitmq.read:a/b c", 7]}, {}, ("read:a/b c",)),
        ({"scope": "read:*/*"}, {"prefix": ""}, ("read:*/*",)),
        ({"scope": 7}, {}, ()),
        ({}, {}, ()),
        (
            {"scope": "admin"},
            {"aliases": {"admin": ("rabbitmq.tag:administrator", "rabbitmq.read:*/*")}},
            ("read:*/*", "tag:administrator"),
        ),
        (
            {"realm_access": {"roles": ["rabbitmq.read:a/a"]}, "extra": "rabbitmq.read:b/b x"},
            {"additional": "realm_access.roles extra missing.path"},
            ("read:a/a", "read:b/b"),
        ),
        ({"roles": {"rabbitmq": "read:a/a", "x": "y"}}, {"additional": "roles"}, ("read:a/a",)),
        (
            {"authorization": {"permissions": [{"scopes": ["rabbitmq.write:a/a"]}, "x"]}},
            {},
            ("write:a/a",),
        ),
    ],
)
def test_scopes_come_from_several_claims(
    claims: dict[str, Any], more: dict[str, Any], found: tuple[str, ...]
) -> None:
    assert scopes(claims, **more) == found


def test_the_number_of_scopes_has_a_bound() -> None:
    many = [f"rabbitmq.read:a/{n}" for n in range(SCOPES_MAX)]
    assert len(scopes({"scope": many})) == SCOPES_MAX
    with pytest.raises(TooManyScopes, match=f"has {SCOPES_MAX + 1} scopes"):
        scopes({"scope": [*many, "rabbitmq.x"]})


def test_tags() -> None:
    assert tags_of(("read:*/*", "tag:administrator", "tag:policymaker")) == (
        "administrator",
        "policymaker",
    )
