"""The checks of broker groups (ADR 0192): one sweep over the rows of each queue, all replicas.

Rows of a replica are in the order of their times. From its STORED and CUT rows follows what its
queue holds; what it read out and committed is compared with that on the way. In the end, what was
confirmed is compared with what the master's replica holds.

Memory of a task: the rows of the queue that has most.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from convoymq.kernels.trace import name_hash
from convoymq.model import trace as words
from convoymq.model.trace import Footer
from convoymq.spark.audit.coverage import QueueFacts
from convoymq.spark.audit.findings import (
    EXAMPLES,
    FATE_AGAIN,
    FATE_READY,
    Columns,
    Findings,
    Sweep,
    changes,
)
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.plan import Found, Job

if TYPE_CHECKING:
    from convoymq.spark.audit.plan import Finding

MASTER = 1
"""Number of the replica with broker id 0: all masters of a group have it."""
KINDS = (words.STORED, words.CUT, words.ACCEPTED, words.READ, words.COMMITTED)
KEYS = ("group", "session", "consumer")
SORT = (*KEYS, "node", "incarnation", "time_us")
COLUMNS = (
    *SORT, "kind", "flags", "seq", "first_id", "count", "index", "position_index",
    "position_command", "position_first", "delivered",
)  # fmt: skip


class Event(NamedTuple):
    """A row of a queue."""

    node: int
    incarnation: int
    time_us: int
    kind: int
    flags: int
    seq: int
    first: int
    messages: int
    end: int
    physical: int
    life: int
    asked: int
    following: int


class Held(NamedTuple):
    """Messages that a replica holds: offsets [first, end) at [physical, physical_end)."""

    first: int
    end: int
    life: int
    physical: int
    physical_end: int


@dataclass(slots=True)
class GroupScope:
    """Coverage of the replicas' files: joined (start, end], by group and node."""

    covered: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    ends: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By group, node and incarnation: where its coverage ends."""
    names: dict[int, str] = field(default_factory=dict)

    def covers(self, group: int, node: int, start: int, end: int) -> bool:
        """Returns whether a replica's files have all of a part of the log."""
        spans = self.covered.get((group, node), ())
        return any(low <= start and end <= high for low, high in spans)

    def is_whole(self, group: int, node: int) -> bool:
        """Returns whether they have the log from its begin on, without a gap."""
        spans = self.covered.get((group, node), ())
        return len(spans) == 1 and spans[0][0] == 0


def scope_of(facts: Iterable[QueueFacts], footers: Iterable[Footer]) -> GroupScope:
    """Returns what the sweep needs to know of groups."""
    made = GroupScope()
    for footer in sorted(footers, key=lambda each: (each["incarnation"], each["number"])):
        if footer["covered"]:
            incarnation = (footer["group"], footer["node"], footer["incarnation"])
            made.ends[incarnation] = footer["covered"][-1][1]
    for each in facts:
        for part in sorted(each.ranges, key=lambda part: (part.node, part.start)):
            spans = made.covered.setdefault((each.group, part.node), [])
            if spans and part.start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], part.end))
            else:
                spans.append((part.start, part.end))
    return made


class _Blame:
    """Violations and doubts of one queue, by invariant."""

    def __init__(self, group: int, topic: str, queue: int) -> None:
        self._group = group
        self._place: dict[str, object] = {"topic": topic, "queue": queue}
        self._found: dict[tuple[str, int], tuple[int, int, list[dict[str, object]]]] = {}

    def add(self, invariant: Invariant, messages: int, *, sure: bool = True, **facts: int) -> None:
        """Notes a row; `sure`: the trace has all that matters, so that a promise is broken."""
        place = ("violation" if sure else "unproved", int(invariant))
        rows, n, examples = self._found.get(place, (0, 0, []))
        if sure and len(examples) < EXAMPLES:
            examples.append({**self._place, **facts})
        self._found[place] = rows + 1, n + messages, examples

    def enter(self, findings: Findings) -> None:
        for (what, invariant), (rows, n, examples) in self._found.items():
            findings.rows.append((
                what, self._group, invariant, rows, 0, 0, *[0] * 7, n, json.dumps(examples),
            ))  # fmt: skip


