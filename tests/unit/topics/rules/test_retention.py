"""Retention along a lineage: what is retired, deleted and forgotten, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules import lineage
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import StaleRoute
from tests.unit.topics.rules.histories import History, histories


@given(histories(), st.data())
@settings(max_examples=60)
def test_what_every_group_has_left_behind_is_retired(history: History, data: st.DataObject) -> None:
    versions = data.draw(st.lists(st.integers(0, history.route.version), max_size=3))
    retired = history.lineage.retire(versions)
    owners = history.naive.owners
    still_seen = {
        pid for owner in owners[min(versions, default=len(owners) - 1) :] for pid in owner
    }
    assert set(retired) == history.naive.pids() - still_seen
    assert history.lineage.retire(versions) == ()
    lineage.check_invariants(history.lineage)


@given(histories(), st.data())
@settings(max_examples=60)
def test_the_oldest_goes_first(history: History, data: st.DataObject) -> None:
    """Never a child before its parents, never the younger of two merged partitions before the
    older; and what nothing keeps back goes."""
    known = history.lineage
    gone: set[int] = set()
    for _ in range(3):
        retired = {pid for pid, each in known.partitions.items() if each.is_closed} - gone
        known.retire([data.draw(st.integers(0, history.route.version))])
        expired = {pid for pid in retired if data.draw(st.booleans())}
        deleted = known.delete(expired.__contains__)
        for pid in deleted:
            assert history.naive.before(pid) <= gone
            gone.add(pid)
        for change in history.changes:
            ages = [(known.partition(p).created_version, known.partition(p).lo, p)
                    for p in change.sources]  # fmt: skip
            dead = [pid in gone for _, _, pid in sorted(ages)]
            assert dead == sorted(dead, reverse=True)
        kept_back = [
            pid
            for pid in expired - gone
            if known.partition(pid).state is PartitionState.RETIRED
            and history.naive.before(pid) <= gone
        ]
        for pid in kept_back:
            (change,) = [each for each in history.changes if pid in each.sources]
            assert any(p not in gone for p in change.sources if p != pid)
        lineage.check_invariants(known)


@given(histories(), st.data())
@settings(max_examples=60)
def test_versions_are_forgotten_when_nobody_needs_them(
    history: History, data: st.DataObject
) -> None:
    known = history.lineage
    versions = data.draw(st.lists(st.integers(0, history.route.version), max_size=2))
    known.retire(versions)
    gone = set(known.delete(lambda pid: data.draw(st.booleans())))
    oldest = known.trim(versions)
    kept = history.naive.pids() - gone
    taken_away = [
        version
        for version in range(history.route.version)
        if (set(history.naive.owners[version]) - set(history.naive.owners[version + 1])) & kept
    ]
    assert oldest == known.min_version == min((*taken_away[:1], *versions, history.route.version))
    assert known.trim(versions) == oldest
    for version in range(history.route.version + 1):
        if version < oldest:
            with pytest.raises(StaleRoute):
                known.route(version)
        else:
            assert known.route(version) == history.routes[version]
        change = history.changes[version] if version < history.route.version else None
        sources = change.sources if change and version >= oldest else ()
        assert known.sources(version) == sources
    assert set(known.partitions) == history.naive.pids(), "lines are kept for ever"
    lineage.check_invariants(known)


@given(histories(), st.data())
@settings(max_examples=60)
def test_a_group_that_went_back_holds_what_is_retired(
    history: History, data: st.DataObject
) -> None:
    known = history.lineage
    known.retire([])
    version = data.draw(st.integers(0, history.route.version))
    deleted = set(known.delete(lambda pid: True, [version]))
    for pid in deleted:
        assert (known.partition(pid).sealed_version or 0) <= version
    held = {pid for owner in history.naive.owners[version:] for pid in owner}
    assert not deleted & held
    assert not known.deletable(lambda pid: True, [version])
    everything = known.deletable(lambda pid: True)
    assert deleted | set(everything) == {
        p for p, each in known.partitions.items() if each.is_closed
    }


def test_a_partition_whose_end_is_not_known_is_still_asked_for_it() -> None:
    history = History.begin(8, 1)
    history.move(0)
    history.lineage.partition(0).close_offset = None
    assert history.lineage.retire([]) == ()
    assert history.lineage.retire([], lost={0}) == (0,)


def test_of_merged_partitions_the_younger_waits_for_the_older() -> None:
    history = History.begin(8, 2)
    (younger,) = history.move(1)
    history.merge(0, younger)
    history.lineage.retire([])
    assert history.lineage.delete({1, younger}.__contains__) == (1,)
    assert history.lineage.delete({1, younger}.__contains__) == ()
    assert history.lineage.delete({0, younger}.__contains__) == (0, younger)


def test_a_version_that_somebody_needs_is_kept_without_its_partitions() -> None:
    """A group that was expired for its lag may come back, and a change names its version."""
    history = History.begin(8, 1)
    (moved,) = history.move(0)
    history.move(moved)
    history.lineage.retire([])
    assert history.lineage.delete(lambda pid: True) == (0, moved)
    assert history.lineage.trim([2, 1]) == 1
    assert history.lineage.trim([]) == 2
    assert history.lineage.trim([1]) == 2, "what is forgotten does not come back"


def test_a_topic_that_never_changed_keeps_all() -> None:
    history = History.begin(8, 2)
    assert history.lineage.retire([]) == ()
    assert history.lineage.delete(lambda pid: True) == ()
    assert history.lineage.trim([]) == 0


def test_a_partition_that_is_never_split_does_not_keep_the_history() -> None:
    history = History.begin(8, 2)
    last = 1
    for _ in range(20):
        (last,) = history.move(last)
    history.lineage.retire([20])
    assert len(history.lineage.delete(lambda pid: True)) == 20
    assert history.lineage.trim([20]) == 20
    assert len(history.lineage.published) == 1


@given(histories())
@settings(max_examples=60)
def test_merges_of_an_ancestry_are_counted(history: History) -> None:
    naive = history.naive
    merged = {change.targets[0].pid for change in history.changes if len(change.sources) > 1}
    for pid in naive.pids():
        assert history.lineage.merges_before(pid) == len(merged & {pid, *naive.before(pid)})
