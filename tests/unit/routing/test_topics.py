"""Topic patterns, against a matcher that is obviously right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import PreconditionFailed
from convoymq.routing.topics import TopicTrie, check_pattern
from convoymq.routing.types import Destination, DestinationKind


def to_queue(name: str) -> Destination:
    """A queue as destination."""
    return Destination(DestinationKind.QUEUE, name)


def matches_naively(pattern: list[str], key: list[str]) -> bool:
    """The definition, word by word."""
    if not pattern:
        return not key
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(matches_naively(rest, key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and head in ("*", key[0]) and matches_naively(rest, key[1:])


def matches(pattern: str, key: str) -> bool:
    """Ask a trie that holds one pattern."""
    trie = TopicTrie()
    trie.add(pattern, to_queue("q"))
    return to_queue("q") in set(trie.match(key))


def words(text: str) -> list[str]:
    """Split as the definition does: an empty key has no words."""
    return text.split(".") if text else []


PATTERNS = st.lists(st.sampled_from(["a", "b", "", "*", "#"]), max_size=6).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "", "*", "#"]), max_size=7).map(".".join)


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.", True),
        ("*", "", False),
        ("#", "", True),
        ("", "", True),
        ("", "a", False),
        ("#", "a.b.c", True),
        ("a.#", "a", True),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("a.#.b", "a.b.c", False),
        ("#.a.#", "x.a.y", True),
        ("#.#", "", True),
        ("#.*", "", False),
        ("#.*", "a", True),
        ("*.*", "..", False),
        ("*.*.*", "..", True),
        ("a.b", "a.#", False),
        ("a.*", "a.#", True),
        ("#.b", "#.b", True),
    ],
)
def test_edge_cases(pattern: str, key: str, expected: bool) -> None:
    assert matches(pattern, key) is expected
    assert matches_naively(words(pattern), words(key)) is expected


@given(st.lists(PATTERNS, max_size=8), st.lists(KEYS, min_size=1, max_size=4))
def test_the_trie_agrees_with_the_definition(patterns: list[str], keys: list[str]) -> None:
    trie = TopicTrie()
    for index, pattern in enumerate(patterns):
        trie.add(pattern, to_queue(str(index)))
    for key in keys:
        expected = {
            to_queue(str(index))
            for index, pattern in enumerate(patterns)
            if matches_naively(words(pattern), words(key))
        }
        assert set(trie.match(key)) == expected


@given(st.lists(st.tuples(PATTERNS, st.sampled_from("xyz")), max_size=10), st.data())
def test_removing_leaves_the_rest_and_in_the_end_nothing(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    trie = TopicTrie()
    for pattern, name in pairs:
        trie.add(pattern, to_queue(name))
    order = data.draw(st.permutations(pairs))
    for count, (pattern, name) in enumerate(order):
        key = data.draw(KEYS)
        expected = {
            to_queue(name) for pattern, name in order[count:]
            if matches_naively(words(pattern), words(key))
        }  # fmt: skip
        assert set(trie.match(key)) == expected
        trie.remove(pattern, to_queue(name))
    assert not trie._root.children
    assert not trie._root.destinations


def test_a_long_key_and_two_wildcards_stay_cheap() -> None:
    """A pattern that made a backtracking matcher try every split visits each node once a word."""
    trie = TopicTrie()
    trie.add("#.a.#.b", to_queue("q"))
    assert list(trie.match(".".join(["a"] * 127))) == []


def test_more_than_two_many_wildcards_are_refused() -> None:
    check_pattern("#.a.#")
    check_pattern("##.a#.#")
    with pytest.raises(PreconditionFailed) as caught:
        check_pattern("#.a.#.#")
    assert caught.value.text == (
        "Topic binding key '#.a.#.#' uses 3 '#' wildcards, at most 2 are allowed"
    )
