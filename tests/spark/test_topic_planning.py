"""Batches of a topic: cuts, starts, and that no message comes before one of its key, against a
model that knows nothing of cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.spark import topic_planning
from convoymq.spark.errors import SourceError
from convoymq.spark.topic_planning import Cut, History, Plan, advanced, check_vector, placed
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Partition, PartitionState
from tests.unit.topics.rules import histories as made_histories

FIRST = FIRST_USER_OFFSET
OPEN_MESSAGES = 3
"""In each partition of the newest route."""


def view(history: made_histories.History, version: int) -> History:
    """The topic as it was at a version."""
    lines = {}
    for pid, line in history.lineage.partitions.items():
        if line.created_version > version:
            continue
        if line.sealed_version is not None and line.sealed_version > version:
            line = replace(
                line,
                state=PartitionState.OPEN,
                sealed_version=None,
                close_offset=None,
                children=(),
            )
        lines[pid] = line
    return topic(lines, history.route.logical)


def topic(
    lines: Mapping[int, Partition], logical: int, lost: frozenset[int] = frozenset()
) -> History:
    return History(
        topic="t",
        created_ms=1,
        version=0,
        logical=logical,
        hash_seed=0,
        partitions=lines,
        lost=lost,
    )


def final_end(history: made_histories.History, pid: int) -> int:
    close = history.lineage.partitions[pid].close_offset
    return FIRST + OPEN_MESSAGES if close is None else close


def expected(history: made_histories.History, lp: int) -> list[tuple[int, int]]:
    """All messages of the partitions that owned a logical partition, as they were published."""
    return [
        (pid, offset)
        for pid in history.naive.chain(lp)
        for offset in range(FIRST, final_end(history, pid))
    ]


def read_of(history: made_histories.History, plan: Plan, lp: int) -> list[tuple[int, int]]:
    """What a batch has of a logical partition, sorted by order token."""
    rows = [
        (pid, offset)
        for pid, (start, end) in plan.ranges.items()
        if lp in history.naive.lps(pid)
        for offset in range(start, end)
    ]
    created = history.lineage.partitions
    return sorted(rows, key=lambda row: (created[row[0]].created_version, row[1]))


@st.composite
def reads(draw: st.DrawFn) -> tuple[made_histories.History, list[Plan], Cut, bool]:
    """A query that runs while partitions grow and change, then reads the rest."""
    history = draw(made_histories.histories(steps_max=6))
    same_batch = draw(st.booleans())
    cut: Cut | None = None
    plans = []
    ends: dict[int, int] = {}
    for version in range(len(history.routes)):
        now = view(history, version)
        cut = placed(now, topic_planning.first_offset) if cut is None else cut
        for _ in range(draw(st.integers(0, 2))):
            for pid, line in now.partitions.items():
                known = ends.get(pid, FIRST)
                last = final_end(history, pid)
                ends[pid] = last if line.is_closed else draw(st.integers(known, last))
            allowed = draw(st.none() | st.integers(1, 5))
            plan = topic_planning.planned(now, cut, ends, allowed, same_batch=same_batch)
            assert allowed is None or plan.rows <= allowed
            plans.append(plan)
            cut = plan.cut
            check_vector(now, cut)
    assert cut is not None
    whole = view(history, len(history.routes) - 1)
    ends = {pid: final_end(history, pid) for pid in whole.partitions}
    for _ in range(len(history.lineage.partitions) + 1):
        plans.append(topic_planning.planned(whole, cut, ends, same_batch=same_batch))
        cut = plans[-1].cut
    return history, plans, cut, same_batch


@given(reads())
def test_every_message_is_read_once_and_none_before_its_ancestors(
    read: tuple[made_histories.History, list[Plan], Cut, bool],
) -> None:
    history, plans, cut, same_batch = read
    for lp in range(history.route.logical):
        found = [read_of(history, plan, lp) for plan in plans]
        assert [row for rows in found for row in rows] == expected(history, lp)
        if not same_batch:
            assert all(len({pid for pid, _ in rows}) <= 1 for rows in found)
    assert sorted(cut) == sorted(history.open_pids)


@given(made_histories.histories(steps_max=6), st.data())
@settings(max_examples=60)
def test_a_start_gives_every_logical_partition_its_first_message_that_is_left(
    history: made_histories.History, data: st.DataObject
) -> None:
    """As by time: of each partition what is left is a tail, and nothing is dropped behind it."""
    now = view(history, len(history.routes) - 1)
    begins = {}
    passed: set[int] = set()
    for pid in sorted(now.partitions, key=lambda pid: now.partitions[pid].created_version):
        begins[pid], end = FIRST, final_end(history, pid)
        if passed.issuperset(now.partitions[pid].parents):
            begins[pid] = data.draw(st.integers(FIRST, end))
            passed |= {pid} if begins[pid] == end else set()
    cut = placed(now, begins.__getitem__)
    check_vector(now, cut)
    ends = {pid: final_end(history, pid) for pid in now.partitions}
    plan = topic_planning.planned(now, cut, ends, same_batch=True)
    for lp in range(history.route.logical):
        left = [row for row in expected(history, lp) if row[1] >= begins[row[0]]]
        found = read_of(history, plan, lp)
        assert found == left


def line(pid: int, lo: int, hi: int, **more: object) -> Partition:
    return Partition(pid, lo, hi, **{"created_version": 0, **more})  # type: ignore[arg-type]


def split_topic(**of_parent: object) -> dict[int, Partition]:
    sealed = {
        "state": PartitionState.SEALED,
        "sealed_version": 1,
        "close_offset": 10,
        "children": (1, 2),
    }
    return {
        0: line(0, 0, 4, **{**sealed, **of_parent}),
        1: line(1, 0, 2, created_version=1, parents=(0,)),
        2: line(2, 2, 4, created_version=1, parents=(0,)),
    }


def test_children_wait_for_the_end_of_a_partition_sealed_from_outside() -> None:
    history = topic(split_topic(close_offset=None), 4)
    ends = {0: 5, 1: 9, 2: 9}
    plan = topic_planning.planned(history, {0: 1}, ends, same_batch=True)
    assert (plan.ranges, plan.cut) == ({0: (1, 5)}, {0: 5})
    learnt = topic(split_topic(close_offset=5), 4)
    plan = topic_planning.planned(learnt, plan.cut, ends, same_batch=False)
    assert plan.ranges == {1: (1, 9), 2: (1, 9)}


@pytest.mark.parametrize("how", ["deleted", "lost"])
def test_what_is_gone_holds_nothing_up(how: str) -> None:
    lines = split_topic(**({"state": PartitionState.DELETED} if how == "deleted" else {}))
    lost = frozenset((0,)) if how == "lost" else frozenset()
    assert advanced(topic(lines, 4, lost), {0: 3}) == {1: 1, 2: 1}


def test_a_limit_is_shared_and_what_is_left_goes_to_children() -> None:
    history = topic(split_topic(), 4)
    ends = {0: 10, 1: 101, 2: 301}
    plan = topic_planning.planned(history, {0: 5}, ends, 45, same_batch=True)
    assert plan.ranges == {0: (5, 10), 1: (1, 11), 2: (1, 31)}
    plan = topic_planning.planned(history, {0: 5}, ends, 45, same_batch=False)
    assert (plan.ranges, plan.cut) == ({0: (5, 10)}, {1: 1, 2: 1})


def test_a_vector_gives_every_logical_partition_one_place() -> None:
    history = topic(split_topic(), 4)
    for good in ({0: 3}, {1: 1, 2: 5}):
        check_vector(history, good)
    with pytest.raises(SourceError, match="two places"):
        check_vector(history, {0: 3, 1: 1})
    with pytest.raises(SourceError, match="no place"):
        check_vector(history, {2: 1})
    with pytest.raises(SourceError, match="no partition 9"):
        check_vector(history, {0: 3, 9: 1})