class _Replica:
    """One replica's queue, followed row by row."""

    def __init__(self, group: int, node: int, scope: GroupScope, blame: _Blame) -> None:
        self.node = node
        self._group = group
        self._scope = scope
        self._blame = blame
        self._incarnation = -1
        self.held: list[Held] = []
        self.gone: list[Held] = []
        """Of topics that were deleted."""
        self._committed: dict[int, int] = {}
        self.again = 0

    def take(self, row: Event) -> None:
        """Takes a row up."""
        if row.incarnation != self._incarnation:
            # What lies behind the last mark is recorded again, from the log.
            end = self._scope.ends.get((self._group, self.node, self._incarnation), 0)
            while self.held and self._incarnation >= 0 and self.held[-1].physical >= end:
                self.held.pop()
            self._incarnation = row.incarnation
            self._committed.clear()
        _TAKES.get(row.kind, _Replica._pass)(self, row)

    def _pass(self, row: Event) -> None:
        pass

    def _stored(self, row: Event) -> None:
        made = Held(row.first, row.first + row.messages, row.life, row.physical, row.end)
        last = self.held[-1] if self.held else None
        if last is None:
            # A queue begins with 0, but for what is older than the trace.
            if row.first and self._scope.is_whole(self._group, self.node) and not self.gone:
                self._blame.add(Invariant.GROUP_NUMBERED, row.first, node=self.node, begins=0,
                                first=row.first)  # fmt: skip
        elif row.first != last.end:
            sure = row.first < last.end or self._scope.covers(
                self._group, self.node, last.physical_end, row.end
            )
            self._blame.add(Invariant.GROUP_NUMBERED, abs(row.first - last.end), sure=sure,
                            node=self.node, expected=last.end, first=row.first)  # fmt: skip
        if last is not None and (row.physical < last.physical_end or row.life < last.life):
            self._blame.add(
                Invariant.GROUP_LOG_ORDER, row.messages, node=self.node, first=row.first,
                physical=row.physical, before=last.physical_end, life=row.life,
                life_before=last.life,
            )  # fmt: skip
        self.held.append(made)

    def _cut(self, row: Event) -> None:
        if row.flags & words.DELETED:
            self.gone += self.held
            self.held = []
            self._committed.clear()
        while self.held and self.held[-1].end > row.first:
            last = self.held.pop()
            if last.first < row.first:
                self.held.append(last._replace(end=row.first, physical_end=row.physical))

    def _read(self, row: Event) -> None:
        last = row.end
        beyond = last - (self.held[-1].end if self.held else 0)
        if beyond > 0:
            sure = self._scope.is_whole(self._group, self.node)
            self._blame.add(Invariant.GROUP_READ_STORED, min(beyond, row.messages), sure=sure,
                            node=self.node, first=row.first, last=last - 1)  # fmt: skip
        if not row.asked <= row.first < row.first + row.messages <= last <= row.following:
            self._blame.add(
                Invariant.GROUP_READ_STORED, row.messages, node=self.node, asked=row.asked,
                first=row.first, last=last - 1, next=row.following,
            )  # fmt: skip
        repeated = min(self._committed.get(row.seq, 0), last) - row.first
        if row.flags & words.REDELIVERED:
            self.again += max(0, min(repeated, row.messages))
        elif repeated > 0:
            self._blame.add(Invariant.GROUP_REPEATS_MARKED, min(repeated, row.messages),
                            node=self.node, first=row.first,
                            committed=self._committed[row.seq])  # fmt: skip

    def _commit(self, row: Event) -> None:
        self._committed[row.seq] = row.first

    def compare(self, other: _Replica) -> None:
        """Compares the places of another replica's runs with those of this one."""
        is_told = other is not self and not self.gone and not other.gone
        for part in other.held if is_told else ():
            at = bisect_right(self.held, part.first, key=lambda each: each.first) - 1
            own = self.held[at] if at >= 0 else part
            if part.first >= own.end or part.life != own.life:
                continue
            is_same = own.physical == part.physical
            is_inside = own.physical < part.physical < own.physical_end
            if not (is_same if own.first == part.first else is_inside):
                self._blame.add(
                    Invariant.GROUP_ONE_PLACE, part.end - part.first, node=other.node,
                    first=part.first, physical=part.physical, of_node=self.node,
                    there=own.physical,
                )  # fmt: skip

    def lacks(self, row: Event) -> int:
        """Returns how many messages of a confirm are not held."""
        left = row.messages
        at = max(0, bisect_right(self.held, row.first, key=lambda each: each.first) - 1)
        parts = [*self.gone, *self.held[at : at + row.messages + 1]]
        for part in parts:
            if part.first >= row.first + row.messages and part not in self.gone:
                break
            is_same = part.life == row.life and part.physical < row.end
            if is_same and row.physical < part.physical_end:
                left -= max(0, min(part.end, row.first + row.messages) - max(part.first, row.first))
        return max(0, left)


_TAKES: dict[int, Callable[[_Replica, Event], None]] = {
    words.STORED: _Replica._stored,
    words.CUT: _Replica._cut,
    words.READ: _Replica._read,
    words.COMMITTED: _Replica._commit,
}


def follow_queues(columns: Columns, scope: GroupScope, findings: Findings) -> None:
    """Looks at whole queues."""
    bounds = [*np.flatnonzero(changes(columns, KEYS)).tolist(), len(columns["group"])]
    lists = [columns[name].tolist() for name in COLUMNS]
    rows = list(zip(*lists, strict=True))
    for start, end in pairwise(bounds):
        group, topic, queue = rows[start][:3]
        _follow(group, topic, queue, [Event(*row[3:]) for row in rows[start:end]], scope, findings)


