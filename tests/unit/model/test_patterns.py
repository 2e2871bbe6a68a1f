"""Users' regular expressions: what they match, what is refused, and that none takes long."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import (
    LENGTH_MAX,
    compile_pattern,
    escaped,
)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (".*", "", True),
        (".*", "anything\n", True),
        ("^$", "", True),
        ("^$", "x", False),
        ("^orders-[0-9]{1,5}$", "orders-17", True),
        ("^orders-[0-9]{1,5}$", "orders-17\n", False),
        ("b", "abc", True),
        ("é.", "xéa", True),
        ("(?i)ABC", "xabcx", True),
        (r"^(a|b)\.c$", "b.c", True),
        ("a", "\ud800a", True),
    ],
)
def test_expressions_are_searched_for(pattern: str, text: str, expected: bool) -> None:
    assert compile_pattern(pattern).search(text) is expected


def test_case_can_be_ignored() -> None:
    assert compile_pattern("^QUEUE", ignore_case=True).search("queue-1")
    assert not compile_pattern("^QUEUE").search("queue-1")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing"),
        ("a(?=b)", "invalid perl operator"),
        ("(?<!b)a", "invalid"),
        (r"(a)\1", "invalid escape sequence"),
        ("a++", "bad repetition"),
        ("(?>a)", "invalid perl operator"),
        (r"\pL{1000}", "too large"),
        ("\ud800", "not Unicode"),
        ("a" * (LENGTH_MAX + 1), "at most 4096"),
    ],
)
def test_what_is_not_served_is_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(PreconditionFailed, match=reason):
        compile_pattern(pattern)


def test_an_expression_that_backtracks_takes_no_time() -> None:
    # Python's engine needs 2 to the power of 250 steps for it.
    start = time.process_time()
    assert not compile_pattern("^(x+x+)+y$").search("x" * 255)
    assert time.process_time() - start < 1.0


@given(st.text())
def test_an_escaped_text_matches_itself(text: str) -> None:
    assert compile_pattern(f"^{escaped(text)}$").search(text)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_compiles_or_is_refused(pattern: str, text: str) -> None:
    with contextlib.suppress(PreconditionFailed):
        assert compile_pattern(pattern).search(text) in (True, False)
