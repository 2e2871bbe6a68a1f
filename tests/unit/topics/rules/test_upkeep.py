"""Decisions about what of a topic is kept no longer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules.changes import plan_move
from convoymq.topics.rules.commands import ExpireProducers, Open, OpenProducer, Seal
from convoymq.topics.rules.dedup import DedupTable
from convoymq.topics.rules.group import GroupState, Join
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.retention import (
    Limits,
    Stored,
    due_groups,
    forgets_producers,
    judge,
    may_retire,
)
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import Begin, DeclareLost, TopicState
from tests.unit.topics.rules.histories import History, histories

EVERYTHING = 1 << 40


def state_of(history: History) -> TopicState:
    """The state of a topic with that history, whose sealed partitions are retired."""
    state = TopicState(history.lineage, 1 + max(history.lineage.partitions))
    state.retire([])
    return state


def gone(state: TopicState) -> set[int]:
    lines = state.lineage.partitions
    return {pid for pid, each in lines.items() if each.state is PartitionState.DELETED}


def test_without_limits_everything_is_kept_and_nobody_is_asked() -> None:
    history = History.begin(8, 1)
    history.move(0)
    state = state_of(history)
    verdict = judge(state, [], Limits(), {}, EVERYTHING)
    assert (verdict.deleted, verdict.asked, verdict.due_ms) == ((), (), None)


def test_a_sealed_partition_goes_when_its_last_message_is_too_old() -> None:
    history = History.begin(8, 1)
    (moved,) = history.move(0)
    history.move(moved)
    state = state_of(history)
    limits = Limits(max_age_ms=100)
    assert judge(state, [], limits, {}, 500).asked == (0, moved)
    stored = {0: Stored(5, 400), moved: Stored(5, 450)}
    early = judge(state, [], limits, stored, 500)
    assert (early.deleted, early.due_ms) == ((), 501)
    later = judge(state, [], limits, stored, 501)
    assert (later.deleted, later.due_ms) == ((0,), 551)
    assert judge(state, [], limits, stored, 551).deleted == (0, moved)
    assert judge(state, [1], limits, stored, 551).deleted == (0,), "a group holds the other one"


def test_a_child_that_is_older_than_its_parent_waits_for_it() -> None:
    """An empty partition has no last message."""
    history = History.begin(8, 1)
    (moved,) = history.move(0)
    history.move(moved)
    stored = {0: Stored(5, 450), moved: Stored(0, 0)}
    state = state_of(history)
    assert judge(state, [], Limits(max_age_ms=100), stored, 500).deleted == ()
    assert judge(state, [], Limits(max_age_ms=100), stored, 600).deleted == (0, moved)


def test_a_sealed_partition_goes_when_enough_follows_it_on_every_way() -> None:
    history = History.begin(8, 1)
    left, right = history.split(0, 4)
    state = state_of(history)
    limits = Limits(max_bytes=100)
    verdict = judge(state, [], limits, {left: Stored(100, 1)}, 5)
    assert (verdict.deleted, verdict.asked, verdict.waits_for_bytes) == ((), (right,), True)
    stored = {left: Stored(100, 1), right: Stored(99, 1)}
    assert judge(state, [], limits, stored, 5).deleted == ()
    stored[right] = Stored(100, 1)
    verdict = judge(state, [], limits, stored, 5)
    assert (verdict.deleted, verdict.waits_for_bytes) == ((0,), False)


def test_a_sealed_partition_goes_before_its_successor_drops_messages() -> None:
    """Partitions that take messages stay below the limit by themselves."""
    history = History.begin(8, 1)
    (moved,) = history.move(0)
    state = state_of(history)
    stored = {moved: Stored(70, 1, is_cut=True)}
    assert judge(state, [], Limits(max_bytes=100), stored, 5).deleted == (0,)
    assert judge(state, [], Limits(max_age_ms=100), {**stored, 0: Stored(1, 1)}, 5).deleted == ()


def test_a_lost_partition_needs_no_answer() -> None:
    history = History.begin(8, 1)
    history.move(0)
    state = state_of(history)
    state.lost[0] = DeclareLost(0)
    assert judge(state, [], Limits(max_age_ms=100), {}, 0).deleted == (0,)


@given(histories(), st.data())
@settings(max_examples=60)
def test_what_is_deleted_is_too_old_or_followed_by_enough(
    history: History, data: st.DataObject
) -> None:
    """Against a naive rule: of each way from a deleted partition to the newest, nothing that is
    younger than the limit goes, and bytes that remain behind it reach the limit."""
    state = state_of(history)
    lineage = state.lineage
    stored = {
        pid: Stored(
            data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9)), data.draw(st.booleans())
        )
        for pid in lineage.partitions
    }
    limits = data.draw(
        st.builds(
            Limits,
            st.one_of(st.none(), st.integers(0, 9)),
            st.one_of(st.none(), st.integers(0, 30)),
        )
    )
    versions = data.draw(st.lists(st.integers(0, history.route.version), max_size=2))
    now_ms = data.draw(st.integers(0, 20))
    verdict = judge(state, versions, limits, stored, now_ms)
    assert not verdict.asked
    assert verdict.due_ms is None or verdict.due_ms > now_ms

    def followed(pid: int) -> int:
        children = lineage.partition(pid).children
        held = {child: 99 if stored[child].is_cut else stored[child].bytes for child in children}
        return min((held[child] + followed(child) for child in children), default=0)

    for pid in verdict.deleted:
        age, most = limits.max_age_ms, limits.max_bytes
        too_old = age is not None and stored[pid].last_time_ms + age < now_ms
        assert too_old or (most is not None and followed(pid) >= most)
        held = [
            version
            for version in versions
            if version < (lineage.partition(pid).sealed_version or 0)
        ]
        assert not held
    lineage.delete(verdict.deleted.__contains__, versions)
    assert gone(state) == set(verdict.deleted)
    assert judge(state, versions, limits, stored, now_ms).deleted == ()


def test_what_may_be_retired_depends_on_groups() -> None:
    history = History.begin(8, 1)
    history.move(0)
    state = TopicState(history.lineage, 2)
    assert not may_retire(state, [0])
    assert may_retire(state, [1])
    state.retire([1])
    assert not may_retire(state, [1])


def test_groups_expire_when_nobody_was_there_for_their_time() -> None:
    groups = {name: GroupState.first(name, 0, {}, time_ms=at) for name, at in (("a", 5), ("b", 9))}
    assert due_groups(groups, 10, 14) == ([], 15)
    assert due_groups(groups, 10, 15) == ([groups["a"]], 19)
    groups["a"].apply(Join("m"), 0)
    assert due_groups(groups, 10, 15) == ([], 19)
    groups["b"].expired = True
    assert due_groups(groups, 10, 99) == ([], None)


# --- producers -----------------------------------------------------------------------------


def test_producers_are_forgotten_by_an_entry_of_the_log() -> None:
    table = DedupTable()
    assert table.oldest_ms is None
    table.record(1, 1, 0, 7, 100, b"")
    table.record(2, 1, 3, 4, 300, b"")
    assert table.oldest_ms == 100
    machine = PartitionMachine(1, 0, 8, 1)
    assert machine.apply(ExpireProducers(200)) != machine.apply(Open("c", 1, 1, table.pack()))
    machine.apply(OpenProducer(3, 1))
    assert machine.apply(ExpireProducers(0)).code is Code.OK  # type: ignore[union-attr]
    assert machine.dedup.epochs == {1: 1, 2: 1, 3: 1}, "it only asks"
    assert machine.apply(ExpireProducers(200)).code is Code.OK  # type: ignore[union-attr]
    assert set(machine.dedup.rows) == {(2, 3)}
    assert machine.dedup.oldest_ms == 300
    seal = Seal("next", 1, 2, (), 1)
    seed = machine.apply(seal)
    assert machine.apply(ExpireProducers(0)).code is Code.CLOSED  # type: ignore[union-attr]
    assert machine.apply(ExpireProducers(999)).code is Code.CLOSED  # type: ignore[union-attr]
    assert machine.apply(seal) == seed, "a repeat of the seal has the same table"


def test_producers_are_not_forgotten_while_the_topic_changes() -> None:
    state = TopicState.first(first_route(8, 2))
    assert [each.pid for each in forgets_producers(state)] == [0, 1]
    state.left_out.add(1)
    assert forgets_producers(state) == []
    state.left_out.clear()
    state.apply(Begin(plan_move(state.route, 0, 2, "c")))
    assert forgets_producers(state) == []
