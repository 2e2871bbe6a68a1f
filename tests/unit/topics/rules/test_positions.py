"""Positions: every logical partition has one place, and groups start where they are told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convoymq.topics.rules import positions
from convoymq.topics.rules.lineage import Lineage
from convoymq.topics.rules.positions import Bounds, Position
from convoymq.topics.rules.refusals import BadPosition, DataExpired, UnknownPartition
from tests.unit.topics.rules.histories import History, Naive, histories

OPEN_MESSAGES = 4
"""What an open partition of a history holds."""
Message = tuple[int, int]
"""Partition and offset."""


def end_of(naive: Naive, pid: int) -> int:
    return naive.messages.get(pid, OPEN_MESSAGES) + 1


def all_bounds(history: History) -> dict[int, Bounds]:
    return {pid: Bounds(0, end_of(history.naive, pid)) for pid in history.naive.pids()}


def walk(lineage: Lineage, position: Position, ends: Mapping[int, int]) -> list[list[Message]]:
    """What a group reads from a position, per version: all of its partitions to their ends, then
    one step, without a look at the lineage but for what a version names."""
    read: list[list[Message]] = []
    done: dict[int, int] = {}
    for version in range(position.version, lineage.latest.version + 1):
        now = []
        for pid in lineage.route(version).pids:
            if pid in position.drained or lineage.partition(pid).state.value == "deleted":
                continue
            first = done.get(pid, max(position.cursors.get(pid, 0), 1))
            now += [(pid, offset) for offset in range(first, ends[pid])]
            done[pid] = max(first, ends[pid])
        read.append(now)
    return read


def flat(read: list[list[Message]]) -> list[Message]:
    return [message for version in read for message in version]


def history_of(naive: Naive, lp: int) -> list[Message]:
    return [(pid, o) for pid in naive.chain(lp) for o in range(1, end_of(naive, pid))]


@st.composite
def vectors(draw: st.DrawFn) -> tuple[History, dict[int, int]]:
    """A history, and a vector by the model: each logical partition gets a partition of its chain,
    and partitions that are chosen are whole."""
    history = draw(histories())
    naive = history.naive
    offsets: dict[int, int] = {}
    open_lps = set(range(history.route.logical))
    while open_lps:
        chain = naive.chain(min(open_lps))
        pid = draw(st.sampled_from(chain))
        assume(naive.lps(pid) <= open_lps)
        open_lps -= naive.lps(pid)
        end = end_of(naive, pid)
        offsets[pid] = draw(st.one_of(st.just(end), st.integers(0, end)))
    return history, offsets


@given(vectors())
@settings(max_examples=60)
def test_a_vector_is_where_a_group_goes_on(case: tuple[History, dict[int, int]]) -> None:
    """Against the model: of each logical partition the group reads all from its place on, in the
    order in which it was stored, and nothing before. Vectors of which one partition comes after
    another, over any logical partition, are refused."""
    history, offsets = case
    naive, bounds = history.naive, all_bounds(history)
    if any(naive.before(pid) & offsets.keys() for pid in offsets):
        with pytest.raises(BadPosition, match="comes after it"):
            positions.from_vector(history.lineage, offsets, bounds)
        return
    position = positions.from_vector(history.lineage, offsets, bounds)
    ends = {pid: end_of(naive, pid) for pid in naive.pids()}
    read = flat(walk(history.lineage, position, ends))
    assert len(read) == len(set(read))
    for lp in range(history.route.logical):
        ((pid, offset),) = [(p, max(o, 1)) for p, o in offsets.items() if lp in naive.lps(p)]
        expected = [
            (p, o)
            for p, o in history_of(naive, lp)
            if p not in naive.before(pid) and (p != pid or o >= offset)
        ]
        assert [message for message in read if lp in naive.lps(message[0])] == expected


@given(vectors(), st.data())
@settings(max_examples=60)
def test_a_vector_that_does_not_cover_once_is_refused(
    case: tuple[History, dict[int, int]], data: st.DataObject
) -> None:
    history, offsets = case
    naive, bounds = history.naive, all_bounds(history)
    missing = dict(offsets)
    del missing[data.draw(st.sampled_from(sorted(offsets)))]
    with pytest.raises(BadPosition, match="no place"):
        positions.from_vector(history.lineage, missing, bounds)
    others = sorted(naive.pids() - offsets.keys())
    if others:
        twice = {**offsets, data.draw(st.sampled_from(others)): 0}
        with pytest.raises(BadPosition, match=r"two places|no place"):
            positions.from_vector(history.lineage, twice, bounds)


def test_a_vector_of_partitions_around_a_merge_is_refused() -> None:
    """It covers once, but the merged partition would need a cursor per half."""
    history = History.begin(8, 2)
    (merged,) = history.merge(0, 1)
    left, _ = history.split(merged, 4)
    with pytest.raises(BadPosition, match="partition 1 and a partition that comes after it"):
        positions.from_vector(history.lineage, {left: 0, 1: 0}, all_bounds(history))


def test_a_group_waits_for_all_partitions_that_were_merged() -> None:
    history = History.begin(8, 2)
    history.merge(0, 1, messages=3)
    bounds = all_bounds(history)
    for done, begun in ((0, 1), (1, 0)):
        position = positions.from_vector(history.lineage, {done: 4, begun: 2}, bounds)
        assert position.version == 0
    assert positions.from_vector(history.lineage, {0: 4, 1: 4}, bounds).version == 1


def test_offsets_that_are_not_there_are_refused() -> None:
    history = History.begin(8, 2)
    bounds = {0: Bounds(3, 5), 1: Bounds(0, 5)}
    with pytest.raises(DataExpired, match="begins at offset 3"):
        positions.from_vector(history.lineage, {0: 2, 1: 0}, bounds)
    with pytest.raises(BadPosition, match="beyond its end, 5"):
        positions.from_vector(history.lineage, {0: 3, 1: 6}, bounds)
    with pytest.raises(BadPosition, match="negative"):
        positions.from_vector(history.lineage, {0: 3, 1: -1}, bounds)
    with pytest.raises(UnknownPartition, match="no partition 9"):
        positions.from_vector(history.lineage, {0: 3, 9: 0}, bounds)
    with pytest.raises(BadPosition, match="0 to 8"):
        positions.from_vector(history.lineage, {}, bounds)


def test_a_deleted_partition_counts_as_consumed_but_is_not_read() -> None:
    history = History.begin(8, 2)
    history.move(0, messages=2)
    history.lineage.retire([])
    assert history.lineage.delete(lambda pid: True) == (0,)
    bounds = {1: Bounds(0, 5)}
    with pytest.raises(DataExpired, match="it is deleted"):
        positions.from_vector(history.lineage, {0: 1, 1: 0}, bounds)
    position = positions.from_vector(history.lineage, {0: 3, 1: 0}, bounds)
    assert position.version == 1


def test_a_position_that_begins_a_child_early_is_refused() -> None:
    history = History.begin(8, 1)
    left, _ = history.split(0, 4, messages=3)
    with pytest.raises(BadPosition, match=f"begun partition {left} before partition 0"):
        positions.check_position(history.lineage, Position(0, {0: 2, left: 2}))
    positions.check_position(history.lineage, Position(0, {0: 4, left: 2}))
    positions.check_position(history.lineage, Position(0, {left: 2}, frozenset((0,))))
    positions.check_position(history.lineage, Position(1, {left: 2}))
