"""The headers exchange: four modes, void arguments, types."""

from __future__ import annotations

import pytest

from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Field, Table
from convoymq.routing.headers import HeadersPattern, check_match_arguments


def matches(arguments: dict[str, object], headers: dict[str, object]) -> bool:
    """Compare as a binding with these arguments does."""
    table = Table.of(arguments)
    check_match_arguments(table)
    return HeadersPattern.of(table).matches(Table.of(headers))


@pytest.mark.parametrize(
    ("arguments", "headers", "expected"),
    [
        ({}, {}, True),
        ({}, {"a": 1}, True),
        ({"x-match": "all"}, {"a": 1}, True),
        ({"x-match": "any"}, {"a": 1}, False),
        ({"x-match": "all-with-x"}, {}, True),
        ({"x-match": "any-with-x"}, {"x-a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"x-match": "any", "a": 1, "b": 2}, {"a": 1}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"a": 2}, False),
        ({"x-match": "all", "a": 1, "x-b": 2}, {"a": 1}, True),
        ({"x-match": "any", "a": 1, "x-b": 2}, {"x-b": 2}, False),
        ({"x-match": "all-with-x", "a": 1, "x-b": 2}, {"a": 1}, False),
        ({"x-match": "all-with-x", "a": 1, "x-b": 2}, {"a": 1, "x-b": 2}, True),
        ({"x-match": "any-with-x", "a": 1, "x-b": 2}, {"x-b": 2}, True),
        ({"a": None}, {"a": "anything"}, True),
        ({"a": None}, {}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1.5}, {"a": 1}, False),
        ({"a": 1.0}, {"a": True}, False),
        ({"a": 1.0}, {"a": "1.0"}, False),
    ],
)
def test_modes(arguments: dict[str, object], headers: dict[str, object], expected: bool) -> None:
    assert matches(arguments, headers) is expected


def test_integers_match_whatever_their_width() -> None:
    assert matches({"a": Field("I", 5)}, {"a": Field("b", 5)})


def test_a_wrong_mode_is_refused_with_its_value() -> None:
    with pytest.raises(PreconditionFailed) as caught:
        matches({"x-match": "some"}, {})
    assert caught.value.text == (
        'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x'
    )
    with pytest.raises(PreconditionFailed, match="Invalid x-match field type long"):
        matches({"x-match": 1}, {})
