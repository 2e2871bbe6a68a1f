"""What a master takes over of a member that served meanwhile."""

from __future__ import annotations

import pytest

from convoymq.rocketmq.acting.merging import after, is_newer, joined
from convoymq.rocketmq.remoting.values import DataVersion


def test_topics_of_both_are_kept_and_of_one_name_that_of_the_newer_table() -> None:
    """RocketMQ takes none: a topic that was made on the acting slave is gone."""
    old, new = DataVersion(0, 9, 1), DataVersion(0, 5, 2)
    assert is_newer(new, old)
    assert not is_newer(old, old)
    one, other = {"a": 1, "b": 1}, {"b": 2, "c": 2}
    assert joined(one, old, other, new, {}, {}) == {"a": 1, "b": 2, "c": 2}
    assert joined(one, new, other, old, {}, {}) == {"a": 1, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("own_deleted", "deleted", "left"),
    [
        ({"b": 5, "c": 5}, {}, {"a": 1}),
        ({"b": 5, "c": 5}, {"b": 5}, {"a": 1, "b": 2}),
        ({}, {"a": 5, "b": 5}, {"b": 2, "c": 2}),
        ({"c": 5}, {"c": 7}, {"a": 1, "b": 2, "c": 2}),
    ],
)
def test_an_entry_comes_back_only_if_it_was_made_again(
    own_deleted: dict[str, int], deleted: dict[str, int], left: dict[str, int]
) -> None:
    """`b` is in both tables; the other one is newer."""
    old, new = DataVersion(0, 9, 1), DataVersion(0, 5, 2)
    one = {name: 1 for name in "ab" if name not in own_deleted}
    other = {"b": 2, "c": 2}
    assert joined(one, old, other, new, own_deleted, deleted) == left


def test_the_version_after_a_merge_follows_both() -> None:
    one, other = DataVersion(0, 9, 1), DataVersion(0, 5, 7)
    merged = after(one, other, 10)
    assert merged == DataVersion(0, 10, 8)
    assert is_newer(merged, one)
    assert is_newer(merged, other)
