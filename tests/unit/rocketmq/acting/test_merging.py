"""What a master takes over of a member that served meanwhile."""

from __future__ import annotations

from convoymq.rocketmq.acting.merging import after, is_newer, joined
from convoymq.rocketmq.remoting.values import DataVersion


def test_topics_of_both_are_kept_and_of_one_name_that_of_the_newer_table() -> None:
    """RocketMQ takes none: a topic that was made on the acting slave is gone."""
    old, new = DataVersion(0, 9, 1), DataVersion(0, 5, 2)
    assert is_newer(new, old)
    assert not is_newer(old, old)
    assert joined({"a": 1, "b": 1}, old, {"b": 2, "c": 2}, new) == {"a": 1, "b": 2, "c": 2}
    assert joined({"a": 1, "b": 1}, new, {"b": 2, "c": 2}, old) == {"a": 1, "b": 1, "c": 2}


def test_the_version_after_a_merge_follows_both() -> None:
    one, other = DataVersion(0, 9, 1), DataVersion(0, 5, 7)
    merged = after(one, other, 10)
    assert merged == DataVersion(0, 10, 8)
    assert is_newer(merged, one)
    assert is_newer(merged, other)
