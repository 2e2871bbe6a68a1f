"""What a controller makes of the answers of partitions."""

from __future__ import annotations

from convoymq.topics.answers import SealAnswer
from convoymq.topics.changes import Phase, plan_move
from convoymq.topics.changes import Seal as SealRecord
from convoymq.topics.commands import Open, Produce, Seal
from convoymq.topics.controller import Controller, Propose, Tell
from convoymq.topics.partition import PartitionMachine
from convoymq.topics.refusals import Code
from convoymq.topics.routes import first_route
from convoymq.topics.topic import (
    Begin,
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
