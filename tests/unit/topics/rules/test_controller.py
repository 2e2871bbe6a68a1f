"""What a controller makes of the answers of partitions."""

from __future__ import annotations

from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules.answers import SealAnswer
from convoymq.topics.rules.changes import Phase, plan_merge, plan_move
from convoymq.topics.rules.changes import Seal as SealRecord
from convoymq.topics.rules.commands import Open, Produce, Seal
from convoymq.topics.rules.controller import Controller, Propose, Tell
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import (
    Amend,
    Begin,
    GiveUp,
    LearnClose,
    Publish,
    RecordSeal,
    TargetReady,
    ToPhase,
    TopicState,
)


def moved_around() -> TopicState:
    """A topic whose only partition was sealed from outside."""
    topic = TopicState.first(first_route(4, 1))
    steps = (
        Begin(plan_move(topic.route, 0, 1, "c")),
        TargetReady("c", 1, 1),
        ToPhase("c", 1, Phase.TARGETS_READY),
        ToPhase("c", 1, Phase.SEALING),
        GiveUp("c", 0),
        RecordSeal("c", 0, SealRecord(None)),
        ToPhase("c", 1, Phase.SEALED),
        Publish("c", 5),
    )
    for step in steps:
        assert topic.apply(step) is None, step
    assert topic.unknown_ends() == [0]
    return topic


def test_an_end_is_learned_from_a_partition_that_knows_it_was_passed_by() -> None:
    """An ordinary seal of the same change is heard late, and answered first: what the partition
    would hand over then would not say what may be stored twice."""
    topic = moved_around()
    dead = PartitionMachine(0, 0, 4, 0)
    dead.apply(Open("", 0, 0))
    dead.apply(Produce(7, 1, 0, 1, b"k", 1))
    controller = Controller(topic, 1)
    late = dead.apply(Seal("c", 1, 1, (), 1))
    assert late == SealAnswer(Code.OK, 2, dead.dedup.pack(), "c", external=False)
    controller.on_sealed(0, late)
    assert controller.take_actions() == []
    controller.step(10)
    (seal,) = (a.command for a in controller.take_actions() if isinstance(a, Tell) and a.pid == 0)
    assert isinstance(seal, Seal)
    assert seal.external
    answer = dead.apply(seal)
    assert isinstance(answer, SealAnswer)
    controller.on_sealed(0, answer)
    assert controller.take_actions() == [Propose(LearnClose(0, 2))]


def merging() -> TopicState:
    """A topic that merges its two partitions, with the seal of the first recorded."""
    topic = TopicState.first(first_route(4, 2))
    for step in (
        Begin(plan_merge(topic.route, [0, 1], 2, "m")),
        TargetReady("m", 1, 2),
        ToPhase("m", 1, Phase.TARGETS_READY),
        ToPhase("m", 1, Phase.SEALING),
        RecordSeal("m", 0, SealRecord(3)),
    ):
        assert topic.apply(step) is None, step
    return topic


def test_only_what_is_given_up_is_sealed_without_its_end() -> None:
    topic = merging()
    assert topic.apply(RecordSeal("m", 1, SealRecord(None))) is Code.CHANGE_PHASE
    assert topic.apply(GiveUp("m", 0)) is Code.UNKNOWN_PARTITION
    assert topic.apply(GiveUp("other", 1)) is Code.CHANGE_PHASE
    assert topic.apply(GiveUp("m", 1)) is None
    controller = Controller(topic, 1)
    controller.step(0)
    assert Propose(RecordSeal("m", 1, SealRecord(None))) not in controller.take_actions()
    controller.step(10, [1])
    assert Propose(RecordSeal("m", 1, SealRecord(None))) in controller.take_actions()


def test_a_merge_that_goes_on_without_a_source_does_not_give_it_up() -> None:
    topic = merging()
    assert topic.apply(GiveUp("m", 1)) is None
    assert topic.given_up == {1}
    assert topic.apply(Amend("m", 1)) is None
    assert (topic.given_up, topic.left_out) == (set(), {1})
