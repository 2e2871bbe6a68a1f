"""Readers without a group: what they read, against who owned which logical partition."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules.lineage import Lineage
from convoymq.topics.rules.reading import DELETED, Line, ReadPlan
from convoymq.topics.rules.refusals import BadPosition, DataExpired, UnknownPartition
from tests.unit.topics.rules.histories import History, histories

OPEN_MESSAGES = 2
"""In each partition that is not sealed."""


class Row(NamedTuple):
    """A line as clients have it."""

    pid: int
    lo: int
    hi: int
    state: str
    created_version: int
    close_offset: int | None
    parents: tuple[int, ...]
    children: tuple[int, ...]


def rows(lineage: Lineage, deleted: frozenset[int] = frozenset()) -> list[Row]:
    return [
        Row(
            each.pid,
            each.lo,
            each.hi,
            DELETED if each.pid in deleted else each.state.value,
            each.created_version,
            each.close_offset,
            each.parents,
            each.children,
        )
        for each in lineage.partitions.values()
    ]


def roots(lines: list[Row]) -> dict[int, int]:
    return {line.pid: 0 for line in lines if not line.parents}


def end_of(line: Line) -> int:
    return 1 + OPEN_MESSAGES if line.close_offset is None else line.close_offset


def lp_of(line: Line, offset: int) -> int:
    """Messages take turns in the logical partitions of their partition."""
    return line.lo + offset % (line.hi - line.lo)


def expected(history: History, lp: int, first: int | None = None) -> list[tuple[int, int]]:
    """What a reader gets of a logical partition, from a partition on."""
    chain = [line for line in rows(history.lineage) if line.lo <= lp < line.hi]
    chain.sort(key=lambda line: line.created_version)
    if first is not None:
        chain = chain[[line.pid for line in chain].index(first) :]
    return [
        (line.created_version, offset)
        for line in chain
        for offset in range(1, end_of(line))
        if lp_of(line, offset) == lp
    ]


def read_all(
    data: st.DataObject, lines: list[Row], plan: ReadPlan, whole: int | None
) -> dict[int, list[tuple[int, int]]]:
    """Reads in any order that the plan allows; begins again elsewhere now and then."""
    by_pid = {line.pid: line for line in lines}
    got: dict[int, list[tuple[int, int]]] = {}
    while True:
        if data.draw(st.integers(0, 4)) == 0:
            plan = ReadPlan(lines, plan.position, whole, ranges=plan.ranges)
        left = [each for each in plan.readable() if each.offset < end_of(by_pid[each.pid])]
        if not left:
            return got
        each = data.draw(st.sampled_from(left))
        line = by_pid[each.pid]
        until = data.draw(st.integers(each.offset + 1, end_of(line)))
        for offset in range(each.offset, until):
            lp = lp_of(line, offset)
            assert plan.is_mine(lp) or plan.is_partial(each.pid)
            if plan.is_mine(lp):
                got.setdefault(lp, []).append((each.created_version, offset))
        plan.advance(each.pid, until)


@settings(max_examples=80)
@given(histories(), st.data())
def test_a_reader_gets_every_message_of_each_key_once_and_in_order(
    history: History, data: st.DataObject
) -> None:
    lines = rows(history.lineage)
    logical = history.route.logical
    got = read_all(data, lines, ReadPlan(lines, roots(lines), logical), logical)
    for lp in range(logical):
        assert got.get(lp, []) == expected(history, lp)


@settings(max_examples=60)
@given(histories(), st.data())
def test_a_reader_of_one_partition_gets_its_logical_partitions_and_no_others(
    history: History, data: st.DataObject
) -> None:
    lines = rows(history.lineage)
    start = data.draw(st.sampled_from(lines))
    got = read_all(data, lines, ReadPlan(lines, {start.pid: 0}), None)
    assert got.keys() <= set(range(start.lo, start.hi))
    for lp in range(start.lo, start.hi):
        assert got.get(lp, []) == expected(history, lp, start.pid)


def test_a_merged_partition_waits_for_all_that_it_comes_from() -> None:
    history = History.begin(4, 2)
    (merged,) = history.merge(0, 1, messages=3)
    lines = rows(history.lineage)
    plan = ReadPlan(lines, {0: 4, 1: 2}, 4)
    assert [(each.pid, each.offset) for each in plan.readable()] == [(1, 2)]
    assert plan.position == {0: 4, 1: 2}
    plan.advance(1, 4)
    assert [(each.pid, each.offset) for each in plan.readable()] == [(merged, 1)]
    assert plan.position == {merged: 1}


def test_a_reader_goes_on_into_partitions_that_come_later() -> None:
    history = History.begin(4, 1)
    plan = ReadPlan(rows(history.lineage), {0: 1}, 4)
    plan.advance(0, 3)
    history.split(0, 2, messages=2)
    plan.update(rows(history.lineage))
    assert [each.pid for each in plan.readable()] == [1, 2]


def test_positions_that_are_none_are_refused() -> None:
    history = History.begin(4, 2)
    (merged,) = history.merge(0, 1)
    first, second = history.split(merged, 2)
    lines = rows(history.lineage)
    with pytest.raises(BadPosition, match="two places"):
        ReadPlan(lines, {0: 1, first: 1, second: 1}, 4)
    with pytest.raises(BadPosition, match="comes after it"):
        ReadPlan(lines, {0: 1, second: 1}, 4)
    with pytest.raises(BadPosition, match="from 2 on no place"):
        ReadPlan(lines, {0: 1}, 4)
    with pytest.raises(BadPosition, match="no partition"):
        ReadPlan(lines, {})
    with pytest.raises(BadPosition, match="negative"):
        ReadPlan(lines, {0: -1, 1: 1}, 4)
    with pytest.raises(UnknownPartition):
        ReadPlan(lines, {9: 1})


def test_what_is_deleted_ends_a_reader_that_needs_it_and_no_other() -> None:
    history = History.begin(2, 1)
    (moved,) = history.move(0, messages=2)
    lines = rows(history.lineage, frozenset({0}))
    with pytest.raises(DataExpired):
        ReadPlan(lines, {0: 1}, 2)
    # It begins behind what is gone.
    assert [each.pid for each in ReadPlan(lines, {0: 3}, 2).readable()] == [moved]
    plan = ReadPlan(rows(history.lineage), {0: 2}, 2)
    with pytest.raises(DataExpired):
        plan.update(lines)


def test_starts_of_later_partitions_are_kept() -> None:
    history = History.begin(2, 1)
    (moved,) = history.move(0, messages=2)
    plan = ReadPlan(rows(history.lineage), {0: 3}, 2, starts={moved: 7})
    assert [(each.pid, each.offset) for each in plan.readable()] == [(moved, 7)]
