"""What groups go on without: one record for each partition that was declared lost."""

from __future__ import annotations

from convoymq.topics.rules import changes
from convoymq.topics.rules.changes import Phase, Seal
from convoymq.topics.rules.commands import LATEST
from convoymq.topics.rules.group import LOSSES_KEPT_MAX, Advance, GroupState, Loss, Seek
from convoymq.topics.rules.losses import DECLARED_LOST, note_losses
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import (
    Begin,
    DeclareLost,
    GiveUp,
    LeftBehind,
    Publish,
    RecordSeal,
    TargetReady,
    ToPhase,
    TopicState,
)


def gone_round() -> TopicState:
    """A topic whose partition 0 was replaced by 2 without being asked."""
    topic = TopicState.first(first_route(8, 2))
    move = changes.plan_move(topic.route, 0, 2, "c")
    for command in (
        Begin(move),
        TargetReady("c", 1, 2),
        ToPhase("c", 1, Phase.TARGETS_READY),
        ToPhase("c", 1, Phase.SEALING),
        GiveUp("c", 0),
        RecordSeal("c", 0, Seal(None)),
        ToPhase("c", 1, Phase.SEALED),
        Publish("c", 0),
    ):
        assert topic.apply(command) is None
    return topic


def lost(topic: TopicState, declared: DeclareLost) -> None:
    assert topic.apply(declared) is None


def loss(first: int, end: int | None, epoch: int = 1, parked: int | None = None) -> Loss:
    return Loss(0, epoch, first, end, parked, DECLARED_LOST, 5)


def test_a_group_that_has_the_partition_before_it_loses_what_it_had_not_done() -> None:
    topic = gone_round()
    lost(topic, DeclareLost(0, 5, 40, {"g": LeftBehind(1, 30, 2)}))
    group = GroupState.first("g", 0, {})
    note_losses(topic, group)
    note_losses(topic, group)
    assert group.losses == [loss(30, 40, parked=2)]
    assert GroupState.restore(group.snapshot()) == group


def test_a_group_that_has_left_the_partition_behind_loses_nothing() -> None:
    topic = gone_round()
    lost(topic, DeclareLost(0, 5))
    group = GroupState.first("g", 0, {})
    assert group.apply(Advance(1, 0, 1), topic.route.version)
    note_losses(topic, group)
    assert group.losses == []


def test_what_nobody_knows_is_the_whole_partition() -> None:
    topic = gone_round()
    lost(topic, DeclareLost(0, 5))
    group = GroupState.first("g", 0, {0: 7})
    note_losses(topic, group)
    assert group.losses == [loss(7, None)]
    fresh = GroupState.first("h", 0, {0: LATEST})
    note_losses(topic, fresh)
    assert fresh.losses == [loss(1, None)]


def test_a_seek_to_before_the_partition_loses_it_again() -> None:
    topic = gone_round()
    lost(topic, DeclareLost(0, 5, 40, {"g": LeftBehind(1, 30, 0)}))
    group = GroupState.first("g", 0, {})
    note_losses(topic, group)
    assert group.apply(Seek(1, 0, {0: LATEST}), topic.route.version)
    note_losses(topic, group)
    assert group.losses == [loss(30, 40, parked=0), loss(40, 40, epoch=2)]


def test_a_partition_is_lost_only_while_its_end_is_unknown() -> None:
    topic = gone_round()
    assert topic.apply(DeclareLost(1)) is Code.UNKNOWN_PARTITION
    lost(topic, DeclareLost(0))
    assert topic.apply(DeclareLost(0)) is Code.UNKNOWN_PARTITION


def test_the_latest_losses_are_kept() -> None:
    group = GroupState.first("g", 0, {})
    for pid in range(LOSSES_KEPT_MAX + 3):
        group.lose(Loss(pid, 1, 1, None, None, DECLARED_LOST, 5))
    assert [group.losses[0].pid, len(group.losses)] == [3, LOSSES_KEPT_MAX]
