"""Changes: what may be planned, the table of phases, amended merges, publishing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules import changes
from convoymq.topics.rules.changes import FINISHED, FOLLOWS, Change, Kind, Phase, Seal
from convoymq.topics.rules.refusals import (
    BadCut,
    ChangePhase,
    ChangeRunning,
    NotAdjacent,
    SealConflict,
    UnknownPartition,
    VersionConflict,
)
from convoymq.topics.rules.routes import Route, Span, first_route
from tests.unit.topics.rules.histories import History, histories

ROUTE = first_route(12, 4)
"""Partitions 0 to 3 with three logical partitions each."""


def merge(*pids: int) -> Change:
    return changes.plan_merge(ROUTE, pids, 4, "m")


def sealing(change: Change, *sealed: int) -> Change:
    """The change in SEALING, with some sources sealed."""
    for span in change.targets:
        change = changes.target_ready(change, span.pid)
    change = changes.advance(changes.advance(change, Phase.TARGETS_READY), Phase.SEALING)
    for pid in sealed:
        change = changes.record_seal(change, pid, Seal(10 + pid, b"%d" % pid))
    return change


# --- plans ---------------------------------------------------------------------------------


@given(histories())
@settings(max_examples=60)
def test_one_change_lies_between_two_versions(history: History) -> None:
    """I3 and I4, against the model: owners differ in one interval, which the change names."""
    naive = history.naive
    for version, change in enumerate(history.changes):
        before, after = naive.owners[version], naive.owners[version + 1]
        changed = [lp for lp in range(len(before)) if before[lp] != after[lp]]
        assert changed == list(range(changed[0], changed[-1] + 1))
        assert list(dict.fromkeys(before[lp] for lp in changed)) == list(change.sources)
        assert list(dict.fromkeys(after[lp] for lp in changed)) == [
            span.pid for span in change.targets
        ]
        sources, targets = len(change.sources), len(change.targets)
        assert {
            Kind.SPLIT: sources == 1 and targets >= 2,
            Kind.MERGE: sources >= 2 and targets == 1,
            Kind.MOVE: sources == targets == 1,
            Kind.REBUCKET: sources == targets == 1,
        }[change.kind]
        assert naive.lps(change.sources[0]).isdisjoint(set(range(len(before))) - set(changed))


def test_a_split_cuts_where_it_is_told() -> None:
    change = changes.plan_split(ROUTE, 1, [4, 5], 7, "s")
    assert change.targets == (Span(3, 4, 7), Span(4, 5, 8), Span(5, 6, 9))
    assert (change.base_version, change.next_version, change.attempt) == (0, 1, 1)


@pytest.mark.parametrize("cuts", [[], [3], [6], [2], [7], [5, 4], [4, 4], [0, 4]])
def test_a_bad_cut_is_refused(cuts: list[int]) -> None:
    with pytest.raises(BadCut, match="from 4 to 5") as refused:
        changes.plan_split(ROUTE, 1, cuts, 4, "s")
    assert refused.value.cuts == tuple(cuts)


def test_one_logical_partition_cannot_be_split() -> None:
    with pytest.raises(BadCut, match="one logical partition"):
        changes.plan_split(first_route(4, 4), 1, [1], 4, "s")


def test_a_merge_takes_neighbours_in_any_order() -> None:
    change = merge(2, 0, 1)
    assert (change.sources, change.targets) == ((0, 1, 2), (Span(0, 9, 4),))


@pytest.mark.parametrize("pids", [(), (1,), (1, 1), (0, 2), (0, 1, 3), (0, 1, 1)])
def test_what_is_not_adjacent_is_not_merged(pids: tuple[int, ...]) -> None:
    with pytest.raises(NotAdjacent, match="follow each other"):
        merge(*pids)


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.REBUCKET])
def test_a_move_keeps_the_range(kind: Kind) -> None:
    change = changes.plan_move(ROUTE, 2, 9, "m", kind)
    assert (change.kind, change.targets) == (kind, (Span(6, 9, 9),))


def test_a_plan_of_an_unknown_partition_is_refused() -> None:
    with pytest.raises(UnknownPartition, match="partition 8"):
        changes.plan_split(ROUTE, 8, [1], 9, "c")
    with pytest.raises(UnknownPartition, match="partition 8"):
        merge(3, 8)
    with pytest.raises(UnknownPartition, match="partition 8"):
        changes.plan_move(ROUTE, 8, 9, "c")


def test_a_partition_number_is_never_used_again() -> None:
    with pytest.raises(InvariantViolated, match="uses a partition number again"):
        changes.plan_move(ROUTE, 2, 3, "c")


# --- the record ----------------------------------------------------------------------------


def test_a_topic_has_one_change_at_a_time() -> None:
    running = merge(0, 1)
    other = replace(merge(2, 3), change_id="other")
    assert changes.start(None, ROUTE, running) is running
    with pytest.raises(ChangeRunning, match="change 'm' is still running"):
        changes.start(running, ROUTE, other)
    for phase in FINISHED:
        assert changes.start(replace(running, phase=phase), ROUTE, other) is other


def test_a_repeated_request_finds_the_running_change() -> None:
    running = sealing(merge(0, 1), 0)
    assert changes.start(running, ROUTE, merge(0, 1)) is running


def test_a_plan_of_an_older_version_is_refused() -> None:
    planned = merge(0, 1)
    with pytest.raises(VersionConflict, match="version 0 was expected, version 5 is current"):
        changes.start(None, Route(5, 12, ROUTE.spans), planned)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("to", Phase)
def test_phases_follow_the_table(phase: Phase, to: Phase) -> None:
    change = replace(sealing(merge(0, 1), 0, 1), phase=phase)
    if to is phase:
        assert changes.advance(change, to) is change
    elif to in FOLLOWS[phase]:
        assert changes.advance(change, to).phase is to
    else:
        with pytest.raises(ChangePhase, match=f"phase {to.value} does not follow"):
            changes.advance(change, to)


def test_from_sealing_on_a_change_only_goes_forward() -> None:
    assert [phase for phase in Phase if Phase.ABORTED in FOLLOWS[phase]] == [
        Phase.PREPARED,
        Phase.TARGETS_READY,
    ]
    reached, waiting = {Phase.SEALING}, [Phase.SEALING]
    for phase in waiting:
        waiting += FOLLOWS[phase] - reached
        reached |= FOLLOWS[phase]
    assert Phase.ABORTED not in reached
    for phase in Phase:
        change = replace(merge(0, 1), phase=phase)
        if phase in (Phase.PREPARED, Phase.TARGETS_READY, Phase.ABORTED):
            assert changes.abort(change).phase is Phase.ABORTED
        else:
            with pytest.raises(ChangePhase, match="only go forward"):
                changes.abort(change)


def test_a_phase_waits_for_what_it_needs() -> None:
    change = changes.plan_split(ROUTE, 0, [1], 4, "s")
    change = changes.target_ready(change, 4)
    with pytest.raises(ChangePhase, match="not all of its targets exist"):
        changes.advance(change, Phase.TARGETS_READY)
    change = sealing(changes.target_ready(change, 5))
    with pytest.raises(ChangePhase, match="not all of its sources are sealed"):
        changes.advance(change, Phase.SEALED)


def test_a_seal_is_recorded_once() -> None:
    change = sealing(merge(0, 1), 0)
    assert changes.record_seal(change, 0, Seal(10, b"0")) is change
    with pytest.raises(SealConflict, match="closed at offset 11, and reported 10 before"):
        changes.record_seal(change, 0, Seal(11, b"0"))
    with pytest.raises(UnknownPartition):
        changes.record_seal(change, 3, Seal(1))
    with pytest.raises(ChangePhase, match="not sealed"):
        changes.record_seal(merge(0, 1), 0, Seal(1))


def test_a_dead_target_is_replaced_until_it_is_needed() -> None:
    change = changes.plan_split(ROUTE, 0, [1], 4, "s")
    change = changes.target_ready(changes.target_ready(change, 4), 5)
    changed = changes.replace_target(change, 4, 6)
    assert [span.pid for span in changed.targets] == [6, 5]
    assert (changed.ready, changed.is_ready) == (frozenset((5,)), False)
    with pytest.raises(UnknownPartition):
        changes.replace_target(changed, 4, 7)
    with pytest.raises(ChangePhase, match="settled"):
        changes.replace_target(replace(change, phase=Phase.SEALED), 4, 6)
    with pytest.raises(UnknownPartition):
        changes.target_ready(changed, 4)


# --- amended merges ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sealed", "kind", "kept", "target"),
    [
        ((1,), Kind.MOVE, (1,), Span(3, 6, 9)),
        ((0, 1), Kind.MERGE, (0, 1), Span(0, 6, 9)),
        ((0, 2, 3), Kind.MERGE, (2, 3), Span(6, 12, 9)),
        ((0, 2), Kind.MOVE, (0,), Span(0, 3, 9)),
        ((0, 1, 3), Kind.MERGE, (0, 1), Span(0, 6, 9)),
    ],
)
def test_a_late_merge_keeps_the_longest_run_of_sealed_neighbours(
    sealed: tuple[int, ...], kind: Kind, kept: tuple[int, ...], target: Span
) -> None:
    amended = changes.amend(sealing(merge(0, 1, 2, 3), *sealed), ROUTE, 9)
    assert (amended.kind, amended.sources, amended.targets) == (kind, kept, (target,))
    assert (amended.attempt, amended.phase, amended.is_ready) == (2, Phase.SEALING, False)
    assert amended.left_out == {
        pid: Seal(10 + pid, b"%d" % pid) if pid in sealed else None
        for pid in range(4)
        if pid not in kept
    }
    with pytest.raises(ChangePhase, match="targets"):
        changes.advance(amended, Phase.SEALED)
    ready = changes.advance(changes.target_ready(amended, 9), Phase.SEALED)
    assert changes.next_route(ROUTE, ready).version == 1


def test_a_late_seal_of_what_was_left_out_is_kept_for_the_next_move() -> None:
    amended = changes.amend(sealing(merge(0, 1), 0), ROUTE, 9)
    late = changes.record_seal(amended, 1, Seal(3, b"late"))
    assert (late.left_out, late.sources) == ({1: Seal(3, b"late")}, (0,))
    assert changes.record_seal(late, 1, Seal(3, b"late")) is late
    route = changes.next_route(ROUTE, changes.target_ready(late, 9))
    moved = changes.plan_reconcile(route, 1, Seal(3, b"late"), 10, "r")
    assert (moved.kind, moved.is_sealed, moved.base_version) == (Kind.MOVE, True, 1)


@pytest.mark.parametrize("sealed", [(), (0, 1)])
def test_a_merge_is_amended_when_only_some_sources_are_sealed(sealed: tuple[int, ...]) -> None:
    with pytest.raises(ChangePhase, match="either all or none"):
        changes.amend(sealing(merge(0, 1), *sealed), ROUTE, 9)


def test_only_a_merge_that_is_sealing_is_amended() -> None:
    with pytest.raises(ChangePhase, match="only a merge"):
        changes.amend(sealing(changes.plan_move(ROUTE, 0, 4, "m"), 0), ROUTE, 9)
    with pytest.raises(ChangePhase, match="only a merge"):
        changes.amend(merge(0, 1), ROUTE, 9)


# --- publishing ----------------------------------------------------------------------------


def test_the_next_version_has_the_targets_in_place_of_the_sources() -> None:
    change = sealing(merge(0, 1), 0, 1)
    route = changes.next_route(ROUTE, change)
    assert (route.version, route.pids) == (1, (4, 2, 3))
    with pytest.raises(VersionConflict):
        changes.next_route(route, change)
