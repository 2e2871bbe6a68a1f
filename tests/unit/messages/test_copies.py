"""CC and BCC: more routing keys from the headers."""

from __future__ import annotations

import pytest

from convoymq.messages.copies import extra_keys, without_blind_copies
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import EMPTY, Table


def test_both_headers_give_keys_and_only_one_is_passed_on() -> None:
    headers = Table.of({"BCC": ["c"], "CC": ["a", "b"]})
    assert extra_keys(headers) == ("a", "b", "c")
    assert without_blind_copies(headers) == Table.of({"CC": ["a", "b"]})
    assert extra_keys(EMPTY) == ()


@pytest.mark.parametrize(
    ("value", "kind"), [("a", "longstr"), ([1], "long"), ({"a": 1}, "table"), (["a", None], "void")]
)
def test_anything_but_an_array_of_strings_is_refused(value: object, kind: str) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        extra_keys(Table.of({"CC": value}))
    assert caught.value.text == f'invalid message: {{unacceptable_type_in_header,"CC",{kind}}}'


def test_a_key_that_is_not_text_equals_no_other() -> None:
    (key,) = extra_keys(Table.of({"CC": [b"\xff"]}))
    assert key != "\ufffd"
