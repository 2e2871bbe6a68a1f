"""Filters of consumers: tags and SQL92."""

from __future__ import annotations

import pytest

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.filters import by_expression, by_tags, codes_of, compile_expression, tags_of

PROPERTIES = {"n": "5", "f": "2.5", "text": "it's", "yes": "TRUE", "price": "10"}


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("n = 5", True),
        ("n = 5.0", True),
        ("n <> 5", False),
        ("n > 4 AND n <= 5", True),
        ("n < 5 OR f >= 2.5", True),
        ("NOT (n = 5)", False),
        ("n BETWEEN 5 AND 6", True),
        ("n NOT BETWEEN 1 AND 4", True),
        ("n > 1e1", False),
        ("price > n", True),
        ("-n < 0", True),
        ("text = 'it''s'", True),
        ("text IN ('a', 'it''s')", True),
        ("text NOT IN ('a', 'b')", True),
        ("text CONTAINS 't'", True),
        ("text STARTSWITH 'it'", True),
        ("text ENDSWITH 's' AND text NOT STARTSWITH 's'", True),
        ("missing IS NULL", True),
        ("n IS NOT NULL", True),
        ("yes", True),
        ("yes = TRUE", True),
        ("TRUE AND (FALSE OR TRUE)", True),
        ("n = 5 AND n = 6 OR n = 5", True),
        ("n = 5 -- a comment\n AND /* another */ f > 2", True),
        ("n > 'x'", False),
        ("n = 'x'", False),
        # Neither true nor false: the message is not wanted.
        ("missing = 5", None),
        ("missing <> 5", None),
        ("NOT (missing = 5)", None),
        ("NOT n = 5", None),  # (NOT n) = 5, as RocketMQ reads it,
        ("missing > 5", None),
        ("missing CONTAINS 'a'", None),
        ("missing IN ('a')", None),
        ("missing = 5 OR n = 5", True),
        ("missing = 5 AND n = 6", False),
        ("missing = 5 AND n = 5", None),
    ],
)
def test_expressions(expression: str, wanted: bool | None) -> None:
    assert compile_expression(expression)(PROPERTIES) is wanted


@pytest.mark.parametrize(
    "expression",
    [
        "", "n >", "n > 5 AND", "(n > 5", "n > 5)", "n = 'a", "n IN ()", "n IN (5)", "n NOT 5",
        "n BETWEEN 1", "n IS 5", "5 5", "n = 05", "n @ 5", "(" * 65 + "n" + ")" * 65, "NOT " * 70,
        "n" * 16_385, "n LIKE 'a'", "n = 1x",
    ],
)  # fmt: skip
def test_expressions_that_cannot_be_read(expression: str) -> None:
    with pytest.raises(SyntaxFault):
        compile_expression(expression)


def test_tags() -> None:
    assert tags_of(" a || b ||") == ["a", "b"]
    assert by_tags(codes_of("*")) is None
    assert by_tags(codes_of(None)) is None
    matches = by_tags(codes_of("TagA || b"))
    assert matches is not None
    # Java's hash of "TagA".
    assert matches(2598919, None)
    assert not matches(1, None)


def test_an_expression_waits_for_the_message() -> None:
    assert by_expression("n = 5")(0, None)
