"""Keys of escaped messages: sets of offsets against a naive model, and the choice of targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq.acting import escape
from convoymq.rocketmq.acting.escape import (
    HOME_MIN,
    Key,
    KeyTable,
    Outcome,
    Target,
    Targets,
    home_number,
    key_of,
    position_key,
    positions_of,
)

KEY = Key("b", "SCHEDULE_TOPIC_XXXX", 3, 17)


def test_keys_are_text() -> None:
    assert str(KEY) == "b:SCHEDULE_TOPIC_XXXX:3:17"
    assert key_of(str(KEY)) == KEY
    assert key_of("a:b:topic|%RETRY%:0:1") == Key("a:b", "topic|%RETRY%", 0, 1)


@pytest.mark.parametrize("text", ["", "b:t:1", "b:t:x:1", "b:t:1:-1", ":t:1:1", "b::1:1"])
def test_other_text_is_no_key(text: str) -> None:
    assert key_of(text) is None


@given(st.lists(st.integers(0, 40)), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9))))
def test_a_table_is_a_set_of_keys(added: list[int], merged: list[tuple[int, int]]) -> None:
    table = KeyTable()
    naive = set(added)
    for offset in added:
        table.add(KEY._replace(offset=offset))
        table.check_invariants()
    for first, size in merged:
        naive |= set(range(first, first + size))
        table.merge("b", {"SCHEDULE_TOPIC_XXXX:3": [(first, first + size)]})
        table.check_invariants()
    other = KeyTable()
    other.merge("b", table.of("b"))
    for offset in range(60):
        key = KEY._replace(offset=offset)
        assert table.has(key) == other.has(key) == (offset in naive)
    assert not table.has(KEY._replace(broker="c"))


def test_the_lowest_ranges_are_dropped_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escape, "RANGES_MAX", 3)
    table = KeyTable()
    for offset in (0, 2, 4):
        table.add(KEY._replace(offset=offset))
    assert table.has(KEY._replace(offset=0))
    table.add(KEY._replace(offset=6))
    table.check_invariants()
    assert not table.has(KEY._replace(offset=0))
    assert table.of("b") == {"SCHEDULE_TOPIC_XXXX:3": [(2, 3), (4, 5), (6, 7)]}


@pytest.mark.parametrize("ranges", [[(3, 3)], [(4, 3)], [(-1, 3)], [(1, 2, 3)]])
def test_broken_ranges_are_refused(ranges: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError):
        KeyTable().merge("b", {"t:0": ranges})


def test_neighbours_of_a_queue_escape_to_one_broker_and_all_of_its_queues() -> None:
    targets = Targets("own")
    writable = {"own": 4, "x": 2, "y": 2}
    chosen = [targets.choose(KEY._replace(offset=n), writable) for n in range(4)]
    assert len({t.broker for t in chosen if t}) == 1
    assert {t.queue for t in chosen if t} == {0, 1}
    assert targets.choose(KEY, {"own": 4}) is None


def test_an_attempt_with_an_unknown_end_stays_with_its_target() -> None:
    """RocketMQ sends it to the next broker, which does not know that it is a repeat."""
    targets = Targets("own")
    target = targets.choose(KEY, {"x": 1, "y": 1})
    assert target is not None
    other = {"x": 1, "y": 1}
    del other[target.broker]
    targets.attempt(KEY, target)
    targets.ended(KEY, Outcome.UNKNOWN)
    assert targets.choose(KEY, other) is None
    assert targets.choose(KEY, {"x": 1, "y": 1}) == target
    assert targets.choose(KEY._replace(offset=18), other) is not None
    targets.ended(KEY, Outcome.REFUSED)
    assert targets.choose(KEY, other) is not None


def test_a_position_stands_for_all_offsets_up_to_it_and_is_never_a_repeat() -> None:
    table = KeyTable()
    for queue, last in ((0, 2), (0, 34), (0, 9), (1, 0)):
        key = position_key("b", "%RETRY%g_t", "g", queue, last)
        assert key == key_of(str(key))
        table.add(key)
        assert not table.has(key)
    table.add(KEY)
    found = table.of("b")
    assert found["%RETRY%g_t@g:0"] == [(34, 35)]
    assert sorted(positions_of(found)) == [("%RETRY%g_t", "g", 0, 35), ("%RETRY%g_t", "g", 1, 1)]
    targets = Targets("own")
    targets.attempt(key, Target("x", 0))
    assert not targets.is_bound(key)


def test_brokers_have_numbers_that_java_reads_and_no_queue_has() -> None:
    numbers = {home_number(name) for name in ("broker-Aa", "broker-BB", "a", "")}
    assert len(numbers) == 4
    assert all(HOME_MIN <= number < 1 << 31 for number in numbers)
