"""Publishers of topics: what they were told is stored, and where that is (A1 to A3).

Sessions: rows published, publisher and tagged of one partition's sessions. A channel hears delivery
tags; a tagged row says which, and here it gets the offsets of these messages.

Producers: runs of sequences, of producers that have them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from convoymq.model import trace as words
from convoymq.spark.audit.findings import Array, Columns, Findings, changes, picked, whole_groups
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.topics.partitions import COLUMNS
from convoymq.spark.audit.topics.scope import TopicScope
from convoymq.spark.audit.topics.wide import batches_of

SESSION_KEYS = ("group", "session")
SESSION_SORT = (*SESSION_KEYS, "kind", "seq", "first")
SESSION_COLUMNS = (
    "group", "session", "kind", "seq", "first_id", "count", "first", "position_index", "told",
)  # fmt: skip
"""`told`: 1 where the session's node has told of all that it did."""
PRODUCER_KEYS = ("topic", "session", "lp")
PRODUCER_SORT = (*PRODUCER_KEYS, "version", "offset")
PRODUCER_COLUMNS = ("topic", "session", "lp", "version", "offset", "consumer", "seq", "count",
                    "group")  # fmt: skip
_OPEN = 1
"""Offset in the partition of a stream's first message."""


class SessionSweep:
    """For `mapInArrow`: whole sessions."""

    def __init__(self, scope: TopicScope) -> None:
        self.scope = scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields findings, and tagged runs with their offsets."""
        for columns in whole_groups(batches, SESSION_KEYS):
            findings = Findings()
            placed = follow_sessions(columns, self.scope, findings)
            yield from batches_of(findings, COLUMNS, [placed])


def follow_sessions(columns: Columns, scope: TopicScope, findings: Findings) -> dict[str, Array]:
    """Checks whole sessions; the input is sorted by `SESSION_SORT`. Returns tagged runs as rows of
    partitions: publisher as position_index, first tag as seq."""
    kind = columns["kind"]
    number = np.cumsum(changes(columns, SESSION_KEYS))
    group = columns["group"]
    whole = np.array([_whole(scope, each) for each in group.tolist()], bool)

    def example(k: int) -> dict[str, object]:
        return {
            "session": f"{int(columns['session'][k]) & (1 << 64) - 1:016x}",
            "seq": int(columns["seq"][k]),
            "first": int(columns["first_id"][k]),
            "count": int(columns["count"][k]),
        }

    # The command of each tagged range.
    published = np.flatnonzero(kind == words.PUBLISHED)
    command = (number[published] << 40) + columns["seq"][published]
    tagged = np.flatnonzero(kind == words.TAGGED)
    wanted = (number[tagged] << 40) + columns["seq"][tagged]
    at = np.minimum(np.searchsorted(command, wanted), max(len(published) - 1, 0))
    if len(published):
        source = published[at]
        there = command[at] == wanted
        end = columns["first"][tagged] + columns["count"][tagged]
        there &= end <= columns["first"][source] + columns["count"][source]
    else:
        source = np.zeros(len(tagged), np.int64)
        there = np.zeros(len(tagged), bool)
    missing = np.zeros(len(kind), bool)
    missing[tagged] = ~there
    args = (Invariant.TOPIC_ACCEPTED_STORED, group, columns["count"])
    findings.violation(*args, missing & whole, example)
    findings.violation(*args, missing & ~whole, example, what="unproved")

    # Who publishes in each session.
    publisher = np.zeros(int(number[-1]) + 1 if len(number) else 1, np.int64)
    opened = kind == words.PUBLISHER
    publisher[number[opened]] = columns["position_index"][opened]
    known = np.zeros(len(publisher), bool)
    known[number[opened]] = True
    strange = (kind == words.PUBLISHED) & ~known[number]
    told = columns["told"] != 0
    findings.violation(*args, strange & told, example)
    findings.violation(*args, strange & ~told, example, what="unproved")

    good, source = tagged[there], source[there]
    n = len(good)
    made = {name: np.zeros(n, np.int64) for name in COLUMNS}
    made["group"] = group[good]
    made["kind"][:] = words.TAGGED
    made["session"] = columns["session"][good]
    made["seq"] = columns["first_id"][good]
    made["count"] = columns["count"][good]
    made["position_index"] = publisher[number[good]]
    skipped = columns["first"][good] - columns["first"][source]
    made["first_id"] = columns["first_id"][source] + skipped + _OPEN
    return made


def _whole(scope: TopicScope, group: int) -> bool:
    known = scope.partitions.get(group)
    return known is not None and known.whole


def _repeats(scope: TopicScope, group: int) -> bool:
    known = scope.partitions.get(group)
    return known is not None and known.repeats


def follow_producers(columns: Columns, scope: TopicScope, findings: Findings) -> None:
    """Checks runs of sequences, sorted by `PRODUCER_SORT`: each continues the one before it of its
    session."""
    keys = (*PRODUCER_KEYS, "consumer")
    at = np.lexsort(
        [columns[name] for name in ("offset", "version", "consumer", *PRODUCER_KEYS[::-1])]
    )
    mine = picked(columns, at)
    same = ~changes(mine, keys)
    begin, end = mine["seq"], mine["seq"] + mine["count"]
    again = np.zeros(len(at), bool)
    gap = np.zeros(len(at), bool)
    # Behind a partition that was closed from outside sequences begin where they may.
    repeats = np.array([_repeats(scope, each) for each in mine["group"].tolist()], bool)
    again[1:] = same[1:] & (begin[1:] < end[:-1]) & ~repeats[1:]
    gap[1:] = same[1:] & (begin[1:] > end[:-1]) & ~repeats[1:]

    def example(k: int) -> dict[str, object]:
        names = ("session", "consumer", "lp", "seq", "count", "version", "offset")
        return {name: int(mine[name][k]) for name in names}

    group, count = mine["group"], mine["count"]
    whole = np.array([_whole(scope, each) for each in group.tolist()], bool)
    for invariant, wrong in (
        (Invariant.TOPIC_STORED_ONCE, again),
        (Invariant.TOPIC_LOG_ORDER, gap),
    ):
        findings.violation(invariant, group, count, wrong & whole, example)
        findings.violation(invariant, group, count, wrong & ~whole, example, what="unproved")
