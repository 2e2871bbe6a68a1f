"""The language of queries about a directory's users."""

from __future__ import annotations

import pytest

from convoymq.broker.identity.ldap_queries import Asked, Needs, query, tag_queries

GROUPS = {("cn=admins,dc=x", "member", False), ("cn=all,dc=x", "uniqueMember", True)}
FACTS = {"username": "ann", "vhost": "v,1", "permission": "write", "resource": "queue", "name": "q"}


def asked() -> Asked:
    return Asked(
        FACTS,
        lambda group, attribute, nested: (group, attribute, nested) in GROUPS,
        lambda value: value.replace(",", "\\,"),
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("{constant, true}", True),
        ("{constant, false}.", False),
        ('{in_group, "cn=admins,dc=x"}', True),
        ('{in_group, "cn=admins,dc=x", "uniqueMember"}', False),
        ('{in_group_nested, "cn=all,dc=x", "uniqueMember"}', True),
        ("{'and', [{constant, true}, {constant, false}]}", False),
        ("{'or', [{constant, true}, {constant, false}]}", True),
        ("{'not', {constant, true}}", False),
        ('{equals, "${username}", {string, "ann"}}', True),
        ('{equals, "${unknown}", "${unknown}"}', True),
        ('{match, {string, "${name}-${vhost}"}, "^q-v,"}', True),
        (
            "{for, [{permission, configure, {constant, true}}, "
            "{permission, write, {for, [{resource, queue, {constant, true}}]}}]}",
            True,
        ),
        ("{for, [{permission, configure, {constant, true}}]}", False),
    ],
)
def test_queries_decide(text: str, answer: bool) -> None:
    assert query(text, Needs())(asked()) is answer


def test_values_are_escaped_in_names_of_groups() -> None:
    found: list[str] = []

    def is_member(group: str, _attribute: str, _nested: bool) -> bool:
        found.append(group)
        return False

    query('{in_group, "cn=${vhost},dc=x"}', Needs())(Asked(FACTS, is_member, asked().quote))
    assert found == ["cn=v\\,1,dc=x"]


def test_what_queries_need_is_known_before() -> None:
    needs = Needs()
    query('{\'or\', [{in_group, "a"}, {in_group_nested, "b", "uniqueMember"}]}', needs)
    assert (needs.attributes, needs.nested) == ({"member", "uniqueMember"}, True)


def test_tags_have_queries() -> None:
    text = '[{administrator, {in_group, "cn=admins,dc=x"}}, {monitoring, {constant, false}}]'
    found = tag_queries(text, Needs())
    assert [(tag, decide(asked())) for tag, decide in found] == [
        ("administrator", True),
        ("monitoring", False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{constant}", "{constant, maybe}", "constant", "{constant, true} x",
        "{constant true}",
        '{exists, "cn=x"}', '{in_group, admins}', '{in_group, "x", "a b)(c"}', '{match, "x", "("}',
        '{in_group, "x', "{'and', {constant, true}}", "{for, [{permission, write}]}", "}",
        "[" * 100,
        '{equals, {attribute, "x", "y"}, "z"}',
    ],
)  # fmt: skip
def test_what_is_no_query_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        query(text, Needs())


def test_tags_are_a_list() -> None:
    for text in ("{constant, true}", "[administrator]"):
        with pytest.raises(ValueError, match="TAG"):
            tag_queries(text, Needs())
