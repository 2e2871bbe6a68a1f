"""Refusals: one class per code, stable codes, texts that say what to do."""

from __future__ import annotations

import pytest

from convoymq.model.errors import Refused
from convoymq.topics import refusals
from convoymq.topics.refusals import Code, TopicRefused

SPECIFIED = {
    "CLOSED", "NOT_OPEN", "WRONG_RANGE", "BAD_HASH", "NOT_LEADER", "NO_LEASE", "DUPLICATE",
    "OUT_OF_SEQ", "PRODUCER_FENCED", "LEASE_FENCED", "NOT_VISIBLE", "VERSION_CONFLICT",
    "CHANGE_RUNNING", "NOT_ADJACENT", "DATA_EXPIRED", "BAD_CUT",
}  # fmt: skip
ANSWERS_ONLY = {
    Code.OK,
    Code.DUPLICATE,
    Code.NOT_LEADER,
    Code.STALE_TERM,
    Code.PARK_FULL,
}
"""Not raised here: successes, and what a leader answers by itself."""
EXAMPLES: tuple[tuple[TopicRefused, Code, str], ...] = (
    (refusals.Closed(3, 8), Code.CLOSED, "partition 3 is closed"),
    (refusals.NotOpen(3, 8), Code.NOT_OPEN, "opens with version 8"),
    (refusals.StaleRoute(1, 4, 9), Code.STALE_ROUTE, "versions 4 to 9 are known"),
    (refusals.WrongRange(3, 7, 0, 5), Code.WRONG_RANGE, "0 to 5 (exclusive), not 7"),
    (refusals.BadHash(1, 2), Code.BAD_HASH, "belongs to logical partition 2"),
    (refusals.GroupLive("g", 2), Code.GROUP_LIVE, "stop them first"),
    (refusals.NoKey(), Code.NO_KEY, "no order key"),
    (refusals.GroupLive("g", 2), Code.GROUP_LIVE, "has 2 members: stop them first"),
    (refusals.OutOfSequence(2, 9, 7), Code.OUT_OF_SEQ, "send again from 7 on"),
    (refusals.ProducerFenced("p", 1, 2), Code.PRODUCER_FENCED, "producer 'p' has a newer session"),
    (refusals.NoLease("g", 3), Code.NO_LEASE, "group 'g'"),
    (refusals.LeaseFenced("g", 3, 1, 2), Code.LEASE_FENCED, "epoch 2, this one has 1"),
    (refusals.NotVisible("g", 3, 1), Code.NOT_VISIBLE, "group 'g' is at version 1"),
    (refusals.NotDrained("g", 1, (3, 4)), Code.NOT_DRAINED, "has not consumed partition 3, 4"),
    (refusals.VersionConflict(1, 2), Code.VERSION_CONFLICT, "version 2 is current"),
    (refusals.NotParked("g", b"k\xff"), Code.NOT_PARKED, "the key 'k\\xff'"),
    (refusals.ChangeRunning("c"), Code.CHANGE_RUNNING, "change 'c' is still running"),
    (refusals.ChangePhase("c", "sealed", "no"), Code.CHANGE_PHASE, "is in phase sealed: no"),
    (refusals.SealedBy(3, "c"), Code.SEALED_BY, "was sealed by change 'c'"),
    (refusals.SealConflict(3, 1, 2), Code.SEAL_CONFLICT, "closed at offset 2, and reported 1"),
    (refusals.NotAdjacent((1, 3)), Code.NOT_ADJACENT, "partitions 1, 3 cannot be merged"),
    (refusals.BadCut(3, 0, 4, (9,)), Code.BAD_CUT, "split at 9: cut points are rising"),
    (refusals.BadTopic("text"), Code.BAD_TOPIC, "text"),
    (refusals.TooManyPartitions(9, 8), Code.TOO_MANY_PARTITIONS, "at most 8 at a time"),
    (refusals.UnknownPartition(3, 1), Code.UNKNOWN_PARTITION, "no partition 3 in version 1"),
    (refusals.BadPosition("text"), Code.BAD_POSITION, "text"),
    (refusals.DataExpired(3, 1, 5), Code.DATA_EXPIRED, "begins at offset 5"),
    (refusals.DataExpired(3, 1, None), Code.DATA_EXPIRED, "it is deleted"),
)


@pytest.mark.parametrize(("refusal", "code", "text"), EXAMPLES, ids=lambda v: type(v).__name__)
def test_a_refusal_has_its_code_and_says_why(refusal: TopicRefused, code: Code, text: str) -> None:
    assert isinstance(refusal, Refused)
    assert (type(refusal).code, refusal.text) == (code, str(refusal))
    assert text in refusal.text


def test_every_code_has_one_class() -> None:
    classes = TopicRefused.__subclasses__()
    codes = [each.code for each in classes]
    assert len(codes) == len(set(codes))
    assert set(codes) == set(Code) - ANSWERS_ONLY
    assert {type(refusal) for refusal, _, _ in EXAMPLES} == set(classes)


def test_codes_are_those_of_the_specification_and_their_own_names() -> None:
    assert {code.value for code in Code} >= SPECIFIED
    assert all(code.value == code.name for code in Code)
