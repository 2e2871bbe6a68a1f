"""Checks A1 to A15 of ordered topics, without Spark: every injury of a trace is found, and nothing
where there is none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from convoymq.kernels.trace import name_hash
from convoymq.model import trace as words
from convoymq.spark.audit.coverage import QueueFacts
from convoymq.spark.audit.findings import ORDINAL_BITS, Columns, FindingRow, Findings
from convoymq.spark.audit.invariants import PROMISES, Invariant
from convoymq.spark.audit.topics import (
    control,
    effects,
    job,
    keys,
    partitions,
    rules,
    sessions,
)
from convoymq.spark.audit.topics.scope import TopicScope, scope_of
from tests.unit.trace.topic_injuries import (
    INJURIES,
    ROUND_INJURIES,
    Copy,
    Original,
    Rows,
    acknowledged_and_never_delivered,
    delivered_after_its_acknowledgement,
    delivered_when_the_lease_was_over,
    lost,
    never_applied,
)
from tests.unit.trace.topic_support import GROUP, run_round, run_weak

PUBLISHERS = (words.PUBLISHED, words.TAGGED, words.PUBLISHER)
NAME = "plain"


class PlainAudit:
    """The steps of `topics.job.TopicJob` for one topic, with its rows in memory."""

    def __init__(self, copy: Copy, groups: dict[int, int], *, whole: bool = True) -> None:
        self.violations: dict[Invariant, int] = defaultdict(int)
        self.unproved: dict[Invariant, int] = defaultdict(int)
        self._seen: dict[int, rules.Seen] = defaultdict(rules.Seen)
        self._parts = {
            pid: self._prepared(rows, groups[pid]) for pid, rows in copy.partitions.items()
        }
        routes = self._prepared(copy.routes, 0)
        every = [row for rows in (routes, *self._parts.values()) for row in rows]
        facts = [self._facts(group, words.PARTITION_TYPE, whole) for group in groups.values()]
        facts.append(self._facts(0, words.TOPICS_TYPE, whole))
        known = control.topics_facts(
            [row for row in every if row["kind"] in control.CONTROL_KINDS], facts, ["host"]
        )
        topics = {topic.name: number for number, topic in known.topics.items()}
        sinks = [(topics[NAME], name_hash(GROUP.encode()))] if copy.effects else []
        self.scope: TopicScope = scope_of(known, sinks)
        rows = self._follow_partitions(groups)
        for line in (*copy.effects, *copy.source):
            row = effects.row_of(line, topics)
            if row is not None:
                rows.append(row)
        findings = Findings()
        keys.follow_keys(columns(rows, keys.COLUMNS, keys.SORT), self.scope, findings)
        self._take(findings)
        for wrong in rules.check_topics(known, dict(self._seen)):
            self.violations[wrong.invariant] += 1

    @staticmethod
    def _facts(group: int, type: str, whole: bool) -> QueueFacts:
        start = 0 if whole else 5
        plain = SimpleNamespace(group=group, type=type, start=start, lost=0, missing={}, gaps=[])
        return cast(QueueFacts, plain)

    @staticmethod
    def _prepared(rows: Rows, group: int) -> Rows:
        return [
            {
                **row,
                "group": group,
                "order": (row["index"] << ORDINAL_BITS) + row["ordinal"],
                "first": row["position_first"],
                "part": 0,
                "told": 1,
            }
            for row in rows
        ]

    def _follow_partitions(self, groups: dict[int, int]) -> Rows:
        made: Rows = []
        for pid, rows in self._parts.items():
            known = self.scope.partitions[groups[pid]]
            findings = Findings()
            mine = [
                row
                for row in rows
                if row["kind"] in PUBLISHERS and (row["kind"] != words.PUBLISHED or row["session"])
            ]
            names = (sessions.SESSION_COLUMNS, sessions.SESSION_SORT)
            placed = sessions.follow_sessions(columns(mine, *names), self.scope, findings)
            mine = [row for row in rows if row["kind"] in (*job.OF_MESSAGES, words.HANDED_OUT)]
            mine = [row for row in mine if row["count"] > 0] + plain(placed)
            part = columns(mine, partitions.COLUMNS, (*partitions.KEYS, "order"))
            for block in partitions.follow_part(part, known, self.scope, findings):
                made += plain(block)
            runs = [
                {
                    **row,
                    "topic": known.topic,
                    "version": known.created,
                    "lp": row["first_id"],
                    "offset": row["position_first"],
                }
                for row in rows
                if row["kind"] == words.PRODUCED
            ]
            names = (sessions.PRODUCER_COLUMNS, sessions.PRODUCER_SORT)
            sessions.follow_producers(columns(runs, *names), self.scope, findings)
            self._take(findings)
        return made

    def _take(self, findings: Findings) -> None:
        for row in (row for batch in findings.take() for row in batch.to_pylist()):
            each = self._seen[row["group"]]
            match row["what"]:
                case "violation":
                    self.violations[Invariant(row["k1"])] += row["k2"]
                case "unproved":
                    self.unproved[Invariant(row["k1"])] += row["k2"]
                case _:
                    assert each.take(cast(FindingRow, row)), row


def plain(block: Columns) -> Rows:
    """Columns as rows."""
    names = list(block)
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(block[name].tolist() for name in names), strict=True)
    ]


def columns(rows: Iterable[dict[str, Any]], names: Sequence[str], sort: Sequence[str]) -> Columns:
    """Rows as sorted columns."""
    every = list(rows)
    made = {name: np.array([row[name] for row in every], np.int64) for name in names}
    at = np.lexsort([made[name] for name in reversed(sort)])
    return {name: values[at] for name, values in made.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("original"))


def audited(original: Original, injury: Callable[[Copy], None] | None, **more: Any) -> PlainAudit:
    copy = original.copy(0, NAME)
    if injury is not None:
        injury(copy)
    return PlainAudit(copy, original.groups(0), **more)


@pytest.mark.parametrize("injury", INJURIES, ids=lambda injury: injury.__name__)
def test_an_injected_violation_is_found(original: Original, injury: Callable[[Copy], None]) -> None:
    assert INJURIES[injury] in audited(original, injury).violations


def test_nothing_is_found_where_nothing_happened(original: Original) -> None:
    found = audited(original, None)
    assert (found.violations, found.unproved) == ({}, {})


@pytest.mark.parametrize(
    "injury",
    [delivered_after_its_acknowledgement, delivered_when_the_lease_was_over],
    ids=lambda injury: injury.__name__,
)
def test_a_member_that_asks_again_to_settle_is_given_nothing_again(
    original: Original, injury: Callable[[Copy], None]
) -> None:
    """Its node hears at settling what the member had, and a request may be repeated, or be late."""

    def heard(copy: Copy) -> None:
        injury(copy)
        for rows in copy.partitions.values():
            for row in rows:
                if row["kind"] == words.HANDED_OUT:
                    row["flags"] |= words.AT_SETTLING

    assert INJURIES[injury] in audited(original, injury).violations
    assert INJURIES[injury] not in audited(original, heard).violations


@pytest.mark.parametrize(
    "injury", [lost, acknowledged_and_never_delivered, never_applied], ids=lambda i: i.__name__
)
def test_what_is_missing_of_a_trace_is_no_violation(
    original: Original, injury: Callable[[Copy], None]
) -> None:
    """The trace begins later than the topic."""
    found = audited(original, injury, whole=False)
    assert found.violations.get(INJURIES[injury], 0) == 0
    assert found.unproved[INJURIES[injury]] > 0


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("round"), run_round)


def test_an_external_seal_is_no_violation(around: Original) -> None:
    found = audited(around, None)
    assert (found.violations, found.unproved) == ({}, {})


@pytest.mark.parametrize("injury", ROUND_INJURIES, ids=lambda injury: injury.__name__)
def test_a_violation_behind_an_external_seal_is_found(
    around: Original, injury: Callable[[Copy], None]
) -> None:
    assert ROUND_INJURIES[injury] in audited(around, injury).violations


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("weak"), run_weak)


def test_a_weak_topic_is_judged_by_what_it_promises(weak: Original) -> None:
    found = audited(weak, None)
    assert (found.violations, found.unproved) == ({}, {})


def test_what_a_weak_topic_does_breaks_the_promises_of_a_strict_one(weak: Original) -> None:
    def strict(copy: Copy) -> None:
        for row in copy.routes:
            if row["kind"] == words.TOPIC:
                row["flags"] = 0

    assert {
        Invariant.TOPIC_GATE,
        Invariant.TOPIC_DELIVERY_ORDER,
        Invariant.TOPIC_ONE_OWNER,
    } <= audited(weak, strict).violations.keys()


def test_a_skip_without_a_record_is_a_violation(weak: Original) -> None:
    def silent(copy: Copy) -> None:
        copy.routes[:] = [row for row in copy.routes if row["kind"] != words.SKIPPED]

    assert Invariant.TOPIC_GROUP_STEPS in audited(weak, silent).violations


def test_disorder_within_a_lease_of_a_weak_topic_is_a_violation(weak: Original) -> None:
    def swapped(copy: Copy) -> None:
        """The messages of a partition are handed out from the last to the first."""
        rows = copy.partitions[0]
        handed = [row for row in rows if row["kind"] == words.HANDED_OUT]
        times = [row["time_us"] for row in handed]
        for row, time_us in zip(handed, reversed(times), strict=True):
            row["time_us"] = time_us

    assert Invariant.TOPIC_DELIVERY_ORDER in audited(weak, swapped).violations


def test_every_check_is_injured() -> None:
    checks = [each for each in Invariant if each.name.startswith("TOPIC_")]
    assert set(INJURIES.values()) == set(checks)
    assert [PROMISES[each].title.split()[0] for each in checks] == [
        f"A{number}" for number in range(1, 16)
    ]
