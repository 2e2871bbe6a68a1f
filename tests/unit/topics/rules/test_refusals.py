"""Refusals: one class per code, stable codes, texts that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.model.errors import Refused
from convoymq.topics.rules import refusals
from convoymq.topics.rules.refusals import Code, TopicRefused

SOURCE = Path(__file__).parents[4] / "src" / "convoymq"
SPECIFIED = {
    "CLOSED", "NOT_OPEN", "WRONG_RANGE", "BAD_HASH", "NOT_LEADER", "DUPLICATE",
    "OUT_OF_SEQ", "PRODUCER_FENCED", "LEASE_FENCED", "NOT_VISIBLE", "VERSION_CONFLICT",
    "CHANGE_RUNNING", "NOT_ADJACENT", "DATA_EXPIRED", "BAD_CUT",
}  # fmt: skip
ANSWERS_ONLY = {
    Code.OK, Code.DUPLICATE, Code.NOT_LEADER, Code.STALE_TERM, Code.PARK_FULL, Code.CLOSED,
    Code.NOT_OPEN, Code.WRONG_RANGE, Code.BAD_HASH, Code.OUT_OF_SEQ, Code.LEASE_FENCED,
    Code.NOT_VISIBLE, Code.NOT_DRAINED, Code.SEALED_BY,
}  # fmt: skip
"""Outcomes of a partition or its leader, which are values and never raised."""
EXAMPLES: tuple[tuple[TopicRefused, Code, str], ...] = (
    (refusals.StaleRoute(1, 4, 9), Code.STALE_ROUTE, "versions 4 to 9 are known"),
    (refusals.GroupLive("g", 2), Code.GROUP_LIVE, "stop them first"),
    (refusals.NoKey(), Code.NO_KEY, "no order key"),
    (refusals.GroupLive("g", 2), Code.GROUP_LIVE, "has 2 members: stop them first"),
    (refusals.ProducerFenced("p", 1, 2), Code.PRODUCER_FENCED, "producer 'p' has a newer session"),
    (refusals.VersionConflict(1, 2), Code.VERSION_CONFLICT, "version 2 is current"),
    (refusals.NotParked("g", b"k\xff"), Code.NOT_PARKED, "the key 'k\\xff'"),
    (refusals.ChangeRunning("c"), Code.CHANGE_RUNNING, "change 'c' is still running"),
    (refusals.ChangePhase("c", "sealed", "no"), Code.CHANGE_PHASE, "is in phase sealed: no"),
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


def test_every_code_is_used() -> None:
    """In an outcome, or by a class that is raised (which tests/unit/test_tidy.py sees)."""
    sources = "".join(
        path.read_text() for path in SOURCE.rglob("*.py") if path.name != "refusals.py"
    )
    unused = [code.name for code in ANSWERS_ONLY if f"Code.{code.name}" not in sources]
    assert unused == []


def test_every_code_has_one_class() -> None:
    classes = TopicRefused.__subclasses__()
    codes = [each.code for each in classes]
    assert len(codes) == len(set(codes))
    assert set(codes) == set(Code) - ANSWERS_ONLY
    assert {type(refusal) for refusal, _, _ in EXAMPLES} == set(classes)


def test_codes_are_those_of_the_specification_and_their_own_names() -> None:
    assert {code.value for code in Code} >= SPECIFIED
    assert all(code.value == code.name for code in Code)
