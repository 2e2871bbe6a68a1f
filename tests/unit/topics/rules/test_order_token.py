"""Order tokens: they increase along every logical partition, packed or not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.model.errors import SyntaxFault
from convoymq.topics.rules.order_token import NUMBER_MAX, SIZE_BYTES, OrderToken
from tests.unit.topics.rules.histories import History, histories

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, NUMBER_MAX))
TOKENS = st.builds(OrderToken, NUMBERS, NUMBERS)


@given(TOKENS, TOKENS)
@settings(max_examples=60)
def test_bytes_and_text_compare_as_tokens_do(one: OrderToken, other: OrderToken) -> None:
    assert (one < other) == (one.pack() < other.pack()) == (str(one) < str(other))
    assert (one == other) == (one.pack() == other.pack()) == (str(one) == str(other))
    assert len(one.pack()) == SIZE_BYTES


@given(TOKENS)
@settings(max_examples=50)
def test_bytes_and_text_lead_back(token: OrderToken) -> None:
    assert OrderToken.unpack(token.pack()) == token
    assert OrderToken.parse(str(token)) == token


@given(histories())
@settings(max_examples=60)
def test_tokens_increase_along_every_logical_partition(history: History) -> None:
    """I13: over all splits, merges and moves, in the order in which messages were stored."""
    naive = history.naive
    for lp in range(history.route.logical):
        tokens = [
            history.lineage.partition(pid).token(offset)
            for pid in naive.chain(lp)
            for offset in range(1, 1 + naive.messages.get(pid, 2))
        ]
        assert tokens == sorted(set(tokens))


def test_known_forms_stay_what_they_are() -> None:
    token = OrderToken(3, 258)
    assert str(token) == "0000000000000003-0000000000000102"
    assert token.pack().hex() == "00000000000000030000000000000102"


@pytest.mark.parametrize(
    "text",
    ["", "3-4", "0" * 33, "0" * 16 + "-" + "0" * 15, "0" * 16 + "-" + "0" * 17, "+" * 16 + "-"
     + "0" * 16, "0" * 16 + "-" + "0" * 15 + "G", "0" * 16 + "-" + "0" * 15 + "A"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(SyntaxFault, match="not an order token"):
        OrderToken.parse(text)


@pytest.mark.parametrize("packed", [b"", b"1" * 15, b"1" * 17])
def test_other_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(SyntaxFault, match="16 bytes"):
        OrderToken.unpack(packed)
