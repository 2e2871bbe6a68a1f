"""The referee of order per key finds what it is there for."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.key_order import Delivery, KeyOrder

KEYS = 2


def violations(
    deliveries: list[tuple[int, str]], sent_again: Collection[int] = ()
) -> tuple[list[str], KeyOrder]:
    referee = KeyOrder(KEYS, sent_again)
    referee.take(Delivery(*each) for each in deliveries)
    return referee.violations, referee


def test_keys_may_overtake_each_other_and_messages_may_come_again() -> None:
    found, referee = violations(
        [(1, "a"), (3, "b"), (0, "a"), (3, "b"), (2, "c"), (5, "d"), (1, "a")]
    )
    assert not found
    assert referee.missing(range(8)) == [4, 6, 7]


@pytest.mark.parametrize(
    ("deliveries", "text"),
    [
        ([(0, "a"), (4, "c"), (2, "b")], "key 0: 2 came after 0"),
        ([(2, "b"), (0, "a")], "key 0: 1 came after -1"),
        ([(0, "b"), (2, "a")], "2 has the token a, not behind b"),
        ([(0, "b"), (2, "b")], "2 has the token b, not behind b"),
        ([(0, "a"), (0, "b")], "0 is stored as a and as b"),
    ],
)
def test_violations_are_found(deliveries: list[tuple[int, str]], text: str) -> None:
    found, _ = violations(deliveries)
    assert found[0] == text


def test_what_was_overtaken_counts_as_well() -> None:
    found, _ = violations([(0, ""), (4, ""), (2, ""), (6, "")])
    assert found == ["key 0: 2 came after 0", "key 0: 1 came after 2"]


def test_a_publisher_that_sent_again_may_have_stored_twice() -> None:
    found, _ = violations([(0, "a"), (2, "b"), (0, "c"), (2, "d"), (4, "e")], sent_again={0, 2})
    assert not found
