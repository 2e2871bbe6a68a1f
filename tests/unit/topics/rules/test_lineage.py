"""Lineage: lives and ancestors, against a model per logical partition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings

from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules import changes, lineage
from convoymq.topics.rules.changes import Kind, Phase, Seal
from convoymq.topics.rules.lineage import Lineage, PartitionState
from convoymq.topics.rules.refusals import (
    SealConflict,
    StaleRoute,
    UnknownPartition,
    VersionConflict,
)
from tests.unit.topics.rules.histories import History, histories

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


def test_a_long_line_of_moves_is_walked_without_recursion() -> None:
    history = History.begin(2, 1)
    last = 0
    for _ in range(2000):
        (last,) = history.move(last, messages=0)
    assert len(history.lineage.ancestors(last)) == 2000


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
    known.learn_close(0, 7)
    known.learn_close(0, 7)
    with pytest.raises(SealConflict, match="8, and reported 7"):
        known.learn_close(0, 8)
    with pytest.raises(InvariantViolated, match="not sealed"):
        known.learn_close(1, 1)
    lineage.check_invariants(known)
