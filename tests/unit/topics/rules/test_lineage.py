"""Lineage: lives, ancestors, what is drained and visible, against a model per logical partition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules import changes, lineage
from convoymq.topics.rules.changes import Kind, Phase, Seal
from convoymq.topics.rules.lineage import Lineage, Mode, PartitionState
from convoymq.topics.rules.refusals import (
    SealConflict,
    StaleRoute,
    UnknownPartition,
    VersionConflict,
)
from tests.unit.topics.rules.histories import History, Naive, histories, reached_version


def consumed_by(draw: st.DrawFn, history: History) -> frozenset[int]:
    """Sealed partitions of which a group has consumed all messages, whatever comes before."""
    sealed = sorted(set(history.naive.pids()) - set(history.open_pids))
    return frozenset(pid for pid in sealed if draw(st.booleans()))


@st.composite
def consumed_histories(draw: st.DrawFn) -> tuple[History, frozenset[int]]:
    history = draw(histories())
    return history, consumed_by(draw, history)


# --- lives and ancestors -------------------------------------------------------------------


@given(histories())
@settings(max_examples=60)
def test_a_partition_lives_once_with_one_range(history: History) -> None:
    """I5, against the model, and every version is told from the lines again."""
    naive = history.naive
    lines = history.lineage.partitions
    assert set(lines) == naive.pids()
    for pid, line in lines.items():
        versions = naive.versions_of(pid)
        assert versions == list(range(versions[0], versions[-1] + 1))
        assert line.created_version == versions[0]
        ended = None if versions[-1] == history.route.version else versions[-1] + 1
        assert line.sealed_version == ended
        for version in versions:
            owned = [lp for lp, each in enumerate(naive.owners[version]) if each == pid]
            assert owned == list(range(line.lo, line.hi))
        assert line.close_offset == (None if ended is None else naive.messages[pid] + 1)
    assert [history.lineage.route(v) for v in range(len(history.routes))] == history.routes


@given(histories())
@settings(max_examples=60)
def test_parents_and_chains_are_those_of_the_logical_partitions(history: History) -> None:
    naive = history.naive
    parents: dict[int, set[int]] = {pid: set() for pid in naive.pids()}
    for lp in range(history.route.logical):
        chain = naive.chain(lp)
        assert [line.pid for line in history.lineage.chain(lp)] == chain
        for parent, child in itertools.pairwise(chain):
            parents[child].add(parent)
    for pid, line in history.lineage.partitions.items():
        assert set(line.parents) == parents[pid]
        assert set(line.children) == {child for child in parents if pid in parents[child]}
        assert len(line.parents) == len(set(line.parents))


@given(histories())
@settings(max_examples=60)
def test_ancestors_are_all_that_comes_before(history: History) -> None:
    for pid in history.naive.pids():
        ancestors = history.lineage.ancestors(pid)
        assert set(ancestors) == history.naive.before(pid)
        assert len(ancestors) == len(set(ancestors))
        assert all(pid in history.lineage.descendants(each) for each in ancestors)


@given(histories())
@settings(max_examples=50)
def test_sources_and_targets_of_each_version_are_known(history: History) -> None:
    for version, change in enumerate(history.changes):
        assert history.lineage.sources(version) == change.sources
        assert history.lineage.targets(version) == tuple(span.pid for span in change.targets)
        published = history.lineage.published[version + 1]
        assert (published.change_id, published.kind) == (change.change_id, change.kind)
    assert history.lineage.sources(history.route.version) == ()


# --- drained and visible -------------------------------------------------------------------


@given(consumed_histories())
def test_drained_means_all_that_comes_before_as_well(
    case: tuple[History, frozenset[int]],
) -> None:
    """I9 against its definition over the chains of all logical partitions, with empty sealed
    partitions between two changes."""
    history, consumed = case
    expected = {
        pid for pid in history.naive.pids() if history.naive.is_drained(pid, consumed.__contains__)
    }
    assert history.lineage.drained(consumed.__contains__) == expected
    for pid in history.naive.pids():
        assert history.lineage.is_drained(pid, consumed.__contains__) == (pid in expected)


def naive_version(naive: Naive, version: int, drained: set[int]) -> int:
    """Where a group at `version` gets to: steps whose vanishing owners are all drained."""
    while version + 1 < len(naive.owners):
        gone = set(naive.owners[version]) - set(naive.owners[version + 1])
        if not gone <= drained:
            break
        version += 1
    return version


@given(consumed_histories(), st.data())
def test_a_group_sees_what_its_mode_lets_it(
    case: tuple[History, frozenset[int]], data: st.DataObject
) -> None:
    """I8 and I10: linear, the owners of its version; dag, all whose predecessors are drained."""
    history, consumed = case
    naive, is_empty = history.naive, consumed.__contains__
    drained = {pid for pid in naive.pids() if naive.is_drained(pid, is_empty)}
    start = data.draw(st.integers(0, history.route.version))
    version = reached_version(history.lineage, start, is_empty)
    assert version == naive_version(naive, start, drained)
    waits = history.lineage.waits_for(version, is_empty)
    assert bool(waits) == (version < history.route.version)
    assert drained.isdisjoint(waits)
    linear = set(naive.owners[version])
    dag = {pid for pid in naive.pids() if naive.before(pid) <= drained}
    for mode, expected in ((Mode.LINEAR, linear), (Mode.DAG, dag)):
        visible = history.lineage.visible(version, is_empty, mode)
        assert set(visible) == expected
        assert len(visible) == len(expected)
    reached = naive_version(naive, 0, drained)
    assert set(naive.owners[reached]) <= dag, "dag shows all that linear shows"


def test_an_empty_partition_between_two_changes_does_not_open_the_gate() -> None:
    """The case in which the direct parent is empty, and the grandparent is not consumed."""
    history = History.begin(8, 1)
    left, right = history.split(0, 4, messages=5)
    (moved,) = history.move(left, messages=0)
    nothing = frozenset[int]().__contains__
    assert history.lineage.partition(left).has_no_messages
    assert not history.lineage.is_drained(left, nothing)
    assert history.lineage.visible(0, nothing, Mode.DAG) == (0,)
    assert history.lineage.visible(0, {0}.__contains__, Mode.DAG) == (0, left, right, moved)


def test_a_sealed_grandchild_waits_as_an_open_one_does() -> None:
    history = History.begin(8, 2)
    (merged,) = history.merge(0, 1, messages=2)
    left, right = history.split(merged, 3, messages=2)
    assert history.lineage.visible(0, {0, merged}.__contains__, Mode.DAG) == (0, 1)
    assert history.lineage.visible(0, {0, 1}.__contains__, Mode.DAG) == (0, 1, merged)
    consumed = {0, 1, merged}.__contains__
    assert history.lineage.visible(0, consumed, Mode.DAG) == (0, 1, merged, left, right)


def test_an_unrelated_slow_source_holds_linear_groups_only() -> None:
    history = History.begin(8, 2)
    slow = history.split(0, 2, messages=9)
    fast = history.split(1, 6, messages=1)
    consumed = {1}.__contains__
    assert reached_version(history.lineage, 0, consumed) == 0
    assert history.lineage.visible(0, consumed, Mode.LINEAR) == (0, 1)
    assert history.lineage.visible(0, consumed, Mode.DAG) == (0, 1, *fast)
    assert history.lineage.waits_for(0, consumed) == (0,)
    assert reached_version(history.lineage, 0, {0, 1}.__contains__) == 2
    assert set(slow) < set(history.lineage.visible(2, consumed, Mode.LINEAR))


def test_a_long_line_of_moves_is_walked_without_recursion() -> None:
    history = History.begin(2, 1)
    last = 0
    for _ in range(2000):
        (last,) = history.move(last, messages=0)
    assert len(history.lineage.ancestors(last)) == 2000
    assert reached_version(history.lineage, 0, lambda pid: False) == 2000


# --- what is refused -----------------------------------------------------------------------


def test_versions_and_partitions_that_are_not_known_are_refused() -> None:
    history = History.begin(4, 1)
    for version in (-1, 1):
        with pytest.raises(StaleRoute, match="versions 0 to 0 are known"):
            history.lineage.route(version)
    for ask in (history.lineage.partition, history.lineage.ancestors, history.lineage.descendants):
        with pytest.raises(UnknownPartition, match="no partition 9"):
            ask(9)


def test_only_what_is_published_and_sealed_enters() -> None:
    route = History.begin(4, 2).route
    change = changes.plan_merge(route, [0, 1], 2, "m")
    with pytest.raises(InvariantViolated, match="not published"):
        Lineage.first(route).apply(change)
    with pytest.raises(InvariantViolated, match="before its sources are sealed"):
        Lineage.first(route).apply(replace(change, phase=Phase.PUBLISHED))


def test_a_change_enters_once_and_in_order() -> None:
    history = History.begin(4, 2)
    history.merge(0, 1)
    with pytest.raises(VersionConflict, match="version 0 was expected, version 1 is current"):
        history.lineage.apply(history.changes[0])


def test_a_target_is_creating_until_it_has_its_open_entry() -> None:
    route = History.begin(4, 1).route
    change = replace(
        changes.plan_move(route, 0, 1, "m", Kind.MOVE), phase=Phase.PUBLISHED, seals={0: Seal(4)}
    )
    known = Lineage.first(route)
    known.apply(change)
    assert known.partition(1).state is PartitionState.CREATING
    known.opened(1)
    known.opened(0)
    states = [known.partition(pid).state for pid in (0, 1)]
    assert states == [PartitionState.SEALED, PartitionState.OPEN]


def test_the_end_of_a_partition_sealed_from_outside_is_learnt_once() -> None:
    route = History.begin(4, 1).route
    change = changes.plan_move(route, 0, 1, "m")
    known = Lineage.first(route)
    known.apply(replace(change, phase=Phase.PUBLISHED, seals={0: Seal(None)}))
    assert not known.partition(0).has_no_messages
    known.learn_close(0, 7)
    known.learn_close(0, 7)
    with pytest.raises(SealConflict, match="8, and reported 7"):
        known.learn_close(0, 8)
    with pytest.raises(InvariantViolated, match="not sealed"):
        known.learn_close(1, 1)
    lineage.check_invariants(known)