def _follow(
    group: int, topic: int, queue: int, rows: Sequence[Event], scope: GroupScope,
    findings: Findings,
) -> None:  # fmt: skip
    name = scope.names.get(topic, f"{topic & (1 << 64) - 1:016x}")
    blame = _Blame(group, name, queue)
    replicas: dict[int, _Replica] = {}
    accepted: list[Event] = []
    for row in rows:
        known = replicas.get(row.node)
        if known is None:
            known = replicas[row.node] = _Replica(group, row.node, scope, blame)
        known.take(row)
        if row.kind == words.ACCEPTED:
            accepted.append(row)
    for row in accepted:
        node = MASTER if (group, MASTER) in scope.covered else row.node
        judge = replicas.get(node) or _Replica(group, node, scope, blame)
        lost = judge.lacks(row)
        if lost:
            blame.add(
                Invariant.GROUP_CONFIRMED_STORED, lost, node=row.node, first=row.first,
                sure=scope.covers(group, node, row.physical, row.end),
                confirmed=row.messages, life=row.life, physical=row.physical,
            )  # fmt: skip
    judge = replicas.get(MASTER) or next(iter(replicas.values()))
    for other in replicas.values():
        judge.compare(other)
    blame.enter(findings)
    stored = sum(each.end - each.first for each in (*judge.held, *judge.gone))
    again = sum(each.again for each in replicas.values())
    ones = [
        ("entered", 0, 0, stored),
        ("fate", FATE_READY, 1, sum(each.end - each.first for each in judge.held)),
        ("fate", FATE_AGAIN, 1, again),
        ("confirmed", 0, 0, sum(row.messages for row in accepted)),
    ]
    for what, k1, k3, n in ones:
        if n:
            findings.rows.append((what, group, k1, 0, k3, 0, *[0] * 7, n, None))


Rows: TypeAlias = "Iterator[Sequence[Finding]]"


class BrokerGroupJob(Job):
    """The audit of broker groups: their files only."""

    def steps(self, tell: Callable[[str], None]) -> Rows:
        """See `Job`."""
        F = self.f  # noqa: N806
        tell("broker groups")
        scope = scope_of(self.facts, self.footers)
        scope.names = self.names()
        rows = self.raw.where(F.col("kind").isin(*KINDS))
        sweep = Sweep(KEYS, follow_queues, scope)
        yield self.summed(self.swept(rows, COLUMNS, KEYS, SORT, sweep)).collect()
        yield self.lives()
        yield self.escapes()
        tell("rows")
        yield self.missing()

    def names(self) -> dict[int, str]:
        """Returns names of topics and groups."""
        columns = ("session", "consumer", *words.NAME_COLUMNS)
        rows = self.raw.where(self.f.col("kind") == words.NAME).select(*columns).distinct()
        return {row["session"]: words.name_of(row.asDict()) for row in rows.collect()}

    def lives(self) -> Sequence[Finding]:
        """Returns lives that began twice."""
        F = self.f  # noqa: N806
        found = (
            self.raw.where(F.col("kind") == words.LIFE)
            .groupBy("group", "position_command")
            .agg(F.count("*").alias("n"))
            .where(F.col("n") > 1)
            .collect()
        )
        return [
            _violation(row["group"], Invariant.GROUP_ONE_LIFE, life=row["position_command"])
            for row in found
        ]

    def escapes(self) -> Sequence[Finding]:
        """Returns keys of escaped messages whose messages are stored twice, or nowhere."""
        F = self.f  # noqa: N806
        taken = F.col("kind") == words.TAKEN
        found = (
            self.raw.where(F.col("kind").isin(words.TAKEN, words.ESCAPED))
            .groupBy("seq")
            .agg(
                F.sum(F.when(taken, F.col("count")).otherwise(0)).alias("stored"),
                F.sum(F.when(taken, 1).otherwise(0)).alias("taken"),
                F.max(F.when(~taken, F.col("position_index"))).alias("target"),
                F.max("group").alias("group"),
            )
            .where((F.col("stored") > 1) | (F.col("taken") == 0))
            .collect()
        )
        told = {name_hash(each.queue.encode()) for each in self.facts
                if not (each.gaps or each.lost or each.missing)}  # fmt: skip
        doubts: dict[int, int] = defaultdict(int)
        made: list[Finding] = []
        for row in found:
            if row["stored"] > 1 or row["target"] in told:
                made.append(_violation(
                    row["group"], Invariant.GROUP_ESCAPED_ONCE, key=row["seq"],
                    stored=row["stored"],
                ))  # fmt: skip
            else:
                doubts[row["group"]] += 1
        made += [
            Found(what="unproved", group=group, k1=int(Invariant.GROUP_ESCAPED_ONCE), k2=n, n=n)
            for group, n in doubts.items()
        ]
        return made


def _violation(group: int, invariant: Invariant, **facts: int) -> Found:
    return Found(
        what="violation", group=group, k1=int(invariant), k2=1, n=1, text=json.dumps([facts])
    )
