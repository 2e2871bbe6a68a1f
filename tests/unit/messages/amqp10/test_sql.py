"""SQL filters: what expressions mean, and which are none."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.messages.amqp10.sql import DEPTH_MAX, LENGTH_MAX, Like, compile_sql
from convoymq.messages.amqp10.values import Symbol, UInt
from convoymq.model.errors import SyntaxFault

VALUES: dict[str, Any] = {
    "n": UInt(7), "f": 0.5, "text": "orders.new", "yes": True, "no": False, "b": b"\xca\xfe",
    "a name": 1, "u": UUID(int=1), "symbol": Symbol("s"), "[x]": 2,
}  # fmt: skip
FIELDS: dict[str, Any] = {"message-id": "m", "group-sequence": UInt(3), "creation-time": 1000}


class Message:
    priority = 4

    def application_property(self, name: str) -> object:
        return VALUES.get(name)

    def field(self, name: str) -> object:
        return FIELDS.get(name)


def wanted(text: str) -> bool:
    return compile_sql(text, lambda: 5_000)(Message())


@pytest.mark.parametrize(
    "text",
    [
        "n = 7", "n = 7.0", "n <> 8", "n != 8", "f < n", "n >= 7", "-n = -7", "+n = 7",
        "n + 1 = 8 AND n - 1 = 6", "n * 2 = 14", "n / 2 = 3.5", "n % 4 = 3", "1 + 2 * 3 = n",
        "(1 + 2) * 3 = 9", "1e1 = 10", ".5 = f", "5E-1 = f",
        "yes", "NOT no", "yes = TRUE", "no = FALSE", "no OR yes", "NOT (no AND yes)",
        "missing OR yes", "NOT (missing AND no)", "missing IS NULL", "n IS NOT NULL",
        "u IS NOT NULL", "text = 'orders.new'", 'text = "orders.new"', "symbol = 's'",
        "text > 'orders'", "text LIKE 'orders.%'", "text LIKE '%.new'", "text LIKE 'o%s.n_w'",
        "text NOT LIKE 'x%'", "text LIKE 'orders!.new' ESCAPE '!'", "n IN (1, 3 + 4)",
        "text NOT IN ('a', 'b')", "b = 0xCAFE", "[a name] = 1", "a.[a name] = 1", "[[[x]]] = 2",
        "application_properties.n = 7", "p.message_id = 'm'", "properties.group_sequence = 3",
        "h.priority = 4", "header.priority > 3", "p.creation_time < UTC()", "UTC() = 5000",
        "'it''s' = \"it's\"", "n <> 'x'", "yes <> 1", "NOT yes = 1",
    ],
)  # fmt: skip
def test_what_is_wanted(text: str) -> None:
    assert wanted(text)
    assert wanted(text.replace("UTC()", "5000")) is compile_sql(text, lambda: 5000, jms=True)(
        Message()
    ), "a selector of JMS means the same"


@pytest.mark.parametrize(
    ("text", "is_wanted"),
    [
        ("n between 7 and 8 and f Between 0 And 1", True), ("n NOT BETWEEN 1 AND 6", True),
        ("n BETWEEN 8 AND 9", False), ("missing BETWEEN 1 AND 2", False),
        ("yes and not no or FALSE", True), ("text like 'x%' OR missing is null", True),
        ("JMSPriority = 4", True), ("JMSMessageID = 'm'", True), ("JMSXGroupSeq >= 3", True),
        ("JMSTimestamp < 1001", True), ("JMSType IS NULL", True),
    ],
)  # fmt: skip
def test_selectors_of_jms(text: str, is_wanted: bool) -> None:
    assert compile_sql(text, lambda: 0, jms=True)(Message()) is is_wanted


@pytest.mark.parametrize(
    "text",
    [
        "n = 8", "n = 'x'", "n < 'x'", "text > 1", "yes = 1", "yes > no", "missing = 1",
        "missing <> 1", "NOT missing", "NOT (missing = 1)", "missing AND yes", "missing OR no",
        "n", "text", "1", "n / 0 = 1", "n % 0 = 1", "n % 1.5 = 1", "text + 1 = 2", "-text = 1",
        "missing LIKE '%'", "n LIKE '%'", "text LIKE 'orders'", "text LIKE 'orders_'",
        "text LIKE '%x%'", "missing IN (1)", "missing NOT IN (1)", "n IN (1, missing)",
        "n NOT IN (1, missing)", "u < u", "p.to = 'x'", "TRUE AND FALSE",
    ],
)  # fmt: skip
def test_what_is_not_wanted(text: str) -> None:
    assert not wanted(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "n =", "= 7", "n = 7 n", "(n = 7", "n = 7)", "n == 7", "n LIKE 7", "n LIKE", "n NOT 7",
        "n IN ()", "n IN 7", "n IS 7", "p.nothing = 1", "h.durable", "'open", "0xABC", "n ; 1",
        "text LIKE 'a' ESCAPE 'ab'", "text LIKE 'a!' ESCAPE '!'", "text LIKE 'a\n'", "NOT",
        "x.y = 1",
        "(" * (DEPTH_MAX + 1) + "yes" + ")" * (DEPTH_MAX + 1), "NOT " * (DEPTH_MAX + 1) + "yes",
        "yes AND " * 100 + "yes", f"'{'a' * LENGTH_MAX}' = 'a'",
    ],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(SyntaxFault):
        wanted(text)


def like(pattern: str, text: str) -> bool:
    """The same by trying everything."""
    if not pattern:
        return not text
    if pattern[0] == "%":
        return any(like(pattern[1:], text[at:]) for at in range(len(text) + 1))
    return bool(text) and pattern[0] in ("_", text[0]) and like(pattern[1:], text[1:])


@given(st.text("ab_%", max_size=6), st.text("ab", max_size=8))
def test_patterns_match_as_by_trying_everything(pattern: str, text: str) -> None:
    assert Like(pattern, "").matches(text) is like(pattern, text)


@given(st.text("n17'\"()=<>%+-*/ANDORTILKE .[]", max_size=40))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        found = compile_sql(text, lambda: 0)
    except SyntaxFault:
        return
    assert found(Message()) in (True, False)
